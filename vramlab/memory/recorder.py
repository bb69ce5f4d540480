"""record(): follow every storage of a piece of training code, and say afterwards what each one was for."""

from __future__ import annotations

import itertools
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from vramlab.devices import PeakCounters
from vramlab.memory.trace import Category, Events, MemoryTrace, Phase
from vramlab.tensors import consists_of_tensors, storages_of, tensors_in


def record(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> Recorder:
    """Record the memory of any PyTorch code: ``with record(model, optimizer) as trace: ...``.

    The trace can be read during and after the block. Recorders nest; each object records once. An exception inside
    keeps what was recorded until then.

    Args:
        model: its parameters, buffers and gradients are counted from the start and its module names are used.
        optimizer: its state is counted from the start. Without it, state is recognised when an optimizer steps.
        device: whose bytes ``trace`` counts. None: where the model's (or optimizer's) parameters are, else wherever
            most bytes are allocated.

    Returns:
        A context manager whose ``as`` value is a `MemoryTrace`.

    Raises:
        ValueError: the model is compiled: its memory is allocated below the operators that a recorder sees.
        RuntimeError: the same recorder is entered twice.

    Categories are decided by lifetime: what ends as some parameter's ``grad`` is a gradient, what an optimizer keeps
    is optimizer state, what is made in forward (or in a recomputed forward) and released later is an activation, what
    exists when the model is called is an input, a low-precision copy of a parameter is a weight copy, the rest is
    temporary.

    Limits. Not seen: what an operator allocates and releases inside itself (operands that a bf16 product on the CPU
    packs anew, the fused path of nn.TransformerEncoderLayer in evaluation, the functions that torch.cond runs), and
    memory that no operator makes (the 5,056 bytes of generator state that checkpointing keeps for each block). A tensor
    that existed before and first occurs after an optimizer step is counted from the end of that step. Memory that is
    shared with NumPy counts for each tensor made from it. Compiled code that runs inside the block runs eagerly there.

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
        _refuse_compiled(model)
        self._model, self._optimizer = model, optimizer
        # A tensor says which device "cuda" is: the current one.
        self._device = torch.empty(0, device=device).device if device is not None else _home(model, optimizer)
        self._now = _Now(Phase.BUILD if model is None and optimizer is None else Phase.FORWARD)
        self._ledger = _Ledger(self._now)
        self._parameters = WeakTensorKeyDictionary()  # to the number of the module that owns them
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._outside: list[_Storage] = []  # made since the model was last called, and not by it
        self._undo: ExitStack | None = None
        self.trace = MemoryTrace(lambda: self._ledger.events(self._device), str(self._device or "cpu"))

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
            device = self._device or self._ledger.main_device()
            self.trace.finish(self._ledger.close(device), str(device), self._counters.result)
            # Nothing of the recorded code may live longer because it was recorded.
            self._outside.clear()
            self._model = self._optimizer = None

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
                _refuse_compiled(module)
                self._see_model(module, type(module).__name__)
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
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._see_parameter(tensor, number)

    def _see_optimized(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in _parameters_of(optimizer):
            self._see_parameter(parameter, self._parameters.get(parameter, 0))
            self._mark_gradient(parameter)

    def _see_parameter(self, tensor: torch.Tensor, module: int) -> None:
        if is_lazy(tensor):  # no shape yet, no memory
            return
        if tensor not in self._parameters:
            self._parameters[tensor] = module
            if tensor.requires_grad and tensor.is_leaf and self._undo is not None:
                self._undo.callback(tensor.register_post_accumulate_grad_hook(self._gradient_arrives).remove)
        for storage in storages_of(tensor):
            self._ledger.found(storage, Category.PARAMETERS, module)

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.is_leaf and parameter.grad is not None:
            for storage in storages_of(parameter.grad):
                self._ledger.found(storage, Category.GRADIENTS, self._parameters.get(parameter, 0))

    def _mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            module = self._parameters.get(parameter, 0) if isinstance(parameter, torch.Tensor) else 0
            for tensor in tensors_in(state):
                for storage in storages_of(tensor):
                    self._ledger.found(storage, Category.OPTIMIZER_STATE, module)

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
        if any(consists_of_tensors(t) for t in types):
            return NotImplemented  # it calls operators on the plain tensors inside, and those come here
        kwargs = kwargs or {}
        self._ledger.operator_begins()
        tensors = tensors_in((args, kwargs) if kwargs else args)
        if self._now.operator_runs(func, tensors):
            self._forward_begins()
        arguments = self._see_arguments(func, tensors)
        out = func(*args, **kwargs)
        for entry, storage in arguments:
            if entry.nbytes != storage.nbytes():
                self._ledger.resized(storage)
        del tensors, arguments
        for tensor in tensors_in(out):
            for storage in storages_of(tensor):
                if self._ledger.entry(storage) is None:
                    made = self._ledger.made(storage)
                    if func is _CAST and self._is_weight_copy(args[0], tensor):
                        made.category = Category.WEIGHT_COPIES
                    elif func in _IN_PLACE and self._now.in_backward():
                        self._computed_in_place(func, made, args)
                    else:
                        self._made(made)
        return out

    def _see_arguments(self, func: Any, tensors: list[torch.Tensor]) -> list[tuple[_Storage, torch.UntypedStorage]]:
        """Notice what no operator has made or shown before; returns what is known of each argument's storage."""
        known = []
        for tensor in tensors:
            for storage in storages_of(tensor):
                entry = self._ledger.entry(storage)
                if entry is None or entry.category is None:
                    entry = self._see_argument(func, tensor, storage, entry)
                known.append((entry, storage))
        return known

    def _see_argument(self, func: Any, tensor: torch.Tensor, storage: torch.UntypedStorage, entry: _Storage | None) -> _Storage:
        if isinstance(tensor, nn.Parameter):
            self._see_parameter(tensor, self._now.module)
            return self._ledger.found(storage, Category.PARAMETERS, self._now.module)
        if entry is not None:
            return entry
        if func is _LIFT:  # torch.tensor and from_numpy: the memory is new, made below the dispatcher
            made = self._ledger.made(storage)
            self._made(made)
            return made
        return self._ledger.found(storage, Category.INPUTS, self._now.module)

    def _made(self, storage: _Storage) -> None:
        if self._now.between:
            self._outside.append(storage)

    def _forward_begins(self) -> None:
        """What was made for the model outside and is still there is its input."""
        for storage in self._outside:
            if storage.died is None and storage.category is None:
                storage.category = Category.INPUTS
        self._outside.clear()

    def _computed_in_place(self, func: Any, made: _Storage, args: tuple[Any, ...]) -> None:
        """Undo what looking on changes: autograd works in place, but copies while a mode is there (isTensorSubclassLike).

        Without a recorder, a sum of two gradients takes the place of the one that waited (torch/csrc/autograd/input_buffer.cpp),
        and a formula scatters into zeros that it has just made (FunctionsManual.cpp).
        """
        old = self._entry(args[0])
        if old is None or old.nbytes != made.nbytes or not _called_by_autograd():
            return
        waited = old.node != self._now.node
        if func is _SUM:
            if not waited and not _has_double_edge():
                return  # a formula's own sum
            if torch.is_grad_enabled() or args[0]._is_view() or self._entry(args[1]) is old:
                return  # something else holds it: it stays as it is
        elif waited:
            return
        self._ledger.takes_place_of(old)

    def _entry(self, tensor: torch.Tensor) -> _Storage | None:
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

    _ledgers: ClassVar[list[_Ledger]] = []
    _original = torch.UntypedStorage.resize_

    @classmethod
    def watch(cls, ledger: _Ledger) -> None:
        if not cls._ledgers:
            torch.UntypedStorage.resize_ = cls._resize  # type: ignore[method-assign, assignment]
        cls._ledgers.append(ledger)

    @classmethod
    def forget(cls, ledger: _Ledger) -> None:
        cls._ledgers.remove(ledger)
        if not cls._ledgers:
            del torch.UntypedStorage.resize_  # what it inherits comes back

    @staticmethod
    def _resize(storage: torch.UntypedStorage, size: int) -> None:
        _Resizes._original(storage, size)
        for ledger in _Resizes._ledgers:
            ledger.resized(storage)


class _Now:
    """Where the recorded code is: phase, module, operator, and the epoch, a stretch of one phase.

    A recomputed forward is an epoch of its own inside backward: autograd switches gradients off there, and
    checkpointing switches them on again.
    """

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.epoch = 0
        self.forward_epochs = {0}
        self.module = 0
        self.operator = 0
        self.modules, self.operators = {"": 0}, {"(before)": 0}
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._stack: list[tuple[int, int]] = []  # id and number of the modules that run
        self._recomputing = False
        self.between = True  # outside the model, not in backward or step: what is made now may be the next input
        self._step: int | None = None  # while an optimizer steps: the backward pass it steps in, -1 for none
        self._nested = 0  # how many steps run inside one another
        self.node = 0  # counts the nodes of the graph that backward has run
        self._node_number = -1
        # Nodes of the graph are numbered as they are made: from each number on, the module that made them.
        self._sequence: list[int] = []
        self._made_by: list[int] = []

    @property
    def outside_modules(self) -> bool:
        return not self._stack

    @staticmethod
    def in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def names(self, module: nn.Module) -> bool:
        return module in self._numbers

    def name_module(self, module: nn.Module, name: str) -> int:
        number = self._numbers.get(module)
        if number is None:
            number = self._numbers[module] = self.modules.setdefault(name, len(self.modules))
        return number

    def enter(self, module: nn.Module) -> None:
        # A module that was made on the way (a loss, say) goes by its class.
        self._stack.append((id(module), self.name_module(module, type(module).__name__)))
        self._moved()

    def leave(self, module: nn.Module) -> None:
        for i in reversed(range(len(self._stack))):
            if self._stack[i][0] == id(module):
                del self._stack[i:]  # a KeyboardInterrupt lets modules end without a word
                self._moved()
                break

    def _moved(self) -> None:
        self.module = self._stack[-1][1] if self._stack else 0
        if not self.in_backward():
            self._sequence.append(torch.autograd._get_sequence_nr())
            self._made_by.append(self.module)

    def begin_step(self) -> None:
        nested = self._step is not None and self.phase is Phase.STEP  # an optimizer that calls super().step(), or another's
        self._nested = self._nested + 1 if nested else 1
        self._step = torch._C._current_graph_task_id()
        if self._step == -1:
            self._stack.clear()
        self.phase_is(Phase.STEP)

    def end_step(self) -> bool:
        """True if this was the outermost of nested steps."""
        self._nested -= 1
        if self._nested == 0:
            self._step = None
        return self._nested == 0

    def phase_is(self, phase: Phase, recomputing: bool = False) -> None:
        if (phase, recomputing) != (self.phase, self._recomputing):
            self.phase, self._recomputing = phase, recomputing
            self.epoch += 1
            if phase in (Phase.BUILD, Phase.FORWARD) or recomputing:
                self.forward_epochs.add(self.epoch)

    def operator_runs(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Note the operator, bring phase and module up to date; True if a forward begins that calls no module."""
        self.operator = self.operators.setdefault(func, len(self.operators))
        grad, backward = torch.is_grad_enabled(), torch._C._current_graph_task_id()
        self.between = False
        if backward == self._step:  # the step itself; its closure has gradients on, or a backward pass of its own
            if not grad:
                self.phase_is(Phase.STEP)
        elif backward != -1:
            self.phase_is(Phase.BACKWARD, recomputing=grad)
        elif self.outside_modules:
            from_parameters = any(t.requires_grad for t in tensors)
            self.between = not from_parameters
            if from_parameters and grad and self.phase is not Phase.FORWARD:
                self.phase_is(Phase.FORWARD)
                return True
            if not grad and self.phase is Phase.BACKWARD:
                self.phase_is(Phase.STEP)  # unscaling, clipping
        if backward != -1:
            self._see_node()
        return False

    def _see_node(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            return
        number = node._sequence_nr()
        if number != self._node_number:
            self._node_number = number
            self.node += 1
        if self.outside_modules:
            i = bisect_right(self._sequence, number) - 1
            if 0 <= i < len(self._made_by) - 1:  # accumulating a gradient has the highest number: still the module before
                self.module = self._made_by[i]


class _Storage(weakref.ref):
    """One storage from the first sight to its release, which the weak reference reports."""

    __slots__ = ("born", "category", "device", "died", "key", "module", "nbytes", "node", "number")

    key: int
    number: int
    nbytes: int
    device: torch.device
    module: int
    node: int
    born: int
    died: int | None
    category: Category | None


class _Ledger:
    """Storages and what happened to them."""

    def __init__(self, now: _Now) -> None:
        self._now = now
        self._rows: list[tuple[int, int, int, int]] = []  # storage, signed bytes, phase, operator
        self._late: list[tuple[int, tuple[int, int, int, int]]] = []  # rows found later, with the position they belong to
        self._boundary = 0
        self._steps: list[tuple[int, int]] = []  # how many rows there were at the end of an optimizer step, whose it was
        self._all: list[_Storage] = []
        self._live: dict[int, _Storage] = {}
        self._final: Events | None = None
        self._last_made = 0
        self._replaced: _Storage | None = None

    def entry(self, storage: torch.UntypedStorage) -> _Storage | None:
        return self._live.get(storage._cdata)

    def is_parameter(self, storage: torch.UntypedStorage) -> bool:
        entry = self.entry(storage)
        return entry is not None and entry.category is Category.PARAMETERS

    def made(self, storage: torch.UntypedStorage) -> _Storage:
        """A storage that the running operator has just allocated."""
        entry = self._follow(storage)
        self._last_made = len(self._rows)
        self._rows.append((entry.number, entry.nbytes, self._now.phase, self._now.operator))
        return entry

    def operator_begins(self) -> None:
        self._replaced = None

    def takes_place_of(self, old: _Storage) -> None:
        """If this storage is released before the next operator, it makes room for what was made last."""
        self._replaced = old

    def found(self, storage: torch.UntypedStorage, category: Category, module: int) -> _Storage:
        """A storage turns out to be of a category; if it is unknown, it existed at the last boundary already."""
        entry = self._live.get(storage._cdata)
        if entry is None:
            entry = self._follow(storage)
            self._late.append((self._boundary, (entry.number, entry.nbytes, Phase.BUILD, 0)))
        elif entry.category is not None and entry.category <= category:
            return entry  # a parameter's storage stays one, whatever else refers to it
        entry.category, entry.module = category, module
        return entry

    def resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is not None and entry.nbytes != (nbytes := storage.nbytes()):
            self._rows.append((entry.number, nbytes - entry.nbytes, self._now.phase, self._now.operator))
            entry.nbytes = nbytes

    def boundary(self) -> None:
        """What is found from now on existed by now."""
        self._boundary = len(self._rows)

    def step_ends(self, optimizer: int) -> None:
        self._steps.append((len(self._rows), optimizer))
        self.boundary()

    def _follow(self, storage: torch.UntypedStorage) -> _Storage:
        entry = _Storage(storage, self._released)
        entry.key, entry.number, entry.nbytes, entry.device = storage._cdata, len(self._all), storage.nbytes(), storage.device
        entry.module, entry.node, entry.born, entry.died, entry.category = self._now.module, self._now.node, self._now.epoch, None, None
        self._all.append(entry)
        self._live[entry.key] = entry
        return entry

    def _released(self, entry: Any) -> None:
        if self._live.pop(entry.key, None) is None:  # the recording has ended
            return
        entry.died = self._now.epoch
        at = len(self._rows)
        if entry is self._replaced:
            at, self._replaced = self._last_made, None
        self._rows.insert(at, (entry.number, -entry.nbytes, self._now.phase, self._now.operator))

    def _category_by_lifetime(self, entry: _Storage) -> Category:
        if entry.category is not None:
            return entry.category
        outlived = entry.died is None or entry.died > entry.born
        return Category.ACTIVATIONS if outlived and entry.born in self._now.forward_epochs else Category.TEMPORARY

    def main_device(self) -> torch.device:
        """Where most bytes were allocated; the CPU if none were."""
        totals: dict[torch.device, int] = {}
        for entry in self._all:
            totals[entry.device] = totals.get(entry.device, 0) + entry.nbytes
        return max(totals, key=lambda d: totals[d], default=torch.device("cpu"))

    def events(self, device: torch.device | None) -> Events:
        """The columns for one device, late rows put where they belong."""
        device = device or self.main_device()
        # Copies, and what others refer to last: a trace may be read while another thread records.
        steps, made, found = list(self._steps), list(self._rows), list(self._late)
        entries = list(self._all)
        if self._final is not None:  # the recording has ended meanwhile
            return self._final
        positions = np.array([position for position, _ in found], np.int64)
        rows = np.array(made, np.int64).reshape(-1, 4)
        rows = np.insert(rows, positions, np.array([row for _, row in found], np.int64).reshape(-1, 4), axis=0)
        here = np.array([e.device == device for e in entries], bool)[rows[:, 0]]
        before = np.concatenate(([0], np.cumsum(here)))  # rows of this device before each row
        rows = rows[here]
        category = np.array([self._category_by_lifetime(e) for e in entries], np.int8)
        module = np.array([e.module for e in entries], np.int32)
        return Events(
            storage=rows[:, 0],
            nbytes=rows[:, 1],
            category=category[rows[:, 0]],
            module=module[rows[:, 0]],
            phase=rows[:, 2].astype(np.int8),
            operator=rows[:, 3].astype(np.int32),
            modules=tuple(self._now.modules),
            operators=tuple(str(op).replace("aten.", "aten::").removesuffix(".default") for op in list(self._now.operators)),
            seeds=int(before[np.count_nonzero(positions == 0)]),
            steps=tuple((int(before[end + np.count_nonzero(positions <= end)]), whose) for end, whose in steps),
        )

    def close(self, device: torch.device) -> Events:
        """The last events; what happens to the storages from now on is nobody's business here."""
        self._final = self.events(device)
        self._live.clear()
        self._all.clear()
        self._replaced = None
        return self._final


def _called_by_autograd() -> bool:
    """Whether the running operator is one of autograd's own, and not from a hook or a backward written in Python."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__") in _MACHINERY or frame.f_code.co_name == "__torch_dispatch__"):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"  # None: in a thread of autograd's


def _has_double_edge() -> bool:
    """Whether autograd adds up two gradients of the running node itself, as for ``x * x``."""
    node = torch._C._current_autograd_node()
    edges = [edge for edge in node.next_functions if edge[0] is not None] if node is not None else []
    return len(set(edges)) < len(edges)


_MACHINERY = {__name__, "torch._ops", "torch._compile", "torch._dynamo.eval_frame"}  # between an operator and a mode


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _home(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> torch.device | None:
    parameters = [*(model.parameters() if model is not None else ()), *(_parameters_of(optimizer) if optimizer else ())]
    return next((p.device for p in parameters if p.device.type != "meta"), None)


def _refuse_compiled(model: nn.Module | None) -> None:
    for name, module in model.named_modules() if model is not None else ():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                "A recorder sees operators, and compiled code allocates without them: "
                f"{name or type(model).__name__} is compiled. Record the model before torch.compile."
            )
