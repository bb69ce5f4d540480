"""Through which buffers the blocks of a reduction hand on partial results.

The figures called seen are torch 2.14.1's own: its CUDA build's host code ran on a CUDA runtime that hands out addresses and
starts no kernel, and its caching allocator wrote down what was asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import BF16, H100, Seen, asked, card, empty

from vramlab.gpus import GPU
from vramlab.units import MiB
from vramlab.virtual import kernels

aten = torch.ops.aten

SEEN: Seen = [
    (aten.sum.dim_IntList, (empty(2048, 8000), [0]), empty(8000), card(), [102400000, 252]),
    (aten.sum.dim_IntList, (empty(2048, 2048), [0], True), empty(1, 2048), card(), [33554432, 64]),
    (aten.sum.dim_IntList, (empty(4096, 3072, dtype=BF16), [0]), empty(3072, dtype=BF16), H100, [100663296, 96]),
    (aten.sum.default, (empty(1024, 1024),), empty(1), card(), [512, 4]),
    (aten.sum.default, (empty(800, 1024, dtype=torch.bool),), empty(1, dtype=torch.int64), card(), [6553600, 800, 4]),
    (aten.sum.dim_IntList, (empty(63, 8, dtype=torch.float64), [0]), empty(8), card(), [2016]),
    (aten.mean.dim, (empty(1024, 1024), [0]), empty(1024), card(), [8388608, 32]),
    (aten.amax.default, (empty(1024, 1024, dtype=BF16),), empty(1, dtype=BF16), card(), [256, 4]),
    (aten.max.default, (empty(3, 512)[:, ::2],), empty(1), card(), [3072]),
    (aten.argmax.default, (empty(1024, 1024), 0), empty(1024), card(), [33554432, 32]),
    (aten.var.correction, (empty(1024, 1024), [0]), empty(1024), card(), [33554432, 32]),
    (aten.var.correction, (empty(512, 4096, dtype=torch.float64), None), empty(1, dtype=torch.float64), card(), [8192, 4]),
    (aten.mse_loss.default, (empty(1024, 1024), empty(1024, 1024)), empty(1), card(), [4194304, 512, 4]),
    (aten.mse_loss.default, (empty(1024, 1024), empty(1024, 1024), 0), empty(1024, 1024), card(), []),
    (aten.binary_cross_entropy_with_logits.default, (empty(1024, 1024),) * 2, empty(1), card(), [4194304, 4194304, 512, 4]),
    (aten.logsumexp.default, (empty(1024, 1024), [-1]), empty(1024), card(), [4096, 4096, 1024, 4194304]),
    (aten._foreach_norm.Scalar, ([empty(8000, 512), *[empty(512)] * 15],), None, card(), [4032]),
]


@pytest.mark.parametrize(
    ("func", "args", "out", "gpu", "seen"), SEEN, ids=[str(i) + str(row[0]).split(".")[1] for i, row in enumerate(SEEN)]
)
def test_a_kernel_allocates_what_pytorchs_own_did(func: Any, args: tuple[Any, ...], out: Any, gpu: GPU, seen: list[int]) -> None:
    assert asked(func, args, out, gpu) == sorted(seen)


def test_sums_too_large_for_32_bit_are_split() -> None:
    rows = 2**20
    whole = kernels.transients(aten.sum.dim_IntList, (empty(rows, 4096), [0]), {}, empty(4096), card())
    part = kernels.transients(aten.sum.dim_IntList, (empty(rows // 8, 4096), [0]), {}, empty(4096), card())
    assert max(whole) == max(part) > MiB


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.data())
def test_the_sum_of_everything_does_not_depend_on_the_order_of_dimensions(shape: list[int], data: st.DataObject) -> None:
    tensor = empty(*[size * 16 for size in shape])
    order = data.draw(st.permutations(range(len(shape))))
    usual = kernels.transients(aten.sum.default, (tensor,), {}, empty(1), card())
    assert kernels.transients(aten.sum.default, (tensor.permute(order),), {}, empty(1), card()) == usual
    assert bool(usual) == (tensor.numel() > 255 * 512)  # one block of 512 threads takes up to 255 values each


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.data())
def test_a_sum_frees_what_it_allocates(shape: list[int], data: st.DataObject) -> None:
    tensor, dims = empty(*[size * 8 for size in shape]), data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    events = kernels.transients(aten.sum.dim_IntList, (tensor, sorted(dims)), {}, empty(1), card())
    assert sum(events) == 0
    assert len(events) in (0, 4)
