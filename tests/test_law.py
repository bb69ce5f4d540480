"""The law over the micro-batch: found from two traces, checked with the third, refused where it does not hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramlab.memory import steady
from vramlab.memory.allocator import CachingAllocator, OutOfMemoryError
from vramlab.memory.law import LawError, MemoryLaw
from vramlab.memory.trace import Category, Events, MemoryTrace
from vramlab.units import MiB

Step = list[tuple[int, int, Category]]
"""Storage, bytes (negative: released), category."""


def trace(rows: Step, moves: Any = (), streams: dict[int, int] | None = None) -> MemoryTrace:
    storage = np.array([r[0] for r in rows], np.int64)
    nbytes = np.array([r[1] for r in rows], np.int64)
    category = np.array([r[2] for r in rows], np.int8)
    none = np.zeros(len(rows), np.int32)
    stream = None if streams is None else np.array([streams.get(r[0], 0) for r in rows], np.int32)
    return MemoryTrace(Events(storage, nbytes, category, none, none, none, ("",), ("aten::mm",), moves=frozenset(moves), stream=stream))


def on_card(trace: MemoryTrace) -> tuple[int, int]:
    """Peaks, allocated and reserved, of a trace as it stands."""
    rows, whole = steady.rows_of(trace.events), CachingAllocator()
    whole.replay(rows.events, rows.moves, rows.streams)
    return whole.peak_allocated, whole.peak_reserved


def of(law: MemoryLaw, n: int) -> tuple[int, int, int]:
    """The law's peaks: allocated, reserved, and of rounded tensors."""
    return law.peak(n), law.replayed(n).peak_reserved, law.tensors(n)


def in_truth(trace: MemoryTrace) -> tuple[int, int, int]:
    return *on_card(trace), trace.rounded().peak


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
        assert of(law, n) == in_truth(step(n))
        assert law.replayed(n).peak_allocated == law.peak(n)


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
    assert of(law, n) == in_truth(at(n))
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
        assert of(law, n) == in_truth(step(n, scratch=n * MiB))
        assert law.is_exact(n)
    assert of(law, 30) == in_truth(step(30, scratch=30 * MiB))
    assert not law.is_exact(30)  # nobody has looked there


def test_scratch_that_stops_growing_follows_the_line_up_to_where_it_stops() -> None:
    law = MemoryLaw({n: step(n, scratch=min(n, 10) * MiB) for n in (2, 4, 20)})
    for n in (3, 8, 15, 100):
        assert of(law, n) == in_truth(step(n, scratch=min(n, 10) * MiB))
    assert law.is_exact(4)
    assert not law.is_exact(3)
    assert not law.is_exact(15)


def test_scratch_that_begins_with_the_size_is_no_other_event() -> None:
    law = MemoryLaw({n: step(n, scratch=0 if n < 3 else 20 * MiB) for n in (2, 3, 8)})
    assert of(law, 8) == in_truth(step(8, scratch=20 * MiB))
    assert of(law, 2) == in_truth(step(2))
    assert law.is_exact(5)


def test_a_workspace_that_stays_is_held() -> None:
    law = MemoryLaw({n: step(n, kept=8 * MiB) for n in (2, 3, 4)})
    assert of(law, 9) == in_truth(step(9, kept=8 * MiB))


def test_a_capacity_is_kept() -> None:
    law = MemoryLaw({n: step(n) for n in (2, 3, 4)})
    assert law.replayed(5, 60 * MiB).peak_reserved <= 60 * MiB
    with pytest.raises(OutOfMemoryError):
        law.replayed(50, 60 * MiB)


@pytest.mark.parametrize(("degree", "sizes"), [(1, (2, 3)), (2, (2, 3, 4))])
def test_traces_to_find_the_law_alone_are_not_enough(degree: int, sizes: tuple[int, ...]) -> None:
    found = f"A law needs traces at {degree + 2} sizes .tokens., {degree + 1} to find it and one to check it; got {degree + 1}"
    with pytest.raises(ValueError, match=found):
        MemoryLaw({n: step(n) for n in sizes}, degree, "tokens")


@pytest.mark.parametrize("degree", [0, 3, "1"])
def test_a_degree_is_one_or_two(degree: Any) -> None:
    with pytest.raises(ValueError, match=f"A law has degree 1 or 2, got {degree!r}"):
        MemoryLaw({n: step(n) for n in range(1, 9)}, degree)


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


# Parabolas


def scores(n: int) -> MemoryTrace:
    """Written-out attention over n tokens: the activations grow with n, the scores with n * n."""
    rows: Step = [(0, 7 * MiB, Category.PARAMETERS), (1, 3000 * n, Category.ACTIVATIONS), (2, 24 * n * n + 8, Category.ACTIVATIONS)]
    return trace([*rows, (3, 24 * n * n + 8, Category.TEMPORARY), *((s, -b, c) for s, b, c in rows[1:])])


def test_a_parabola_is_found_from_three_traces_and_checked_with_the_fourth() -> None:
    law = MemoryLaw({n: scores(n) for n in (128, 256, 512, 1024)}, degree=2)
    for n in (1, 100, 333, 700, 2048):
        assert of(law, n) == in_truth(scores(n))
    assert law.is_exact(700)
    assert not law.is_exact(2048)


