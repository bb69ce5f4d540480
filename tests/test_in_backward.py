"""Optimizer in backward: the bits of the ordinary loop, the bytes it saves and where it saves none, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import vramlab as vl
from vramlab.memory.trace import Category
from vramlab.techniques import checkpoint_blocks
from vramlab.techniques.adafactor import Adafactor
from vramlab.techniques.in_backward import StepInBackward, step_in_backward
from vramlab.techniques.losses import chunked_cross_entropy

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

FACTORIES: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adafactor": lambda p: Adafactor(p, lr=1e-2),
    "adafactor relative": lambda p: Adafactor(p, weight_decay=0.1, beta1=0.9),
}


class Tied(nn.Module):
    """A language model whose head is its embedding, and whose layers share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, step: int) -> torch.Tensor:
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
        hidden = self.frozen(torch.tanh(self.second(torch.tanh(self.first(self.embedding(tokens))))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Blocks(nn.Module):
    """Blocks with dropout, checkpointed or not."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 6)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        if checkpointed:
            checkpoint_blocks(self)

    def forward(self, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        x = torch.randn(4, 6)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Chunked(nn.Module):
    """A tied head inside a chunked loss, whose weight gets a gradient from each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, step: int) -> torch.Tensor:
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
        return chunked_cross_entropy(self.layer(self.embedding(tokens)), self.embedding.weight, tokens, chunks=3)


class Mlp(nn.Module):
    def __init__(self, width: int = 6, layers: int = 3, batch: int = 4) -> None:
        super().__init__()
        self.batch = batch
        self.layers = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.Tanh())))

    def forward(self, step: int) -> torch.Tensor:
        x = torch.randn(self.batch, self.layers[0].in_features, generator=torch.Generator().manual_seed(step))
        return self.layers(x).square().mean()


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3), scheduler: Any = None) -> list[torch.Tensor]:
    """Some steps of the ordinary loop; returns the gradients that arrived, in the order of the parameters."""
    seen: dict[nn.Parameter, list[torch.Tensor]] = {p: [] for p in model.parameters() if p.requires_grad}
    handles = [p.register_hook(lambda gradient, p=p: seen[p].append(gradient.clone())) for p in seen]
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    for handle in handles:
        handle.remove()
    return [gradient for gradients in seen.values() for gradient in gradients]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
@pytest.mark.parametrize("kind", [Mlp, Tied, Blocks, Chunked])
def test_gradients_and_parameters_are_those_of_the_ordinary_loop_to_the_bit(kind: type[nn.Module], factory: Factory) -> None:
    model, other = build(kind), build(kind)
    before = copy.deepcopy(model.state_dict())
    gradients = train(model, factory([p for p in model.parameters() if p.requires_grad]))
    others = train(other, step_in_backward(other, factory))
    assert len(gradients) == len(others) > 0
    assert all(map(torch.equal, gradients, others))
    assert_same(model, other)
    changed = {name for name, value in other.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not name.startswith(("unused", "frozen"))}
    assert all(p.grad is None for p in other.parameters())


def test_checkpointed_blocks_get_the_gradients_of_plain_ones() -> None:
    torch.manual_seed(0)
    plain = Blocks(checkpointed=False)
    model = build(Blocks)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    gradients = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert all(map(torch.equal, gradients, train(model, optimizer)))


def test_a_tied_parameter_is_stepped_once_with_all_its_contributions() -> None:
    model = build(Tied)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer)
    assert optimizer.state[model.head.weight]["step"] == 3
    assert "embedding.weight" in optimizer.state_dict()
    assert "head.weight" not in optimizer.state_dict()


def test_a_parameter_shared_between_two_modules_of_one_model_is_stepped_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second})
    with torch.no_grad():
        first.weight.fill_(1.0)
    optimizer = step_in_backward(model, FACTORIES["sgd"])
    (first(torch.ones(1, 3)) + second(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    assert torch.equal(first.weight, torch.full((3, 3), 1 - 0.1 * 2))
    assert list(optimizer.state_dict()) == ["a.weight"]


def test_unused_and_frozen_parameters_stay_and_the_unused_have_an_empty_state() -> None:
    model = build(Tied)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer)
    saved = optimizer.state_dict()
    assert saved["unused.weight"]["state"] == {}
    assert not any(name.startswith("frozen") for name in saved)
    assert model.unused.weight not in optimizer.state


def test_a_parameter_frozen_later_stays() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer)
    model.layers[0].requires_grad_(False)
    before = model.layers[0].weight.clone()
    for step in (3, 4):
        model(step).backward()
        optimizer.step()
    assert torch.equal(model.layers[0].weight, before)


