"""Where a run happens: choosing a device, timing it honestly, and asking the driver what the card holds."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import pynvml
import torch

from vramlab.memory.report import OutOfMemoryReport
from vramlab.memory.trace import DeviceCounters, MemoryTrace
from vramlab.units import parse_bytes

T = TypeVar("T")


def choose_device(device: torch.device | str = "auto") -> torch.device:
    """The device to use: a named one, or for ``"auto"`` what VRAMLAB_DEVICE says, else CUDA if there is some, else the CPU.

    Warns when the CPU is chosen although the driver sees a card.

    Raises:
        ValueError: not a device, or CUDA is asked for and this torch has none (the message says how to get it).
    """
    name = str(device)
    if name == "auto":
        name = os.environ.get("VRAMLAB_DEVICE", "auto")
    if name in ("", "auto"):
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if advice := cuda_advice():
            warnings.warn(advice, stacklevel=2)
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"A device is 'auto', 'cpu', 'cuda' or 'cuda:1', got {name!r}.") from error
    if is_virtual_device(chosen):
        return chosen
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"vramlab measures on 'cpu' and 'cuda', got {name!r}; on a Mac use 'cpu', where the same tensors are made.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"Device {name!r} needs CUDA, and torch {torch.__version__} here has none. {cuda_advice() or 'Use cpu.'}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"Device {name!r} does not exist: there are {torch.cuda.device_count()} CUDA devices, numbered from 0.")
    return chosen


def is_virtual_device(device: torch.device) -> bool:
    """Whether this is a virtual GPU, which only `vramlab.virtual` makes: its module can build models."""
    return device.type not in ("cpu", "cuda") and hasattr(getattr(torch, device.type, None), "building")


def building(device: torch.device) -> AbstractContextManager[None]:
    """Around the making of a model that goes to this device: for a virtual GPU it costs no memory, for others nothing changes."""
    return getattr(torch, device.type).building() if is_virtual_device(device) else nullcontext()


def cuda_advice() -> str:
    """What to do when the driver sees a card that torch cannot use; empty when there is nothing to mend."""
    cards = [] if torch.cuda.is_available() else cards_seen_by_driver()
    if not cards:
        return ""
    if torch.version.cuda is None:
        remedy = (
            "this torch is a CPU build. Install a CUDA build into the same environment: "
            "pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cu130"
        )
    else:
        remedy = f"torch's CUDA {torch.version.cuda} does not run on this driver: update the NVIDIA driver, or take an older CUDA build."
    return f"The driver sees {', '.join(cards)}, but {remedy}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; nothing on the CPU."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        # Without an index the current device is meant, and some backends have only one.
        module.synchronize() if device.index is None else module.synchronize(device)


class Stopwatch:
    """Seconds that a block takes on a device, waiting for it before start and before stop.

    ``seconds`` is set when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        synchronize(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:  # after an error the device may be in no state to wait for
            synchronize(self._device)
        self.seconds = time.perf_counter() - self._start


class PeakCounters:
    """Peaks of CUDA's caching allocator over a block, a virtual card's too; ``result`` stays None on other devices.

    The allocator keeps one peak for all, so a block inside another first saves the outer one's before it resets.

    Args:
        device: a CUDA device, or any other for no counters.
        ask_driver: also ask NVML what the card holds, which takes longer than a small step.
    """

    _active: ClassVar[list[PeakCounters]] = []

    def __init__(self, device: torch.device | None, *, ask_driver: bool = True) -> None:
        self._ask_driver = ask_driver
        self._device = device if device is not None and (device.type == "cuda" or is_virtual_device(device)) else None
        self._allocated = self._reserved = 0
        self.result: DeviceCounters | None = None

    def __enter__(self) -> PeakCounters:
        if self._device is not None:
            self._save_all()
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)
            PeakCounters._active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._device is not None:
            self._save_all()
            PeakCounters._active.remove(self)
            held = memory_in_use(self._device) if self._ask_driver else None
            self.result = DeviceCounters(self._allocated, self._reserved, held)

    @staticmethod
    def _save_all() -> None:
        for counters in PeakCounters._active:
            allocated, reserved = _peaks(counters._device)
            counters._allocated, counters._reserved = max(counters._allocated, allocated), max(counters._reserved, reserved)


def _peaks(device: torch.device | None) -> tuple[int, int]:
    """The most bytes allocated and reserved since the counters were reset."""
    card = torch.get_device_module(device)
    if device is not None and is_virtual_device(device):
        allocated, reserved = card.peaks(device)
        return allocated, reserved
    return card.max_memory_allocated(device), card.max_memory_reserved(device)


def memory_in_use(device: torch.device) -> int | None:
    """Bytes in use on a card by everything: contexts, other processes, the desktop. None where NVML has no answer."""
    if is_virtual_device(device):
        return int(torch.get_device_module(device).device_memory_used(device))
    # By UUID: CUDA_VISIBLE_DEVICES renumbers devices for torch and not for NVML.
    uuid = torch.cuda.get_device_properties(device).uuid
    return _ask_nvml(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")).used), None)


def asked_for(error: BaseException) -> int:
    """Bytes that CUDA's out-of-memory error says it tried to allocate, which are rounded in its text; 0 if it does not say."""
    asked = re.search(r"Tried to allocate ([\d.]+ [KMG]?i?B)", str(error))
    return parse_bytes(asked[1]) if asked else 0


def largest_hole(device: torch.device) -> int:
    """Bytes of the largest free block of CUDA's caching allocator."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    blocks = (block for segment in torch.cuda.memory_snapshot() if segment["device"] == index for block in segment["blocks"])
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)


def explain_out_of_memory(error: BaseException | None, device: torch.device, trace: MemoryTrace) -> None:
    """Let a real card's out-of-memory error say who held the memory, as its ``report``; other errors are left alone.

    From CUDA's own counters, and from what a recorder saw; what was asked for stands in torch's message.
    """
    if not isinstance(error, torch.OutOfMemoryError) or device.type != "cuda" or hasattr(error, "report"):
        return
    wanted = asked_for(error)
    reserved = torch.cuda.memory_reserved(device)
    report = OutOfMemoryReport(
        device=torch.cuda.get_device_name(device),
        requested=wanted,
        segment=wanted,
        capacity=reserved + torch.cuda.mem_get_info(device)[0],
        allocated=torch.cuda.memory_allocated(device),
        reserved=reserved,
        where=f"an operator in {trace.last_phase}",
        trace=trace,
        largest_hole=largest_hole(device),
    )
    error.report = report  # type: ignore[attr-defined]
    error.add_note(f"{report.summary()}\nprint(error.report) lists who held the memory.")


def cards_seen_by_driver() -> list[str]:
    """Names of the NVIDIA cards that the driver sees, whatever torch can do; empty without a driver."""

    def names() -> list[str]:
        handles = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]

    return _ask_nvml(names, [])


def _ask_nvml(question: Callable[[], T], otherwise: T) -> T:
    try:
        with _nvml():
            return question()
    except pynvml.NVMLError:  # no driver, no card, or a platform (WSL, MIG, Jetson) that does not answer this
        return otherwise


@contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def describe() -> dict[str, Any]:
    """This machine as vramlab sees it: torch's version and CUDA build, the device chosen, the driver's cards, advice."""
    with warnings.catch_warnings(action="ignore"):  # the same advice stands below
        device = choose_device()
    return {
        "torch": torch.__version__,
        "CUDA build": torch.version.cuda or "none",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cards seen by the driver": ", ".join(cards_seen_by_driver()) or "none",
        "advice": cuda_advice() or "nothing to mend",
    }
