"""Offloading: the same bits in gradients and parameters, what moves and what stays, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import vramlab as vl
from vramlab.techniques import Adafactor, OffloadedOptimizer, checkpoint_blocks, offload, offload_activations, step_in_backward
from vramlab.techniques.checkpointing import CheckpointHandle


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as on a device, so they are copied out and back."""
    monkeypatch.setattr(offload, "_on_device", lambda tensor: True)


def mlp(width: int = 8, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2)) for _ in range(blocks)))


def gradients(model: nn.Module, x: Any, context: Any = None) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    with context or nullcontext():
        out = model(x)
        loss = (out[0] if isinstance(out, tuple) else out).float().square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# Activations.


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", ["gpt", "vit", "resnet"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "amp-bf16"])
def test_gradients_are_bitwise_the_same(name: str, dtype: torch.dtype | None) -> None:
    task = getattr(vl.tasks, name)("nano")
    model, batch, found = task.model(), task.batch(2, torch.device("cpu")), []
    hooks = offload_activations(other := copy.deepcopy(model), min_bytes=1)
    for m, context in ((model, nullcontext()), (other, hooks)):
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype) if dtype else nullcontext(), context:
            loss, _ = task.loss(m, batch)
        loss.backward()
        found.append([p.grad for p in m.parameters()])
    assert hooks.moved_bytes > 0
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("on_device")
def test_the_bytes_that_move_are_those_saved_by_hand() -> None:
    model, x = mlp(8, 3), torch.randn(5, 8)
    hooks = offload_activations(model, min_bytes=1)
    gradients(model, x, hooks)
    tensor = 4 * 5 * 8
    # Each block: the linear layer's input, tanh's output and what dropout saves; then the input of square(). No weights.
    assert hooks.moved_bytes == 3 * (tensor + tensor + saved_by_dropout(x)) + tensor


