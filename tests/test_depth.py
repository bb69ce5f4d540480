"""The law over the depth: programs written by hand at any depth, found again from four of them; refused where it does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramlab.memory import steady
from vramlab.memory.allocator import CachingAllocator, OutOfMemoryError
from vramlab.memory.depth import DepthLaw
from vramlab.memory.law import LawError
from vramlab.memory.trace import Category, Events, MemoryTrace
from vramlab.units import KiB, MiB


class Program:
    """Writes a trace down: storages by name, which another one may have after them."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, str, int]] = []
        self.alive: dict[Any, tuple[int, int]] = {}
        self.steps: list[tuple[int, int]] = []
        self.moves: set[int] = set()

    def make(self, name: Any, nbytes: int, operator: str = "make", category: int = Category.ACTIVATIONS) -> None:
        self.alive[name] = (len(self.rows), nbytes)
        self.rows.append((len(self.rows), nbytes, operator, category))

    def drop(self, name: Any, operator: str = "drop") -> None:
        storage, nbytes = self.alive.pop(name)
        self.rows.append((storage, -nbytes, operator, Category.ACTIVATIONS))

    def trace(self) -> MemoryTrace:
        operators = sorted({row[2] for row in self.rows})
        columns = [(storage, nbytes, category, operators.index(operator)) for storage, nbytes, operator, category in self.rows]
        storage, nbytes, category, operator = np.array(columns, np.int64).reshape(-1, 4).T
        none = np.zeros(len(columns), np.int64)
        return MemoryTrace(
            Events(
                storage,
                nbytes,
                category,
                none,
                none,
                operator,
                ("",),
                tuple(operators),
                steps=tuple(self.steps),
                moves=frozenset(self.moves),
            )
        )


def peaks(trace: MemoryTrace) -> tuple[int, int]:
    """Allocated in the trace, and reserved after many steps."""
    rows, once = steady.rows_of(trace.events), CachingAllocator()
    once.replay(rows.events, rows.moves)
    return once.peak_allocated, steady.replay(rows, CachingAllocator()).peak_reserved


def of(law: DepthLaw, depth: int) -> tuple[int, int]:
    return law.peak(depth), law.replayed(depth).peak_reserved


