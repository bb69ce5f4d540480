"""Laws against full traces: over the micro-batch, the sequence length and the depth; and recipes that share a trace."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vramlab import gpus, tasks
from vramlab.memory import steady
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.depth import DepthLaw
from vramlab.memory.law import LawError, MemoryLaw
from vramlab.memory.trace import MemoryTrace
from vramlab.planning import trace_steps, with_same_bytes
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.tasks.models import DECODERS, decoder

CARD = gpus.gpu("RTX 4090")


def traced(task: Task, **options: Any) -> tuple[int, int, MemoryTrace]:
    """What a plan says: allocated, reserved, and the trace."""
    found = trace_steps(task, Recipe(**options), CARD)
    reserved = steady.replay(steady.rows_of(found["trace"].events), CachingAllocator()).peak_reserved
    return found["allocated"], reserved, found["trace"]


# The micro-batch

AMP = {"precision": "amp-bf16"}
FAMILIES: dict[str, tuple[Task, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "gpt2": (tasks.gpt("gpt2"), AMP, (2, 3, 12, 32), (2, 3, 4, 5, 7, 8, 12, 16, 21, 32)),
    "resnet18": (tasks.resnet("resnet18"), AMP, (2, 3, 31, 200), (2, 3, 5, 8, 16, 24, 31, 64, 128, 200)),
    "gpt2-xl": (tasks.gpt("gpt2-xl"), AMP | {"optimizer_impl": "fused"}, (2, 3, 8), (2, 3, 4, 6, 8)),
}
"""Task, recipe, the micro-batches that make the law, and those where it is compared."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_law_is_the_full_trace_to_the_byte(name: str) -> None:
    task, options, made_of, sizes = FAMILIES[name]
    truth = {n: traced(task, micro_batch=n, **options) for n in {*made_of, *sizes}}
    law = MemoryLaw({n: truth[n][2] for n in made_of})
    for n in sizes:
        allocated, reserved, trace = truth[n]
        assert (law.peak(n), law.replayed(n).peak_reserved) == (allocated, reserved), n
        assert law.tensors(n) == trace.rounded().peak
        # A later step may find a block with an end that it keeps.
        assert allocated <= law.replayed(n).peak_allocated <= 1.005 * allocated


# The sequence length


def compare(law: MemoryLaw, n: int, allocated: int, reserved: int) -> None:
    """To the byte, or near where the law says that it has to guess what kernels take."""
    found = law.peak(n), law.replayed(n).peak_reserved
    assert found == ((allocated, reserved) if law.is_exact(n) else pytest.approx((allocated, reserved), rel=0.05)), n


@pytest.mark.parametrize("options", [{"precision": "amp-bf16"}, {"checkpointing": "blocks", "optimizer_impl": "loop"}], ids=str)
def test_the_sequence_is_a_parabola_with_written_out_attention(options: dict[str, Any]) -> None:
    def at(sequence: int) -> tuple[int, int, MemoryTrace]:
        return traced(tasks.gpt("mini", sequence=sequence), micro_batch=16, attention="math", **options)

    truth = {s: at(s) for s in (16, 32, 48, 64, 96, 128)}
    made_of = {s: truth[s][2] for s in (16, 32, 64, 128)}
    law = MemoryLaw(made_of, degree=2, over="sequence")
    for sequence, (allocated, reserved, _) in truth.items():
        compare(law, sequence, allocated, reserved)
    with pytest.raises(LawError, match="is no straight line over the sequence"):
        MemoryLaw(made_of, over="sequence")


def test_the_sequence_is_a_straight_line_with_fused_attention() -> None:
    truth = {s: traced(tasks.gpt("mini", sequence=s), micro_batch=16, precision="amp-bf16") for s in (64, 80, 96, 128)}
    law = MemoryLaw({s: truth[s][2] for s in (64, 96, 128)}, over="sequence")
    for sequence, (allocated, reserved, _) in truth.items():
        compare(law, sequence, allocated, reserved)


# The depth


def deep(size: str, depth: int, sequence: int) -> Task:
    """A GPT of another depth."""
    config = replace(DECODERS[size], layers=depth, sequence=sequence)
    return replace(tasks.gpt(size, sequence=sequence), model=lambda: decoder(config))


