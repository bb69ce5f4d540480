"""MemoryLaw: the memory of a training step at any micro-batch, from traces at a few. Plain NumPy, no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from vramlab.memory import steady
from vramlab.memory.allocator import BLOCK, CachingAllocator
from vramlab.memory.trace import Category, Events, MemoryTrace


class LawError(ValueError):
    """The memory does not follow a law: the message says at which event it leaves it."""


@dataclass(frozen=True)
class _Skeleton:
    """A trace without what kernels take for themselves, and that apart."""

    storage: np.ndarray  # int64 (events,): renumbered in the order of appearance
    nbytes: np.ndarray  # int64 (events,)
    moves: frozenset[int]
    scratch: np.ndarray  # int64 (events,): the most that kernels hold between this event and the next
    begin: int  # where the last step begins and ends
    end: int


class MemoryLaw:
    """Sizes of storages as a + b * micro_batch, found from two traces and checked with all others.

    What a step does to memory is the same at any micro-batch, and so is the order; only sizes change. What kernels take
    while they run (category workspace) need not follow a line, it grows in steps until all processors of the card are busy;
    where it does not, it is guessed between the traces: along the line up to what it reaches in the next trace.

    Args:
        traces: by micro-batch, at least three: two to find the law and one to check it.

    Raises:
        ValueError: fewer than three traces.
        LawError: the traces have other events, or sizes that are no straight line.
    """

    def __init__(self, traces: Mapping[int, MemoryTrace]) -> None:
        if len(traces) < 3:
            raise ValueError(f"A law needs traces at three micro-batches, two to find it and one to check it; got {len(traces)}.")
        self._sizes = sorted(traces)
        skeletons = [_skeleton(traces[n].events) for n in self._sizes]
        first, second = self._sizes[:2]
        one, two = skeletons[:2]
        for n, other in zip(self._sizes[1:], skeletons[1:], strict=True):
            _refuse_other_events(traces[first].events, first, one, n, other)
        slope, rest = np.divmod(two.nbytes - one.nbytes, second - first)
        self._slope, self._constant = slope, one.nbytes - slope * first
        self._storage, self._moves = one.storage, one.moves
        self._begin, self._end = one.begin, one.end
        self._scratch = np.array([s.scratch for s in skeletons])
        self._scratch_slope = (self._scratch[1] - self._scratch[0]) / (second - first)
        self._straight = np.all([s == self._scratch_line(n) for n, s in zip(self._sizes, self._scratch, strict=True)], axis=0)
        crooked = rest != 0
        for n, other in zip(self._sizes[2:], skeletons[2:], strict=True):
            crooked |= other.nbytes != self._nbytes(n)
        if crooked.any():
            i = int(crooked.argmax())
            found = ", ".join(f"{abs(int(s.nbytes[i])):,} at {n}" for n, s in zip(self._sizes, skeletons, strict=True))
            raise LawError(
                f"The size of event {i} ({_operator(traces[first].events, i)}) is no straight line over the micro-batch: {found}."
            )

    def peak(self, micro_batch: int) -> int:
        """Peak bytes in storages, each rounded up to the allocator's block of 512, in well under a millisecond.

        What the allocator hands out can be more by the ends of large blocks, which it does not split: at most 1 MiB each, 0.2 % of
        a large transformer, 2 % of a small network.
        """
        held = np.cumsum(_rounded(self._nbytes(micro_batch)))
        return int((held + self._scratch_at(micro_batch)).max(initial=0))

    def replayed(self, micro_batch: int, capacity: int | None = None) -> CachingAllocator:
        """The caching allocator after many steps at this micro-batch: ``peak_allocated``, ``peak_reserved``.

        Raises:
            OutOfMemoryError: it does not fit into the capacity.
        """
        allocator = CachingAllocator(capacity)
        scratch = self._scratch_at(micro_batch)
        rows: list[tuple[Hashable, int]] = []
        moves: set[int] = set()
        begin = end = 0
        for i, (storage, nbytes) in enumerate(zip(self._storage.tolist(), self._nbytes(micro_batch).tolist(), strict=True)):
            begin, end = (len(rows) if i == self._begin else begin), (len(rows) if i == self._end else end)
            if i in self._moves:
                moves.add(len(rows))
            rows.append((storage, nbytes))
            if scratch[i]:
                rows += [(("scratch", i), int(scratch[i])), (("scratch", i), -int(scratch[i]))]
        begin, end = (n if i < len(self._storage) else len(rows) for n, i in ((begin, self._begin), (end, self._end)))
        return steady.replay(steady.Rows(rows, moves, begin, end), allocator)

    def is_exact(self, micro_batch: int) -> bool:
        """Whether nothing has to be guessed: what kernels take is on a line, or the same in the traces on both sides."""
        if micro_batch in self._sizes:
            return True
        above = int(np.searchsorted(self._sizes, micro_batch))
        if not 0 < above < len(self._sizes):
            return False
        return bool((self._straight | (self._scratch[above - 1] == self._scratch[above])).all())

    def _nbytes(self, micro_batch: int) -> np.ndarray:
        return self._constant + self._slope * micro_batch

    def _scratch_line(self, micro_batch: int) -> np.ndarray:
        return self._scratch[0] + self._scratch_slope * (micro_batch - self._sizes[0])

    def _scratch_at(self, micro_batch: int) -> np.ndarray:
        """On the line where all traces are; else below what the next trace has, or between both if it begins in between."""
        line = np.maximum(self._scratch_line(micro_batch), 0)
        above = min(max(int(np.searchsorted(self._sizes, micro_batch)), 1), len(self._sizes) - 1)
        n = min(max(micro_batch, self._sizes[above - 1]), self._sizes[above])
        share = (n - self._sizes[above - 1]) / (self._sizes[above] - self._sizes[above - 1])
        low, high = self._scratch[above - 1], self._scratch[above]
        between = low + (high - low) * share
        guess = np.where(self._scratch_line(self._sizes[above]) >= high, np.minimum(line, high), between)
        guess = np.where(low == high, low, guess)
        return np.round(np.where(self._straight, line, guess)).astype(np.int64)


def _rounded(nbytes: np.ndarray) -> np.ndarray:
    return np.sign(nbytes) * (-(-np.abs(nbytes) // BLOCK) * BLOCK)


def _skeleton(events: Events) -> _Skeleton:
    """Kernels' own memory comes and goes between two other events; cuBLAS keeps its workspace, so that is an event like others."""
    stays = _stays(events)
    held = np.cumsum(np.where(stays, 0, events.nbytes))
    position = np.cumsum(stays) - 1
    scratch = np.zeros(int(stays.sum()), np.int64)
    inside = ~stays & (position >= 0)
    np.maximum.at(scratch, position[inside], held[inside])
    storages = events.storage[stays]
    _, order = np.unique(storages, return_index=True)
    renumber = {int(storages[i]): n for n, i in enumerate(np.sort(order))}
    moves = frozenset(int(position[i]) for i in events.moves)
    rows = steady.rows_of(events)
    begin, end = (int(np.count_nonzero(stays[:i])) for i in (rows.begin, rows.end))
    return _Skeleton(np.array([renumber[int(s)] for s in storages], np.int64), events.nbytes[stays], moves, scratch, begin, end)