def saved_by_dropout(x: torch.Tensor) -> int:
    """On the CPU dropout is a product with a mask, of which autograd saves what it needs."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        F.dropout(x.clone().requires_grad_(), 0.2)
    return sum(sizes)


@pytest.mark.usefixtures("on_device")
def test_weights_their_views_and_buffers_stay() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)
            self.register_buffer("table", torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.linear.weight.t()[:, :4]) * self.table[:4]

    x = torch.randn(4, 8, requires_grad=True)
    model = Linear()
    hooks = offload_activations(model, min_bytes=1)
    with hooks:
        y = model(x)
    assert hooks.moved_bytes == x.nbytes
    y.sum().backward()


@pytest.mark.usefixtures("on_device")
def test_small_tensors_stay() -> None:
    model, x = nn.Linear(16, 16), torch.randn(64, 16, requires_grad=True)
    for min_bytes, moved in ((x.nbytes, x.nbytes), (x.nbytes + 1, 0)):
        hooks = offload_activations(model, min_bytes)
        with hooks:
            model(x)
        assert hooks.moved_bytes == moved
    assert offload_activations(model)._min_bytes == 2**20


def test_on_the_cpu_nothing_moves() -> None:
    model = mlp()
    hooks = offload_activations(model, min_bytes=1)
    right = gradients(model, torch.ones(4, 8))
    assert all(map(torch.equal, right, gradients(model, torch.ones(4, 8), hooks)))
    assert hooks.moved_bytes == 0


@pytest.mark.usefixtures("on_device")
def test_strides_come_back() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    with offload_activations(nn.Identity(), min_bytes=1):
        y = x.square()
    assert y.grad_fn._saved_self.stride() == x.stride()
    assert torch.equal(y.grad_fn._saved_self, x)


@pytest.mark.usefixtures("on_device")
def test_an_expanded_tensor_stays_for_it_would_grow() -> None:
    x = torch.randn(4, 1, requires_grad=True)
    hooks = offload_activations(nn.Identity(), min_bytes=1)
    with hooks:
        y = x.expand(4, 100).square()
    assert hooks.moved_bytes == 0
    y.sum().backward()
    torch.testing.assert_close(x.grad, 200 * x.detach())


@pytest.mark.usefixtures("on_device")
def test_tensors_that_are_not_plain_stay_and_work() -> None:
    sparse = torch.eye(4).to_sparse()
    x = torch.randn(4, 4, requires_grad=True)
    hooks = offload_activations(nn.Identity(), min_bytes=1)
    with hooks:
        y = torch.sparse.mm(sparse, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4))
    assert hooks.moved_bytes == 0


@pytest.mark.usefixtures("on_device", "one_process")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_distributed_tensors_stay_and_work() -> None:
    x = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Replicate()]).requires_grad_()
    hooks = offload_activations(nn.Identity(), min_bytes=1)
    with hooks:
        y = x.tanh()
    y.sum().backward()
    assert hooks.moved_bytes == 0
    torch.testing.assert_close(x.grad.to_local(), 1 - y.detach().to_local() ** 2)


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("policy", ["blocks", "nested"])
def test_of_checkpointed_blocks_only_the_inputs_move(policy: str) -> None:
    model, x = mlp(8, 3), torch.randn(5, 8, requires_grad=True)
    right = gradients(model, x)
    hooks = offload_activations(model, min_bytes=1)
    handle: CheckpointHandle = checkpoint_blocks(model)
    if policy == "nested":
        checkpoint_blocks(model, blocks=nn.Linear)
    found = gradients(model, x, hooks)
    assert all(map(torch.equal, found, right))
    assert hooks.moved_bytes == 3 * x.nbytes + x.nbytes  # three inputs, and what square() of the loss saves
    assert " recomputed 3 times" in handle.explain()


@pytest.mark.usefixtures("on_device")
def test_the_parameters_are_looked_up_once_an_entry_and_not_for_each_tensor() -> None:
    class Model(nn.Module):
        looked = 0

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            Model.looked += 1
            return super().parameters(recurse)

    model = Model()
    model.inner = mlp()
    with offload_activations(model, min_bytes=1):
        model.inner(torch.ones(2, 8))
    assert Model.looked == 1


@pytest.mark.usefixtures("on_device")
def test_a_parameter_that_got_other_memory_is_known_at_the_next_entry() -> None:
    model = nn.Linear(8, 8)
    hooks = offload_activations(model, min_bytes=1)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        before = hooks.moved_bytes
        with hooks:
            model(x)
        assert hooks.moved_bytes - before == x.nbytes
        model.weight.data = model.weight.data.clone()


@pytest.mark.usefixtures("on_device")
def test_a_tensor_changed_in_place_after_it_moved_still_gives_the_right_gradient() -> None:
    """Without offload torch refuses; the copy holds the value at the time of saving, so nothing is wrong here."""
    x = torch.randn(8, requires_grad=True)
    for context, fine in ((nullcontext(), False), (offload_activations(nn.Identity(), min_bytes=1), True)):
        with context:
            hidden = x * 1
            y = hidden.square().sum()
        with torch.no_grad():
            hidden.mul_(3)
        if fine:
            (found,) = torch.autograd.grad(y, x)
            assert torch.equal(found, 2 * x.detach())
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()


def test_a_tensor_that_stayed_is_guarded_as_torch_does() -> None:
    """Torch does not check the version of what goes through hooks: gradients would be wrong in silence."""
    for change in (lambda hidden, y: hidden.mul_(3), lambda hidden, y: y.mul_(3)):  # what an operator got, and what it gave
        x = torch.randn(8, requires_grad=True)
        with offload_activations(nn.Identity()):
            hidden = x * 1
            y = hidden.tanh() * hidden
            z = y.exp()
        with torch.no_grad():
            change(hidden, z)
        with pytest.raises(RuntimeError, match=r"^Backward needs a tensor of shape \(8,\) as it was when autograd saved it, at version 0"):
            z.sum().backward()


def test_the_guard_says_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    version = model[1].weight._version
    with offload_activations(model):
        loss = model(torch.ones(1, 2)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)  # a step before backward
    text = (
        f"Backward needs a tensor of shape (2, 2) as it was when autograd saved it, at version {version}, and it was changed in place "
        f"since, to version {version + 1}. Change a copy of it, or change it after backward."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        loss.backward()


@pytest.mark.parametrize("moving", [True, False], ids=["moving", "staying"])
def test_no_graph_stays_alive(moving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that its own node holds through a hook is never released, not even by the garbage collector."""
    monkeypatch.setattr(offload, "_on_device", lambda tensor: moving)

    class Mark:
        pass

    gc.collect()
    gc.disable()
    try:
        x = torch.randn(8, requires_grad=True)
        with offload_activations(nn.Identity(), min_bytes=1):
            y = (x * 1).tanh().exp()  # both save what they give
        mark = Mark()
        alive = weakref.ref(mark)
        y.grad_fn.metadata["mark"] = mark
        del y, mark
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("min_bytes", [1, 10**9], ids=["moving", "staying"])
def test_second_derivatives_and_a_kept_graph_work(min_bytes: int) -> None:
    results = []
    for context in (nullcontext(), offload_activations(nn.Identity(), min_bytes)):
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        weight = torch.full((8,), 2.0, requires_grad=True)
        with context:
            y = (weight * x).tanh().exp().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [x, weight], retain_graph=True)
        third = torch.autograd.grad(y, [x, weight])
        results.append([first, *second, *third])
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("on_device")
def test_hooks_are_off_after_the_context_and_after_an_error() -> None:
    hooks = offload_activations(nn.Identity(), min_bytes=1)
    with pytest.raises(KeyError), hooks:
        raise KeyError
    torch.randn(8, requires_grad=True).square()
    assert hooks.moved_bytes == 0


