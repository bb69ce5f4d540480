"""The factored optimizer: against torch's and transformers', against arithmetic by hand, and to the byte."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import math
import pickle
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.optimization
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import vramlab as vl
from vramlab.techniques.adafactor import Adafactor, adafactor_update, round_stochastically, state_bytes
from vramlab.techniques.in_backward import step_in_backward

SHAPES = [(), (1,), (3,), (4, 6), (6, 4), (5, 1), (1, 5), (2, 2), (2, 4, 6), (3, 1, 4), (4, 3, 2, 5), (8, 3, 3, 3), (4, 2, 2, 2, 3)]
AGREED = [(), (1,), (3,), (4, 6), (6, 4), (32, 3), (2, 4, 6), (3, 5, 7), (5, 1), (1, 5), (2, 3, 1)]
"""Shapes for which all three optimizers come to the same second moment; thin matrices have one, factored or full."""
FORMS = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
BF16 = torch.bfloat16


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)


def trained(make: Callable[[list[nn.Parameter]], Any], shapes: list[tuple[int, ...]], steps: int = 5, **kind: Any) -> list[nn.Parameter]:
    """The parameters after some steps with fixed gradients."""
    size = kind.pop("size", 1.0)
    params = parameters(shapes, **kind)
    optimizer = make(params)
    for step in range(steps):
        give_gradients(params, step, size)
        optimizer.step()
    return params


def assert_close(ours: list[nn.Parameter], theirs: list[nn.Parameter], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def differ(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> bool:
    return not any(torch.allclose(a, b, rtol=1e-5, atol=0) for a, b in zip(ours, theirs, strict=True))


def same_bits(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# jettify/pytorch-optimizer#469 wants convolutions factored over their last two dimensions, huggingface/transformers#14574
# shows that this may cost more than it saves. The error of the first cannot occur, for factors keep their dimensions; the
# memory of the second decides: convolutions are one matrix, and only stacks (3-D) are factored slice by slice.


# The same numbers as others


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"lr": 1e-2}, {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "d": 2.0, "beta2_decay": -0.5}])
def test_it_is_torchs_where_definitions_agree(options: dict[str, Any], dtype: torch.dtype, foreach: bool) -> None:
    ours = trained(lambda p: Adafactor(p, foreach=foreach, **options), AGREED, 10, dtype=dtype)
    theirs = trained(lambda p: torch.optim.Adafactor(p, foreach=foreach, **options), AGREED, 10, dtype=dtype)
    assert_close(ours, theirs)
    if dtype is torch.float64:
        assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def hugging_face(p: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    options = {"relative_step": "lr" not in options} | options
    return transformers.optimization.Adafactor(p, **options)


@FORMS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 1e-3},
        {"lr": 0.1},
        {"lr": 1e-3, "scale_parameter": False},
        {"lr": 1e-3, "scale_parameter": False, "weight_decay": 0.1},
        {"lr": 1e-3, "beta1": 0.9},
        {"eps": (1e-6, 0.5)},
    ],
)
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_it_is_transformers_where_definitions_agree(options: dict[str, Any], size: float, foreach: bool) -> None:
    ours = trained(lambda p: Adafactor(p, foreach=foreach, **options), AGREED, 10, size=size)
    assert_close(ours, trained(lambda p: hugging_face(p, **options), AGREED, 10, size=size))


def test_d_and_beta2_decay_are_transformers_clip_threshold_and_decay_rate() -> None:
    ours = trained(lambda p: Adafactor(p, d=0.5, beta2_decay=-0.6), AGREED)
    assert_close(ours, trained(lambda p: hugging_face(p, clip_threshold=0.5, decay_rate=-0.6), AGREED))


# The differences that the docstring lists are there


def test_torch_raises_second_moments_so_that_small_gradients_step_further_and_tiny_ones_less() -> None:
    def moved(kind: Any, size: float, d: float = 1.0) -> float:
        (start,), (end,) = parameters([(4, 6)]), trained(lambda p: kind(p, d=d), [(4, 6)], size=size)
        return (end - start).norm().item()

    assert moved(torch.optim.Adafactor, 1e-5, d=1e6) > 20 * moved(Adafactor, 1e-5, d=1e6)
    assert moved(Adafactor, 1e-9) > 20 * moved(torch.optim.Adafactor, 1e-9)
    assert moved(Adafactor, 1e-9) == pytest.approx(moved(Adafactor, 1.0), rel=1e-4)
    as_in_the_paper = trained(lambda p: torch.optim.Adafactor(p, eps=(1e-30, 1e-3)), AGREED, size=1e-5)
    assert_close(trained(lambda p: Adafactor(p), AGREED, size=1e-5), as_in_the_paper)


def test_torchs_lr_is_a_cap_on_the_relative_step_and_ours_is_the_step() -> None:
    ours, theirs = (trained(lambda p, kind=kind: kind(p, lr=0.8), AGREED, 2) for kind in (Adafactor, torch.optim.Adafactor))
    assert differ(ours, theirs)  # 1/sqrt(2) is below 0.8
    assert_close(trained(lambda p: Adafactor(p, lr=0.8), AGREED, 1), trained(lambda p: torch.optim.Adafactor(p, lr=0.8), AGREED, 1))


@pytest.mark.parametrize("other", [torch.optim.Adafactor, hugging_face])
@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (4, 2, 2, 2, 3), (2, 2), (3, 2, 2)])
def test_others_factor_convolutions_by_their_last_two_dimensions_and_two_by_two_at_all(shape: tuple[int, ...], other: Any) -> None:
    assert differ(trained(lambda p: Adafactor(p), [shape]), trained(lambda p: other(p), [shape]))


def test_a_convolution_is_what_others_make_of_its_matrix() -> None:
    ours = trained(lambda p: Adafactor(p), [(8, 3, 3, 3)])[0]
    for other in (torch.optim.Adafactor, hugging_face):
        assert_close([ours.reshape(8, 27)], trained(lambda p, other=other: other(p), [(8, 27)]))


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (2, 2)])
def test_what_is_not_factored_is_what_others_make_of_its_vector(shape: tuple[int, ...]) -> None:
    ours = trained(lambda p: Adafactor(p), [shape])[0]
    assert_close([ours.reshape(-1)], trained(lambda p: torch.optim.Adafactor(p), [(ours.numel(),)]))


def test_a_threshold_below_1_is_refused_by_torch_alone() -> None:
    trained(lambda p: Adafactor(p, d=0.5), AGREED)
    with pytest.raises(ValueError, match="should be >= 1"):
        torch.optim.Adafactor(parameters(AGREED), d=0.5)


def test_transformers_scales_weight_decay_by_the_parameter() -> None:
    options = {"lr": 1e-3, "weight_decay": 0.5}
    matrix = [(4, 6)]
    assert differ(trained(lambda p: Adafactor(p, **options), matrix), trained(lambda p: hugging_face(p, **options), matrix))


def test_transformers_average_holds_the_step_size_and_ours_does_not() -> None:
    """source: huggingface/transformers#34506, facebookresearch/fairseq#5561"""
    for shape in AGREED:
        ours, theirs = parameters([shape]), parameters([shape])
        a, b = Adafactor(ours, lr=1e-2, beta1=0.9), hugging_face(theirs, lr=1e-2, beta1=0.9)
        for step in range(3):
            give_gradients(ours, step), give_gradients(theirs, step)
            if step == 2:
                before, other_before = ours[0].clone(), theirs[0].clone()
                a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.0
            a.step(), b.step()
        assert torch.equal(ours[0], before)
        assert not torch.equal(theirs[0], other_before)


