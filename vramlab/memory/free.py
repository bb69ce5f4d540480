"""free(): give memory back after an out-of-memory error without a restart, and say who holds the rest."""

from __future__ import annotations

import gc
import html
import sys
import time
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramlab.tensors import storages_of
from vramlab.units import format_bytes

OTHERS = "others"
PATIENCE = 0.8  # seconds for the search of names; what is not found by then is called others
SHOWN = 10  # lines of the report


@dataclass(frozen=True)
class Holder:
    """Something that holds memory: ``name`` is a variable or its attribute, ``kind`` its class. ``nbytes`` are bytes."""

    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True)
class Freed:
    """What `free` did. ``before`` and ``after`` are bytes of all tensors on ``device``."""

    device: str
    before: int
    after: int
    holders: tuple[Holder, ...]
    """Who holds what is left, largest first; the variables of the user come by name, the rest as others."""
    dropped: tuple[str, ...]
    """What was let go of."""
    reserved: tuple[int, int] | None = None
    """On CUDA what the caching allocator held before and after, in bytes: with context and others what nvidia-smi shows."""

    @property
    def freed(self) -> int:
        """Bytes that were given back."""
        return self.before - self.after

    @property
    def named(self) -> int:
        """Bytes that variables of the user hold."""
        return sum(holder.nbytes for holder in self.holders if holder.name != OTHERS)

    def _lines(self) -> list[str]:
        lines = [
            f"{format_bytes(self.freed)} freed on {self.device}: {format_bytes(self.before)} were held, {format_bytes(self.after)} are."
        ]
        if self.reserved is not None:
            lines.append(f"Reserved by PyTorch: {format_bytes(self.reserved[0])} before, {format_bytes(self.reserved[1])} now.")
        if self.dropped:
            lines.append(f"Let go of: {', '.join(self.dropped)}.")
        return lines

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(format_bytes(h.nbytes), f"{h.name} ({h.kind})") for h in self.holders[:SHOWN]]
        if rest := self.holders[SHOWN:]:
            rows.append((format_bytes(sum(h.nbytes for h in rest)), f"{len(rest)} smaller ones"))
        return rows

    def __repr__(self) -> str:
        lines = self._lines()
        if self.holders:
            lines += ["Still held, until you del it or let it go:", *(f"  {size:>11}  {name}" for size, name in self._rows())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cell = "<tr><td style='text-align:right'>{}</td><td style='text-align:left'>{}</td></tr>"
        rows = "".join(cell.format(size, html.escape(name)) for size, name in self._rows())
        table = f"<b>still held, until you del it or let it go</b><table>{rows}</table>" if rows else ""
        return f"<p>{'<br>'.join(map(html.escape, self._lines()))}</p>{table}"


def free() -> Freed:
    """Give memory back that nobody asked to keep, after an out-of-memory error say, and name what still holds the rest.

    Lets go of the last error and the variables of its functions, of a notebook's outputs (``Out``, ``_``, ``_3``) that hold
    tensors, of what autograd keeps of a failed backward, of garbage in cycles, and on CUDA of cuBLAS's workspaces and cached
    blocks. Variables of yours are left alone, and so is an error that you keep; ``del`` those that the report names. ``%debug``
    has nothing to look at afterwards.

    Returns:
        A `Freed`. On CUDA (if it is in use) bytes are those of the caching allocator on all cards. On the CPU they are those
        of every storage that a Python object or a graph of autograd leads to, each counted once.

    Takes about a second at most: what is not found by then is called others.
    """
    cuda = torch.cuda.is_initialized()
    before, reserved = _held(cuda), _reserved(cuda)
    dropped = [*_drop_outputs(), *_drop_last_error()]
    forget_backward()
    gc.collect()
    if cuda:
        torch._C._cuda_clearCublasWorkspaces()  # the next product takes them again
        torch.cuda.empty_cache()
    after = _held(cuda)
    holders = tuple(_holders(after, "cuda" if cuda else "cpu"))
    return Freed("CUDA" if cuda else "cpu", before, after, holders, tuple(dropped), (reserved, _reserved(cuda)) if cuda else None)


def release(error: BaseException | None) -> None:
    """Let go of the variables of functions that have ended with this error, which it keeps as long as somebody keeps it."""
    todo = [error]
    done: set[int] = set()
    while todo:
        link = todo.pop()
        if link is not None and id(link) not in done:
            done.add(id(link))
            traceback.clear_frames(link.__traceback__)
            todo += [link.__cause__, link.__context__]


def forget_backward() -> None:
    """What an exception in backward left in autograd's queue stays there until this thread's next backward: here is one."""
    with torch.enable_grad(), torch._C._DisableTorchDispatch():  # no operator of the user's code: nobody counts or refuses it
        torch.zeros((), device="cpu", requires_grad=True).backward()


# Letting go


def _drop_last_error() -> Iterator[str]:
    """What the interpreter and IPython keep of the last error that nobody caught."""
    errors = [getattr(sys, name) for name in ("last_exc", "last_value") if isinstance(getattr(sys, name, None), BaseException)]
    shell = _shell()
    result = getattr(shell, "last_execution_result", None)
    errors += [e for e in (getattr(result, "error_in_exec", None), getattr(result, "error_before_exec", None)) if e is not None]
    running = sys.exc_info()[1]  # free() in an except block: its error is the user's
    for error in errors:
        if error is not running:
            release(error)
    last = getattr(sys, "last_traceback", None)
    if last is not None and (running is None or last is not running.__traceback__):
        traceback.clear_frames(last)
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    if shell is not None:
        shell.last_execution_result = None
        if getattr(getattr(shell, "InteractiveTB", None), "tb", None) is not None:
            shell.InteractiveTB.tb = None
    if errors:
        yield f"the last error ({type(errors[0]).__name__})"


def _drop_outputs() -> Iterator[str]:
    """A notebook keeps each cell's value in ``Out``, and the last ones as ``_``, ``__`` and ``___``."""
    shell = _shell()
    if shell is None:
        return
    space, outputs = shell.user_ns, shell.user_ns.get("_oh", {})
    held = [number for number, value in outputs.items() if _leads_to_tensors(value)]
    for number in held:
        value = outputs.pop(number)
        space.pop(f"_{number}", None)
        shell.user_ns_hidden.pop(f"_{number}", None)
        for name in ("_", "__", "___"):
            if space.get(name) is value:
                space[name] = ""
            if shell.user_ns_hidden.get(name) is value:
                shell.user_ns_hidden[name] = ""
            if getattr(shell.displayhook, name, None) is value:
                setattr(shell.displayhook, name, "")
    if held:
        names = ", ".join([*(f"Out[{number}]" for number in held[:5]), *(["..."] if len(held) > 5 else [])])
        yield f"{len(held)} {'output' if len(held) == 1 else 'outputs'} ({names})"


def _shell() -> Any:
    """IPython's shell, if this is its process."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


# Counting


def _held(cuda: bool) -> int:
    if cuda:
        return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))
    return sum(_everything("cpu").values())


def _reserved(cuda: bool) -> int:
    return sum(torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())) if cuda else 0


def _everything(device: str) -> dict[int, int]:
    """Bytes by storage of all tensors that the garbage collector knows, and of what their graphs keep."""
    search = _Search(device, float("inf"))
    search.tensors(_alive())
    return search.found


def _alive() -> list[torch.Tensor]:
    """All tensors that the garbage collector knows."""
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]  # isinstance would ask strange objects


class _Search:
    """Finds storages on one kind of device; what was found once is not found again.

    Args:
        until: when to give up, on the clock of ``time.monotonic``.
    """

    def __init__(self, device: str, until: float) -> None:
        self._device, self._until = device, until
        self._globals = {id(sys.modules)} | {
            id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)
        }
        if (shell := _shell()) is not None:
            self._globals |= {id(shell.user_ns), id(shell.user_global_ns), id(shell.user_ns_hidden)}
        self.found: dict[int, int] = {}  # bytes by storage
        self._seen: set[int] = set()
        self._nodes: set[int] = set()  # of autograd's graphs
        self._kept: list[Any] = []  # what is looked at must live on, or another gets its id

    def tensors(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of these tensors, their gradients, and what autograd's graphs behind them keep."""
        before = sum(self.found.values())
        nodes: list[Any] = []
        for tensor in tensors:
            self._tensor(tensor, nodes)
        while nodes and time.monotonic() < self._until:
            node = nodes.pop()
            if node is None or id(node) in self._nodes:
                continue
            self._nodes.add(id(node))
            self._kept.append(node)
            for tensor in _saved(node):
                self._tensor(tensor, nodes)
            nodes += [following for following, _ in node.next_functions]
        return sum(self.found.values()) - before

    def _tensor(self, tensor: torch.Tensor, nodes: list[Any]) -> None:
        with suppress(RuntimeError, NotImplementedError):  # tensors without a storage, of functorch say
            if tensor.device.type == self._device:
                self.found |= {storage._cdata: storage.nbytes() for storage in storages_of(tensor)}
            if tensor.grad_fn is not None:
                nodes.append(tensor.grad_fn)
            elif tensor.is_leaf and tensor.grad is not None:
                self._tensor(tensor.grad, nodes)

    def behind(self, value: Any) -> int:
        """Bytes of what an object leads to, but not through modules of Python, classes and globals."""
        found: list[torch.Tensor] = []
        todo = [value]
        while todo and time.monotonic() < self._until:
            item = todo.pop()
            if id(item) in self._seen or issubclass(type(item), _NO_HOLDERS) or id(item) in self._globals:
                continue
            self._seen.add(id(item))
            self._kept.append(item)
            if issubclass(type(item), torch.Tensor):
                found.append(item)
            if isinstance(item, types.FunctionType):
                todo += [item.__closure__, item.__defaults__, item.__kwdefaults__]
            else:
                todo += gc.get_referents(item)
        return self.tensors(found)


_NO_HOLDERS = (types.ModuleType, type, str, bytes, int, float, type(None), torch.dtype, types.CodeType, types.FrameType)


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node of autograd's graph keeps, as they are kept: unpacking would run others' code."""
    for name in dir(node):
        if name.startswith("_raw_saved"):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, list | tuple) else (saved,):
                with suppress(RuntimeError):
                    if isinstance(one.data, torch.Tensor):
                        yield one.data
    if isinstance(getattr(node, "variable", None), torch.Tensor):
        yield node.variable  # a leaf, into which a gradient goes


def _leads_to_tensors(value: Any) -> bool:
    search = _Search("cpu", time.monotonic() + PATIENCE / 4)
    search.behind(value)
    return any(issubclass(type(item), torch.Tensor | nn.Module) for item in search._kept)


# Naming


def _holders(held: int, device: str) -> Iterator[Holder]:
    """The user's variables by what they hold, largest first, then what nobody's variable holds."""
    search = _Search(device, time.monotonic() + PATIENCE)
    named: list[Holder] = []
    for name, value in sorted(_variables(), key=lambda pair: _rank(pair[1])):
        for part, held_by in _parts(name, value):
            if nbytes := search.behind(held_by):
                named.append(Holder(part, type(held_by).__name__, nbytes))
    yield from sorted(named, key=lambda holder: -holder.nbytes)
    rest = held - sum(holder.nbytes for holder in named)
    if rest > 0:
        yield Holder(OTHERS, _describe(search, device), rest)


def _variables() -> list[tuple[str, Any]]:
    shell = _shell()
    space = shell.user_ns if shell is not None else vars(sys.modules["__main__"])
    hidden = shell.user_ns_hidden if shell is not None else {}
    ours = {"In", "Out", "_oh", "_ih", "_dh", "get_ipython"}
    return [(n, v) for n, v in list(space.items()) if not (n.startswith("__") and n.endswith("__")) and n not in ours and n not in hidden]


def _rank(value: Any) -> int:
    """A model's parameters are the model's, whatever else refers to them."""
    order = (nn.Module, torch.Tensor, torch.optim.Optimizer)
    return next((i for i, kind in enumerate(order) if issubclass(type(value), kind)), len(order))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A variable's own attributes or items by name, where it is no tensor, module or optimizer, then the variable."""
    if _rank(value) == 3 and not isinstance(value, types.ModuleType | type):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            inner = sorted(attributes.items(), key=lambda pair: _rank(pair[1]))
            yield from ((f"{name}.{attribute}", part) for attribute, part in inner)
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", part) for key, part in list(value.items()) if isinstance(key, str | int))
    yield name, value


def _describe(search: _Search, device: str) -> str:
    """By what the largest tensors are held that no variable leads to."""
    sizes = [(t, sum(s.nbytes() for s in storages_of(t) if s._cdata not in search.found)) for t in _alive() if t.device.type == device]
    sizes = sorted((pair for pair in sizes if pair[1]), key=lambda pair: -pair[1])[:3]
    kinds: dict[str, None] = {}
    for tensor, _ in sizes:
        if time.monotonic() < search._until:
            # What holds it here: this function, and a pair in the list.
            holders = (h for h in gc.get_referrers(tensor) if not isinstance(h, types.FrameType) and all(h is not pair for pair in sizes))
            kinds |= dict.fromkeys(map(_kind, holders))
    return f"held by {', '.join(list(kinds)[:4])}" if kinds else "held below Python, or not found in time"


def _kind(holder: Any) -> str:
    if isinstance(holder, dict):
        module = next((name for name, m in list(sys.modules.items()) if getattr(m, "__dict__", None) is holder), None)
        return f"module {module}" if module else "a dict"
    return f"a {type(holder).__name__}"
