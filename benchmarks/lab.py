"""How fast the lab answers, and what live plotting costs a run.

python benchmarks/lab.py      writes results/lab.json
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from measure import spread, write

import vramlab as vl
from vramlab.experiments import Run
from vramlab.gpus import gpu
from vramlab.notebook.live import Live
from vramlab.notebook.plan_view import PlanView
from vramlab.notebook.predictor import Question, _alike, estimated, replayed

CARD = "RTX 4090"
ROOMY = "400 GiB"  # of each card: what fits is not asked
MOVES: list[tuple[str, list[dict[str, Any]]]] = [
    ("micro-batch", [{"micro_batch": n} for n in (9, 12, 10, 14, 7, 16, 11, 13, 6, 15)]),
    ("accumulation", [{"accumulation": n} for n in (2, 3, 1, 4, 2, 8, 1, 5)]),
    ("card", [{"gpu": name} for name in ("RTX 3090", "RTX 5090", "A100 80GB", CARD)]),
    ("others hold", [{"in_use": size} for size in ("1 GiB", "2 GiB", "0.5 GiB", "0 GiB")]),
]
TRACED = [
    {"precision": "fp32"},
    {"checkpointing": "blocks"},
    {"optimizer": "sgd"},
    {"attention": "math"},
    {"loss_chunks": 8},
    {"optimizer_impl": "loop"},
]
CARDS = ("RTX 4090", "A100 80GB", "H100 SXM", "RTX 5090", "T4", "V100 SXM2 32GB")
ESTIMATED = {"gpt2": (vl.tasks.gpt("gpt2"), 8), "vit-b-16": (vl.tasks.vit("vit-b-16"), 16), "resnet18": (vl.tasks.resnet("resnet18"), 32)}
PRECISIONS = ("fp32", "amp-fp16", "amp-bf16", "bf16")


class Watched:
    """A lab of GPT-2 small, and when each part of its answer was there."""

    def __init__(self) -> None:
        self.shown: dict[str, float] = {}
        self.lab = vl.Lab(vl.tasks.gpt("gpt2"), vl.Recipe(precision="amp-bf16", micro_batch=8), gpu=CARD)
        self._update = PlanView.update
        view = self.lab.plan

        def update(news: Any) -> None:
            self._update(view, news)
            now = time.perf_counter()
            if news.answer is not None:
                self.shown.setdefault("allocated", now)
                if news.answer.reserved is not None:
                    self.shown.setdefault("reserved", now)
                if news.answer.exact:
                    self.shown.setdefault("exact", now)

        view.update = update  # type: ignore[method-assign]

    def moved(self, **options: Any) -> dict[str, float]:
        """Seconds from the event to the picture with each part of the answer."""
        self.shown.clear()
        start = time.perf_counter()
        self.lab.set(**options)
        self.lab.wait(120)
        return {part: at - start for part, at in self.shown.items()}

    def rest(self) -> None:
        """Until nothing is computed in the background any more."""
        while (worker := self.lab._predictor._worker) is not None:
            worker.join(1)


def answers() -> dict[str, Any]:
    """Event to picture, for switches that a law answers and for those that need a trace."""
    watched = Watched()
    start = time.perf_counter()
    watched.lab.predict()
    watched.lab.wait(120)
    report: dict[str, Any] = {"first answer, with the planner's start": time.perf_counter() - start}
    watched.rest()
    for name, moves in MOVES:
        found = [watched.moved(**move) for move in moves]
        if name in ("card", "others hold"):
            watched.rest()
        report[name] = {part: spread([f[part] for f in found if part in f]) for part in ("allocated", "reserved", "exact")}
    watched.rest()
    recipe = watched.lab.recipe
    traced = []
    for options in TRACED:
        traced.append(watched.moved(**options)["exact"])
        watched.lab.set(**{name: getattr(recipe, name) for name in options})
        watched.lab.wait(120)
    report["a new trace"] = spread(traced) | {"longest": max(traced)}
    watched.lab._predictor.forget()
    return report


def estimates() -> dict[str, Any]:
    """How far what is shown of another card until its trace is there is from that trace: largest share by task, and of how many pairs."""
    report: dict[str, Any] = {}
    for name, (task, micro_batch) in ESTIMATED.items():
        wrong: list[tuple[float, float]] = []
        for precision in PRECISIONS:
            recipe = vl.Recipe(precision=precision, micro_batch=micro_batch)
            able = [card for card in map(gpu, CARDS) if card.supports_bf16 or "bf16" not in precision]
            plans = {card: vl.plan(task, recipe, card.with_(memory=ROOMY)) for card in able}
            for (of, one), (card, other) in itertools.permutations(plans.items(), 2):
                if not _alike(of, card):
                    continue
                found = estimated(Question(recipe, card.with_(memory=ROOMY)), one.allocated, one.trace, of, card)
                reserved = replayed(found).reserved
                assert reserved is not None
                wrong.append((abs(found.allocated / other.allocated - 1), abs(reserved / other.reserved - 1)))
        report[name] = {"allocated": max(a for a, _ in wrong), "reserved": max(r for _, r in wrong), "pairs": len(wrong)}
    return report


def share() -> dict[str, Any]:
    """What live pictures take of a run's wall time, and what they do to its step."""
    lab = vl.Lab(vl.tasks.gpt("nano"), vl.Recipe(micro_batch=8), device="cpu")
    began: list[float] = []

    def until(run: Run) -> bool:
        began.append(time.perf_counter())
        lab.live.push(run)
        return began[-1] - began[0] > 15

    run = vl.run(lab.task, lab.recipe, steps=10**6, device="cpu", progress=False, record_every=20, on_step=until)
    wall = began[-1] - began[0]
    alone = vl.run(lab.task, lab.recipe, steps=max(40, len(run.reports) // 3), device="cpu", progress=False, record_every=20)
    frames = Live(lab.view.draw)
    for _ in range(50):
        frames.flush(run)
    seconds = [statistics.median(r.seconds for r in of.reports if r.memory is None) for of in (run, alone)]
    return {
        "share of wall time": lab.live.seconds / wall,
        "pictures a second": lab.live.frames / wall,
        "one picture (s)": frames.seconds / frames.frames,
        "step with pictures (s)": seconds[0],
        "step without (s)": seconds[1],
        "steps": len(run.reports),
    }


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    report = {"task": "gpt2, 1024 tokens", "card": CARD, "answers (s)": answers(), "live": share(), "another card": estimates()}
    for name, value in report["answers (s)"].items():
        print(
            f"{name:40}",
            {part: f"{v['median']:.3f}" if isinstance(v, dict) else f"{v:.3f}" for part, v in value.items()}
            if isinstance(value, dict)
            else f"{value:.2f}",
        )
    print(report["live"])
    print(report["another card"])
    write("lab", report)


if __name__ == "__main__":
    main()