def test_weight_decay_follows_the_relative_step_and_torchs_the_cap() -> None:
    for kind, decayed in ((Adafactor, 5e-3), (torch.optim.Adafactor, 1e-2)):
        p = nn.Parameter(torch.ones(4, 6))
        optimizer = kind([p], weight_decay=1.0)
        for _ in range(2):
            p.data.fill_(1.0)
            p.grad = torch.zeros(4, 6)
            optimizer.step()
            step = optimizer.state[p]["step"]
            optimizer.state[p]["step"] = torch.full_like(step, 39_999.0) if isinstance(step, torch.Tensor) else 39_999
        torch.testing.assert_close(p.detach(), torch.full((4, 6), 1 - decayed))


def test_torchs_state_beside_bf16_is_bf16_and_ours_fp32() -> None:
    for kind, dtype in ((Adafactor, torch.float32), (torch.optim.Adafactor, BF16)):
        params = parameters([(4, 6), (5,)], dtype=BF16)
        give_gradients(params, 0)
        optimizer = kind(params)
        optimizer.step()
        for p, name in zip(params, ("row_var", "variance"), strict=True):
            assert optimizer.state[p][name].dtype is dtype


def test_torch_divides_by_zero_on_an_empty_parameter_and_ours_leaves_it_alone() -> None:
    """source: huggingface/transformers#11536, pytorch/pytorch#129905"""
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 3, 3)]:
        p = nn.Parameter(torch.zeros(shape))
        p.grad = torch.zeros(shape)
        for foreach in (False, True):
            optimizer = Adafactor([p], foreach=foreach, beta1=0.9)
            optimizer.step()
            assert not optimizer.state[p]
            assert state_bytes(shape, beta1=0.9) == 0
        with pytest.raises(ZeroDivisionError):
            torch.optim.Adafactor([p]).step()


@pytest.mark.parametrize("option", ["maximize", "warmup_init", "capturable", "fused", "differentiable"])
def test_what_is_not_offered_is_an_unknown_argument(option: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        Adafactor(parameters([(3,)]), **{option: True})


def test_documented_arguments_are_those_of_the_constructor_in_their_order() -> None:
    text = inspect.getdoc(Adafactor).split("Args:\n")[1].split("\n\n")[0]
    documented = [line.split(":")[0].strip() for line in text.splitlines() if line.startswith("    ") and line[4] != " "]
    assert documented == list(inspect.signature(Adafactor).parameters)


# By hand


@FORMS
@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (2, 4, 6), (8, 3, 3, 3)])
def test_a_first_step_is_the_step_size_times_the_parameters_root_mean_square(shape: tuple[int, ...], foreach: bool) -> None:
    """source: huggingface/transformers#11536, pytorch/pytorch#129905"""
    p = nn.Parameter(torch.full(shape, 0.5))
    p.grad = torch.full(shape, 0.1)
    optimizer = Adafactor([p], lr=0.01, foreach=foreach)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full(shape, 0.495), rtol=1e-6, atol=0)
    if len(shape) < 2:
        assert optimizer.state[p]["variance"].shape == p.shape


