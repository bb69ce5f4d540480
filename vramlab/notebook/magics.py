"""``%load_ext vramlab``: ``%%vram`` says what a cell did to the memory, ``%vram`` what lives now."""

from __future__ import annotations

import ast
import dataclasses
import io
import itertools
import re
import tokenize
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from vramlab.devices import choose_device
from vramlab.gpus import GPU, gpu
from vramlab.memory.alive import SHOWN as ALIVE_SHOWN
from vramlab.memory.alive import alive
from vramlab.memory.cell import SHOWN, CellMemory
from vramlab.memory.recorder import record
from vramlab.memory.report import OutOfMemoryReport
from vramlab.memory.trace import MemoryTrace
from vramlab.units import parse_bytes


@magics_class
class VramMagics(Magics):
    """The magics of vramlab."""

    shell: Any  # never None here

    @no_var_expand
    @magic_arguments()
    @argument(
        "-d",
        "--device",
        nargs="+",
        default=["auto"],
        metavar="DEVICE",
        help="%%%%vram: run the cell for a virtual card, such as -d 'RTX 4090': in another process, where 'cuda', .cuda() and "
        "torch.cuda mean that card and tensors have no data. Variables it uses are copied there, and its own do not come back. "
        "Or whose bytes are counted: cpu, cuda, cuda:1 (default: CUDA if there is some, else the CPU).",
    )
    @argument(
        "-u",
        "--in-use",
        nargs="+",
        default=["0"],
        metavar="SIZE",
        help="%%%%vram -d CARD: what others hold of the card, such as '0.8 GiB'.",
    )
    @argument(
        "-l",
        "--limited",
        action="store_true",
        help="%%%%vram -d CARD: raise the out-of-memory error where the card is full. Without it the cell goes on, to see its whole peak.",
    )
    @argument("-t", "--tensors", action="store_true", help="%%vram: a line a tensor instead of a line a variable.")
    @argument("-n", "--lines", type=int, default=None, help=f"How many holders are listed (default: {SHOWN} and {ALIVE_SHOWN}).")
    @argument("-o", "--output", metavar="NAME", default=None, help="Keep what is shown in a variable of this name.")
    @argument("-q", "--quiet", action="store_true", help="Show nothing, for use with -o.")
    @line_cell_magic
    def vram(self, line: str, cell: str | None = None) -> Any:
        """Memory of a cell, or of all that lives.

        %%vram on top of a cell: its peak, what it left behind, and which lines held the memory at the peak. The cell runs as
        without it: its value is shown, its errors are raised, and an out-of-memory error is explained.

        %vram alone: what lives now, by variable; each storage once, so tied weights and views count under the first name.
        """
        options = parse_argstring(self.vram, line)
        if options.lines is not None and options.lines < 1:
            raise UsageError(f"At least 1 line is listed, got -n {options.lines}.")
        if options.output is not None and not options.output.isidentifier():
            raise UsageError(f"-o takes the name of a variable, got {options.output!r}.")
        if cell is None:
            self._show(alive(by_tensor=options.tensors, shown=options.lines or ALIVE_SHOWN), options)
            return None
        __tracebackhide__ = True
        device = _unquoted(options.device)
        if not _DEVICE.fullmatch(device):
            return self._planned(cell, _card(device), options)
        return self._measured(cell, _counted(device), options)

    # Running a cell here

    def _measured(self, cell: str, device: torch.device | None, options: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        body, last = self._compiled(cell)
        cuda = device if device is not None and device.type == "cuda" else None
        before = torch.cuda.memory_allocated(cuda) if cuda is not None else None
        recorder, ended, report = record(device=device), "", None
        try:
            with recorder:
                exec(body, self.shell.user_ns)
                value = eval(last, self.shell.user_ns) if last is not None else None
                return None if _silent(cell) else value
        except BaseException as error:  # itself is not kept: its frames keep what the cell has made
            ended, report = f"{type(error).__name__}: {error}".partition("\n")[0], getattr(error, "report", None)
            raise
        finally:
            self._show(_memory(recorder.trace, before, cuda, ended, options.lines or SHOWN), options)
            self._explain(report, options)

    def _compiled(self, cell: str) -> tuple[Any, Any]:
        """Code of a cell's statements, and of its last expression."""
        source, file = self._source(cell)
        tree = ast.parse(source, file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        compiled = self.shell.compile  # with the notebook's own __future__ imports
        try:
            return compiled(tree, file, "exec"), compiled(ast.Expression(last.value), file, "eval") if isinstance(last, ast.Expr) else None
        except SyntaxError as error:
            if "await" in str(error):
                raise UsageError("%%vram follows code that runs in one go, and this cell awaits: do that in a cell without it.") from None
            raise

    def _source(self, cell: str) -> tuple[str, str]:
        """The cell as Python, with its lines where they stand below ``%%vram``, and the name it has in tracebacks."""
        blank = itertools.takewhile(lambda line: not line.strip(), cell.splitlines())  # IPython leaves those out
        source = "\n" * (1 + len(list(blank))) + self.shell.transform_cell(cell)
        number = len(self.shell.user_ns.get("In", [])) - 1  # of this cell: the shell's own count is ahead of it
        return source, self.shell.compile.cache(source, number, raw_code=source)

    # Planning a cell

    def _planned(self, cell: str, card: GPU, options: Any) -> Any:
        __tracebackhide__ = True
        from vramlab.virtual.cells import plan_cell

        source, file = self._source(cell)
        if found := re.search(r"get_ipython\(\)\.(run_\w+_magic|system|getoutput)\b.*", source):
            raise UsageError(f"A cell for a virtual card is plain Python, for it runs in another process, got {found[0]}: take it out.")
        held, flags = _size(options.in_use), self.shell.compile.flags
        try:
            memory = plan_cell(source, self.shell.user_ns, card, file=file, in_use=held, limited=options.limited, flags=flags)
        except Exception as error:
            self._explain(getattr(error, "report", None), options)
            raise error.with_traceback(None)  # noqa: B904  # it has the cause it came with, which says where in the cell
        self._show(dataclasses.replace(memory, shown=options.lines or SHOWN), options)
        if memory.value and not _silent(cell):
            print(memory.value)
        return None

    def _show(self, thing: Any, options: Any) -> None:
        if options.output is not None:
            self.shell.user_ns[options.output] = thing
        if not options.quiet:
            display(thing)

    def _explain(self, report: Any, options: Any) -> None:
        if isinstance(report, OutOfMemoryReport) and not options.quiet:
            display(report)


def _memory(trace: MemoryTrace, before: int | None, cuda: torch.device | None, ended: str, shown: int) -> CellMemory:
    """What a recorder saw of a cell, and on CUDA what the allocator counted."""
    if before is None or cuda is None or trace.counters is None:
        start, end = trace.breakdown("start").total, trace.breakdown("end").total
        return CellMemory(trace.device, trace, start, trace.peak, end, error=ended, shown=shown)
    name, now = f"{trace.device} ({torch.cuda.get_device_name(cuda)})", torch.cuda.memory_allocated(cuda)
    return CellMemory(name, trace, before, trace.counters.allocated, now, trace.counters.reserved, error=ended, shown=shown)


_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")  # cards have digits in their names


def _unquoted(words: list[str]) -> str:
    """What has a space in it may be written with quotes or without."""
    return " ".join(words).strip("\"'")


def _silent(cell: str) -> bool:
    """Whether a cell ends with a semicolon, which is a notebook's way not to show its value."""
    kinds = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    try:
        tokens = [token for token in tokenize.generate_tokens(io.StringIO(cell).readline) if token.type not in kinds]
    except (tokenize.TokenError, SyntaxError):  # magics are no Python
        return cell.rstrip().endswith(";")
    return bool(tokens) and tokens[-1].string == ";"


def _size(words: list[str]) -> int:
    try:
        return parse_bytes(_unquoted(words))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _counted(device: str) -> torch.device | None:
    """Whose bytes are counted; None: where most are allocated."""
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    try:
        return choose_device(device)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _card(name: str) -> GPU:
    try:
        return gpu(name)
    except ValueError as error:
        raise UsageError(f"A device is 'auto', 'cpu', 'cuda', 'cuda:1' or a card. {error}") from None


def load(shell: InteractiveShell) -> None:
    """What ``%load_ext vramlab`` does."""
    shell.register_magics(VramMagics)
