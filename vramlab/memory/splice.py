"""The optimizer steps of one trace in the place of another's. Plain NumPy, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vramlab.memory.trace import Category, Events, Phase

Last = tuple[str, str]
"""The operator that ran last in a step, and its line: what is released afterwards goes by them until the next operator runs."""


def stands_alone(events: Events) -> bool:
    """Whether optimizer steps can be taken out of a trace: they touch what they made themselves, and nobody else does.

    What decides is storages, memory that one takes over from another, workspaces that the next kernel would use again, and streams.
    Storages have to be numbered in the order in which they come, for equal ones are listed by their numbers.
    """
    inside = np.zeros(len(events.storage), bool)
    kept = False
    for begin, end in _regions(events):
        inside[begin:end] = True
        storages, number = np.unique(events.storage[begin:end], return_inverse=True)
        held = np.zeros(len(storages), np.int64)
        np.add.at(held, number, events.nbytes[begin:end])
        kept = kept or bool((held[number] != 0)[events.category[begin:end] == Category.WORKSPACE].any())
    shared = np.isin(events.storage[inside], events.storage[~inside]).any()
    moved = any(inside[i] for i in events.moves)
    elsewhere = events.stream is not None and events.stream[inside].any()
    first = np.sort(np.unique(events.storage, return_index=True)[1])
    in_order = (np.diff(events.storage[first]) > 0).all()
    return bool(in_order and not (kept or shared or moved or elsewhere))


def put_in(known: Events, other: Events, last: Sequence[tuple[Last, Last]]) -> Events:
    """The known events with the other's optimizer steps in the place of its own. Both have as many, and both `stands_alone`.

    Args:
        last: for each step what ran last in the known one, and in the other.
    """
    pieces, begin, total = [], 0, len(known.storage)
    for (first, end), (start, stop) in zip(_regions(known), _regions(other), strict=True):
        pieces += [np.arange(begin, first), np.arange(total + start, total + stop)]
        begin = end
    take = np.concatenate([*pieces, np.arange(begin, total)])  # of the known rows with the other's behind them
    ends = np.cumsum([len(piece) for piece in pieces])[1::2].tolist()

    def taken(one: np.ndarray, two: np.ndarray) -> np.ndarray:
        return np.concatenate([one, two])[take]

    columns: dict[str, Any] = {name: taken(getattr(known, name), getattr(other, name)) for name in _PLAIN}
    for name, table in _NAMED.items():
        columns[table], codes = _joined(getattr(known, table), getattr(other, table))
        columns[name] = taken(getattr(known, name), codes[getattr(other, name)])
    for end, (old, new) in zip(ends, last, strict=True):
        _retell(columns, end, old, new)
    columns["storage"] = _in_order(taken(known.storage, other.storage + known.storage.max() + 1))
    columns["stream"] = None if known.stream is None else taken(known.stream, np.zeros(len(other.storage), known.stream.dtype))
    where = np.zeros(total + len(other.storage), np.int64)
    where[take] = np.arange(len(take))
    moves = frozenset(where[list(known.moves)].tolist())
    steps = tuple((end, whose) for end, (_, whose) in zip(ends, known.steps, strict=True))
    return replace(known, **columns, moves=moves, steps=steps)


def same_events(one: Events, other: Events) -> bool:
    """Whether two traces with the same tables of names say the same, whatever numbers their storages have."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in (*_PLAIN, *_NAMED)]
    pairs.append((_in_order(one.storage), _in_order(other.storage)))
    marks = [(events.steps, events.moves, events.seeds) for events in (one, other)]
    return all(np.array_equal(a, b) for a, b in pairs) and marks[0] == marks[1]


_PLAIN = ("nbytes", "category", "phase")
_NAMED = {"module": "modules", "operator": "operators", "line": "lines"}


def _regions(events: Events) -> list[tuple[int, int]]:
    """Of each optimizer step where its events begin, with clipping, and end."""
    found = []
    for end, _ in events.steps:
        others = np.flatnonzero(events.phase[:end] != Phase.STEP)
        found.append((int(others[-1]) + 1 if len(others) else 0, end))
    return found


def _joined(names: tuple[str, ...], others: tuple[str, ...]) -> tuple[tuple[str, ...], np.ndarray]:
    """Both tables as one, and for each of the others its place in it."""
    table = (*names, *(name for name in others if name not in names))
    return table, np.array([table.index(name) for name in others], np.int32)


def _in_order(storage: np.ndarray) -> np.ndarray:
    """Storages numbered by when they first occur."""
    _, first, number = np.unique(storage, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _retell(columns: dict[str, Any], begin: int, old: Last, new: Last) -> None:
    """Rows from a step's end to the next operator are told what ran last now."""
    (operator, line), told = ((columns["operators"].index(o), columns["lines"].index(at)) for o, at in (old, new))
    same = (columns["operator"][begin:] == operator) & (columns["line"][begin:] == line)
    end = begin + int(np.logical_and.accumulate(same).sum())
    columns["operator"][begin:end], columns["line"][begin:end] = told
