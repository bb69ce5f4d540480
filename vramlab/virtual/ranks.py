"""Virtual ranks: this process takes the part of one rank of several, in a group in which nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch.distributed as dist

from vramlab.gpus import GPU
from vramlab.recipe import Recipe
from vramlab.virtual import backend
from vramlab.virtual.traffic import Call, Communication

if TYPE_CHECKING:
    from vramlab.virtual.device import VirtualGPU

Parameters = Sequence[tuple[tuple[int, ...], bool]]
"""Shape of each of a model's parameters, and whether it is trained."""
ALIKE = 0.995
"""A rank that keeps at least this share of the optimizer state that another keeps is planned as that one."""


@contextmanager
def virtual_rank(rank: int, ranks: int) -> Iterator[None]:
    """Within, the default process group has ``ranks`` members of which this process is number ``rank``; collectives do nothing.

        with virtual_rank(0, ranks=4), virtual_gpu("RTX 4090") as gpu:
            model = vl.parallel.fsdp(model)

    What is received has the right shape and no meaning, so use it on virtual cards alone.

    Raises:
        ValueError: a number that no rank has.
        RuntimeError: the process is in a group already, or torch has no distributed package.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"Ranks are numbered from 0 and there is at least one, got rank={rank} of ranks={ranks}.")
    if not dist.is_available():
        raise RuntimeError("Virtual ranks need torch.distributed, and this torch was built without it; install one from pytorch.org.")
    if dist.is_initialized():
        raise RuntimeError(
            f"A virtual rank needs the place of the default process group, and this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()} in one; use vramlab.plan(), which works in a process of its own."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    backend.register()  # else the name of the device is not known
    dist.init_process_group(f"cpu:fake,{backend.NAME}:fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def stand_ins(recipe: Recipe, parameters: Callable[[], Parameters]) -> list[int]:
    """For each rank the one that is run in its place: itself, one that holds the same, or one that holds a little more.

    Ranks hold the same in DDP, and in copies of a pipeline's stage. FSDP divides rows: where they do not divide evenly the last
    rank has the fewest, and all between are planned as the first. ZeRO-1 deals out whole parameters, see `ALIKE`.

    Args:
        parameters: gives the model's, asked only where the answer depends on them.
    """
    ranks = recipe.ranks
    if recipe.parallel in ("pipeline", "hybrid"):
        return [rank % recipe.stages for rank in range(ranks)]
    if recipe.parallel in ("zero2", "fsdp"):
        uneven = any(shape[0] % ranks for shape, _ in parameters() if shape)
        return [0] * (ranks - 1) + [ranks - 1 if uneven else 0]
    if recipe.parallel == "zero1":
        return _by_load(dealt_out([shape for shape, trained in parameters() if trained], ranks))
    return [0] * ranks


def dealt_out(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[int]:
    """How many numbers of the trained parameters each rank of ZeRO-1 steps: the largest first, each to the rank that has least.

    Reference: ``ZeroRedundancyOptimizer._partition_parameters``.
    """
    loads = [0] * ranks
    for numel in sorted(map(prod, shapes), reverse=True):
        loads[loads.index(min(loads))] += numel
    return loads


def _by_load(loads: Sequence[int]) -> list[int]:
    instead = list(range(len(loads)))
    leader = 0
    for place, rank in enumerate(sorted(instead, key=lambda r: -loads[r])):
        if place == 0 or loads[rank] < ALIKE * loads[leader]:
            leader = rank
        instead[rank] = leader
    return instead


def enough_micro_batches(recipe: Recipe, usual: int) -> int:
    """How many micro-batches of a window show all that happens: from some on they repeat what those before did.

    A pipeline under 1F1B has as many in flight as there are stages, one under GPipe all of them.
    """
    if recipe.parallel not in ("pipeline", "hybrid"):
        return usual
    return recipe.stages + 2 if recipe.schedule == "1f1b" else recipe.accumulation


def in_window(gpu: VirtualGPU, step: int, recipe: Recipe, micro_batches: int) -> Communication:
    """What the rank sent in an optimizer step of which only ``micro_batches`` were run, as if all had been."""
    calls = gpu.communication(step).calls
    missing = recipe.accumulation - micro_batches
    if not missing:
        return Communication(calls)
    if recipe.parallel in ("pipeline", "hybrid"):
        passed = [[call for call in calls if call.kind == kind] for kind in ("send", "receive")]
        one: list[Call] = [call for same in passed for call in same[: len(same) // micro_batches]]
        return Communication(calls + tuple(one) * missing)
    before = len(gpu.communication().calls) - len(calls)  # the step is the last
    begins = [begin - before for begin in gpu.begins[-micro_batches:]]
    middle = calls[begins[1] : begins[2]]
    return Communication(calls[: begins[2]] + middle * missing + calls[begins[2] :])


def notes(recipe: Recipe, card: GPU) -> list[str]:
    """What several ranks need that no published figure tells."""
    if recipe.ranks == 1:
        return []
    if card.p2p is False and not card.nvlink:
        return [
            "NCCL's buffers are not counted: without P2P they lie in host memory (NCCL's transport/shm.cc), and what is left on the card "
            "is not published"
        ]
    return [
        "NCCL's buffers on the card are not counted: 544 MB with two and 688 MB with more ranks were seen for one group of A100s "
        "(NVIDIA/nccl issue 964); give your own as in_use"
    ]
