"""What the caching allocator does in later steps: the last step of a trace, again and again. No torch.

Tensors need the same in each step. What the allocator reserves for them can still grow after the second, because each step finds
other holes between what it kept.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from vramlab.memory.allocator import CachingAllocator, OutOfMemoryError
from vramlab.memory.trace import Events

CALM = 4  # steps without growth after which there will be none
MOST = 40  # steps at the most
FEW = 4096  # bytes that a step may leave over


@dataclass(frozen=True)
class Rows:
    """Events in the form that `CachingAllocator.replay` takes, and where the last step begins and ends.

    From the end of one optimizer step to the end of the next; without two steps both are the number of events.
    """

    events: list[tuple[Hashable, int]]
    moves: Collection[int]
    begin: int
    end: int
    streams: Mapping[Hashable, int] = field(default_factory=dict)
    """Of storages whose memory is not that of stream 0."""


def rows_of(events: Events) -> Rows:
    """The rows of a trace."""
    pairs: list[tuple[Hashable, int]] = list(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True))
    begin, end = events.last_step() or (len(pairs), len(pairs))
    return Rows(pairs, events.moves, begin, end, streams_of(events))


def streams_of(events: Events) -> dict[Hashable, int]:
    """The storages whose memory belongs to another CUDA stream than 0, and to which."""
    if events.stream is None:
        return {}
    return {s: n for s, n in zip(events.storage.tolist(), events.stream.tolist(), strict=True) if n}


@dataclass(frozen=True)
class _Cycle:
    """What the last step has to do with the one after it."""

    successors: dict[Hashable, Hashable]
    """For each storage that it releases and did not make: the one that it leaves for the next step to release."""
    leftovers: dict[Hashable, int]
    """What else it leaves (some numbers), and its bytes: released when the next step begins."""


def replay(rows: Rows, allocator: CachingAllocator) -> CachingAllocator:
    """Replay up to the end of the last step, then that step until what is reserved no longer grows; returns the allocator.

    Raises:
        OutOfMemoryError: no room.
    """
    allocator.replay(rows.events[: rows.end], rows.moves, rows.streams)
    cycle = _cycle(rows)
    if cycle is None:
        allocator.replay(rows.events[rows.end :], {i - rows.end for i in rows.moves if i >= rows.end}, rows.streams)
        return allocator
    names: dict[Hashable, Hashable] = {}
    calm = 0
    for step in range(MOST):
        before = allocator.peak_reserved
        names = _again(rows, cycle, names, step, allocator)
        calm = calm + 1 if allocator.peak_reserved == before else 0
        if calm == CALM:
            break
    return allocator


def on_card(rows: Rows, capacity: int) -> tuple[CachingAllocator, bool]:
    """The allocator of a card with so many bytes after many steps, and whether they fit; if not, it is that of a card without end."""
    roomy = replay(rows, CachingAllocator())
    if roomy.peak_reserved <= capacity:
        return roomy, True
    try:
        return replay(rows, CachingAllocator(capacity)), True
    except OutOfMemoryError:
        return roomy, False


def _cycle(rows: Rows) -> _Cycle | None:
    """How the last step leads to itself; None where what it releases is not what it leaves: it is not like the next then."""
    if rows.begin == rows.end:
        return None
    born: dict[Hashable, int] = {}
    size: dict[Hashable, int] = {}
    gone: dict[Hashable, int] = {}
    for i, (storage, nbytes) in enumerate(rows.events[: rows.end]):
        born.setdefault(storage, i)
        size[storage] = size.get(storage, 0) + nbytes
        if not size[storage]:
            gone[storage] = -nbytes
            if i < rows.begin:
                del born[storage]  # before the last step
    taken = sorted((s for s in gone if s in born and born[s] < rows.begin), key=born.__getitem__)
    left = sorted((s for s, i in born.items() if i >= rows.begin and size[s]), key=born.__getitem__)
    successors: dict[Hashable, Hashable] = {}
    rest = iter(left)
    for storage in taken:
        for other in rest:
            if size[other] == gone[storage]:
                successors[storage] = other
                break
    leftovers = {s: size[s] for s in left if s not in set(successors.values())}
    return _Cycle(successors, leftovers) if len(successors) == len(taken) and sum(leftovers.values()) <= FEW else None


def _again(rows: Rows, cycle: _Cycle, names: dict[Hashable, Hashable], step: int, allocator: CachingAllocator) -> dict[Hashable, Hashable]:
    """Replay the last step once more. ``names``: what the step before called the storages that it made."""
    allocator.replay([(names.get(storage, storage), -nbytes) for storage, nbytes in cycle.leftovers.items()])
    made: dict[Hashable, Hashable] = {}
    events: list[tuple[Hashable, int]] = []
    for storage, nbytes in rows.events[rows.begin : rows.end]:
        if storage in cycle.successors:
            before = cycle.successors[storage]
            name: Hashable = names.get(before, before)
        elif nbytes > 0 and storage not in made:
            name = made[storage] = (step, storage)
        else:
            name = made.get(storage, storage)
        events.append((name, nbytes))
    streams: dict[Hashable, int] = {name: rows.streams[storage] for storage, name in made.items() if storage in rows.streams}
    allocator.replay(events, {i - rows.begin for i in rows.moves if rows.begin <= i < rows.end}, streams)
    return made
