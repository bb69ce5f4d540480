"""Activation checkpointing: the same bits in loss, gradients and statistics, then the bytes that it saves.

Reports that cannot be tested yet: a variable marked ready twice under DistributedDataParallel (accelerate issue 3536,
ms-swift issue 3171, FocalNet issue 4, pytorch pull 69060) comes with the parallel module. Its cause, a gradient hook that
fires more than once a backward, is tested here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import io
import itertools
import pickle
import random
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

import vramlab as vl
from vramlab.tasks.models import GPT, Block, DecoderConfig, decoder
from vramlab.techniques import Precision, Window, checkpoint_blocks, step_in_backward
from vramlab.techniques.checkpointing import KEPT, _replays_random_numbers, find_blocks


def gpt(layers: int = 3, dropout: float = 0.1) -> GPT:
    torch.manual_seed(3)
    return GPT(DecoderConfig(layers=layers, heads=2, width=16, sequence=8, vocabulary=32, dropout=dropout))


TOKENS = torch.arange(32).view(4, 8)


def backward(model: nn.Module, x: Any = TOKENS, **autocast: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one pass with fixed dropout masks."""
    model.zero_grad()
    torch.manual_seed(7)
    with torch.autocast("cpu", **autocast) if autocast else torch.enable_grad():
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = out.float().square().mean()
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_bits(
    model: nn.Module, *, every: int = 1, x: Any = TOKENS, policy: str = "all", debug: bool = False, **autocast: Any
) -> None:
    """Loss, gradients and buffers with and without checkpointing."""
    other = copy.deepcopy(model)
    loss, gradients = backward(model, x, **autocast)
    checkpoint_blocks(other, every, policy, debug=debug)
    other_loss, other_gradients = backward(other, x, **autocast)
    assert torch.equal(loss, other_loss)
    assert len(gradients) == len(other_gradients) > 0
    assert all(map(torch.equal, gradients, other_gradients))
    for (name, buffer), other_buffer in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(buffer, other_buffer), name


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Counted(nn.Module):
    """A block that counts how often its forward runs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).tanh()


def counted(n: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Counted() for _ in range(n)))


def calls(model: nn.Module) -> list[int]:
    return [m.calls for m in model.modules() if isinstance(m, Counted)]


# Same numbers as without.


@pytest.mark.parametrize("every", [1, 2, 3, 9])
@pytest.mark.parametrize("autocast", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}], ids=["fp32", "amp-bf16", "amp-fp16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no dropout", "dropout"])
def test_loss_and_gradients_are_bitwise_the_same(every: int, autocast: dict[str, Any], dropout: float) -> None:
    assert_same_bits(gpt(dropout=dropout), every=every, **autocast)


def test_without_the_random_state_dropout_would_differ() -> None:
    """The comparison above can fail: torch's checkpoint without its saved random state gives other gradients."""
    model = gpt(dropout=0.3)
    _, right = backward(model)
    for block in model.blocks:
        block.forward = _careless(block.forward)
    assert not all(map(torch.equal, right, backward(model)[1]))


def _careless(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("recipe", [{}, {"precision": "amp-bf16"}, {"precision": "amp-fp16"}, {"precision": "bf16"}], ids=str)
def test_runs_with_and_without_have_equal_losses(recipe: dict[str, Any]) -> None:
    options = {"micro_batch": 2, "accumulation": 2, "clip_norm": 0.5, **recipe}
    task = vl.tasks.gpt("nano", sequence=16, dropout=0.1)
    plain, every, second = (
        vl.run(task, vl.Recipe(**options, **extra), steps=4, progress=False)
        for extra in ({}, {"checkpointing": "blocks"}, {"checkpointing": "blocks", "checkpoint_every": 2})
    )
    assert plain.losses == every.losses == second.losses
    assert len(set(plain.losses)) == 4


def test_a_second_backward_through_a_kept_graph_works() -> None:
    """pytorch pull 90105: the first versions computed a block again for the first backward alone."""
    model = counted()
    x = torch.randn(2, 4)
    checkpoint_blocks(model)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    once = model[0].linear.weight.grad.clone()
    loss.backward()
    assert torch.equal(model[0].linear.weight.grad, 2 * once)


def test_two_losses_of_one_trunk_go_backward_one_after_the_other() -> None:
    """Each backward computes the blocks again; running statistics still count the batch once."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())

    model, results = nn.Sequential(block(), block()), []
    for checkpointing in (False, True):
        other = copy.deepcopy(model)
        if checkpointing:
            checkpoint_blocks(other)
        torch.manual_seed(7)
        y = other(torch.ones(8, 4))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        results.append([*gradients(other), *other.buffers()])
    assert all(map(torch.equal, *results))


def test_autograd_grad_works() -> None:
    """pytorch issue 103726, pull 90105: reentrant checkpointing refuses it."""
    model, x = counted(), torch.randn(2, 4, requires_grad=True)
    (right,) = torch.autograd.grad(model(x).sum(), x)
    checkpoint_blocks(model)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, right)


@pytest.mark.parametrize("both", [True, False], ids=["both uses", "the first use"])
def test_a_gradient_hook_fires_once_a_backward(both: bool) -> None:
    """pytorch issue 81296: with reentrant checkpointing, hooks on shared parameters fire twice."""
    block = Counted()
    model = nn.Sequential(block, block if both else nn.Sequential(block.linear, nn.Tanh()))
    checkpoint_blocks(model, blocks=Counted)
    fired: list[int] = []
    block.linear.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    backward(model, torch.randn(2, 4))
    assert fired == [1]


class Twice(nn.Module):
    """One block used twice, as recurrent models and tied layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x).tanh()
        return x


def test_a_block_may_be_used_twice() -> None:
    assert_same_bits(Twice(), x=torch.randn(3, 4))


@pytest.mark.parametrize("policy", ["all", "selective"])
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_nested_blocks_of_the_same_class_work(policy: str, debug: bool) -> None:
    """pytorch pull 90105."""

    class Nest(nn.Module):
        def __init__(self, inner: int = 0) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
            self.inner = nn.ModuleList(Nest() for _ in range(inner))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for nest in self.inner:
                x = nest(x)
            return self.dropout(self.linear(x)).tanh()

    model = nn.Sequential(Nest(2), Nest(2))
    assert_same_bits(model, x=torch.randn(3, 4), policy=policy, debug=debug)
    assert len(checkpoint_blocks(model, blocks=Nest, policy=policy).blocks) == 6
    other = copy.deepcopy(model)
    right = backward(copy.deepcopy(model), torch.ones(3, 4))
    assert all(map(torch.equal, right[1], backward(other, torch.ones(3, 4))[1]))


