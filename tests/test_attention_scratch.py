"""What attention's kernels allocate and free again while they run.

The figures called seen are torch 2.14.1's own: its CUDA build's host code ran on a CUDA runtime that hands out addresses and
starts no kernel, and its caching allocator wrote down what was asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_calls import BF16, F32, H100, T4, Seen, asked, card, empty

from vramlab.gpus import GPU
from vramlab.virtual import kernels

aten = torch.ops.aten


def flash(batch: int, heads: int, queries: int, head: int, key_heads: int | None = None, contiguous: bool = False) -> tuple[Any, ...]:
    def make(heads: int) -> torch.Tensor:
        tensor = empty(batch, queries, heads, head, dtype=torch.bfloat16).transpose(1, 2)
        return tensor.contiguous() if contiguous else tensor

    query, key = make(heads), make(key_heads or heads)
    number = empty(1, dtype=torch.int64)
    sums = empty(batch, heads, queries)
    return query, query, key, key, query, sums, None, None, queries, queries, 0.0, False, number, number


def efficient(
    batch: int, heads: int, time: int, head: int, dtype: torch.dtype, key_heads: int | None = None, dropout: float = 0.0
) -> tuple[Any, ...]:
    query, key = (empty(batch, time, n, head, dtype=dtype).transpose(1, 2) for n in (heads, key_heads or heads))
    number = empty(1, dtype=torch.int64)
    return query, query, key, key, None, query, empty(batch, heads, time), number, number, dropout, [True, True, True, False]


FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default

SEEN: Seen = [
    (FLASH, flash(2, 8, 1000, 64, contiguous=True), None, H100, [2048000, 2048000, 65536, 4194304]),
    (FLASH, flash(4, 8, 512, 64), None, card(), [65536, 4194304]),
    (FLASH, flash(4, 8, 512, 64, key_heads=2), None, card(), [65536, 4194304, 2097152, 2097152]),
    (EFFICIENT, efficient(2, 4, 512, 64, F32), None, H100, [1048576, 16384, 16384, 1049600]),
    (EFFICIENT, efficient(2, 4, 500, 128, F32), None, H100, [2048000, 16000, 16000, 2098176]),
    (EFFICIENT, efficient(2, 4, 500, 128, F32), None, card(), [2048000, 16000, 16000, 2099200]),
    (EFFICIENT, efficient(2, 4, 512, 96, BF16), None, H100, [16384, 2097664]),
    (EFFICIENT, efficient(2, 4, 512, 96, BF16), None, card(), [16384, 2098176]),
    (EFFICIENT, efficient(2, 4, 512, 128, BF16), None, H100, [16384, 2097664]),
    (EFFICIENT, efficient(2, 4, 512, 128, BF16), None, card(), [16384, 6293504]),
    (EFFICIENT, efficient(2, 4, 512, 192, BF16), None, H100, [16384, 11535872]),
    (EFFICIENT, efficient(2, 4, 500, 256, BF16), None, card(), [16000, 12584960]),
    (EFFICIENT, efficient(1, 12, 512, 72, torch.float16), None, T4, [24576, 3147264]),
    (EFFICIENT, efficient(2, 4, 512, 64, BF16, key_heads=2), None, card(), [524288, 524288, 16384, 1049600]),
    (EFFICIENT, efficient(2, 4, 512, 64, BF16, dropout=0.1), None, card(), [16384, 1049600]),
    (aten._safe_softmax.default, (empty(8, 4, 32, 32), -1), empty(8, 4, 32, 32), card(), [32768, 1024, 4]),
]


@pytest.mark.parametrize(
    ("func", "args", "out", "gpu", "seen"), SEEN, ids=[str(i) + str(row[0]).split(".")[1] for i, row in enumerate(SEEN)]
)
def test_a_kernel_allocates_what_pytorchs_own_did(func: Any, args: tuple[Any, ...], out: Any, gpu: GPU, seen: list[int]) -> None:
    assert asked(func, args, out, gpu) == sorted(seen)


def test_the_peak_counts_what_is_held_at_one_time() -> None:
    assert kernels.workspace(EFFICIENT, efficient(2, 4, 512, 64, F32), {}, None, H100) == 1048576 + 2 * 16384
    assert kernels.workspace(EFFICIENT, efficient(2, 4, 512, 192, BF16), {}, None, H100) == 16384 + 11535872


def test_few_queries_split_the_keys() -> None:
    query, key = empty(1, 1, 64, 64, dtype=BF16), empty(1, 1, 8192, 64, dtype=BF16)
    events = kernels.transients(aten._scaled_dot_product_flash_attention.default, (query, key, key), {}, None, card())
    sums, outputs = events
    assert outputs == 64 * sums
    assert sums % (64 * 4) == 0
    many = empty(8, 32, 64, 64, dtype=BF16)
    assert kernels.transients(aten._scaled_dot_product_flash_attention.default, (many, many, many), {}, None, card()) == []
    assert kernels.transients(aten._scaled_dot_product_flash_attention.default, (query, key, key, 0.1), {}, None, card()) == [16]


def test_deterministic_kernels_need_more_or_less() -> None:
    usual = kernels.workspace(FLASH, flash(1, 2, 512, 64), {}, None, card())
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.workspace(FLASH, flash(1, 2, 512, 64), {}, None, card()) == 512 * 2 * 4 + 64 * (512 * 2 * 64 * 4)
        few = kernels.workspace(EFFICIENT, efficient(2, 4, 512, 192, BF16), {}, None, H100)
    finally:
        torch.use_deterministic_algorithms(False)
    assert usual == 512 * 2 * 4 + 512 * 2 * 64 * 4
    assert few < kernels.workspace(EFFICIENT, efficient(2, 4, 512, 192, BF16), {}, None, H100)


def test_seeds_of_attention_with_dropout_are_on_the_cpu() -> None:
    func = aten._scaled_dot_product_efficient_attention.default
    query = empty(1, 1, 8, 8)
    out = (query, query, empty(1), empty(1))
    assert kernels.kernel_outputs(func, (query, query, query, None, True), {}, out) is out
    corrected = kernels.kernel_outputs(func, (query, query, query, None, True, 0.1), {}, out)
    assert [tensor.device.type for tensor in corrected] == ["meta", "meta", "cpu", "cpu"]
