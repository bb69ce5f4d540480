"""cuda_names(): while it lasts, code that says "cuda", ``.cuda()`` or ``torch.cuda`` means the open virtual card."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from vramlab.virtual import backend
from vramlab.virtual.device import VirtualGPU


@contextmanager
def cuda_names(gpu: VirtualGPU) -> Iterator[None]:
    """Run code that was written for CUDA on an open virtual card, unchanged.

    Args:
        gpu: the innermost virtual GPU that is open.

    ``torch.device("cuda")`` can be made and handed on; a tensor's own ``device`` says what it is, ``vgpu:0``. What
    `vramlab.virtual.backend.Module` answers, ``torch.cuda`` answers too; the rest of it raises RuntimeError by line. Modules
    are built in virtual host memory and not initialised, from where they move to the card. A float that is read gives 0.0.
    """
    with ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for name, value in _answers(getattr(torch, backend.NAME)).items():
            put(torch.cuda, name, value)
        put(torch, "Generator", _generator(torch.Generator))
        put(DeviceContext, "__init__", _device_context(DeviceContext.__init__))
        undo.enter_context(gpu.building("cpu"))
        gpu._values.building = False  # the cell does not only build: what it reads of a loss is 0.0
        undo.enter_context(_Names())
        yield


def card_for(device: Any) -> Any:
    """The virtual card for what names a CUDA device; anything else as it is."""
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device(backend.NAME, getattr(torch, backend.NAME)._index(device))
    return device


class _Names(TorchFunctionMode):
    """Sees every call of a function that makes or moves tensors before it looks for CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return _to_card(*args, **kwargs)
        if func == _IS_CUDA:
            return args[0].device.type == backend.NAME
        if func is torch.Tensor.to and len(args) > 1:  # the one function that takes a device's name by position
            args = (args[0], card_for(_by_number(args[1])), *args[2:])
        args = tuple(card_for(a) if isinstance(a, torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = card_for(_by_number(kwargs["device"]))
        return func(*args, **kwargs)


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _by_number(device: Any) -> Any:
    return torch.device(backend.NAME, device) if isinstance(device, int) and not isinstance(device, bool) else device


def _to_card(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format) -> Any:
    goal = card_for("cuda" if device is None else _by_number(device))
    return tensor.to(goal, non_blocking=non_blocking, memory_format=memory_format)


def _answers(module: Any) -> dict[str, Any]:
    """What ``torch.cuda`` answers in place of its own: all that the device's module can say, and what follows from it."""
    found = {name: getattr(module, name) for name in dir(type(module)) if hasattr(torch.cuda, name) and not name.startswith("__")}

    def properties(device: Any = None) -> types.SimpleNamespace:
        card = backend.innermost().card
        return types.SimpleNamespace(
            name=card.name,
            total_memory=card.memory,
            major=card.capability[0],
            minor=card.capability[1],
            multi_processor_count=card.sms,
        )

    def statistics(device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": module.memory_allocated(device),
            "allocated_bytes.all.peak": module.max_memory_allocated(device),
            "reserved_bytes.all.current": module.memory_reserved(device),
            "reserved_bytes.all.peak": module.max_memory_reserved(device),
        }

    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    return found | {
        "get_device_properties": properties,
        "memory_stats": statistics,
        "reset_max_memory_allocated": module.reset_peak_memory_stats,
        "ipc_collect": nothing,
        "seed_all": nothing,
        "seed": nothing,
    }


def _generator(before: Any) -> type:
    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, before)

    class Generator(metaclass=Meta):
        """A generator for the card is the CPU's, see `vramlab.virtual.patches`."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return before(card_for(device))

    return Generator


def _device_context(original: Callable[..., None]) -> Callable[..., None]:
    """``with torch.device("cuda")`` and ``torch.set_default_device("cuda")``."""

    def init(self: DeviceContext, device: Any) -> None:
        original(self, card_for(device))

    return init
