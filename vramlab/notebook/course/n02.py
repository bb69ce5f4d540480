"""Exercises of notebook 02: what mixed precision saves and adds."""

from __future__ import annotations

import torch
from torch import nn

from vramlab import tasks
from vramlab.notebook.exercises import FindRecipe, Number, Write
from vramlab.planning import plan
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.tasks.models import Block

_SINGLE = 16  # bytes: single numbers around the loss and of attention's random state


def _copies() -> int:
    traced = plan(tasks.gpt("gpt2"), Recipe(precision="amp-bf16", micro_batch=1), "RTX 4090").trace
    return traced.last_step().breakdown("end of forward").weight_copies


def _block_bytes(precision: str, h: int, a: int, blocks: int, tokens: int) -> int:
    task = Task(
        model=lambda: nn.Sequential(*(Block(h, a, causal=True) for _ in range(blocks))),
        batch=lambda size, device: torch.zeros(size, tokens, h, device=device, requires_grad=True),
        loss=lambda model, x: (model(x).sum(), x.shape[1]),
    )
    recipe = Recipe(precision="amp-bf16" if precision == "amp-bf16" else "fp32", micro_batch=1)
    held = plan(task, recipe, "RTX 4090").trace.last_step().holders(10_000, at="end of forward")
    counted = held["category"].isin(["activations", "weight copies", "inputs"]) & (held["bytes"] > _SINGLE)
    return int(held["bytes"][counted].sum())


EXERCISES = (
    Number(
        "02.1",
        "Bytes of weight copies that GPT-2 holds at the end of forward under autocast, equal to the byte.",
        minutes=5,
        truth=_copies,
        mistakes=lambda truth: {
            2 * truth: "A copy has 2 bytes a number, not 4.",
            truth - 2 * 768 * 50257: "The head is a product too, so its weight is copied as well.",
            truth + 2 * 1024 * 768: "Positions are looked up and not multiplied, so they have no copy.",
        },
        hints=(
            "Which weights are factors of a product? Embeddings are looked up, norms and biases are added.",
            "A block's four linear layers have 12 h * h weights together, and the head has V * h.",
            "2 bytes for each of 12 * 768 * 768 * 12 + 50257 * 768 weights.",
        ),
    ),
    Write(
        "02.2",
        "Bytes of activations and weight copies of pre-norm blocks at the end of forward, on a card, equal to the byte.",
        minutes=10,
        plain=_block_bytes,
        cases=lambda: [("fp32", 64, 4, 1, 32), ("amp-bf16", 64, 4, 1, 32), ("amp-bf16", 128, 2, 3, 64)],
        hints=(
            "What does a token cost under autocast, and what does not depend on tokens at all?",
            "A token and block: 36 h + 4 a + 16. A copy: 2 bytes a weight.",
            "Add 24 h * h for each block, whatever the tokens.",
        ),
    ),
    FindRecipe(
        "02.3",
        "GPT-2 with 8 sequences of 1,024 tokens on a card of 12 GiB, by its precision alone.",
        minutes=5,
        task=lambda: tasks.gpt("gpt2"),
        plain=Recipe(micro_batch=8),
        keep=("micro_batch", "optimizer", "optimizer_impl", "optimizer_in_backward", "checkpointing", "offload", "loss_chunks"),
        gpu="RTX 3060",
        hints=(
            "There are 8,192 tokens and a width of 768: on which side of 6/7 h is that?",
            "TF32 changes how fp32 numbers are multiplied, and no byte.",
            "precision='amp-bf16', or one that also shrinks what stays.",
        ),
    ),
)