def test_a_block_in_a_block_is_computed_three_times() -> None:
    """pytorch issue 103726: once in forward, once for the outer block, once for itself."""
    model = nn.Sequential(*(nn.Sequential(Counted(), nn.Dropout(0.5), Counted(), nn.Dropout(0.5)) for _ in range(2)))
    other = copy.deepcopy(model)
    checkpoint_blocks(other, blocks=lambda module: isinstance(module, nn.Sequential) and module is not other)
    checkpoint_blocks(other, blocks=Counted)
    right, found = backward(model, torch.ones(3, 4)), backward(other, torch.ones(3, 4))
    assert all(map(torch.equal, right[1], found[1]))
    assert calls(other) == [3, 3, 3, 3]


# What blocks take and give.


class Rich(nn.Module):
    """A block with keywords, among them names that torch's checkpoint has too, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: dict[str, torch.Tensor], mask: torch.Tensor | None = None, *, debug: float = 1.0, function: Any = None) -> Any:
        y = self.dropout(self.linear(x["x"])) * debug
        if mask is not None:
            y = y * mask
        return {"x": y if function is None else function(y), "n": 3, "none": None}, [y.sum()]


class RichModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rich() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, extra = {"x": x}, []
        for block in self.blocks:
            state, more = block(state, mask=x > 0, debug=2.0, function=torch.tanh)
            assert (state["n"], state["none"]) == (3, None)
            extra += more
        return state["x"] + sum(extra)


def test_keywords_dicts_tuples_and_lists_pass_through() -> None:
    """pytorch issue 124725: tensors in a dict lose their gradient. zea pull 612: keywords are refused."""
    assert_same_bits(RichModel(), x=torch.randn(3, 4))


@dataclasses.dataclass
class State:
    x: torch.Tensor
    n: int = 0
    mask: torch.Tensor | None = None


class Stateful(nn.Module):
    """A block from dataclass to dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, state: State, nothing: None = None) -> State:
        y = self.dropout(self.linear(state.x)).tanh()
        return State(y if state.mask is None else y * state.mask, state.n + 1, y > 0)


class StatefulModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state, None)
        assert state.n == 3
        return state.x


@pytest.mark.parametrize("policy", ["all", "selective"])
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_dataclasses_pass_through(policy: str, debug: bool) -> None:
    """pytorch issue 124725."""
    assert_same_bits(StatefulModel(), x=torch.randn(3, 4), policy=policy, debug=debug)


def test_the_random_state_is_saved_for_a_device_whose_tensors_are_hidden_in_a_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch saves it for devices whose tensors it finds in the arguments; the block's parameters show it the device."""
    seen: list[list[int]] = []

    def infer(*args: Any) -> str:
        seen.append([id(leaf) for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)])
        return "cuda"

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", infer)
    model = StatefulModel()
    checkpoint_blocks(model)
    model(torch.randn(3, 4))
    # checkpoint_blocks tries the device out first
    assert seen[-3:] == [[id(block.linear.weight)] for block in model.blocks]


def test_a_block_called_by_keyword_alone_works() -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(8, 2, dropout=0.5), Block(8, 2, dropout=0.5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x=x)
            return x

    assert_same_bits(ByKeyword(), x=torch.randn(2, 3, 8))


def test_the_arguments_can_still_be_looked_up() -> None:
    """Libraries read them, transformers for one."""
    model = RichModel()
    right = inspect.signature(model.blocks[0].forward)
    checkpoint_blocks(model)
    assert inspect.signature(model.blocks[0].forward) == right


def test_hooks_on_a_block_run_once() -> None:
    model = counted()
    checkpoint_blocks(model)
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    backward(model, torch.randn(2, 4))
    assert seen == [1]


def test_an_exception_in_a_block_is_the_callers() -> None:
    model = counted()
    checkpoint_blocks(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 5))
    backward(model, torch.randn(2, 4))  # and nothing is left behind


def test_a_frozen_model_gives_its_output() -> None:
    model = counted().requires_grad_(False)
    right = model(torch.ones(2, 4))
    checkpoint_blocks(model)
    assert torch.equal(model(torch.ones(2, 4)), right)


# When forward runs.


def test_a_training_pass_runs_each_checkpointed_block_twice() -> None:
    for every, right in ((1, [2, 2, 2, 2, 2]), (2, [2, 1, 2, 1, 2]), (3, [2, 1, 1, 2, 1]), (9, [2, 1, 1, 1, 1])):
        model = counted(5)
        handle = checkpoint_blocks(model, every)
        backward(model, torch.randn(2, 4))
        assert calls(model) == right
        assert handle.blocks == [str(i) for i, n in enumerate(right) if n == 2]


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients_runs_each_block_once(off: Callable[[], Any]) -> None:
    model = counted()
    checkpoint_blocks(model)
    with off():
        assert not model(torch.randn(2, 4)).requires_grad
    assert calls(model) == [1, 1, 1]


def test_evaluation_between_training_steps_changes_nothing() -> None:
    model = gpt(dropout=0.3)
    checkpoint_blocks(model)
    _, right = backward(model)
    model.eval()
    with torch.no_grad():
        model(TOKENS)
    model.train()
    assert all(map(torch.equal, right, backward(model)[1]))


# Statistics.


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
@pytest.mark.parametrize("tracking", [True, False], ids=["tracking", "not tracking"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_batch_norm_counts_each_batch_once(momentum: float | None, tracking: bool, affine: bool) -> None:
    """Running mean and variance move twice, and evaluation gets worse.

    pytorch issues 96136 and 62471, YOLO-Master issue 262, insightface issue 2053, pytorch-pfn-extras pull 117.
    """

    def block() -> nn.Module:
        norm = nn.BatchNorm1d(4, momentum=momentum, track_running_stats=tracking, affine=affine)
        return nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU())

    model = nn.Sequential(block(), block())
    other = copy.deepcopy(model)
    handle = checkpoint_blocks(other)
    for _ in range(3):
        x = torch.randn(16, 4) + 5
        backward(model, x)
        backward(other, x)
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    if tracking:
        assert [int(m.num_batches_tracked) for m in other.modules() if isinstance(m, nn.BatchNorm1d)] == [3, 3]
    assert [m.momentum for m in other.modules() if isinstance(m, nn.BatchNorm1d)] == [momentum] * 2
    handle.remove()
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_frozen_batch_norm_stays_as_it_is() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    before = [b.clone() for b in model.buffers()]
    assert_same_bits(model, x=torch.randn(8, 4))
    assert all(map(torch.equal, model.buffers(), before))


def test_instance_norm_with_running_statistics_counts_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True)) for _ in range(2)))
    assert_same_bits(model, x=torch.randn(3, 2, 4, 4))


