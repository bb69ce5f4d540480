"""What the notebooks compare and check with: bytes by hand beside bytes measured, and verdicts on exercises."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from vramlab.experiments import run
from vramlab.memory.recorder import record
from vramlab.memory.trace import MemoryBreakdown
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd


def beside(by_hand: Mapping[str, int], measured: MemoryBreakdown) -> pd.DataFrame:
    """Bytes by hand, bytes measured and their ratio, one row a category that was worked out.

    Args:
        by_hand: bytes by category label: ``{"parameters": 1024, "optimizer state": 2048}``.
        measured: what a trace says.

    Raises:
        ValueError: no such category.
    """
    import pandas as pd

    found = dict(measured.items())
    for label in by_hand:
        if label not in found:
            raise ValueError(f"A category is one of {', '.join(found)}, got {label!r}.")
    table = pd.DataFrame({"by hand": dict(by_hand), "measured": {label: found[label] for label in by_hand}})
    return table.assign(ratio=(table["measured"] / table["by hand"]).round(4))


@dataclass(frozen=True)
class Verdict:
    """What a check says; it shows itself and never raises, so that *Run All* goes on past a blank exercise."""

    solved: bool
    message: str

    def __repr__(self) -> str:
        return f"{'solved' if self.solved else 'not yet'}: {self.message}"

    def _repr_html_(self) -> str:
        color = "#009E73" if self.solved else "#D55E00"
        return f"<p><b style='color:{color}'>{'solved' if self.solved else 'not yet'}</b>: {html.escape(self.message)}</p>"


def check_state_bytes(answer: Callable[[Sequence[torch.Size], str], int | None]) -> Verdict:
    """``answer(shapes, optimizer)``: bytes of optimizer state of fp32 parameters, for "sgd" and "adamw"."""
    for shapes in ([(10, 4)], [(256, 1024), (1024,)], [(3,), (5, 7, 2), (1,)]):
        for name, optimizer in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)):
            parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
            with record(None, stepper := optimizer(parameters, lr=0.1)) as trace:
                sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
                stepper.step()
            verdict = _compare(answer([p.shape for p in parameters], name), trace.breakdown("end").optimizer_state, f"{name} over {shapes}")
            if not verdict.solved:
                return verdict
    return Verdict(True, "equal to what three real models hold, to the byte.")


def check_mlp_activations(answer: Callable[[int, Sequence[int]], int | None]) -> Verdict:
    """``answer(batch, widths)``: bytes kept for backward by Linear, ReLU, Linear, ReLU... Linear of these widths."""
    for batch, widths in ((1, (4, 8)), (32, (16, 64, 8)), (5, (10, 20, 30, 40))):
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        model = nn.Sequential(*layers[:-1])
        with record(model) as trace:
            result = model(torch.zeros(batch, widths[0])).sum()
        measured = trace.breakdown("end").activations - result.nbytes
        verdict = _compare(answer(batch, widths), measured, f"batch {batch}, widths {widths}")
        if not verdict.solved:
            return verdict
    return Verdict(True, "equal to what three real models keep, to the byte.")


def check_recipe(task: Task, recipe: Recipe | None, target: int, effective_batch: int = 8) -> Verdict:
    """A recipe that trains the task at most at ``target`` bytes, with AdamW in fp32, and loses nothing."""
    if not isinstance(recipe, Recipe):
        return Verdict(False, "write a vl.Recipe(...).")
    if (recipe.precision, recipe.optimizer) != ("fp32", "adamw") or recipe.micro_batch * recipe.accumulation != effective_batch:
        return Verdict(False, f"precision fp32, optimizer adamw and micro_batch * accumulation = {effective_batch} stay; change the rest.")
    plain = run(task, Recipe(micro_batch=effective_batch), steps=2, device="cpu", progress=False)
    yours = run(task, recipe, steps=2, device="cpu", progress=False)  # a card would add its workspaces
    if abs(yours.losses[1] - plain.losses[1]) > 1e-3:
        return Verdict(False, f"the loss is {yours.losses[1]:.4f} after a step, without your changes {plain.losses[1]:.4f}.")
    peak = yours.peak or 0
    found = f"peak {format_bytes(peak)}, target {format_bytes(target)}, without your changes {format_bytes(plain.peak or 0)}"
    return Verdict(peak <= target, f"{found}; same loss.")


def _compare(given: int | None, measured: int, case: str) -> Verdict:
    if given is None:
        return Verdict(False, "fill in the missing lines.")
    if given != measured:
        return Verdict(False, f"{case}: yours {given:,} bytes, measured {measured:,}.")
    return Verdict(True, "")
