"""From a Recipe's words to the way in which ranks share the work."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vramlab.parallel.data import DataParallel
from vramlab.parallel.way import Way
from vramlab.recipe import Recipe


def choose_way(recipe: Recipe, device: torch.device) -> Way:
    """The way that ``recipe.parallel`` names, in a rank of a process group of ``recipe.ranks``.

    Raises:
        RuntimeError: no process group, or one of another size.
    """
    if recipe.parallel == "none":
        return Way(recipe, device)
    if not dist.is_initialized():
        raise RuntimeError(
            f"parallel={recipe.parallel!r} trains in {recipe.ranks} processes, and this one has no process group. "
            "vl.run(task, recipe) starts them; call train() in a function that vl.parallel.launch(function, ranks=...) runs."
        )
    if dist.get_world_size() != recipe.ranks:
        raise RuntimeError(
            f"The recipe shares the work between ranks={recipe.ranks}, and the process group has {dist.get_world_size()}. "
            f"Launch as many, or set ranks={dist.get_world_size()}."
        )
    return _ways()[recipe.parallel](recipe, device)


def _ways() -> dict[str, type[Way]]:
    from vramlab.parallel.pipelined import Pipelined
    from vramlab.parallel.sharded import Sharded, ZeroOne  # half a second that others need not wait

    return {"ddp": DataParallel, "zero1": ZeroOne, "zero2": Sharded, "fsdp": Sharded, "pipeline": Pipelined, "hybrid": Pipelined}
