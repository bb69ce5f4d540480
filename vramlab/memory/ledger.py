"""Storages and what happened to them: allocated, resized, released, and what each turned out to be for."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from vramlab.memory.now import Now
from vramlab.memory.trace import Category, Events, Phase


class Storage(weakref.ref):
    """One storage from the first sight to its release, which the weak reference reports."""

    __slots__ = ("born", "category", "device", "died", "key", "module", "nbytes", "node", "number")

    key: int
    number: int
    nbytes: int
    device: torch.device
    module: int
    node: int
    born: int
    died: int | None
    category: Category | None


class Ledger:
    """Storages and what happened to them."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._rows: list[tuple[int, int, int, int]] = []  # storage, signed bytes, phase, operator
        self._late: list[tuple[int, tuple[int, int, int, int]]] = []  # rows found later, with the position they belong to
        self._boundary = 0
        self._steps: list[tuple[int, int]] = []  # how many rows there were at the end of an optimizer step, whose it was
        self._all: list[Storage] = []
        self._live: dict[int, Storage] = {}
        self._final: Events | None = None
        self._last_made = 0
        self._replaced: Storage | None = None

    def entry(self, storage: torch.UntypedStorage) -> Storage | None:
        return self._live.get(storage._cdata)

    def is_parameter(self, storage: torch.UntypedStorage) -> bool:
        entry = self.entry(storage)
        return entry is not None and entry.category is Category.PARAMETERS

    def made(self, storage: torch.UntypedStorage) -> Storage:
        """A storage that the running operator has just allocated."""
        entry = self._follow(storage)
        self._last_made = len(self._rows)
        self._rows.append((entry.number, entry.nbytes, self._now.phase, self._now.operator))
        return entry

    def operator_begins(self) -> None:
        self._replaced = None

    def takes_place_of(self, old: Storage) -> None:
        """If this storage is released before the next operator, it makes room for what was made last."""
        self._replaced = old

    def found(self, storage: torch.UntypedStorage, category: Category, module: int) -> Storage:
        """A storage turns out to be of a category; if it is unknown, it existed at the last boundary already."""
        entry = self._live.get(storage._cdata)
        if entry is None:
            entry = self._follow(storage)
            self._late.append((self._boundary, (entry.number, entry.nbytes, Phase.BUILD, 0)))
        elif entry.category is not None and entry.category <= category:
            return entry  # a parameter's storage stays one, whatever else refers to it
        entry.category, entry.module = category, module
        return entry

    def resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is not None and entry.nbytes != (nbytes := storage.nbytes()):
            self._rows.append((entry.number, nbytes - entry.nbytes, self._now.phase, self._now.operator))
            entry.nbytes = nbytes

    def boundary(self) -> None:
        """What is found from now on existed by now."""
        self._boundary = len(self._rows)

    def step_ends(self, optimizer: int) -> None:
        self._steps.append((len(self._rows), optimizer))
        self.boundary()

    def _follow(self, storage: torch.UntypedStorage) -> Storage:
        entry = Storage(storage, self._released)
        entry.key, entry.number, entry.nbytes, entry.device = storage._cdata, len(self._all), storage.nbytes(), storage.device
        entry.module, entry.node, entry.born, entry.died, entry.category = self._now.module, self._now.node, self._now.epoch, None, None
        self._all.append(entry)
        self._live[entry.key] = entry
        return entry

    def _released(self, entry: Any) -> None:
        if self._live.pop(entry.key, None) is None:  # the recording has ended
            return
        entry.died = self._now.epoch
        at = len(self._rows)
        if entry is self._replaced:
            at, self._replaced = self._last_made, None
        self._rows.insert(at, (entry.number, -entry.nbytes, self._now.phase, self._now.operator))

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
        rows = np.array(made, np.int64).reshape(-1, 4)
        rows = np.insert(rows, positions, np.array([row for _, row in found], np.int64).reshape(-1, 4), axis=0)
        here = np.array([e.device == device for e in entries], bool)[rows[:, 0]]
        before = np.concatenate(([0], np.cumsum(here)))  # rows of this device before each row
        rows = rows[here]
        category = np.array([self._category_by_lifetime(e) for e in entries], np.int8)
        module = np.array([e.module for e in entries], np.int32)
        return Events(
            storage=rows[:, 0],
            nbytes=rows[:, 1],
            category=category[rows[:, 0]],
            module=module[rows[:, 0]],
            phase=rows[:, 2].astype(np.int8),
            operator=rows[:, 3].astype(np.int32),
            modules=tuple(self._now.modules),
            operators=tuple(str(op).replace("aten.", "aten::").removesuffix(".default") for op in list(self._now.operators)),
            seeds=int(before[np.count_nonzero(positions == 0)]),
            steps=tuple((int(before[end + np.count_nonzero(positions <= end)]), whose) for end, whose in steps),
        )

    def close(self, device: torch.device) -> Events:
        """The last events; what happens to the storages from now on is nobody's business here."""
        self._final = self.events(device)
        self._live.clear()
        self._all.clear()
        self._replaced = None
        return self._final
