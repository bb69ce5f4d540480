"""Exercises of notebook 08: layers, columns, rows and pipelines."""

from __future__ import annotations

from vramlab import tasks
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe


def _in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    from vramlab.parallel.pipelined import in_flight  # half a second that other exercises need not wait

    return in_flight(schedule, stage, stages, micro_batches)


EXERCISES = (
    Write(
        "08.1",
        "The fewest micro-batches with which each of so many stages idles at most so many per cent of the time.",
        minutes=5,
        plain=lambda stages, percent: -(-(stages - 1) * (100 - percent) // percent),
        cases=lambda: [(4, 10), (2, 5), (8, 50), (3, 30), (2, 60)],
        hints=(
            "Solve (p - 1) / (m + p - 1) <= percent / 100 for m.",
            "m >= (p - 1) * (100 - percent) / percent.",
            "Round up: -(-a // b) is the whole number not below a / b.",
        ),
    ),
    Write(
        "08.2",
        "Of how many micro-batches a stage keeps the activations at most.",
        minutes=10,
        plain=_in_flight,
        cases=lambda: [
            (schedule, stage, 4, micro_batches) for schedule in ("naive", "gpipe", "1f1b") for stage in (0, 3) for micro_batches in (8, 2)
        ],
        hints=(
            "GPipe goes backward only when all are forward; the last stage of 1F1B goes backward at once.",
            "Under 1F1B the stage before has one more than the one behind it.",
            "And never more than there are: min(stages - stage, micro_batches).",
        ),
    ),
    FindRecipe(
        "08.3",
        "GPT-2 large with 16 sequences a step on four cards of 12 GiB, without checkpointing or offload.",
        minutes=10,
        task=lambda: tasks.gpt("gpt2-large"),
        plain=Recipe(precision="amp-bf16", parallel="ddp", ranks=4, micro_batch=4, optimizer_impl="fused"),
        keep=("precision", "optimizer", "checkpointing", "offload", "ranks"),
        gpu="RTX 3060",
        hints=(
            "How many bytes of states has each rank with parallel='pipeline', stages=4?",
            "micro_batch * accumulation stays 16 in one pipeline: small micro-batches are few activations in flight.",
            "parallel='pipeline', stages=4, micro_batch=1, accumulation=16.",
        ),
    ),
)
