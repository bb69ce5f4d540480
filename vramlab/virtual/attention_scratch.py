"""What the fused attention kernels, and the softmax of attention that is written out, allocate and free again while they run.

PyTorch's C++ sources are named at each rule by their path below ``aten/src/ATen``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from vramlab.gpus import GPU
from vramlab.units import round_up
from vramlab.virtual.scratch import HALF, Capability, Handler, bytes_of, copied, deterministic, freed, from_table, sms

aten = torch.ops.aten

_OPTIN_SHARED_MEMORY = {(5, 0): 48, (7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (12, 0): 99}
"""KiB of shared memory that one block may ask for, by compute capability, each up to the next.
Source: CUDA C++ Programming Guide, technical specifications per compute capability."""


def _flash_forward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Keys in splits, when there are too few queries for the card: each split's sums and outputs, in float32.

    Reference: ``native/transformers/cuda/flash_attn/flash_api.cpp``, ``set_params_splitkv``, ``num_splits_heuristic``.
    """
    batch, heads, queries, head = a["query"].shape
    key_heads, keys = a["key"].size(1), a["key"].size(2)
    if a["dropout_p"] > 0:  # the state of the random numbers is allocated twice, keys are not split
        return [16] if batch else []
    if batch == 0:
        return []
    if queries == 1 and heads > key_heads:  # one query: its heads that share a key stand in for queries
        heads, queries = key_heads, heads // key_heads
    splits = _flash_splits(
        batch * heads * ceil(queries / 64), 2 * sms(card), ceil(keys / (256 if head <= 64 else 128 if head <= 128 else 64))
    )
    rows = splits * batch * heads * queries * 4
    return [rows, rows * round_up(head, 32 if head <= 128 else 64)] if splits > 1 else []


def _flash_splits(blocks: int, processors: int, key_blocks: int) -> int:
    if blocks >= 0.8 * processors:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, processors, key_blocks) + 1):
        if splits == 1 or ceil(key_blocks / splits) != ceil(key_blocks / (splits - 1)):
            waves = blocks * splits / processors
            efficiency[splits] = waves / ceil(waves)
    best = max(efficiency.values(), default=0.0)
    return next((splits for splits, value in efficiency.items() if value >= 0.85 * best), 1)


def _flash_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """The query's gradient in float32 with rows and heads rounded up; the keys' for every query head, when heads are shared.

    Reference: ``flash_api.cpp``, ``mha_bwd``; ``native/transformers/cuda/attention_backward.cu``.
    """
    batch, heads, queries, head = a["query"].shape
    key_heads, keys = a["key"].size(1), a["key"].size(2)
    copies = copied(a["grad_out"].transpose(1, 2), a["out"].transpose(1, 2))
    if batch == 0:
        return freed(copies)
    rows = batch * heads * round_up(queries, 128) * 4
    splits = ceil(sms(card) / (batch * heads)) if deterministic() else 1
    shared = [batch * keys * heads * head * a["key"].element_size()] * 2 if heads != key_heads else []
    return freed([*copies, rows, splits * rows * round_up(head, 32 if head <= 128 else 64), *shared])


