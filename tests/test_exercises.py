"""The checks of the notebooks accept the solution, and answer a blank or a wrong attempt without raising."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from vramlab.memory.trace import MemoryBreakdown
from vramlab.notebook.exercises import Verdict, beside, check_mlp_activations, check_recipe, check_state_bytes
from vramlab.recipe import Recipe
from vramlab.tasks import gpt


def state_bytes(shapes: Sequence[torch.Size], optimizer: str) -> int:
    numbers = sum(shape.numel() for shape in shapes)
    return 8 * numbers + 4 * len(shapes) if optimizer == "adamw" else 0


def mlp_activations(batch: int, widths: Sequence[int]) -> int:
    return 4 * batch * sum(widths[1:-1])


def test_the_solution_for_optimizer_state_is_accepted() -> None:
    assert check_state_bytes(state_bytes).solved


def test_optimizer_state_without_the_step_counters_is_refused_with_both_numbers() -> None:
    verdict = check_state_bytes(lambda shapes, name: 8 * sum(s.numel() for s in shapes) if name == "adamw" else 0)
    assert repr(verdict) == "not yet: adamw over [(10, 4)]: yours 320 bytes, measured 324."


def test_the_solution_for_activations_is_accepted() -> None:
    assert check_mlp_activations(mlp_activations).solved


def test_activations_that_count_linear_and_relu_outputs_both_are_refused() -> None:
    verdict = check_mlp_activations(lambda batch, widths: 8 * batch * sum(widths[1:-1]))
    assert not verdict.solved
    assert "yours 16,384 bytes, measured 8,192" in verdict.message


def test_blank_answers_say_not_yet() -> None:
    assert repr(check_state_bytes(lambda shapes, name: None)) == "not yet: fill in the missing lines."
    assert repr(check_mlp_activations(lambda batch, widths: None)) == "not yet: fill in the missing lines."


def test_a_recipe_that_reaches_the_target_without_loss_is_accepted() -> None:
    solution = Recipe(micro_batch=1, accumulation=8, checkpointing="blocks", optimizer_impl="fused")
    verdict = check_recipe(gpt("mini"), solution, target=60 << 20)
    assert verdict.solved, verdict
    two_of_three = solution.with_(optimizer_impl="foreach")
    assert not check_recipe(gpt("mini"), two_of_three, target=60 << 20).solved


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (None, "write a vl.Recipe"),
        (Recipe(micro_batch=4), "micro_batch \\* accumulation = 8 stay"),
        (Recipe(precision="bf16"), "precision fp32"),
        (Recipe(optimizer="sgd"), "optimizer adamw"),
        (Recipe(), "target 1.00 MiB, without your changes 15.05 MiB; same loss"),
        (Recipe(clip_norm=1e-6), "the loss is"),
    ],
)
def test_a_recipe_that_does_not_qualify_is_told_why(recipe: Recipe | None, message: str) -> None:
    verdict = check_recipe(gpt("nano"), recipe, target=1 << 20)
    assert not verdict.solved
    assert re.search(message, verdict.message)


def test_a_verdict_shows_itself_with_escaped_text() -> None:
    assert "<b style='color:#D55E00'>not yet</b>: 3 &lt; 4" in Verdict(False, "3 < 4")._repr_html_()
    assert "solved" in Verdict(True, "")._repr_html_()


def test_beside_lays_hand_and_measurement_next_to_each_other() -> None:
    table = beside({"parameters": 100, "optimizer state": 200}, MemoryBreakdown(parameters=100, optimizer_state=210))
    assert table.loc["optimizer state"].tolist() == [200, 210, 1.05]
    with pytest.raises(ValueError, match="A category is one of parameters, .* got 'weights'"):
        beside({"weights": 1}, MemoryBreakdown())