def test_the_momentum_is_back_if_the_recomputation_fails() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y = self.norm(x)
            if self.calls == 2:
                raise ValueError("the second pass fails")
            return y * x

    model = nn.Sequential(Failing())
    checkpoint_blocks(model, blocks=Failing)
    loss = model(torch.randn(8, 4, requires_grad=True)).sum()
    with pytest.raises(ValueError, match="the second pass fails"):
        loss.backward()
    assert model[0].norm.momentum == 0.1
    assert int(model[0].norm.num_batches_tracked) == 1


def test_a_resnet_trains_to_the_same_statistics() -> None:
    task = vl.tasks.resnet("nano")
    models: list[nn.Module] = []

    def kept() -> nn.Module:
        models.append(task.model())
        return models[-1]

    losses = []
    for checkpointing in ("none", "blocks"):
        recipe = vl.Recipe(micro_batch=4, accumulation=2, checkpointing=checkpointing)  # type: ignore[arg-type]
        losses.append(vl.run(vl.Task(kept, task.batch, task.loss), recipe, steps=3, progress=False).losses)
    assert losses[0] == losses[1]
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))
    assert int(models[1].blocks[0].norm1.num_batches_tracked) == 6


# Before and after.


def test_remove_leaves_the_model_as_it_was() -> None:
    model = gpt()
    before, keys = {name: dict(vars(m)) for name, m in model.named_modules()}, list(model.state_dict())
    handle = checkpoint_blocks(model)
    assert list(model.state_dict()) == keys
    assert all("forward" in vars(block) for block in model.blocks)
    handle.remove()
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    assert model.blocks[0].forward.__func__ is Block.forward
    handle.remove()  # twice is once
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    assert pickle.dumps(model)
    backward(copy.deepcopy(model))


def test_after_remove_a_pass_runs_once() -> None:
    model = counted()
    checkpoint_blocks(model).remove()
    backward(model, torch.randn(2, 4))
    assert calls(model) == [1, 1, 1]


def test_remove_restores_a_forward_that_somebody_had_set() -> None:
    model = counted(2)
    own = model[0].forward
    model[0].forward = lambda x: own(x) * 2  # as libraries that place modules on devices do
    theirs = vars(model[0])["forward"]
    assert not torch.equal(model(torch.ones(1, 4)), counted(2)(torch.ones(1, 4)))
    right = backward(model, torch.ones(1, 4))
    handle = checkpoint_blocks(model)
    found = backward(model, torch.ones(1, 4))
    assert torch.equal(found[0], right[0])
    assert all(map(torch.equal, found[1], right[1]))
    handle.remove()
    assert vars(model[0])["forward"] is theirs
    assert "forward" not in vars(model[1])


def test_the_handle_is_a_context_manager_too() -> None:
    model = counted()
    with pytest.raises(KeyError), checkpoint_blocks(model) as handle:  # noqa: PT012
        assert handle.blocks == ["0", "1", "2"]
        backward(model, torch.randn(2, 4))
        raise KeyError
    assert calls(model) == [2, 2, 2]
    assert not any("forward" in vars(block) for block in model)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded], ids=["deepcopy", "pickle", "save"]
)
def test_a_copy_of_a_checkpointed_model_uses_its_own_parameters(how: Callable[[nn.Module], Any]) -> None:
    """A forward that remembers the block it was made for would run the original's parameters in the copy."""
    model = gpt(dropout=0.0)
    checkpoint_blocks(model)
    right = backward(model)
    other = how(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.zero_grad()
    found = backward(other)
    assert torch.equal(found[0], right[0])
    assert all(map(torch.equal, found[1], right[1]))
    assert all(p.grad is None for p in model.parameters())
    assert all(isinstance(vars(block)["forward"], type(vars(model.blocks[0])["forward"])) for block in other.blocks)  # still checkpointed


def test_a_run_releases_its_model_without_the_garbage_collector() -> None:
    """On a card the bytes would stay until Python happens to collect cycles."""
    task = vl.tasks.gpt("nano", sequence=8)
    blocks: list[Any] = []

    def model() -> nn.Module:
        made = task.model()
        blocks.extend(map(weakref.ref, [made, *made.blocks, *made.parameters()]))
        return made

    gc.collect()
    gc.disable()
    try:
        vl.run(vl.Task(model, task.batch, task.loss), vl.Recipe(micro_batch=1, checkpointing="blocks"), steps=3, progress=False)
        assert not [ref() for ref in blocks if ref() is not None]
    finally:
        gc.enable()


# The saving.


def saved_activations(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """Bytes of activations by module between forward and backward."""
    with vl.record(model) as trace:
        loss = model(x).square().mean()
        trace_now = trace.by_module("end")
        loss.backward()
    if "activations" not in trace_now:
        return {}
    return {str(name): int(n) for name, n in trace_now["activations"].items() if n}


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    """The bytes a GPT block saves for backward, by hand: 16 tensors of its input's size and some statistics, against 1."""
    b, t, c, heads = 4, 8, 16, 2
    x = 4 * b * t * c  # bytes of one fp32 tensor (batch, time, width)
    statistics = 4 * b * t  # mean, or 1 / deviation, of a layer norm
    saved = (
        (x + 2 * statistics)  # norm1
        + 3 * x  # queries, keys and values
        + (x + 4 * b * heads * t)  # attention's output, and the log-sum-exp of each row of scores
        + x  # the residual stream after attention
        + (x + 2 * statistics)  # norm2
        + (4 * x + 4 * x)  # the hidden layer before and after GELU
        + x  # the residual stream after the MLP: the next block's input
    )

    def held(layers: int, checkpointing: bool) -> int:
        model = gpt(layers=layers, dropout=0.0)
        if checkpointing:
            checkpoint_blocks(model)
        return sum(saved_activations(model, TOKENS).values())

    for layers in (1, 2, 3):
        assert held(layers + 1, False) - held(layers, False) == saved
        assert held(layers + 1, True) - held(layers, True) == x
        assert held(layers, False) - held(layers, True) == layers * (saved - x)


def test_every_second_block_saves_half() -> None:
    def held(every: int | None) -> int:
        model = gpt(layers=4, dropout=0.0)
        if every:
            checkpoint_blocks(model, every)
        return sum(saved_activations(model, TOKENS).values())

    plain, all_blocks = held(None), held(1)
    assert held(2) == (plain + all_blocks) / 2
    assert held(4) == held(9) == plain - (plain - all_blocks) / 4


@pytest.mark.parametrize(
    ("batch", "how", "peak", "saved"),
    [
        (2048, "plain", 39_911_688, 37_748_736),
        (2048, "blocks", 10_683_656, 4_194_304),
        (2048, "whole", 39_911_688, 524_288),
        (32, "plain", 1_106_952, 589_824),
        (32, "blocks", 1_106_696, 65_536),
        (32, "whole", 1_106_696, 8_192),
    ],
)
def test_one_checkpoint_around_all_or_a_small_batch_saves_nothing(batch: int, how: str, peak: int, saved: int) -> None:
    """8 blocks Linear(64, 256), GELU, Linear(256, 64): pytorch issues 77284 and 80151, pull 78752; peaks measured there.

    Saved before backward, by hand: each block its output and two hidden tensors, a checkpointed one its output alone. In
    backward a whole model is alive again, and with a small batch the gradients are what counts.
    """
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)))
    x, output, hidden = torch.randn(batch, 64), 4 * batch * 64, 4 * batch * 256
    assert saved == {"plain": 8 * (output + 2 * hidden), "blocks": 8 * output, "whole": output}[how]
    if how == "whole":
        model = nn.Sequential(model)
    handle = checkpoint_blocks(model, blocks=(lambda m: m is model[0]) if how == "whole" else None) if how != "plain" else None
    for _ in range(2):  # nothing grows from step to step
        with vl.record(model) as trace:
            out = model(x)
            assert trace.breakdown("end").activations == saved
            out.sum().backward()
            del out
        assert trace.peak - trace.baseline == peak
        assert trace.peak_phase == "backward"
        model.zero_grad()
    if handle:
        assert ("one block saves nothing of its own peak" in handle.explain()) == (how == "whole")
        assert ("the peak did not fall, it stands elsewhere" in handle.explain()) == (how == "blocks")


