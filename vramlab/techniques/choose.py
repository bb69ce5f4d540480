"""From a Recipe's words to the techniques themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramlab.recipe import Recipe
from vramlab.techniques.adafactor import Adafactor
from vramlab.techniques.checkpointing import checkpoint_blocks
from vramlab.techniques.in_backward import step_in_backward
from vramlab.techniques.low_bit import adamw_8bit
from vramlab.techniques.offload import OffloadedOptimizer, offload_activations


def build_optimizer(model: nn.Module, recipe: Recipe, learning_rate: float) -> torch.optim.Optimizer:
    """The recipe's optimizer over all parameters that are trained.

    Raises:
        ValueError: the model has none.
        ImportError: adamw-8bit without torchao.
    """
    parameters, make = parameters_of(model), optimizer_of(recipe, learning_rate)
    return step_in_backward(model, make) if recipe.optimizer_in_backward else make(parameters)


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Those that are trained.

    Raises:
        ValueError: the model has none.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"Training needs parameters with requires_grad, and {type(model).__name__} has none.")
    return parameters


def optimizer_of(recipe: Recipe, learning_rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    """A function that makes the recipe's optimizer of the parameters or groups it is given."""

    def plain(params: Any) -> torch.optim.Optimizer:
        foreach, fused = recipe.optimizer_impl == "foreach", recipe.optimizer_impl == "fused"
        if recipe.optimizer == "adafactor":
            return Adafactor(params, foreach=foreach)
        if recipe.optimizer == "adamw-8bit":
            return adamw_8bit(params, lr=learning_rate)
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[recipe.optimizer]
        return kind(params, lr=learning_rate, foreach=foreach, fused=fused)

    def placed(params: Any) -> torch.optim.Optimizer:
        return OffloadedOptimizer(params, plain) if recipe.offload == "optimizer" else plain(params)

    return placed


def changed_model(model: nn.Module, recipe: Recipe) -> AbstractContextManager[Any]:
    """While training goes on: the recipe's checkpoints are in the model."""
    policies = {"blocks": "all", "selective": "selective"}
    if recipe.checkpointing == "none":
        return nullcontext()
    return checkpoint_blocks(model, recipe.checkpoint_every, policies[recipe.checkpointing])


def around_window(recipe: Recipe) -> AbstractContextManager[Any]:
    """Around one optimizer step: which attention kernels may run, in forward and where it is computed again."""
    return sdpa_kernel(SDPBackend.MATH) if recipe.attention == "math" else nullcontext()


def around_forward(model: nn.Module, recipe: Recipe) -> AbstractContextManager[Any]:
    """Around forward and loss: where autograd keeps what it saves."""
    return offload_activations(model) if recipe.offload == "activations" else nullcontext()
