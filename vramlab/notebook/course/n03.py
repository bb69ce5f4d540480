"""Exercises of notebook 03: gradient accumulation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vramlab import tasks
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe


def _at_once(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss.item()


def _padded_batch() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256))
    targets = torch.randint(256, (2048,))
    targets[: 1024 + 64] = -100  # whole pieces, and half of one
    return model, torch.randn(2048, 32), targets


EXERCISES = (
    Write(
        "03.1",
        "By what to multiply the mean losses of micro-batches, so that their sum is the mean over all items.",
        minutes=5,
        plain=lambda counts: [count / sum(counts) for count in counts],
        cases=lambda: [([4, 4, 4, 4],), ([16, 8, 4, 4],), ([7],), ([0, 3, 1],)],
        hints=(
            "What must be true of the weights' sum, and of the weights of two equal micro-batches?",
            "A mean times its count is a sum.",
            "count / sum(counts) for each count.",
        ),
    ),
    Write(
        "03.2",
        "The gradient of the mean loss over all targets that are not -100, at a peak of at most 2 MiB above what was there.",
        minutes=15,
        plain=_at_once,
        cases=lambda: [_padded_batch()],
        target="2 MiB",
        hints=(
            "Pieces hold unequal numbers of targets, some none: what does each piece's summed loss have to be divided by?",
            "total = F.cross_entropy(model(x), y, reduction='sum'), then backward on total / items, within the loop.",
            "Add total.item() / items to the loss: a tensor would keep the piece's graph alive.",
        ),
    ),
    FindRecipe(
        "03.3",
        "GPT-2 with 32 sequences a step on a card of 12 GiB, by micro-batch and accumulation alone.",
        minutes=5,
        task=lambda: tasks.gpt("gpt2"),
        plain=Recipe(precision="amp-bf16", micro_batch=32),
        keep=("precision", "optimizer", "optimizer_impl", "checkpointing", "offload", "loss_chunks", "attention"),
        gpu="RTX 3060",
        hints=(
            "What does vl.plan(...).max_micro_batch say for this card?",
            "micro_batch * accumulation stays 32: 16 x 2, 8 x 4, 4 x 8, ...",
            "The largest micro-batch that fits has the fewest pieces: 8 x 4.",
        ),
    ),
)
