"""Exercises of notebook 07: data parallelism."""

from __future__ import annotations

from vramlab import tasks
from vramlab.notebook.exercises import FindRecipe, Write
from vramlab.recipe import Recipe

EXERCISES = (
    Write(
        "07.1",
        "Bytes that each rank sends when gradients of 4 bytes a parameter are all-reduced in a ring.",
        minutes=5,
        plain=lambda parameters, ranks: 2 * (ranks - 1) * 4 * parameters // ranks,
        cases=lambda: [(124_439_808, 4), (124_439_808, 2), (1_000_000, 8), (1000, 1)],
        hints=(
            "How much does a single rank send?",
            "Cut into as many pieces as there are ranks, every piece but one passes each rank once to be summed.",
            "And once more to be told to all: 2 * (ranks - 1) pieces of 4 * parameters / ranks bytes.",
        ),
    ),
    Write(
        "07.2",
        "By what a rank multiplies the mean of its loss, so that DDP's average over the ranks is the mean over all tokens.",
        minutes=5,
        plain=lambda counts, rank: len(counts) * counts[rank] / sum(counts),
        cases=lambda: [([24, 8], 0), ([24, 8], 1), ([5, 5, 5, 5], 2), ([0, 3, 1], 0)],
        hints=(
            "What must it be where all ranks have equally many tokens?",
            "A mean times its count is a sum; all ranks' sums are divided by all tokens.",
            "DDP divides by the number of ranks too, so multiply by it.",
        ),
    ),
    FindRecipe(
        "07.3",
        "GPT-2 with 64 sequences a step on four cards of 12 GiB, by micro-batch and accumulation alone.",
        minutes=5,
        task=lambda: tasks.gpt("gpt2"),
        plain=Recipe(precision="amp-bf16", parallel="ddp", ranks=4, micro_batch=16),
        keep=("precision", "optimizer", "optimizer_impl", "checkpointing", "offload", "loss_chunks", "attention", "parallel", "ranks"),
        gpu="RTX 3060",
        hints=(
            "What does each of the four have to do in a step?",
            "micro_batch * accumulation stays 16 on each rank: 8 x 2, 4 x 4, ...",
            "The largest micro-batch that fits has the fewest pieces: 8 x 2.",
        ),
    ),
)
