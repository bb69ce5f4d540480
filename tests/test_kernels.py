"""What kernels hold while they run, in which order they allocate, and what comes out otherwise than shape functions say.

The figures called seen are torch 2.14.1's own: its CUDA build's host code ran on a CUDA runtime that hands out addresses and
starts no kernel, and its caching allocator wrote down what was asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_calls import F32, Seen, asked, card, empty

from vramlab.gpus import GPU
from vramlab.virtual import kernels

aten = torch.ops.aten

SEEN: Seen = [
    (aten._softmax.default, (empty(64, 16).t(), -1, False), empty(16, 64), card(), [4096]),
    (aten._softmax_backward_data.default, (empty(64, 64), empty(64, 64), -1, F32), empty(64, 64), card(), [16384]),
    (aten._log_softmax_backward_data.default, (empty(1, 1).expand(64, 64), empty(64, 64), -1, F32), empty(64, 64), card(), [16384]),
    (aten.mm.default, (empty(1, 1).expand(64, 64), empty(64, 64)), empty(64, 64), card(), [16384]),
    (aten.mm.default, (empty(64, 128)[:, :64], empty(64, 64).t()), empty(64, 64), card(), []),
    (aten.bmm.default, (empty(8, 64, 128)[:, :, ::2], empty(1, 64, 64).expand(8, 64, 64)), empty(8, 64, 64), card(), [131072]),
]


@pytest.mark.parametrize(
    ("func", "args", "out", "gpu", "seen"), SEEN, ids=[str(i) + str(row[0]).split(".")[1] for i, row in enumerate(SEEN)]
)
def test_a_kernel_allocates_what_pytorchs_own_did(func: Any, args: tuple[Any, ...], out: Any, gpu: GPU, seen: list[int]) -> None:
    assert asked(func, args, out, gpu) == sorted(seen)


def test_layer_norm_sums_very_many_short_rows_in_blocks() -> None:
    rows, columns = 131072, 256
    args = (
        empty(rows, columns),
        empty(rows, columns),
        [columns],
        empty(rows, 1),
        empty(rows, 1),
        empty(columns),
        empty(columns),
        [True] * 3,
    )
    out = (empty(rows, columns), empty(columns), empty(columns))
    seen = [1024, 1024, 4194304, 4194304, 8388608, 8, 8388608, 8]  # on an RTX 4090
    events = kernels.transients(aten.native_layer_norm_backward.default, args, {}, out, card())
    assert sorted(size for size in events if size > 0) == sorted(seen)
    few = (empty(4096, 768), empty(768, 4096).t(), [768], empty(4096, 1), empty(4096, 1), empty(768), empty(768), [True] * 3)
    assert kernels.workspace(aten.native_layer_norm_backward.default, few, {}, (None,) * 3, card()) == 4096 * 768 * 4


def test_outputs_are_allocated_in_the_order_of_the_kernel() -> None:
    output, mask = empty(8), empty(8, dtype=torch.bool)
    assert kernels.in_order(aten.native_dropout.default, [output, mask]) == [mask, output]
    assert kernels.in_order(aten.native_layer_norm.default, [output, mask]) == [output, mask]


def test_a_convolutions_bias_is_a_sum_outside_cudnn() -> None:
    grad = empty(256, 64, 56, 56)
    args = (grad, empty(256, 3, 56, 56), empty(64, 3, 3, 3), [64], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    events = kernels.transients(aten.convolution_backward.default, (*args, [True, True, True]), {}, None, card())
    assert events == kernels.transients(aten.sum.dim_IntList, (grad, [0, 2, 3]), {}, empty(64), card())
    assert events
    assert kernels.transients(aten.convolution_backward.default, (*args, [True, True, False]), {}, None, card()) == []


def test_a_convolutions_workspace_is_a_range() -> None:
    image, weight = empty(8, 3, 32, 32), empty(16, 3, 3, 3)
    args = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert kernels.convolution_workspace_range(aten.convolution.default, args, {}, empty(8, 16, 32, 32)) == (0, 8 * 32 * 32 * 27 * 4)


def test_operators_without_scratch_have_none() -> None:
    assert kernels.transients(aten.add.Tensor, (empty(8), empty(8)), {}, empty(8), card()) == []
    assert kernels.workspace(aten.relu.default, (empty(8),), {}, empty(8), card()) == 0
    assert kernels.transients(aten.sum.default, (empty(0),), {}, empty(1), card()) == []
