"""Numerical precision: which types are where, that nothing stays switched, and the loss scale's bookkeeping."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import vramlab as vl
from vramlab.techniques import Adafactor, Precision, fp32_precision, step_in_backward
from vramlab.techniques import precision as precision_module
from vramlab.techniques.choose import build_optimizer
from vramlab.training import train

CPU = torch.device("cpu")
MODES = ["fp32", "tf32", "amp-bf16", "amp-fp16", "bf16"]


def small_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, precision: Precision, x: torch.Tensor | None = None) -> torch.Tensor:
    x = torch.linspace(-1, 1, 20).view(5, 4) if x is None else x
    with precision.autocast("cpu"):
        return model(precision.inputs(x)).float().square().mean()


def one_step(mode: str, model: nn.Module, *, clip_norm: float | None = None, lr: float = 0.1, **options: Any) -> tuple[Precision, bool]:
    precision = Precision(mode, **options)
    precision.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    precision.backward(loss_of(model, precision))
    return precision, precision.step(optimizer, clip_norm)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().flatten().float() for t in tensors])


# Which types are where.


@pytest.mark.parametrize(
    ("mode", "products", "parameters"),
    [
        ("fp32", torch.float32, torch.float32),
        ("amp-bf16", torch.bfloat16, torch.float32),
        ("amp-fp16", torch.float16, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_types_of_products_parameters_gradients_and_state(mode: str, products: torch.dtype, parameters: torch.dtype) -> None:
    precision, model = Precision(mode), small_model()
    assert precision.prepare(model) is model
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[torch.dtype] = []
    model[2].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    precision.backward(loss_of(model, precision))
    assert seen == [products]
    assert {p.dtype for p in model.parameters()} == {parameters}
    assert {p.grad.dtype for p in model.parameters()} == {parameters}
    precision.step(optimizer)
    state = {name: t.dtype for s in optimizer.state.values() for name, t in s.items()}
    assert state == {"step": torch.float32, "exp_avg": parameters, "exp_avg_sq": parameters}


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_bf16_casts_floating_inputs_in_any_nesting_and_nothing_else() -> None:
    batch = {"pair": Pair(torch.ones(2), torch.arange(2)), "list": [torch.ones(1, dtype=torch.float64), torch.tensor([True])], "n": 3}
    cast = Precision("bf16").inputs(batch)
    assert isinstance(cast["pair"], Pair)
    assert [cast["pair"].images.dtype, cast["pair"].labels.dtype] == [torch.bfloat16, torch.int64]
    assert [t.dtype for t in cast["list"]] == [torch.bfloat16, torch.bool]
    assert cast["n"] == 3
    assert batch["pair"].images.dtype is torch.float32
    for mode in ("fp32", "amp-bf16", "amp-fp16"):
        assert Precision(mode).inputs(batch) is batch


@pytest.mark.parametrize("task", [vl.tasks.gpt("nano", sequence=8), vl.tasks.vit("nano"), vl.tasks.resnet("nano")], ids=repr)
@pytest.mark.parametrize("mode", MODES)
def test_every_built_in_task_trains_in_every_precision(task: vl.Task, mode: str) -> None:
    run = vl.run(task, vl.Recipe(precision=mode, micro_batch=4, loss_scale=1024.0), steps=3, progress=False)
    assert all(0 < loss < 10 for loss in run.losses)
    assert not any(report.skipped for report in run.reports)


def test_low_precision_stays_near_full_precision() -> None:
    task = vl.tasks.gpt("nano", sequence=16)
    runs = {mode: vl.run(task, vl.Recipe(precision=mode, micro_batch=4, optimizer="sgd"), steps=3, progress=False) for mode in MODES}
    for mode in MODES[1:]:
        assert runs[mode].losses == pytest.approx(runs["fp32"].losses, rel=1e-2)
        # And it is switched on at all; the CPU has no TF32.
        assert (runs[mode].losses == runs["fp32"].losses) == (mode == "tf32")


def test_bytes_of_parameters_gradients_and_state_halve_in_bf16() -> None:
    task = vl.tasks.gpt("nano", sequence=8)
    held = {}
    for mode in ("fp32", "bf16"):
        memory = vl.run(task, vl.Recipe(precision=mode, micro_batch=1), steps=2, progress=False).reports[1].memory
        assert memory is not None
        held[mode] = memory.breakdown("step")
    parameters = sum(p.numel() for p in task.model().parameters())
    tensors = len(list(task.model().parameters()))
    for mode, size in (("fp32", 4), ("bf16", 2)):
        assert held[mode].parameters == size * parameters
        assert held[mode].gradients == size * parameters
        assert held[mode].optimizer_state == 2 * size * parameters + 4 * tensors  # and AdamW's step counts, fp32 each


def test_autocast_keeps_parameters_and_adds_copies_of_two_bytes() -> None:
    """Weights of linear layers are cast once a forward; the embedding is looked up in fp32."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    precision = Precision("amp-bf16")
    with vl.record(model) as trace:
        loss_of(model, precision, torch.randn(2, 64)).backward()
    peak = max(trace.breakdown(i).weight_copies for i in range(len(trace)))
    assert trace.breakdown("forward").parameters == 4 * 2 * (64 * 64 + 64)
    assert peak == 2 * 2 * (64 * 64 + 64)
    assert trace.breakdown("end").weight_copies == 0


