"""Steps taken out of one trace and put into another, by hand and as a law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramlab.memory.splice import put_in, same_events, stands_alone
from vramlab.memory.trace import Category, Events, Phase

F, B, S = Phase.FORWARD, Phase.BACKWARD, Phase.STEP
Row = tuple[str, int, Phase, str]
"""Storage, which has a module of its own; bytes, phase, and a name that stands for operator and line."""


def events(rows: list[Row], steps: list[int], category: Category = Category.TEMPORARY, **others: Any) -> Events:
    """The events of some rows; storages and names are numbered as they come."""
    tables: tuple[dict[str, int], dict[str, int]] = {}, {"": 0}
    storage, name = (np.array([t.setdefault(row[i], len(t)) for row in rows]) for t, i in zip(tables, (0, 3), strict=True))
    (modules, names), phase = map(tuple, tables), np.array([row[2] for row in rows], np.int8)
    nbytes, marks = np.array([row[1] for row in rows]), tuple((end, 7) for end in steps)
    plain = (storage, nbytes, np.full(len(rows), category, np.int8), storage, phase, name, modules, names)
    return Events(*plain, seeds=1, steps=marks, line=name, lines=names, **others)


# Which steps can be taken out

ALONE: list[Row] = [
    ("parameter", 8, Phase.BUILD, ""),
    ("gradient", 8, B, "mm"),
    ("state", 4, S, "zeros"),
    ("temporary", 4, S, "mul"),
    ("temporary", -4, S, "add"),
    ("gradient", -8, S, "add"),
    ("other gradient", 8, B, "mm"),
    ("other temporary", 4, S, "mul"),
    ("other temporary", -4, S, "add"),
    ("other gradient", -8, S, "add"),
]
ENDS = [5, 9]


def swapped(i: int) -> list[Row]:
    """Two rows in the other order."""
    return [*ALONE[:i], ALONE[i + 1], ALONE[i], *ALONE[i + 2 :]]


def test_steps_that_touch_their_own_memory_alone_stand_alone() -> None:
    assert stands_alone(events(ALONE, ENDS))
    assert stands_alone(events(ALONE, ENDS, moves=frozenset({6}), stream=np.array([0, 1, 0, 0, 0, 1, 1, 0, 0, 1])))
    assert stands_alone(events([row for row in ALONE if "gradient" in row[0]], [1, 3]))  # steps without events


@pytest.mark.parametrize(
    ("rows", "others"),
    [
        (swapped(4), {}),  # releases a gradient, and its own comes later
        ([*ALONE, ("state", -4, F, "mm")], {}),  # its state is released by others
        (ALONE, {"moves": frozenset({7})}),
        (ALONE, {"stream": np.arange(10) == 8}),
        (ALONE, {"category": Category.WORKSPACE}),  # one stays
    ],
    ids=["gradient", "state", "move", "stream", "workspace"],
)
def test_steps_that_share_memory_do_not(rows: list[Row], others: dict[str, Any]) -> None:
    assert not stands_alone(events(rows, ENDS, **others))


def test_storages_are_numbered_as_they_come() -> None:
    made = events(ALONE, ENDS)
    assert not stands_alone(replace(made, storage=made.storage.max() - made.storage))


# What comes out

PIECES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["a", "b", "c", "d"]), st.booleans()), max_size=4)


def rows_of(where: str, piece: list[tuple[int, str, bool]], phase: Phase, name: str) -> list[Row]:
    """Each allocates; those that are temporary are released at the end of the piece."""
    made = [(f"{where} {i}", nbytes, phase, operator + name) for i, (nbytes, operator, _) in enumerate(piece)]
    gone = [
        (storage, -nbytes, phase, piece[-1][1] + name) for (storage, nbytes, _, _), (_, _, short) in zip(made, piece, strict=True) if short
    ]
    return made + gone


def run(work: Any, steps: Any, name: str) -> tuple[Events, list[tuple[str, str]]]:
    """Two windows and steps, and what each step ran last, by which gradients are released after it."""
    rows: list[Row] = [("parameter", 8, Phase.BUILD, "")]
    ends, last, moves = [], [], set()
    for window in range(2):
        rows += rows_of(f"work {window}", work[window], F, "")
        rows += [(f"old {window}", 8, B, "mm"), (f"old {window}", -8, B, "add"), (f"gradient {window}", 8, B, "add")]
        moves.add(len(rows) - 1)
        rows += rows_of(f"step {window}", steps[window], S, name)
        ends.append(len(rows))
        last.append((rows[-1][3] if steps[window] else "nothing" + name,) * 2)
        rows += [(f"gradient {window}", -8, S, last[-1][0]), ("held", 8 - 16 * window, F, "embedding")]
    return events([*rows, ("last", 1, F, "mm")], ends, moves=frozenset(moves)), last


def told(made: Events) -> list[Any]:
    """The rows with names for numbers, and the marks."""
    assert made.line is not None
    names = [[table[i] for i in column] for table, column in ((made.modules, made.module), (made.lines, made.line))]
    rows = [made.storage.tolist(), made.nbytes.tolist(), made.category.tolist(), made.phase.tolist(), *names]
    return [*rows, [made.operators[i] for i in made.operator], made.steps, made.moves, made.seeds]


@given(st.tuples(PIECES, PIECES), st.tuples(PIECES, PIECES), st.tuples(PIECES, PIECES), st.tuples(PIECES, PIECES))
def test_windows_of_one_and_steps_of_the_other_make_the_trace_that_has_both(work: Any, steps: Any, others: Any, elsewhere: Any) -> None:
    (known, one), (other, two) = run(work, steps, "_"), run(elsewhere, others, "_other")
    made, truth = put_in(known, other, list(zip(one, two, strict=True))), run(work, others, "_other")[0]
    assert told(made) == told(truth)
    assert same_events(put_in(known, known, list(zip(one, one, strict=True))), known)


def test_events_that_differ_anywhere_are_not_the_same() -> None:
    one = events(ALONE, ENDS)
    assert same_events(one, replace(one, storage=9 - one.storage))
    for other in (
        events(ALONE[:-1], ENDS),
        events(ALONE, [5, 8]),
        events(ALONE, ENDS, moves=frozenset({6})),
        events(ALONE, ENDS, Category.GRADIENTS),
        events([*ALONE[:-1], ("gradient", -8, S, "add")], ENDS),
        events([*ALONE[:-1], ("other gradient", -9, S, "add")], ENDS),
        events([*ALONE[:-1], ("other gradient", -8, F, "add")], ENDS),
        events([*ALONE[:-1], ("other gradient", -8, S, "mul")], ENDS),
    ):
        assert not same_events(one, other)
