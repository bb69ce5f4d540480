"""Judges of the bytes: a real run on the CPU, the allocator's own counters, a replay of the events, a recorder inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import vramlab as vl
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.trace import Category, MemoryTrace
from vramlab.virtual.device import VirtualGPU, virtual_gpu

Loop = Callable[[torch.device], None]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _vectors(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 32, device=device), torch.zeros(size, dtype=torch.long, device=device)


def _images(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 16, 16, device=device), torch.zeros(size, dtype=torch.long, device=device)


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


SGD = lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)  # noqa: E731
MOMENTUM = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False)  # noqa: E731
ADAMW = lambda p: torch.optim.AdamW(p, foreach=False)  # noqa: E731
FOREACH = lambda p: torch.optim.AdamW(p, foreach=True)  # noqa: E731


def _loop(model: Any, batch: Any, optimizer: Any = ADAMW, steps: int = 2, accumulation: int = 1, set_to_none: bool = True) -> Loop:
    def run(device: torch.device) -> None:
        net = model().to(device)
        opt = optimizer(net.parameters())
        for _ in range(steps):
            for _ in range(accumulation):
                x, y = batch(8, device)
                F.cross_entropy(net(x).flatten(1), y).backward()
            opt.step()
            opt.zero_grad(set_to_none)

    return run


def _task(name: str, recipe: vl.Recipe) -> Loop:
    task = {
        "gpt": lambda: vl.tasks.gpt("nano", sequence=16),
        "resnet": lambda: vl.tasks.resnet("nano"),
    }[name]()

    def run(device: torch.device) -> None:
        net = task.model().to(device)
        if recipe.checkpointing == "blocks":
            vl.techniques.checkpoint_blocks(net)
        opt = ADAMW(net.parameters())
        for _ in range(2):
            for _ in range(recipe.accumulation):
                total, count = task.loss(net, task.batch(recipe.micro_batch, device))
                (total / count).backward()
            opt.step()
            opt.zero_grad()

    return run


LOOPS: dict[str, Loop] = {
    "mlp": _loop(_mlp, _vectors),
    "mlp, sgd": _loop(_mlp, _vectors, SGD),
    "mlp, momentum": _loop(_mlp, _vectors, MOMENTUM),
    "mlp, foreach": _loop(_mlp, _vectors, FOREACH),
    "mlp, gradients kept": _loop(_mlp, _vectors, set_to_none=False, steps=3),
    "mlp, accumulation": _loop(_mlp, _vectors, accumulation=3),
    "conv": _loop(_conv, _images),
    "checkpointed": _loop(lambda: _Checkpointed(False), _vectors),
    "checkpointed, reentrant": _loop(lambda: _Checkpointed(True), lambda n, d: (_vectors(n, d)[0].requires_grad_(), _vectors(n, d)[1])),
    "rnn": _loop(lambda: nn.Sequential(nn.Unflatten(1, (4, 8)), nn.LayerNorm(8), nn.Flatten(), nn.Linear(32, 8)), _vectors),
}


def without_workspaces(trace: MemoryTrace) -> MemoryTrace:
    events = trace.events
    keep = events.category != Category.WORKSPACE
    numbers = np.cumsum(keep) - 1
    moves = frozenset(int(numbers[i]) for i in events.moves)
    columns = {n: getattr(events, n)[keep] for n in ("storage", "nbytes", "category", "module", "phase", "operator", "line")}
    seeds = int(np.count_nonzero(keep[: events.seeds]))
    steps = tuple((int(np.count_nonzero(keep[:end])), whose) for end, whose in events.steps)
    return MemoryTrace(replace(events, **columns, moves=moves, seeds=seeds, steps=steps))


def virtual(loop: Loop) -> VirtualGPU:
    with virtual_gpu("RTX 4090", limited=False) as gpu:
        loop(gpu.device)
    return gpu


def on_cpu(loop: Loop) -> int:
    """The peak of a real run. Adam's step counters, 4 bytes each, are in host memory, which is another place on a card."""
    with vl.record() as trace:
        loop(torch.device("cpu"))
    live = trace.holders(10_000)
    return trace.peak - int(live[(live["category"] == "optimizer state") & (live["bytes"] == 4)]["bytes"].sum())


@pytest.mark.parametrize("name", LOOPS)
def test_the_peak_is_that_of_a_real_run_on_the_cpu(name: str) -> None:
    expected, planned = on_cpu(LOOPS[name]), without_workspaces(virtual(LOOPS[name]).trace)
    assert planned.peak == expected, planned.breakdown()


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("expandable", [False, True])
def test_what_the_allocator_counted_is_what_the_trace_says_and_what_a_replay_gives(name: str, expandable: bool) -> None:
    with virtual_gpu("RTX 4090", expandable_segments=expandable) as gpu:
        LOOPS[name](gpu.device)
        events = gpu.trace.events
        assert gpu.allocated == gpu.trace.rounded().events.nbytes.sum()
    assert gpu.peak_allocated == gpu.trace.rounded().peak
    again = CachingAllocator(expandable_segments=expandable)
    again.replay(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True), events.moves)
    assert (again.peak_allocated, again.peak_reserved) == (gpu.peak_allocated, gpu.peak_reserved)
    assert (again.allocated, again.reserved) == (gpu.allocated, gpu.reserved)


@pytest.mark.parametrize("name", LOOPS)
def test_a_recorder_inside_sees_what_the_card_sees(name: str) -> None:
    with virtual_gpu("RTX 4090") as gpu:
        with vl.record(device=gpu.device) as trace:
            LOOPS[name](gpu.device)
    card = without_workspaces(gpu.trace)
    assert trace.peak == card.peak
    assert [n for n in trace.events.nbytes if n] == [n for n in card.events.nbytes if n]


GPT = {
    "plain": vl.Recipe(micro_batch=2, attention="math"),
    "accumulation": vl.Recipe(micro_batch=2, attention="math", accumulation=2),
    "blocks": vl.Recipe(micro_batch=2, attention="math", checkpointing="blocks"),
}


@pytest.mark.parametrize("recipe", GPT)
def test_a_transformer_is_planned_as_it_runs_on_the_cpu(recipe: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    loop = _task("gpt", GPT[recipe])

    def math_only(device: torch.device) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            loop(device)

    expected, planned = on_cpu(math_only), without_workspaces(virtual(math_only).trace)
    assert planned.peak == expected, planned.breakdown()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_convolutional_network_is_planned_as_it_runs_on_the_cpu(accumulation: int) -> None:
    loop = _task("resnet", vl.Recipe(micro_batch=2, accumulation=accumulation))
    expected, planned = on_cpu(loop), without_workspaces(virtual(loop).trace)
    assert planned.peak == expected, planned.breakdown()
