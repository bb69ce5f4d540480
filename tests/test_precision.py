"""Numerical precision: which types are where, that nothing stays switched, and the loss scale's bookkeeping."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import vramlab as vl
from vramlab.techniques import Precision
from vramlab.training import build_optimizer, train

CPU = torch.device("cpu")
MODES = ["fp32", "amp-bf16", "amp-fp16", "bf16"]


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
        assert runs[mode].losses != runs["fp32"].losses  # and it is switched on at all


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
    """pytorch issue 65766: weights cast without gradients stayed in the cache."""
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
