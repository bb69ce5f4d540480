"""What recording costs: the standard lab task's step with and without a recorder, in turn, on one thread of this machine.

python benchmarks/recorder.py [--pairs N]      prints a table and writes benchmarks/results/recorder.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from measure import spread, write
from torch.utils._python_dispatch import TorchDispatchMode

import vramlab as vl
from vramlab.devices import Stopwatch
from vramlab.memory.recorder import record
from vramlab.parallel.way import Way
from vramlab.techniques import Precision
from vramlab.techniques.choose import build_optimizer
from vramlab.training import train_window

CPU = torch.device("cpu")


class OperatorCount(TorchDispatchMode):
    """Counts operators as a recorder sees them, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure(task: vl.Task, recipe: vl.Recipe, pairs: int) -> dict[str, Any]:
    """Seconds of a step without and with a recorder, alternating in one process so that both meet the same machine.

    Args:
        task, recipe: what is trained and how.
        pairs: how many steps of each kind.

    Returns:
        Medians and quartiles of the seconds, the median ratio of the pairs, and microseconds an operator.
    """
    torch.manual_seed(0)
    precision = Precision(recipe.precision)
    model = precision.prepare(task.model()).train()
    way, optimizer = Way(recipe, CPU), build_optimizer(model, recipe, 1e-3)

    def step() -> None:
        train_window(task, recipe, way, model, optimizer, precision)

    for _ in range(3):
        step()
    with OperatorCount() as operators:
        step()
    plain, recorded = [], []
    for _ in range(pairs):
        plain.append(seconds(step, nullcontext))
        recorded.append(seconds(step, lambda: record(model, optimizer)))
    extra = [b - a for a, b in zip(plain, recorded, strict=True)]
    return {
        "precision": recipe.precision,
        "operators": operators.count,
        "plain_seconds": spread(plain),
        "recorded_seconds": spread(recorded),
        "ratio": spread([b / a for a, b in zip(plain, recorded, strict=True)]),
        "microseconds_per_operator": spread([1e6 * e / operators.count for e in extra]),
    }


def seconds(step: Callable[[], None], around: Callable[[], Any]) -> float:
    """How long one step takes, with what is around it: entering and leaving a recorder counts."""
    with Stopwatch(CPU) as watch, around():
        step()
    return watch.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=31, help="steps of each kind, at least 2")
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    task = vl.tasks.gpt("mini")
    results = [measure(task, vl.Recipe(precision=precision), pairs) for precision in ("fp32", "amp-bf16")]
    print(f"{task.name}, micro-batch 8, one thread, {pairs} pairs of steps; median (quartiles)")
    print(f"{'precision':10} {'operators':>9} {'plain':>10} {'recorded':>10} {'ratio':>22} {'us an operator':>18}")
    for r in results:
        plain, recorded = (f"{r[key]['median'] * 1e3:7.1f} ms" for key in ("plain_seconds", "recorded_seconds"))
        ratio, each = r["ratio"], r["microseconds_per_operator"]
        ratios = f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
        costs = f"{each['median']:.1f} ({each['low']:.0f}-{each['high']:.0f})"
        print(f"{r['precision']:10} {r['operators']:9} {plain} {recorded} {ratios:>22} {costs:>18}")
    write("recorder", {"task": task.name, "pairs": pairs, "results": results})


if __name__ == "__main__":
    main()
