"""Cards and tensors without memory, for tests of what kernels allocate, and what is asked of every such list of bytes."""

from __future__ import annotations

from typing import Any

import torch

from vramlab.gpus import GPU
from vramlab.units import GiB
from vramlab.virtual import kernels

BF16, F32 = torch.bfloat16, torch.float32
Seen = list[tuple[Any, tuple[Any, ...], Any, GPU, list[int]]]
"""An operator, its arguments, its outputs, a card, and what PyTorch's own host code asked for beside the outputs."""


def card(capability: tuple[int, int] = (8, 9), sms: int | None = 128) -> GPU:
    return GPU(name="card", memory=24 * GiB, capability=capability, sms=sms)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


H100, T4 = card((9, 0), 132), card((7, 5), 40)


def asked(func: Any, args: tuple[Any, ...], out: Any, gpu: GPU) -> list[int]:
    """The bytes that an operator's kernel allocates beside its outputs, sorted; it frees nothing that it has not."""
    live: list[int] = []
    found: list[int] = []
    for size in filter(None, kernels.transients(func, args, {}, out, gpu)):
        if size > 0:
            live.append(size)
            found.append(size)
        else:
            live.remove(-size)
    return sorted(found)
