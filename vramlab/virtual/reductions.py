"""Sums and other reductions: the buffers through which many blocks hand on partial results.

PyTorch's C++ sources are named at each rule by their path below ``aten/src/ATen``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch

from vramlab.gpus import GPU
from vramlab.virtual.scratch import HALF, THREADS_PER_SM, Handler, around, bytes_of, copied, freed, from_table, sms

aten = torch.ops.aten


@dataclass
class _Dim:
    size: int
    stride: int  # of the input, in elements
    out: int  # of the output; 0 for a dimension that is summed


def partial_sums(
    tensor: torch.Tensor, dims: Sequence[int] | range | None, card: GPU, *, element: int | None = None, vector: int | None = None
) -> list[int]:
    """Bytes of the buffers through which blocks of a reduction hand on partial results: results and counters; or none.

    They appear where few outputs are made of many inputs, as for the gradient of a bias. Between blocks every thread's
    result has a place, so that they can be much larger than the output: 32 rows and 4 columns for each.

    Args:
        tensor: what is reduced.
        dims: the dimensions that vanish; None or none for all.
        element: bytes of one partial result; without, those of the accumulation type.
        vector: how many inputs a thread reads at once.

    Reference: ``native/cuda/Reduce.cuh``, ``setReduceConfig`` and ``global_memory_size``; ``TensorIterator.cpp``,
    ``reorder_dimensions``, ``coalesce_dimensions``, ``with_32bit_indexing``.
    """
    if tensor.numel() == 0 or not tensor.dim():  # a single number has nothing to hand on
        return []
    itemsize = tensor.element_size()
    element = element or (8 if itemsize == 8 or not tensor.dtype.is_floating_point else 4)
    gone = {dim % tensor.dim() for dim in dims} if dims is not None else set()
    gone = gone or set(range(tensor.dim()))
    layout: list[_Dim] = []
    length = 1
    for dim in reversed(range(tensor.dim())):
        layout.append(_Dim(tensor.size(dim), tensor.stride(dim), 0 if dim in gone else length))
        length *= 1 if dim in gone else tensor.size(dim)
    layout = _coalesced(_sorted_dims(layout))
    vector = vector or (8 if itemsize == 2 else 4)
    sizes: list[int] = []
    for part in _indexable(layout, itemsize):
        buffers = _partial_results(part, int(tensor.storage_offset()), element, vector, card)
        sizes = max(sizes, buffers, key=sum)
    return sizes


def _sorted_dims(dims: list[_Dim]) -> list[_Dim]:
    """Summed dimensions first, then by stride: an insertion sort, because undecided pairs stay where they are."""
    dims = list(dims)
    for start in range(1, len(dims)):
        at = start
        for before in range(start - 1, -1, -1):
            order = _compare(dims[before], dims[at])
            if order > 0:
                dims[before], dims[at] = dims[at], dims[before]
                at = before
            elif order < 0:
                break
    return dims


def _compare(one: _Dim, other: _Dim) -> int:
    if (one.out == 0) != (other.out == 0):
        return 1 if other.out == 0 else -1
    for a, b in ((one.out, other.out), (one.stride, other.stride)):
        if a and b:
            if a != b:
                return -1 if a < b else 1
            if one.size > other.size:
                return 1
    return 0


def _coalesced(dims: list[_Dim]) -> list[_Dim]:
    merged = [_Dim(dim.size, dim.stride, dim.out) for dim in dims[:1]]
    for dim in dims[1:]:
        last = merged[-1]
        if last.size == 1:
            merged[-1] = _Dim(dim.size, dim.stride, dim.out)
        elif dim.size != 1 and not (last.size * last.stride == dim.stride and last.size * last.out == dim.out):
            merged.append(_Dim(dim.size, dim.stride, dim.out))
        elif dim.size != 1:
            last.size *= dim.size
    return merged


def _indexable(dims: list[_Dim], itemsize: int) -> Iterator[list[_Dim]]:
    """Halves, until 32-bit numbers count every element and every byte."""
    most = 2**31 - 1
    elements = prod(dim.size for dim in dims)
    offsets = [1 + sum((dim.size - 1) * stride * itemsize for dim, stride in pairs) for pairs in _strides(dims)]
    if elements <= most and max(offsets) <= most:
        yield dims
        return
    extents = [max((dim.size - 1) * dim.stride, (dim.size - 1) * dim.out) for dim in dims]
    split = len(dims) - 1 - max(range(len(dims)), key=lambda i: extents[len(dims) - 1 - i])
    for size in (dims[split].size // 2, dims[split].size - dims[split].size // 2):
        part = [_Dim(dim.size, dim.stride, dim.out) for dim in dims]
        part[split].size = size
        yield from _indexable(part, itemsize)


def _strides(dims: list[_Dim]) -> tuple[list[tuple[_Dim, int]], list[tuple[_Dim, int]]]:
    return [(dim, dim.stride) for dim in dims], [(dim, dim.out) for dim in dims]


def _partial_results(dims: list[_Dim], offset: int, element: int, vector: int, card: GPU) -> list[int]:
    outputs = prod(dim.size for dim in dims if dim.out)
    inputs = prod(dim.size for dim in dims) // outputs
    summed = sum(dim.out == 0 for dim in dims)
    along = summed == len(dims) or (summed > 0 and dims[0].stride < dims[summed].stride)  # summed where memory is contiguous
    width0, width1 = (inputs, outputs) if along else (outputs, inputs)
    out_vector = 1
    if (dims[0] if along else dims[summed]).stride == 1:
        if along and width0 >= 128 and summed == 1:
            width0 //= vector
        elif not along:
            out_vector = _output_vector(dims, summed, offset)
            width0 //= out_vector
    threads_limit = 512 // out_vector
    power0, power1 = min(_power(width0), threads_limit), min(_power(width1), threads_limit)
    height = min(power1, threads_limit // min(power0, 32))
    width = min(power0, threads_limit // height)
    per_row = width if along else 1
    across_warps = ceil(inputs / per_row) >= min(height * 16, 256)
    values = ceil(inputs / (per_row * (height if across_warps else 1)))
    columns = (1 if along else width) * (1 if across_warps else height)
    grid = ceil(outputs // out_vector / columns)
    target = sms(card) * (from_table(THREADS_PER_SM, card.capability) // (width * height))
    if not across_warps or values < 256 or grid > target:
        return []
    blocks = max(min(ceil(target / grid), ceil(values / 16)), ceil(values / 256))
    places = 1 if along else width * out_vector
    return [element * outputs * blocks * places, 4 * grid] if blocks > 1 else []


def _output_vector(dims: list[_Dim], summed: int, offset: int) -> int:
    size = 4
    others = [dim.stride for at, dim in enumerate(dims) if at != summed]
    for number in (offset, dims[summed].size, *others):
        while number % size:
            size //= 2
    return size


def _power(number: int) -> int:
    """The largest power of two up to a number; 1 for less."""
    return 1 << max(0, number.bit_length() - 1)


# Operators that reduce. ------------------------------------------------------------------------------------------------


def _sum(a: dict[str, Any], out: torch.Tensor, card: GPU) -> list[int]:
    """Sums, means, products and norms; the input is cast to the output's type first."""
    return _reduction()(a | {"dtype": out.dtype}, out, card)