# What is switched is switched back.


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_on_inside_and_off_after_also_after_an_error(mode: str) -> None:
    def inside() -> None:
        with Precision(mode).autocast(CPU):  # where a type is not supported torch warns, which is an error here
            assert torch.is_autocast_enabled("cpu") == mode.startswith("amp")
            if mode.startswith("amp"):
                assert torch.get_autocast_dtype("cpu") == {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}[mode]
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        inside()
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_is_off_after_a_task_that_raised_in_forward() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        assert torch.is_autocast_enabled("cpu")
        raise KeyError("in forward")

    task = vl.Task(small_model, lambda n, d: torch.randn(n, 4), loss)
    with pytest.raises(KeyError):
        vl.run(task, vl.Recipe(precision="amp-bf16"), steps=1, progress=False)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_of_the_caller_stays_as_it_was() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with Precision("amp-fp16").autocast("cpu"):
            assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_backward_runs_outside_autocast() -> None:
    states: list[bool] = []
    model = small_model()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: states.append(torch.is_autocast_enabled("cpu")))
    one_step("amp-bf16", model)
    assert states == [False]


def test_an_evaluation_inside_autocast_leaves_later_gradients_alone() -> None:
    """pytorch issue 65766, pulls 113685 and 165068: weights cast without gradients stayed in the cache."""
    model, precision = small_model(), Precision("amp-bf16")
    x = torch.randn(5, 4)
    with precision.autocast("cpu"):
        with torch.no_grad():
            model(x)
        loss = model(x).float().square().mean()
    precision.backward(loss)
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


# The loss scale.


def test_the_loss_scale_does_not_change_the_step() -> None:
    right, found, far = small_model(), small_model(), small_model()
    one_step("amp-fp16", right, loss_scale=1.0)
    one_step("amp-fp16", found, loss_scale=1024.0)
    torch.testing.assert_close(flat(found.parameters()), flat(right.parameters()), rtol=1e-3, atol=1e-5)
    one_step("fp32", far)
    torch.testing.assert_close(flat(found.parameters()), flat(far.parameters()), rtol=1e-2, atol=1e-3)


def test_the_loss_scale_rescues_small_gradients() -> None:
    """1e-8 is 0 in fp16: without a scale nothing would be learnt."""
    moved = []
    for scale in (1.0, 1024.0):
        model = nn.Linear(4, 4, bias=False)
        before = flat(model.parameters()).clone()
        precision = Precision("amp-fp16", loss_scale=scale)
        with precision.autocast("cpu"):
            loss = (model(torch.ones(1, 4)) * 1e-8).float().sum()
        precision.backward(loss)
        precision.step(torch.optim.SGD(model.parameters(), lr=1e6))
        moved.append(float((flat(model.parameters()) - before).norm()))
    assert moved[0] == 0
    assert moved[1] == pytest.approx(4 * 1e-2, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_the_norm_is_clipped_at_its_true_size(mode: str, scale: float) -> None:
    """Gradients unscaled twice would be too small to be clipped, and not unscaled ones would shrink to nothing."""
    model = small_model()
    before = flat(small_model().parameters())
    _, stepped = one_step(mode, model, clip_norm=0.01, lr=1.0, loss_scale=scale)
    assert stepped
    tolerance = 0.2 if mode == "bf16" else 1e-3  # bf16 rounds the parameters that we subtract
    assert float((flat(model.parameters()) - before).norm()) == pytest.approx(0.01, rel=tolerance)


@pytest.mark.parametrize("mode", ["fp32", "amp-fp16"])
def test_a_norm_below_the_limit_is_left_alone(mode: str) -> None:
    clipped, free = small_model(), small_model()
    one_step(mode, clipped, clip_norm=1e3)
    one_step(mode, free)
    assert torch.equal(flat(clipped.parameters()), flat(free.parameters()))


def test_gradients_are_unscaled_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unscale, calls = torch.amp.GradScaler.unscale_, []
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", lambda self, optimizer: (calls.append(1), unscale(self, optimizer))[1])
    for clip_norm in (None, 1.0):
        calls.clear()
        one_step("amp-fp16", small_model(), clip_norm=clip_norm)
        assert calls == [1]


@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_infinite_gradient_skips_the_step_halves_the_scale_and_is_counted(
    clip_norm: float | None, bad: float, implementation: Any, name: Any
) -> None:
    model = small_model()
    precision = Precision("amp-fp16", loss_scale=1024.0)
    optimizer = build_optimizer(model, vl.Recipe(optimizer=name, optimizer_impl=implementation), 0.1)
    precision.backward(loss_of(model, precision))
    assert precision.step(optimizer, clip_norm)
    before, state = flat(model.parameters()).clone(), copy.deepcopy(optimizer.state_dict()["state"])

    optimizer.zero_grad()
    precision.backward(loss_of(model, precision))
    model[2].bias.grad[1] = bad
    assert not precision.step(optimizer, clip_norm)
    assert torch.equal(flat(model.parameters()), before)
    assert (precision.skipped_steps, precision.state_dict()["scale"]) == (1, 512.0)
    after = optimizer.state_dict()["state"]
    for number, tensors in state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after[number][key], tensors[key])

    optimizer.zero_grad()
    precision.backward(loss_of(model, precision))
    assert precision.step(optimizer, clip_norm)  # and the next one happens
    assert not torch.equal(flat(model.parameters()), before)
    assert precision.skipped_steps == 1