def _stays(events: Events) -> np.ndarray:
    """Which events belong to the skeleton: those of tensors, and of workspaces that are kept; shape (events,)."""
    storages, number = np.unique(events.storage, return_inverse=True)
    kept = np.zeros(len(storages), bool)
    np.logical_or.at(kept, number, events.category != Category.WORKSPACE)
    ends = np.zeros(len(storages), np.int64)
    np.add.at(ends, number, events.nbytes)
    return (kept | (ends > 0))[number]


def _refuse_other_events(events: Events, n: int, one: _Skeleton, m: int, other: _Skeleton) -> None:
    shortest = min(len(one.storage), len(other.storage))
    same = (one.storage[:shortest] == other.storage[:shortest]) & (np.sign(one.nbytes[:shortest]) == np.sign(other.nbytes[:shortest]))
    if same.all() and len(one.storage) == len(other.storage) and one.moves == other.moves:
        return
    i = int((~same).argmax()) if not same.all() else shortest - 1
    raise LawError(
        f"The step does other things at micro-batch {m} than at {n}, from event {i} on ({_operator(events, i)}); each has to be traced."
    )


def _operator(events: Events, position: int) -> str:
    """The operator at a position of the skeleton."""
    where = np.flatnonzero(_stays(events))
    return events.operators[events.operator[where[min(position, len(where) - 1)]]] if len(where) else "no event"