def _reduction(element: Callable[[int], int | None] = lambda itemsize: None) -> Handler:
    """A handler for a reduction whose partial results take so many bytes for an input of so many; None for a sum's."""

    def handler(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
        tensor, dims, dtype = a["self"], a.get("dim"), a.get("dtype")
        cast: list[int] = []
        if dtype not in (None, tensor.dtype) and not (tensor.dtype in HALF and dtype == torch.float32):  # those the kernel reads itself
            tensor = torch.empty_like(tensor, dtype=dtype, device="meta")
            cast = [bytes_of(tensor)]
        sizes = partial_sums(tensor, [dims] if isinstance(dims, int) else dims, card, element=element(tensor.element_size()))
        return freed([*cast, *sizes])

    return handler


def _extreme(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """The largest or smallest of all (``native/ReduceAllOps.cpp``): of a contiguous copy."""
    tensor = torch.empty(a["self"].shape, dtype=a["self"].dtype, device="meta")
    return freed([*copied(a["self"]), *partial_sums(tensor, None, card, element=tensor.element_size())])


def _same(itemsize: int) -> int:
    return itemsize


def _with_index(itemsize: int) -> int:
    return 16  # the value and a 64-bit place


def _welford(itemsize: int) -> int:
    return 32 if itemsize == 8 else 16  # mean, squares and two counts: ``native/SharedReduceOps.h``, ``WelfordData``


def _one(itemsize: int) -> int:
    return 1


def _loss(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Losses are computed for every element, then reduced; from logits through one more tensor.

    Reference: ``native/Loss.cpp``, ``native/cuda/Loss.cu``. Weights of ``binary_cross_entropy_with_logits`` are not modelled.
    """
    each = torch.empty(torch.broadcast_shapes(a["self"].shape, a["target"].shape), dtype=out.dtype, device="meta")
    whole = [bytes_of(each)] * (2 if "pos_weight" in a else 1)
    if a["reduction"] == 0:
        return freed(whole[1:])
    if "delta" in a:  # huber_loss makes its output last
        whole.append(0)
    return [*whole, *freed(partial_sums(each, None, card))]


def _log_sum_exp(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Maxima, then exponentials of all elements (``native/ReduceOps.cpp``, ``logsumexp_out_impl``)."""
    exponentials = torch.empty_like(a["self"], device="meta")
    maxima, elements = bytes_of(out), bytes_of(exponentials)
    largest = freed(partial_sums(a["self"], a["dim"], card, element=a["self"].element_size()))
    sums = freed(partial_sums(exponentials, a["dim"], card))
    return [maxima, *largest, maxima, out.numel(), -out.numel(), -maxima, elements, *sums, -elements, -maxima]


def _norms(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """One float32 for each 65,536 elements of the longest tensor, for every tensor (``native/cuda/ForeachReduceOp.cu``)."""
    tensors = a["self"]
    chunks = max((ceil(tensor.numel() / 65536) for tensor in tensors), default=0)
    return around([len(tensors) * chunks * 4])


HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    aten.logsumexp.default: _log_sum_exp,
    aten._foreach_norm.Scalar: _norms,
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _loss),
    **dict.fromkeys((aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default), _loss),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.prod.default), _sum),
    **dict.fromkeys((aten.prod.dim_int, aten.linalg_vector_norm.default), _sum),
    **dict.fromkeys((aten.amax.default, aten.amin.default), _reduction(_same)),
    **dict.fromkeys((aten.max.default, aten.min.default), _extreme),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), _reduction(_with_index)),
    **dict.fromkeys((aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction), _reduction(_welford)),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.all.default, aten.all.dim), _reduction(_one)),
}
