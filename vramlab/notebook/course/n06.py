"""Exercises of notebook 06: score matrices and logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vramlab import tasks
from vramlab.memory.recorder import record
from vramlab.notebook.exercises import FindRecipe, Number, Write
from vramlab.recipe import Recipe


def _scores() -> int:
    """What softmax keeps in one layer of one sequence, recorded; then in 12 layers of 4."""
    scores = torch.zeros(1, 12, 1024, 1024, requires_grad=True)
    with record() as trace:
        kept = scores.softmax(-1)
    assert kept.requires_grad
    return 12 * 4 * trace.breakdown("end").activations


EXERCISES = (
    Number(
        "06.1",
        "Bytes of softmax results that GPT-2 keeps for 4 sequences of 1,024 tokens, in fp32, equal to the byte.",
        minutes=5,
        truth=_scores,
        mistakes=lambda truth: {
            truth // 2: "In fp32 a number takes 4 bytes.",
            truth // 12: "12 layers, and in each of them 12 heads: both count.",
            truth // 4: "4 bytes a number, and 4 sequences: both count.",
        },
        hints=(
            "How many scores has one head of one layer for one sequence?",
            "1024 * 1024 scores a head, 12 heads, 12 layers, 4 sequences.",
        ),
    ),
    FindRecipe(
        "06.2",
        "GPT-2 with 16 sequences a step in amp-bf16 with AdamW, fitting an RTX 3060, without checkpointing or offload.",
        minutes=5,
        task=lambda: tasks.gpt("gpt2"),
        plain=Recipe(micro_batch=16, precision="amp-bf16", attention="math"),
        keep=("precision", "optimizer", "accumulation", "checkpointing", "offload"),
        gpu="RTX 3060",
        hints=(
            "What is largest in vl.plan(...).holders(4, by='operator')?",
            "attention='sdpa' keeps no scores. What is largest then?",
            "Three tensors of all logits: loss_chunks.",
        ),
    ),
    Write(
        "06.3",
        "The mean cross-entropy of hidden @ weight.T, gradients too, at a peak of at most 16 MiB above the start.",
        minutes=15,
        plain=lambda hidden, weight, target: F.cross_entropy(hidden @ weight.T, target),
        cases=lambda: [
            (torch.randn(512, 64, requires_grad=True), (torch.randn(8192, 64) / 8).requires_grad_(), torch.randint(8192, (512,)))
        ],
        target="16 MiB",
        hints=(
            "Without a checkpoint each piece keeps its log-probabilities for backward, and together they are as many as before.",
            "def piece(h, t): return F.cross_entropy(h @ weight.T, t, reduction='sum'), called through checkpoint(piece, h, t, "
            "use_reentrant=False) for hidden.split(64) and target.split(64).",
            "The mean is the sum of all pieces divided by len(target).",
        ),
    ),
)
