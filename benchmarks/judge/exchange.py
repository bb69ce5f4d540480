"""What FSDP does with groups of parameters, for any device: gathered rows are handed out, gradients are brought together.

The copies read tables on the card, far too small to be seen in the peak of a step. So here every allocation is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from rows import GROUPS
from torch.distributed.fsdp import fully_shard  # noqa: F401, defines FSDP's operators


def run(row: dict[str, Any], device: torch.device) -> Iterator[list[int]]:
    """As in `steps.run`, a group for each step."""
    card = torch.get_device_module(device)
    types = [getattr(torch, name) for name in row["types"]]
    for shapes in GROUPS.values():
        _exchange(shapes, row["ranks"], *types, device)
        yield [card.max_memory_allocated(device), card.max_memory_reserved(device), card.memory_allocated(device)]


def _exchange(shapes: list[list[int]], ranks: int, gather: torch.dtype, reduce: torch.dtype, device: torch.device) -> None:
    """Args: in ``gather`` weights are gathered and gradients computed, in ``reduce`` gradients are sent."""
    numels = [math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes]  # of a rank's part, the last padded
    mine = [torch.empty(numel, dtype=gather, device=device) for numel in numels]
    gathered = torch.empty(ranks * sum(numels), dtype=gather, device=device)
    torch.ops.fsdp.all_gather_copy_in(mine, gathered, numels, sum(numels), 0)
    weights = [torch.empty(ranks, numel, dtype=gather, device=device) for numel in numels]
    torch.ops.fsdp.split_with_sizes_copy(gathered.view(ranks, -1), numels, dim=1, out=weights)
    gradients = [torch.empty(shape, dtype=gather, device=device) for shape in shapes]
    sent = torch.empty(ranks, sum(numels), dtype=reduce, device=device)
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=sent)
    torch._chunk_cat(gradients, 0, ranks)
    gradients[-1] = torch.empty(*shapes[-1][1:], shapes[-1][0], dtype=gather, device=device).movedim(-1, 0)  # by columns, if it has some
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=ranks, out=sent)
