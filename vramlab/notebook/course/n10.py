"""Exercises of notebook 10: recipes for models that do not fit."""

from __future__ import annotations

from vramlab import tasks
from vramlab.notebook.exercises import FindRecipe
from vramlab.recipe import Recipe

EXERCISES = (
    FindRecipe(
        "10.1",
        "GPT-2 XL in amp-bf16 with AdamW and sixteen sequences a step, on one RTX 4090.",
        minutes=10,
        task=lambda: tasks.gpt("gpt2-xl"),
        plain=Recipe(precision="amp-bf16", micro_batch=16),
        gpu="RTX 4090",
        hints=(
            "Weights, gradients and state are 16 bytes a parameter, and those alone are more than the card has. Which can be elsewhere?",
            "offload='optimizer' leaves weights and gradients on the card, 8 bytes a parameter, and it can accumulate.",
            "What is largest in vl.plan(...).breakdown then? Accumulate over smaller micro-batches, checkpoint the blocks.",
        ),
    ),
    FindRecipe(
        "10.2",
        "The 3B model in amp-bf16 with the factored optimizer and two sequences a step, on one RTX 4090.",
        minutes=10,
        task=lambda: tasks.gpt("llama-3b"),
        plain=Recipe(precision="amp-bf16", micro_batch=2, optimizer="adafactor"),
        gpu="RTX 4090",
        hints=(
            "Weights 4 bytes, their copies in bf16 2, gradients 4: of 7.7. Which of them need not exist as a whole?",
            "optimizer_in_backward=True with checkpointing='blocks' and loss_chunks=8 is close. What is largest beside the weights?",
            "Inputs of 28 blocks, in fp32. They wait for backward, and can wait in host memory.",
        ),
    ),
    FindRecipe(
        "10.3",
        "llama-1b on four RTX 3060 in amp-bf16 with AdamW, sixteen sequences a step in all.",
        minutes=10,
        task=lambda: tasks.gpt("llama-1b"),
        plain=Recipe(precision="amp-bf16", micro_batch=4, parallel="ddp", ranks=4),
        keep=("precision", "optimizer", "ranks"),
        gpu="RTX 3060",
        hints=(
            "DDP keeps 16 bytes a parameter on each card. What cuts them in four?",
            "With parallel='fsdp' the states are 4 bytes a parameter. What is largest then?",
            "Checkpoint the blocks, compute the loss in chunks, and use the fused step.",
        ),
    ),
)