def _efficient_forward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Outputs in float32, where a half precision head is too long for registers (``mem_eff_attention/kernel_forward.h``)."""
    long_head = max(a["key"].size(3), a["value"].size(3)) > 128
    return freed([2 * bytes_of(out[0])]) if long_head and a["query"].dtype in HALF else []


@dataclass(frozen=True)
class _EfficientBackward:
    """One of the compiled kernels of ``mem_eff_attention/kernels/cutlassB.h``."""

    rows: int  # kBlockSizeI
    columns: int  # kBlockSizeJ
    longest_head: int  # kMaxK

    @property
    def in_registers(self) -> bool:
        """Whether half precision keeps the gradients of key and value in registers (``kOutputInRF``)."""
        return self.longest_head <= self.rows


def _efficient_kernel(capability: Capability, dtype: torch.dtype, head: int, dropout: bool) -> _EfficientBackward:
    """The first kernel in the list that takes this head and fits into shared memory; what fits was seen in machine code."""
    shared, half = from_table(_OPTIN_SHARED_MEMORY, capability), dtype in HALF
    if head <= 64:
        return _EfficientBackward(64, 64, 32 if head <= 32 else 64)
    if not half:
        wide = capability >= (8, 0) and shared > 99
        return _EfficientBackward(128 if wide else 64, 64, 128 if head <= 128 else 1 << 16)
    if capability in ((8, 6), (8, 9)) and head <= 96 and not dropout:
        return _EfficientBackward(128, 64, 96)
    if head <= 128:
        if capability >= (8, 0):
            return _EfficientBackward(128, 128, 128) if shared > 99 else _EfficientBackward(64, 64, 128)
        return _EfficientBackward(128 if capability >= (7, 0) else 64, 64, 128)
    return _EfficientBackward(128 if capability >= (7, 0) else 64, 64, 1 << 16)


def _efficient_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Sums over key blocks, in float32, and the products of outputs and their gradients.

    Reference: ``attention_backward.cu``, ``_efficient_attention_backward``; ``mem_eff_attention/kernel_backward.h``,
    ``workspace_size``.
    """
    batch, heads, queries, head = a["query"].shape
    keys, value_head, half = a["key"].size(2), a["value"].size(3), a["query"].dtype in HALF
    capability = card.capability
    kernel = _efficient_kernel(capability, a["query"].dtype, max(head, value_head), a["dropout_p"] > 0)
    shared = []
    if a["key"].size(1) != heads:
        shared = [batch * keys * heads * size * a["key"].element_size() for size in (head, value_head)]
    before = [*shared, *copied(a["grad_out_"].transpose(1, 2))]
    row_sums = batch * heads * queries * 4
    in_kernel = half and (kernel.in_registers or not (7, 0) <= capability < (7, 5))
    product = [] if in_kernel else _delta_in_operators(a, batch * heads * queries * value_head * 4)
    sums = _efficient_sums(kernel, half, batch, heads, queries, keys, head, value_head, capability)
    return [*before, *(product or [row_sums]), sums, -row_sums, -sums, *(-size for size in before)]


def _delta_in_operators(a: dict[str, Any], products: int) -> list[int]:
    """``(grad_out.float() * out.float()).sum(-1).transpose(-2, -1).contiguous()``; ends with what stays."""
    batch, heads, queries, _ = a["query"].shape
    rows = batch * heads * queries * 4
    casts = [products, products] if a["query"].dtype in HALF else []
    again = [rows] if heads > 1 and queries > 1 else []  # transposing a dimension of one leaves it contiguous
    return [*casts, products, *(-size for size in casts), rows, *again, -products, *(-size for size in again)]


def _efficient_sums(
    kernel: _EfficientBackward,
    half: bool,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head: int,
    value_head: int,
    capability: Capability,
) -> int:
    splits = ceil(keys / kernel.columns)
    spilled = half and not kernel.in_registers
    if batch * heads >= 256 and keys <= 2 * kernel.columns:
        splits = 1
    if spilled:
        splits = min(splits, 200 // max(1, batch * heads))
    if capability < (7, 0) or splits < 1 or deterministic():
        splits = 1
    floats = 0
    if spilled:
        floats += splits * kernel.columns * (round_up(head, kernel.rows) + round_up(value_head, kernel.rows))
    if half or capability >= (7, 0):
        tile = 4 + kernel.rows * kernel.columns  # a lock, a counter and two fillers before it
        floats += ceil(queries / kernel.rows) * ceil(head / kernel.columns) * tile
    return batch * heads * round_up(floats, 4) * 4


def _safe_softmax(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Which elements are minus infinity, and which rows are nothing else, as booleans (``attention.cpp``, ``_safe_softmax``)."""
    elements, rows = out.numel(), out.numel() // max(1, out.size(a["dim"]))
    return freed([elements, rows, out.element_size()])


HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._safe_softmax.default: _safe_softmax,
}
