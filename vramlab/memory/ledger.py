"""Storages and what happened to them: allocated, resized, released, and what each turned out to be for."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import numpy as np
import torch

from vramlab.memory.now import Now, shown_operator
from vramlab.memory.trace import Category, Events, Phase


class Storage(weakref.ref):
    """One storage from the first sight to its release, which the weak reference reports."""

    __slots__ = ("born", "category", "device", "died", "key", "module", "nbytes", "node", "number", "stream")

    key: int
    number: int
    nbytes: int
    device: torch.device
    module: int
    node: int
    born: int
    died: int | None
    category: Category | None
    stream: int


class Allocator(Protocol):
    """What hands out the memory of the storages that are followed, where that is not torch itself."""

    def malloc(self, entry: Storage) -> None: ...
    def free(self, entry: Storage) -> None: ...
    def move(self, old: Storage, new: Storage) -> None: ...
    def resize(self, entry: Storage, before: int) -> None: ...
    def stream(self) -> int: ...


class Workspace:
    """Memory that an operator takes for itself, without a tensor."""

    _numbers = itertools.count(1)

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._cdata = nbytes, -next(self._numbers)  # no storage has a negative address

    def nbytes(self) -> int:
        return self._nbytes


Row = tuple[int, int, int, int, int, int]
"""Storage, signed bytes, phase, operator, line, whether it takes over the memory that the row before has released."""


class Ledger:
    """Storages and what happened to them.

    Args:
        now: where the recorded code is.
        allocator: asked for the memory of each storage, and may refuse.
    """

    def __init__(self, now: Now, allocator: Allocator | None = None) -> None:
        self._now = now
        self._allocator = allocator
        self._rows: list[Row] = []
        self._late: list[tuple[int, Row]] = []  # rows found later, with the position they belong to
        self._boundary = 0
        self._steps: list[tuple[int, int]] = []  # how many rows there were at the end of an optimizer step, whose it was
        self._all: list[Storage] = []
        self._live: dict[int, Storage] = {}
        self._final: Events | None = None
        self._last_made = 0
        self._replaced: Storage | None = None
        self._waiting: Storage | None = None  # what may be computed in the place of the replaced
        self._refused: BaseException | None = None

    def entry(self, storage: torch.UntypedStorage) -> Storage | None:
        return self._live.get(storage._cdata)

    @property
    def steps(self) -> int:
        """How many optimizer steps have ended."""
        return len(self._steps)

    def is_parameter(self, storage: torch.UntypedStorage) -> bool:
        entry = self.entry(storage)
        return entry is not None and entry.category is Category.PARAMETERS

    def made(self, storage: torch.UntypedStorage | Workspace, device: torch.device, in_place_of: Storage | None = None) -> Storage:
        """A storage that the running operator has just allocated.

        If what it may be computed in place of is released before the next operator, it takes over that one's memory.
        """
        if self._waiting is not None:
            self._ask_for_memory()
        entry = self._follow(storage, device)
        self._replaced, self._waiting = in_place_of, entry
        if in_place_of is None:
            self._ask_for_memory()
        self._last_made = len(self._rows)
        self._rows.append(self._row(entry, entry.nbytes))
        return entry

    def _row(self, entry: Storage, nbytes: int) -> Row:
        return entry.number, nbytes, self._now.phase, self._now.operator, self._now.line, 0

    def operator_begins(self) -> None:
        self._replaced = None
        if self._waiting is not None:
            self._ask_for_memory()
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused

    def _ask_for_memory(self) -> None:
        entry, self._waiting = self._waiting, None
        if self._allocator is not None and entry is not None and entry.died is None:
            try:
                self._allocator.malloc(entry)
            except BaseException:
                self._live.pop(entry.key, None)  # it has no memory to release
                raise

    def found(self, storage: torch.UntypedStorage, category: Category, module: int, device: torch.device) -> Storage:
        """A storage turns out to be of a category; if it is unknown, it existed at the last boundary already."""
        entry = self._live.get(storage._cdata)
        if entry is None:
            entry = self._follow(storage, device)
            self._late.append((self._boundary, (entry.number, entry.nbytes, Phase.BUILD, 0, 0, 0)))
        elif entry.category is not None and entry.category <= category:
            return entry  # a parameter's storage stays one, whatever else refers to it
        entry.category, entry.module = category, module
        return entry

    def grown(self, storage: torch.UntypedStorage) -> None:
        """A storage that nobody has met yet, and that was empty, has got memory."""
        self._rows.append(self._row(entry := self._follow(storage, storage.device), entry.nbytes))
        if self._allocator is not None:
            self._allocator.malloc(entry)

    def resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is not None and entry.nbytes != (nbytes := storage.nbytes()):
            before, entry.nbytes = entry.nbytes, nbytes
            if self._allocator is not None:
                entry.stream = self._allocator.stream()
                self._allocator.resize(entry, before)
            self._rows.append(self._row(entry, nbytes - before))

    def boundary(self) -> None:
        """What is found from now on existed by now."""
        self._boundary = len(self._rows)

    def step_ends(self, optimizer: int) -> None:
        self._steps.append((len(self._rows), optimizer))
        self.boundary()

    def _follow(self, storage: torch.UntypedStorage | Workspace, device: torch.device) -> Storage:
        entry = Storage(storage, self._released)
        entry.key, entry.number, entry.nbytes, entry.device = storage._cdata, len(self._all), storage.nbytes(), device
        entry.module, entry.node, entry.born, entry.died, entry.category = self._now.module, self._now.node, self._now.epoch, None, None
        entry.stream = 0 if self._allocator is None else self._allocator.stream()
        self._all.append(entry)
        self._live[entry.key] = entry
        return entry

    def _released(self, entry: Any) -> None:
        if self._live.pop(entry.key, None) is None:  # the recording has ended
            return
        entry.died = self._now.epoch
        row = self._row(entry, -entry.nbytes)
        old, new = self._replaced, self._waiting
        if old is not None and new is not None and entry is old:
            self._waiting = self._replaced = None
            self._rows[self._last_made] = (*self._rows[self._last_made][:-1], 1)
            self._rows.insert(self._last_made, row)
            if self._allocator is not None:
                self._allocator.move(old, new)
            return
        if self._waiting is not None:  # it was not computed in place, so it got its memory before this is released
            try:
                self._ask_for_memory()
            except Exception as refused:  # nobody would see it, raised from a weak reference
                self._refused = refused
        self._rows.append(row)
        if self._allocator is not None:
            self._allocator.free(entry)

    def _category_by_lifetime(self, entry: Storage) -> Category:
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
        device = device or self.main_device()
        # Copies, and what others refer to last: a trace may be read while another thread records.
        steps, made, found = list(self._steps), list(self._rows), list(self._late)
        entries = list(self._all)
        if self._final is not None:  # the recording has ended meanwhile
            return self._final
        positions = np.array([position for position, _ in found], np.int64)
        rows = np.array(made, np.int64).reshape(-1, 6)
        rows = np.insert(rows, positions, np.array([row for _, row in found], np.int64).reshape(-1, 6), axis=0)
        here = np.array([e.device == device for e in entries], bool)[rows[:, 0]]
        before = np.concatenate(([0], np.cumsum(here)))  # rows of this device before each row
        rows = rows[here]
        category = np.array([self._category_by_lifetime(e) for e in entries], np.int8)
        module = np.array([e.module for e in entries], np.int32)
        stream = np.array([e.stream for e in entries], np.int32)
        return Events(
            storage=rows[:, 0],
            nbytes=rows[:, 1],
            category=category[rows[:, 0]],
            module=module[rows[:, 0]],
            phase=rows[:, 2].astype(np.int8),
            operator=rows[:, 3].astype(np.int32),
            modules=tuple(self._now.modules),
            operators=tuple(map(shown_operator, list(self._now.operators))),
            seeds=int(before[np.count_nonzero(positions == 0)]),
            steps=tuple((int(before[end + np.count_nonzero(positions <= end)]), whose) for end, whose in steps),
            moves=frozenset(np.flatnonzero(rows[:, 5]).tolist()),
            line=rows[:, 4].astype(np.int32),
            lines=tuple(self._now.lines),
            stream=stream[rows[:, 0]] if stream.any() else None,
        )

    def close(self, device: torch.device) -> Events:
        """The last events; what happens to the storages from now on is nobody's business here."""
        self._final = self.events(device)
        self._live.clear()
        self._all.clear()
        self._replaced = self._waiting = None
        return self._final
