"""Exercises of notebook 09: sharding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vramlab import tasks
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe


def _half_states(parameters: int, ranks: int, stage: int) -> float:
    shared = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return float((16 - shared) * parameters + shared * parameters / ranks)


def _shard_bytes(shapes: Sequence[torch.Size], ranks: int) -> int:
    from vramlab.parallel.sharded import sharded_bytes  # half a second that other exercises need not wait

    return sharded_bytes([shapes], ranks).parameters


EXERCISES = (
    Write(
        "09.1",
        "Bytes of parameters (2 a number), gradients (2) and state (12) on each rank, by ZeRO's stage.",
        minutes=5,
        plain=_half_states,
        cases=lambda: [(7_500_000_000, ranks, stage) for ranks in (1, 64) for stage in (0, 1, 2, 3)],
        hints=(
            "Stage 1 divides the state, stage 2 gradients too, stage 3 everything.",
            "2N + 2N + 12N/n, then 2N + 14N/n, then 16N/n.",
            "For stage 2: 2 * parameters + 14 * parameters / ranks.",
        ),
    ),
    Write(
        "09.2",
        "Bytes of fp32 parameters that FSDP keeps on each rank, padding included.",
        minutes=10,
        plain=_shard_bytes,
        cases=lambda: [
            ([torch.Size((1024, 256)), torch.Size((1024,))], 4),
            ([torch.Size((50257, 768))], 4),
            ([torch.Size((5, 3)), torch.Size((7,))], 4),
            ([torch.Size((2, 8, 8))], 8),
        ],
        hints=(
            "Rows are those of the first dimension: how many has the rank that has most?",
            "-(-rows // ranks) rows, each of all the other dimensions' product.",
            "4 * -(-shape[0] // ranks) * shape[1:].numel(), summed over the shapes.",
        ),
    ),
    FindRecipe(
        "09.3",
        "GPT-2 XL with 8 sequences a step on four cards of 12 GiB, with nothing in host memory.",
        minutes=10,
        task=lambda: tasks.gpt("gpt2-xl"),
        plain=Recipe(precision="amp-bf16", parallel="ddp", ranks=4, micro_batch=2, optimizer_impl="fused"),
        keep=("precision", "optimizer", "offload", "ranks"),
        gpu="RTX 3060",
        hints=(
            "Which way divides all 16 bytes a parameter by 4?",
            "What is whole on every rank from forward to backward under autocast?",
            "parallel='fsdp', checkpointing='blocks'.",
        ),
    ),
)
