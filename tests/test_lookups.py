"""What looking up rows by index, and adding to them in backward, takes for itself.

The figures called seen are torch 2.14.1's own: its CUDA build's host code ran on a CUDA runtime that hands out addresses and
starts no kernel, and its caching allocator wrote down what was asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_calls import BF16, F32, Seen, asked, card, empty

from vramlab.gpus import GPU
from vramlab.virtual import kernels

aten = torch.ops.aten

SEEN: Seen = [
    (aten.embedding.default, (empty(2, 512), empty(1, 512, dtype=torch.int64).expand(4, 512)), empty(4, 512, 512), card(), [16384]),
    (aten.embedding_dense_backward.default, (empty(2048, 64), empty(2048, dtype=torch.int64), 30000, -1, False), None, card(), []),
]


@pytest.mark.parametrize(
    ("func", "args", "out", "gpu", "seen"), SEEN, ids=[str(i) + str(row[0]).split(".")[1] for i, row in enumerate(SEEN)]
)
def test_a_kernel_allocates_what_pytorchs_own_did(func: Any, args: tuple[Any, ...], out: Any, gpu: GPU, seen: list[int]) -> None:
    assert asked(func, args, out, gpu) == sorted(seen)


def embedding(indices: int, rows: int, width: int, dtype: torch.dtype = F32, index: torch.dtype = torch.int64) -> tuple[Any, ...]:
    return empty(indices, width, dtype=dtype), empty(indices, dtype=index), rows, -1, False


# As seen: in order, 0 for the output; releases in any order among themselves, and at the end none.
ROWS = [
    (embedding(8192, 50257, 4), (8, 9), [138751, 1535, 65536, 1279, 72088, 144176]),
    (embedding(8192, 50257, 4), (8, 0), [138751, 1279, 65536, 1279, 72088, 144176]),
    (embedding(8192, 50257, 4), (9, 0), [137727, 1279, 65536, 1279, 72088, 144176]),
    (embedding(8192, 50257, 4), (7, 5), [138751, 1535, 65536, 1279, 72088, 144176]),
    (embedding(65536, 128256, 4), (12, 0), [1070591, 1279, 524288, 2303, 576712, 1153424]),
    (embedding(4096, 50257, 4, index=torch.int32), (8, 9), [1, 1279, 16384, 1023, 18020, 72080]),
    (embedding(65536, 500, 4), (8, 9), [1071615, 4351, 4000, 1279, 56424, 56424]),  # few rows: added up in place
    (embedding(20000, 200, 8, dtype=BF16), (8, 9), [8703, 2047, 1600, 1279, 17600, 17600, 6400]),  # ... in float32
]


@pytest.mark.parametrize(("args", "capability", "seen"), ROWS)
def test_an_embeddings_gradient_is_sorted_and_summed_in_scratch(
    args: tuple[Any, ...], capability: tuple[int, int], seen: list[int]
) -> None:
    events = kernels.transients(aten.embedding_dense_backward.default, args, {}, None, card(capability))
    sort, unique, counts, scan, pieces, *sums = seen
    list_ = args[1].numel() * args[1].element_size()
    made = [list_, list_, list_, sort, 0, list_, 8, list_, unique, counts, counts, scan, 8, pieces, *sums]
    assert [size for size in events if size >= 0] == made
    assert sum(-size for size in events if size < 0) == 2 * list_ + sort + unique + scan


def test_few_indices_are_not_sorted() -> None:
    assert kernels.transients(aten.embedding_dense_backward.default, embedding(3072, 50257, 4), {}, None, card()) == [0]


def test_deterministic_algorithms_sum_pieces_of_few_rows_too() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        events = kernels.transients(aten.embedding_dense_backward.default, embedding(65536, 500, 4), {}, None, card())
    finally:
        torch.use_deterministic_algorithms(False)
    assert events[-1] == (6553 + 500) * 4 * 4


def test_several_indices_are_copied_where_their_strides_differ() -> None:
    tensor, rows, columns = empty(4, 384), empty(4, 1, dtype=torch.int64), empty(384, dtype=torch.int64)
    events = kernels.transients(aten.index.Tensor, (tensor, [rows, columns]), {}, empty(4, 384), card())
    assert events == [12288, 12288, 0, -12288, -12288]
    alike = (tensor, [columns, columns])
    assert kernels.transients(aten.index.Tensor, alike, {}, empty(384), card()) == []
    masked = (tensor, [empty(4, dtype=torch.bool), None])
    assert kernels.transients(aten.index.Tensor, masked, {}, empty(4, 384), card()) == []


@pytest.mark.parametrize(
    ("indices", "rows", "sort"), [(2304, 1000, 1), (2305, 200, 3583), (2305, 1000, 43007), (77777, 128256, 1272831), (10000, 50000, 167935)]
)
def test_values_added_at_indices_are_sorted(indices: int, rows: int, sort: int) -> None:
    args = (empty(rows, 8), [empty(indices, dtype=torch.int64)], empty(indices, 8), True)
    events = kernels.transients(aten.index_put.default, args, {}, empty(rows, 8), card())
    list_ = indices * 8
    assert [size for size in events if size >= 0] == [list_, list_, list_, list_, list_, sort, 0]
    assert sum(events) == 0
    assert kernels.transients(aten.index_put.default, (*args[:3], False), {}, empty(rows, 8), card()) == []