def test_a_stack_of_matrices_is_factored_each_for_itself_and_clipped_together() -> None:
    """source: jettify/pytorch-optimizer#469, ml-explore/mlx#3652, huggingface/transformers#14574, huggingface/transformers#8618"""
    options = {"decay": -0.8, "eps": 1e-30, "clip": 1e30}
    grads = [torch.randn(2, 4, 6) * torch.tensor([1.0, 7.0])[:, None, None] for _ in range(3)]
    stack = {"row_var": torch.zeros(2, 4, 1), "col_var": torch.zeros(2, 1, 6)}
    slices = [{"row_var": torch.zeros(4, 1), "col_var": torch.zeros(1, 6)} for _ in range(2)]
    for step, grad in enumerate(grads, 1):
        together = adafactor_update(grad, stack, step, **options)
        apart = [adafactor_update(g, s, step, **options) for g, s in zip(grad, slices, strict=True)]
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-6, atol=0)
    for name in ("row_var", "col_var"):
        torch.testing.assert_close(stack[name], torch.stack([s[name] for s in slices]), rtol=1e-6, atol=0)
    clipped = adafactor_update(grads[-1], copy.deepcopy(stack), 4, **options | {"clip": 0.25})
    free = adafactor_update(grads[-1], stack, 4, **options)
    torch.testing.assert_close(clipped, free * (0.25 / free.square().mean().sqrt()), rtol=1e-5, atol=0)


def test_the_update_is_algorithm_4_of_the_paper() -> None:
    grads = [torch.randn(4, 6, dtype=torch.float64) for _ in range(4)]
    row, column = torch.zeros(4, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    state = {"row_var": torch.zeros(4, 1, dtype=torch.float64), "col_var": torch.zeros(1, 6, dtype=torch.float64)}
    for t, grad in enumerate(grads, 1):
        beta = 1 - t**-0.8
        row = beta * row + (1 - beta) * (grad**2 + 1e-30).sum(1)
        column = beta * column + (1 - beta) * (grad**2 + 1e-30).sum(0)
        u = grad / (torch.outer(row, column) / row.sum()).sqrt()
        expected = u / max(1, (u**2).mean().sqrt())
        update = adafactor_update(grad, state, t, decay=-0.8, eps=1e-30, clip=1.0)
        torch.testing.assert_close(update, expected, rtol=1e-12, atol=0)


def test_the_update_fits_on_a_page() -> None:
    source = textwrap.dedent(inspect.getsource(adafactor_update))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    documentation = function.body[0].end_lineno - function.body[0].lineno + 1
    assert len(source.splitlines()) - documentation <= 25
    assert len(source.splitlines()) <= 25


@FORMS
def test_the_result_depends_neither_on_order_nor_on_company_and_lr_stays(foreach: bool) -> None:
    """source: huggingface/transformers#9751, facebookresearch/ParlAI#2547"""

    def run(order: list[int]) -> list[torch.Tensor]:
        params = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.full((3,), 0.01)), nn.Parameter(torch.full((5, 3), 20.0))]
        optimizer = Adafactor([params[i] for i in order], lr=1e-2, foreach=foreach)
        for step in range(100):
            give_gradients(params, step)
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 1e-2
        return [params[i] for i in order]

    first, second, third = run([0, 1, 2])
    assert same_bits(run([2, 1, 0]), [third, second, first])
    assert same_bits(run([1]), [second])


@FORMS
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_zeros_move_nothing_and_spoil_nothing(shape: tuple[int, ...], foreach: bool) -> None:
    """source: microsoft/LLM2CLIP#64, pytorch/pytorch#129905"""
    for eps in ((1e-30, 1e-3), (1.2e-38, 0.0), (1e-3, 1e-3)):
        (p,) = parameters([shape])
        before = p.detach().clone()
        optimizer = Adafactor([p], eps=eps, foreach=foreach)
        for _ in range(100):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        assert torch.equal(p, before)
        give_gradients([p], 0)
        optimizer.step()
        assert p.isfinite().all()
        assert not torch.equal(p, before)


def test_dead_rows_and_columns_stay_where_they_are() -> None:
    """source: microsoft/LLM2CLIP#64, pytorch/pytorch#129905"""
    for shape in [(6, 8), (2, 6, 8), (6, 8, 3, 3)]:
        (p,) = parameters([shape])
        before = p.detach().clone()
        optimizer = Adafactor([p], lr=1e-2)
        for step in range(20):
            give_gradients([p], step)
            dead = p.grad
            for _ in range(len(shape) - 2 if len(shape) == 3 else 0):
                dead = dead[0]
            dead[1], dead[:, 2] = 0, 0
            optimizer.step()
        assert p.isfinite().all()
        unmoved = (p == before)[0] if len(shape) == 3 else p == before
        assert unmoved[1].all()
        assert unmoved[:, 2].all()
        assert not unmoved[0, 0].any()


@FORMS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 4, 6), (8, 3, 3, 3)])
def test_a_gradient_that_is_not_finite_shows_as_in_torch(shape: tuple[int, ...], bad: float, foreach: bool) -> None:
    """And in the parameter it belongs to alone."""
    for kind in (Adafactor, torch.optim.Adafactor):
        spoilt, whole = parameters([shape, shape])
        optimizer = kind([spoilt, whole], lr=1e-2, foreach=foreach)
        for step in range(2):
            give_gradients([spoilt, whole], step)
            spoilt.grad.view(-1)[1] = bad
            optimizer.step()
            assert spoilt.view(-1)[1].isnan()
            assert whole.isfinite().all()


# Loop and foreach


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9}, {"lr": 1e-2, "scale_parameter": False, "d": 0.3}])
def test_loop_and_foreach_agree_to_the_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    shapes = [*SHAPES, (0, 3), (64, 48), (33,)]
    loop, foreach = (trained(lambda p, f=f: Adafactor(p, foreach=f, **options), shapes, 5, dtype=dtype) for f in (False, True))
    assert same_bits(loop, foreach)


