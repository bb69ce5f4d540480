"""record(): follow every storage of a piece of training code, and say afterwards what each one was for."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from vramlab.devices import PeakCounters, explain_out_of_memory
from vramlab.memory.ledger import Ledger, Storage
from vramlab.memory.now import Now
from vramlab.memory.trace import Category, MemoryTrace, Phase
from vramlab.tensors import consists_of_tensors, storages_of, tensors_in


def record(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> Recorder:
    """Record the memory of any PyTorch code: ``with record(model, optimizer) as trace: ...``.

    The trace can be read during and after the block. Recorders nest; each object records once. An exception inside
    keeps what was recorded until then; CUDA's out-of-memory error gets a ``report`` of who held the memory.

    Args:
        model: its parameters, buffers and gradients are counted from the start and its module names are used.
        optimizer: its state is counted from the start. Without it, state is recognised when an optimizer steps.
        device: whose bytes ``trace`` counts. None: where the model's (or optimizer's) parameters are, else wherever
            most bytes are allocated.

    Returns:
        A context manager whose ``as`` value is a `MemoryTrace`.

    Raises:
        ValueError: the model is compiled: its memory is allocated below the operators that a recorder sees.
        TypeError: no module, no optimizer.
        RuntimeError: the same recorder is entered twice.

    Categories are decided by lifetime: what ends as some parameter's ``grad`` is a gradient, what an optimizer keeps
    is optimizer state, what is made in forward (or in a recomputed forward) and released later is an activation, what
    exists when the model is called is an input, a low-precision copy of a parameter is a weight copy, the rest is
    temporary. In a rank gradients that are views of DDP's buckets are buckets, parameters that FSDP has made whole are
    gathered parameters, and what it sends and receives is communication.

    Limits. Not seen: what an operator allocates and releases inside itself (operands that a bf16 product on the CPU packs anew, the fused
    path of nn.TransformerEncoderLayer in evaluation, the functions that torch.cond runs, the copies that gloo makes of what it sends),
    and memory that no operator makes (the 5,056 bytes of generator state that checkpointing keeps for each block). A tensor that existed
    before and first occurs after an optimizer step is counted from the end of that step; code in other threads is not seen; memory that
    comes from outside torch later (``from_dlpack``, ``frombuffer``) counts from the start. Memory that is shared with NumPy counts for
    each tensor made from it. Compiled code that runs inside the block runs eagerly there.

    While anything looks on, autograd copies where it otherwise works in place. The trace leaves those copies out of
    sums of gradients and of indexing (not of ``cumprod`` and ``prod``): it is that of a run nobody records. CUDA's own
    counters over the block include them.
    """
    return Recorder(model, optimizer, device)


class Recorder(TorchDispatchMode):
    """What `record` returns. It sees each operator below autograd; weak references on storages see the releases."""

    supports_higher_order_operators = True  # without it torch.cond and flex_attention refuse to run under a mode

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device | str | None) -> None:
        super().__init__()
        _refuse_others(model, optimizer)
        refuse_compiled(model)
        self._model, self._optimizer = model, optimizer
        # A tensor says which device "cuda" is: the current one.
        self._device = torch.empty(0, device=device).device if device is not None else _home(model, optimizer)
        self._now = Now(Phase.BUILD if model is None and optimizer is None else Phase.FORWARD)
        self._ledger = self._new_ledger()
        self._parameters = WeakTensorKeyDictionary()  # to the number of the module that owns them
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._outside: list[Storage] = []  # made since the model was last called, and not by it
        self._bucketed = WeakTensorKeyDictionary()  # parameters whose gradients lie in DDP's buckets
        self._sharded = False  # whether FSDP keeps shards of a model's parameters
        self._undo: ExitStack | None = None
        self.trace = MemoryTrace(lambda: self._ledger.events(self._device), str(self._device or "cpu"))

    def _new_ledger(self) -> Ledger:
        return Ledger(self._now)

    def __enter__(self) -> MemoryTrace:
        if self._undo is not None:
            raise RuntimeError("A recorder records once, and this one was entered before; call vramlab.record(...) again.")
        with ExitStack() as undo:
            self._undo = undo
            self._hook(undo)
            self._seed()
            self._counters = undo.enter_context(PeakCounters(self._device))
            super().__enter__()
            self._undo = undo.pop_all()
        return self.trace

    def __exit__(self, *error: Any) -> None:
        assert self._undo is not None
        try:
            with self._undo:
                self._leave_stack()
                self._mark_all()
        finally:
            self._finish()
            if self._device is not None:
                explain_out_of_memory(error[1], self._device, self.trace)
            # Nothing of the recorded code may live longer because it was recorded.
            self._outside.clear()
            self._model = self._optimizer = None

    def _finish(self) -> None:
        device = self._device or self._ledger.main_device()
        self.trace.finish(self._ledger.close(device), str(device), self._counters.result)

    def _leave_stack(self) -> None:
        """Stop seeing operators, also where another mode was entered later and is still there (in a generator, say)."""
        stack = _get_current_dispatch_mode_stack()
        if self not in stack:
            raise RuntimeError("A recorder ends in the thread it began in, and this is another one: keep its with block in one thread.")
        above = stack[stack.index(self) + 1 :]
        for mode in (*reversed(above), self):
            TorchDispatchMode.__exit__(mode, None, None, None)
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    # What runs around modules, optimizers and parameters

    def _hook(self, undo: ExitStack) -> None:
        undo.callback(register_module_forward_pre_hook(self._module_enters).remove)
        undo.callback(register_module_forward_hook(self._module_leaves, always_call=True).remove)
        undo.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
        undo.callback(register_optimizer_step_post_hook(self._step_ends).remove)
        _Resizes.watch(self._ledger)
        undo.callback(_Resizes.forget, self._ledger)

    def _seed(self) -> None:
        """Count what is there already: parameters and buffers with their module, gradients, optimizer state."""
        if self._optimizer is not None:
            self._optimizers[self._optimizer] = next(self._numbers)
        self._mark_all()
        self._ledger.boundary()

    def _is_ours(self) -> bool:
        # Hooks are process-wide, modes belong to a thread; autograd takes them along into its own.
        return self in _get_current_dispatch_mode_stack()

    def _module_enters(self, module: nn.Module, args: Any) -> None:
        if not self._is_ours():
            return
        if self._now.outside_modules and not self._now.in_backward():
            if not self._now.names(module):
                refuse_compiled(module)
                self._see_model(module, type(module).__name__)
            self._sharded = self._sharded or _is_sharded(module)  # since it got its name
            self._now.phase_is(Phase.FORWARD)
            self._forward_begins()
        self._now.enter(module)

    def _module_leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_ours():
            self._now.leave(module)

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours():
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = next(self._numbers)
            self._see_optimized(optimizer)
            self._now.begin_step()

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours():
            self._mark_state(optimizer)
            if self._now.end_step():
                self._ledger.step_ends(self._optimizers[optimizer])

    def _gradient_arrives(self, parameter: torch.Tensor) -> None:
        if self._is_ours():
            self._mark_gradient(parameter)

    # What a storage is for

    def _see_model(self, model: nn.Module, prefix: str = "") -> None:
        for name, module in model.named_modules(prefix=prefix):
            number = self._now.name_module(module, name)
            if isinstance(module, DistributedDataParallel):
                self._bucketed.update(dict.fromkeys(module.parameters(), True))
            self._sharded = self._sharded or _is_sharded(module)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._see_parameter(tensor, number)

    def _see_optimized(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in _parameters_of(optimizer):
            self._see_parameter(parameter, self._parameters.get(parameter, 0))
            self._mark_gradient(parameter)

    def _see_parameter(self, tensor: torch.Tensor, module: int) -> None:
        if is_lazy(tensor):  # no shape yet, no memory
            return
        known = tensor in self._parameters
        if not known or module:
            self._parameters[tensor] = module
        if not known and tensor.requires_grad and tensor.is_leaf and self._undo is not None:
            self._undo.callback(tensor.register_post_accumulate_grad_hook(self._gradient_arrives).remove)
        for storage in self._storages(tensor):
            self._ledger.found(storage, Category.PARAMETERS, module, tensor.device)

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.is_leaf and parameter.grad is not None:
            in_bucket = parameter in self._bucketed and parameter.grad._is_view()
            category = Category.BUCKETS if in_bucket else Category.GRADIENTS
            for storage in self._storages(parameter.grad):
                self._ledger.found(storage, category, 0 if in_bucket else self._parameters.get(parameter, 0), parameter.grad.device)

    def _mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            module = self._parameters.get(parameter, 0) if isinstance(parameter, torch.Tensor) else 0
            for tensor in tensors_in(state):
                for storage in self._storages(tensor):
                    self._ledger.found(storage, Category.OPTIMIZER_STATE, module, tensor.device)

    def _mark_all(self) -> None:
        """Find parameters (some may have got new storages or be new themselves), gradients and optimizer state as they are."""
        if self._model is not None:
            self._see_model(self._model)
        for optimizer in list(self._optimizers):
            self._see_optimized(optimizer)
            self._mark_state(optimizer)
        for parameter, module in list(self._parameters.items()):
            self._see_parameter(parameter, module)
            self._mark_gradient(parameter)

    # Each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._see(func, types, args, kwargs)

    def _see(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if any(consists_of_tensors(t) for t in types):
            return NotImplemented  # it calls operators on the plain tensors inside, and those come here
        kwargs = kwargs or {}
        self._now.see_line()
        self._ledger.operator_begins()
        tensors = tensors_in((args, kwargs) if kwargs else args)
        if self._now.operator_runs(func, tensors):
            self._forward_begins()
        arguments = self._see_arguments(func, tensors)
        out = self._run(func, types, args, kwargs, tensors)
        for entry, storage in arguments:
            if entry.nbytes != storage.nbytes():
                self._ledger.resized(storage)
        del tensors, arguments
        for tensor in self._results(func, out):
            for storage in self._storages(tensor):
                if self._ledger.entry(storage) is None:
                    self._before_result(tensor)
                    self._see_result(func, tensor, storage, args)
        return out

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        return func(*args, **kwargs)

    def _results(self, func: Any, out: Any) -> list[torch.Tensor]:
        """The tensors that an operator returned, in the order in which they got memory."""
        return tensors_in(out)

    def _before_result(self, tensor: torch.Tensor) -> None:
        """A tensor that an operator returned is about to be counted."""

    def _storages(self, tensor: torch.Tensor) -> list[torch.UntypedStorage]:
        """The memory behind a tensor that this recorder follows."""
        return storages_of(tensor)

    def _see_result(self, func: Any, tensor: torch.Tensor, storage: torch.UntypedStorage, args: tuple[Any, ...]) -> None:
        in_place = func in _IN_PLACE and self._now.in_backward()
        made = self._ledger.made(storage, tensor.device, self._in_place_of(func, storage, args) if in_place else None)
        if self._sharded and (category := _made_by_fsdp()) is not None:
            made.category = category
        elif func is _CAST and self._is_weight_copy(args[0], tensor):
            made.category = Category.WEIGHT_COPIES
        elif not in_place and self._now.between:
            self._outside.append(made)

    def _see_arguments(self, func: Any, tensors: list[torch.Tensor]) -> list[tuple[Storage, torch.UntypedStorage]]:
        """Notice what no operator has made or shown before; returns what is known of each argument's storage."""
        known = []
        for tensor in tensors:
            for storage in self._storages(tensor):
                entry = self._ledger.entry(storage)
                if entry is None or entry.category is None:
                    entry = self._see_argument(func, tensor, storage, entry)
                if entry is not None:
                    known.append((entry, storage))
        return known

    def _see_argument(self, func: Any, tensor: torch.Tensor, storage: torch.UntypedStorage, entry: Storage | None) -> Storage | None:
        if isinstance(tensor, nn.Parameter):
            if self._sharded and tensor not in self._parameters:  # whole again, for as long as its module runs
                return self._ledger.found(storage, Category.GATHERED_PARAMETERS, self._now.module, tensor.device)
            self._see_parameter(tensor, self._now.module)
            return self._ledger.found(storage, Category.PARAMETERS, self._now.module, tensor.device)
        if entry is not None:
            return entry
        if func is _LIFT:  # torch.tensor and from_numpy: the memory is new, made below the dispatcher
            made = self._ledger.made(storage, tensor.device)
            if self._now.between:
                self._outside.append(made)
            return made
        caller = _caller()
        if caller is not None and caller.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            return None  # gloo's own copy of what it sends; it comes and goes below the operators
        in_bucket = self._now.in_backward() and len(self._bucketed) > 0  # DDP copies a gradient into it
        return self._ledger.found(storage, Category.BUCKETS if in_bucket else Category.INPUTS, self._now.module, tensor.device)

    def _forward_begins(self) -> None:
        """What was made for the model outside and is still there is its input."""
        for storage in self._outside:
            if storage.died is None and storage.category is None:
                storage.category = Category.INPUTS
        self._outside.clear()

    def _in_place_of(self, func: Any, storage: torch.UntypedStorage, args: tuple[Any, ...]) -> Storage | None:
        """Undo what looking on changes: autograd works in place, but copies while a mode is there (isTensorSubclassLike).

        Without a recorder, a sum of two gradients takes the place of the one that waited (torch/csrc/autograd/input_buffer.cpp),
        and a formula scatters into zeros that it has just made (FunctionsManual.cpp).
        """
        old = self._entry(args[0])
        if old is None or old.nbytes != storage.nbytes() or not _called_by_autograd():
            return None
        waited = old.node != self._now.node
        if func is not _SUM:
            return None if waited else old
        if not waited and not _has_double_edge():
            return None  # a formula's own sum
        held = torch.is_grad_enabled() or args[0]._is_view() or self._entry(args[1]) is old  # by something else: it stays as it is
        return None if held else old

    def _entry(self, tensor: torch.Tensor) -> Storage | None:
        return self._ledger.entry(tensor.untyped_storage()) if tensor.layout is torch.strided else None

    def _is_weight_copy(self, source: torch.Tensor, copy: torch.Tensor) -> bool:
        smaller = copy.is_floating_point() and copy.element_size() < source.element_size()
        return smaller and any(self._ledger.is_parameter(storage) for storage in storages_of(source))


