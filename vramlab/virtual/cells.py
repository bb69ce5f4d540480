"""A notebook's cell on a virtual card: what it uses travels to the planner process, and what it held comes back."""

from __future__ import annotations

import ast
import builtins
import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from vramlab.gpus import GPU
from vramlab.memory import allocator as rules
from vramlab.memory import steady
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.cell import CellMemory
from vramlab.memory.trace import MemoryTrace
from vramlab.tensors import consists_of_tensors
from vramlab.virtual import backend, planner, travel
from vramlab.virtual.cuda_names import cuda_names
from vramlab.virtual.device import VirtualGPU, virtual_gpu

SMALL = 1 << 20  # bytes of a tensor whose values travel along from a card


def plan_cell(
    source: str,
    space: dict[str, Any],
    card: GPU,
    *,
    file: str = "<cell>",
    in_use: int = 0,
    limited: bool = False,
    flags: int = 0,
) -> CellMemory:
    """Run a cell on a virtual card in the planner process, where ``"cuda"`` means that card.

    Args:
        source: plain Python, without magics.
        space: the notebook's variables; those that the cell uses are copied, so they stay as they are.
        file: the name of the cell in tracebacks.
        in_use: bytes of the card that others hold.
        limited: True: what does not fit raises as on the card; False: it goes on, to see the whole peak.
        flags: of the compiler, for ``from __future__ import``.

    Parameters of models, and tensors on CUDA, travel without their values; those of whole numbers on CUDA, and all other tensors
    on the CPU, with them.

    Raises:
        Exception: what the cell raises. A NameError says which variable could not travel.
    """
    names = names_used(source)
    variables = {name: value for name, value in space.items() if name in names}
    payload, stayed = _pack(variables, space)
    try:
        memory = planner.shared().call(_run, payload, source, file, card, in_use, limited, flags)
    except NameError as error:
        for name, why in stayed.items():
            if f"name {name!r} is not defined" in str(error):
                error.add_note(f"{name} stayed in the notebook: {why} Make it in the cell.")
        raise
    return replace(memory, stayed=stayed)


def names_used(source: str) -> set[str]:
    """The names that a cell takes from outside: used before its own statements have certainly set them."""
    made: set[str] = set()
    used: set[str] = set()
    for statement in ast.parse(source).body:
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        used |= {node.id for node in nodes if not isinstance(node.ctx, ast.Store)} - made
        used |= {name for node in ast.walk(statement) if isinstance(node, ast.Global) for name in node.names} - made
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            used |= {statement.target.id} - made
        made |= set(_made_by(statement))
    return used - set(vars(builtins))


def _made_by(statement: ast.stmt) -> Iterator[str]:
    """Names that are set after this statement, whatever happened in it."""
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)


# In the notebook's process


