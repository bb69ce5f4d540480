"""DepthLaw: the memory of a training step at any number of equal blocks, from traces at a few. Plain NumPy, no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from vramlab.memory import steady
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.law import LawError
from vramlab.memory.trace import Events, MemoryTrace

TOLERANCE = 0.002  # of a peak, where the law is checked
UNEVEN = "What the step releases does not change evenly with the number of blocks."


class DepthLaw:
    """What more equal blocks do to a step: at each place where it goes through the blocks, the events of one block more.

        law = DepthLaw({n: vl.plan(my_task(depth=n), recipe, "RTX 4090").trace for n in (2, 3, 4, 6)})
        law.peak(48), law.replayed(48).peak_reserved

    Forward, backward and the lists of an optimizer's step have such places. Which storage an event of a further block
    releases is told by its age among its likes, which changes evenly with the depth. All events together go through the
    allocator, so the peak may move with the depth, from the loss to the step, say; a line through peaks would not follow.

    Args:
        traces: by the number of blocks, two at least: three with the same distance to find the law, and more to check it. Blocks that
            take turns need the distance after which they come again.

    Raises:
        ValueError: fewer, or others.
        LawError: the blocks are not equal, or a check is off by more than 0.2 %.
    """

    def __init__(self, traces: Mapping[int, MemoryTrace]) -> None:
        depths = sorted(traces)
        if len(depths) < 4 or depths[2] - depths[1] != depths[1] - depths[0] or depths[0] < 2:
            raise ValueError(
                "A law over the depth needs traces at three numbers of blocks with the same distance, from 2 on, and one more to check "
                f"it, 2, 3, 4 and 6 say; got {', '.join(map(str, depths)) or 'none'}."
            )
        self._least, self._stride = depths[0], depths[1] - depths[0]
        shared: dict[Hashable, int] = {}
        steps = [_step(traces[depth].events, shared) for depth in depths[:3]]
        self._places = _places(steps[0], steps[1], depths[1])
        self._find(steps, depths)
        for depth in depths[3:]:
            self._check(depth, steady.rows_of(traces[depth].events))

    def peak(self, depth: int) -> int:
        """Peak bytes of the blocks that the allocator hands out in the traced steps, as ``torch.cuda.max_memory_allocated()``.

        Raises:
            ValueError: no number of blocks that the law goes through.
        """
        return _replayed_once(self._rows(depth)).peak_allocated

    def replayed(self, depth: int, capacity: int | None = None) -> CachingAllocator:
        """The caching allocator after many steps at this depth: ``peak_allocated``, ``peak_reserved``.

        Raises:
            ValueError: no number of blocks that the law goes through.
            OutOfMemoryError: it does not fit into the capacity.
        """
        return steady.replay(self._rows(depth), CachingAllocator(capacity))

    def _find(self, steps: list[_Step], depths: list[int]) -> None:
        """The table of events: those of the least depth, then those of one block more at each place; each of shape (events,)."""
        zero, one = steps[:2]
        inside = np.concatenate([np.arange(j, j + k) for _, j, k in self._places] or [np.zeros(0, np.int64)]).astype(np.int64)
        outside = np.delete(np.arange(len(one.nbytes)), inside)
        rows = np.concatenate((outside, inside))  # of `one`
        self._what, self._stream, self._moved = one.what[rows], one.stream[rows], one.moved[rows]
        still = np.zeros(len(inside), np.int64)
        self._growth = np.concatenate((one.nbytes[outside] - zero.nbytes, still))
        self._nbytes = one.nbytes[rows] - self._growth
        born = one.born[rows]  # where in `rows` the storage of each event was made
        born = np.argsort(rows)[born]
        self._kind = np.where(self._growth[born] == 0, one.token[rows][born], -1 - born)
        for more, step in enumerate(steps):
            label, _ = self._laid_out(more)
            same = len(label) == len(step.nbytes) and (self._what[label] == step.what).all() and (self._moved[label] == step.moved).all()
            if not same or (self._nbytes[label] + more * self._growth[label] != step.nbytes).any():
                raise LawError(f"The step at {depths[more]} blocks is not that at {depths[0]} with the events of equal blocks added.")
        self._ranks = self._rank(steps)
        edges = np.array([(step.begin, step.end) for step in steps])
        self._edges = edges[0], edges[1] - edges[0]
        if (edges[2] - edges[1] != self._edges[1]).any():
            raise LawError(f"The steps at {depths[0]}, {depths[1]} and {depths[2]} blocks do not grow evenly.")

    def _rank(self, steps: list[_Step]) -> np.ndarray:
        """How many of its kind are younger than what an event releases: a + b * copy + c * blocks more; shape (3, events)."""
        seen = {}
        for more, step in enumerate(steps):
            label, copy = self._laid_out(more)
            ranks = _ages(step.storage, self._kind[label], step.nbytes)
            for number in range(more + 1):
                seen[number, more] = np.zeros(len(self._kind), np.int64)
                here = copy == number
                seen[number, more][label[here]] = ranks[here]
        base = np.arange(len(self._kind)) < len(steps[0].nbytes)
        by_depth = np.where(base, seen[0, 1] - seen[0, 0], seen[1, 2] - seen[1, 1])
        by_copy = np.where(base, 0, seen[2, 2] - seen[1, 2])
        first = np.where(base, seen[0, 0], seen[1, 1] - by_depth - by_copy)
        if (base & (seen[0, 2] != first + 2 * by_depth)).any():
            raise LawError(UNEVEN)
        return np.stack((first, by_copy, by_depth))

    def _laid_out(self, more: int) -> tuple[np.ndarray, np.ndarray]:
        """The events with so many blocks more: the number in the table, and of which block more, 0 for none; two of shape (events,)."""
        base = len(self._kind) - sum(k for _, _, k in self._places)
        labels, copies, at, number = [], [], 0, base
        for i, _, k in self._places:
            labels += [np.arange(at, i), np.tile(np.arange(number, number + k), more)]
            copies += [np.zeros(i - at, np.int64), np.repeat(np.arange(1, more + 1), k)]
            at, number = i, number + k
        labels.append(np.arange(at, base))
        copies.append(np.zeros(base - at, np.int64))
        return np.concatenate(labels), np.concatenate(copies)

    def _rows(self, depth: int) -> steady.Rows:
        more, between = divmod(depth - self._least, self._stride)
        if more < 0 or between:
            known = ", ".join(str(self._least + i * self._stride) for i in range(3))
            raise ValueError(f"This law knows {known} blocks and so on, got {depth}.")
        label, copy = self._laid_out(more)
        first, by_copy, by_depth = self._ranks[:, label]
        ranks = (first + by_copy * copy + by_depth * more).tolist()
        nbytes = (self._nbytes[label] + more * self._growth[label]).tolist()
        alive: defaultdict[int, list[int]] = defaultdict(list)
        events: list[tuple[Hashable, int]] = []
        for i, (kind, size, rank) in enumerate(zip(self._kind[label].tolist(), nbytes, ranks, strict=True)):
            if size >= 0:
                alive[kind].append(i)
                events.append((i, size))
            elif not 0 <= rank < len(alive[kind]):
                raise LawError(f"At {depth} blocks an event releases what is not there.")
            else:
                events.append((alive[kind].pop(-1 - rank), size))
        begin, end = (self._edges[0] + more * self._edges[1]).tolist()
        streams: dict[Hashable, int] = {i: n for i, n in enumerate(self._stream[label].tolist()) if n}
        return steady.Rows(events, set(np.flatnonzero(self._moved[label]).tolist()), begin, end, streams)

    def _check(self, depth: int, rows: steady.Rows) -> None:
        for what, found, right in (
            ("allocated", self.peak(depth), _replayed_once(rows).peak_allocated),
            ("reserved", self.replayed(depth).peak_reserved, steady.replay(rows, CachingAllocator()).peak_reserved),
        ):
            if abs(found - right) > TOLERANCE * right:
                raise LawError(f"At {depth} blocks the law gives {found:,} bytes {what} and the trace {right:,}: more than 0.2 % off.")


def _replayed_once(rows: steady.Rows) -> CachingAllocator:
    allocator = CachingAllocator()
    allocator.replay(rows.events, rows.moves, rows.streams)
    return allocator


def _ages(storage: np.ndarray, kind: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """For each event that releases: how many of the same kind are alive that are younger than what it releases; shape (events,).

    Raises:
        LawError: what it releases is of another kind.
    """
    ages = np.zeros(len(storage), np.int64)
    alive: defaultdict[int, list[int]] = defaultdict(list)
    for i, (number, k, size) in enumerate(zip(storage.tolist(), kind.tolist(), nbytes.tolist(), strict=True)):
        if size >= 0:
            alive[k].append(number)
        elif number not in alive[k]:
            raise LawError(UNEVEN)
        else:
            ages[i] = len(alive[k]) - 1 - alive[k].index(number)
            alive[k].remove(number)
    return ages


@dataclass(frozen=True)
class _Step:
    """The events of a trace, named so that they can be found again at another depth; arrays of shape (events,)."""

    storage: np.ndarray
    nbytes: np.ndarray
    stream: np.ndarray
    moved: np.ndarray  # bool
    born: np.ndarray  # the event that made the storage
    what: np.ndarray  # a number for operator, phase, category and module, whatever its numbers
    token: np.ndarray  # the same with the size
    begin: int  # where the last step begins and ends
    end: int


def _step(events: Events, shared: dict[Hashable, int]) -> _Step:
    """``shared``: the numbers given so far.

    Raises:
        LawError: a storage that is resized.
    """
    moved = np.isin(np.arange(len(events.nbytes)), list(events.moves))
    stream = np.zeros(len(moved), np.int64) if events.stream is None else events.stream
    modules = [re.sub(r"\d+", "#", name) for name in events.modules]
    born: dict[int, int] = {}
    what, token = [], []
    for i, (storage, nbytes) in enumerate(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True)):
        first = born.setdefault(storage, i)
        if nbytes > 0 and first != i:
            raise LawError("A storage is resized, and the law over the depth knows only such as are made and released.")
        name = (events.operators[events.operator[i]], int(events.phase[i]), int(events.category[i]), modules[events.module[i]])
        what.append(shared.setdefault((nbytes < 0, name, bool(moved[i]), int(stream[i])), len(shared)))
        token.append(shared.setdefault((what[-1], nbytes), len(shared)))
    rows = steady.rows_of(events)
    made = np.array([born[storage] for storage in events.storage.tolist()], np.int64)
    return _Step(events.storage, events.nbytes, stream, moved, made, np.array(what), np.array(token), rows.begin, rows.end)


def _places(short: _Step, long: _Step, depth: int) -> list[tuple[int, int, int]]:
    """Where the longer step has events that the shorter one has not: at which event of either, and how many.

    Raises:
        LawError: the one is not the other with events added.
    """
    # A size that only one of them knows is one that grows with the depth.
    before, after = (np.where(np.isin(a.token, b.token), a.token, a.what) for a, b in ((short, long), (long, short)))
    found: list[tuple[int, int, int]] = []
    i = j = 0
    while True:
        n = min(len(before) - i, len(after) - j)
        differ = np.flatnonzero(before[i : i + n] != after[j : j + n])
        i, j = (i + int(differ[0]), j + int(differ[0])) if len(differ) else (i + n, j + n)
        surplus = len(after) - j - (len(before) - i)
        if not len(differ) and surplus >= 0 and i == len(before):
            return [*found, (i, j, surplus)] if surplus else found
        # One block more stands behind an equal one.
        again = [k for k in range(1, min(surplus, j) + 1) if (after[j - k : j] == after[j : j + k]).all()]
        runs = {k: _run(before[i:], after[j + k :]) for k in again}
        if not any(runs.values()):
            raise LawError(f"The step at {depth} blocks does other things than with fewer, from event {j} on.")
        k = max(runs, key=runs.__getitem__)
        found.append((i, j, k))
        j += k


def _run(one: np.ndarray, other: np.ndarray) -> int:
    """How many events agree from the start on; 0 where the first few do not."""
    n = min(len(one), len(other))
    if not n or one[0] != other[0]:
        return 0
    differ = one[:n] != other[:n]
    return int(differ.argmax()) if differ.any() else n
