"""MemoryLaw: the memory of a training step at any micro-batch, from traces at a few. Plain NumPy, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from vramlab.memory import steady
from vramlab.memory.allocator import BLOCK, SMALL, CachingAllocator
from vramlab.memory.trace import Category, Events, MemoryTrace

SHAPES = {1: "straight line", 2: "parabola"}


class LawError(ValueError):
    """The memory does not follow a law: the message says at which event it leaves it."""


class MemoryLaw:
    """Sizes of storages as a polynomial in one number, found from some traces and checked with all others.

    What a step does to memory is the same at any micro-batch, and so is the order; only sizes change, as a + b * micro_batch.
    Over the sequence length they are parabolas where attention is written out: ``degree=2``. What kernels take
    while they run (category workspace) need not follow: it grows in steps until all processors of the card are busy, and a
    kernel may do other things above a size. There it is guessed between the traces: along the line up to what it reaches in
    the next trace.

    Args:
        traces: by that number, at least two more than ``degree``: to find the law, and to check it.
        degree: 1 or 2.
        over: what the number is, for messages.

    Raises:
        ValueError: too few traces, another degree.
        LawError: the traces have other events, or sizes that are no such polynomial with whole coefficients.
    """

    def __init__(self, traces: Mapping[int, MemoryTrace], degree: int = 1, over: str = "micro-batch") -> None:
        if degree not in SHAPES:
            raise ValueError(f"A law has degree 1 or 2, got {degree!r}.")
        if len(traces) < degree + 2:
            raise ValueError(
                f"A law needs traces at {degree + 2} sizes ({over}), {degree + 1} to find it and one to check it; got {len(traces)}."
            )
        self._sizes = sorted(traces)
        self._peaks: dict[int, int] = {}
        events = [traces[n].events for n in self._sizes]
        skeletons = [_skeleton(e) for e in events]
        for n, skeleton in zip(self._sizes, skeletons, strict=True):
            _refuse_other_events(events[0], f"{over} {n} than at {self._sizes[0]}", skeletons[0], skeleton)
        rows = _aligned(skeletons)
        self._storage, self._streams, self._moves = rows.storage, rows.streams, rows.moves
        self._begin, self._end = rows.begin, rows.end
        self._like, self._tensors = traces[self._sizes[0]], rows.tensors
        self._order = np.argsort(rows.storage, kind="stable")  # the events of each storage together
        self._first = np.flatnonzero(np.diff(rows.storage[self._order], prepend=-1))
        self._newton, whole = _newton(self._sizes[: degree + 1], rows.nbytes)
        straight = whole & np.all([self._line(n) == row for n, row in zip(self._sizes, rows.nbytes, strict=True)], axis=0)
        if (crooked := ~straight & rows.tensors).any():
            i = int(np.count_nonzero(rows.tensors[: crooked.argmax()]))
            found = ", ".join(f"{abs(int(s.nbytes[i])):,} at {n}" for n, s in zip(self._sizes, skeletons, strict=True))
            raise LawError(f"The size of event {i} ({_operator(events[0], i)}) is no {SHAPES[degree]} over the {over}: {found}.")
        # All that kernels do with memory of which something is on no line, and where of these each memory is taken.
        crooked = np.isin(rows.storage, rows.storage[~straight])
        self._crooked = np.flatnonzero(crooked)
        self._seen = rows.nbytes[:, crooked]
        _, first, number = np.unique(rows.storage[crooked], return_index=True, return_inverse=True)
        self._taken = first[number]

    def peak(self, n: int) -> int:
        """Peak bytes of the blocks that the allocator hands out in the traced steps, as ``torch.cuda.max_memory_allocated()``.

        The first answer at a size takes 1 ms (ResNet-18) to 15 ms (GPT-2 XL), for large blocks have to be handed out one by one:
        the ends that stay with them depend on what was free. Asked again it is known.
        """
        if n not in self._peaks:
            self._peaks[n] = self._peak_allocated(n)
        return self._peaks[n]

    def tensors(self, n: int) -> int:
        """Peak bytes in storages, each rounded up to the allocator's block of 512, in well under a millisecond.

        That is less than `peak` by the ends of large blocks, which are not split: up to 1 MiB each, 0.5 % of GPT-2 small, 2 % of
        GPT-2 XL or a ResNet-18 with a small batch. How many there are changes from size to size without a rule.
        """
        before, after = self._totals(n)
        return int(np.cumsum(after - before).max(initial=0))

    def replayed(self, n: int, capacity: int | None = None) -> CachingAllocator:
        """The caching allocator after many steps at this size: ``peak_reserved``, and ``peak_allocated``.

        The latter can exceed `peak`, that of the traced steps: later ones find other free blocks, and with them other ends.

        Raises:
            OutOfMemoryError: it does not fit into the capacity.
        """
        return steady.replay(self._rows(n), CachingAllocator(capacity))

    def trace(self, n: int) -> MemoryTrace:
        """The trace at a size: what holds its peak, its timeline. Kernels' own memory has the operator of the event before it."""
        first = self._like.events
        stays = np.flatnonzero(_stays(first))
        like = stays[np.maximum(np.cumsum(self._tensors) - 1, 0)]  # the first trace's event for each row
        nbytes = self._nbytes(n)
        kept = nbytes != 0
        before = np.append(0, np.cumsum(kept))
        rows = np.append(np.flatnonzero(self._tensors), len(nbytes))

        def until(count: int) -> int:
            return int(before[rows[np.count_nonzero(stays < count)]])

        columns = {name: getattr(first, name) for name in ("module", "phase", "operator", "line", "stream") if hasattr(first, name)}
        events = replace(
            first,
            storage=self._storage[kept],
            nbytes=nbytes[kept],
            category=np.where(self._tensors, first.category[like], Category.WORKSPACE)[kept].astype(first.category.dtype),
            seeds=until(first.seeds),
            steps=tuple((until(count), optimizer) for count, optimizer in first.steps),
            moves=frozenset(int(before[i]) for i in self._moves if kept[i]),
            **{name: column[like][kept] for name, column in columns.items() if column is not None},
        )
        return MemoryTrace(events, self._like.device)

    def is_exact(self, n: int) -> bool:
        """Whether nothing has to be guessed: what kernels take is on a line, or the same in the traces on both sides."""
        if n in self._sizes:
            return True
        above = int(np.searchsorted(self._sizes, n))
        return 0 < above < len(self._sizes) and bool((self._seen[above - 1] == self._seen[above]).all())

    def _rows(self, n: int) -> steady.Rows:
        """The events at a size, without those of no bytes: kernels that do other things there."""
        nbytes = self._nbytes(n)
        kept = nbytes != 0
        before = np.cumsum(kept) - kept
        events = list(zip(self._storage[kept].tolist(), nbytes[kept].tolist(), strict=True))
        begin, end = (int(kept[:i].sum()) for i in (self._begin, self._end))
        return steady.Rows(events, {int(before[i]) for i in self._moves if kept[i]}, begin, end, self._streams)

    def _line(self, n: int) -> np.ndarray:
        """The polynomial in Newton's form; shape (events,)."""
        value = np.zeros_like(self._newton[0])
        for size, coefficient in zip(reversed(self._sizes[: len(self._newton)]), reversed(self._newton), strict=True):
            value = value * (n - size) + coefficient
        return value

    def _nbytes(self, n: int) -> np.ndarray:
        nbytes = self._line(n)
        if len(self._crooked):
            nbytes[self._crooked] = self._guess(n)
        return nbytes

    def _totals(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of each event's storage before and after it, rounded up to blocks; two of shape (events,)."""
        nbytes = self._nbytes(n)
        running = np.cumsum(nbytes[self._order])
        others = np.concatenate(([0], running))[self._first]  # what stands before each storage's first event
        after = np.empty_like(running)
        after[self._order] = running - np.repeat(others, np.diff(self._first, append=len(running)))
        return -(-(after - nbytes) // BLOCK) * BLOCK, -(-after // BLOCK) * BLOCK

    def _peak_allocated(self, n: int) -> int:
        """Small blocks are cut to size, so their sum is known; the large pool does what it does, whatever the small one does."""
        before, after = self._totals(n)
        large_before, large_after = (np.where(total > SMALL, total, 0) for total in (before, after))
        change = large_after - large_before
        large = np.flatnonzero(change)
        moves = set(np.flatnonzero(np.isin(large, list(self._moves))).tolist())
        allocator, levels = CachingAllocator(), [0]

        def watched() -> Iterator[tuple[Hashable, int]]:
            for row in zip(self._storage[large].tolist(), change[large].tolist(), strict=True):
                yield row
                levels.append(allocator.allocated)

        allocator.replay(watched(), moves, self._streams)
        small = np.cumsum(after - before - change)
        return int((small + np.array(levels)[np.cumsum(change != 0)]).max(initial=0))

    def _guess(self, n: int) -> np.ndarray:
        """What kernels take that is on no line: below what the next trace has, or between both if it begins in between.

        Kernels do what they do in the next trace.
        """
        above = min(int(np.searchsorted(self._sizes, n)), len(self._sizes) - 1)
        left, right = self._sizes[max(above - 1, 0)], self._sizes[above]
        low, high = self._seen[max(above - 1, 0)], self._seen[above]
        share = (min(max(n, left), right) - left) / max(right - left, 1)
        line, line_right = (np.maximum(self._line(m)[self._crooked], 0) for m in (n, right))
        guess = np.where(line_right >= high, np.minimum(line, high), np.round(low + (high - low) * share))
        guess = np.where((low == high) | (n >= right), high, guess).astype(np.int64)
        return np.sign(high) * guess[self._taken]


def _newton(sizes: list[int], table: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Newton's divided differences of a table's first rows, and where all of them are whole numbers; each of shape (events,)."""
    column = list(table[: len(sizes)])
    coefficients, whole = [column[0]], np.ones(table.shape[1], bool)
    for order in range(1, len(sizes)):
        pairs = [np.divmod(b - a, sizes[i + order] - sizes[i]) for i, (a, b) in enumerate(itertools.pairwise(column))]
        column = [quotient for quotient, _ in pairs]
        whole &= np.all([rest == 0 for _, rest in pairs], axis=0)
        coefficients.append(column[0])
    return coefficients, whole


# Traces side by side

Kernels = dict[int, list[tuple[int, int, int]]]
"""Before which event of the skeleton they run: storage, bytes and stream of what they take and give back, in order."""

Form = tuple[tuple[Hashable, int, int], ...]
"""What kernels do between two events of the skeleton: which storage, 1 or -1 as they take or return it, and its stream."""


@dataclass(frozen=True)
class _Skeleton:
    """A trace without what kernels take for themselves, and that apart."""

    storage: np.ndarray  # int64 (events,): renumbered in the order of appearance
    nbytes: np.ndarray  # int64 (events,)
    stream: np.ndarray  # int64 (events,): of the storage
    moves: frozenset[int]
    kernels: Kernels
    begin: int  # where the last step begins and ends
    end: int

    @property
    def what(self) -> np.ndarray:
        """What has to be the same in all traces; shape (3, events)."""
        return np.stack((self.storage, np.sign(self.nbytes), self.stream))


@dataclass(frozen=True)
class _Rows:
    """Events of several traces as one sequence: each has all of a skeleton's, and of kernels' those of 0 bytes that it does not have."""

    storage: np.ndarray  # int64 (events,)
    nbytes: np.ndarray  # int64 (traces, events)
    streams: dict[Hashable, int]  # of storages whose memory is not that of stream 0
    tensors: np.ndarray  # bool (events,): belongs to the skeleton
    moves: frozenset[int]
    begin: int
    end: int


def _skeleton(events: Events) -> _Skeleton:
    """Kernels' own memory comes and goes between two other events; cuBLAS keeps its workspace, so that is an event like others."""
    stays = _stays(events)
    position = np.cumsum(stays)
    stream = np.zeros(len(stays), np.int64) if events.stream is None else events.stream
    kernels: Kernels = {}
    for i in np.flatnonzero(~stays).tolist():
        kernels.setdefault(int(position[i]), []).append((int(events.storage[i]), int(events.nbytes[i]), int(stream[i])))
    storages = events.storage[stays]
    _, index, number = np.unique(storages, return_index=True, return_inverse=True)
    moves = frozenset(int(position[i]) - 1 for i in events.moves)
    rows = steady.rows_of(events)
    begin, end = (int(np.count_nonzero(stays[:i])) for i in (rows.begin, rows.end))
    return _Skeleton(np.argsort(np.argsort(index))[number], events.nbytes[stays], stream[stays], moves, kernels, begin, end)


def _stays(events: Events) -> np.ndarray:
    """Which events belong to the skeleton: those of tensors, and of workspaces that are kept; shape (events,)."""
    storages, number = np.unique(events.storage, return_inverse=True)
    kept = np.zeros(len(storages), bool)
    np.logical_or.at(kept, number, events.category != Category.WORKSPACE)
    ends = np.zeros(len(storages), np.int64)
    np.add.at(ends, number, events.nbytes)
    return (kept | (ends > 0))[number]


def _aligned(skeletons: list[_Skeleton]) -> _Rows:
    """Traces with the same skeleton as one sequence. Where kernels do other things, the one's rows stand behind the other's."""
    forms: dict[int, list[Form]] = {}
    found = [_forms(skeleton.kernels, forms) for skeleton in skeletons]
    one = skeletons[0]
    places = [(g, f, k) for g in sorted(forms) for f, form in enumerate(forms[g]) for k in range(len(form))]
    column = {place: i for i, place in enumerate(places)}
    extra = np.zeros((len(skeletons), len(places)), np.int64)
    for row, values in zip(extra, found, strict=True):
        for place, size in values.items():
            row[column[place]] = size
    names: dict[Hashable, int] = {}
    storage = [names.setdefault(forms[g][f][k][0], len(one.storage) + len(names)) for g, f, k in places]
    at = np.array([g for g, _, _ in places], np.int64)
    nbytes = np.insert(np.array([s.nbytes for s in skeletons]), at, extra, axis=1)
    tensors = np.insert(np.ones(len(one.storage), bool), at, False)
    where = np.append(np.flatnonzero(tensors), len(tensors))
    moves = frozenset(int(where[i]) for i in one.moves)
    storages = np.insert(one.storage, at, storage)
    stream = np.insert(one.stream, at, [forms[g][f][k][2] for g, f, k in places])
    streams: dict[Hashable, int] = {s: n for s, n in zip(storages.tolist(), stream.tolist(), strict=True) if n}
    return _Rows(storages, nbytes, streams, tensors, moves, int(where[one.begin]), int(where[one.end]))


def _forms(kernels: Kernels, forms: dict[int, list[Form]]) -> dict[tuple[int, int, int], int]:
    """Bytes by gap, form and place in it, of one trace; forms that are new are added.

    A storage's name is the gap, the form and the place where a kernel took it, so traces that differ there differ where it is returned.
    """
    names: dict[int, Hashable] = {}
    values: dict[tuple[int, int, int], int] = {}
    for gap, rows in sorted(kernels.items()):
        known = forms.setdefault(gap, [])
        for f in range(len(known) + 1):
            new = {storage: (gap, f, k) for k, (storage, *_) in reversed(list(enumerate(rows))) if storage not in names}
            form = tuple((new.get(s) or names[s], 1 if nbytes > 0 else -1, stream) for s, nbytes, stream in rows)
            if f == len(known):
                known.append(form)
            if known[f] == form:
                break
        names |= new
        values |= {(gap, f, k): nbytes for k, (_, nbytes, _) in enumerate(rows)}
    return values


def _refuse_other_events(events: Events, sizes: str, one: _Skeleton, other: _Skeleton) -> None:
    shortest = min(len(one.storage), len(other.storage))
    same = (one.what[:, :shortest] == other.what[:, :shortest]).all(0)
    if same.all() and len(one.storage) == len(other.storage) and one.moves == other.moves:
        return
    i = int((~same).argmax()) if not same.all() else shortest - 1
    raise LawError(f"The step does other things at {sizes}, from event {i} on ({_operator(events, i)}); each has to be traced.")


def _operator(events: Events, position: int) -> str:
    """The operator at a position of the skeleton."""
    where = np.flatnonzero(_stays(events))
    return events.operators[events.operator[where[min(position, len(where) - 1)]]] if len(where) else "no event"