def _pack(variables: dict[str, Any], space: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """The variables as bytes; those that cannot travel are left out, with the reason."""
    try:
        return _pickled(variables, space), {}
    except Exception:
        stayed = {}
        for name, value in list(variables.items()):
            try:
                _pickled({name: value}, space)
            except Exception as error:
                stayed[name] = f"{type(error).__name__}: {error}".rstrip(".") + "."
                del variables[name]
        return _pickled(variables, space), stayed


def _pickled(variables: dict[str, Any], space: dict[str, Any]) -> bytes:
    """A function of the notebook takes its globals along: so functions that travelled see what the cell sets."""
    anchor = types.FunctionType((lambda: None).__code__, space, "anchor")
    anchor.__module__ = "__main__"
    file = io.BytesIO()
    _Pickler(file).dump((anchor, variables))
    return file.getvalue()


class _Pickler(travel._Pickler):
    """Sends most tensors without their data, see `plan_cell`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._storages: dict[int, _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._reduced(obj)
        return super().reducer_override(obj)

    def _reduced(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, FakeTensor) or consists_of_tensors(type(tensor)) or tensor.layout is not torch.strided:
            raise TypeError(f"a {type(tensor).__name__} of layout {tensor.layout} does not travel")
        if not tensor.is_leaf:
            raise TypeError("it was computed with gradients in another cell, and its graph does not travel")
        parameter = isinstance(tensor, nn.Parameter)
        if tensor.device.type == "cpu" and not parameter:
            return NotImplemented  # as ever
        whole = tensor.untyped_storage()
        storage = self._storages.setdefault(whole._cdata, _Storage(whole.nbytes(), tensor.device.type))
        known = None
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.nbytes <= SMALL:
            known = tensor.detach().cpu()
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return _arrived, (storage, layout, parameter, tensor.requires_grad, known, tensor.grad)


class _Storage:
    """Stands for the memory of tensors that travel without it: they share it there as they did here."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes, self.device = nbytes, device

    def tensor(self) -> torch.Tensor:
        if not hasattr(self, "made"):
            on_card = self.device != "cpu"
            where = torch.device(backend.NAME, 0) if on_card else torch.device("cpu")
            self.made = torch.empty(self.nbytes, dtype=torch.uint8, device=where, pin_memory=not on_card)
        return self.made


# In the planner process


def _arrived(storage: _Storage, layout: Any, parameter: bool, requires_grad: bool, known: torch.Tensor | None, grad: Any) -> torch.Tensor:
    dtype, shape, stride, offset = layout
    made = storage.tensor().view(dtype).as_strided(shape, stride, offset)
    if known is not None:
        made.copy_(known)
    if parameter:
        made = nn.Parameter(made, requires_grad)
        backend.innermost().parameter_moved(made)
    elif requires_grad:
        made = made.detach().requires_grad_()
    if grad is not None:
        made.grad = grad
    return made


def _run(payload: bytes, source: str, file: str, card: GPU, in_use: int, limited: bool, flags: int) -> CellMemory:
    with virtual_gpu(card, in_use=in_use, limited=limited) as gpu, _switches(), cuda_names(gpu):
        anchor, variables = pickle.loads(payload)
        space = anchor.__globals__
        space.update(variables)
        models = [value for value in variables.values() if isinstance(value, nn.Module)]
        del anchor, variables
        if len(models) == 1:
            gpu.name_modules(models[0])
        del models
        before, seeds = gpu.allocated, len(gpu.trace)
        value = execute(source, file, space, flags)
        text = "" if value is None else repr(value).replace("FakeTensor(...", "tensor(...").replace(backend.NAME, "cuda")
        del value
        events = replace(gpu.trace.events, seeds=seeds)
        allocated, reserved = gpu.peaks()
        return CellMemory(
            device=card.name,
            trace=MemoryTrace(events, card.name),
            before=before,
            allocated=allocated,
            after=gpu.allocated,
            reserved=reserved,
            card=card,
            in_use=in_use,
            fits=_fits(gpu, events, reserved),
            value=text,
            reads=gpu.reads,
            notes=gpu.notes,
        )


@contextmanager
def _switches() -> Iterator[None]:
    """The process stays warm for others: what a cell switches for good in a process of its own is switched back."""
    flags = [(owner, name, getattr(owner, name)) for owner, name in _FLAGS]
    dtype, device, environment = torch.get_default_dtype(), torch.get_default_device(), dict(os.environ)
    deterministic, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cuda = torch.backends.cuda
    attention = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "cudnn", "math")}
    half, anomaly = cuda.fp16_bf16_reduction_math_sdp_allowed(), (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    hooks = [(registered, dict(registered)) for registered in _global_hooks()]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for owner, name, value in flags:  # the general ones first: those that inherit follow
            if getattr(owner, name) != value:
                setattr(owner, name, value)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
        for name, enabled in attention.items():
            getattr(cuda, f"enable_{name}_sdp")(enabled)
        cuda.allow_fp16_bf16_reduction_math_sdp(half)
        torch.autograd.set_detect_anomaly(*anomaly)
        for registered, before in hooks:
            registered.clear()
            registered.update(before)
        os.environ.clear()
        os.environ.update(environment)


def _global_hooks() -> list[dict[Any, Any]]:
    """Where torch keeps the hooks that run around every module and every optimizer."""
    modules = [sys.modules[name] for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
    return [kept for module in modules for name, kept in vars(module).items() if name.startswith("_global_") and isinstance(kept, dict)]


_FLAGS: list[tuple[Any, str]] = [
    (torch.backends, "fp32_precision"),
    (torch.backends.cuda.matmul, "fp32_precision"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    *((torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "fp32_precision")),
    (torch.backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    (torch.backends.cudnn.rnn, "fp32_precision"),
]


def execute(source: str, file: str, space: dict[str, Any], flags: int = 0) -> Any:
    """Run a cell and return the value of its last expression, None without one."""
    lines = source.splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)  # tracebacks show lines
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec", flags, dont_inherit=True), space)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), file, "eval", flags, dont_inherit=True), space)


def _fits(gpu: VirtualGPU, events: Any, reserved: int) -> bool:
    """Whether the card is enough, if the allocator gives back what it has cached before it gives up."""
    if reserved <= gpu.capacity:
        return True
    rows = steady.rows_of(events)
    try:
        CachingAllocator(gpu.capacity).replay(rows.events, rows.moves, rows.streams)
    except rules.OutOfMemoryError:
        return False
    return True