# The optimizer.


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adafactor(groups: Any) -> torch.optim.Optimizer:
    return Adafactor(groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8).to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


FACTORIES = [adamw, sgd, adafactor]


@pytest.mark.parametrize("factory", FACTORIES)
def test_parameters_are_bitwise_those_of_the_plain_optimizer(factory: Callable[..., torch.optim.Optimizer]) -> None:
    model = mlp()
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    train(model, factory(model.parameters()))
    train(other, OffloadedOptimizer(other.parameters(), factory))
    assert_same(model, other)
    assert not any(map(torch.equal, model.parameters(), start.parameters()))


@pytest.mark.parametrize("factory", FACTORIES)
def test_bf16_parameters_are_the_rounded_fp32_ones(factory: Callable[..., torch.optim.Optimizer]) -> None:
    model = mlp().bfloat16()
    original = copy.deepcopy(model).float()
    reference = factory(original.parameters())
    optimizer = OffloadedOptimizer(model.parameters(), factory)
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(4, 8).bfloat16()).square().sum().backward()
        for p, q in zip(model.parameters(), original.parameters(), strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, q in zip(model.parameters(), original.parameters(), strict=True):
            assert torch.equal(p, q.bfloat16())
    lost = [torch.equal(p.float(), q) for p, q in zip(model.parameters(), original.parameters(), strict=True)]
    assert not any(lost)


def test_small_steps_of_bf16_parameters_add_up() -> None:
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer([p], lambda groups: torch.optim.SGD(groups, lr=1e-3))
    for _ in range(10):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    assert p.item() == torch.tensor(1.01).bfloat16().item() != 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_wider_parameters_keep_their_digits(dtype: torch.dtype) -> None:
    value = torch.tensor([1 / 3], dtype=dtype)
    p, q = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    optimizers = OffloadedOptimizer([p], sgd), sgd([q])
    for x, optimizer in zip((p, q), optimizers, strict=True):
        x.grad = value.clone()
        optimizer.step()
    assert torch.equal(p, q)


def test_nothing_but_parameters_and_gradients_is_left_with_the_parameters() -> None:
    model = mlp()
    optimizer = OffloadedOptimizer(model.parameters(), adamw)
    train(model, optimizer)
    assert not optimizer.state
    assert all(h.grad is None for h in optimizer._host.values())
    assert all(p.grad is not None for p in model.parameters())


def schedules() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    lr = torch.optim.lr_scheduler
    return {
        "step": lambda o: lr.StepLR(o, 1, gamma=0.5),
        "cosine": lambda o: lr.CosineAnnealingLR(o, 4),
        "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=6),
        "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    }


@pytest.mark.parametrize("name", list(schedules()))
@pytest.mark.parametrize("factory", [adamw, sgd])
def test_schedulers_set_the_rates(name: str, factory: Callable[..., torch.optim.Optimizer]) -> None:
    """One cycle also looks for the momentum among the defaults, and changes it."""
    model = mlp()
    other = copy.deepcopy(model)
    for m, optimizer in ((model, factory(model.parameters())), (other, OffloadedOptimizer(other.parameters(), factory))):
        scheduler = schedules()[name](optimizer)
        for step in range(4):
            train(m, optimizer, 1, step)
            scheduler.step()
    assert_same(model, other)


def test_clipping_sees_the_gradients() -> None:
    model = mlp()
    other, norms = copy.deepcopy(model), []
    for m, optimizer in ((model, adamw(model.parameters())), (other, OffloadedOptimizer(other.parameters(), adamw))):
        for _ in range(3):
            optimizer.zero_grad()
            torch.manual_seed(1)
            (100 * m(torch.ones(4, 8))).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            optimizer.step()
    assert_same(model, other)
    assert norms[:3] == norms[3:]


def test_a_grad_scaler_unscales_and_skips() -> None:
    model = mlp()
    other, scales = copy.deepcopy(model), []
    for m, optimizer in ((model, adamw(model.parameters())), (other, OffloadedOptimizer(other.parameters(), adamw))):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(5):
            before = [p.clone() for p in m.parameters()]
            optimizer.zero_grad()
            torch.manual_seed(step)
            scaler.scale(m(torch.randn(4, 8)).square().sum()).backward()
            if step == 2:
                next(m.parameters()).grad[0, 0] = torch.inf
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, before, m.parameters())) == (step == 2)
            scales.append(scaler.get_scale())
    assert_same(model, other)
    assert scales[:5] == scales[5:]
    assert scales[2] == scales[1] / 2


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["model first", "optimizer first", "optimizer alone"])
def test_training_resumes_bit_by_bit(factory: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, order: str) -> None:
    """Also if the rounded parameters are loaded after their fp32 originals."""
    model = mlp().to(dtype)
    optimizer = OffloadedOptimizer(model.parameters(), factory)
    train(model, optimizer, 2)
    state, weights = saved(optimizer.state_dict()), saved(model.state_dict())
    train(model, optimizer, 3, 2)

    other = mlp().to(dtype)
    resumed = OffloadedOptimizer(other.parameters(), factory)
    if order == "model first":
        other.load_state_dict(weights)
    resumed.load_state_dict(state)
    if order == "optimizer first":
        other.load_state_dict(weights)
    train(other, resumed, 3, 2)
    assert_same(model, other)
    for h, g in zip(optimizer._host.values(), resumed._host.values(), strict=True):
        assert torch.equal(h, g)


