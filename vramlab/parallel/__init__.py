"""Several cards: ranks from a notebook cell, and the ways in which they share the work."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vramlab.parallel.data import RankWindow, ddp, unused_parameters, windows
from vramlab.parallel.launch import LaunchError, launch

if TYPE_CHECKING:
    from vramlab.parallel.pipelined import Pipeline, hybrid, pipeline, split_batch
    from vramlab.parallel.sharded import check_optimizer, clip_gradients, fsdp, gathered_gradient_bytes, shard_groups, sharded_bytes, zero1
    from vramlab.parallel.split import ColumnParallelLinear, RowParallelLinear
    from vramlab.parallel.timeline import Clock, Timeline, bubble

# What they import takes half a second.
_MODULES = {
    "pipelined": ("Pipeline", "hybrid", "pipeline", "split_batch"),
    "sharded": ("check_optimizer", "clip_gradients", "fsdp", "gathered_gradient_bytes", "shard_groups", "sharded_bytes", "zero1"),
    "split": ("ColumnParallelLinear", "RowParallelLinear"),
    "timeline": ("Clock", "Timeline", "bubble"),
}
_HOME = {name: f"vramlab.parallel.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "Clock",
    "ColumnParallelLinear",
    "LaunchError",
    "Pipeline",
    "RankWindow",
    "RowParallelLinear",
    "Timeline",
    "bubble",
    "check_optimizer",
    "clip_gradients",
    "ddp",
    "fsdp",
    "gathered_gradient_bytes",
    "hybrid",
    "launch",
    "pipeline",
    "shard_groups",
    "sharded_bytes",
    "split_batch",
    "unused_parameters",
    "windows",
    "zero1",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vramlab.parallel' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
