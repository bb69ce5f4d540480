"""What kernels take for themselves while they run: how it is written down, and what of a card it depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from vramlab.gpus import GPU

HALF = (torch.float16, torch.bfloat16)
Capability = tuple[int, int]
V = TypeVar("V")

Handler = Callable[[dict[str, Any], Any, GPU], list[int]]
"""From an operator's arguments by name, its outputs and the card: bytes as `vramlab.virtual.kernels.transients` returns them."""

THREADS_PER_SM = {(5, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (9, 0): 2048, (12, 0): 1536}
"""Resident threads of a multiprocessor by compute capability, each up to the next.
Source: CUDA C++ Programming Guide, technical specifications per compute capability."""

_SMS = 128
"""Multiprocessors of a card for which the number is not known: those of an RTX 4090."""


def from_table(table: dict[Capability, V], capability: Capability) -> V:
    """What a table says of the last capability up to this one."""
    return table[max((key for key in table if key <= capability), default=min(table))]


def sms(card: GPU) -> int:
    """Multiprocessors of a card."""
    return card.sms or _SMS


def deterministic() -> bool:
    """Whether kernels that add in any order are refused, so that others run."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def named_arguments(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in func._schema.arguments}


def bytes_of(tensor: torch.Tensor) -> int:
    """Of its elements, wherever they lie."""
    return tensor.numel() * tensor.element_size()


def copied(*tensors: torch.Tensor | None) -> list[int]:
    """``contiguous()`` copies what is not."""
    return [bytes_of(tensor) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]


def freed(sizes: Sequence[int]) -> list[int]:
    """Allocated, then freed."""
    return [*sizes, *(-size for size in sizes)]


def around(sizes: Sequence[int]) -> list[int]:
    """Allocated before the output, freed after it."""
    return [*sizes, 0, *(-size for size in sizes)]
