"""What optimizers hold: their state, the temporaries of a step, and when gradients and state are there; 8-bit AdamW."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import vramlab as vl
from vramlab.memory.trace import Category
from vramlab.techniques.adafactor import Adafactor
from vramlab.techniques.low_bit import _compiled_out_of_sight, adamw_8bit
from vramlab.training import train

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def step_extra(factory: Factory, shapes: list[tuple[int, ...]]) -> int:
    """The most bytes that a second step holds beside parameters, gradients and state."""
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = factory(params)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with vl.record(optimizer=optimizer) as trace:
        optimizer.step()
    assert trace.breakdown("end").total == trace.baseline
    return trace.peak - trace.baseline


TWENTY = [(1000,)] * 20
MATRICES = [(40, 25)] * 20


@pytest.mark.parametrize(
    ("factory", "shapes", "low", "high"),
    [
        (lambda p: torch.optim.AdamW(p, foreach=False), TWENTY, 3 * 4000, 3 * 4000),
        (lambda p: torch.optim.AdamW(p, foreach=True), TWENTY, 80_000, 80_000 + 400),
        (lambda p: torch.optim.AdamW(p, fused=True), TWENTY, 0, 100),
        (lambda p: torch.optim.SGD(p, foreach=False), TWENTY, 0, 0),
        (lambda p: torch.optim.SGD(p, foreach=True), TWENTY, 0, 0),
        (lambda p: Adafactor(p, foreach=False), TWENTY, 4000, 4000 + 20),
        (lambda p: Adafactor(p, foreach=True), TWENTY, 80_000, 80_000 + 400),
        (lambda p: Adafactor(p, foreach=False), MATRICES, 4000, 4000 + 4 * 40 + 20),
        (lambda p: torch.optim.Adafactor(p, foreach=False), MATRICES, 2 * 4000, 2 * 4000 + 400),
    ],
)
def test_the_temporaries_of_a_step_are_those_worked_out_by_hand(
    factory: Factory, shapes: list[tuple[int, ...]], low: int, high: int
) -> None:
    """source: pytorch/pytorch#97712, Lightning-AI/lit-llama#389"""
    assert low <= step_extra(factory, shapes) <= high


def test_on_the_cpu_foreach_is_not_the_default_so_that_a_measurement_there_must_ask_for_it() -> None:
    """source: pytorch/pytorch#97712"""
    assert step_extra(lambda p: torch.optim.AdamW(p), TWENTY) == 3 * 4000
    recipe = vl.Recipe(optimizer="adamw")
    assert recipe.optimizer_impl == "foreach"  # what the card would do


class Deep(nn.Module):
    """Activations of a multiple of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16, bias=False), nn.Tanh())))

    def forward(self, batch: int = 256) -> torch.Tensor:
        return self.layers(torch.ones(batch, 16)).square().mean()


def states(shape: int = 16 * 16, layers: int = 4) -> dict[str, tuple[Factory, int]]:
    return {
        "adamw": (lambda p: torch.optim.AdamW(p, foreach=True), layers * (2 * 4 * shape + 4)),
        "adafactor": (lambda p: Adafactor(p), layers * 4 * (16 + 16)),
        "adafactor with average": (lambda p: Adafactor(p, beta1=0.9), layers * 4 * (16 + 16 + shape)),
        "sgd": (lambda p: torch.optim.SGD(p), 0),
    }


# That a plan's peak is the one of a later step belongs to the planner's tests; here both steps are recorded.
@pytest.mark.parametrize("name", states())
def test_the_second_step_peaks_higher_than_the_first_by_the_state(name: str) -> None:
    """source: NVIDIA/Megatron-LM#4638. A resumed run has its state in the first forward already."""
    factory, state = states()[name]
    model = Deep()
    optimizer = factory(list(model.parameters()))
    traces = []
    for _ in range(3):
        with vl.record(model, optimizer) as trace:
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        traces.append(trace)
    assert traces[1].peak_phase in ("forward", "backward")  # activations dominate
    assert traces[1].peak - traces[0].peak == traces[1].breakdown("start").optimizer_state == state
    assert traces[2].peak == traces[1].peak

    again = Deep()
    resumed = factory(list(again.parameters()))
    resumed.load_state_dict(optimizer.state_dict())
    with vl.record(again, resumed) as trace:
        again().backward()
        resumed.step()
        resumed.zero_grad()
    assert trace.breakdown("start").optimizer_state == state
    assert trace.peak == traces[1].peak


def test_training_records_the_step_in_which_the_state_appears_and_the_one_after() -> None:
    """source: NVIDIA/Megatron-LM#4638"""
    task = vl.tasks.gpt("nano")
    steps = train(task, vl.Recipe(micro_batch=2), "cpu")
    first, second = next(steps).memory, next(steps).memory
    assert first.breakdown("start").optimizer_state == 0
    state = second.breakdown("start").optimizer_state
    assert state > 0
    assert second.breakdown("forward").total - first.breakdown("forward").total == state


def third_step(kind: Any, when: str) -> vl.MemoryTrace:
    """Of a loop that lets go of the gradients at a certain moment."""
    model = Deep()
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(3):
        with vl.record(model, optimizer) as trace:
            if when == "before forward":
                optimizer.zero_grad()
            loss = model()
            if when == "after forward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if when == "after step":
                optimizer.zero_grad()
            if when == "to zero":
                optimizer.zero_grad(set_to_none=False)
    return trace


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Adafactor])
def test_gradients_alive_during_forward_add_their_bytes_to_its_peak(kind: Any) -> None:
    """source: karpathy/nanoGPT#71, pytorch/pytorch#92731, pytorch/pytorch#42748"""
    gradients = 4 * 4 * 16 * 16
    forward = {when: third_step(kind, when).breakdown("forward") for when in ("after step", "before forward", "after forward", "to zero")}
    assert {when: breakdown.gradients for when, breakdown in forward.items()} == {
        "after step": 0,
        "before forward": 0,
        "after forward": gradients,
        "to zero": gradients,
    }
    assert forward["after forward"].total - forward["before forward"].total == gradients
    assert forward["to zero"].total - forward["after step"].total == gradients