# Bytes. Which phase peaks is read from a recorded step here; that a plan says the same belongs to the planner's tests.


def peaks(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[vl.MemoryTrace, int]:
    """The trace of the third step, and the most gradient bytes at any moment of it."""
    optimizer = make(model)
    train(model, optimizer, range(2))
    with vl.record(model, optimizer) as trace:
        model(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trace, int(trace.timeline()[Category.GRADIENTS.label].max())


def test_a_wide_network_saves_all_gradients_but_one_layers() -> None:
    """source: pytorch/tutorials#2568"""
    width, layers = 256, 6
    matrix = 4 * width * width
    plain, gradients = peaks(Mlp(width, layers, 1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=False))
    ours, few = peaks(Mlp(width, layers, 1), lambda m: step_in_backward(m, FACTORIES["sgd"]))
    assert gradients == layers * matrix
    assert matrix <= few <= 2 * matrix
    assert plain.peak - ours.peak >= (layers - 2) * matrix
    assert plain.baseline == ours.baseline


def test_a_narrow_network_with_many_activations_saves_nothing_and_the_trace_says_why() -> None:
    """source: pytorch/tutorials#2568"""
    width, layers, batch = 8, 6, 512
    plain, gradients = peaks(Mlp(width, layers, batch), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    ours, few = peaks(Mlp(width, layers, batch), lambda m: step_in_backward(m, FACTORIES["sgd"]))
    assert few < gradients == layers * 4 * width * width
    assert abs(plain.peak - ours.peak) <= gradients
    assert (plain.peak - ours.peak) / plain.peak < 0.01
    assert ours.peak_phase in ("forward", "backward")


def test_adams_temporaries_in_the_step_fall_to_those_of_one_parameter() -> None:
    width, layers = 128, 6
    matrix = 4 * width * width
    plain, _ = peaks(Mlp(width, layers, 1), lambda m: torch.optim.AdamW(m.parameters(), foreach=True))
    ours, _ = peaks(Mlp(width, layers, 1), lambda m: step_in_backward(m, lambda p: torch.optim.AdamW(p, foreach=True)))
    assert plain.peak - plain.baseline >= 2 * layers * matrix  # gradients, and foreach's list
    assert ours.peak - ours.baseline <= 4 * matrix


def test_a_recording_counts_the_state_from_the_start_and_its_growth_is_zero() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer, range(1))
    with vl.record(model, optimizer) as trace:
        for step in range(1, 5):
            model(step).backward()
            optimizer.step()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert trace.breakdown("start").optimizer_state == state
    assert trace.breakdown("end").optimizer_state == state
    assert trace.growth().total == 0


# Schedulers and state


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "adafactor relative"])
def test_a_scheduler_sets_the_rates_of_all_parameters_in_one_call(name: str, schedule: Any) -> None:
    """source: pytorch/torchtitan#4598, pytorch/torchtitan#780"""
    model, other = build(Mlp), build(Mlp)
    ordinary, ours = FACTORIES[name](list(model.parameters())), step_in_backward(other, FACTORIES[name])
    scheduler, its = schedule(ordinary), schedule(ours)
    train(model, ordinary, range(5), scheduler)
    train(other, ours, range(5), its)
    assert_same(model, other)
    assert set(its.get_last_lr()) == set(scheduler.get_last_lr())
    assert {group["lr"] for group in ours.param_groups} == {ordinary.param_groups[0]["lr"]}


def test_a_plateau_scheduler_works() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["sgd"])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(2):
        train(model, optimizer, range(1))
        scheduler.step(1.0)
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}


def test_a_rate_set_by_hand_is_the_one_used() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    train(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("early", [True, False], ids=["scheduler before loading", "scheduler after loading"])
@pytest.mark.parametrize("name", ["momentum", "adamw", "adafactor", "adafactor relative"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(name: str, early: bool) -> None:
    """source: pytorch/torchtitan#4598, pytorch/torchtitan#780, pytorch/torchtitan#4168"""
    model = build(Tied)
    optimizer = step_in_backward(model, FACTORIES[name])
    scheduler = SCHEDULERS["cosine"](optimizer)
    train(model, optimizer, range(3), scheduler)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert saved["optimizer"].keys() == trained
    train(model, optimizer, range(3, 6), scheduler)

    torch.manual_seed(99)
    other = Tied()
    other.load_state_dict(saved["model"])
    resumed = step_in_backward(other, FACTORIES[name])
    again = SCHEDULERS["cosine"](resumed) if early else None
    resumed.load_state_dict(saved["optimizer"])
    again = again or SCHEDULERS["cosine"](resumed)
    again.load_state_dict(saved["scheduler"])
    if not early:  # a new scheduler has set the first rate: as with every torch optimizer, load the optimizer after it
        resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, range(3, 6), again)
    assert_same(model, other)
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups] == again.get_last_lr()


def test_bf16_with_stochastic_rounding_resumes_to_the_bit() -> None:
    def run() -> tuple[nn.Module, StepInBackward]:
        model = build(Tied).to(torch.bfloat16)
        return model, step_in_backward(model, lambda p: Adafactor(p, lr=1e-2))

    model, optimizer = run()
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    other, resumed = run()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, range(3, 6))
    assert_same(model, other)