@given(st.lists(st.lists(st.integers(0, 7), max_size=5), max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_loop_and_foreach_agree_to_the_bit_for_any_shapes(shapes: list[list[int]], average: bool) -> None:
    shapes = [*map(tuple, shapes), (3,)]
    options = {"lr": 1e-2, "beta1": 0.9 if average else None}
    loop, foreach = (trained(lambda p, f=f: Adafactor(p, foreach=f, **options), shapes, 2) for f in (False, True))
    assert same_bits(loop, foreach)


# Step sizes and schedulers


@FORMS
def test_a_scheduler_multiplies_the_relative_step_exactly(foreach: bool) -> None:
    """source: huggingface/transformers#11612, huggingface/transformers#12123, huggingface/pytorch-image-models#1870"""

    def run(multiply: Callable[[int], float]) -> tuple[list[float], list[float], list[nn.Parameter]]:
        params = parameters(AGREED)
        optimizer = Adafactor(params, foreach=foreach)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, multiply)
        sizes, groups = [], []
        for step in range(5):
            groups.append(optimizer.param_groups[0]["lr"])
            give_gradients(params, step)
            optimizer.step()
            sizes += optimizer.get_last_lr()
            scheduler.step()
        return sizes, groups, params

    ones, groups, _ = run(lambda step: 1.0)
    assert ones == groups == [1e-2] * 5
    sizes, groups, params = run(lambda step: 0.3**step)
    assert sizes == groups == [1e-2 * 0.3**step for step in range(5)]
    assert all(type(value) is float for value in sizes)

    by_hand = parameters(AGREED)
    optimizer = Adafactor(by_hand, lr=1.0)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.3**step
        give_gradients(by_hand, step)
        optimizer.step()
    assert same_bits(params, by_hand)


@pytest.mark.parametrize(("step", "size"), [(1, 1e-2), (9_999, 1e-2), (10_000, 1e-2), (40_000, 5e-3), (1_000_000, 1e-3)])
def test_the_relative_step_is_the_papers(step: int, size: float) -> None:
    """source: huggingface/transformers#11612, Linaqruf/kohya-trainer#296, jettify/pytorch-optimizer#535"""
    (p,) = parameters([()])
    optimizer = Adafactor([p])
    assert optimizer.get_last_lr() == [1e-2]
    give_gradients([p], 0)
    optimizer.step()
    optimizer.state[p]["step"] = step - 1
    optimizer.param_groups[0]["weight_decay"] = 1.0
    p.data.fill_(1.0)
    p.grad = torch.tensor(0.0)
    optimizer.step()
    assert optimizer.get_last_lr() == [pytest.approx(size, rel=1e-15)]
    assert p.item() == pytest.approx(1 - size, rel=1e-6)  # weight decay alone has moved it


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
)
@pytest.mark.parametrize("lr", [None, 1e-3])
def test_schedulers_work_with_and_without_lr(make: Any, lr: float | None) -> None:
    params = parameters(AGREED)
    optimizer = Adafactor(params, lr=lr)
    scheduler = make(optimizer)
    for step in range(5):
        give_gradients(params, step)
        optimizer.step()
        assert optimizer.get_last_lr() == scheduler.get_last_lr()
        scheduler.step()
    assert all(p.isfinite().all() for p in params)


def test_a_plateau_scheduler_multiplies_once() -> None:
    params = parameters(AGREED)
    optimizer = Adafactor(params)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        give_gradients(params, 0)
        optimizer.step()
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.25


def test_a_groups_own_lr_is_a_step_size_and_not_a_cap() -> None:
    """source: huggingface/pytorch-image-models#1870, Linaqruf/kohya-trainer#296"""
    relative, given_lr, capped = parameters([(4, 6)] * 3)
    optimizer = Adafactor([{"params": [relative]}, {"params": [given_lr], "lr": 0.5}, {"params": [capped], "lr": None}])
    assert [group["relative_step"] for group in optimizer.param_groups] == [True, False, True]
    give_gradients([relative, given_lr, capped], 0)
    optimizer.step()
    assert optimizer.get_last_lr() == [1e-2, 0.5, 1e-2]


@FORMS
def test_groups_with_options_of_their_own_train_as_if_alone(foreach: bool) -> None:
    each: list[dict[str, Any]] = [
        {"lr": 1e-2, "weight_decay": 0.1},
        {"lr": None, "beta1": 0.5},
        {"lr": 1e-3, "scale_parameter": False, "d": 0.5, "beta2_decay": -0.5, "eps": (1e-10, 1e-2)},
    ]
    params = [parameters(SHAPES, seed=seed) for seed in range(3)]
    alone = copy.deepcopy(params)
    optimizer = Adafactor([{"params": ps} | options for ps, options in zip(params, each, strict=True)], foreach=foreach)
    optimizers = [Adafactor(ps, foreach=not foreach, **options) for ps, options in zip(alone, each, strict=True)]
    for step in range(3):
        for ps in (*params, *alone):
            give_gradients(ps, step)
        optimizer.step()
        for other in optimizers:
            other.step()
    for ps, others in zip(params, alone, strict=True):
        assert same_bits(ps, others)


