"""Exercises of notebook 05: the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vramlab import tasks
from vramlab.memory.recorder import record
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe
from vramlab.techniques.adafactor import Adafactor


def _recorded(shapes: Sequence[torch.Size]) -> int:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    with record(None, optimizer := Adafactor(parameters)) as trace:
        torch.stack([p.sum() for p in parameters]).sum().backward()
        optimizer.step()
    return trace.breakdown("end").optimizer_state


def _adam_of_all(parameters: list[Any], gradients: list[Any], ms: list[Any], vs: list[Any], t: int) -> list[Any]:
    """Each operation on all tensors before the next, as the plain way."""
    squares = [0.001 * g**2 for g in gradients]
    for m, v, g, s in zip(ms, vs, gradients, squares, strict=True):
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).add_(s)
    divided = [v / (1 - 0.999**t) for v in vs]
    roots = [v.sqrt() + 1e-8 for v in divided]
    steps = [m / (1 - 0.9**t) / root for m, root in zip(ms, roots, strict=True)]
    for p, step in zip(parameters, steps, strict=True):
        p.sub_(step, alpha=0.001)
    return parameters


def _eight_tensors() -> tuple[Any, ...]:
    lists = [[torch.randn(256, 256) for _ in range(8)] for _ in range(3)]
    return *lists, [torch.rand(256, 256) for _ in range(8)], 5


EXERCISES = (
    Write(
        "05.1",
        "Bytes of Adafactor's state for vectors and matrices in fp32, equal to the byte.",
        minutes=10,
        plain=_recorded,
        cases=lambda: [([torch.Size(s) for s in shapes],) for shapes in ([(512, 2048)], [(30,), (30, 20)], [(2, 2), (1000, 1), (3, 2)])],
        hints=(
            "How many numbers does a vector need, and how many rows and columns together?",
            "A matrix of 2 x 2 or 1000 x 1 has no fewer rows and columns than numbers: it is kept whole.",
            "min(shape.numel(), sum(shape)) numbers, 4 bytes each.",
        ),
    ),
    Write(
        "05.2",
        "One Adam step in place, that borrows at most 600 KiB for eight tensors of 256 KiB.",
        minutes=15,
        plain=_adam_of_all,
        cases=lambda: [_eight_tensors()],
        target="600 KiB",
        hints=(
            "How many new tensors does your loop make for one parameter, and how many of them are alive at once?",
            "m.mul_(beta1).add_(g, alpha=1 - beta1); v.mul_(beta2).addcmul_(g, g, value=1 - beta2).",
            "root = (v / (1 - beta2**t)).sqrt_().add_(1e-8), then p.addcdiv_(m, root, value=-lr / (1 - beta1**t)).",
        ),
    ),
    FindRecipe(
        "05.3",
        "GPT-2 medium in fp32 with at most 3.8 GiB reserved, by the optimizer's options alone.",
        minutes=5,
        task=lambda: tasks.gpt("gpt2-medium"),
        plain=Recipe(micro_batch=1),
        keep=("precision", "micro_batch", "accumulation", "checkpointing", "offload", "loss_chunks", "attention"),
        gpu="RTX 4090",
        target="3.8 GiB",
        hints=(
            "16 bytes a parameter are 5.3 GiB: which of the 4 + 4 + 8 can go?",
            "optimizer='adafactor' keeps almost no state. What does its step borrow?",
            "optimizer_impl='loop' holds the update of one parameter at a time.",
        ),
    ),
)
