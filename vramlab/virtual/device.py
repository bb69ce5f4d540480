"""virtual_gpu(): a card on which tensors have shape, type and lifetime, and no data. Ordinary PyTorch code runs on it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from vramlab import gpus
from vramlab.gpus import GPU
from vramlab.memory import allocator as rules
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.ledger import Ledger, Storage, Workspace
from vramlab.memory.now import Now
from vramlab.memory.recorder import Recorder
from vramlab.memory.report import OutOfMemoryReport
from vramlab.memory.trace import Category, DeviceCounters, MemoryTrace
from vramlab.tensors import is_virtual, map_tensors, storages_of, tensors_in
from vramlab.units import format_bytes, parse_bytes, round_up
from vramlab.virtual import attention, autocast, backend, collectives, cublas, kernels, patches, shapes
from vramlab.virtual.traffic import Call, Communication
from vramlab.virtual.values import UnknownValueError, Values

_aten = torch.ops.aten
_HOST = torch.device("cpu")


def virtual_gpu(
    card: GPU | str = "RTX 4090",
    *,
    count: int = 1,
    in_use: int | str = 0,
    expandable_segments: bool = False,
    limited: bool = True,
) -> VirtualGPU:
    """A virtual card: ``with virtual_gpu("RTX 4090") as gpu: ...`` runs PyTorch code on ``gpu.device`` without data.

        with virtual_gpu("RTX 4090") as gpu:
            with gpu.building():
                model = MyModel().to(gpu.device)
            model(torch.zeros(8, 1024, device=gpu.device)).sum().backward()
        print(gpu.peak_allocated, gpu.peak_reserved)

    Args:
        card: its name, or a `GPU`.
        count: how many of them: ``gpu.devices``.
        in_use: bytes of each that others hold, the desktop say; ``"0.8 GiB"``.
        expandable_segments: as ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
        limited: False: the card is as large as need be, to see the peak of what does not fit.

    Raises:
        RuntimeError: torch can use CUDA in this process, or another additional device type is registered in it.
        ValueError: no such card, no card left, or ``count`` below 1.

    What such a process has afterwards is a device type more, for good; use `vramlab.plan` to keep a process as it is.
    """
    return VirtualGPU(gpus.gpu(card), count, parse_bytes(in_use), expandable_segments, limited)


class VirtualGPU:
    """What `virtual_gpu` returns. It can be entered once; what it counted can be read afterwards."""

    def __init__(self, card: GPU, count: int, in_use: int, expandable_segments: bool, limited: bool) -> None:
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"There is at least 1 virtual card, got count={count!r}.")
        capacity = card.left_for_pytorch(in_use)
        self.card, self.in_use, self.capacity = card, in_use, capacity
        self._values = Values()
        self._memory = _Memory(card, [CachingAllocator(capacity if limited else None, expandable_segments) for _ in range(count)])
        self._mode = _Mode(card, self._values, self._memory)
        self._before_reset = [(0, 0)] * count  # the peaks that torch.vgpu.reset_peak_memory_stats() has reset
        self._undo: ExitStack | None = None
        backend.register()
        autocast.install(backend.NAME)
        attention.install(backend.NAME, lambda device: backend.innermost().card.capability)
        self.devices = [torch.device(backend.NAME, i) for i in range(count)]
        self.streams: Iterator[int] = itertools.count(1)
        self.begins: list[int] = []
        self.memory_asked = 0
        self.trace, *others = (MemoryTrace(_events(self._mode, d), str(d)) for d in self.devices)
        self.traces: list[MemoryTrace] = [self.trace, *others]
        """One a card; ``trace`` is the first."""
        self.host_trace = MemoryTrace(_events(self._mode, _HOST), "host")
        """Of what was offloaded to host memory."""

    def __enter__(self) -> VirtualGPU:
        if self._undo is not None:
            raise RuntimeError("A virtual GPU is opened once, and this one was before; call virtual_gpu(...) again.")
        with ExitStack() as undo:
            undo.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) makes a CPU tensor and moves it
            # One thread: autograd keeps a queue for each device, and the guard in C++ says that there is one device.
            undo.enter_context(torch.autograd.set_multithreading_enabled(False))
            undo.enter_context(patches.patched(self._values))
            undo.enter_context(autocast.hooked())
            undo.enter_context(self._mode.fake_opened())
            backend.contexts.append(self)
            undo.callback(backend.contexts.remove, self)
            undo.push(self._leave)
            self._mode.__enter__()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._undo is not None
        self._undo.__exit__(*error)

    def _leave(self, *error: Any) -> None:
        try:
            self._mode.__exit__(*error)
        finally:
            counters = [DeviceCounters(*self.peaks(i), self.device_peak(i)) for i in range(len(self.devices))]
            for trace, device, counted in zip(self.traces, self.devices, counters, strict=True):
                trace.finish(self._mode.events[device], str(device), counted)
            self.host_trace.finish(self._mode.events[_HOST], "host", None)

    @property
    def device(self) -> torch.device:
        """The first card, ``vgpu:0``."""
        return self.devices[0]

    def building(self, device: torch.device | str | None = None) -> AbstractContextManager[None]:
        """Within, a model of any size is built without host memory and without initialisation.

        Parameters and buffers are made on the card as they are registered. Everything else stays real on the CPU, so a
        model may compute its own widths; reading a number of one of its parameters raises `UnknownValueError`.

        Args:
            device: where instead; ``"cpu"``: virtual host memory, from where ``.to(gpu.device)`` moves them as in a real run.
        """
        return patches.building(torch.device(device) if device is not None else self.device, self._values, self.parameter_moved)

    def name_modules(self, model: torch.nn.Module) -> None:
        """Call the model's modules in the trace by their names in it; others go by the class of the model that is called."""
        self._mode._see_model(model)

    @property
    def now(self) -> Now:
        """Where the code is that runs."""
        return self._mode._now

    def owner(self, parameter: torch.Tensor) -> int:
        """The number in ``now.modules`` of the module that the trace counts a parameter to; 0: none."""
        return self._mode._parameters.get(parameter, 0)

    def parameter_moved(self, parameter: torch.Tensor) -> None:
        """A parameter or a buffer has got memory, on a card or on the host: so it is counted as one before its model is called."""
        if is_virtual(parameter):
            self._mode._see_parameter(parameter, self._mode._parameters.get(parameter, 0))

    @property
    def allocators(self) -> list[CachingAllocator]:
        """CUDA's caching allocator of each card."""
        return self._memory.cards

    @property
    def allocated(self) -> int:
        """Bytes in blocks that the first card's allocator has handed out now; ``gpu.allocators`` has those of all."""
        return self.allocators[0].allocated

    @property
    def reserved(self) -> int:
        """Bytes that the first card's allocator has taken from the driver now."""
        return self.allocators[0].reserved

    @property
    def peak_allocated(self) -> int:
        """The most bytes allocated on the first card at any time, as ``torch.cuda.max_memory_allocated()``."""
        return self.peaks()[0]

    @property
    def peak_reserved(self) -> int:
        """The most bytes reserved on the first card at any time, as ``torch.cuda.max_memory_reserved()``."""
        return self.peaks()[1]

    def peaks(self, index: int = 0) -> tuple[int, int]:
        """The most bytes allocated and reserved on a card at any time, also before ``torch.vgpu.reset_peak_memory_stats()``."""
        allocator, before = self.allocators[index], self._before_reset[index]
        return max(before[0], allocator.peak_allocated), max(before[1], allocator.peak_reserved)

    def reset_peaks(self, index: int) -> None:
        """What ``torch.vgpu.max_memory_allocated()`` counts starts again; ``peak_allocated`` does not."""
        self._before_reset[index] = self.peaks(index)
        self.allocators[index].reset_peaks()

    @property
    def peak_host(self) -> int:
        """The most bytes offloaded to host memory at any time."""
        return self._memory.peak_host

    def device_peak(self, index: int = 0) -> int:
        """The most bytes in use on a card at any time: reserved, the CUDA context, and what others hold."""
        return self.peaks(index)[1] + self.card.context + self.in_use

    def reset_host_peak(self) -> None:
        """``peak_host`` starts again from what is on the host now."""
        self._memory.peak_host = self._memory.host

    @property
    def notes(self) -> list[str]:
        """What is missing from the bytes, because it is not published: one sentence each."""
        return list(self._mode.notes)

    def micro_batch_begins(self) -> None:
        """The code asks for the next micro-batch: ``begins`` holds how many collectives had been called before each."""
        self.begins.append(len(self._mode.calls))

    def communication(self, step: int | None = None) -> Communication:
        """The collectives called on virtual tensors; ``step``: those of the n-th optimizer step alone, counted from 1."""
        return Communication(tuple(call for ended, call in self._mode.calls if step is None or ended == step - 1))

    @property
    def known_reads(self) -> int:
        """How often Python, or the shape of a result, asked for values that are known."""
        return self._values.known_reads

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are known: they came from the CPU, and were followed since."""
        return self._values.known(tensor)

    def is_its_hook(self, hook: Any) -> bool:
        """Whether a hook is there because this card is open."""
        return getattr(hook, "__self__", None) is self._mode

    @property
    def reads(self) -> dict[str, int]:
        """Where Python read floating-point numbers that no one computed, by ``file:line``: each read gave 0.0."""
        return dict(self._values.reads)


def _events(mode: _Mode, device: torch.device) -> Any:
    return lambda: mode.events_of(device)


class _Memory:
    """Hands the storages of each card to its allocator, and counts those in host memory."""

    def __init__(self, card: GPU, cards: list[CachingAllocator]) -> None:
        self._card, self.cards = card, cards
        self.host = self.peak_host = 0

    def malloc(self, entry: Storage) -> None:
        if entry.device.type == "cpu":
            self._count(entry.nbytes)
            return
        index = entry.device.index or 0
        try:
            self.cards[index].malloc(entry.number, entry.nbytes, entry.stream)
        except rules.OutOfMemoryError as error:
            raise self._out_of_memory(error, index) from None

    def free(self, entry: Storage) -> None:
        if entry.device.type == "cpu":
            self._count(-entry.nbytes)
        else:
            self.cards[entry.device.index or 0].free(entry.number)

    def move(self, old: Storage, new: Storage) -> None:
        if old.device.type != "cpu":
            self.cards[old.device.index or 0].move(old.number, new.number)

    def resize(self, entry: Storage, before: int) -> None:
        if entry.device.type == "cpu":
            self._count(entry.nbytes - before)
        else:
            self.cards[entry.device.index or 0].free(entry.number)
            self.malloc(entry)

    def stream(self) -> int:
        return backend.current.number

    def _count(self, nbytes: int) -> None:
        self.host += nbytes
        self.peak_host = max(self.peak_host, self.host)

    def _out_of_memory(self, error: rules.OutOfMemoryError, index: int) -> torch.OutOfMemoryError:
        allocator = self.cards[index]
        capacity = allocator.capacity or 0
        others = self._card.memory - capacity
        cached = allocator.reserved - allocator.allocated
        result = torch.OutOfMemoryError(
            f"{self._card.name} out of memory. Tried to allocate {format_bytes(error.segment)}, for {format_bytes(error.requested)}. "
            f"Of its {format_bytes(self._card.memory)} the CUDA context and others hold {format_bytes(others)}, "
            f"{format_bytes(allocator.allocated)} are allocated by PyTorch and {format_bytes(cached)} reserved but unallocated; "
            f"{format_bytes(max(0, capacity - allocator.reserved))} are free."
        )
        result.requested, result.segment, result.index = error.requested, error.segment, index  # type: ignore[attr-defined]
        return result


class _Fake(FakeTensorMode):
    """Computes shapes, types and strides; its tensors count as having memory."""

    has_memory = True
    _open: ClassVar[list[_Fake]] = []
    avoid_device_init = True  # else torch.tensor(..., device=...) looks for real kernels

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._open.append(self)
        try:
            yield
        finally:
            self._open.remove(self)

    def innermost(self) -> bool:
        return bool(self._open) and self._open[-1] is self

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self not in self._open:
            raise RuntimeError(
                "This tensor is on a virtual GPU whose `with` block has ended, so nothing would be counted; "
                "keep what uses it inside the block."
            )
        return super().dispatch(func, types, args, kwargs or {})


class _Mode(Recorder):
    """Sees every operator: runs those on virtual tensors without data, leaves all others alone, and records the memory."""

    def __init__(self, card: GPU, values: Values, memory: _Memory) -> None:
        self._card, self._values, self._memory = card, values, memory
        self._fake = _Fake(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._workspaces: dict[tuple[torch.device, bool], Workspace] = {}
        self._kernel: list[list[int]] = []  # what the running kernel takes for itself, cut where its next output is allocated
        self._held: list[Workspace] = []
        self.events: dict[torch.device, Any] = {}
        self.notes: dict[str, None] = {}  # each once, in order
        self.calls: list[tuple[int, Call]] = []  # collectives, with how many optimizer steps had ended before
        super().__init__(None, None, None)

    def _new_ledger(self) -> Ledger:
        return Ledger(self._now, self._memory)

    def fake_opened(self) -> AbstractContextManager[None]:
        return self._fake.opened()

    def events_of(self, device: torch.device) -> Any:
        return self._ledger.events(device)

    def _finish(self) -> None:
        for device in (*backend.innermost().devices, _HOST):
            self.events[device] = self._ledger.events(device)
        self._ledger.close(_HOST)
        self._workspaces.clear()

    def _storages(self, tensor: torch.Tensor) -> list[torch.UntypedStorage]:
        return storages_of(tensor) if type(tensor) is not torch.Tensor and self._is_followed(tensor) else []

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self._fake
        return tensor.device.type == backend.NAME  # a wrapper of virtual tensors

    # Running an operator

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        if _traced() or not self._is_virtual(tensors, kwargs):
            return func(*args, **kwargs)
        if any(isinstance(t, FakeTensor) and t.fake_mode is not self._fake for t in tensors):
            raise RuntimeError(
                f"{func} got a tensor of another virtual GPU or of a FakeTensorMode; tensors stay in the `with` block they were made in."
            )
        if collectives.is_collective(func) and (call := collectives.call_of(func, args)) is not None:
            self.calls.append((self._ledger.steps, call))
        kwargs = {name: None if name in ("generator", "pin_memory") else value for name, value in kwargs.items()}
        special = _SPECIAL.get(func)
        if special is None and _is_composite(func):  # in inference mode: what it is made of allocates
            with self.again():
                return func.decompose(*args, **kwargs)
        out = special(self, func, args, kwargs) if special is not None else self._compute(func, args, kwargs, tensors)
        if any(is_virtual(t) and t.layout is not torch.strided for t in tensors_in(out)):
            raise NotImplementedError(
                f"{func} makes a sparse tensor, whose bytes depend on values, so it cannot run on a virtual GPU. Plan a dense version: "
                "sparse=False for an embedding, which needs at least as much."
            )
        if _is_list_in_place(func):  # CUDA's kernels do it themselves: increment_version in ATen's ForeachFunctors.cuh
            torch.autograd.graph.increment_version([t for t in args[0] if is_virtual(t) and not t.is_inference()])
        out = kernels.kernel_outputs(func, args, kwargs, out)
        if (note := kernels.UNPUBLISHED.get(func)) is not None:
            self.notes[note] = None
        if func not in _READS:
            self._values.follow(func, args, kwargs, out, tensors)
        touched = tensors_in(out) or tensors  # some write into what they get, and return nothing
        self._kernel = _cut(kernels.transients(func, args, kwargs, out, self._card)) if any(map(is_virtual, touched)) else []
        return out

    def _is_virtual(self, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        if any(isinstance(t, FakeTensor) for t in tensors):
            return True
        device = kwargs.get("device")
        # Memory is pinned to be exchanged with a card: it is virtual as well.
        return (device is not None and device.type == backend.NAME) or bool(kwargs.get("pin_memory"))

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        try:
            out = shapes.compute(self._fake, func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._by_value(func, args, kwargs, tensors)
        except (UnsupportedOperatorException, RuntimeError) as error:
            if not isinstance(error, UnsupportedOperatorException) and "no fake impl" not in str(error):
                raise
            raise NotImplementedError(
                f"{func} has no shape function, so it cannot run on a virtual GPU. Register one with "
                f"torch.library.register_fake({str(func).removesuffix('.default').replace('.', '::', 1)!r}), or plan a version without it."
            ) from error
        return out

    def _by_value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """An operator whose result, or the shape of it, depends on values: if they are known, the CPU says."""
        if not all(map(self._values.known, tensors)):
            raise self._values.unknown(func) from None
        self._values.known_reads += 1
        real = self._values.on_twins(func, args, kwargs)
        device = next(t.device for t in tensors if is_virtual(t))

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            with self._fake:
                virtual = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            self._values.learn(virtual, tensor)
            return virtual

        return map_tensors(moved, real)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run operators of our own as those of the code: inside a handler a mode is not active."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    # What a card does besides

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled code comes here, and the wrapper that keeps it out takes time with each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if not self._fake.innermost():
            return func(*args, **(kwargs or {}))  # an inner context is open: its tensors are its own
        self._kernel = []
        try:
            out = self._see(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            self._explain(error)
            raise
        except UnknownValueError as error:
            error.add_note(f"This was {self._now.where()}.")
            raise
        self._kernel_ends(func, args, kwargs or {}, out)
        return out

    def _explain(self, error: torch.OutOfMemoryError) -> None:
        """Let an out-of-memory error of ours say who holds what."""
        index = getattr(error, "index", None)
        if index is None or hasattr(error, "report"):
            return
        allocator, device = self._memory.cards[index], torch.device(backend.NAME, index)
        report = OutOfMemoryReport(
            device=self._card.name,
            requested=error.requested,  # type: ignore[attr-defined]
            segment=error.segment,  # type: ignore[attr-defined]
            capacity=allocator.capacity,
            allocated=allocator.allocated,
            reserved=allocator.reserved,
            where=self._now.where(),
            trace=MemoryTrace(self._ledger.events(device), str(device)),
            largest_hole=allocator.largest_hole,
        )
        error.report = report  # type: ignore[attr-defined]
        error.add_note(f"{report.summary()}\nprint(error.report) lists who holds the memory.")

    def _results(self, func: Any, out: Any) -> list[torch.Tensor]:
        return kernels.in_order(func, tensors_in(out))

    def _before_result(self, tensor: torch.Tensor) -> None:
        if len(self._kernel) > 1:
            self._take(self._kernel.pop(0), tensor.device)

    def _kernel_ends(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """All outputs are there; what the kernel takes after them, and the workspace of cuBLAS, which stays."""
        device = next((t.device for t in tensors_in(out) or tensors_in((args, kwargs)) if t.device.type == backend.NAME), None)
        if device is None:
            return
        last = [nbytes for part in self._kernel for nbytes in part]
        copies = next((i for i, nbytes in enumerate(last) if nbytes < 0), len(last))
        self._take(last[:copies], device)
        if cublas.uses_cublas(func, args, kwargs) and (where := (device, self._now.in_backward())) not in self._workspaces:
            self._workspaces[where] = self._workspace(cublas.cublas_workspace(self._card), device)
        self._take(last[copies:], device)
        self._held.clear()

    def _take(self, sizes: list[int], device: torch.device) -> None:
        for nbytes in sizes:
            if nbytes > 0:
                self._held.append(self._workspace(nbytes, device))
            else:
                self._held.remove(next(w for w in self._held if w.nbytes() == -nbytes))

    def _workspace(self, nbytes: int, device: torch.device) -> Workspace:
        workspace = Workspace(nbytes)
        self._ledger.made(workspace, device).category = Category.WORKSPACE
        return workspace


def _traced() -> bool:
    """Whether a FakeTensorMode of others is active, as while DTensor asks for the shape of a result: nothing gets memory then."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