DEPTHS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "foreach": ("mini", 14, 32, {"micro_batch": 8}),
    "checkpointed": ("mini", 14, 32, {"micro_batch": 8, "checkpointing": "blocks", "precision": "amp-bf16"}),
    "loop, clipped": ("mini", 9, 32, {"micro_batch": 8, "optimizer_impl": "loop", "clip_norm": 1.0, "precision": "amp-bf16"}),
    "scaled windows": ("mini", 9, 32, {"accumulation": 3, "micro_batch": 2, "precision": "amp-fp16", "checkpointing": "selective"}),
    "in backward": ("mini", 9, 32, {"micro_batch": 8, "optimizer_in_backward": True}),
    "offloaded": ("mini", 9, 32, {"micro_batch": 8, "offload": "activations", "optimizer": "adafactor", "optimizer_impl": "loop"}),
    "llama": ("llama-nano", 9, 32, {"micro_batch": 8, "precision": "bf16"}),
    "gpt2-xl": ("gpt2-xl", 48, 64, {"micro_batch": 1, "checkpointing": "blocks", "precision": "amp-bf16"}),
}
"""Size, the depth where the law is compared, tokens, recipe."""


@pytest.mark.parametrize("name", DEPTHS)
def test_the_law_over_the_depth_is_the_full_trace_to_the_byte(name: str) -> None:
    size, depth, sequence, options = DEPTHS[name]
    truth = {n: traced(deep(size, n, sequence), **options) for n in (2, 3, 4, 6, depth)}
    law = DepthLaw({n: truth[n][2] for n in (2, 3, 4, 6)})
    for n, (allocated, reserved, _) in truth.items():
        assert (law.peak(n), law.replayed(n).peak_reserved) == (allocated, reserved), n


def test_the_peak_over_the_depth_is_no_straight_line() -> None:
    """Where blocks are checkpointed it stands in the loss of a shallow model and in the step of a deep one."""
    options = {"micro_batch": 8, "checkpointing": "blocks"}
    traces = {n: traced(deep("mini", n, 128), **options)[2] for n in (2, 3, 4, 6)}
    law, deepest = DepthLaw(traces), traced(deep("mini", 24, 128), **options)
    assert (traces[2].peak_phase, deepest[2].peak_phase) != ("step", "forward")
    assert law.peak(24) == deepest[0]
    line = law.peak(2) + 22 * (law.peak(3) - law.peak(2))
    assert abs(line / deepest[0] - 1) > 0.05


class Widening(nn.Module):
    """Each block is wider than the one before."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(64 * (i + 1), 64 * (i + 2)) for i in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def summed(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


def test_blocks_that_are_not_equal_have_no_law_over_the_depth() -> None:
    def widening(depth: int) -> Task:
        return Task(lambda: Widening(depth), lambda n, device: torch.zeros(n, 64).to(device), summed)

    with pytest.raises(LawError, match=r"The step at 3 blocks does other things than with fewer|is not that at 2"):
        DepthLaw({n: traced(widening(n))[2] for n in (2, 3, 4, 5)})


# Recipes with the same bytes


@functools.cache
def events_of(task: str, **options: Any) -> list[np.ndarray]:
    made = {"gpt": tasks.gpt("nano"), "resnet": tasks.resnet("nano"), "vit": tasks.vit("nano")}[task]
    events = traced(made, **options)[2].events
    return [events.storage, events.nbytes, events.category, events.phase, np.array(sorted(events.moves))]


def same_events(task: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(events_of(task, **one), events_of(task, **other), strict=True)
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)


@pytest.mark.parametrize("task", ["gpt", "resnet", "vit"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"precision": "fp32"}, {"precision": "tf32"}),
        ({"precision": "amp-fp16"}, {"precision": "amp-fp16", "loss_scale": 1.0}),
        ({"clip_norm": 1.0}, {"clip_norm": 0.1}),
        ({"accumulation": 3}, {"accumulation": 7}),
        ({"checkpoint_every": 2}, {}),
    ],
    ids=str,
)
def test_recipes_that_share_a_trace_have_the_same(task: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert with_same_bytes(Recipe(**one)) == with_same_bytes(Recipe(**other))
    if "accumulation" not in one:
        assert same_events(task, one, other)
    else:
        assert traced(tasks.gpt("nano"), **one)[:2] == traced(tasks.gpt("nano"), **other)[:2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"precision": "amp-fp16"}, {"precision": "amp-bf16"}),  # the loss scaler's own tensors
        ({"precision": "fp32"}, {"precision": "amp-bf16"}),
        ({"clip_norm": 1.0}, {}),
        ({"accumulation": 2}, {"accumulation": 3}),
        ({"checkpointing": "blocks"}, {"checkpointing": "blocks", "checkpoint_every": 2}),
        ({"optimizer_impl": "loop"}, {"optimizer_impl": "foreach"}),
        ({"micro_batch": 2}, {"micro_batch": 3}),
    ],
    ids=str,
)
def test_recipes_whose_steps_differ_share_none(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert with_same_bytes(Recipe(**one)) != with_same_bytes(Recipe(**other))
    assert not same_events("gpt", one, other)