def test_the_scale_grows_after_enough_good_steps() -> None:
    model = small_model()
    precision = Precision("amp-fp16", loss_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for _ in range(5):
        optimizer.zero_grad()
        precision.backward(loss_of(model, precision))
        assert precision.step(optimizer)  # growing is not skipping
        scales.append(precision.state_dict()["scale"])
    assert scales == [8.0, 16.0, 16.0, 32.0, 32.0]
    assert precision.skipped_steps == 0


def test_a_run_reports_skipped_steps_and_goes_on() -> None:
    """A scale of 2**22 overflows fp16 until it has been halved often enough."""
    task = vl.tasks.gpt("nano", sequence=8)
    run = vl.run(task, vl.Recipe(precision="amp-fp16", micro_batch=1, loss_scale=2.0**22, optimizer="sgd"), steps=12, progress=False)
    skipped = [report.skipped for report in run.reports]
    assert skipped[:4] == [True] * 4
    assert not all(skipped)
    assert all(report.loss > 0 for report in run.reports)


def test_other_precisions_never_skip_and_have_no_scale() -> None:
    for mode in ("fp32", "amp-bf16", "bf16"):
        model = small_model()
        precision = Precision(mode)
        precision.prepare(model)
        precision.backward(loss_of(model, precision))
        model[2].bias.grad[1] = float("inf")
        assert precision.step(torch.optim.SGD(model.parameters(), lr=0.1))
        assert (precision.skipped_steps, precision.state_dict()) == (0, {})


# Saved and loaded.


def trained(precision: Precision, steps: int, model: nn.Module | None = None) -> list[float]:
    model = small_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        precision.backward(loss_of(model, precision))
        precision.step(optimizer)
        scales.append(precision.state_dict()["scale"])
    return scales


@pytest.mark.parametrize("used", [False, True], ids=["before its first step", "after some steps"])
def test_a_loaded_state_goes_on_where_it_was_saved(used: bool) -> None:
    options = {"loss_scale": 8.0, "growth_interval": 4}
    right = trained(Precision("amp-fp16", **options), 9)
    first = Precision("amp-fp16", **options)
    trained(first, 6)
    state = copy.deepcopy(first.state_dict())
    assert state["scale"] == right[5]
    second = Precision("amp-fp16", loss_scale=2.0, growth_interval=1000)
    if used:
        trained(second, 2)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert trained(second, 3) == right[6:]


def test_an_empty_state_changes_nothing() -> None:
    for mode in MODES:
        precision = Precision(mode)
        assert precision.state_dict() == {}
        precision.load_state_dict({})
        precision.load_state_dict(Precision("fp32").state_dict())
    precision = Precision("amp-fp16", loss_scale=4.0)
    trained(precision, 1)
    precision.load_state_dict({})
    assert precision.state_dict()["scale"] == 4.0
    resumed = Precision("amp-fp16")
    resumed.load_state_dict(precision.state_dict())
    resumed.load_state_dict({})
    assert resumed.state_dict() == precision.state_dict()
    assert trained(resumed, 1) == trained(precision, 1)


@pytest.mark.parametrize("mode", ["fp32", "tf32", "amp-bf16", "bf16"])
def test_the_state_of_a_loss_scale_is_nothing_to_the_other_modes(mode: str) -> None:
    saved, precision = Precision("amp-fp16"), Precision(mode)
    trained(saved, 1)
    precision.load_state_dict(saved.state_dict())
    assert (precision.state_dict(), precision.scale) == ({}, 1.0)


def test_a_state_that_was_given_away_is_a_copy() -> None:
    saved, precision = Precision("amp-fp16", loss_scale=4.0), Precision("amp-fp16")
    trained(saved, 1)
    precision.load_state_dict(saved.state_dict())
    precision.state_dict()["scale"] = 1.0
    assert precision.scale == 4.0


# What is refused.


@pytest.mark.parametrize("mode", ["fp16", "FP32", "amp", "", None, 16])
def test_an_unknown_mode_names_the_known_ones(mode: Any) -> None:
    with pytest.raises(ValueError, match=rf"^Precision is one of 'fp32', 'tf32', 'amp-fp16', 'amp-bf16', 'bf16', got {mode!r}\.$"):
        Precision(mode)


def test_the_parameters_are_made_small_before_they_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8 billion parameter model is 16 GB in bf16: moved in fp32 first, it would not fit a card that has room for it."""
    moved: list[torch.dtype] = []
    to = nn.Module.to

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if args and isinstance(args[0], torch.device):
            moved.extend(p.dtype for p in self.parameters())
        return to(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", watched)
    next(train(vl.tasks.gpt("nano", sequence=8), vl.Recipe(precision="bf16", micro_batch=1), "cpu"))
    assert set(moved) == {torch.bfloat16}


# The loss scale over windows and several optimizers.


def scalar(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value))


def window_of(precision: Precision, parameter: nn.Parameter, gradients: tuple[float, ...]) -> None:
    for gradient in gradients:
        precision.backward(parameter * gradient)


def overflow(parameter: nn.Parameter) -> torch.Tensor:
    """A finite loss with an infinite gradient, as an overflow in backward leaves it."""
    loss = parameter * 1.0
    loss.register_hook(lambda gradient: gradient * float("inf"))
    return loss


def test_clipping_sees_the_true_norm_and_not_the_scaled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/examples issue 1196, tt-metal issue 17568: clipped while scaled, a norm of 0.2 reads 13107.2 and leaves 1.5e-5."""
    clip, norms = nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args: norms.append(float(clip(*args))))
    weight = nn.Parameter(torch.ones(4))
    precision = Precision("amp-fp16", loss_scale=65536.0)
    precision.backward((weight * 0.1).sum())
    assert float(weight.grad.norm()) == pytest.approx(13107.2)
    assert precision.step(torch.optim.SGD([weight], lr=1.0), clip_norm=1.0)
    assert norms == [pytest.approx(0.2)]
    assert float(weight.grad.norm()) == pytest.approx(0.2)
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.9))