def test_recorded_runs_hold_fewer_activations_with_checkpointing() -> None:
    task = vl.tasks.gpt("nano", sequence=32)
    plain, every, second = (
        vl.run(task, vl.Recipe(micro_batch=4, **extra), steps=2, progress=False).reports[1].memory
        for extra in ({}, {"checkpointing": "blocks"}, {"checkpointing": "blocks", "checkpoint_every": 2})
    )
    assert plain is not None
    assert every is not None
    assert second is not None
    held = [t.breakdown("forward").activations for t in (plain, second, every)]
    assert held[0] > held[1] > held[2]
    assert plain.breakdown("peak").parameters == every.breakdown("peak").parameters


@pytest.mark.parametrize("options", [{}, {"policy": "selective"}, {"debug": True}], ids=str)
def test_recording_and_checkpointing_hold_no_activation(options: dict[str, Any]) -> None:
    """pytorch issue 115255, opacus issue 176: hooks that store what they see keep it, checkpointed or not."""
    model = gpt()

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]

    before = hooks()
    gc.collect()
    gc.disable()
    try:
        with vl.record(model), checkpoint_blocks(model, **options):
            hidden = model.blocks[0](torch.randn(2, 8, 16, requires_grad=True))
            out = model.blocks[1](hidden)
            out.sum().backward()
        alive = [weakref.ref(hidden.untyped_storage()), weakref.ref(hidden), weakref.ref(out)]
        del hidden, out
        assert [ref() for ref in alive] == [None, None, None]
    finally:
        gc.enable()
    assert hooks() == before


def test_hooks_for_saved_tensors_inside_a_block_keep_what_they_get() -> None:
    """pytorch issue 115255: the inner pair takes the tensors before checkpointing sees them. Documented."""

    class Saving(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                return x.exp() * x

    model, x = nn.Sequential(Saving(), Saving()), torch.randn(4, requires_grad=True)
    (right,) = torch.autograd.grad(model(x).sum(), x)
    handle = checkpoint_blocks(model, blocks=Saving)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, right)
    assert "recomputed 0 times" in handle.explain()
    assert "``saved_tensors_hooks`` inside a block" in (checkpoint_blocks.__doc__ or "")


def test_nothing_is_left_of_a_step() -> None:
    model = gpt()
    checkpoint_blocks(model)
    backward(model)
    model.zero_grad()
    gc.collect()
    with vl.record(model) as trace:
        backward(model)
        model.zero_grad()
    assert trace.breakdown("end").activations == 0
    assert trace.breakdown("end").gradients == 0


# Together with the others.


def test_autocast_outside_with_a_weight_used_before_and_inside() -> None:
    """pytorch issue 141896: the cache of weight copies differs between the passes."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(nn.Sequential(self.linear, nn.GELU()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            for block in self.blocks:
                x = block(x)
            return x

    assert_same_bits(Shared(), x=torch.randn(4, 8), dtype=torch.bfloat16)


def test_accumulation_clipping_and_the_loss_scaler_see_the_same_gradients() -> None:
    moved = []
    for checkpointing in (False, True):
        model = gpt(dropout=0.2)
        optimizer, precision, window = torch.optim.SGD(model.parameters(), lr=0.1), Precision("amp-fp16"), Window(3)
        if checkpointing:
            checkpoint_blocks(model)
        torch.manual_seed(5)
        for size in (4, 2, 3):
            with precision.autocast("cpu"):
                loss = F.cross_entropy(model(TOKENS[:size]).float().flatten(0, 1), TOKENS[:size].flatten(), reduction="sum")
            precision.backward(window.share(loss, 8 * size))
        window.close(model.parameters())
        assert precision.step(optimizer, clip_norm=0.1)
        moved.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *moved))


# Which blocks.


def test_blocks_of_the_built_in_models() -> None:
    for task, names in (
        (vl.tasks.gpt("nano"), ["blocks.0", "blocks.1"]),
        (vl.tasks.gpt("llama-nano"), ["blocks.0", "blocks.1"]),
        (vl.tasks.vit("nano"), [f"blocks.{i}" for i in range(4)]),
        (vl.tasks.resnet("nano"), [f"blocks.{i}" for i in range(6)]),
    ):
        assert list(find_blocks(task.model())) == names


@pytest.mark.parametrize(
    ("name", "kind", "count"), [("resnet50", "Bottleneck", 16), ("vit_b_16", "EncoderBlock", 12), ("densenet121", "_DenseLayer", 58)]
)
def test_blocks_of_torchvision_models(name: str, kind: str, count: int) -> None:
    import torchvision

    with torch.device("meta"):
        blocks = find_blocks(getattr(torchvision.models, name)(weights=None))
    assert (len(blocks), {type(block).__name__ for block in blocks.values()}) == (count, {kind})


def transformers_models() -> dict[str, Callable[[], nn.Module]]:
    import transformers as hf

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    llama = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 64}
    gpt2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 32, **ends}
    t5 = {"num_layers": 2, "num_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "vocab_size": 64, "decoder_start_token_id": 0}
    return {
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "GPT-2, eager attention": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, attn_implementation="eager")),
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, **llama, **ends)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["GPT-2", "GPT-2, eager attention", "Llama", "T5"])
def test_a_transformers_model_trains_to_the_same_bits_although_it_has_a_cache(name: str) -> None:
    """Its cache for generation is on by default; a second pass would append the same keys again."""
    torch.manual_seed(0)
    model = transformers_models()[name]().train()
    inputs = {"input_ids": torch.randint(64, (2, 8))}
    if name == "T5":
        inputs["decoder_input_ids"] = inputs["input_ids"]

    def logits(_: Any) -> torch.Tensor:
        return model(**inputs).logits

    holder = nn.Module()
    holder.model, holder.forward = model, logits  # type: ignore[assignment]
    caching = backward(holder)
    handle = checkpoint_blocks(holder)
    assert len(handle.blocks) == (4 if name == "T5" else 2)
    assert model.config.use_cache is False
    found = backward(holder)
    handle.remove()
    assert model.config.use_cache is True
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    right = backward(holder)
    assert torch.equal(found[0], right[0])
    assert all(map(torch.equal, found[1], right[1]))
    for a, b in zip(found[1], caching[1], strict=True):  # keys that went through the cache are rounded elsewhere
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_experts_inside_layers_are_not_taken_for_the_blocks() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
            self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[0](x)

    model = nn.ModuleList(Layer() for _ in range(3))
    assert list(find_blocks(model)) == ["0", "1", "2"]


def test_blocks_that_are_sequentials_are_told_from_the_sequentials_around_them() -> None:
    """Many models are written as lists of lists of layers; checkpointing the outer ones would save nothing."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    stages = nn.Sequential(nn.Sequential(block(), block()), nn.Sequential(block(), block(), block()))
    assert list(find_blocks(stages)) == ["0.0", "0.1", "1.0", "1.1", "1.2"]
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(block(), block()), nn.Linear(4, 4))
    assert list(find_blocks(model)) == ["1.0", "1.1"]
    assert_same_bits(model, x=torch.randn(2, 4))


