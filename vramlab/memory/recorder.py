"""record(): follow every storage of a piece of training code, and say afterwards what each one was for."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from vramlab.devices import PeakCounters
from vramlab.memory.trace import Category, Events, MemoryTrace, Phase
from vramlab.tensors import storage_of, storages_of, tensors_in


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
    temporary. Known limits: what an operator allocates and releases inside itself is not seen; a tensor that existed
    before and first occurs after an optimizer step is counted from the end of that step.
    """
    return Recorder(model, optimizer, device)


class Recorder(TorchDispatchMode):
    """What `record` returns. It sees each operator below autograd; weak references on storages see the releases."""

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device | str | None) -> None:
        super().__init__()
        _refuse_compiled(model)
        self._model, self._optimizer = model, optimizer
        self._device = torch.device(device) if device is not None else _home(model, optimizer)
        self._now = _Now(Phase.BUILD if model is None and optimizer is None else Phase.FORWARD)
        self._ledger = _Ledger(self._now)
        self._parameters = WeakTensorKeyDictionary()  # to the number of the module that owns them
        self._outside: list[_Storage] = []  # made outside any module since the model was last called
        self._thread = 0
        self._undo: ExitStack | None = None
        self.trace = MemoryTrace(lambda: self._ledger.events(self._device), str(self._device or "cpu"))

    def __enter__(self) -> MemoryTrace:
        if self._undo is not None:
            raise RuntimeError("A recorder records once, and this one was entered before; call vramlab.record(...) again.")
        self._undo, self._thread = ExitStack(), threading.get_ident()
        with ExitStack() as undo:
            self._hook(undo)
            self._seed()
            self._counters = undo.enter_context(PeakCounters(self._device))
            super().__enter__()
            self._undo = undo.pop_all()
        return self.trace

    def __exit__(self, *error: Any) -> None:
        assert self._undo is not None
        super().__exit__(*error)
        self._mark_gradients()
        self._undo.close()
        device = self._device or self._ledger.main_device()
        self.trace.finish(self._ledger.events(device), str(device), self._counters.result)
        self._ledger.close()
        # Nothing of the recorded code may live longer because it was recorded.
        self._outside.clear()
        self._model = self._optimizer = None

    # What runs around modules, optimizers and parameters

    def _hook(self, undo: ExitStack) -> None:
        handles = [
            register_module_forward_pre_hook(self._module_enters),
            register_module_forward_hook(self._module_leaves, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        for parameter in self._model.parameters() if self._model is not None else ():
            if parameter.requires_grad and parameter.is_leaf:
                handles.append(parameter.register_post_accumulate_grad_hook(self._mark_gradient))
        for handle in handles:
            undo.callback(handle.remove)
        # Not an operator, so no dispatch mode sees it; FSDP frees and refills its parameters with it.
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._ledger.resized(storage)

        own = vars(torch.UntypedStorage).get("resize_")
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        undo.callback(lambda: setattr(torch.UntypedStorage, "resize_", own) if own else delattr(torch.UntypedStorage, "resize_"))

    def _seed(self) -> None:
        """Count what is there already: parameters and buffers with their module, gradients, optimizer state."""
        for name, module in self._model.named_modules() if self._model is not None else ():
            number = self._now.name_module(module, name)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._see_parameter(tensor, number)
        if self._optimizer is not None:
            for parameter in _parameters_of(self._optimizer):
                self._see_parameter(parameter, self._parameters.get(parameter, 0))
            self._mark_state(self._optimizer)
        self._mark_gradients()
        self._ledger.seeded()

    def _in_our_thread(self) -> bool:
        # Hooks are process-wide; on CUDA the backward pass runs in autograd's own threads.
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    def _module_enters(self, module: nn.Module, args: Any) -> None:
        if not self._in_our_thread():
            return
        if self._now.outside_modules and not self._now.in_backward():
            # The model is called: what was made for it outside and is still there is its input.
            self._now.phase_is(Phase.FORWARD)
            for storage in self._outside:
                if storage.died is None and storage.category is None:
                    storage.category = Category.INPUTS
            self._outside.clear()
        self._now.enter(module)

    def _module_leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_our_thread():
            self._now.leave()

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_our_thread():
            for parameter in _parameters_of(optimizer):
                if parameter not in self._parameters:
                    self._see_parameter(parameter, 0)
                self._mark_gradient(parameter)
            self._now.begin_step()

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_our_thread():
            self._mark_state(optimizer)
            self._now.end_step()
            self._ledger.boundary()

    # What a storage is for

    def _see_parameter(self, tensor: torch.Tensor, module: int) -> None:
        self._parameters[tensor] = module
        for storage in storages_of(tensor):
            self._ledger.found(storage, Category.PARAMETERS, module)

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            for storage in storages_of(parameter.grad):
                self._ledger.found(storage, Category.GRADIENTS, self._parameters.get(parameter, 0))

    def _mark_gradients(self) -> None:
        for parameter, module in list(self._parameters.items()):
            for storage in storages_of(parameter):  # ``p.data = other`` may have given it a new one
                self._ledger.found(storage, Category.PARAMETERS, module)
            if parameter.is_leaf:
                self._mark_gradient(parameter)

    def _mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            module = self._parameters.get(parameter, 0) if isinstance(parameter, torch.Tensor) else 0
            for tensor in tensors_in(state):
                for storage in storages_of(tensor):
                    self._ledger.found(storage, Category.OPTIMIZER_STATE, module)

    # Each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a wrapper: it calls operators on the plain tensors inside, and those come here
        kwargs = kwargs or {}
        now, ledger = self._now, self._ledger
        from_parameters = now.operator_runs(func, args)
        out = func(*args, **kwargs)

        for tensor in tensors_in((args, kwargs) if kwargs else args):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if ledger.knows(storage):
                ledger.resized(storage)
            elif func is _LIFT:  # torch.tensor and from_numpy: the memory is new, made below the dispatcher
                self._outside.append(ledger.made(storage, tensor.device))
            elif isinstance(tensor, nn.Parameter):
                self._see_parameter(tensor, now.module)
            else:
                ledger.found(storage, Category.INPUTS, now.module)
        for tensor in tensors_in(out):
            storage = storage_of(tensor)
            if storage is None or ledger.knows(storage):
                continue
            made = ledger.made(storage, tensor.device)
            if func is _CAST and _is_weight_copy(args[0], tensor) and ledger.category(args[0]) is Category.PARAMETERS:
                made.category = Category.WEIGHT_COPIES
            elif now.outside_modules and not from_parameters:
                self._outside.append(made)
        return out


_LIFT = torch.ops.aten.lift_fresh.default
_CAST = torch.ops.aten._to_copy.default


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
        self._names: dict[int, int] = {}
        self._stack: list[int] = []
        self._recomputing = self._stepping = False
        # Nodes of the graph are numbered as they are made: from each number on, the module that made them.
        self._sequence: list[int] = []
        self._made_by: list[int] = []

    @property
    def outside_modules(self) -> bool:
        return not self._stack

    @staticmethod
    def in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def name_module(self, module: nn.Module, name: str) -> int:
        number = self.modules.setdefault(name, len(self.modules))
        return self._names.setdefault(id(module), number)

    def enter(self, module: nn.Module) -> None:
        number = self._names.get(id(module))
        # A module outside the model (a loss, say) goes by its class. Its id may be reused later, so it is not kept.
        self._stack.append(self.modules.setdefault(type(module).__name__, len(self.modules)) if number is None else number)
        self._moved()

    def leave(self) -> None:
        if self._stack:
            self._stack.pop()
            self._moved()

    def _moved(self) -> None:
        self.module = self._stack[-1] if self._stack else 0
        if not self.in_backward():
            self._sequence.append(torch.autograd._get_sequence_nr())
            self._made_by.append(self.module)

    def begin_step(self) -> None:
        self._stepping = True
        self.phase_is(Phase.STEP)

    def end_step(self) -> None:
        self._stepping = False

    def phase_is(self, phase: Phase, recomputing: bool = False) -> None:
        if (phase, recomputing) != (self.phase, self._recomputing):
            self.phase, self._recomputing = phase, recomputing
            self.epoch += 1
            if phase in (Phase.BUILD, Phase.FORWARD) or recomputing:
                self.forward_epochs.add(self.epoch)

    def operator_runs(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Note the operator, bring phase and module up to date; True if its arguments lead back to parameters."""
        self.operator = self.operators.setdefault(func, len(self.operators))
        grad = torch.is_grad_enabled()
        if self.in_backward():
            if not self._stepping:
                self.phase_is(Phase.BACKWARD, recomputing=grad)
            if not self._stack:
                self._module_of_node()
            return True
        from_parameters = grad and any(t.requires_grad for t in tensors_in(args))
        if self._stepping:
            return from_parameters
        if self.phase is Phase.BACKWARD or (self.phase is Phase.STEP and not grad):
            # Between backward and step: unscaling, clipping. With gradients on, the next forward has begun.
            self.phase_is(Phase.FORWARD if grad else Phase.STEP)
        elif self.phase is Phase.STEP or (self.phase is Phase.BUILD and from_parameters):
            self.phase_is(Phase.FORWARD)
        return from_parameters

    def _module_of_node(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:
            i = bisect_right(self._sequence, node._sequence_nr()) - 1
            if 0 <= i < len(self._made_by) - 1:  # accumulating a gradient has the highest number: still the module before
                self.module = self._made_by[i]


class _Storage(weakref.ref):
    """One storage from the first sight to its release, which the weak reference reports."""

    __slots__ = ("born", "category", "device", "died", "key", "module", "nbytes", "number")

    key: int
    number: int
    nbytes: int
    device: torch.device
    module: int
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
        self._all: list[_Storage] = []
        self._live: dict[int, _Storage] = {}
        self._on_release = self._released

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._live

    def category(self, tensor: torch.Tensor) -> Category | None:
        storage = storage_of(tensor)
        entry = self._live.get(storage._cdata) if storage is not None else None
        return entry.category if entry else None

    def made(self, storage: torch.UntypedStorage, device: torch.device) -> _Storage:
        """A storage that the running operator has just allocated."""
        entry = self._follow(storage, device)
        self._rows.append((entry.number, entry.nbytes, self._now.phase, self._now.operator))
        return entry

    def found(self, storage: torch.UntypedStorage, category: Category, module: int) -> None:
        """A storage turns out to be of a category; if it is unknown, it existed at the last boundary already."""
        entry = self._live.get(storage._cdata)
        if entry is None:
            entry = self._follow(storage, storage.device)
            self._late.append((self._boundary, (entry.number, entry.nbytes, Phase.BUILD, 0)))
        elif entry.category is not None and entry.category <= category:
            return  # a parameter's storage stays one, whatever else refers to it
        entry.category, entry.module = category, module

    def resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is not None and entry.nbytes != (nbytes := storage.nbytes()):
            self._rows.append((entry.number, nbytes - entry.nbytes, self._now.phase, self._now.operator))
            entry.nbytes = nbytes

    def seeded(self) -> None:
        """The recording begins: what was found is there already."""
        self.boundary()

    def boundary(self) -> None:
        self._boundary = len(self._rows)

    def _follow(self, storage: torch.UntypedStorage, device: torch.device) -> _Storage:
        entry = _Storage(storage, self._on_release)
        entry.key, entry.number, entry.nbytes, entry.device = storage._cdata, len(self._all), storage.nbytes(), device
        entry.module, entry.born, entry.died, entry.category = self._now.module, self._now.epoch, None, None
        self._all.append(entry)
        self._live[entry.key] = entry
        return entry

    def _released(self, entry: Any) -> None:
        del self._live[entry.key]
        entry.died = self._now.epoch
        self._rows.append((entry.number, -entry.nbytes, self._now.phase, self._now.operator))

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
        entries, device = list(self._all), device or self.main_device()
        rows = np.array(self._rows, np.int64).reshape(-1, 4)
        late = np.array([row for _, row in self._late], np.int64).reshape(-1, 4)
        positions = np.array([position for position, _ in self._late], np.int64)
        rows = np.insert(rows, positions, late, axis=0)
        here = np.array([e.device == device for e in entries], bool)[rows[:, 0]]
        seeds = int(here[: np.count_nonzero(positions == 0)].sum())
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
            operators=tuple(str(op).replace("aten.", "aten::").removesuffix(".default") for op in self._now.operators),
            seeds=seeds,
        )

    def close(self) -> None:
        self._live.clear()
        self._all.clear()


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_weight_copy(source: torch.Tensor, copy: torch.Tensor) -> bool:
    return copy.is_floating_point() and copy.element_size() < source.element_size()


def _home(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> torch.device | None:
    parameters = [*(model.parameters() if model is not None else ()), *(_parameters_of(optimizer) if optimizer else ())]
    return next((p.device for p in parameters if p.device.type != "meta"), None)


def _refuse_compiled(model: nn.Module | None) -> None:
    for name, module in model.named_modules() if model is not None else ():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                "A recorder sees operators, and compiled code allocates without them: "
                f"module {name!r} is compiled. Record the model before torch.compile."
            )
