"""Exercises of notebook 04: what it costs to compute activations twice."""

from __future__ import annotations

import torch
from torch import nn

from vramlab import tasks
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe


def _best_segment(n: int, boundary: int, layer: int) -> int:
    sizes = [m for m in range(1, n + 1) if n % m == 0]
    return min(sizes, key=lambda m: n // m * boundary + m * layer)


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Dropout(0.1)) if i % 12 == 0 else nn.Tanh() for i in range(36)))


EXERCISES = (
    Write(
        "04.1",
        "How many blocks a segment should have, so that boundaries and one segment's inside are least together.",
        minutes=5,
        plain=_best_segment,
        cases=lambda: [(64, 1, 1), (48, 1, 16), (48, 1024, 9216), (36, 1000, 1000), (12, 1, 100), (100, 7, 1)],
        hints=(
            "With m blocks in a segment, how many boundaries are kept?",
            "n // m boundaries and m layers: which m makes n // m * boundary + m * layer least?",
            "min(sizes, key=lambda m: ...) compares the divisors.",
        ),
    ),
    FindRecipe(
        "04.2",
        "GPT-2 with 32 sequences a step in amp-bf16 with AdamW, fitting an RTX 3060, without accumulation.",
        minutes=5,
        task=lambda: tasks.gpt("gpt2"),
        plain=Recipe(micro_batch=32, precision="amp-bf16"),
        keep=("precision", "optimizer", "accumulation"),
        gpu="RTX 3060",
        hints=(
            "Checkpoint the blocks, and look at vl.plan(...).holders(3): which line of the code holds most then?",
            "The logits, 32 * 1024 * 50,257 numbers: loss_chunks computes them in pieces.",
        ),
    ),
    Write(
        "04.3",
        "The same as layers(x), gradients too, at a peak of at most 5 MiB above the start.",
        minutes=10,
        plain=lambda layers, x: layers(x),
        cases=lambda: [(_layers(), torch.randn(65536, requires_grad=True))],
        target="5 MiB",
        hints=(
            "A chain of 36 layers: how many segments keep the least?",
            "Six segments of six: layers[i : i + 6] is a segment, and checkpoint(segment, x, use_reentrant=False) keeps its input.",
            "torch.utils.checkpoint.checkpoint_sequential(layers, 6, x, use_reentrant=False) is the whole of it.",
        ),
    ),
)