def test_a_stage_of_a_single_block_counts_too() -> None:
    model = nn.Sequential(nn.Sequential(Counted()), nn.Sequential(Counted(), Counted()))
    assert list(find_blocks(model)) == ["0.0", "1.0", "1.1"]


def test_lists_that_are_never_called_are_not_taken_for_blocks() -> None:
    """Layers as pairs in a ModuleList: nothing calls the pair, so a checkpoint around it would silently do nothing."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([nn.GRU(4, 4), nn.Linear(4, 4)]) for _ in range(3))
    with pytest.raises(ValueError, match="Checkpointing needs repeated blocks"):
        find_blocks(model)
    assert list(find_blocks(model, nn.Linear)) == ["layers.0.1", "layers.1.1", "layers.2.1"]


def test_a_module_dict_of_blocks_counts_too() -> None:
    model = nn.ModuleDict({"a": Counted(), "b": Counted()})
    assert list(find_blocks(model)) == ["a", "b"]


def test_a_model_of_one_layer_has_one_block() -> None:
    model = decoder(DecoderConfig(layers=1, heads=1, width=4, sequence=8, vocabulary=32))
    assert list(find_blocks(model)) == ["blocks.0"]


def test_the_class_can_be_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    handle = checkpoint_blocks(model, blocks=nn.Linear)
    assert handle.blocks == ["0", "2"]
    assert list(find_blocks(gpt(), nn.LayerNorm))[:3] == ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1"]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))], ids=repr)
def test_a_model_without_repeated_blocks_is_refused(model: nn.Module) -> None:
    text = rf"Checkpointing needs repeated blocks: {type(model).__name__} has no ModuleList or Sequential of one class"
    with pytest.raises(ValueError, match=rf"^{text}\. Name their class: checkpoint_blocks\(model, blocks=MyBlock\)\.$"):
        checkpoint_blocks(model)
    assert "forward" not in vars(model)


def test_a_run_of_a_model_without_repeated_blocks_is_refused() -> None:
    task = vl.Task(lambda: nn.Linear(2, 2), lambda n, d: torch.randn(n, 2), lambda m, b: (m(b).sum(), len(b)))
    with pytest.raises(ValueError, match="Checkpointing needs repeated blocks: Linear has no ModuleList"):
        vl.run(task, vl.Recipe(checkpointing="blocks"), steps=1, progress=False)


def test_a_function_can_say_which() -> None:
    model = gpt(layers=4)
    handle = checkpoint_blocks(model, blocks=lambda module: isinstance(module, Block) and module is not model.blocks[2])
    assert handle.blocks == ["blocks.0", "blocks.1", "blocks.3"]


def test_a_function_that_finds_none_is_refused() -> None:
    class Nobody:
        def __call__(self, module: nn.Module) -> bool:
            return False

        def __repr__(self) -> str:
            return "nobody"

    text = "GPT has no module of which blocks=nobody is true; name the class of one of its modules."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        checkpoint_blocks(gpt(), blocks=Nobody())


@pytest.mark.parametrize("policy", ["some", "", None, 1])
def test_a_policy_that_is_none_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=rf"^A policy is 'all' or 'selective', got {policy!r}\.$"):
        checkpoint_blocks(gpt(), policy=policy)


def test_a_class_that_does_not_occur_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^GPT has no block of class Conv2d; name the class of one of its modules\.$"):
        checkpoint_blocks(gpt(), blocks=nn.Conv2d)


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", None, True])
def test_every_is_a_whole_number_of_at_least_1(every: Any) -> None:
    with pytest.raises(ValueError, match=rf"^every is a whole number of at least 1, got {every!r}; 2 checkpoints every second block\.$"):
        checkpoint_blocks(gpt(), every)


# Selective.


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().removeprefix("aten::").split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def counted_operators(model: nn.Module, x: torch.Tensor, **options: Any) -> Counter[str]:
    model = copy.deepcopy(model)
    if options:
        checkpoint_blocks(model, **options)
    with Operators() as operators:
        backward(model, x)
    return operators.counts


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("autocast", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}], ids=["fp32", "amp-bf16", "amp-fp16"])
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_selective_gives_bitwise_the_same(every: int, autocast: dict[str, Any], debug: bool) -> None:
    assert_same_bits(gpt(dropout=0.3), every=every, policy="selective", debug=debug, **autocast)


def test_selective_counts_a_batch_in_the_statistics_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True)) for _ in range(2)))
    assert_same_bits(model, x=torch.randn(3, 2, 4, 4), policy="selective")


def test_the_names_of_kept_operators_are_those_of_torch() -> None:
    """pytorch pull 125795, torchtune pull 785: a name that matches nothing recomputes everything without a word."""
    assert {name for name in KEPT if not hasattr(torch.ops.aten, name)} == {"flex_attention"}
    assert hasattr(torch.ops.higher_order, "flex_attention")
    assert {"mm", "addmm", "bmm", "baddbmm", "convolution"} < KEPT
    forwards = {n for n in dir(torch.ops.aten) if n.startswith("_scaled_dot_product") and not n.endswith("_backward")}
    assert forwards <= KEPT


class Products(nn.Module):
    """One of each: a product with bias and without, of batches, a convolution, attention; and cheap things between."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.plain, self.conv = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, 4, 8)
        x = self.bias(x).tanh()
        x = self.plain(x).sigmoid()
        x = torch.bmm(x, x.transpose(1, 2)).exp().softmax(-1)
        x = torch.baddbmm(x, x, x).tanh()
        x = self.conv(x).tanh()
        heads = x.unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads).squeeze(1).repeat(1, 1, 2).tanh()


