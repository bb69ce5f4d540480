"""Kernels that copy many tensors at once, as FSDP does: the tables of addresses and sizes that they read.

PyTorch's C++ sources are named at each rule by their path below ``aten/src/ATen``.
"""

from __future__ import annotations

import math
from math import ceil, prod
from typing import Any

import torch

from vramlab.gpus import GPU
from vramlab.units import round_up
from vramlab.virtual.scratch import THREADS_PER_SM, Handler, around, bytes_of, freed, from_table, sms

aten = torch.ops.aten

_TABLE_THREADS = 128
_TILE = 16 * _TABLE_THREADS
"""``native/cuda/TensorShape.cu``: threads of a block, and bytes that they copy at once."""


def _split_copy(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """``split_with_sizes_copy(out=)``, with which FSDP hands out what it has gathered: a table of addresses and sizes.

    Of 64-bit numbers: for each part where it comes from, where it goes and the bytes of a row; for each block of the kernel its
    part; and how many blocks come before each part. Blocks take several tiles where there are more than the card has room for.

    Reference: ``native/cuda/TensorShape.cu``, ``split_with_sizes_copy_out_cuda_contiguous_no_cast``; otherwise each part is copied.
    """
    source, sizes, dim, parts = a.values()
    if not source.numel() or not all(_dense(tensor) and tensor.dtype == source.dtype for tensor in (source, *parts)):
        return []
    dim %= source.dim()
    rows = prod(source.shape[:dim])
    row_bytes = [size * source.stride(dim) * source.element_size() for size in sizes]
    most = 2 * (sms(card) * from_table(THREADS_PER_SM, card.capability) // _TABLE_THREADS)
    rounds = ceil(sum(ceil(nbytes / _TILE) for nbytes in row_bytes) * rows / most)
    tiles = ceil(rounds / min(ceil(math.sqrt(rounds)), rows))
    blocks = sum(ceil(nbytes / (_TILE * tiles)) for nbytes in row_bytes)
    return freed([8 * (3 * len(sizes) + blocks + len(sizes) + 1)])


def _chunk_cat(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """``_chunk_cat``, with which FSDP brings gradients together: a table as for ``split_with_sizes_copy``.

    Of each tensor six numbers, two of them sums that begin with 0; and for each block of one chunk its tensor.

    Reference: ``native/cuda/TensorShape.cu``, ``get_chunk_cat_metadata``, ``_chunk_cat_out_cuda``; ``native/TensorShape.cpp``,
    ``_pad_chunk``, where tensors that are not contiguous, or are cast otherwise than bfloat16 to float32, are padded one by one.
    """
    tensors, chunks, target = a["tensors"], a["num_chunks"], a.get("out")
    dim, given = a["dim"] % tensors[0].dim(), tensors[0].dtype
    made = given if target is None else target.dtype
    dense = all(tensor.is_contiguous() for tensor in tensors) and (target is None or _dense(target))
    if not dense or (given, made) not in ((given, given), (torch.bfloat16, torch.float32)):
        return around([nbytes for tensor in tensors for nbytes in _chunked(tensor, dim, chunks)])
    lengths = [ceil(tensor.size(dim) / chunks) * prod(tensor.shape[dim + 1 :]) * made.itemsize for tensor in tensors]
    return freed([8 * (6 * len(tensors) + 2 + sum(ceil(length / _TILE) for length in lengths))])


def _chunked(tensor: torch.Tensor, dim: int, chunks: int) -> list[int]:
    padded = list(tensor.shape)
    padded[dim] = round_up(padded[dim], chunks)
    if padded != list(tensor.shape):
        return [prod(padded) * tensor.element_size()]
    try:
        torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(*padded[:dim], chunks, -1)
    except RuntimeError:  # reshape() copies it
        return [bytes_of(tensor)]
    return []


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie without gaps, in whatever order. Reference: ``c10/core/TensorImpl.h``."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    aten.split_with_sizes_copy.out: _split_copy,
    **dict.fromkeys((aten._chunk_cat.default, aten._chunk_cat.out), _chunk_cat),
}

FSDP_HANDLERS: dict[str, Handler] = {"fsdp::split_with_sizes_copy": _split_copy, "fsdp::chunk_cat": _chunk_cat}
"""By name: FSDP's own operators, each of which calls one of torch's, exist once torch's FSDP is imported."""