def test_a_state_of_other_parameters_is_refused_by_name_and_nothing_is_loaded() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(saved)
    wrong["elsewhere"] = wrong.pop("layers.0.weight")
    text = r"a name for each trained parameter; missing are \['layers.0.weight'\], unknown \['elsewhere'\]. Load what state_dict\(\)"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"unknown \['param_groups', 'state'\]"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    assert str(optimizer.state_dict()) == str(saved)


# What is refused


def test_accumulation_is_refused_with_the_parameters_name_and_training_can_go_on() -> None:
    """source: pytorch/pytorch#124523, verl-project/verl#2558"""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = step_in_backward(model, FACTORIES["sgd"])
    x = torch.ones(1, 2)
    model(x).sum().backward()
    assert torch.equal(model.weight, torch.full((1, 2), 0.9))
    text = "'weight' got a second one before step(): it cannot accumulate. Call step() after each backward, or use an ordinary optimizer."
    with pytest.raises(RuntimeError, match=re.escape(text)):
        model(x).sum().backward()
    assert torch.equal(model.weight, torch.full((1, 2), 0.9))  # one update and not two
    assert model.weight.grad is None  # nor does the next step find the refused gradient
    optimizer.step()
    model(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 0.8))


def test_after_a_refused_accumulation_training_is_as_if_it_had_not_been_tried() -> None:
    model, other = build(Tied), build(Tied)
    optimizer, its = (step_in_backward(m, FACTORIES["adamw"]) for m in (model, other))
    train(model, optimizer)
    for step in range(3):
        other(step).backward()
        with pytest.raises(RuntimeError, match="cannot accumulate"):
            other(step).backward()
        its.step()
        its.zero_grad()
    assert_same(model, other)


