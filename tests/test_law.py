"""The law over the micro-batch: found from two traces, checked with the third, refused where it does not hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramlab.memory.allocator import CachingAllocator, OutOfMemoryError
from vramlab.memory.law import LawError, MemoryLaw
from vramlab.memory.trace import Category, Events, MemoryTrace
from vramlab.units import MiB

Step = list[tuple[int, int, Category]]
"""Storage, bytes (negative: released), category."""


def trace(rows: Step, moves: Any = ()) -> MemoryTrace:
    storage = np.array([r[0] for r in rows], np.int64)
    nbytes = np.array([r[1] for r in rows], np.int64)
    category = np.array([r[2] for r in rows], np.int8)
    none = np.zeros(len(rows), np.int32)
    return MemoryTrace(Events(storage, nbytes, category, none, none, none, ("",), ("aten::mm",), moves=frozenset(moves)))


def step(n: int, constant: int = 5 * MiB, slope: int = 3 * MiB, scratch: int = 0, kept: int = 0) -> MemoryTrace:
    """Parameters, an activation that grows with n, perhaps a kernel's scratch and a workspace that stays."""
    rows: Step = [(0, constant, Category.PARAMETERS)]
    if kept:
        rows.append((7, kept, Category.WORKSPACE))
    rows.append((1, slope * n, Category.ACTIVATIONS))
    if scratch:
        rows += [(2, scratch, Category.WORKSPACE), (2, -scratch, Category.WORKSPACE)]
    return trace(
        [*rows, (3, 100 * n + 8, Category.TEMPORARY), (1, -slope * n, Category.ACTIVATIONS), (3, -100 * n - 8, Category.TEMPORARY)]
    )


def test_the_peak_at_any_micro_batch_is_that_of_its_trace() -> None:
    law = MemoryLaw({n: step(n) for n in (2, 3, 7)})
    for n in (1, 2, 5, 40):
        assert law.peak(n) == step(n).rounded().peak
        replayed, whole = law.replayed(n), CachingAllocator()
        events = step(n).events
        whole.replay(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True))
        assert (replayed.peak_allocated, replayed.peak_reserved) == (whole.peak_allocated, whole.peak_reserved)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4 * MiB), st.integers(0, MiB)), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    n=st.integers(1, 60),
)
def test_any_program_of_straight_lines_follows_the_law(sizes: list[tuple[int, int]], order: Any, n: int) -> None:
    program: list[tuple[int, int]] = []
    alive: list[int] = []
    for i in range(len(sizes)):
        program.append((i, 1))
        alive.append(i)
        if order.random() < 0.5:
            program.append((alive.pop(order.randrange(len(alive))), -1))

    def at(n: int) -> MemoryTrace:
        return trace([(i, sign * (sizes[i][0] + 1 + sizes[i][1] * n), Category.ACTIVATIONS) for i, sign in program])

    law = MemoryLaw({m: at(m) for m in (2, 3, 5)})
    assert law.peak(n) == at(n).rounded().peak
    whole, events = CachingAllocator(), at(n).events
    whole.replay(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True))
    assert law.replayed(n).peak_reserved == whole.peak_reserved
    assert law.is_exact(n) == (2 <= n <= 5)


def test_what_moves_in_place_moves_in_the_law() -> None:
    def moving(n: int) -> MemoryTrace:
        rows = [(0, 9 * MiB * n, Category.GRADIENTS), (0, -9 * MiB * n, Category.GRADIENTS), (1, 9 * MiB * n, Category.GRADIENTS)]
        return trace(rows, moves=[2])

    law = MemoryLaw({n: moving(n) for n in (1, 2, 3)})
    assert law.replayed(4).peak_reserved == 36 * MiB


def test_scratch_on_a_line_is_exact() -> None:
    law = MemoryLaw({n: step(n, scratch=n * MiB) for n in (2, 3, 12)})
    for n in (3, 7, 11):
        assert law.peak(n) == step(n, scratch=n * MiB).rounded().peak
        assert law.is_exact(n)
    assert law.peak(30) == step(30, scratch=30 * MiB).rounded().peak
    assert not law.is_exact(30)  # nobody has looked there


def test_scratch_that_stops_growing_follows_the_line_up_to_where_it_stops() -> None:
    law = MemoryLaw({n: step(n, scratch=min(n, 10) * MiB) for n in (2, 4, 20)})
    for n in (3, 8, 15, 100):
        assert law.peak(n) == step(n, scratch=min(n, 10) * MiB).rounded().peak
    assert law.is_exact(4)
    assert not law.is_exact(3)
    assert not law.is_exact(15)


def test_scratch_that_begins_with_the_size_is_no_other_event() -> None:
    law = MemoryLaw({n: step(n, scratch=0 if n < 3 else 20 * MiB) for n in (2, 3, 8)})
    assert law.peak(8) == step(8, scratch=20 * MiB).rounded().peak
    assert law.peak(2) == step(2).rounded().peak
    assert law.is_exact(5)


def test_a_workspace_that_stays_is_held() -> None:
    law = MemoryLaw({n: step(n, kept=8 * MiB) for n in (2, 3, 4)})
    assert law.peak(9) == step(9, kept=8 * MiB).rounded().peak


def test_a_capacity_is_kept() -> None:
    law = MemoryLaw({n: step(n) for n in (2, 3, 4)})
    assert law.replayed(5, 60 * MiB).peak_reserved <= 60 * MiB
    with pytest.raises(OutOfMemoryError):
        law.replayed(50, 60 * MiB)


def test_two_traces_are_not_enough() -> None:
    with pytest.raises(ValueError, match="needs traces at three micro-batches, two to find it and one to check it; got 2"):
        MemoryLaw({2: step(2), 3: step(3)})


@pytest.mark.parametrize("third", [4, 9])
def test_a_size_that_is_no_straight_line_is_refused(third: int) -> None:
    traces = {n: trace([(0, n * n * MiB, Category.ACTIVATIONS)]) for n in (2, 3, third)}
    with pytest.raises(LawError, match=r"size of event 0 \(aten::mm\) is no straight line over the micro-batch: 4,194,304 at 2"):
        MemoryLaw(traces)


def test_a_slope_of_half_a_byte_is_no_law() -> None:
    with pytest.raises(LawError, match="no straight line"):
        MemoryLaw({n: trace([(0, 100 + n // 2, Category.ACTIVATIONS)]) for n in (2, 4, 7)})


@pytest.mark.parametrize("where", [2, 3, 5])
def test_other_events_are_refused(where: int) -> None:
    traces = {n: step(n) for n in (2, 3, 5)}
    traces[where] = trace([(0, MiB, Category.PARAMETERS), (5, 5, Category.ACTIVATIONS)])
    with pytest.raises(LawError, match="does other things at micro-batch .* than at 2, from event .*; each has to be traced"):
        MemoryLaw(traces)


def test_moves_at_another_place_are_other_events() -> None:
    rows: Step = [(0, MiB, Category.GRADIENTS), (0, -MiB, Category.GRADIENTS), (1, MiB, Category.GRADIENTS)]
    with pytest.raises(LawError, match="does other things"):
        MemoryLaw({2: trace(rows), 3: trace(rows, moves=[2]), 4: trace(rows)})


def test_a_peak_takes_less_than_a_few_milliseconds() -> None:
    import time

    law = MemoryLaw({n: trace([(i, n * 1000 + i, Category.ACTIVATIONS) for i in range(40_000)]) for n in (2, 3, 4)})
    law.peak(5)
    times = []
    for n in range(10, 20):
        began = time.perf_counter()
        law.peak(n)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.01
