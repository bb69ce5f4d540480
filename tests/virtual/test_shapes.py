"""A remembered result is what torch's fake mode computes: same shapes, strides, storages and aliases."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vramlab as vl
from vramlab.memory.trace import Events
from vramlab.virtual import shapes
from vramlab.virtual.device import VirtualGPU, virtual_gpu

RECIPES = {
    "plain": vl.Recipe(micro_batch=2),
    "amp": vl.Recipe(micro_batch=2, precision="amp-bf16", checkpointing="blocks", accumulation=2),
    "selective": vl.Recipe(micro_batch=2, checkpointing="selective", optimizer="adafactor"),
    "loop": vl.Recipe(micro_batch=2, optimizer_impl="loop", attention="math", clip_norm=1.0),
}
TASKS: dict[str, Callable[[], vl.Task]] = {
    "gpt": lambda: vl.tasks.gpt("nano", dropout=0.1),
    "llama": lambda: vl.tasks.gpt("llama-nano"),
    "vit": lambda: vl.tasks.vit("nano"),
    "resnet": lambda: vl.tasks.resnet("nano"),
}


def events(task: vl.Task, recipe: vl.Recipe) -> Events:
    with virtual_gpu("RTX 4090") as gpu, closing(vl.train(task, recipe, gpu.device, record_every=None)) as steps:
        for _ in itertools.islice(steps, 2):
            pass
        return gpu.trace.events


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("task", TASKS)
def test_a_step_is_the_same_computed_and_remembered(task: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if task in ("vit", "resnet") and recipe == "selective":
        recipe = "plain"
    with monkeypatch.context() as patch:
        patch.setattr(shapes, "_repeatable", {})
        patch.setattr(shapes, "_is_repeatable", lambda func: False)
        computed = events(TASKS[task](), RECIPES[recipe])
    learned = events(TASKS[task](), RECIPES[recipe])
    before = len(shapes._known)
    remembered = events(TASKS[task](), RECIPES[recipe])
    assert len(shapes._known) == before > 0
    for other in (learned, remembered):
        for name in ("storage", "nbytes", "category", "phase"):
            assert np.array_equal(getattr(computed, name), getattr(other, name)), name
        assert computed.moves == other.moves


def described(value: Any, named: dict[int, int]) -> Any:
    """Everything that can be told of a result without its values; storages by the order in which they are met."""
    if isinstance(value, torch.Tensor):
        key = value.untyped_storage()._cdata
        number = named.setdefault(key, len(named))
        return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, number, value.untyped_storage().nbytes())
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(item, named) for item in value]
    return type(value), value


CALLS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.t(),
    lambda x: x[1:],
    lambda x: x[:, ::2],
    lambda x: x.split(2, 1),
    lambda x: x.unbind(0),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.view(-1),
    lambda x: x.view(torch.int32),
    lambda x: x.detach(),
    lambda x: x.add_(1),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.max(1),
    lambda x: x.topk(2),
    lambda x: x.sort(),
    lambda x: x.double(),
    lambda x: x.to(torch.bfloat16),
    lambda x: x * True,
    lambda x: x * 1,
    lambda x: x * 2.5,
    lambda x: torch.cat([x, x]),
    lambda x: torch.stack([x, x.clone()]),
    lambda x: torch.zeros_like(x),
    lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    lambda x: torch.var_mean(x, 1),
    lambda x: torch._foreach_add([x, x[0]], 1.0),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: torch.nn.functional.dropout(x, 0.5),
    lambda x: x.new_full((3,), 7),
    lambda x: torch.arange(5, device=x.device),
    lambda x: torch.arange(5.0, device=x.device),
    lambda x: x @ x.t(),
    lambda x: x.unfold(1, 2, 1),
    lambda x: x.argmax(0),
    lambda x: x > 0,
    lambda x: torch.where(x > 0, x, 0.0),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_call_gives_the_same_again_and_again(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(2, 5), st.integers(4, 6)))
    transposed, sliced = data.draw(st.booleans()), data.draw(st.booleans())
    calls = [data.draw(st.sampled_from(CALLS)) for _ in range(4)]

    def run() -> Any:
        with virtual_gpu("RTX 4090") as gpu:
            x = torch.randn(*shape[::-1], device=gpu.device).t() if transposed else torch.randn(*shape, device=gpu.device)
            if sliced:
                x = torch.randn(shape[0] + 2, shape[1], device=gpu.device)[2:]
            named: dict[int, int] = {}
            told, kept = [described(x, named)], []
            for call in calls:
                try:
                    kept.append(call(x))  # alive, so that no address comes back
                    told.append(described(kept[-1], named))
                except (RuntimeError, ValueError) as error:
                    told.append(str(error))
            return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_repeatable", {})
        patch.setattr(shapes, "_is_repeatable", lambda func: False)
        computed = run()
    assert run() == computed
    assert run() == computed


def test_numbers_that_are_equal_and_of_other_types_are_told_apart(gpu: VirtualGPU) -> None:
    x = torch.zeros(4, dtype=torch.int64, device=gpu.device)
    for _ in range(2):
        assert [(x * n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_the_default_type_is_part_of_the_question(gpu: VirtualGPU) -> None:
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert torch.ones(3, device=gpu.device).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_what_changes_a_shape_in_place_is_computed_each_time(gpu: VirtualGPU) -> None:
    for _ in range(2):
        x = torch.zeros(2, 3, device=gpu.device)
        x.t_()
        assert x.shape == (3, 2)
        x.resize_(4, 4)
        assert x.shape == (4, 4)
        x.unsqueeze_(0)
        assert x.shape == (1, 4, 4)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: getattr(torch, name) for name in ("sum", "mean", "prod", "any", "all", "max", "min", "argmax", "median")},
    **{name: functools.partial(getattr(torch, name), correction=0) for name in ("var", "std")},
    **{name: (lambda t, name=name: getattr(torch, name)(t, -1)) for name in ("logsumexp", "cumsum", "softmax", "log_softmax")},
    "amax": torch.amax,
    "along": lambda t: t.sum(-1),
    "norm": torch.linalg.vector_norm,
    "kept": lambda t: t.sum(-1, keepdim=True),
}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5, 1), (1, 5)])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("card", ["RTX 4090", "T4"])
def test_a_few_numbers_and_a_single_one_are_reduced_too(name: str, shape: tuple[int, ...], card: str) -> None:
    def layout(result: Any) -> list[Any]:
        return [(t.shape, t.dtype, t.stride()) for t in ([result] if isinstance(result, torch.Tensor) else result)]

    with virtual_gpu(card) as gpu:
        assert layout(REDUCTIONS[name](torch.ones(shape, device=gpu.device))) == layout(REDUCTIONS[name](torch.ones(shape)))


class Scaled(torch.nn.Module):
    """A parameter of no dimension, as CLIP's ``logit_scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.exp()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_a_parameter_of_no_dimension_is_trained(optimizer: str) -> None:
    task = vl.Task(
        model=Scaled, batch=lambda n, device: torch.zeros(n, 8, device=device), loss=lambda model, x: (model(x).mean().mean(), len(x))
    )
    trace = events(task, vl.Recipe(optimizer=optimizer, clip_norm=1.0))
    assert trace.nbytes[trace.category == 0].sum() == 4 * (64 + 8 + 1)