def test_two_losses_of_different_parameters_are_no_accumulation() -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = step_in_backward(model, FACTORIES["sgd"])
    for _ in range(2):
        for part in model:
            part(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_gradients_without_backward_step_nothing() -> None:
    model = build(Mlp)
    before = copy.deepcopy(model.state_dict())
    step_in_backward(model, FACTORIES["sgd"])
    torch.autograd.grad(model(0), list(model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_refused_with_the_reason_and_later_steps_are_not(unscale: bool) -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(0)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    text = r"GradScaler must see all gradients before a step, .* one by one, still scaled. Load the parameters again, and use bf16 autocast"
    with pytest.raises(RuntimeError, match=text):
        scaler.step(optimizer)
    train(model, optimizer)


def test_a_grad_scaler_that_is_switched_off_is_fine() -> None:
    model, other = build(Mlp), build(Mlp)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer = step_in_backward(other, FACTORIES["adamw"])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        scaler.scale(other(step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same(model, other)


def test_a_closure_is_refused() -> None:
    optimizer = step_in_backward(build(Mlp), FACTORIES["sgd"])
    with pytest.raises(RuntimeError, match=r"takes no closure, for backward is the step; call backward\(\), then step\(\)"):
        optimizer.step(lambda: 0.0)


def test_further_parameters_are_refused() -> None:
    optimizer = step_in_backward(build(Mlp), FACTORIES["sgd"])
    groups = len(optimizer.param_groups)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"from the model, once; .* call remove\(\) and step_in_backward"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        optimizer.remove()
    assert len(optimizer.param_groups) == groups


@pytest.mark.parametrize("model", [nn.Linear(2, 2).requires_grad_(False), nn.Tanh()])
def test_a_model_with_nothing_to_train_is_refused(model: nn.Module) -> None:
    text = rf"needs parameters with requires_grad, and {type(model).__name__} has none; call requires_grad_\(\)"
    with pytest.raises(ValueError, match=text):
        step_in_backward(model, FACTORIES["sgd"])


def test_a_second_optimizer_on_the_same_parameters_is_refused_until_the_first_is_removed() -> None:
    """A cell run twice: the second hook would find the gradient gone, and the first optimizer go on."""
    model = build(Mlp)
    first = step_in_backward(model, FACTORIES["sgd"])
    with pytest.raises(ValueError, match=r"steps in backward once, and 'layers.0.weight' does already; call remove\(\) on that optimizer"):
        step_in_backward(model, FACTORIES["adamw"])
    first.remove()
    second = step_in_backward(model, FACTORIES["adamw"])
    first.remove()
    train(model, second)
    with pytest.raises(ValueError, match="does already"):
        step_in_backward(model, FACTORIES["sgd"])


@pytest.mark.parametrize(
    "factory", [lambda p: torch.optim.SGD([nn.Parameter(torch.ones(2)), *p]), lambda p: torch.optim.SGD([torch.ones(2)]), lambda p: None]
)
def test_a_factory_that_makes_something_else_is_refused(factory: Any) -> None:
    model = build(Mlp)
    with pytest.raises(ValueError, match=r"optimizer of the one parameter it is given, and for 'layers.0.weight' it made another"):
        step_in_backward(model, factory)
    train(model, step_in_backward(model, FACTORIES["sgd"]))  # nothing is left of it


def test_a_copy_is_refused_and_the_model_can_be_copied_without_hooks() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    with pytest.raises(TypeError, match=r"tied to the parameters of its model and cannot be copied; save its state_dict\(\) instead"):
        copy.deepcopy(optimizer)
    other = copy.deepcopy(model)
    other(0).backward()
    assert all(p.grad is not None and not p._post_accumulate_grad_hooks for p in other.parameters())


# Hooks. A post-accumulate hook that returns a value is torch's TypeError: ours return nothing, or no backward here would end.


def test_remove_leaves_no_hook_and_gradients_stay_in_grad_again() -> None:
    """source: pytorch/pytorch#76464"""
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer)
    optimizer.remove()
    optimizer.remove()
    assert all(not p._post_accumulate_grad_hooks and not p._backward_hooks for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        model(5).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    twice = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(5).backward()
    for p, gradient in zip(model.parameters(), twice, strict=True):
        torch.testing.assert_close(gradient, 2 * p.grad)
    with pytest.raises(RuntimeError, match=r"hooks were removed, so this optimizer steps nothing; call step_in_backward\("):
        optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_hooks_of_others_stay_and_see_the_accumulated_gradient() -> None:
    """source: pytorch/pytorch#76464"""
    model = nn.Linear(2, 1, bias=False)
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    optimizer = step_in_backward(model, FACTORIES["sgd"])
    for _ in range(2):
        (model(torch.ones(1, 2)) + model(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert all(torch.equal(gradient, torch.full((1, 2), 2.0)) for gradient in seen)
    optimizer.remove()
    assert len(model.weight._post_accumulate_grad_hooks) == 1


def test_a_dropped_model_is_released_with_its_optimizer() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    train(model, optimizer)
    alive = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.layers[0].weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_an_optimizer_that_nobody_kept_is_missed_once_and_leaves_no_hook() -> None:
    model = build(Mlp)
    step_in_backward(model, FACTORIES["sgd"])
    gc.collect()
    text = "that step_in_backward returned is gone, so nothing steps 'layers.4.weight'; keep it in a variable. Its hooks are removed now"
    with pytest.raises(RuntimeError, match=text):
        model(0).backward()
    model.zero_grad()
    model(0).backward()
    assert all(p.grad is not None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_where_an_optimizer_was_dropped_a_new_one_takes_its_place() -> None:
    model, other = build(Mlp), build(Mlp)
    step_in_backward(model, FACTORIES["sgd"])
    gc.collect()
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
    train(model, optimizer)
    train(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    assert_same(model, other)


def test_hooks_on_steps_fire_for_each_parameter_and_for_the_whole() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["adamw"])
    fired = []
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: fired.append(type(o)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: fired.append("ours"))
    try:
        model(0).backward()
        optimizer.step()
    finally:
        handle.remove()
    assert fired.count(torch.optim.AdamW) == 3
    assert fired.count(StepInBackward) == fired.count("ours") == 1


def test_it_says_in_one_line_what_it_is() -> None:
    optimizer = step_in_backward(build(Mlp), FACTORIES["adamw"])
    assert repr(optimizer) == "StepInBackward(3 parameters, each with AdamW of its own)"
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == {"differentiable": False} or optimizer.defaults == {}


def test_an_error_elsewhere_in_backward_is_the_callers_and_the_step_can_be_ended() -> None:
    model = build(Mlp)
    optimizer = step_in_backward(model, FACTORIES["sgd"])

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("mine")

    handle = model.layers[0].weight.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(0).backward()
    handle.remove()
    optimizer.step()
    train(model, optimizer)