# Refusals: rule, value, remedy


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 1e-3, "relative_step": True}, "relative step replaces lr, got lr=0.001; leave lr out, or set relative_step=False"),
        ({"relative_step": False}, "needs a step size where relative_step=False, got lr=None; give lr=1e-3, say"),
        ({"lr": -1.0}, "lr is a number of at least 0, got -1.0; the default is None"),
        ({"lr": math.nan}, "lr is a number of at least 0, got nan"),
        ({"lr": torch.tensor(1e-3)}, "lr is a number of at least 0, got tensor"),
        ({"beta2_decay": 0.8}, "beta2_decay is at most 0, got 0.8; the default is -0.8"),
        (
            {"eps": (0.0, 1e-3)},
            r"eps is \(at least 1.2e-38, at least 0\), or gradients of zeros would give NaN, "
            r"got \(0.0, 0.001\); the default is \(1e-30, 0.001\)",
        ),
        ({"eps": (1e-40, 1e-3)}, r"eps is .* would give NaN, got \(1e-40"),  # a zero, in fp32 on a GPU
        ({"eps": (None, 1e-3)}, r"eps is .* would give NaN, got \(None"),  # torch.optim.Adafactor's default
        ({"eps": (1e-30, -1.0)}, r"eps is .*, got \(1e-30, -1.0\)"),
        ({"d": 0.0}, "d is above 0, got 0.0; the default is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is at least 0, got -0.1; the default is 0.0"),
        ({"beta1": 1.0}, "beta1 is at least 0 and below 1, or None, got 1.0; the default is None"),
    ],
)
def test_options_out_of_range_are_refused_in_the_constructor_and_in_a_group(options: dict[str, Any], text: str) -> None:
    """source: huggingface/transformers#11612, microsoft/LLM2CLIP#64"""
    with pytest.raises(ValueError, match=f"Adafactor('s)? {text}"):
        Adafactor(parameters([(3,)]), **options)
    optimizer = Adafactor(parameters([(3,)]))
    with pytest.raises(ValueError, match=f"Adafactor('s)? {text}"):
        optimizer.add_param_group({"params": parameters([(2,)])} | options)
    assert len(optimizer.param_groups) == 1


def test_complex_parameters_are_refused_and_the_group_is_not_added() -> None:
    p = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
    text = r"Adafactor takes real parameters, got torch.complex64 of shape \(2, 3\); keep it as nn.Parameter\(torch.view_as_real"
    with pytest.raises(ValueError, match=text):
        Adafactor([p])
    optimizer = Adafactor(parameters([(3,)]))
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1
    Adafactor([nn.Parameter(torch.view_as_real(p.detach()).clone())])


@FORMS
@pytest.mark.parametrize("named", [False, True])
def test_a_sparse_gradient_is_refused_before_anything_is_changed(named: bool, foreach: bool) -> None:
    """source: pytorch/pytorch#4829, pytorch/pytorch#35810"""
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(10, 4, sparse=True))
    (model[0](model[1](torch.tensor([1, 2])))).sum().backward()
    before = copy.deepcopy(model.state_dict())
    halves = list(model.named_parameters())
    groups = [{"params": [*halves[:2]]}, {"params": [*halves[2:]]}]
    if not named:
        groups = [{"params": [p for _, p in group["params"]]} for group in groups]
    optimizer = Adafactor(groups, foreach=foreach)
    who = "parameter '1.weight'" if named else "a parameter"
    with pytest.raises(
        RuntimeError, match=rf"does not support sparse gradients, and {who} of shape \(10, 4\) has one; make .*sparse=False"
    ):
        optimizer.step()
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# bf16 and the rounding


def test_rounding_leaves_alone_what_bf16_holds_exactly() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BF16)
    for seed in range(3):
        rounded = round_stochastically(every.float(), torch.Generator().manual_seed(seed))
        assert rounded.dtype is BF16
        assert torch.equal(rounded.isnan(), every.isnan())
        number = ~every.isnan()
        assert torch.equal(rounded[number].view(torch.int16), every[number].view(torch.int16))  # signs of zero too


@pytest.mark.parametrize("bits", [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -1])
def test_rounding_keeps_every_nan_a_nan(bits: int) -> None:
    """0x7fffffff is the NaN that CUDA makes: a carry through it would give zero."""
    values = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    assert values.isnan().all()
    assert round_stochastically(values).isnan().all()


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127),
    st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_rounding_goes_to_one_of_the_two_neighbours_and_is_right_on_average(value: float, seed: int) -> None:
    n = 20_000
    exact = torch.tensor(value, dtype=torch.float32)
    toward_zero = exact.view(torch.int32).bitwise_and(-1 << 16)
    low, high = (b.view(torch.float32).double().item() for b in (toward_zero, toward_zero + (1 << 16)))
    rounded = round_stochastically(torch.full((n,), value), torch.Generator().manual_seed(seed)).double()
    assert set(rounded.tolist()) <= {low, high}
    away = (exact.double().item() - low) / (high - low)  # the probability of the neighbour away from zero
    up = (rounded == high).double().mean().item()
    assert abs(up - away) <= 6 * math.sqrt(away * (1 - away) / n) + 1e-12


def test_rounding_at_the_ends_of_the_range() -> None:
    largest, infinity, smallest = torch.finfo(BF16).max, math.inf, 2.0**-133
    generator = torch.Generator().manual_seed(0)

    def rounded(value: float) -> set[float]:
        return set(round_stochastically(torch.full((4000,), value), generator).tolist())

    assert rounded(largest) == {largest}
    assert rounded(-largest) == {-largest}
    assert rounded(infinity) == {infinity}
    assert rounded(-infinity) == {-infinity}
    halfway = (largest + 2.0**128) / 2
    assert rounded(halfway) == {largest, infinity}
    assert rounded(-halfway) == {-largest, -infinity}
    assert rounded(smallest / 2) == {0.0, smallest}
    assert rounded(-smallest / 2) == {-0.0, -smallest}


