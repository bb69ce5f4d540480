"""budget(): a smaller card. What does not fit raises an out-of-memory error, on the CPU too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from vramlab.devices import asked_for, choose_device, largest_hole
from vramlab.gpus import CONTEXT, CONTEXT_RANGE
from vramlab.memory import allocator as rules
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.free import forget_backward
from vramlab.memory.ledger import Ledger, Storage
from vramlab.memory.recorder import Recorder
from vramlab.memory.report import OutOfMemoryReport
from vramlab.memory.trace import Category, DeviceCounters, MemoryTrace
from vramlab.tensors import is_virtual
from vramlab.units import format_bytes, parse_bytes


def budget(
    size: int | str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
    in_use: int | str = 0,
) -> Budget:
    """Run code as on a card of this size: ``with budget("12 GiB") as trace: ...``.

    What does not fit raises ``torch.OutOfMemoryError`` at the operator that asked, with the attributes ``requested`` and
    ``segment`` (what the operator asked for, and what the allocator would have taken from the driver for it, in bytes),
    ``trace`` (all events until then) and ``report`` (who holds the memory). Budgets nest, the inner one is the smaller.

    Args:
        size: of the card; ``"24 GiB"`` is 2**30 * 24 bytes, ``"24 GB"`` is 10**9 * 24, which are 22.35 GiB.
        model, optimizer: what they hold already counts from the start, see `vramlab.record`.
        device: whose memory is limited. None: where the model's (or optimizer's) parameters are, else as
            `vramlab.devices.choose_device` chooses.
        in_use: bytes of it that others hold, the desktop say; ``"0.8 GiB"``.

    Returns:
        A context manager whose ``as`` value is a `MemoryTrace`, as of `vramlab.record`.

    Raises:
        ValueError: a size that is none, larger than the card or than the budget around it, or smaller than what is in use
            already; a virtual card, which has a size of its own.
        TypeError: no module, no optimizer.
        RuntimeError: the same budget is entered twice.

    On the CPU each storage gets a block from a `CachingAllocator` of ``size - in_use`` bytes, so blocks are rounded and
    fragmented as on a card: storages up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB. What
    existed before and is not the model's counts from its first use in the block. A CPU has no CUDA context:
    ``in_use=vramlab.gpus.CONTEXT`` counts one. The limits of `vramlab.record` hold: what an operator allocates inside itself
    is not seen.

    On CUDA the caching allocator is limited by its own fraction, for this process alone: child processes need a budget of
    their own. Besides ``in_use`` the CUDA context counts: what the card holds beyond this process's tensors if that is within
    `vramlab.gpus.CONTEXT_RANGE` (else others hold memory too), or `vramlab.gpus.CONTEXT`. Cached blocks are given back first.
    It is not a small card in every respect: libraries that ask the driver how much is free (cuDNN, when it chooses an
    algorithm) are told of the whole card, and may choose otherwise, and fail, on a truly small one (pytorch issue 69688).
    """
    if not isinstance(model, nn.Module | None) or not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(
            "budget() takes a size, a module and an optimizer, the last two may be left out, got "
            f"{type(model).__name__} and {type(optimizer).__name__}; write budget('12 GiB', model, optimizer)."
        )
    return Budget(parse_bytes(size), model, optimizer, device, parse_bytes(in_use))


class Budget(Recorder):
    """What `budget` returns: a recorder that refuses what does not fit."""

    def __init__(
        self,
        size: int,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device | str | None,
        in_use: int,
    ) -> None:
        if in_use >= size:
            raise ValueError(
                f"Nothing of a budget of {format_bytes(size)} is left: others hold {format_bytes(in_use)}; give a larger one, "
                "or lower in_use."
            )
        self.size, self.in_use = size, in_use
        self.capacity = size - in_use
        """Bytes that PyTorch may reserve; on CUDA the context goes off when the block is entered."""
        self._share = _Share(self)
        chosen = choose_device(device) if device is not None else None
        super().__init__(model, optimizer, None)
        home = chosen or self._device or choose_device()
        _refuse_other_devices(home)
        # A tensor says which device "cuda" is: the current one.
        self._device = torch.device("cuda", torch.cuda.current_device()) if home == torch.device("cuda") else home
        self.trace.device = str(self._device)

    @property
    def device(self) -> torch.device:
        """Whose memory is limited."""
        assert self._device is not None
        return self._device

    def _new_ledger(self) -> Ledger:
        return _Counting(self._now, self._share)

    def _hook(self, undo: ExitStack) -> None:
        if self.device.type == "cuda":
            undo.enter_context(self._fraction())
        around = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Budget) and m.device == self.device]
        if self.capacity > (least := min((m.capacity for m in around), default=self.capacity)):
            raise ValueError(
                f"A budget inside another is the smaller one: {format_bytes(self.capacity)} are more than the "
                f"{format_bytes(least)} around it; lower the inner one."
            )
        super()._hook(undo)

    def _seed(self) -> None:
        try:
            super()._seed()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"A budget of {format_bytes(self.size)} has no room for what the model and the optimizer hold already: "
                f"{error} Give a larger budget, or build them inside the block."
            ) from None

    @contextmanager
    def _fraction(self) -> Iterator[None]:
        """CUDA's own allocator keeps to the budget. Reference: ``setMemoryFraction`` in ``c10/cuda/CUDACachingAllocator.cpp``."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        if self.size > total:
            raise ValueError(
                f"A budget is at most the card: {format_bytes(self.size)} are more than the {format_bytes(total)} of {self.device}. "
                "To see what a larger card would do, open a virtual one: vramlab.virtual_gpu."
            )
        torch.cuda.empty_cache()
        self.capacity = self.size - self.in_use - _context(self.device)
        held = torch.cuda.memory_reserved(self.device)
        if held > self.capacity:
            raise ValueError(
                f"A budget of {format_bytes(self.size)} leaves {format_bytes(max(0, self.capacity))} beside the CUDA context and others, "
                f"and {format_bytes(held)} are reserved on {self.device} already; give a larger budget, or let go of tensors "
                "first: vramlab.free() says who holds them."
            )
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(self.capacity / total, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def __exit__(self, *error: Any) -> None:
        self._share.open = False  # what is found when all is over has fitted
        try:
            super().__exit__(*error)
        finally:
            if isinstance(error[1], torch.OutOfMemoryError):
                forget_backward()

    def _finish(self) -> None:
        super()._finish()
        if self.device.type == "cpu":
            card = self._share.card
            self.trace.counters = DeviceCounters(card.peak_allocated, card.peak_reserved, None)

    def _storages(self, tensor: torch.Tensor) -> list[torch.UntypedStorage]:
        return [] if is_virtual(tensor) else super()._storages(tensor)  # they take nothing of this machine

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            return self._see(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            refused = self._explained(error)
        try:
            raise refused  # with a new traceback: the frames below hold what did not fit
        finally:
            del refused

    def _explained(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        error = error.with_traceback(None)
        error.__context__ = None
        if isinstance(error, OutOfBudgetError) and error.budget is not self:
            return error  # of the budget around this one
        if not isinstance(error, OutOfBudgetError):
            segment = asked_for(error)
            cause, error = error, OutOfBudgetError(self, segment, segment)  # CUDA says but one number, with two decimals
            error.__cause__ = cause
        error.trace = MemoryTrace(self._ledger.events(self.device), str(self.device))
        error.report = OutOfMemoryReport(
            device=f"a budget of {format_bytes(self.size)} on {self.device}",
            requested=error.requested,
            segment=error.segment,
            capacity=self.capacity,
            allocated=self.allocated,
            reserved=self.reserved,
            where=self._now.where(),
            trace=error.trace,
            largest_hole=self._share.card.largest_hole if self.device.type == "cpu" else largest_hole(self.device),
        )
        error.add_note(f"{error.report.summary()}\nprint(error.report) lists who holds the memory.")
        error.budget = None  # the error outlives the block
        return error

    @property
    def allocated(self) -> int:
        """Bytes in blocks that are handed out now."""
        return self._share.card.allocated if self.device.type == "cpu" else torch.cuda.memory_allocated(self.device)

    @property
    def reserved(self) -> int:
        """Bytes that the allocator has taken from the card now."""
        return self._share.card.reserved if self.device.type == "cpu" else torch.cuda.memory_reserved(self.device)


class OutOfBudgetError(torch.OutOfMemoryError):
    """What a `budget` raises: ``requested`` and ``segment`` are bytes, see there."""

    trace: MemoryTrace
    """All events until then."""
    report: OutOfMemoryReport

    def __init__(self, budget: Budget, requested: int, segment: int) -> None:
        self.budget: Budget | None = budget
        self.requested, self.segment = requested, segment
        others = budget.size - budget.capacity
        holders = "the CUDA context and others hold" if budget.device.type == "cuda" else "others hold"
        super().__init__(
            f"Budget out of memory. Tried to allocate {format_bytes(segment)}, for {format_bytes(requested)}. "
            f"Of its {format_bytes(budget.size)} {holders} {format_bytes(others)}, "
            f"{format_bytes(budget.allocated)} are allocated by PyTorch and {format_bytes(budget.reserved - budget.allocated)} "
            f"reserved but unallocated; {format_bytes(max(0, budget.capacity - budget.reserved))} are free."
        )


class _Share:
    """Hands each storage on the CPU to the allocator, if it is the CPU that is limited."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.card, self.open = budget, CachingAllocator(budget.capacity), True

    def _counts(self, entry: Storage) -> bool:
        return self.open and entry.device == self._budget.device and entry.device.type == "cpu"

    def malloc(self, entry: Storage) -> None:
        if self._counts(entry):
            try:
                self.card.malloc(entry.number, entry.nbytes)
            except rules.OutOfMemoryError as error:
                requested, segment = error.requested, error.segment
            else:
                return
            raise OutOfBudgetError(self._budget, requested, segment)

    def free(self, entry: Storage) -> None:
        self.card.free(entry.number)  # what has no block is nothing

    def move(self, old: Storage, new: Storage) -> None:
        self.card.move(old.number, new.number)

    def resize(self, entry: Storage, before: int) -> None:
        self.free(entry)
        self.malloc(entry)

    def stream(self) -> int:
        return 0  # a CPU has none


class _Counting(Ledger):
    """A ledger in which what existed before takes memory as well, from when it is found."""

    def found(self, storage: torch.UntypedStorage, category: Category, module: int, device: torch.device) -> Storage:
        new = self.entry(storage) is None
        entry = super().found(storage, category, module, device)
        if new and self._allocator is not None:
            self._allocator.malloc(entry)
        return entry


def _context(device: torch.device) -> int:
    """Bytes of the CUDA context, as far as they can be told from what others hold."""
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    least, most = CONTEXT_RANGE
    return beside if least <= beside <= most else CONTEXT


def _refuse_other_devices(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"A budget limits the CPU or a CUDA card, got {device}. A virtual card has a size of its own: open one with "
            "virtual_gpu(gpu('RTX 4090').with_(memory='12 GiB'))."
        )