def test_clipping_is_once_a_window_and_not_once_a_micro_batch() -> None:
    """tt-metal issue 17568."""
    weight, precision = scalar(), Precision("fp32")
    window_of(precision, weight, (3.0, -2.0))
    assert precision.step(torch.optim.SGD([weight], lr=1.0), clip_norm=2.0)
    assert weight.item() == pytest.approx(0.0)  # 3 - 2 = 1 is below the limit; clipped on the way it would be 2 - 2 = 0


@pytest.mark.parametrize("bad", [0, 1])
def test_of_several_optimizers_only_the_one_with_an_infinite_gradient_is_skipped(bad: int) -> None:
    """pytorch pull 26512: and the scale is halved once, whoever it was."""
    pair = [scalar(), scalar()]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in pair]
    precision = Precision("amp-fp16", loss_scale=4.0)
    for i, p in enumerate(pair):
        precision.backward(overflow(p) if i == bad else p * 1.0)
    assert not precision.step(optimizers)
    assert [p.item() for p in pair] == [1.0 if i == bad else 0.0 for i in (0, 1)]
    assert (precision.scale, precision.skipped_steps) == (2.0, 1)


@pytest.mark.parametrize("mode", ["fp32", "amp-fp16"])
@pytest.mark.parametrize("clip_norm", [None, 10.0], ids=["no clipping", "clipping"])
def test_an_optimizer_without_gradients_is_passed_over_if_another_has_some(
    mode: str, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nerfstudio pull 1919: torch raises "No inf checks were recorded" for it."""
    updates = count_updates(monkeypatch)
    used, unused = scalar(), scalar()
    precision = Precision(mode, loss_scale=4.0)
    precision.backward(used * 1.0)
    optimizers = (torch.optim.SGD([unused], lr=1.0), torch.optim.SGD([used], lr=1.0))
    assert precision.step(optimizers, clip_norm)
    assert (used.item(), unused.item()) == (0.0, 1.0)
    assert len(updates) == (mode == "amp-fp16")


NO_GRADIENT = (
    r"^backward\(\) has run and no parameter of the optimizer has a gradient: they are frozen, or not those of the model \(moved or "
    r"replaced after the optimizer was built\), or the loss does not lead back to them\.$"
)


@pytest.mark.parametrize("why", ["frozen", "stale", "detached"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["no clipping", "clipping"])
def test_no_gradient_at_all_is_refused_with_the_likely_reasons(mode: str, why: str, clip_norm: float | None) -> None:
    """GOF_NeurIPS2021 issue 2, deep_pipe issue 75, accelerate issue 328, nerfstudio pull 1919: torch says "No inf checks"."""
    model, other = small_model(), scalar()
    precision = Precision(mode)
    precision.prepare(model)
    parameters = {"frozen": model[0].requires_grad_(False), "stale": copy.deepcopy(model), "detached": model}[why].parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    loss = loss_of(model, precision)
    precision.backward(loss.detach() + other if why == "detached" else loss)
    state = precision.state_dict()
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        precision.step(optimizer, clip_norm)
    assert precision.state_dict() == state

    model.zero_grad()  # and the next window is one like any other
    precision.backward(loss_of(small := small_model().to(next(model.parameters()).dtype), precision))
    assert precision.step(torch.optim.SGD(small.parameters(), lr=0.1), clip_norm)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_did_not_come_through_the_precision_are_refused(mode: str) -> None:
    """Returning False would train nothing, in silence."""
    model = small_model()
    precision = Precision(mode)
    optimizer = torch.optim.SGD(precision.prepare(model).parameters(), lr=0.1)
    loss_of(model, precision).backward()
    text = (
        r"^The optimizer has gradients, and nothing went backward here since the last step: call precision\.backward\(loss\) instead of "
        r"loss\.backward\(\), zero_grad\(\) after each step, and step\(\) once a window with a list of all optimizers\. The zeros of "
        r"zero_grad\(set_to_none=False\) are gradients too: with them, call step\(\) only after a backward\.$"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            precision.step(optimizer)
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    assert not precision.step(optimizer)


def count_updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each time a loss scale is brought up to date."""
    update, updates = torch.amp.GradScaler.update, list[int]()
    monkeypatch.setattr(torch.amp.GradScaler, "update", lambda self: (updates.append(1), update(self))[1])
    return updates


def test_the_scale_is_updated_once_a_window_whatever_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """nerfstudio pull 1919, pytorch pull 26512: with an update for each optimizer it grew, or shrank, several times."""
    updates = count_updates(monkeypatch)
    pair = [scalar(), scalar()]
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in pair]
    precision = Precision("amp-fp16", loss_scale=4.0, growth_interval=1)
    for window in range(3):
        for p in pair * 4:
            precision.backward(p * 1.0)
        assert len(updates) == window
        assert precision.step(optimizers, clip_norm=1.0 if window == 1 else None)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert not precision.step(optimizers)  # nothing went backward since
    assert len(updates) == 3
    assert precision.scale == 32.0