def test_training_has_no_gradients_during_forward() -> None:
    """source: karpathy/nanoGPT#71"""
    steps = train(vl.tasks.gpt("nano"), vl.Recipe(micro_batch=2), "cpu")
    for _ in range(2):
        timeline = next(steps).memory.timeline()
        assert timeline[timeline["phase"] == "forward"][Category.GRADIENTS.label].max() == 0


# 8-bit AdamW


def test_without_torchao_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ImportError, match=r"torchao.optim.AdamW8bit, got: .*torchao.*; pip install --upgrade torchao"):
        adamw_8bit([nn.Parameter(torch.ones(2))])


def test_a_torchao_without_the_optimizer_is_refused_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", types.ModuleType("torchao.optim"))
    with pytest.raises(ImportError, match="got: cannot import name 'AdamW8bit'.*; pip install --upgrade torchao"):
        adamw_8bit([nn.Parameter(torch.ones(2))])


def test_with_torchao_its_optimizer_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    class AdamW8bit(torch.optim.AdamW):
        pass

    module = types.ModuleType("torchao.optim")
    module.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", module)
    optimizer = adamw_8bit([nn.Parameter(torch.ones(2))], lr=1e-4, betas=(0.8, 0.9), weight_decay=0.3)
    assert isinstance(optimizer, AdamW8bit)
    assert type(optimizer).__name__ == "AdamW8bit"
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.8, 0.9), 0.3)


class Compiling(torch.optim.Optimizer):
    """As torchao's: the state is made by operators, and what follows is compiled."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["average"] = torch.zeros_like(p)
            torch.compile(moved, fullgraph=True, backend="eager")(p.detach(), p.grad, self.state[p]["average"], self.param_groups[0]["lr"])


def moved(p: torch.Tensor, gradient: torch.Tensor, average: torch.Tensor, lr: float) -> None:
    average.lerp_(gradient, 0.1)
    p.sub_(average, alpha=lr)


@pytest.fixture(params=[False, True], ids=["first", "after one of its own"])
def compiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torchao could be; once an optimizer was made, torch has changed the class's step."""
    kind = type("AdamW8bit", (Compiling,), {"step": Compiling.step})
    if request.param:
        kind([nn.Parameter(torch.ones(2))], lr=1.0)
    module = types.ModuleType("torchao.optim")
    module.AdamW8bit = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", module)
    return kind


def test_a_compiled_step_works_while_it_is_recorded_and_its_state_is_seen(compiling: Any) -> None:
    layers = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [adamw_8bit(layers[0].parameters(), lr=0.5), compiling(layers[1].parameters(), lr=0.5)]
    calls: list[str] = []
    optimizers[0].register_step_post_hook(lambda *args: calls.append("stepped"))
    x = torch.randn(4, 16)
    for layer, optimizer in zip(layers, optimizers, strict=True):
        with vl.record(layer, optimizer) if layer is layers[0] else nullcontext() as trace:
            layer(x).square().sum().backward()
            optimizer.step()
        if trace is not None:
            assert trace.breakdown("end").optimizer_state == 4 * 16 * 16
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert calls == ["stepped"]


def saved_and_loaded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.save(optimizer, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "copied",
    [
        *(lambda optimizer, protocol=protocol: pickle.loads(pickle.dumps(optimizer, protocol)) for protocol in (0, 2, 5)),
        saved_and_loaded,
        copy.deepcopy,
    ],
    ids=["pickle 0", "pickle 2", "pickle 5", "torch.save", "deepcopy"],
)
def test_an_8_bit_optimizer_can_be_kept_and_goes_on_while_it_is_recorded(copied: Callable[[Any], Any]) -> None:
    optimizer = _compiled_out_of_sight(Compiling)([nn.Parameter(torch.randn(4))], lr=0.5)
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones(4)
    optimizer.step()
    again = copied(optimizer)
    assert type(again) is type(optimizer)
    (q,) = again.param_groups[0]["params"]
    assert again.state[q]["average"].equal(optimizer.state[p]["average"])
    q.grad = torch.ones(4)
    optimizer.step()
    with vl.record(optimizer=again) as trace:
        again.step()
    assert trace.breakdown("end").optimizer_state == 4 * 4
    assert torch.equal(p, q)


def test_a_compiled_step_takes_a_closure(compiling: Any) -> None:
    layer = nn.Linear(4, 1, bias=False)
    before = layer.weight.detach().clone()

    def closure() -> torch.Tensor:
        loss = layer(torch.ones(4)).sum()
        loss.backward()
        return loss

    loss = adamw_8bit(layer.parameters(), lr=1.0).step(closure)
    assert loss == before.sum()
    torch.testing.assert_close(layer.weight, before - 0.1)


def test_without_torchao_but_with_its_like_a_run_learns(compiling: Any) -> None:
    run = vl.run(vl.tasks.gpt("nano"), vl.Recipe(optimizer="adamw-8bit", micro_batch=2), steps=3, device="cpu", progress=False)
    assert run.status == "finished"
    assert run.breakdown.optimizer_state == run.breakdown.parameters