def test_small_updates_are_lost_to_nearest_and_kept_by_chance() -> None:
    """200 steps of 1e-4 on a parameter of 1, whose neighbours in bf16 are 4e-3 and 8e-3 away."""

    def moved(stochastic: bool) -> float:
        p = nn.Parameter(torch.ones(64, 64, dtype=BF16))
        optimizer = Adafactor([p], lr=1e-4, stochastic_rounding=stochastic)
        for _ in range(200):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return 1 - p.float().mean().item()

    assert moved(False) == 0
    assert moved(True) == pytest.approx(200 * 1e-4, rel=0.05)


def test_small_weight_decay_is_kept_by_chance_too() -> None:
    p = nn.Parameter(torch.ones(64, 64, dtype=BF16))
    optimizer = Adafactor([p], lr=1e-3, weight_decay=0.1)
    for _ in range(200):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx((1 - 1e-4) ** 200, abs=2e-3)


@pytest.mark.parametrize("options", [{}, {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "beta1": 0.9}])
def test_one_bf16_step_is_the_fp32_step_rounded_to_a_neighbour(options: dict[str, Any]) -> None:
    (half,) = parameters([(64, 48)], dtype=BF16)
    exact = nn.Parameter(half.detach().float())
    half.grad = torch.randn(64, 48).to(BF16)
    exact.grad = half.grad.float()
    Adafactor([half], **options).step()
    Adafactor([exact], **options).step()
    error = (half.float() - exact).abs()
    assert (error <= 2.0**-7 * exact.abs()).all()
    assert error.max() > 0


def test_the_seed_decides_the_rounding() -> None:
    a, b, c = (trained(lambda p, seed=seed: Adafactor(p, seed=seed), [(64, 48)], dtype=BF16) for seed in (1, 1, 2))
    assert same_bits(a, b)
    assert not same_bits(a, c)


def test_the_rounding_leaves_torchs_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    trained(lambda p: Adafactor(p), [(64, 48)], dtype=BF16)
    assert torch.equal(before, torch.get_rng_state())


# State that is saved, loaded, copied


def ways() -> list[Any]:
    def through_torch_save(state: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    return [pytest.param(copy.deepcopy, id="deepcopy"), pytest.param(through_torch_save, id="torch.save")]


@FORMS
@pytest.mark.parametrize("carry", ways())
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_after_loading_training_goes_on_to_the_bit(dtype: torch.dtype, carry: Any, foreach: bool) -> None:
    """source: pytorch/pytorch#43706, pytorch/torchtitan#4615, facebookresearch/fairscale#50, vllm-project/speculators#899"""
    shapes = [(4, 6), (5,), (), (8, 3, 3, 3)]
    options = {"lr": 1e-2, "beta1": 0.9, "foreach": foreach}
    params = parameters(shapes, dtype=dtype)
    optimizer = Adafactor(params, **options)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    saved = carry(optimizer.state_dict())
    resumed = [nn.Parameter(p.detach().clone()) for p in params]
    other = Adafactor(resumed, lr=0.5, seed=99)
    other.load_state_dict(saved)
    for p, q in zip(params, resumed, strict=True):
        assert optimizer.state[p].keys() == other.state[q].keys()
        for name, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                assert value.dtype is other.state[q][name].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
                assert torch.equal(value, other.state[q][name])
                assert value.data_ptr() != other.state[q][name].data_ptr()
    for step in range(3, 6):
        give_gradients(params, step), give_gradients(resumed, step)
        optimizer.step(), other.step()
    assert same_bits(params, resumed)


def test_torch_alone_would_cast_the_state_to_bf16() -> None:
    """source: pytorch/pytorch#43706"""
    params = parameters([(4, 6)], dtype=BF16)
    optimizer = Adafactor(params)
    give_gradients(params, 0)
    optimizer.step()
    other = Adafactor(parameters([(4, 6)], dtype=BF16))
    torch.optim.Optimizer.load_state_dict(other, optimizer.state_dict())
    assert next(iter(other.state.values()))["row_var"].dtype is BF16


def test_hooks_on_loading_are_heard() -> None:
    params = parameters([(4, 6)])
    optimizer = Adafactor(params)
    give_gradients(params, 0)
    optimizer.step()
    other = Adafactor(parameters([(4, 6)]))

    def double(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state)
        state["state"][0]["row_var"].mul_(2)
        return state

    other.register_load_state_dict_pre_hook(double)
    other.load_state_dict(optimizer.state_dict())
    loaded = other.state[other.param_groups[0]["params"][0]]["row_var"]
    assert torch.equal(loaded, 2 * optimizer.state[params[0]]["row_var"])
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


def test_a_state_without_random_numbers_or_for_another_device_loads() -> None:
    params = parameters([(4, 6)], dtype=BF16)
    optimizer = Adafactor(params)
    give_gradients(params, 0)
    optimizer.step()
    state = optimizer.state_dict()
    assert list(state["rounding"]) == ["cpu"]
    Adafactor(parameters([(4, 6)], dtype=BF16)).load_state_dict({k: v for k, v in state.items() if k != "rounding"})
    Adafactor(parameters([(4, 6)], dtype=BF16)).load_state_dict(state | {"rounding": {"cuda:0": state["rounding"]["cpu"]}})


def test_a_failed_load_leaves_no_hook() -> None:
    optimizer = Adafactor(parameters([(3,)]))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert not optimizer._optimizer_load_state_dict_pre_hooks


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_copied_optimizer_trains_on_to_the_bit(dtype: torch.dtype, carry: Any) -> None:
    params = parameters([(4, 6), (5,)], dtype=dtype)
    optimizer = Adafactor(params, lr=1e-2, seed=5)
    for moment in range(2):  # before the first step, and after
        other = carry(optimizer)
        others = other.param_groups[0]["params"]
        assert others[0] is not params[0]
        for step in range(3 * moment, 3 * moment + 3):
            give_gradients(params, step), give_gradients(others, step)
            optimizer.step(), other.step()
        assert same_bits(params, others)


# Around it


def test_parameters_without_gradient_and_frozen_ones_stay_and_have_no_state() -> None:
    used, unused, frozen = parameters([(4, 6)] * 3)
    frozen.requires_grad_(False)
    before = [p.detach().clone() for p in (unused, frozen)]
    for foreach in (False, True):
        optimizer = Adafactor([used, unused, frozen], weight_decay=0.1, foreach=foreach)
        give_gradients([used], 0)
        optimizer.step()
        assert list(optimizer.state) == [used]
        assert same_bits([unused, frozen], before)


def test_a_step_that_fails_half_way_counts_only_the_parameters_it_reached() -> None:
    first, second, third = parameters([(4, 6)] * 3)
    optimizer = Adafactor([first, second, third])
    give_gradients([first, second, third], 0)
    optimizer._apply = _failing_for(second, optimizer._apply)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.state[first]["step"] == 1
    assert third not in optimizer.state


def _failing_for(parameter: nn.Parameter, apply: Any) -> Any:
    def fail(p: nn.Parameter, *rest: Any) -> None:
        if p is parameter:
            raise MemoryError
        apply(p, *rest)

    return fail


def test_a_step_without_any_gradient_or_parameter_does_nothing() -> None:
    for foreach in (False, True):
        optimizer = Adafactor(parameters(SHAPES), foreach=foreach)
        optimizer.step()
        assert not optimizer.state
        assert optimizer.get_last_lr() == [1e-2]


@FORMS
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
    ],
    ids=["channels_last", "transposed", "strided"],
)
@pytest.mark.parametrize("which", ["parameter", "gradient", "both"])
def test_memory_order_changes_nothing(which: str, layout: Any, foreach: bool) -> None:
    shapes = [(8, 3, 3, 3), (6, 4, 5, 2)]
    params, others = parameters(shapes), parameters(shapes)
    if which != "gradient":
        others = [nn.Parameter(layout(p.detach())) for p in others]
        assert not others[0].is_contiguous()
    ours, theirs = (Adafactor(p, lr=1e-2, foreach=foreach) for p in (params, others))
    for step in range(3):
        give_gradients(params, step), give_gradients(others, step)
        if which != "parameter":
            for p in others:
                p.grad = layout(p.grad)
        ours.step(), theirs.step()
    assert_close(others, params, rtol=1e-6)
    if which != "gradient":
        assert not others[0].is_contiguous()