def test_a_rate_that_a_scheduler_set_is_in_the_state() -> None:
    model = mlp()
    optimizer = OffloadedOptimizer(model.parameters(), adamw)
    optimizer.param_groups[0]["lr"] = 0.125
    resumed = OffloadedOptimizer(mlp().parameters(), adamw)
    resumed.load_state_dict(saved(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 0.125


def load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(weights)


def load_assigned(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        p.data = weights[name].clone()


def copy_in_place(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])


@pytest.mark.parametrize("change", [load, load_assigned, copy_in_place])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_parameters_that_somebody_else_changed_are_taken_over(change: Callable[..., None], steps_before: int) -> None:
    """Else the next step would write back what the host remembers."""
    torch.manual_seed(9)
    weights = {name: torch.randn_like(value) for name, value in mlp().state_dict().items()}
    model = mlp()
    other = copy.deepcopy(model)
    for m, optimizer in ((model, adamw(model.parameters())), (other, OffloadedOptimizer(other.parameters(), adamw))):
        train(m, optimizer, steps_before)
        change(m, weights)
        if isinstance(optimizer, OffloadedOptimizer):
            assert all(map(torch.equal, optimizer.state_dict()["parameters"][0], m.parameters()))
        train(m, optimizer, 2, 5)
    assert_same(model, other)


def test_of_a_changed_bf16_parameter_what_did_not_change_keeps_its_digits() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer([p], lambda groups: torch.optim.SGD(groups, lr=1e-3))
    p.grad = -torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[1] = 5
    (host,) = optimizer.state_dict()["parameters"][0]
    assert torch.equal(host, torch.tensor([1.001, 5.0]))


def test_a_change_that_torch_does_not_count_is_undone_as_documented() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = OffloadedOptimizer([p], lambda groups: torch.optim.SGD(groups, lr=1.0))
    p.data.fill_(7)
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == 0
    assert "``p.data`` alone is the exception" in (OffloadedOptimizer.__doc__ or "")


def test_parameters_without_gradients_stay() -> None:
    """Not even decay moves them."""
    model = mlp()
    other = copy.deepcopy(model)
    for m, optimizer in ((model, adamw(model.parameters())), (other, OffloadedOptimizer(other.parameters(), adamw))):
        before = [p.clone() for p in m[2].parameters()]
        train(m[:2], optimizer, 2)
        assert all(map(torch.equal, before, m[2].parameters()))
        train(m, optimizer, 1, 2)
        assert not any(map(torch.equal, before, m[2].parameters()))
    assert_same(model, other)


def test_several_groups_have_options_of_their_own() -> None:
    def groups(m: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": m[0].parameters(), "lr": 0.3},
            {"params": list(m[1].parameters()), "weight_decay": 0.5},
            {"params": m[2][0].weight},
        ]

    model = mlp()
    other = copy.deepcopy(model)
    train(model, adamw(groups(model)))
    optimizer = OffloadedOptimizer(groups(other), adamw)
    train(other, optimizer)
    assert_same(model, other)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.3, 0.1), (0.05, 0.5), (0.05, 0.1)]