def test_selective_computes_kept_operators_once_and_the_others_twice() -> None:
    """pytorch pull 125795, torchtune pull 785: a Linear with a bias is an addmm, not an mm."""
    model, x = nn.Sequential(Products(), Products()), torch.randn(3, 4, 8)
    plain, every, selective = (
        counted_operators(model, x, **options) for options in ({}, {"policy": "all"}, {"policy": "selective", "every": 1})
    )
    kept = KEPT & plain.keys()
    assert kept >= {"addmm", "mm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"}
    for name in plain.keys() - {"detach"}:  # how torch keeps a result
        assert selective[name] == (plain if name in kept else every)[name], name
    for name in ("tanh", "sigmoid", "exp", "_softmax"):
        assert plain[name] < selective[name] <= 2 * plain[name], name
    for name in ("addmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"):
        assert plain[name] == selective[name] == every[name] / 2 == 2, name


def test_a_linear_layer_with_bias_is_computed_once_in_all() -> None:
    """pytorch pull 125795."""
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))), torch.randn(3, 8)
    assert counted_operators(model, x, policy="selective")["addmm"] == 2
    assert counted_operators(model, x, policy="all")["addmm"] == 4


def test_written_out_attention_is_kept_too() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v)

    model, x = nn.Sequential(Attention(), Attention()), torch.randn(2, 4, 8)
    plain, selective = counted_operators(model, x), counted_operators(model, x, policy="selective")
    assert selective["addmm"] == plain["addmm"] == 2
    assert selective["bmm"] == plain["bmm"]
    assert_same_bits(model, x=x, policy="selective")


def test_selective_keeps_bytes_between_those_of_all_and_plain() -> None:
    """Linear(64, 256), GELU, Linear(256, 64), by hand: of the two hidden tensors the product's result is kept."""
    batch, found = 32, {}
    output, hidden = 4 * batch * 64, 4 * batch * 256
    for policy in ("all", "selective", "plain"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)))
        if policy != "plain":
            checkpoint_blocks(model, policy=policy)
        with vl.record(model) as trace:
            out = model(torch.randn(batch, 64))
            found[policy] = trace.breakdown("end").activations
            del out
    inputs = {policy: n - 8 * output for policy, n in found.items()}
    assert inputs == {"all": 0, "selective": 8 * hidden, "plain": 8 * 2 * hidden}


def test_how_many_results_are_kept_is_reported() -> None:
    model, x = nn.Sequential(Products(), Products()), torch.randn(3, 4, 8)
    handle = checkpoint_blocks(model, policy="selective")
    backward(model, x)
    assert ", recomputed 2 times, 12 results of products and attention kept. " in handle.explain()
    assert "kept" not in checkpoint_blocks(gpt()).explain()