_LIFT = torch.ops.aten.lift_fresh.default
_CAST = torch.ops.aten._to_copy.default
_SUM = torch.ops.aten.add.Tensor
_aten = torch.ops.aten
_IN_PLACE = {_SUM, *(op.default for op in (_aten.index_put, _aten.masked_scatter, _aten.put, _aten.scatter_add)), _aten.scatter.src}


class _Resizes:
    """``UntypedStorage.resize_`` is not an operator, so no mode sees it; FSDP frees and refills its parameters with it."""

    _ledgers: ClassVar[list[Ledger]] = []
    _original = torch.UntypedStorage.resize_

    @classmethod
    def watch(cls, ledger: Ledger) -> None:
        if not cls._ledgers:
            torch.UntypedStorage.resize_ = cls._resize  # type: ignore[method-assign, assignment]
        cls._ledgers.append(ledger)

    @classmethod
    def forget(cls, ledger: Ledger) -> None:
        cls._ledgers.remove(ledger)
        if not cls._ledgers:
            del torch.UntypedStorage.resize_  # what it inherits comes back

    @staticmethod
    def _resize(storage: torch.UntypedStorage, size: int) -> None:
        before = storage.nbytes()
        _Resizes._original(storage, size)
        for ledger in _Resizes._ledgers:
            if before == 0 and ledger.entry(storage) is None and storage.nbytes() and storage.device.type != "meta":
                ledger.grown(storage)
            else:
                ledger.resized(storage)