def training(depth: int, width: int = 3 * MiB, loss: int = 40 * MiB, foreach: bool = True) -> MemoryTrace:
    """Two steps: activations forward, gradients backward, and a list of temporaries in the step that is as long as the model is deep."""
    p = Program()
    for i in range(depth):
        p.make(("weight", i), width, "build", Category.PARAMETERS)
        p.make(("bias", i), 8 * KiB, "build", Category.PARAMETERS)
    p.make("head", 5 * MiB, "build", Category.PARAMETERS)
    for _ in range(2):
        p.make("batch", MiB, "batch")
        for i in range(depth):
            p.make(("x", i), 2 * MiB, "linear")
            p.make(("gelu", i), 9 * MiB // 2, "gelu")
        p.make("loss", loss, "loss")
        p.drop("loss", "loss")
        for i in reversed(range(depth)):
            p.make(("grad", i), width, "mm", Category.GRADIENTS)
            p.make(("bias grad", i), 8 * KiB, "sum", Category.GRADIENTS)
            p.drop(("gelu", i), "gelu backward")
            p.drop(("x", i), "linear backward")
        p.drop("batch")
        p.make("norms", 4 * depth, "stack")
        if foreach:
            for i in range(depth):
                p.make(("root", i), width, "sqrt")
            for i in reversed(range(depth)):
                p.drop(("root", i), "addcdiv")
        p.drop("norms", "norm")
        p.steps.append((len(p.rows), 0))
        for i in range(depth):
            p.drop(("grad", i), "zero")
            p.drop(("bias grad", i), "zero")
    return p.trace()


@pytest.mark.parametrize("made_of", [(2, 3, 4, 6), (3, 4, 5, 9), (4, 6, 8, 12), (2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("foreach", [True, False])
def test_a_deeper_step_is_that_of_its_trace(made_of: tuple[int, ...], foreach: bool) -> None:
    law = DepthLaw({n: training(n, foreach=foreach) for n in made_of})
    for n in range(made_of[0], 30, made_of[1] - made_of[0]):
        assert of(law, n) == peaks(training(n, foreach=foreach))


def test_the_peak_moves_from_the_loss_to_the_step() -> None:
    law = DepthLaw({n: training(n) for n in (2, 3, 4, 6)})
    slopes = [law.peak(n + 1) - law.peak(n) for n in (2, 20)]
    assert slopes[0] != slopes[1]
    assert of(law, 40) == peaks(training(40))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20 * MiB), min_size=1, max_size=5),
    ways=st.lists(st.sampled_from(["keep", "at once", "next block", "mirrored", "in order"]), min_size=5, max_size=5),
    fixed=st.integers(1, 8 * MiB),
    depth=st.integers(2, 25),
)
def test_any_program_of_equal_blocks_is_found_again(sizes: list[int], ways: list[str], fixed: int, depth: int) -> None:
    """Each storage of a block lives for ever, is gone at once, with the next block, in the order of backward, or in that of a list."""

    def at(depth: int) -> MemoryTrace:
        p = Program()
        p.make("fixed", fixed, "begin")
        for i in range(depth):
            for k, size in enumerate(sizes):
                p.make((k, i), size, f"make {k}")
                if ways[k] == "at once":
                    p.drop((k, i), f"drop {k}")
                if ways[k] == "next block" and i:
                    p.drop((k, i - 1), f"drop {k}")
        p.make("middle", 2 * fixed, "middle")
        for k, way in enumerate(ways[: len(sizes)]):
            if way in ("mirrored", "in order"):
                for i in reversed(range(depth)) if way == "mirrored" else range(depth):
                    p.drop((k, i), f"drop {k}")
        p.make("end", fixed, "end")
        return p.trace()

    law = DepthLaw({n: at(n) for n in (4, 5, 6, 9)})
    assert of(law, max(depth, 4)) == peaks(at(max(depth, 4)))


def test_blocks_that_take_turns_are_known_at_the_distance_after_which_they_come_again() -> None:
    def at(depth: int) -> MemoryTrace:
        p = Program()
        for i in range(depth):
            p.make(i, (2 + 3 * (i % 2)) * MiB, f"block {i % 2}")
        p.make("end", MiB, "end")
        return p.trace()

    law = DepthLaw({n: at(n) for n in (4, 6, 8, 12)})
    assert of(law, 20) == peaks(at(20))
    with pytest.raises(ValueError, match="This law knows 4, 6, 8 blocks and so on, got 7"):
        law.peak(7)
    with pytest.raises(LawError):
        DepthLaw({n: at(n) for n in (4, 5, 6, 7)})


def test_what_moves_in_place_moves_at_each_depth() -> None:
    def at(depth: int) -> MemoryTrace:
        p = Program()
        for i in range(depth):
            p.make(("old", i), 9 * MiB, "grad")
            p.drop(("old", i), "steal")
            p.moves.add(len(p.rows))
            p.make(("new", i), 9 * MiB, "steal")
        p.make("end", MiB, "end")
        return p.trace()

    law = DepthLaw({n: at(n) for n in (2, 3, 4, 6)})
    assert of(law, 11) == peaks(at(11))


def test_a_capacity_is_kept() -> None:
    law = DepthLaw({n: training(n) for n in (2, 3, 4, 6)})
    needed = law.replayed(10).peak_reserved
    assert law.replayed(10, needed).peak_reserved <= needed
    with pytest.raises(OutOfMemoryError):
        law.replayed(11, law.peak(10))


# What is refused


@pytest.mark.parametrize("depths", [(), (2, 3, 4), (2, 3, 5, 6), (1, 2, 3, 4)])
def test_traces_that_find_no_law_are_refused(depths: tuple[int, ...]) -> None:
    got = ", ".join(map(str, depths)) or "none"
    with pytest.raises(ValueError, match=f"three numbers of blocks with the same distance, from 2 on, and one more to check it.*got {got}"):
        DepthLaw({n: training(n) for n in depths})


def test_fewer_blocks_than_were_traced_are_refused() -> None:
    with pytest.raises(ValueError, match="This law knows 2, 3, 4 blocks and so on, got 1"):
        DepthLaw({n: training(n) for n in (2, 3, 4, 6)}).peak(1)


def pool(depth: int, dropped: int) -> MemoryTrace:
    """Ten equal storages, of which one goes behind the blocks."""
    p = Program()
    for i in range(10):
        p.make(("pool", i), MiB, "pool")
    for i in range(depth):
        p.make(i, 3 * MiB, "block")
    p.drop(("pool", dropped))
    return p.trace()


def uneven(depth: int) -> MemoryTrace:
    p = Program()
    for i in range(depth):
        p.make(i, MiB, "block")
    p.steps = [(depth * depth % 3, 0), (depth, 0)]
    return p.trace()


def twins(depth: int) -> MemoryTrace:
    """Two equal storages that two operators make; which of them goes changes with the depth."""
    p = Program()
    for name in "ab":
        p.make(name, MiB, f"pool {name}")
    for i in range(depth):
        p.make(i, 3 * MiB, "block")
    p.drop("a" if depth < 4 else "b")
    return p.trace()


def resized() -> MemoryTrace:
    p = Program()
    p.make("x", MiB)
    p.rows.append((0, MiB, "resize", Category.PARAMETERS))
    return p.trace()


def test_a_release_that_does_not_follow_is_refused() -> None:
    law = DepthLaw({n: pool(n, n) for n in (2, 3, 4, 6)})
    assert of(law, 9) == peaks(pool(9, 9))
    with pytest.raises(LawError, match="At 10 blocks an event releases what is not there"):
        law.peak(10)


REFUSED: dict[str, tuple[Callable[[int, int], MemoryTrace], str]] = {
    "wider blocks": (lambda n, i: training(n, width=i * MiB), "The step at 4 blocks is not that at 2 with the events of equal"),
    "another end": (lambda n, i: training(n, foreach=n < 4), "The step at 4 blocks is not that at 2 with the events of equal blocks added"),
    "fewer events": (lambda n, i: training(9 - n), "does other things than with fewer, from event"),
    "a size that is no line": (lambda n, i: training(n, loss=n * n * 3 * MiB), "The step at 4 blocks is not that at 2"),
    "a release that jumps": (lambda n, i: pool(n, n * n % 7), "What the step releases does not change evenly with the number"),
    "a release of another kind": (lambda n, i: twins(n), "What the step releases does not change evenly with the number"),
    "steps that end anywhere": (lambda n, i: uneven(n), "The steps at 2, 3 and 4 blocks do not grow evenly"),
    "a resized storage": (lambda n, i: resized(), "A storage is resized, and the law over the depth knows only such"),
    "a wrong check": (
        lambda n, i: training(n, loss=(40 if n < 6 else 80) * MiB),
        "At 6 blocks the law gives .* bytes allocated and the",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_grow_evenly_is_refused(why: str) -> None:
    make, text = REFUSED[why]
    with pytest.raises(LawError, match=text):
        DepthLaw({n: make(n, i + 1) for i, n in enumerate((2, 3, 4, 6))})