def test_a_group_can_be_added() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    for m, optimizer in ((model, adamw(model[0].parameters())), (other, OffloadedOptimizer(other[0].parameters(), adamw))):
        train(m, optimizer, 1)
        optimizer.add_param_group({"params": m[1].parameters(), "lr": 0.5})
        optimizer.add_param_group({"params": list(m[2].parameters())})
        train(m, optimizer, 2, 1)
        assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.5, 0.05]
    assert_same(model, other)


def test_named_parameters_are_taken() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    train(model, adamw(model.parameters()))
    train(other, OffloadedOptimizer(other.named_parameters(), adamw))
    assert_same(model, other)


def test_a_closure_gives_the_loss() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = OffloadedOptimizer([p], lambda groups: torch.optim.SGD(groups, lr=0.5))

    def closure() -> float:
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert p.item() == 0


def test_gradients_on_the_host_are_released_if_the_step_fails() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("the step fails")

    model = mlp()
    optimizer = OffloadedOptimizer(model.parameters(), Failing)
    with pytest.raises(ArithmeticError, match="the step fails"):
        train(model, optimizer, 1)
    assert all(h.grad is None for h in optimizer._host.values())


def test_it_steps_in_backward() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    train(model, adamw(model.parameters()))
    train(other, step_in_backward(other, lambda params: OffloadedOptimizer(params, adamw)))
    assert_same(model, other)


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_a_copy_is_refused(how: Callable[[Any], Any]) -> None:
    text = "An offloaded optimizer is tied to the parameters of its model and cannot be copied; save its state_dict() instead."
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        how(OffloadedOptimizer(mlp().parameters(), adamw))


@pytest.mark.parametrize(
    ("factory", "made"),
    [
        (lambda groups: None, "NoneType"),
        (lambda groups: sgd(mlp().parameters()), "SGD"),
        (lambda groups: sgd(groups[0]["params"][:1]), "SGD"),
    ],
    ids=["nothing", "other parameters", "some of them"],
)
def test_a_factory_of_something_else_is_refused(factory: Any, made: str) -> None:
    text = (
        f"The factory makes an optimizer of the groups it is given, and it made a {made} of other parameters; "
        "write for example lambda groups: torch.optim.AdamW(groups, lr=1e-3)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        OffloadedOptimizer(mlp().parameters(), factory)


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    model = mlp()
    text = (
        "The state of an offloaded optimizer has an optimizer and parameters, and this one has ['param_groups', 'state']; "
        "load what state_dict() of an OffloadedOptimizer gave."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        OffloadedOptimizer(model.parameters(), adamw).load_state_dict(adamw(model.parameters()).state_dict())


def test_the_state_of_another_model_is_refused_and_changes_nothing() -> None:
    model, optimizer = mlp(), OffloadedOptimizer(nn.Linear(2, 1).parameters(), adamw)
    before, state = copy.deepcopy(model), optimizer.state_dict()
    optimizer = OffloadedOptimizer(model[0].parameters(), adamw)
    text = (
        "The state has a value for each parameter: its groups have the shapes [[(1, 2), (1,)]], these [[(8, 8), (8,)]]; "
        "make the optimizer of the same model."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.load_state_dict(state)
    assert_same(model, before)