_FAKE = torch._C._TorchDispatchModeKey.FAKE


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is nothing but calls of others, on a card too."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return has("CompositeImplicitAutograd") and not has("PrivateUse1")


@functools.cache
def _is_list_in_place(func: Any) -> bool:
    """Whether an operator writes into a list of tensors, whose versions nothing raises on the way here."""
    name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _cut(sizes: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for nbytes in sizes:
        if nbytes:
            parts[-1].append(nbytes)
        else:
            parts.append([])
    return parts


def _read_scalar(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return mode._values.read(func, args[0])


def _attention(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In inference mode it comes here whole: what it is made of, as on a card."""
    with mode.again():
        return attention.attention(*args, **kwargs, capability=mode._card.capability)


def _index(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``a[mask]`` is ``a[mask.nonzero()]``, on the card too; the shape follows from a mask whose values are known."""
    indices: list[torch.Tensor | None] = []
    if not is_virtual(args[0]) and any(index is not None and index.device.type == backend.NAME for index in args[1]):  # CUDA's words
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
            continue
        if not mode._values.known(index):
            if func is _aten.index.Tensor:
                raise mode._values.unknown(func)
            return args[0] if func._schema.is_mutable else mode._compute(_aten.clone.default, args[:1], {}, [args[0]])
        with mode.again():
            places = torch.nonzero(index).unbind(1)
            indices.extend(i if is_virtual(i) else _aten._to_copy.default(i, device=args[0].device) for i in places)
    args = (args[0], indices, *args[2:])
    return mode._compute(func, args, kwargs, tensors_in(args))


def _masked_select(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``a.masked_select(mask)`` is ``a[mask]`` of both expanded."""
    if not mode._values.known(args[1]):
        raise mode._values.unknown(func)
    with mode.again():
        tensor, mask = torch.broadcast_tensors(*args)
        return _aten.index.Tensor(tensor, [mask])


def _pack(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many sequences go on at each time step is known: it is in host memory, as the lengths are."""
    data, lengths, batch_first = args
    lengths = mode._values.real(func, lengths)
    steps = torch.arange(int(lengths.max()))
    sizes = (lengths[:, None] > steps).sum(0)
    first = data.transpose(0, 1) if batch_first else data
    with mode.again():
        return torch.cat([first[step, :size] for step, size in enumerate(sizes.tolist())]), sizes


def _writes_only(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An operator that changes what it gets, allocates nothing and returns nothing."""


def _copy(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``a.copy_(b)`` from a virtual tensor into a real one is a read."""
    target, source = args[0], args[1]
    if is_virtual(target):
        return mode._compute(func, args, kwargs, [target, source])
    return target.copy_(mode._values.real(func, source))


def _finite_check(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unscaling finds no infinite gradient: ``found_inf`` keeps its value."""
    with mode._fake:
        return func(*args, **kwargs)


def _laid_out(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator for which PyTorch's shape function chooses another order in memory than CUDA: what follows copies, or need not."""
    layout = _LAYOUTS[func](*args)

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() != {torch.channels_last: 4, torch.channels_last_3d: 5}.get(layout, tensor.dim()):
            return tensor  # the gradient of a bias
        with mode._fake:
            return torch.empty_like(tensor, memory_format=layout)

    return map_tensors(laid_out, mode._compute(func, args, kwargs, tensors_in((args, kwargs))))


def _contiguous(*args: Any) -> torch.memory_format:
    """``native/cuda/layer_norm_kernel.cu``, ``native/SoftMax.cpp``, ``native/Loss.cpp``, ``native/GatedLinearUnit.cpp``."""
    return torch.contiguous_format


def _of_convolution(input: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.memory_format:  # noqa: A002
    """Channels last if input or weight are: ``native/ConvUtils.h``, ``cudnn_conv_suggest_memory_format``."""
    if torch.backends.cudnn.enabled and torch.float64 not in (input.dtype, weight.dtype) and weight.dim() in (4, 5):
        for layout in map(suggest_memory_format, (input, weight)):
            if layout is not torch.contiguous_format:
                return layout
    return torch.contiguous_format


_LAYOUTS: dict[Any, Any] = {
    _aten.convolution.default: _of_convolution,
    _aten.convolution_backward.default: lambda grad, *args: _of_convolution(*args),
    **dict.fromkeys((_aten.native_layer_norm_backward.default, _aten.glu_backward.default), _contiguous),
    **dict.fromkeys((_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default), _contiguous),
    **dict.fromkeys((_aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default), _contiguous),
}


def _grouped_product(mode: _Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Experts' products. CUDA takes float32 too, which PyTorch's shape function refuses, and begins rows at multiples of 16 bytes.

    Reference: ``native/GroupedMMUtils.h``, ``_grouped_mm_validate_inputs``, ``create_grouped_gemm_output_tensor``.
    """
    one, other = args[:2]
    if (capability := mode._card.capability) < (8, 0):
        raise NotImplementedError(
            f"PyTorch multiplies groups of rows ({func}) on cards of compute capability 8.0 and later, and this one has "
            f"{'.'.join(map(str, capability))}: libraries take another way on it. Ask for it by name: in transformers, "
            "experts_implementation='batched_mm'."
        )
    if one.dtype != torch.float32 or other.dtype != torch.float32:
        mode._compute(func, args, kwargs, tensors_in((args, kwargs)))  # it raises where CUDA does
    size = [one.size(-2), other.size(-1)]
    if one.dim() == other.dim():
        size.insert(0, one.size(0) if one.dim() == 3 else args[2].size(0))
    row = round_up(size[-1] * one.element_size(), 16) // one.element_size()
    with mode._fake:
        return torch.empty_strided(size, [size[-2] * row, row, 1][-len(size) :], dtype=one.dtype, device=one.device)


def _overloads(name: str) -> list[Any]:
    packet = getattr(_aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


_SPECIAL: dict[Any, Any] = {
    **dict.fromkeys(_LAYOUTS, _laid_out),
    _aten._grouped_mm.default: _grouped_product,
    _aten._local_scalar_dense.default: _read_scalar,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.copy_.default: _copy,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _finite_check,
    _aten.masked_select.default: _masked_select,
    _aten._pack_padded_sequence.default: _pack,
    **dict.fromkeys((op for name in ("_fused_sgd_", "_fused_adagrad_") for op in _overloads(name)), _writes_only),
    **dict.fromkeys((_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default), _index),
}
_READS = {_aten._local_scalar_dense.default, _aten._amp_foreach_non_finite_check_and_unscale_.default}
