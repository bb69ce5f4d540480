"""The device type of virtual GPUs: what PyTorch asks of a device, registered once in a process and for good."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

import torch
from torch._library.simple_registry import find_torch_dispatch_rule
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from vramlab.gpus import GPU
from vramlab.memory.allocator import CachingAllocator
from vramlab.virtual.worker import uninterrupted

NAME = "vgpu"


class Context(Protocol):
    """What is asked of an open `vramlab.virtual.device.VirtualGPU`."""

    card: GPU
    in_use: int
    devices: list[torch.device]
    streams: Iterator[int]
    """The numbers of streams that are made."""
    memory_asked: int
    """How often the code has asked how much memory is allocated, reserved or free."""

    @property
    def allocators(self) -> list[CachingAllocator]: ...
    def building(self, device: torch.device | str | None = None) -> contextlib.AbstractContextManager[None]: ...
    def parameter_moved(self, parameter: torch.Tensor) -> None: ...
    def reset_peaks(self, index: int) -> None: ...


contexts: list[Context] = []
"""The contexts that are open, the innermost last: it answers."""
lost: list[BaseException] = []
"""Exceptions that were on their way through autograd's engine, see `_Guard`."""


def register() -> None:
    """Make ``vgpu`` a device type of this process, which nothing undoes.

    Raises:
        RuntimeError: torch can use CUDA here, or another backend has the one place that torch has for such a device.
    """
    taken = torch._C._get_privateuse1_backend_name()
    if taken == NAME:
        return
    if taken != "privateuseone":
        raise RuntimeError(
            f"torch has room for one additional device type in a process, and {taken!r} is registered here already. "
            "Use vramlab.plan(), which works in a process of its own, or start a new one."
        )
    if torch.cuda.is_available():
        raise RuntimeError(
            "A virtual GPU changes this process for good: backward on a real CUDA card would fail in it afterwards (pytorch issue "
            "161129). Use vramlab.plan(), which works in a process of its own, or start Python with CUDA_VISIBLE_DEVICES=''."
        )
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module(), device_guard=_Guard())
    # C++ calls these where it may not throw: no KeyboardInterrupt in them.
    for function in (_Guard.type_, find_torch_dispatch_rule, *vars(Module).values()):
        if isinstance(function, FunctionType):
            uninterrupted(function)


def innermost() -> Context:
    """The context that virtual devices belong to now.

    Raises:
        RuntimeError: none is open.
    """
    if not contexts:
        raise RuntimeError("No virtual GPU is open here: write `with vramlab.virtual_gpu('RTX 4090') as gpu: ...`.")
    return contexts[-1]


class _Guard(torch._C._acc.DeviceGuard):
    """Tells C++ which device type this is, and keeps an exception from ending the process.

    When a hook or an operator raises in backward, the C++ stack is unwound with Python's exception still pending; then
    ``exchangeStream`` asks the guard for its type from a destructor, where a second error means ``std::terminate``. So the
    pending exception is taken away here, first of all, and `caught` gives it back to who called backward.
    """

    def type_(self) -> Any:
        # Before this call nothing may be looked up on a type: CPython's _PyType_Lookup clears a pending exception.
        try:
            _any_call()
        except BaseException as error:
            lost.append(error)
        return _PRIVATE_USE


_any_call = ctypes.pythonapi.PyErr_Occurred  # as any function of ctypes.pythonapi it raises what is pending
_PRIVATE_USE = torch._C._autograd.DeviceType.PrivateUse1


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call autograd's engine, and raise what was raised inside in place of the SystemError about it, with its own context."""
    before = len(lost)
    try:
        return function(*args, **kwargs)
    except SystemError:
        if len(lost) == before:
            raise
        original = lost[before]
    finally:
        del lost[before:]
    trace = original.__traceback__
    while trace is not None and trace.tb_frame.f_code is _Guard.type_.__code__:
        trace = trace.tb_next
    try:
        raise original.with_traceback(trace)
    finally:
        del original, trace  # in a frame of its own traceback it would hold itself, and all tensors there, until the next collection


class Module:
    """``torch.vgpu``: answers as ``torch.cuda`` does, for the innermost context."""

    class Event:
        """Nothing runs, so everything has happened."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def record(self, stream: Any = None) -> None: ...
        def wait(self, stream: Any = None) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Any) -> float:
            return 0.0

    class Stream:
        """The order in which things run is that of the program; but memory that is allocated on a stream stays that stream's.

        ``number``: 0 is the default stream.
        """

        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            self.number = next(innermost().streams)

        def wait_stream(self, stream: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def record_event(self, event: Any = None) -> Any:
            return event or Module.Event()

        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    def __init__(self) -> None:
        self._current = 0

    # The device

    def is_available(self) -> bool:
        return bool(contexts)

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(innermost().devices) if contexts else 1

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = self._index(device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._current = self._current, self._index(device)
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: Any = None) -> None: ...

    def get_device_name(self, device: Any = None) -> str:
        return innermost().card.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return innermost().card.capability

    def can_device_access_peer(self, device: Any, peer: Any) -> bool:
        return bool(innermost().card.p2p)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or innermost().card.supports_bf16

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Build in virtual host memory, from where a model moves to the card as it does in a real run."""
        return innermost().building("cpu")

    # Streams

    def current_stream(self, device: Any = None) -> Any:
        return current

    def default_stream(self, device: Any = None) -> Any:
        return default

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = current
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def set_stream(self, stream: Any) -> None:
        global current
        current = current if stream is None else stream

    def is_current_stream_capturing(self) -> bool:
        return False

    # Random numbers: there are none, but checkpointing keeps the state of the device's generator

    def manual_seed(self, seed: int) -> None: ...
    def manual_seed_all(self, seed: int) -> None: ...
    def initial_seed(self) -> int:
        return 0

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)  # as large as CUDA's, which is in host memory too

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    # Memory

    def memory_allocated(self, device: Any = None) -> int:
        return self._allocator(device).allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._allocator(device).peak_allocated

    def memory_reserved(self, device: Any = None) -> int:
        return self._allocator(device).reserved

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._allocator(device).peak_reserved

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        innermost().reset_peaks(self._index(device))

    def empty_cache(self) -> None:
        for allocator in innermost().allocators:
            allocator.release_cached()

    def device_memory_used(self, device: Any = None) -> int:
        gpu = innermost()
        return self._allocator(device).reserved + gpu.card.context + gpu.in_use

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = innermost().card.memory
        return max(0, total - self.device_memory_used(device)), total

    def peaks(self, device: Any) -> tuple[int, int]:
        """The most bytes allocated and reserved, for our own counters: the code has not asked."""
        allocator = innermost().allocators[self._index(device)]
        return allocator.peak_allocated, allocator.peak_reserved

    def _allocator(self, device: Any) -> Any:
        gpu = innermost()
        gpu.memory_asked += 1
        return gpu.allocators[self._index(device)]

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self._current if index is None else index


def _default_stream() -> Any:
    stream = object.__new__(Module.Stream)
    stream.number = 0
    return stream


default = _default_stream()
"""The stream that everything runs on unless another is chosen."""
current = default
"""The stream that new memory is for."""
