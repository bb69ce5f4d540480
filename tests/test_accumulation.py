"""Gradient accumulation: the gradient of one large batch, whatever the micro-batches hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vramlab as vl
from vramlab.techniques import Precision, Window
from vramlab.training import build_optimizer, train, train_window

CPU = torch.device("cpu")
IGNORED = -100
Batch = tuple[torch.Tensor, torch.Tensor]


def tiny_language_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(11, 5), nn.Tanh(), nn.Linear(5, 11))


def labelled(counted: int, size: int = 12) -> Batch:
    """``size`` tokens of which the first ``counted`` have a label."""
    targets = torch.randint(11, (size,))
    targets[counted:] = IGNORED
    return torch.randint(11, (size,)), targets


def summed_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    tokens, targets = batch
    logits = model(tokens)
    logits = logits.float() if logits.itemsize == 2 else logits
    total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    return total, int((targets != IGNORED).sum())


def accumulated(model: nn.Module, batches: list[Batch]) -> tuple[list[torch.Tensor], float, Window]:
    """Gradients, loss and window after one pass over the batches."""
    model.zero_grad()
    window = Window(len(batches))
    for batch in batches:
        window.share(*summed_loss(model, batch)).backward()
    window.close(model.parameters())
    return gradients(model), window.loss, window


def full_batch(model: nn.Module, batches: list[Batch]) -> tuple[list[torch.Tensor], float]:
    model.zero_grad()
    total, count = summed_loss(model, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])))
    (total / count).backward()
    return gradients(model), total.item() / count


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def relative_error(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    a, b = (torch.cat([g.flatten().double() for g in gs]) for gs in (found, right))
    return float((a - b).norm() / b.norm())


# Same numbers as one large batch.


@pytest.mark.parametrize(
    "counts",
    [(12, 12), (7, 7, 7, 7), (3, 9), (9, 3), (12, 1, 5), (5, 0), (0, 5), (0, 0, 4, 0, 9), (1, 12, 0, 12), (6,)],
    ids=lambda counts: "-".join(map(str, counts)),
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_gradient_is_that_of_the_full_batch(counts: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    """transformers issue 24725: a mean of micro-batch means gives short samples too much weight."""
    model = tiny_language_model().to(dtype)
    batches = [labelled(n) for n in counts]
    right, right_loss = full_batch(model, batches)
    found, loss, window = accumulated(model, batches)
    assert relative_error(found, right) < tolerance
    assert loss == pytest.approx(right_loss, rel=1e-6)
    assert window.count == sum(counts)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any))
def test_the_gradient_is_that_of_the_full_batch_for_any_counts(counts: list[int]) -> None:
    model = tiny_language_model().double()
    batches = [labelled(n) for n in counts]
    assert relative_error(accumulated(model, batches)[0], full_batch(model, batches)[0]) < 1e-12


def test_a_mean_of_means_would_have_failed() -> None:
    model = tiny_language_model().double()
    batches = [labelled(3), labelled(9)]
    model.zero_grad()
    for batch in batches:
        total, count = summed_loss(model, batch)
        (total / count / len(batches)).backward()
    assert relative_error(gradients(model), full_batch(model, batches)[0]) > 1e-2


def test_before_the_last_micro_batch_the_gradients_are_others() -> None:
    model = tiny_language_model().double()
    batches = [labelled(3), labelled(9), labelled(5)]
    right, _ = full_batch(model, batches)
    model.zero_grad()
    window = Window(3)
    errors = []
    for batch in batches:
        window.share(*summed_loss(model, batch)).backward()
        errors.append(relative_error(gradients(model), right))
    window.close(model.parameters())
    assert min(errors) > 1e-2  # also after the last one: close() is needed
    assert relative_error(gradients(model), right) < 1e-12


def test_known_numbers() -> None:
    """Losses 1, 2, 3 and nine times 10: the mean is 8, the mean of means 6."""
    weight = nn.Parameter(torch.ones(()))
    window = Window(2)
    for values in (torch.tensor([1.0, 2.0, 3.0]), torch.full((9,), 10.0)):
        window.share((weight * values).sum(), len(values)).backward()
    assert weight.grad == pytest.approx(96 / 6)  # the losses' sum over what the window would hold with twice 3
    window.close([weight])
    assert weight.grad == pytest.approx(8.0)
    assert window.loss == pytest.approx(8.0)


def test_equal_counts_touch_nothing() -> None:
    """The same bits as the loop everybody writes by hand, in every type."""
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_language_model().to(dtype)
        batches = [labelled(7) for _ in range(3)]
        model.zero_grad()
        for batch in batches:
            total, count = summed_loss(model, batch)
            (total / (count * 3)).backward()
        by_hand = gradients(model)
        versions = [p.grad._version for p in model.parameters() if p.grad is not None]
        found, _, _ = accumulated(model, batches)
        assert all(map(torch.equal, found, by_hand))
        assert [p.grad._version for p in model.parameters() if p.grad is not None] == versions  # no mul_ by 1 either


def test_an_empty_window_leaves_zero_gradients_and_loss_zero() -> None:
    model = tiny_language_model()
    found, loss, window = accumulated(model, [labelled(0), labelled(0)])
    assert all(not g.any() and g.isfinite().all() for g in found)
    assert (loss, window.count) == (0.0, 0)


def test_a_window_without_any_micro_batch_has_loss_zero() -> None:
    window = Window(4)
    window.close([nn.Parameter(torch.ones(2))])
    assert (window.loss, window.count) == (0.0, 0)


def test_a_window_that_is_cut_short_is_a_mean_over_what_it_held() -> None:
    """transformers pull 39659: the last, incomplete window must not be divided by the full number."""
    model = tiny_language_model().double()
    batches = [labelled(4), labelled(6)]
    right, right_loss = full_batch(model, batches)
    model.zero_grad()
    window = Window(5)
    for batch in batches:
        window.share(*summed_loss(model, batch)).backward()
    window.close(model.parameters())
    assert relative_error(gradients(model), right) < 1e-12
    assert window.loss == pytest.approx(right_loss, rel=1e-6)


def test_frozen_and_unused_parameters_stay_without_gradient() -> None:
    model = tiny_language_model()
    model[0].weight.requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    window = Window(2)
    for counted in (3, 9):
        total, count = summed_loss(nn.Sequential(*list(model)[:3]), labelled(counted))
        window.share(total, count).backward()
    window.close(model.parameters())
    assert model[0].weight.grad is None
    assert model.unused.weight.grad is None


def test_tied_weights_are_corrected_once() -> None:
    model = tiny_language_model().double()
    model[2].weight = model[0].weight = nn.Parameter(torch.randn(11, 5, dtype=torch.float64))
    batches = [labelled(3), labelled(9)]
    assert relative_error(accumulated(model, batches)[0], full_batch(model, batches)[0]) < 1e-12


def test_share_keeps_no_graph_alive() -> None:
    weight = nn.Parameter(torch.ones(3))
    window = Window(2)
    total = (weight * weight).sum()
    window.share(total, 3)
    assert not torch.is_tensor(window._total) or window._total.grad_fn is None


def test_a_loss_in_bf16_is_added_up_in_fp32() -> None:
    window = Window(3)
    for value in (256.0, 1.0, 1.0):  # bf16 would round 256 + 1 to 256
        window.share(torch.tensor(value, dtype=torch.bfloat16, requires_grad=True), 1)
    assert window.loss == 258 / 3


# In the training loop, in every precision.


class Batches:
    """A task over prepared batches, one after the other, so that windows of every shape see the same data."""

    def __init__(self, batches: list[Batch], loss: Callable[[nn.Module, Batch], object] = summed_loss) -> None:
        self.left = list(batches)
        self.task = vl.Task(tiny_language_model, lambda size, device: self.left.pop(0), loss, "tokens")  # type: ignore[arg-type]


def after_window(batches: list[Batch], accumulation: int, **options: object) -> tuple[nn.Module, Window, bool]:
    """Train one window over the batches (or over one batch of them all) and return the model."""
    if accumulation == 1:
        batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    recipe = vl.Recipe(accumulation=accumulation, optimizer="sgd", **options)  # type: ignore[arg-type]
    precision = Precision(recipe.precision, loss_scale=recipe.loss_scale)
    source = Batches(batches)
    model = precision.prepare(source.task.model())
    optimizer = build_optimizer(model, recipe, learning_rate=0.5)
    window, stepped = train_window(source.task, recipe, model, optimizer, precision, CPU)
    assert source.left == []
    return model, window, stepped


@pytest.mark.parametrize("counts", [(8, 8, 8), (3, 12, 7), (0, 4, 12), (9, 0, 0)], ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("amp-bf16", 1e-2), ("amp-fp16", 2e-3), ("bf16", 3e-2)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("clip_norm", [None, 1e-2], ids=["no clipping", "clipping"])
def test_a_window_moves_the_parameters_as_one_large_batch_does(
    counts: tuple[int, ...], precision: str, tolerance: float, clip_norm: float | None
) -> None:
    batches = [labelled(n) for n in counts]
    before = list(tiny_language_model().parameters())
    moves, losses = [], []
    for accumulation in (1, len(batches)):
        model, window, stepped = after_window(batches, accumulation, precision=precision, clip_norm=clip_norm)
        assert stepped
        moves.append([a.detach().float() - b.detach() for a, b in zip(model.parameters(), before, strict=True)])
        losses.append(window.loss)
    if precision == "bf16":  # the parameters themselves are rounded: compare in their own steps
        assert relative_error(moves[1], moves[0]) < 0.3
    else:
        assert relative_error(moves[1], moves[0]) < tolerance
    assert losses[1] == pytest.approx(losses[0], rel=max(tolerance, 1e-5))


def test_clipping_comes_after_the_correction() -> None:
    """Unequal counts change the norm by a factor of 4 here: clipping first would leave it visible."""
    batches = [labelled(1), labelled(12), labelled(12)]
    before = list(tiny_language_model().parameters())
    model, _, _ = after_window(batches, 3, clip_norm=0.125)
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)])
    assert float(moved.norm().detach()) == pytest.approx(0.5 * 0.125, rel=1e-4)


def test_a_first_micro_batch_without_labels_does_not_overflow_fp16() -> None:
    """Divided by the number of micro-batches alone, sums of 12 losses would be 12 times too large for the loss scale."""
    batches = [labelled(0), *[labelled(12) for _ in range(3)]]
    scale = 2.0**17
    _, _, with_empty = after_window(batches, 4, precision="amp-fp16", loss_scale=scale)
    _, _, without = after_window(batches[1:], 3, precision="amp-fp16", loss_scale=scale)
    assert with_empty
    assert without


def test_an_empty_window_in_training_changes_nothing() -> None:
    for precision in ("fp32", "amp-fp16"):
        model, window, stepped = after_window([labelled(0), labelled(0)], 2, precision=precision, clip_norm=1.0)
        assert stepped
        assert window.loss == 0.0
        assert all(map(torch.equal, model.parameters(), tiny_language_model().parameters()))


@pytest.mark.parametrize(
    "count",
    [lambda n: n, lambda n: torch.tensor(n), lambda n: torch.tensor([n]), lambda n: torch.tensor(n, dtype=torch.int32)],
    ids=["int", "tensor", "tensor of shape (1,)", "int32 tensor"],
)
def test_a_task_may_count_with_a_tensor(count: Callable[[int], object]) -> None:
    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, object]:
        total, n = summed_loss(model, batch)
        return total, count(n)

    batches = [labelled(3), labelled(9)]
    source = Batches(batches, loss)
    report = next(train(source.task, vl.Recipe(accumulation=2), "cpu"))
    right = full_batch(tiny_language_model(), batches)[1]
    assert report.loss == pytest.approx(right, rel=1e-6)


def test_items_are_counted_over_the_whole_window() -> None:
    source = Batches([labelled(n) for n in (1, 2, 3, 4, 5, 6, 7, 8)])
    steps = train(source.task, vl.Recipe(accumulation=2), "cpu")
    third = [next(steps) for _ in range(4)][3]
    assert third.items_per_second is not None
    assert third.items_per_second * third.seconds == pytest.approx(15)


def test_the_loss_of_a_long_window_does_not_depend_on_its_cut() -> None:
    """The same 12 items as 1 x 12, 2 x 6, 3 x 4, 4 x 3, 6 x 2 and 12 x 1."""
    tokens, targets = labelled(12)
    losses = []
    for size in (12, 6, 4, 3, 2, 1):
        batches = [(tokens[i : i + size], targets[i : i + size]) for i in range(0, 12, size)]
        losses.append(accumulated(tiny_language_model().double(), batches)[1])
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-6)
    assert all(math.isfinite(loss) for loss in losses)
