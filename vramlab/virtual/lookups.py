"""Rows by index, and what is added to them in backward: sorting takes scratch.

PyTorch's C++ sources are named at each rule by their path below ``aten/src/ATen``.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from vramlab.gpus import GPU
from vramlab.units import round_up
from vramlab.virtual.scratch import Handler, around, bytes_of, copied, freed, from_table, sms

aten = torch.ops.aten


def _embedding_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Above 3,072 indices: they are sorted, and rows of one index are summed ten at a time, in float32.

    Reference: ``native/cuda/Embedding.cu``, ``embedding_dense_backward_cuda``; ``native/cuda/EmbeddingBackwardKernel.cu``.
    """
    indices, rows, size = a["indices"], a["indices"].numel(), a["indices"].element_size()
    copies = copied(indices, a["grad_output"])
    if rows <= 3072 and not a["scale_grad_by_freq"]:
        return around(copies)
    list_ = rows * size
    distinct = min(rows, a["num_weights"])
    pieces = rows // 10 + distinct
    width, itemsize = a["grad_output"].size(-1), a["grad_output"].element_size()
    sums = [pieces * width * max(4, itemsize)]
    threads = round_up(width, 32)
    blocks = ceil(distinct * threads / min(threads, 1024))
    if blocks < 4 * sms(card) and pieces > 4 * blocks and not torch.are_deterministic_algorithms_enabled():  # few rows: added up in place
        sums = [pieces * size, *([a["num_weights"] * width * 4] if itemsize == 2 else [])]
    sorting = [list_, _radix_sort(rows, size, int(a["num_weights"]).bit_length(), card)]  # of the indices and the numbers 0, 1, ...
    counts = [list_] if a["scale_grad_by_freq"] else []
    picking = [list_, _scan(rows, from_table(_UNIQUE_TILES, card.capability)[size], True)]  # where each index begins
    adding_up = [_scan(distinct, _SCAN_TILES[size], size == 8)]  # how many pieces come before
    before = [*copies, list_, list_, *freed(sorting), *counts]
    return [*before, 0, list_, 8, *freed(picking), distinct * size, distinct * size, *freed(adding_up), 8, pieces * size, *sums]


def _index(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Several indices are made alike: contiguous, if their strides differ once they are of one shape.

    Reference: ``native/TensorAdvancedIndexing.cpp``, ``AdvancedIndex``.
    """
    indices = [index for index in a["indices"] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    expanded = [torch.empty_strided(index.shape, index.stride(), dtype=index.dtype, device="meta").expand(shape) for index in indices]
    return around(copied(*expanded)) if len({index.stride() for index in expanded}) > 1 else []


def _added_by_index(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Values that are added at indices are sorted by them. Of one index for the first dimension alone.

    Reference: ``native/cuda/Indexing.cu``, ``index_put_with_sort_kernel``.
    """
    index = a["indices"][0] if len(a["indices"]) == 1 else None
    if not a["accumulate"] or index is None or index.dtype != torch.int64 or not index.numel():
        return []
    list_, bits = bytes_of(index), int(a["self"].size(0)).bit_length()
    sorting = [list_, _radix_sort(index.numel(), 8, bits, card)]
    values = a["values"]
    values = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
    copy = copied(values.expand(*index.shape, *a["self"].shape[1:]))
    # 0 comes last: what autograd adds to is zeros that this operator takes over.
    return [list_, *freed([list_]), *copy, list_, list_, *freed(sorting), -list_, -list_, -list_, *(-size for size in copy), 0]


# Scratch of cub: tiles, the items of one block, by compute capability and by bytes of a key.
_SORT_TILES = {(7, 5): {4: 11776, 8: 2816}, (8, 0): {4: 6528, 8: 3840}, (9, 0): {4: 6528, 8: 4608}}
_UNIQUE_TILES = {(7, 5): {4: 704, 8: 320}, (8, 0): {4: 2816, 8: 1344}, (8, 6): {4: 704, 8: 320}, (9, 0): {4: 7168, 8: 4928}}
_SCAN_TILES = {4: 3840, 8: 896}
"""Found by bisection in torch 2.14.1's machine code; cub has them in ``cub/device/dispatch/tuning``."""


def _radix_sort(items: int, size: int, bits: int, card: GPU) -> int:
    """Scratch for sorting pairs of two integers of this size: counts, a state for each tile, and a second place for the pairs.

    Reference: ``cub/device/dispatch/dispatch_radix_sort.cuh``, ``InvokeOnesweep``, and ``InvokeSingleTile`` for few items.
    """
    if items <= (4864 if size == 4 else 2304):
        return 1
    passes = ceil(bits / 8)
    states = ceil(items / from_table(_SORT_TILES, card.capability)[size]) * 256 * 4
    places = [items * size, items * size] if passes > 1 else []
    return sum(round_up(part, 256) for part in (passes * 256 * 8, states, *places, passes * 4)) + 255


def _scan(items: int, tile: int, more: bool) -> int:
    """Scratch of one pass over all items: 16 bytes a tile. Reference: ``cub/agent/single_pass_scan_operators.cuh``."""
    return round_up((ceil(items / tile) + 32) * 16, 256) + (256 if more else 0) + 255


HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    aten.embedding.default: lambda a, out, card: around(copied(a["indices"])),  # ``native/Embedding.cpp``
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index.Tensor: _index,
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default), _added_by_index),
}
