"""Activation checkpointing: keep the inputs of a model's blocks, compute the rest a second time in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: nn.Module, every: int = 1, *, blocks: type[nn.Module] | None = None) -> CheckpointHandle:
    """Checkpoint every k-th repeated block of a model: same outputs and gradients, fewer bytes, one more forward.

    Dropout draws the same masks in the second pass, and BatchNorm's running statistics are updated once.

    Args:
        model: changed in place; ``handle.remove()`` changes it back.
        every: checkpoint the 1st, (1 + every)-th, (1 + 2 every)-th... block.
        blocks: the class of the blocks. None: that of the longest list of equal modules in the model.

    Returns:
        A handle with ``remove()`` and the names of the ``blocks`` that are checkpointed.

    Raises:
        ValueError: ``every`` below 1, or no such block in the model.

    Reference: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; ``torch/utils/checkpoint.py``.
    """
    if every < 1:
        raise ValueError(f"every is a whole number of at least 1, got {every}.")
    found = find_blocks(model, blocks)
    return CheckpointHandle(dict(list(found.items())[::every]))


def find_blocks(model: nn.Module, kind: type[nn.Module] | None = None) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, in order.

    Args:
        model: any module.
        kind: their class. None: the class in the longest ``ModuleList`` or ``Sequential`` that holds one class alone
            (a ResNet's stages all hold that class, so all of them count).

    Raises:
        ValueError: none found.
    """
    if kind is None:
        lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        uniform = [m for m in lists if len(m) > 1 and len({type(block) for block in m}) == 1]
        if not uniform:
            raise ValueError(
                f"Checkpointing needs repeated blocks: {type(model).__name__} has no ModuleList or Sequential of one class. "
                "Name their class: checkpoint_blocks(model, blocks=MyBlock)."
            )
        kind = type(max(uniform, key=len)[0])
    found = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no block of class {kind.__name__}; name the class of one of its modules.")
    return found


class CheckpointHandle:
    """Blocks whose forward is checkpointed until `remove` is called."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        self.blocks = list(blocks)
        self._modules = list(blocks.values())
        self._own = [vars(block).get("forward") for block in self._modules]
        for block in self._modules:
            block.forward = _checkpointed(block, block.forward)

    def remove(self) -> None:
        """Give the blocks their own forward back."""
        for block, own in zip(self._modules, self._own, strict=True):
            if own is None:
                vars(block).pop("forward", None)
            else:
                block.forward = own
        self._modules, self._own = [], []


def _checkpointed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _frozen_statistics(block)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """While a block is computed again, its BatchNorms normalise as before but do not count the batch twice."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0  # running = 1 * running + 0 * batch
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count