def test_one_overflow_in_a_window_skips_it_and_halves_the_scale_once() -> None:
    """accelerate issue 641."""
    weight, precision = scalar(), Precision("amp-fp16", loss_scale=4.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for i in range(4):
        precision.backward(overflow(weight) if i == 1 else weight * 0.25)
    assert not precision.step(optimizer)
    assert (weight.item(), precision.scale, precision.skipped_steps) == (1.0, 2.0, 1)


def test_the_scale_does_not_change_within_a_window() -> None:
    """accelerate issue 641: with 4 and then 8, two halves of a gradient of 1 add up to 0.75."""
    weight, precision = scalar(), Precision("amp-fp16", loss_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scales = []
    for right in (0.0, -1.0):
        for _ in range(2):
            precision.backward(weight * 0.5)
            scales.append(precision.scale)
        assert precision.step(optimizer)
        assert weight.item() == right
        optimizer.zero_grad()
    assert scales == [4.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loaded", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["no clipping", "clipping"])
def test_an_empty_window_does_nothing(mode: str, loaded: bool, clip_norm: float | None) -> None:
    """fairseq2 issue 1346: "Attempted unscale_ but _scale is None" in the first step after a restart."""
    saved = Precision("amp-fp16", loss_scale=8.0)
    trained(saved, 1)
    precision = Precision(mode)
    if loaded and mode == "amp-fp16":
        precision.load_state_dict(saved.state_dict())
    state = precision.state_dict()
    model = precision.prepare(small_model())
    before = flat(model.parameters())
    for _ in range(2):
        assert not precision.step(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm)
    assert precision.state_dict() == state
    assert precision.skipped_steps == 0
    assert torch.equal(flat(model.parameters()), before)
    precision.backward(loss_of(model, precision))
    assert precision.step(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm)


def test_the_scale_can_be_read_at_any_time() -> None:
    precision = Precision("amp-fp16", loss_scale=8.0, growth_interval=1)
    assert precision.scale == 8.0
    trained(precision, 1)
    assert precision.scale == 16.0
    resumed = Precision("amp-fp16")
    resumed.load_state_dict(precision.state_dict())
    assert resumed.scale == 16.0
    for mode in ("fp32", "tf32", "amp-bf16", "bf16"):
        assert Precision(mode, loss_scale=8.0).scale == 1.0


@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_step_that_failed_can_be_made_again(clip_norm: float | None, fails: int) -> None:
    """An optimizer that runs out of memory for its state, say: torch's scaler would refuse to unscale a second time."""
    pair = [scalar(), scalar()]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in pair]
    precision = Precision("amp-fp16", loss_scale=4.0, growth_interval=2)
    window_of(precision, pair[0], (0.0,))
    assert precision.step(optimizers)  # half way to the next scale
    step = optimizers[fails].step

    def out_of_memory(*args: Any) -> None:
        raise MemoryError

    optimizers[fails].step = out_of_memory
    for p in pair:
        precision.backward(p * 0.5)
    with pytest.raises(MemoryError):
        precision.step(optimizers, clip_norm)
    optimizers[fails].step = step
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert precision.scale == 4.0
    for p in pair:
        precision.backward(p * 0.5)
    assert precision.step(optimizers, clip_norm)
    assert [p.item() for p in pair] == [0.0 if i < fails else 0.5 for i in (0, 1)]
    assert precision.scale == 8.0


def test_a_skipped_first_step_of_adafactor_leaves_no_trace() -> None:
    """pytorch pulls 95847 and 97415: optimizers that promise to unscale themselves moved parameters by NaN."""
    model, precision = small_model(), Precision("amp-fp16", loss_scale=4.0)
    before = flat(model.parameters()).clone()
    optimizer = Adafactor(model.parameters())
    precision.backward(loss_of(model, precision))
    model[2].bias.grad[1] = float("inf")
    assert not precision.step(optimizer)
    assert torch.equal(flat(model.parameters()), before)
    assert not optimizer.state
    assert precision.scale == 2.0
    optimizer.zero_grad()
    precision.backward(loss_of(model, precision))
    assert precision.step(optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


@pytest.mark.parametrize("mode", ["fp32", "amp-fp16"])
def test_clipping_with_a_step_in_backward_is_refused(mode: str) -> None:
    model, precision = small_model(), Precision(mode, loss_scale=1.0)
    optimizer = step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    precision.backward(loss_of(model, precision))
    text = (
        r"^Clipping needs all gradients at once, and an optimizer that steps in backward has used them up, got clip_norm=0\.5; "
        r"leave it out, or use an ordinary optimizer\.$"
    )
    with pytest.raises(RuntimeError, match=text):
        precision.step(optimizer, 0.5)
    optimizer.step()
    precision.backward(loss_of(model, precision))
    if mode == "fp32":
        assert precision.step(optimizer)
    else:  # gradients were used while they were scaled
        with pytest.raises(RuntimeError, match=r"^A GradScaler must see all gradients before a step"):
            precision.step(optimizer)


# fp16's range.


def test_what_fp16_and_bf16_can_hold() -> None:
    """transformers issues 5651 and 9295, text-to-text-transfer-transformer issue 539: the numbers behind the warning."""
    x = torch.tensor([66246.39, 65519.0, 65520.0, 1e-8])
    assert x.half().tolist() == [float("inf"), 65504.0, float("inf"), 0.0]
    assert x.bfloat16().tolist() == [66048.0, 65536.0, 65536.0, pytest.approx(1.0012e-8, rel=1e-4)]


FORWARD_OVERFLOW = r"^The loss itself is inf: the forward pass left fp16's range \(65504\), which no loss scale mends\. Use amp-bf16\.$"


def forward_overflow(precision: Precision, model: nn.Module, x: float) -> torch.Tensor:
    with precision.autocast("cpu"):
        return model(torch.full((1, 1), x)).float().sum()


@pytest.mark.parametrize("micro_batches", [(300.0,), (300.0, 1.0), (1.0, 300.0, 1.0)], ids=["alone", "first", "middle"])
def test_an_overflow_in_forward_is_named_wherever_in_the_window_it_was(micro_batches: tuple[float, ...]) -> None:
    """transformers issues 5651 and 9295, text-to-text-transfer-transformer issue 539: no loss scale mends a loss of inf."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 300.0)
    precision = Precision("amp-fp16", loss_scale=4.0)
    for x in micro_batches:
        loss = forward_overflow(precision, model, x)
        precision.backward(loss * loss)
    with pytest.warns(UserWarning, match=FORWARD_OVERFLOW) as warned:
        assert not precision.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert warned[0].filename == __file__  # it points to the call of step
    assert model.weight.item() == 300.0

    for mode in ("fp32", "amp-bf16"):
        precision, other = Precision(mode), copy.deepcopy(model)
        other.zero_grad()
        loss = forward_overflow(precision, other, 300.0)
        assert loss.item() == pytest.approx(90000.0, rel=1e-2)
        precision.backward(loss)
        assert precision.step(torch.optim.SGD(other.parameters(), lr=1e-6))


def test_an_overflow_in_forward_is_named_also_if_the_gradients_are_finite() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 300.0)
    precision = Precision("amp-fp16", loss_scale=4.0)
    precision.backward(forward_overflow(precision, model, 300.0))
    with pytest.warns(UserWarning, match=FORWARD_OVERFLOW):
        assert precision.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert (precision.skipped_steps, precision.scale) == (0, 4.0)


def test_an_overflow_in_backward_alone_is_not_blamed_on_forward() -> None:
    """Warnings are errors here: the loss scale mends this one."""
    weight, precision = scalar(), Precision("amp-fp16", loss_scale=4.0)
    precision.backward(overflow(weight))
    assert not precision.step(torch.optim.SGD([weight], lr=1.0))


def test_many_losses_in_fp16_do_not_add_up_to_an_overflow() -> None:
    weight, precision = nn.Parameter(torch.tensor(1.0)), Precision("amp-fp16", loss_scale=1.0)
    precision.backward((weight * 60000.0).half())
    precision.backward((weight * 60000.0).half())
    assert precision._loss is not None
    assert float(precision._loss) == pytest.approx(120000.0, rel=1e-3)


# What fp32 numbers are multiplied with on a card: settings that exist without one.

READ = """
import json, os, sys, torch
from vramlab.techniques import Precision, fp32_precision
b = torch.backends
where = {"all": b, "cudnn": b.cudnn, "matmul": b.cuda.matmul, "conv": b.cudnn.conv, "rnn": b.cudnn.rnn}

def read(names=tuple(where)):
    return {name: where[name].fp32_precision for name in names}

def legacy():
    return [b.cuda.matmul.allow_tf32, b.cudnn.allow_tf32, torch.get_float32_matmul_precision()]

def later():
    found = []
    for precision in ("ieee", "tf32", "none"):
        b.fp32_precision = precision
        found.append(read())
    return found
"""

IN_FORKS = """
results = []
for program in json.loads(sys.argv[1]):
    read_end, write_end = os.pipe()
    if not os.fork():
        exec(program)
        os.write(write_end, json.dumps(out).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as f:
        results.append(json.loads(f.read() or "null"))
    os.wait()
print(json.dumps(results))
"""


def in_new_processes(*programs: str) -> list[Any]:
    """What each program leaves in ``out``. Some of torch's settings cannot be set back, so each starts from torch's own."""
    code = READ + IN_FORKS
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, json.dumps(programs)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


USERS = [
    "pass",
    "b.cuda.matmul.allow_tf32 = True",
    "b.cuda.matmul.allow_tf32 = False",
    "b.cudnn.allow_tf32 = False",
    "b.cuda.matmul.allow_tf32 = True; b.cudnn.allow_tf32 = False",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "b.fp32_precision = 'ieee'",
    "b.fp32_precision = 'tf32'",
    "b.cudnn.fp32_precision = 'ieee'",
    "b.cudnn.fp32_precision = 'tf32'; b.cuda.matmul.fp32_precision = 'ieee'",
    "b.cudnn.conv.fp32_precision = 'ieee'",
    "b.cudnn.rnn.fp32_precision = 'none'",
]


def test_settings_of_fp32_products_are_left_as_they_were_whoever_made_them() -> None:
    """torch refuses to read settings that its two APIs made differently, and convolutions start with a default that cannot be set."""
    inside = "\nfor precision in ('ieee', 'tf32'):\n    with fp32_precision(precision):\n        pass\n"
    programs = []
    for user in USERS:
        reads = "\ntry:\n    old = legacy()\nexcept RuntimeError:\n    old = 'refused'\nout = [read(), old, later()]\n"
        programs += [user + reads, user + inside + reads]
    found = in_new_processes(*programs)
    for i, user in enumerate(USERS):
        untouched, touched = found[2 * i : 2 * i + 2]
        assert untouched is not None, user
        assert touched == untouched, user
    assert found[2][1] == [True, True, "high"]  # the old API can be read
    assert found[0][2][0]["conv"] == "ieee"  # and what is set above reaches convolutions


def test_all_three_are_set_inside_whatever_was_set_before() -> None:
    """pytorch issue 179445, transformers pull 45248: the setting above them did not reach convolutions in every release."""
    programs = [
        f"{user}\nout = []\nfor precision in ('ieee', 'tf32'):\n    with fp32_precision(precision):\n"
        "        out.append(sorted(set(read(('matmul', 'conv', 'rnn')).values())))"
        for user in USERS
    ]
    assert in_new_processes(*programs) == [[["ieee"], ["tf32"]]] * len(USERS)


def test_the_older_settings_can_be_used_again_afterwards() -> None:
    """Inside torch refuses them, if they say something else: a limit that fp32_precision names, and this tells when it falls."""
    use = "try:\n    with b.cudnn.flags(enabled=False):\n        out.append('used')\nexcept RuntimeError:\n    out.append('refused')\n"
    inside = textwrap.indent(use, "    ")
    program = f"out = []\n{use}with fp32_precision('ieee'):\n{inside}with fp32_precision('tf32'):\n{inside}{use}"
    assert in_new_processes(program) == [["used", "refused", "used", "used"]]


def settings() -> list[str]:
    backends: Any = torch.backends
    return [s.fp32_precision for s in (backends, backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]


@pytest.mark.parametrize("follow", [True, False], ids=["followed", "not reached"])
def test_a_release_in_which_the_setting_above_does_not_reach_the_others(follow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch issue 179445."""

    class Setting:
        def __init__(self, above: Setting | None = None) -> None:
            self.above, self.own = above, "none"

        @property
        def fp32_precision(self) -> str:
            return self.above.fp32_precision if self.own == "none" and self.above and follow else self.own

        @fp32_precision.setter
        def fp32_precision(self, value: str) -> None:
            self.own = value

    everything = Setting()
    cudnn: Any = Setting(everything)
    matmul, cudnn.conv, cudnn.rnn = Setting(cudnn), Setting(cudnn), Setting(cudnn)
    cudnn.conv.own = "tf32"
    monkeypatch.setattr(torch, "backends", SimpleNamespace(fp32_precision="none", cudnn=cudnn, cuda=SimpleNamespace(matmul=matmul)))
    for precision in ("ieee", "tf32"):
        with fp32_precision(precision):
            assert {s.fp32_precision for s in (matmul, cudnn.conv, cudnn.rnn)} == {precision}
        assert [s.own for s in (cudnn, matmul, cudnn.conv, cudnn.rnn)] == ["none", "none", "tf32", "none"]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_settings_of_fp32_products_are_set_back_after_an_error_and_nest(precision: str) -> None:
    before = settings()

    def inside() -> None:
        with fp32_precision(precision):
            with fp32_precision("tf32" if precision == "ieee" else "ieee"):
                pass
            assert settings()[2:] == [precision] * 3
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        inside()
    assert settings() == before


def test_an_unknown_setting_is_refused_by_torch_and_changes_nothing() -> None:
    before = settings()
    with pytest.raises(Exception, match="nonsense"):
        with fp32_precision("nonsense"):
            pass
    assert settings() == before


@pytest.mark.parametrize(("mode", "inside"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", None)])
def test_fp32_and_tf32_say_how_a_card_multiplies_in_forward_and_backward(
    mode: str, inside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    before, precision = settings(), Precision(mode)
    with precision.autocast("cuda"):
        assert settings()[2:] == ([inside] * 3 if inside else before[2:])
    assert settings() == before

    class LossOnACard(torch.Tensor):
        seen: ClassVar[list[list[str]]] = []

        @property
        def device(self) -> torch.device:
            return torch.device("cuda")

        def backward(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append(settings())
            raise KeyError("in backward")

    loss = torch.ones((), requires_grad=True).as_subclass(LossOnACard)
    with pytest.raises(KeyError, match="in backward"):
        precision.backward(loss)
    assert LossOnACard.seen[0][2:] == ([inside] * 3 if inside else before[2:])
    assert settings() == before


@pytest.mark.parametrize("mode", ["fp32", "tf32"])
def test_the_cpu_is_left_alone(mode: str) -> None:
    before = settings()
    with Precision(mode).autocast("cpu"):
        assert settings() == before


def test_tf32_is_fp32_on_the_cpu() -> None:
    right, found = small_model(), small_model()
    one_step("fp32", right)
    one_step("tf32", found)
    assert torch.equal(flat(found.parameters()), flat(right.parameters()))


# What torch or a card cannot do is refused.


@pytest.mark.parametrize("mode", ["amp-bf16", "bf16"])
@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_bf16_is_refused_on_a_card_that_only_emulates_it(mode: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = f"{capability[0]}\\.{capability[1]}"
    text = rf"^bf16 needs a card of compute capability 8\.0 \(Ampere\), and cuda:1 has {found}\. Use precision 'amp-fp16'\.$"
    with pytest.raises(ValueError, match=text):
        with Precision(mode).autocast("cuda:1"):
            pytest.fail("not reached")
    for other in ("fp32", "tf32"):
        with Precision(other).autocast("cuda:1"):
            pass


def test_bf16_runs_where_the_card_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (12, 1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        with Precision("bf16").autocast("cuda"):
            pass
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("asked"))
    for device in ("cpu", "mps", "xpu", "meta"):  # they have no such number, or another one
        with Precision("bf16").autocast(device):
            pass


@pytest.mark.parametrize("how", ["off", "another type", "no autocast at all"])
@pytest.mark.parametrize("mode", ["amp-bf16", "amp-fp16"])
def test_autocast_that_is_not_really_active_is_refused(mode: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch issue 100565 and pull 96097, joeynmt issue 198, sglang pull 36632: torch warns, and computes in fp32."""
    autocast = torch.autocast
    other = torch.float16 if mode == "amp-bf16" else torch.bfloat16
    stand_in = {"off": lambda device, dtype: nullcontext(), "another type": lambda device, dtype: autocast(device, dtype=other)}
    if how in stand_in:
        monkeypatch.setattr(torch, "autocast", stand_in[how])
    device = "meta" if how == "no autocast at all" else "cpu"
    dtype = "torch.bfloat16" if mode == "amp-bf16" else "torch.float16"
    with pytest.raises(ValueError, match=rf"^torch has no autocast to {dtype} on {device}; use precision 'fp32' or 'bf16'\.$"):
        with Precision(mode).autocast(device):
            pytest.fail("not reached")
    assert not torch.is_autocast_enabled("cpu")


def test_the_types_that_autocast_gives_on_the_cpu() -> None:
    """pytorch pulls 112484 and 126527: not those of a card, where layer_norm and softmax give fp32. What is recorded on the CPU
    under autocast holds for the CPU.
    """
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    for mode, dtype in (("fp32", torch.float32), ("tf32", torch.float32), ("amp-bf16", torch.bfloat16), ("amp-fp16", torch.float16)):
        with Precision(mode).autocast("cpu"):
            y = linear(x)
            assert y.dtype is dtype
            assert F.cross_entropy(y, torch.tensor([0, 1])).dtype is torch.float32
            assert F.layer_norm(y, (4,)).dtype is dtype
            assert F.softmax(y, -1).dtype is dtype


def test_fp16_parameters_are_refused_by_name() -> None:
    """pytorch issue 74739, bitsandbytes issue 945, Lightning issue 5140, AdaFace issue 127: "Attempting to unscale FP16 gradients"."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half(), nn.Linear(4, 4).half().requires_grad_(False))
    before = {name: p.dtype for name, p in model.named_parameters()}
    text = r"^amp-fp16 trains fp32 parameters, and these have 16 bits: 1\.weight, 1\.bias\. Build the model in fp32, call "
    with pytest.raises(ValueError, match=text):
        Precision("amp-fp16").prepare(model)
    assert {name: p.dtype for name, p in model.named_parameters()} == before
    model[1].requires_grad_(False)  # what is not trained may be fp16
    assert Precision("amp-fp16").prepare(model) is model


def test_a_run_with_fp16_parameters_is_refused_before_it_starts() -> None:
    """pytorch issue 74739."""
    task = vl.Task(lambda: nn.Linear(4, 1).half(), lambda n, device: pytest.fail("not reached"), lambda model, batch: None)
    with pytest.raises(ValueError, match=r"^amp-fp16 trains fp32 parameters, and these have 16 bits: weight, bias\."):
        vl.run(task, vl.Recipe(precision="amp-fp16"), steps=1, progress=False)


# Copies of weights that autocast keeps.


def test_copies_of_weights_are_kept_until_autocast_ends_also_without_gradients() -> None:
    """anemoi-core issue 134: not a leak. 4 layers of 64 * 64 + 64 numbers in 2 bytes, and the output of 128 bytes."""
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.randn(1, 64)
    with vl.record(model) as trace:
        held = trace.breakdown("end")
        with torch.no_grad(), Precision("amp-bf16").autocast("cpu"):
            out = model(x)
            inside = trace.breakdown("end")
        after = trace.breakdown("end")
    assert out.nbytes == 128
    assert inside.weight_copies == 4 * (64 * 64 + 64) * 2 == 33_280
    assert inside.total - inside.parameters - inside.inputs == 33_408
    assert after.total - after.parameters - after.inputs == 128
    assert (after.weight_copies, held.total) == (0, held.parameters)


def test_copies_are_made_once_a_block_however_often_the_model_runs() -> None:
    """anemoi-core issue 134."""
    model, x = nn.Linear(64, 64), torch.randn(1, 64)
    with vl.record(model) as trace:
        with torch.no_grad(), Precision("amp-bf16").autocast("cpu"):
            for _ in range(3):
                model(x)
                assert trace.breakdown("end").weight_copies == 2 * (64 * 64 + 64)
    assert trace.breakdown("end").weight_copies == 0


@pytest.mark.parametrize("where", ["outside", "inside", "backward outside", "backward inside"])
def test_checkpoints_and_autocast_agree_on_a_weight_used_before_and_inside(where: str) -> None:
    """pytorch issue 141896: the recomputed pass saw another cache of weight copies than the first."""
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        shared, x = nn.Linear(8, 8), torch.randn(4, 8)
        precision = Precision("amp-bf16")

        def segment(h: torch.Tensor, shared: nn.Module = shared, precision: Precision = precision) -> torch.Tensor:
            with precision.autocast("cpu") if where == "inside" else nullcontext():
                return shared(h).tanh()

        with precision.autocast("cpu") if where != "inside" else nullcontext():
            h = shared(x)
            out = checkpoint(segment, h, use_reentrant=False) if checkpointing else segment(h)
            loss = out.float().square().sum()
            if where == "backward inside":
                loss.backward()
        if where != "backward inside":
            loss.backward()
        assert shared.weight.grad.dtype is torch.float32
        found.append(flat([shared.weight.grad, shared.bias.grad]))
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", ["fp32", "tf32", "amp-bf16", "amp-fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_do_not_go_by_the_name_of_fp32(mode: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))).to(dtype)
    with pytest.raises(ValueError, match=rf"^{mode} trains fp32 parameters, .* bits: 0\.weight, .* and 3 more\. Build"):
        Precision(mode).prepare(model)
    model.requires_grad_(False)
    model[0].float().requires_grad_(True)  # a frozen 16-bit base with trained fp32 parts is fine
    assert Precision(mode).prepare(model) is model


def test_bf16_is_refused_on_a_virtual_card_that_only_emulates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(type="made_up")
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "made_up")
    monkeypatch.setattr(torch, "made_up", SimpleNamespace(get_device_capability=lambda device: (7, 5)), raising=False)
    with pytest.raises(ValueError, match=r"^bf16 needs a card of compute capability 8\.0 \(Ampere\), and .* has 7\.5\. Use"):
        precision_module._refuse_emulated_bf16("bf16", card)  # type: ignore[arg-type]
    precision_module._refuse_emulated_bf16("amp-fp16", card)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "made_up", SimpleNamespace())
    precision_module._refuse_emulated_bf16("bf16", card)  # type: ignore[arg-type]