@settings(max_examples=50, deadline=None)
@given(coefficients=st.lists(st.tuples(*[st.integers(0, 3000)] * 3), min_size=1, max_size=6), n=st.integers(1, 2000))
def test_any_parabola_with_whole_coefficients_is_found(coefficients: list[tuple[int, int, int]], n: int) -> None:
    def at(n: int) -> MemoryTrace:
        return trace([(i, 1 + a + b * n + c * n * n, Category.ACTIVATIONS) for i, (a, b, c) in enumerate(coefficients)])

    assert of(MemoryLaw({m: at(m) for m in (96, 128, 160, 256)}, degree=2), n) == in_truth(at(n))


def test_what_is_no_parabola_is_refused() -> None:
    with pytest.raises(LawError, match=r"The size of event 0 \(aten::mm\) is no parabola over the sequence: 8 at 2, 27 at 3, 64 at 4, 125"):
        MemoryLaw({n: trace([(0, n**3, Category.ACTIVATIONS)]) for n in (2, 3, 4, 5)}, 2, "sequence")
    with pytest.raises(LawError, match="does other things at sequence 5 than at 2"):
        MemoryLaw({n: scores(n) if n < 5 else step(n) for n in (2, 3, 4, 5)}, 2, "sequence")


# Kernels that do other things


def sorting(n: int) -> MemoryTrace:
    """Two kernels: above 4 items the first sorts, which takes two workspaces more and keeps one of them through its result."""
    rows: Step = [(0, 5 * MiB, Category.PARAMETERS), (1, 2 * MiB * n, Category.ACTIVATIONS)]
    few: Step = [(10, MiB * n, Category.WORKSPACE), (10, -MiB * n, Category.WORKSPACE)]
    many: Step = [(11, 3000, Category.WORKSPACE), (12, 2 * MiB * n, Category.WORKSPACE), (11, -3000, Category.WORKSPACE)]
    result: Step = [(2, 4 * MiB, Category.ACTIVATIONS)]
    late: Step = [(12, -2 * MiB * n, Category.WORKSPACE)] if n > 4 else []
    other: Step = [(13, MiB, Category.WORKSPACE), (13, -MiB, Category.WORKSPACE)]
    return trace([*rows, *(many if n > 4 else few), *result, *late, *other, (1, -2 * MiB * n, Category.ACTIVATIONS)])


def test_each_trace_is_given_back_to_the_byte_where_kernels_differ() -> None:
    law = MemoryLaw({n: sorting(n) for n in (2, 3, 8, 20)})
    for n in (2, 3, 8, 20):
        assert of(law, n) == in_truth(sorting(n))
        assert law.is_exact(n)
    assert not law.is_exact(5)
    assert abs(law.peak(5) - on_card(sorting(5))[0]) <= 5 * MiB


def test_memory_of_other_streams_is_kept_apart() -> None:
    def streaming(n: int, other: int = 1) -> MemoryTrace:
        rows: Step = [(0, 30 * MiB * n, Category.ACTIVATIONS), (0, -30 * MiB * n, Category.ACTIVATIONS)]
        kernel: Step = [(2, 20 * MiB * n, Category.WORKSPACE), (2, -20 * MiB * n, Category.WORKSPACE)]
        return trace([*rows, (1, 30 * MiB * n, Category.COMMUNICATION), *kernel], streams={1: other, 2: 2})

    law = MemoryLaw({n: streaming(n) for n in (1, 2, 3)})
    assert of(law, 5) == in_truth(streaming(5))
    assert law.replayed(5).peak_reserved == 400 * MiB
    with pytest.raises(LawError, match="does other things"):
        MemoryLaw({n: streaming(n, other=n) for n in (1, 2, 3)})


def test_resized_storages_count_what_they_have() -> None:
    def resizing(n: int) -> MemoryTrace:
        sizes = (600 * n, 900 * 1024 * n, -900 * 1024 * n, 3 * MiB * n)
        return trace([(0, size, Category.PARAMETERS) for size in sizes] + [(1, 100 * n, Category.ACTIVATIONS)])

    law = MemoryLaw({n: resizing(n) for n in (1, 2, 3)})
    for n in (1, 2, 5):
        assert of(law, n)[:2] == on_card(resizing(n))
        assert law.tensors(n) == law.peak(n)


# How long answers take


def quickest(ask: Any, sizes: range) -> float:
    import time

    times = []
    for n in sizes:
        began = time.perf_counter()
        ask(n)
        times.append(time.perf_counter() - began)
    return min(times)


def test_answers_take_milliseconds_and_known_ones_microseconds() -> None:
    law = MemoryLaw({n: trace([(i, n * 1000 + i, Category.ACTIVATIONS) for i in range(20_000)]) for n in (2, 3, 4)})
    assert quickest(law.tensors, range(10, 20)) < 0.01
    law.peak(5)
    assert quickest(law.peak, range(5, 6)) < 0.001