def test_selective_without_anything_to_keep_is_warned_of_once() -> None:
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Sequential(nn.Tanh(), nn.Sigmoid()))
    x = torch.randn(3, requires_grad=True)
    handle = checkpoint_blocks(model, policy="selective")
    with pytest.warns(UserWarning, match="^Selective checkpointing keeps") as warned:
        model(x).sum().backward()
    assert [str(warning.message) for warning in warned] == [
        f"Selective checkpointing keeps products and attention, and '{i}' has none: all is recomputed." for i in range(2)
    ]
    model(x).sum().backward()  # warnings are errors here
    assert ", 0 results of products and attention kept. " in handle.explain()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_selective_keeps_sparse_products_too() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("graph", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(torch.sparse.mm(self.graph, self.graph), self.linear(x)).relu()

    model = nn.Sequential(Sparse(), Sparse())
    right = backward(model, torch.ones(4, 4))
    checkpoint_blocks(model, policy="selective")
    assert all(map(torch.equal, right[1], backward(model, torch.ones(4, 4))[1]))


class InPlace(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.linear, self.selu = nn.Linear(4, 4), nn.SELU(inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.selu(self.linear(x).view(-1)).tanh()


def test_a_kept_result_that_is_changed_in_place_is_refused_with_block_and_operator() -> None:
    """pytorch issue 119590, pull 125795: early versions gave wrong gradients in silence."""
    model = nn.Sequential(InPlace(False), nn.Unflatten(0, (3, 4)), InPlace(True))
    checkpoint_blocks(model, policy="selective", blocks=InPlace)
    loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match="cached during selective activation checkpoint has been mutated") as refused:
        loss.backward()
    assert refused.value.__notes__ == [
        "Block '2' changes a result in place that selective checkpointing keeps, with elu_. Use its form without the underscore "
        "(inplace=False), or policy='all'."
    ]


def test_the_same_out_of_place_or_without_selection_is_right() -> None:
    """pytorch issue 119590."""
    for inplace, policy in ((False, "selective"), (True, "all")):
        model = nn.ModuleList([InPlace(inplace), InPlace(inplace)])
        model.forward = lambda x, blocks=model: blocks[1](blocks[0](x).view(3, 4))  # type: ignore[method-assign]
        right = backward(model, torch.ones(3, 4))
        checkpoint_blocks(model, policy=policy)
        found = backward(model, torch.ones(3, 4))
        assert torch.equal(right[0], found[0])
        assert all(map(torch.equal, right[1], found[1]))


def test_a_second_backward_through_a_selective_block_is_refused_by_torch() -> None:
    model = gpt()
    checkpoint_blocks(model, policy="selective")
    loss = model(TOKENS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        loss.backward()


# Impure blocks.


class Impure(nn.Module):
    """A block with a module inside whose result may depend on more than its inputs and parameters."""

    def __init__(self, change: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.inner, self.last = nn.Linear(4, 4), Changing(change), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.linear(x)).tanh())


class Changing(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.change, self.calls, self.cache = change, 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.change(x, self)


CLOCK = itertools.count(1)
IMPURE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "counter": lambda x, module: x * module.calls,
    "other path": lambda x, module: x.relu() if module.calls == 1 else x,
    "other size": lambda x, module: x if module.calls == 1 else x.repeat(2, 1),
    "cache": lambda x, module: x + len(module.cache) if module.cache.append(1) is None else x,
    "growing cache": lambda x, module: torch.cat([x, *[x] * (module.calls - 1)]),
    "global state": lambda x, module: x * next(CLOCK),
    "random numbers outside torch": lambda x, module: x * random.random(),
}


@pytest.mark.parametrize("policy", ["all", "selective"])
@pytest.mark.parametrize("name", IMPURE)
def test_debug_names_the_module_that_gives_something_else_the_second_time(name: str, policy: str) -> None:
    """pytorch issue 155171, LlamaFactory issue 6438, SAM3_LoRA issue 10, RWKV-PEFT issue 58.

    Torch compares numbers and shapes of tensors alone, so most of these give wrong gradients in silence.
    """
    model = nn.Sequential(Impure(lambda x, module: x), Impure(IMPURE[name]), Impure(lambda x, module: x))
    checkpoint_blocks(model, policy=policy, debug=True)
    loss = model(torch.randn(3, 4)).sum()
    text = (
        "Checkpointing computes a block twice, and '1.inner' gave something else the second time: it is no pure function of its inputs "
        "and parameters. Take what it counts, caches or draws out of the block, or leave the block out."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        loss.backward()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_same_shaped_change_is_silent_without_debug() -> None:
    """pytorch issue 155171: why debug exists."""
    model = nn.Sequential(Impure(IMPURE["counter"]), Impure(IMPURE["counter"]))
    right = backward(copy.deepcopy(model), torch.ones(3, 4))
    checkpoint_blocks(model)
    assert not all(map(torch.equal, right[1], backward(model, torch.ones(3, 4))[1]))


@pytest.mark.parametrize("last", [True, False], ids=["last operator", "before"])
def test_debug_names_a_block_that_changes_its_result_itself(last: bool) -> None:
    """A second pass ends early, before a block's last operators; and hooks on the block itself run once."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale += 1
            return self.linear(x).tanh() * self.scale if last else (self.linear(x) * self.scale).tanh()

    model = nn.Sequential(Scaled(), Scaled())
    checkpoint_blocks(model, debug=True)
    with pytest.raises(RuntimeError, match="computes a block twice, and '1' gave something else"):
        model(torch.randn(3, 4)).sum().backward()


def test_debug_looks_into_dataclasses() -> None:
    class Scaled(Stateful):
        scale = 1.0

        def forward(self, state: State, nothing: None = None) -> State:
            self.scale += 1
            return State(super().forward(state).x * self.scale, state.n + 1)

    model = StatefulModel()
    model.blocks = nn.ModuleList(Scaled() for _ in range(3))
    checkpoint_blocks(model, debug=True)
    with pytest.raises(RuntimeError, match=r"computes a block twice, and 'blocks\.2' gave something else"):
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("policy", ["all", "selective"])
def test_debug_says_nothing_of_pure_blocks(policy: str) -> None:
    class NaN(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, x, torch.nan)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), NaN(), nn.Linear(4, 4))

    model = nn.Sequential(block(), block(), block())
    handle = checkpoint_blocks(model, policy=policy, debug=True)
    loss, _ = backward(model, torch.randn(8, 4))
    assert loss.isnan()
    assert not any(module._forward_hooks for module in model.modules())
    assert "recomputed 3 times" in handle.explain()
    assert [int(m.num_batches_tracked) for m in model.modules() if isinstance(m, nn.BatchNorm1d)] == [1, 1, 1]


def test_debug_compares_every_backward_of_a_kept_graph() -> None:
    model = nn.Sequential(Impure(lambda x, module: x * (1 + module.calls // 5)), Impure(lambda x, module: x))
    checkpoint_blocks(model, debug=True)
    loss = model(torch.randn(3, 4)).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"and '0\.inner' gave something else the second time"):
        loss.backward()
    assert not any(module._forward_hooks for module in model.modules())


def test_debug_holds_nothing_after_backward() -> None:
    model = gpt()
    checkpoint_blocks(model, debug=True)
    with vl.record(model) as trace:
        backward(model)
        model.zero_grad()
    assert trace.breakdown("end").activations == 0


@pytest.mark.parametrize("policy", ["all", "selective"])
@pytest.mark.parametrize("name", ["other path", "other size"])
def test_torchs_error_names_the_block(name: str, policy: str) -> None:
    """pytorch issue 155171, LlamaFactory issue 6438, SAM3_LoRA issue 10, RWKV-PEFT issue 58."""
    model = nn.Sequential(*(Impure(IMPURE[name] if i == 1 else lambda x, module: x) for i in range(3)))
    text = "A different number of tensors|have different metadata|encountered during backward but not found in storage"
    with pytest.raises(RuntimeError, match=text) as refused, checkpoint_blocks(model, policy=policy):
        model(torch.randn(3, 4)).sum().backward()
    assert isinstance(refused.value, CheckpointError) or policy == "selective"
    assert refused.value.__notes__ == [
        "This was block '1'. In its second pass it took another path: it counts its calls, fills a cache, reads something that has "
        "changed, or autocast was on in one pass only. checkpoint_blocks(..., debug=True) names the module."
    ]
    assert not any("forward" in vars(block) for block in model)


# Random numbers.


@pytest.fixture
def untried() -> Iterator[None]:
    _replays_random_numbers.cache_clear()
    yield
    _replays_random_numbers.cache_clear()


@pytest.mark.usefixtures("untried")
def test_a_device_that_does_not_replay_random_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch pull 194478: there dropout has two masks, and gradients are wrong in silence."""
    model = gpt()
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    text = (
        "Checkpointing draws random numbers twice, and cpu drew others the second time: dropout would give wrong gradients in silence. "
        "Train there without checkpointing, or update torch."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        checkpoint_blocks(model)
    assert not any("forward" in vars(block) for block in model.blocks)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda c: c.__name__)
def test_trying_the_device_out_draws_no_random_numbers_and_is_not_recorded(context: Callable[[], Any]) -> None:
    """pytorch pull 194478."""
    model = gpt()
    torch.manual_seed(4)
    right = torch.rand(3)
    torch.manual_seed(4)
    with vl.record(model) as trace, Operators() as operators, context():
        checkpoint_blocks(model)
    assert torch.equal(torch.rand(3), right)
    assert not operators.counts
    assert trace.peak == trace.baseline


def test_a_model_without_memory_is_not_tried_out() -> None:
    with torch.device("meta"):
        model = gpt()
    assert len(checkpoint_blocks(model).blocks) == 3


# What a handle says.


def test_explain_says_what_the_checkpoints_did() -> None:
    text = "If the peak did not fall, it stands elsewhere: look at trace.peak_phase and trace.breakdown()."
    model = counted()
    handle = checkpoint_blocks(model)
    for step in (1, 2):
        backward(model, torch.randn(2, 4))
        assert handle.explain() == f"3 blocks checkpointed, called {3 * step} times, recomputed {3 * step} times. {text}"


def test_explain_says_that_blocks_are_not_called() -> None:
    handle = checkpoint_blocks(counted())
    assert handle.explain() == (
        "3 blocks checkpointed, called 0 times, recomputed 0 times. Nothing was saved: the model does not call them."
    )


def test_explain_says_that_all_calls_were_under_no_grad() -> None:
    model = counted()
    handle = checkpoint_blocks(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert handle.explain().endswith(" recomputed 0 times. Nothing was saved: all 3 calls were under no_grad.")


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no backward yet"])
def test_explain_says_that_there_was_no_backward(frozen: bool) -> None:
    model = counted().requires_grad_(not frozen)
    handle = checkpoint_blocks(model)
    model(torch.ones(2, 4))
    assert handle.explain() == (
        "3 blocks checkpointed, called 3 times, recomputed 0 times. Nothing was saved: backward has not run, or nothing in the blocks "
        "and their inputs requires grad."
    )


def test_explain_says_that_one_block_is_not_enough() -> None:
    """pytorch issue 80151."""
    model = counted(1)
    handle = checkpoint_blocks(model, blocks=Counted)
    for _ in range(2):  # a step after the other is not one block called twice
        backward(model, torch.ones(2, 4))
    assert handle.explain() == (
        "1 block checkpointed, called 2 times, recomputed 2 times. At its backward everything in a block is alive, so one block saves "
        "nothing of its own peak: checkpoint smaller parts."
    )


def test_one_block_called_several_times_saves_like_several() -> None:
    """Models that share the weights of all layers do that: each call is computed again by itself."""
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = self.blocks[0](x)
            return x

    model, peaks = Shared(), []
    for checkpointing in (False, True):
        handle = checkpoint_blocks(model) if checkpointing else None
        with vl.record(model) as trace:
            model(torch.ones(2048, 64)).sum().backward()
        peaks.append(trace.peak - trace.baseline)
        model.zero_grad()
    assert peaks[1] < 0.3 * peaks[0]
    assert handle is not None
    assert handle.explain().startswith("1 block checkpointed, called 8 times, recomputed 8 times. If the peak did not fall, it stands else")


# Together with torch.compile, and steps in backward.


@pytest.mark.parametrize("options", [{}, {"policy": "selective"}, {"debug": True}], ids=str)
@pytest.mark.parametrize("what", ["model", "blocks"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks, and hides it when not an error
def test_a_checkpointed_model_can_be_compiled(what: str, options: dict[str, Any]) -> None:
    """pytorch issue 144637, pull 113718: checkpoint first, then compile."""
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)))
    other, x = copy.deepcopy(model), torch.randn(8, 4)
    right = backward(model, x)
    handle = checkpoint_blocks(other, **options)
    if what == "blocks":
        for block in other:
            block.compile(backend="aot_eager")
    found = backward(torch.compile(other, backend="aot_eager") if what == "model" else other, x)
    assert torch.equal(found[0], right[0])
    assert all(map(torch.equal, found[1], right[1]))
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    assert "called 2 times, recomputed 2 times" in handle.explain()


@pytest.mark.parametrize("policy", ["all", "selective"])
def test_checkpointed_blocks_step_in_backward(policy: str) -> None:
    """pytorch issue 81296: what is built on gradient hooks needs them to fire once."""
    model = Twice()
    other, x = copy.deepcopy(model), torch.randn(3, 4)
    checkpoint_blocks(other, policy=policy)
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), step_in_backward(other, lambda p: torch.optim.SGD(p, lr=0.1))
    for m, optimizer in zip((model, other), optimizers, strict=True):
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


class Taking(nn.Module):
    """A block that takes what it adds from a list, a dictionary or a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, history: list[torch.Tensor] | None = None, *, cond: Any = None) -> torch.Tensor:
        if history is not None:
            x = x + history.pop()
        if isinstance(cond, dict):
            x = x * cond["t"]
        elif cond is not None:
            x = x * cond
        return torch.tanh(self.linear(x))


class Giver(nn.Module):
    """Calls its blocks with containers that it changes afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(Taking() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared: dict[str, Any] = {}
        history = [x * i for i in range(4)]
        for i, block in enumerate(self.blocks):
            shared["t"] = x * (i + 1)
            x = block(x, history) if self.how == "list" else block(x, cond=shared)
        return x


@pytest.mark.parametrize("policy", ["all", "selective"])
@pytest.mark.parametrize("how", ["list", "dict"])
def test_containers_that_change_afterwards_are_those_of_the_first_pass(how: str, policy: str) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, x = Giver(how), torch.randn(4, 8, requires_grad=True)
        if checkpointed:
            checkpoint_blocks(model, policy=policy)
        model(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)  # the sums of x's many gradients are added up in another order


def test_a_keyword_tensor_changed_in_place_is_refused_as_without_checkpoints() -> None:
    for checkpointed in (False, True):
        model, x, t = nn.ModuleList([Taking()]), torch.randn(4, 8, requires_grad=True), torch.ones(4, 8)
        if checkpointed:
            checkpoint_blocks(model)
        out = model[0](x, cond=t)
        t.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_dense_net_keeps_its_losses() -> None:
    densenet = pytest.importorskip("torchvision").models.densenet
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = densenet.DenseNet(8, (2, 2), 16, num_classes=4)
        if checkpointed:
            checkpoint_blocks(model)
        out = model(torch.randn(2, 3, 64, 64)).square().sum()
        out.backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_block_is_checkpointed_once() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    handle = checkpoint_blocks(model, every=2)
    with pytest.raises(ValueError, match=r"^A block is checkpointed once, and 0, 2 already is; call remove\(\) of that handle first\.$"):
        checkpoint_blocks(model)
    handle.remove()
    checkpoint_blocks(model).remove()
    assert all("forward" not in vars(block) for block in model)