def test_an_expanded_gradient_is_only_read() -> None:
    p, q = parameters([(4, 6)]) + parameters([(4, 6)])
    p.grad = torch.full((1, 1), 0.3).expand(4, 6)
    q.grad = torch.full((4, 6), 0.3)
    Adafactor([p]).step(), Adafactor([q]).step()
    assert torch.equal(p, q)
    assert torch.equal(p.grad, q.grad)


def test_gradients_are_only_read() -> None:
    for foreach in (False, True):
        for dtype in (torch.float32, BF16):
            params = parameters(SHAPES, dtype=dtype)
            give_gradients(params, 0)
            before = [p.grad.clone() for p in params]
            Adafactor(params, lr=1e-2, weight_decay=0.1, beta1=0.9, foreach=foreach).step()
            assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    model = nn.Linear(3, 2)
    optimizer = Adafactor(model.parameters())
    before = model.weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert not torch.equal(model.weight, before)


def test_a_grad_scaler_that_skips_the_first_step_leaves_no_state() -> None:
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    optimizer, plain = Adafactor(model.parameters(), lr=1e-2), Adafactor(reference.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (math.inf, 1.0, 1.0):
        x = torch.randn(5, 3)
        for m in (model, reference):
            m.zero_grad()
        scaler.scale(model(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor == math.inf:
            assert not optimizer.state
            assert same_bits(list(model.parameters()), list(reference.parameters()))
        else:
            reference(x).square().mean().backward()
            plain.step()
    assert optimizer.state[model.weight]["step"] == 2
    assert_close(list(model.parameters()), list(reference.parameters()))


def test_it_steps_in_backward_with_the_same_bits() -> None:
    def run(in_backward: bool) -> list[nn.Parameter]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer: torch.optim.Optimizer = step_in_backward(model, Adafactor) if in_backward else Adafactor(model.parameters())
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    assert same_bits(run(True), run(False))


class NothingIsRead(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read from the device"
        assert func not in (torch.ops.aten.nonzero.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **kwargs or {})


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_no_value_is_read_from_the_device(dtype: torch.dtype, foreach: bool) -> None:
    params = parameters(SHAPES, dtype=dtype)
    give_gradients(params, 0)
    with NothingIsRead():
        for options in ({}, {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "scale_parameter": False}):
            optimizer = Adafactor(params, foreach=foreach, **options)
            optimizer.step(), optimizer.step()
            optimizer.get_last_lr()
    with pytest.raises(AssertionError, match="a value was read"), NothingIsRead():
        torch.optim.Adafactor(params, foreach=foreach).step()


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_it_steps_tensors_without_data(dtype: torch.dtype, foreach: bool) -> None:
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in SHAPES]
    optimizer = Adafactor(params, foreach=foreach)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert optimizer.state_dict()["rounding"] == {}
    other = Adafactor(params)
    other.load_state_dict(optimizer.state_dict())
    assert optimizer._generator(torch.device("privateuseone")) is None  # the device of a virtual GPU


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_it_steps_fake_tensors(dtype: torch.dtype, foreach: bool) -> None:
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in SHAPES]
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer = Adafactor(params, lr=1e-3, weight_decay=0.1, beta1=0.9, foreach=foreach)
        optimizer.step(), optimizer.step()


def test_it_learns() -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Adafactor(model.parameters(), lr=3e-2)
    x = torch.randn(64, 4)
    y = (x[:, :1] * x[:, 1:2]).sin()
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


# Bytes


def recorded_state(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> int:
    p = nn.Parameter(torch.ones(shape, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = Adafactor([p], **options)
    with vl.record(optimizer=optimizer) as trace:
        optimizer.step()
    return trace.breakdown("end").optimizer_state


@given(st.lists(st.integers(0, 9), max_size=5), st.sampled_from([None, 0.9]), st.sampled_from([torch.float32, BF16, torch.float64]))
@settings(max_examples=100, deadline=None)
def test_state_bytes_are_those_recorded_and_never_more_than_a_full_second_moment(
    shape: list[int], beta1: float | None, dtype: torch.dtype
) -> None:
    """source: huggingface/transformers#14574"""
    nbytes = state_bytes(shape, beta1, dtype)
    assert nbytes == recorded_state(tuple(shape), dtype, beta1=beta1)
    full = math.prod(shape) * (8 if dtype is torch.float64 else 4)
    assert nbytes <= full * (2 if beta1 is not None else 1)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        ((), 1),
        ((7,), 7),
        ((768, 3072), 768 + 3072),
        ((64, 32, 1, 1), 64 + 32),
        ((8, 3, 3, 3), 8 + 27),
        ((2, 4, 6), 2 * (4 + 6)),
        ((1, 50), 50),
        ((50, 1), 50),
        ((2, 2), 4),
        ((3, 2), 5),
        ((16, 1, 3, 3), 16 + 9),  # depthwise
        ((5, 1, 1, 1), 5),
        ((4, 2, 3, 3, 3), 4 + 54),
    ],
)
def test_state_bytes_by_hand(shape: tuple[int, ...], numbers: int) -> None:
    """source: huggingface/transformers#14574, jettify/pytorch-optimizer#469"""
    assert state_bytes(shape) == 4 * numbers
    assert state_bytes(shape, beta1=0.9) == 4 * (numbers + math.prod(shape))
    assert numbers <= math.prod(shape)


def test_gpt2s_state_is_a_two_hundredth_of_its_parameters() -> None:
    layer = [(768,)] * 4 + [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    shapes = [(50257, 768), (1024, 768), *layer * 12, (768,), (768,)]
    numbers = sum(map(math.prod, shapes))
    assert numbers == 124_439_808
    assert sum(map(state_bytes, shapes)) / (4 * numbers) < 1 / 200


@pytest.mark.parametrize("options", [{}, {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-3, "beta1": 0.9}, {"scale_parameter": False}])
@pytest.mark.parametrize("shape", [(64, 48), (1000,), (64, 32, 3, 3), (4, 32, 64), (1, 700)])
def test_a_step_of_the_loop_holds_one_update_and_its_longer_factor(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    params = parameters([shape, (32, 16), shape, (8,)])
    optimizer = Adafactor(params, **options)
    give_gradients(params, 0)
    optimizer.step()
    with vl.record(optimizer=optimizer) as trace:
        optimizer.step()
    longer = {p: max(f.numel() for name, f in optimizer.state[p].items() if name in ("row_var", "col_var", "variance")) for p in params}
    scalars = 3
    assert trace.peak - trace.baseline <= 4 * max(p.numel() + (longer[p] if longer[p] < p.numel() else 0) + scalars for p in params)
    assert trace.breakdown("end").total == trace.baseline


def test_torchs_loop_holds_two() -> None:
    params = parameters([(64, 48)] * 2)
    optimizer = torch.optim.Adafactor(params)
    give_gradients(params, 0)
    optimizer.step()
    with vl.record(optimizer=optimizer) as trace:
        optimizer.step()
    assert trace.peak - trace.baseline >= 2 * 4 * 64 * 48


def test_foreach_holds_all_updates_at_once() -> None:
    params = parameters([(64, 48)] * 5)
    optimizer = Adafactor(params, foreach=True)
    give_gradients(params, 0)
    optimizer.step()
    with vl.record(optimizer=optimizer) as trace:
        optimizer.step()
    numbers, factors = 5 * 64 * 48, 5 * (64 + 48)
    assert 4 * numbers <= trace.peak - trace.baseline <= 4 * (numbers + 2 * factors + 20)


def test_memory_order_costs_no_copy() -> None:
    p = nn.Parameter(torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last))
    p.grad = torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last)
    optimizer = Adafactor([p], lr=1e-3)
    optimizer.step()
    with vl.record(optimizer=optimizer) as trace:
        optimizer.step()
    assert trace.peak - trace.baseline <= 4 * (p.numel() + 32 * 9 + 3)