def _called_by_autograd() -> bool:
    """Whether the running operator is one of autograd's own, and not from a hook or a backward written in Python."""
    frame = _caller()
    return frame is None or frame.f_code.co_name == "_engine_run_backward"  # None: in a thread of autograd's


def _caller() -> FrameType | None:
    """The Python code that called the running operator; None: there is none in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__") in _MACHINERY or frame.f_code.co_name == "__torch_dispatch__"):
        frame = frame.f_back
    return frame


def _has_double_edge() -> bool:
    """Whether autograd adds up two gradients of the running node itself, as for ``x * x``."""
    node = torch._C._current_autograd_node()
    edges = [edge for edge in node.next_functions if edge[0] is not None] if node is not None else []
    return len(set(edges)) < len(edges)


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _made_by_fsdp() -> Category | None:
    """What FSDP's own code makes: room for whole parameters, and what it sends and receives."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_FSDP):
            return Category.GATHERED_PARAMETERS if name == _FSDP + "._fsdp_param" else Category.COMMUNICATION
        if frame.f_code.co_name == "_call_impl":  # below a module
            return None
        frame = frame.f_back
    return None


_FSDP = "torch.distributed.fsdp._fully_shard"
_MACHINERY = {__name__, "torch._ops", "torch._compile", "torch._dynamo.eval_frame"}  # between an operator and a mode


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _home(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> torch.device | None:
    parameters = [*(model.parameters() if model is not None else ()), *(_parameters_of(optimizer) if optimizer else ())]
    return next((p.device for p in parameters if p.device.type != "meta"), None)


def _refuse_others(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module | None) or not isinstance(optimizer, torch.optim.Optimizer | None):
        found = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise TypeError(f"record() takes a module and an optimizer, each may be left out, got {found}; write record(model, optimizer).")


def refuse_compiled(model: nn.Module | None) -> None:
    """Raise ValueError if the model or a part of it is compiled."""
    for name, module in model.named_modules() if model is not None else ():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                "Recorder and planner see operators, and compiled code allocates without them: "
                f"{name or type(model).__name__} is compiled. Record or plan the model before torch.compile."
            )
