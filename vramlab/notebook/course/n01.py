"""Exercises of notebook 01: where the memory of a training step goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from vramlab import tasks
from vramlab.memory.recorder import record
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe


def _state(shapes: Sequence[torch.Size], optimizer: str) -> int:
    kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    with record(None, stepper := kind(parameters, lr=0.1)) as trace:
        torch.stack([p.sum() for p in parameters]).sum().backward()
        stepper.step()
    return trace.breakdown("end").optimizer_state


def _kept(batch: int, widths: Sequence[int]) -> int:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    with record(model) as trace:
        result = model(torch.zeros(batch, widths[0])).sum()
    return trace.breakdown("end").activations - result.nbytes


_SHAPES: list[list[tuple[int, ...]]] = [[(10, 4)], [(256, 1024), (1024,)], [(3,), (5, 7, 2), (1,)]]

EXERCISES = (
    Write(
        "01.1",
        "Bytes of optimizer state of fp32 parameters, for adamw and for sgd, equal to the byte.",
        minutes=5,
        plain=_state,
        cases=lambda: [([torch.Size(shape) for shape in shapes], name) for shapes in _SHAPES for name in ("sgd", "adamw")],
        hints=(
            "How many numbers does AdamW keep for each parameter, and how many does SGD without momentum?",
            "Each number takes 4 bytes. What does AdamW keep once for each tensor?",
            "The step counter is one fp32 number a tensor: 8 bytes a parameter and 4 a tensor.",
        ),
    ),
    Write(
        "01.2",
        "Bytes that Linear, ReLU, ... Linear keep for backward, equal to the byte.",
        minutes=5,
        plain=_kept,
        cases=lambda: [(1, (4, 8)), (32, (16, 64, 8)), (5, (10, 20, 30, 40))],
        hints=(
            "Which tensors exist between the layers, and which of them does a backward ask for?",
            "A Linear keeps its input, a ReLU its output; the output of one is the input of the next, so it counts once.",
            "Nobody asks for the last Linear's output, and the batch itself does not count: the hidden widths remain.",
        ),
    ),
    FindRecipe(
        "01.3",
        "The lab's GPT with AdamW in fp32 and 8 excerpts a step, at a peak of at most 60 MiB.",
        minutes=5,
        task=lambda: tasks.gpt("mini"),
        plain=Recipe(micro_batch=8),
        target="60 MiB",
        hints=(
            "What is largest at the peak, and which switches reduce it without changing the numbers?",
            "Activations go with fewer excerpts at a time and accumulation, and with checkpointing.",
            "Then the optimizer's step sets the peak: what does optimizer_impl='foreach' hold for a moment?",
        ),
    ),
)
