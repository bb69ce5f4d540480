"""The tables that kernels read which copy many tensors at once, as FSDP's do: counted by hand, in numbers of 8 bytes.

A block copies tiles of 2,048 bytes. An RTX 4090 has room for 128 x 1,536 / 128 = 1,536 blocks of 128 threads, and twice as many are
asked for at most: 3,072. A T4 has room for 40 x 1,024 / 128 = 320, so 640.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import BF16, F32, T4, card, empty
from torch.distributed.fsdp import fully_shard  # noqa: F401, defines FSDP's operators

from vramlab.gpus import GPU
from vramlab.virtual import kernels

aten = torch.ops.aten
Sizes = list[int]


def handed_out(rows: int, sizes: Sizes, gpu: GPU, dtype: torch.dtype = F32) -> list[int]:
    """What FSDP's copy of gathered rows into parameters allocates: all ranks' rows, of which each has the parts one after another."""
    parts = [empty(rows, size, dtype=dtype) for size in sizes]
    args = (empty(rows, sum(sizes), dtype=dtype), sizes, 1)
    events = kernels.transients(torch.ops.fsdp.split_with_sizes_copy.default, args, {"out": parts}, None, gpu)
    assert events == kernels.transients(aten.split_with_sizes_copy.out, args, {"out": parts}, None, gpu)
    return events


@pytest.mark.parametrize(
    ("rows", "sizes", "gpu", "blocks"),
    [
        (4, [512], card(), [1]),  # 2,048 bytes of each row
        (4, [513], card(), [2]),  # and 4 more
        (4, [262144, 512, 1], card(), [512, 1, 1]),  # 514 tiles of 4 rows: 2,056
        (4, [262144, 512, 0], card(), [512, 1, 0]),
        (4, [524288, 512], card(), [1024, 1]),  # 4,100 tiles, so 2 for each block: of 2 rows, as the root of 2, rounded up, is 2
        (1, [2097152], card(), [2048]),  # 4,096 tiles, so 2 for each block, and there is one row
        (64, [262144], card(), [171]),  # 32,768 tiles, so 11 for each block: of 4 rows, and of each 3
        (64, [262144], T4, [74]),  # ... 52 for each block: of 8 rows, and of each 7
    ],
)
def test_parts_and_blocks_are_listed_in_a_table_on_the_card(rows: int, sizes: Sizes, gpu: GPU, blocks: Sizes) -> None:
    numbers = 3 * len(sizes) + sum(blocks) + (len(sizes) + 1)
    assert handed_out(rows, sizes, gpu) == [8 * numbers, -8 * numbers]


def test_bytes_count_and_not_elements() -> None:
    assert handed_out(4, [2048, 1024], card(), BF16) == handed_out(4, [1024, 512], card(), F32)


def test_parts_in_the_middle_have_the_rows_of_what_stands_before_and_the_bytes_of_what_stands_behind() -> None:
    parts = [empty(2, size, 256) for size in (4, 6)]
    for dim in (1, -2):
        events = kernels.transients(aten.split_with_sizes_copy.out, (empty(2, 10, 256), [4, 6], dim), {"out": parts}, None, card())
        assert events[0] == 8 * (3 * 2 + (2 + 3) + 3)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (empty(4, 200)[:, :100], [empty(4, 40), empty(4, 60)]),
        (empty(4, 100), [empty(4, 80)[:, :40], empty(4, 60)]),
        (empty(4, 100), [empty(4, 40, dtype=BF16), empty(4, 60)]),
        (empty(0, 100), [empty(0, 40), empty(0, 60)]),
    ],
)
def test_parts_with_gaps_or_of_another_type_are_copied_one_by_one(source: torch.Tensor, parts: list[torch.Tensor]) -> None:
    assert kernels.transients(aten.split_with_sizes_copy.out, (source, [40, 60], 1), {"out": parts}, None, card()) == []


def test_columns_that_lie_one_after_another_are_without_gaps() -> None:
    source, parts = empty(100, 4).t(), [empty(40, 4).t(), empty(4, 60)]
    events = kernels.transients(aten.split_with_sizes_copy.out, (source, [40, 60], 1), {"out": parts}, None, card())
    assert events[0] == 8 * (3 * 2 + (1 + 1) + 3)  # a row counts as 4 x 40 numbers, and as 4 x 60


def brought_together(tensors: list[torch.Tensor], chunks: int, dtype: torch.dtype = F32, target: torch.Tensor | None = None) -> list[int]:
    """What FSDP's copy of gradients into one row for each rank allocates."""
    numel = sum(-(-tensor.size(0) // chunks) * tensor[0].numel() for tensor in tensors)
    kwargs = {"out": empty(chunks, numel, dtype=dtype) if target is None else target}
    events = kernels.transients(torch.ops.fsdp.chunk_cat.default, (tensors, 0, chunks), kwargs, None, card())
    assert events == kernels.transients(aten._chunk_cat.out, (tensors, 0, chunks), kwargs, kwargs["out"], card())
    return events


@pytest.mark.parametrize(
    ("shapes", "chunks", "blocks"),
    [
        ([(8, 256)], 4, [1]),  # 2 x 256 x 4 bytes for each of 4 ranks
        ([(9, 256)], 4, [2]),  # 3 rows, the last padded
        ([(8, 256), (1024,), (3,)], 4, [1, 1, 1]),
        ([(1, 6, 1000)], 2, [12]),  # 6,000 numbers for the first rank, and as many of padding
        ([(50257, 768)], 4, [18848]),  # 12,565 rows: 9,649,920 numbers, and half a tile
    ],
)
def test_tensors_and_blocks_of_one_chunk_are_listed_in_a_table(shapes: list[tuple[int, ...]], chunks: int, blocks: Sizes) -> None:
    tensors = [empty(*shape) for shape in shapes]
    numbers = 6 * len(shapes) + 2 + sum(blocks)
    assert brought_together(tensors, chunks) == [8 * numbers, -8 * numbers]
    # Made new, its output comes before.
    assert kernels.transients(aten._chunk_cat.default, (tensors, 0, chunks), {}, None, card()) == [8 * numbers, -8 * numbers]


def test_sixteen_bits_that_become_float32_are_counted_as_float32() -> None:
    assert brought_together([empty(8, 256, dtype=BF16)], 4, F32) == brought_together([empty(8, 256)], 4)
    assert brought_together([empty(16, 256, dtype=BF16)], 4, BF16) == brought_together([empty(8, 256)], 4)


@pytest.mark.parametrize(
    ("tensors", "dtype", "copies"),
    [
        ([empty(10, 6, dtype=torch.float16)], F32, [12 * 6 * 2]),  # cast, so padded to 12 rows for 4 ranks
        ([empty(8, 6, dtype=torch.float16)], F32, []),  # ... which 8 are already
        ([empty(6, 10).t(), empty(9)], F32, [12 * 6 * 4, 12 * 4]),
        ([empty(6, 8).t()], F32, [8 * 6 * 4]),  # not padded, but its rows are not one after another
        ([empty(8, 12)[:, :6]], F32, [8 * 6 * 4]),
    ],
)
def test_tensors_that_are_cast_or_not_contiguous_are_padded_one_by_one(tensors: Any, dtype: torch.dtype, copies: Sizes) -> None:
    assert brought_together(tensors, 4, dtype) == [*copies, 0, *(-size for size in copies)]


def test_only_a_target_with_gaps_is_filled_another_way() -> None:
    assert brought_together([empty(10, 6)], 4, target=empty(4, 36)[:, ::2]) == [12 * 6 * 4, 0, -12 * 6 * 4]
    assert brought_together([empty(10, 6)], 4, target=empty(18, 4).t()) == brought_together([empty(10, 6)], 4)


@settings(deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_a_table_is_no_longer_than_one_entry_for_each_tile(rows: int, sizes: Sizes) -> None:
    tiles = [-(-size * 4 // 2048) for size in sizes]
    numbers = handed_out(rows, sizes, card())[0] // 8 - 4 * len(sizes) - 1
    assert len(sizes) <= numbers <= sum(tiles)
    assert numbers == sum(tiles) or sum(tiles) * rows > 3072
