"""The caching allocator against golden cases, laws, and what a real CUDA allocator did with the same requests."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vramlab.memory.allocator import BLOCK, LARGE_SEGMENT, OWN_SEGMENT, SMALL, Block, CachingAllocator, OutOfMemoryError
from vramlab.units import MiB, round_up

TRACES = Path(__file__).parents[2] / "shared" / "data" / "cuda_traces"


@pytest.mark.parametrize(
    ("request_", "segment", "block"),
    [
        (1, 2_097_152, 512),
        (512, 2_097_152, 512),
        (513, 2_097_152, 1_024),
        (1_000, 2_097_152, 1_024),
        (1_048_575, 2_097_152, 1_048_576),
        (1_048_576, 2_097_152, 1_048_576),
        (1_048_577, 20_971_520, 1_049_088),
        (1_572_864, 20_971_520, 1_572_864),
        (8_519_680, 20_971_520, 8_519_680),
        (10_484_736, 20_971_520, 10_484_736),
        (10_485_759, 10_485_760, 10_485_760),
        (10_485_760, 10_485_760, 10_485_760),
        (10_485_761, 12_582_912, 10_486_272),
        (20_447_232, 20_971_520, 20_971_520),  # half a MiB is not split off
        (33_554_432, 33_554_432, 33_554_432),
        (104_857_607, 106_954_752, 104_858_112),
    ],
)
def test_one_request_takes_a_segment_and_a_block(request_: int, segment: int, block: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc("a", request_)
    assert (allocator.reserved, allocator.allocated) == (segment, block)
    assert allocator.segments == [segment]


def test_the_parameters_of_a_transformer_one_by_one() -> None:
    """nn.Transformer(d_model=512): parameters, gradients in reverse order, two moments each."""
    sizes = [p.numel() * 4 for p in nn.Transformer(512, batch_first=True, device="meta").parameters()]
    assert (len(sizes), sum(sizes)) == (184, 176_562_176)
    allocator = CachingAllocator()
    found = []
    for name, order in (("p", sizes), ("g", sizes[::-1]), ("m", [n for n in sizes for _ in range(2)])):
        for i, n in enumerate(order):
            allocator.malloc((name, i), n)
        found.append((allocator.allocated, allocator.reserved, len(allocator.segments)))
    assert found == [(178_659_328, 188_743_680, 18), (356_270_080, 396_361_728, 36), (712_540_160, 769_654_784, 70)]


def test_nothing_is_allocated_for_nothing() -> None:
    allocator = CachingAllocator()
    allocator.malloc("a", 0)
    allocator.free("a")
    assert (allocator.allocated, allocator.reserved, allocator.segments) == (0, 0, [])


def test_a_freed_block_is_used_again_and_the_peak_stays() -> None:
    allocator = CachingAllocator()
    allocator.malloc("a", 30 * MiB)
    allocator.free("a")
    allocator.malloc("b", 29 * MiB + 1)  # less than a MiB would be left: the whole block
    assert (allocator.reserved, allocator.allocated, allocator.peak_allocated) == (30 * MiB, 30 * MiB, 30 * MiB)


def test_a_full_card_gives_back_whole_segments_and_tries_again() -> None:
    allocator = CachingAllocator(capacity=100 * MiB)
    for i in range(10):
        allocator.malloc(i, 10 * MiB)
    for i in range(0, 10, 2):
        allocator.free(i)
    allocator.malloc("large", 20 * MiB)
    assert (allocator.retries, allocator.reserved) == (1, 70 * MiB)


def test_fragments_of_one_segment_are_no_room_for_a_large_request() -> None:
    allocator = CachingAllocator(capacity=100 * MiB)
    allocator.malloc("all", 100 * MiB)
    allocator.free("all")
    for i in range(10):
        allocator.malloc(i, 10 * MiB)
    for i in range(0, 10, 2):
        allocator.free(i)
    right = "Tried to allocate 20.00 MiB for 20.00 MiB: 100.00 MiB capacity, 100.00 MiB reserved, 50.00 MiB of that allocated."
    with pytest.raises(OutOfMemoryError, match=f"^{re.escape(right)}$") as error:
        allocator.malloc("large", 20 * MiB)
    assert (error.value.requested, error.value.segment) == (20 * MiB, 20 * MiB)
    assert (allocator.allocated, allocator.reserved) == (50 * MiB, 100 * MiB)
    allocator.malloc("small enough", 10 * MiB)  # and the allocator goes on


def test_the_message_names_what_the_driver_was_asked_for() -> None:
    with pytest.raises(OutOfMemoryError, match=r"^Tried to allocate 20\.00 MiB for 1\.50 MiB: 10\.00 MiB capacity, 0 B reserved"):
        CachingAllocator(capacity=10 * MiB).malloc("a", 3 * MiB // 2)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^A request is at least 0 bytes, got -1\.$"):
        CachingAllocator().malloc("a", -1)
    with pytest.raises(ValueError, match=r"^A capacity is a positive number of bytes, or None for no limit; got 0\.$"):
        CachingAllocator(capacity=0)
    allocator = CachingAllocator()
    allocator.malloc("a", 1)
    with pytest.raises(ValueError, match=r"^Handle 'a' has a block already; free it first\.$"):
        allocator.malloc("a", 1)


def test_expandable_segments_map_whole_pages_and_grow_where_they_end() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc("a", 15 * MiB)
    assert allocator.reserved == LARGE_SEGMENT
    allocator.malloc("b", 15 * MiB)  # 5 MiB are left: one more page
    assert allocator.reserved == 2 * LARGE_SEGMENT
    assert allocator.segments == [2 * LARGE_SEGMENT]
    allocator.malloc("c", 1)
    assert allocator.segments == [2 * LARGE_SEGMENT, 2 * MiB]


def test_expandable_segments_give_back_pages_that_are_wholly_free() -> None:
    allocator = CachingAllocator(capacity=100 * MiB, expandable_segments=True)
    for i in range(5):
        allocator.malloc(i, 20 * MiB)
    for i in (1, 3):
        allocator.free(i)
    allocator.malloc("large", 40 * MiB)  # the fragments' pages are mapped again behind one another
    assert (allocator.reserved, allocator.allocated, allocator.retries) == (100 * MiB, 100 * MiB, 1)


@pytest.mark.skipif(not TRACES.exists(), reason="needs the real CUDA traces, which are not part of the project")
@pytest.mark.parametrize("name", ["lm_bf16_ctx256_forward", "lm_fp32_ctx128_forward", "lm_fp32_ctx128_fullstep"])
def test_real_segments_of_an_h100_to_the_byte(name: str) -> None:
    trace = json.loads(gzip.decompress((TRACES / f"{name}_cold_h100.json.gz").read_bytes()))
    allocator = CachingAllocator()
    start = time.perf_counter()
    replay(allocator, trace["events"])
    assert time.perf_counter() - start < 2  # 12,000 events take some hundredths of a second
    assert Counter(allocator.segments) == Counter(trace["segment_sizes_sorted"])
    assert allocator.peak_reserved == trace["segment_bytes_allocated"]


def replay(allocator: CachingAllocator, events: list[Any]) -> None:
    for handle, nbytes in events:
        if nbytes < 0:
            allocator.free(handle)
        else:
            allocator.malloc(handle, nbytes)


SIZES = st.one_of(
    st.integers(0, 4 * BLOCK),
    st.integers(SMALL - 2 * BLOCK, SMALL + 2 * BLOCK),
    st.integers(OWN_SEGMENT - 2 * BLOCK, OWN_SEGMENT + 2 * BLOCK),
    st.integers(0, 64 * MiB),
)
PROGRAMS = st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=60)


def blocks(allocator: CachingAllocator) -> list[Block]:
    return sorted(allocator._blocks.values(), key=lambda b: b.address)


def check(allocator: CachingAllocator, live: dict[int, int]) -> None:
    """What is true at any moment."""
    found = blocks(allocator)
    for before, after in pairwise(found):
        assert before.address + before.size <= after.address  # no overlap
        if before.next is after:
            assert before.address + before.size == after.address
            assert not (before.free and after.free and before.mapped == after.mapped)  # free neighbours are one block
    mapped = [b for b in found if b.mapped]
    assert sum(b.size for b in mapped) == allocator.reserved == sum(allocator.segments)
    assert sum(b.size for b in mapped if not b.free) == allocator.allocated
    held = {handle: allocator._live[handle].size for handle, n in live.items() if n}
    assert all(held[handle] >= live[handle] for handle in held)
    assert len(allocator._live) == len(held)
    free = sorted((b.size, b.address) for b in mapped if b.free)
    assert sorted(entry for entries in allocator._free.values() for entry in entries) == free
    for before, after in pairwise(found):
        assert before.pool == after.pool or before.next is not after  # a segment serves one stream
    assert allocator.allocated <= allocator.peak_allocated
    assert allocator.reserved <= allocator.peak_reserved


@settings(deadline=None, max_examples=150)
@given(PROGRAMS, st.booleans(), st.sampled_from([None, 40 * MiB, 200 * MiB]))
def test_blocks_never_overlap_and_no_byte_is_lost(program: list[int], expandable: bool, capacity: int | None) -> None:
    allocator = CachingAllocator(capacity, expandable)
    live: dict[int, int] = {}
    for step, n in enumerate(program):
        if n < 0:
            if live:
                handle = list(live)[n % len(live)]
                allocator.free(handle)
                del live[handle]
        else:
            try:
                allocator.malloc(step, n, stream=n % 3)
                assert allocator._live[step].pool[1] == n % 3 if n else step not in allocator._live
                live[step] = n
            except OutOfMemoryError:
                assert capacity is not None
        check(allocator, live)
    if capacity is not None:
        assert allocator.peak_reserved <= capacity
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated == 0
    check(allocator, {})
    allocator.release_cached()
    assert allocator.reserved == 0
    assert all(not b.mapped for b in blocks(allocator))


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("nbytes", [1000, 3 * MiB, 30 * MiB])
def test_memory_of_a_stream_serves_no_other(nbytes: int, expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.malloc("a", nbytes, stream=1)
    taken = allocator.reserved
    allocator.free("a")
    allocator.malloc("b", nbytes, stream=1)
    assert allocator.reserved == taken
    allocator.malloc("c", nbytes)
    assert allocator.reserved == 2 * taken
    replayed = CachingAllocator(expandable_segments=expandable)
    replayed.replay([("a", nbytes), ("a", -nbytes), ("b", nbytes), ("c", nbytes)], streams={"a": 1, "b": 1})
    assert replayed.reserved == 2 * taken


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=40))
def test_reserved_is_never_more_than_a_segment_for_each_request(sizes: list[int]) -> None:
    allocator = CachingAllocator()
    naive = 0
    for i, n in enumerate(sizes):
        allocator.malloc(i, n)
        if n:
            naive += 2 * MiB if n <= SMALL else LARGE_SEGMENT if round_up(n, BLOCK) < OWN_SEGMENT else round_up(round_up(n, BLOCK), 2 * MiB)
    assert sum(sizes) <= allocator.allocated <= allocator.reserved <= naive
