"""Each technique alone, and the best of them together, against plain fp32 training: bytes, time, and whether the gradients are the same.

python benchmarks/techniques.py [--pairs N] [--device cpu]      prints a table and writes benchmarks/results/techniques.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from measure import spread, write
from torch import nn

import vramlab as vl
from vramlab.devices import Stopwatch, choose_device
from vramlab.parallel.way import Way
from vramlab.techniques import Precision, step_in_backward
from vramlab.techniques.choose import build_optimizer, changed_model
from vramlab.training import train_window
from vramlab.units import format_bytes

PLAIN = vl.Recipe(micro_batch=8)
ALONE: dict[str, dict[str, Any]] = {
    "mixed precision, bf16": {"precision": "amp-bf16"},
    "pure bf16": {"precision": "bf16"},
    "gradient accumulation": {"micro_batch": 2, "accumulation": 4},
    "checkpointing, blocks": {"checkpointing": "blocks"},
    "checkpointing, selective": {"checkpointing": "selective"},
    "factored optimizer": {"optimizer": "adafactor", "optimizer_impl": "loop"},
    "fused optimizer": {"optimizer_impl": "fused"},
    "optimizer in backward": {"optimizer_in_backward": True},
    "chunked loss": {"loss_chunks": 8},
}
BEST = {
    "precision": "amp-bf16",
    "checkpointing": "blocks",
    "optimizer": "adafactor",
    "optimizer_impl": "loop",
    "optimizer_in_backward": True,
}
TASKS = {"gpt": vl.tasks.gpt("mini"), "vit": vl.tasks.vit("nano")}


class Steps:
    """A model in training whose steps can be taken one at a time."""

    def __init__(self, task: vl.Task, recipe: vl.Recipe, device: torch.device, optimizer: Callable[[nn.Module], Any] | None = None) -> None:
        torch.manual_seed(0)
        self.task, self.recipe, self.device, self.way = task, recipe, device, Way(recipe, device)
        self.precision = Precision(recipe.precision)
        self.model = self.precision.prepare(task.model()).to(device).train()
        self.optimizer = optimizer(self.model) if optimizer else build_optimizer(self.model, recipe, 1e-3)
        self.undo = ExitStack()
        self.undo.enter_context(changed_model(self.model, recipe))

    def __call__(self) -> float:
        with Stopwatch(self.device) as watch:
            train_window(self.task, self.recipe, self.way, self.model, self.optimizer, self.precision)
        return watch.seconds


class Seen(torch.optim.SGD):
    """An optimizer that changes nothing and keeps the gradients it was given."""

    def __init__(self, params: Any, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(params, lr=0.0)
        self.gradients = gradients

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.gradients |= {p: p.grad.detach().double().cpu() for p in group["params"] if p.grad is not None}


def gradients(task: vl.Task, recipe: vl.Recipe, device: torch.device) -> list[torch.Tensor]:
    """The gradients of the first window, in the order of the parameters."""
    found: dict[torch.Tensor, torch.Tensor] = {}

    def optimizer(model: nn.Module) -> Any:
        if recipe.optimizer_in_backward:
            return step_in_backward(model, lambda params: Seen(params, found))
        return Seen(model.parameters(), found)

    steps = Steps(task, recipe, device, optimizer)
    torch.manual_seed(1)  # the same data
    with steps.undo:
        steps()
    return [found[p] for p in steps.model.parameters()]


def difference(task: vl.Task, recipe: vl.Recipe, device: torch.device) -> float:
    """The largest difference of a gradient from plain training's, relative to the largest gradient of that parameter."""
    pairs = zip(gradients(task, recipe, device), gradients(task, PLAIN, device), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def measure(task: vl.Task, recipe: vl.Recipe, pairs: int, device: torch.device) -> dict[str, Any]:
    """Peak bytes by category, the time of a step relative to a plain one's, and the difference of the gradients."""
    run = vl.run(task, recipe, steps=2, device=device, progress=False)
    few = recipe.with_(micro_batch=1, accumulation=1)  # so few activations that parameters and their like set the peak
    plain, other = Steps(task, PLAIN, device), Steps(task, recipe, device)
    with plain.undo, other.undo:
        plain(), other()
        ratios = [other() / plain() for _ in range(pairs)]
    return {
        "recipe": recipe.changes(),
        "peak": run.peak,
        "peak_of_one_item": vl.run(task, few, steps=2, device=device, progress=False).peak,
        "phase": run.trace.peak_phase if run.trace else None,
        "categories": {label: n for label, n in run.breakdown.items() if n},
        "time_ratio": spread(ratios),
        "gradient_difference": difference(task, recipe, device),
    }


def rows(task: vl.Task) -> Iterator[tuple[str, vl.Recipe]]:
    yield "plain fp32, AdamW", PLAIN
    for name, options in ALONE.items():
        if task.chunked or "loss_chunks" not in options:
            yield name, PLAIN.with_(**options)
    yield "together", PLAIN.with_(**BEST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=11, help="pairs of steps, at least 2")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = choose_device(arguments.device)
    report: dict[str, Any] = {"device": str(device), "pairs": arguments.pairs, "tasks": {}}
    for key, task in TASKS.items():
        print(f"{task.name}, {PLAIN}, {device}, one thread, {arguments.pairs} pairs of steps")
        found = report["tasks"][key] = {"name": task.name, "rows": {}}
        for name, recipe in rows(task):
            r = found["rows"][name] = measure(task, recipe, arguments.pairs, device)
            peak = r["peak"] / found["rows"]["plain fp32, AdamW"]["peak"]
            time = "{median:.2f} ({low:.2f}-{high:.2f})".format(**r["time_ratio"])
            size = f"{format_bytes(r['peak'])} x {peak:.3f} in {r['phase']}"
            print(f"  {name:26}{size:36} time x {time:20} gradients {r['gradient_difference']:.1e}", flush=True)
    write("techniques", report)


if __name__ == "__main__":
    main()
