"""Exercises of notebook 11: your own model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vramlab import tasks
from vramlab.memory.recorder import record
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe


def _lora_bytes(layers: Sequence[tuple[int, int]], r: int) -> int:
    thin = [nn.Parameter(torch.zeros(shape)) for i, o in layers for shape in ((r, i), (o, r))]
    with record(None, optimizer := torch.optim.AdamW(thin)) as trace:
        torch.stack([p.sum() for p in thin]).sum().backward()
        optimizer.step()
    end = trace.breakdown("end")
    return end.gradients + end.optimizer_state


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


EXERCISES = (
    Write(
        "11.1",
        "Bytes of gradients and AdamW's state for LoRA in fp32, equal to the byte.",
        minutes=5,
        plain=_lora_bytes,
        cases=lambda: [([(4, 8)], 2), ([(128, 128), (128, 64)], 8), ([(16, 16)] * 5, 1)],
        hints=(
            "4 bytes of gradient for each trained number. How many does AdamW keep for it?",
            "4 + 8 bytes a number, and a step counter of 4 bytes for each tensor.",
        ),
    ),
    FindRecipe(
        "11.2",
        "ViT-B/16 with 256 images a step in amp-bf16 with AdamW, fitting an RTX 3060.",
        minutes=5,
        task=lambda: tasks.vit("vit-b-16"),
        plain=Recipe(micro_batch=256, precision="amp-bf16"),
        gpu="RTX 3060",
        hints=(
            "What is largest in vl.plan(...).breakdown?",
            "Activations: fewer images at a time with accumulation, or checkpointing='blocks'. Is one of them enough?",
        ),
    ),
    Write(
        "11.3",
        "The scores of all batches, at a peak of at most 2 MiB above the start.",
        minutes=10,
        plain=lambda model, batches: torch.cat([model(batch) for batch in batches]).detach(),
        cases=lambda: [(_mlp(), [torch.randn(128, 64) for _ in range(12)])],
        target="2 MiB",
        hints=(
            "detach() comes when all is computed. What holds the activations until then?",
            "The graph: with torch.no_grad() there is none, and each batch's activations go when the next begins.",
        ),
    ),
)
