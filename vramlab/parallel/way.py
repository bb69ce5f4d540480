"""How the ranks share one training step: what `train` asks of each way. The base class is one card that shares with nobody."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from vramlab.devices import is_virtual_device
from vramlab.recipe import Recipe
from vramlab.techniques.accumulation import Window
from vramlab.techniques.choose import build_optimizer, changed_model
from vramlab.techniques.precision import Precision

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, int]]


class Way:
    """One card: the whole model, all micro-batches.

    A subclass changes what is different when the work is shared; the loop in `train` stays the same.

    Args:
        recipe: how memory is saved.
        device: this rank's.
    """

    group: dist.ProcessGroup | None = None
    """Ranks that hold different parameters: the gradient's norm and its infinities are combined over them."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the making of the model: all ranks make the same one, from the random numbers of rank 0.

        Afterwards each has its own again, for dropout and data; ranks that work on the same data have those of their `leader`.
        """
        if self.recipe.ranks == 1 or is_virtual_device(self.device):
            yield
            return
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, random_state())
        set_random_state(states[0])
        yield
        if self.leader() != 0:
            set_random_state(states[self.leader()])

    def leader(self) -> int:
        """The first of the ranks that work on the same data as this one."""
        return dist.get_rank()

    def sees(self, task: Any, precision: Precision) -> None:
        """Before `place`: what is trained, for a way that must know what a micro-batch looks like."""

    def place(self, model: nn.Module) -> nn.Module:
        """Bring the model to this rank's device, in whatever form this rank holds it, and return that."""
        return model.to(self.device)

    def changed(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While training goes on: the recipe's checkpoints are in the model."""
        return changed_model(model, self.recipe)

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """The recipe's optimizer over what `place` returned.

        Raises:
            ValueError: no parameter is trained.
            ImportError: adamw-8bit without torchao.
        """
        return build_optimizer(model, self.recipe, learning_rate)

    def window(self, model: nn.Module, batches: Iterator[Any], loss: Loss, precision: Precision) -> Window[Any]:
        """Forward and backward of the window's micro-batches.

        Args:
            model: what `place` returned.
            batches: one micro-batch each time it is asked, so that none is held before its turn.
            loss: ``loss(model, batch)`` gives the summed loss and the number of items.
            precision: whose ``backward`` is used.

        Returns:
            The window, with the mean loss and the number of items of all ranks; the gradients are those of that mean.
        """
        window = self.new_window(model)
        window.open(model.parameters())
        for _ in window:
            precision.backward(window.share(*loss(model, next(batches))))
        window.close(model.parameters())
        return window

    def new_window(self, model: nn.Module) -> Window[Any]:
        """An empty window of the recipe's micro-batches."""
        return Window(self.recipe.accumulation, batches=range(self.recipe.accumulation))

    def step(self, precision: Precision, optimizer: torch.optim.Optimizer) -> bool:
        """Clip and step; whether the parameters moved."""
        return precision.step(optimizer, self.recipe.clip_norm, group=self.group)

    def clear(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """After the step: the next window begins without gradients, or with zeros where those cost nothing."""
        optimizer.zero_grad()


def random_state() -> tuple[Any, ...]:
    """Of torch's, Python's and NumPy's generators on the CPU."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
