"""Gradient accumulation: the gradient of one large batch, whatever the micro-batches hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vramlab as vl
from vramlab.parallel.way import Way
from vramlab.techniques import Precision, Window, accumulate
from vramlab.techniques.choose import build_optimizer
from vramlab.training import train, train_window

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
    window, stepped = train_window(source.task, recipe, Way(recipe, CPU), model, optimizer, precision)
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


def test_a_second_close_changes_nothing() -> None:
    model = tiny_language_model().double()
    batches = [labelled(3), labelled(9)]
    right, _ = full_batch(model, batches)
    _, _, window = accumulated(model, batches)
    window.close(model.parameters())
    assert relative_error(gradients(model), right) < 1e-12


def test_unequal_micro_batches_of_a_regression_weigh_by_samples() -> None:
    """explainingai-code/DiT-PyTorch issue 3: 3, 3 and 2 of the losses 0..7 have the mean 3.5, the mean of means is 3.83."""
    values = torch.arange(8.0)
    assert float(torch.stack([part.mean() for part in values.split(3)]).mean()) == pytest.approx(3.8333, abs=1e-4)
    weight = nn.Parameter(torch.ones(()))
    (window,) = accumulate(values.split(3), 3, count=len)
    for part in window:
        window.share((weight * part).sum()).backward()
    assert (float(weight.grad), window.loss, window.count) == (3.5, 3.5, 8)


def test_the_loss_of_an_epoch_is_a_mean_over_samples_when_windows_are_weighed_by_their_count() -> None:
    """explainingai-code/DiT-PyTorch issue 3: a mean over windows of different sizes is another number."""
    values = torch.arange(15.0)
    found = []
    for window in accumulate(values.split(3), 2, count=len):
        for part in window:
            window.share(part.sum())
        found.append((window.loss, window.count))
    assert [count for _, count in found] == [6, 6, 3]
    assert sum(loss * count for loss, count in found) / sum(count for _, count in found) == 7.0
    assert sum(loss for loss, _ in found) / 3 != 7.0


# Windows from an iterable.


@pytest.mark.parametrize("counts", [(3, 9), (12, 1, 5, 0, 7), (0, 0, 4)], ids=lambda counts: "-".join(map(str, counts)))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_windows_that_know_their_items_need_no_correction(counts: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    """transformers pull 34191, torchtune pull 1875, torchtitan pull 2206: the tokens are counted before the first backward."""
    model = tiny_language_model().to(dtype)
    batches = [labelled(n) for n in counts]
    right, right_loss = full_batch(model, batches)
    model.zero_grad()
    (window,) = accumulate(batches, len(batches), count=lambda batch: (batch[1] != IGNORED).sum())  # a tensor will do
    for batch in window:
        window.share(summed_loss(model, batch)[0]).backward()
    before = gradients(model)
    window.close(model.parameters())
    assert all(map(torch.equal, gradients(model), before))
    assert relative_error(before, right) < tolerance
    assert window.loss == pytest.approx(right_loss, rel=1e-6)
    assert window.count == sum(counts)


def test_a_count_given_to_a_window_that_knows_its_items_is_not_added_to_them() -> None:
    weight = nn.Parameter(torch.ones(()))
    (window,) = accumulate([torch.ones(3), torch.ones(9)], 2, count=len)
    for values in window:
        window.share((weight * values).sum(), len(values)).backward()
    window.close([weight])
    assert (float(weight.grad), window.loss, window.count) == (pytest.approx(1.0), 1.0, 12)


@pytest.mark.parametrize(("n", "k", "steps"), [(3, 4, [3]), (7, 4, [4, 3]), (8, 4, [4, 4]), (0, 4, []), (3, 1, [1, 1, 1]), (1, 1, [1])])
@pytest.mark.parametrize("kind", [list, iter, lambda x: (i for i in x)], ids=["list", "iterator", "generator"])
def test_the_last_window_holds_what_is_left(n: int, k: int, steps: list[int], kind: Callable[[range], Iterable[int]]) -> None:
    """AnimaLoraStudio pull 305: fewer batches than k made no step at all; Lightning issue 4653: leftovers leaked into the next epoch."""
    windows = list(accumulate(kind(range(n)), k))
    assert [len(window) for window in windows] == steps
    assert [batch for window in windows for batch in window] == list(range(n))


@pytest.mark.parametrize("count", [None, lambda batch: len(batch[0])], ids=["means", "sums"])
def test_every_window_of_the_same_data_has_the_same_gradient(count: Callable[[Batch], int] | None) -> None:
    """transformers pulls 38872 and 39659, Lightning issue 19987, minimind issue 749: the last of 5 batches was divided by k = 4."""
    model = nn.Linear(3, 1)
    x, y = torch.randn(2, 3), torch.randn(2, 1)
    F.mse_loss(model(x), y).backward()
    right = gradients(model)
    model.zero_grad()
    sizes = []
    for window in accumulate([(x, y)] * 5, 4, count=count):
        for inputs, targets in window:
            window.share(F.mse_loss(model(inputs), targets, reduction="mean" if count is None else "sum")).backward()
        window.close(model.parameters())
        sizes.append(len(window))
        assert relative_error(gradients(model), right) < 1e-6
        model.zero_grad()
        assert gradients(model) == []  # nothing is left for the next window, or epoch
    assert sizes == [4, 1]


def test_without_a_count_each_micro_batch_weighs_the_same() -> None:
    weight = nn.Parameter(torch.ones(()))
    (window,) = accumulate([1.0, 2.0, 6.0], 5)
    for mean in window:
        window.share(weight * mean).backward()
    window.close([weight])
    assert (float(weight.grad), window.loss, window.count) == (pytest.approx(3.0), 3.0, 3)


@pytest.mark.parametrize("close", [True, False])
def test_windows_in_which_nothing_counts_have_zero_gradients(close: bool) -> None:
    """A batch of nothing but padding: not NaN, which one division by 0 would leave in every parameter."""
    model = tiny_language_model()
    for window in accumulate([labelled(0) for _ in range(3)], 2, count=lambda batch: summed_loss(model, batch)[1]):
        for batch in window:
            window.share(summed_loss(model, batch)[0]).backward()
        if close:
            window.close(model.parameters())
        assert (window.loss, window.count) == (0.0, 0)
    assert all(not g.any() and g.isfinite().all() for g in gradients(model))
    assert len(gradients(model)) == 3


def test_an_endless_iterator_is_read_one_window_at_a_time() -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for i in itertools.count():
            read.append(i)
            yield i

    windows = accumulate(numbers(), 3)
    assert read == []
    assert list(next(windows)) == [0, 1, 2] == read
    assert list(next(windows)) == [3, 4, 5]


@pytest.mark.parametrize("where", ["batches", "count"])
def test_an_error_in_reading_or_counting_comes_through(where: str) -> None:
    def batches() -> Iterator[int]:
        yield from (1, 2)
        if where == "batches":
            raise KeyError("unreadable")
        yield 3

    def count(batch: int) -> int:
        return {1: 1, 2: 1}[batch]

    windows = accumulate(batches(), 2, count)
    assert list(next(windows)) == [1, 2]
    with pytest.raises(KeyError, match="unreadable" if where == "batches" else "3"):
        next(windows)


@pytest.mark.parametrize("k", [0, -1, 2.0, "4", None, True])
def test_a_window_of_less_than_one_micro_batch_is_refused(k: Any) -> None:
    with pytest.raises(ValueError, match=rf"^k is a whole number of at least 1, got {k!r}; 1 is a step for each micro-batch\.$"):
        next(accumulate([1, 2], k))


def test_a_window_without_items_wants_them_at_each_share() -> None:
    text = r"^This window does not know how many items it holds: give share\(total, count\), or accumulate\(\.\.\., count=\.\.\.\)\.$"
    with pytest.raises(ValueError, match=text):
        Window(2).share(torch.ones((), requires_grad=True))


@pytest.mark.parametrize(("skipped", "right"), [((), 0.25), ((1,), 0.5)], ids=["none skipped", "second skipped"])
def test_a_scheduler_steps_once_an_optimizer_step(skipped: tuple[int, ...], right: float) -> None:
    """accelerate issues 499 and 963 and pull 1187, h2o-llmstudio pull 663: it ran once a micro-batch, or for skipped steps too."""
    model, precision = nn.Linear(3, 1), Precision("amp-fp16", loss_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for number, window in enumerate(accumulate(torch.randn(8, 2, 3), 4)):
        for x in window:
            precision.backward(window.share(model(x).square().mean()))
        if number in skipped:
            model.weight.grad[0, 0] = math.inf
        if precision.step(optimizer):
            scheduler.step()
        optimizer.zero_grad()
    assert scheduler.get_last_lr() == [right]
    assert precision.skipped_steps == len(skipped)


# Synchronising once a window.


class NoSync:
    """Stands for ``no_sync`` of `DistributedDataParallel`: which micro-batches ran inside, and whether it is open."""

    def __init__(self) -> None:
        self.open, self.entered = 0, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.open, self.entered = self.open + 1, self.entered + 1
        try:
            yield
        finally:
            self.open -= 1


@pytest.mark.parametrize(
    ("n", "k", "inside"), [(5, 4, [1, 1, 1, 0, 0]), (3, 4, [1, 1, 0]), (4, 2, [1, 0, 1, 0]), (2, 1, [0, 0]), (0, 3, [])]
)
def test_all_micro_batches_of_a_window_but_the_last_run_inside_no_sync(n: int, k: int, inside: list[int]) -> None:
    no_sync = NoSync()
    seen = []
    for window in accumulate(range(n), k, no_sync=no_sync):
        for _ in window:
            seen.append(no_sync.open)
        assert no_sync.open == 0
    assert seen == inside
    assert no_sync.entered == sum(inside)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("how", ["break", "error", "return"])
def test_no_sync_is_closed_when_a_window_is_left_early(at: int, how: str) -> None:
    no_sync = NoSync()
    windows = accumulate(range(6), 3, no_sync=no_sync)

    def leave() -> None:
        for i, _ in enumerate(next(windows)):
            assert no_sync.open == (i < 2)
            if i == at and how == "break":
                break
            if i == at and how == "return":
                return
            if i == at:
                raise KeyError("inside")

    with pytest.raises(KeyError) if how == "error" else nullcontext():
        leave()
    assert no_sync.open == 0
    assert list(next(windows)) == [3, 4, 5]  # the window that was left does not leak into the next
    assert no_sync.open == 0


def test_an_interrupted_window_does_not_change_the_next_ones_gradient() -> None:
    model = tiny_language_model().double()
    batches = [labelled(n) for n in (3, 9, 4, 1)]
    right, _ = full_batch(model, batches[2:])
    model.zero_grad()
    windows = accumulate(batches, 2, count=lambda batch: summed_loss(model, batch)[1])
    for batch in (interrupted := next(windows)):
        interrupted.share(summed_loss(model, batch)[0]).backward()
        break
    model.zero_grad()
    for batch in (window := next(windows)):
        window.share(summed_loss(model, batch)[0]).backward()
    assert relative_error(gradients(model), right) < 1e-12


def test_the_mean_over_two_ranks_is_over_the_tokens_of_both() -> None:
    """transformers issue 34242 and pull 34373, speculators pull 942, torchtitan pull 2206: with sums 6 of 3 tokens and 90 of 9 on
    two ranks the mean is 8; local means give 6, and without the number of ranks, by which gradients are divided, it is 4.

    The ranks here are two loops; two processes come with the parallel part.
    """
    ranks = [[torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.full((4,), 10.0), torch.full((5,), 10.0)]]
    everywhere = sum(len(values) for batches in ranks for values in batches)  # what all_reduce gives

    def mean_over_ranks(factor: Callable[[int], float]) -> float:
        found = []
        for batches in ranks:
            weight, no_sync = nn.Parameter(torch.ones(())), NoSync()
            (window,) = accumulate(batches, 2, count=len, no_sync=no_sync)
            for values in window:
                (window.share((weight * values).sum()) * factor(window.count)).backward()
            assert (no_sync.entered, no_sync.open) == (1, 0)
            found.append(float(weight.grad))
        return sum(found) / len(found)  # what DistributedDataParallel does

    assert mean_over_ranks(lambda here: here * len(ranks) / everywhere) == pytest.approx(8.0)
    assert mean_over_ranks(lambda here: 1.0) == pytest.approx(6.0)
    assert mean_over_ranks(lambda here: here / everywhere) == pytest.approx(4.0)


# Gradients of 16-bit parameters add up in fp32.

SUMMANDS = (256.0, 1.0, -256.0)


def bf16_parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))


def sum_of_gradients(parameter: nn.Parameter, opened: bool) -> float:
    window: Window = Window(3)
    if opened:
        window.open([parameter])
    for value in SUMMANDS:
        window.share(parameter.sum() * value * 3, 1).backward()
    window.close([parameter])
    assert parameter.grad is not None
    assert parameter.grad.dtype is parameter.grad_dtype is torch.bfloat16
    return float(parameter.grad[0])


def test_small_contributions_are_not_lost_in_bf16() -> None:
    """pytorch pulls 125191 and 194434: in bf16, 256 + 1 is 256, so that 256 + 1 - 256 is 0."""
    assert sum_of_gradients(bf16_parameter(), opened=False) == 0.0
    assert sum_of_gradients(bf16_parameter(), opened=True) == 1.0


def test_a_second_window_adds_up_in_fp32_too() -> None:
    parameter = bf16_parameter()
    for _ in range(2):
        assert sum_of_gradients(parameter, opened=True) == 1.0
        parameter.grad = None


def test_gradients_set_to_zero_instead_of_none_add_up_in_fp32_too() -> None:
    parameter = bf16_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for _ in range(2):
        assert sum_of_gradients(parameter, opened=True) == 1.0
        optimizer.zero_grad(set_to_none=False)
        assert parameter.grad is not None


def test_a_window_after_an_exception_adds_up_in_fp32_and_closes() -> None:
    parameter, never_used = bf16_parameter(), bf16_parameter()
    for after_micro_batches in (0, 1, 2):
        window: Window = Window(3)
        window.open([parameter, never_used])
        for _ in range(after_micro_batches):
            window.share(parameter.sum(), 1).backward()
        parameter.grad = None  # the exception comes here, and the user calls zero_grad
        assert sum_of_gradients(parameter, opened=True) == 1.0
        parameter.grad = None
    one: Window = Window(1)  # without several micro-batches nothing is opened, and what was left open is closed
    window.open([parameter])
    one.open([parameter])
    one.share(parameter.sum(), 1).backward()
    one.close([parameter, never_used])
    assert parameter.grad.dtype is torch.bfloat16
    assert {parameter.grad_dtype, never_used.grad_dtype} == {torch.bfloat16}


def test_parameters_without_a_gradient_get_their_type_back() -> None:
    unused, frozen, full = bf16_parameter(), bf16_parameter().requires_grad_(False), nn.Parameter(torch.ones(2))
    window: Window = Window(2)
    window.open([unused, frozen, full])
    assert [p.grad_dtype for p in (unused, frozen, full)] == [torch.float32, torch.bfloat16, torch.float32]
    window.close([unused, frozen, full])
    assert [p.grad for p in (unused, frozen, full)] == [None] * 3
    assert [p.grad_dtype for p in (unused, frozen, full)] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_one_micro_batch_leaves_gradients_in_the_parameters_type() -> None:
    parameter = bf16_parameter()
    window: Window = Window(1)
    window.open([parameter])
    window.share(parameter.sum(), 1).backward()
    assert parameter.grad.dtype is torch.bfloat16


def test_the_correction_is_made_before_the_gradient_is_rounded() -> None:
    parameter = bf16_parameter()
    window: Window = Window(2)
    window.open([parameter])
    for n in (1, 2):
        window.share(parameter.sum() * 257, n).backward()
    window.close([parameter])
    assert float(parameter.grad[0]) == float(torch.tensor((257 + 257) / 3, dtype=torch.bfloat16))  # 171.33 to 171


def test_the_fp32_buffer_is_recorded_as_gradients_of_4_bytes_a_parameter() -> None:
    """pytorch pull 194434: the buffer is what a window of bf16 gradients costs, until its close."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    window: Window = Window(2)
    held = []
    with vl.record(model) as trace:
        window.open(model.parameters())
        for _ in range(2):
            window.share(model(torch.ones(1, 64, dtype=torch.bfloat16)).sum(), 1).backward()
            held.append(trace.breakdown("end").gradients)
        window.close(model.parameters())
    assert held == [4 * 64 * 64] * 2
    assert trace.breakdown("end").gradients == 2 * 64 * 64


@pytest.mark.parametrize(("accumulation", "size"), [(1, 2), (3, 4)])
def test_a_run_in_bf16_shows_the_fp32_buffer_if_there_are_several_micro_batches(accumulation: int, size: int) -> None:
    task = vl.tasks.gpt("nano", sequence=8)
    recipe = vl.Recipe(precision="bf16", micro_batch=1, accumulation=accumulation, optimizer="sgd")
    memory = vl.run(task, recipe, steps=2, progress=False).reports[1].memory
    assert memory is not None
    parameters = sum(p.numel() for p in task.model().parameters())
    assert max(memory.breakdown(i).gradients for i in range(len(memory))) >= size * parameters
    assert memory.breakdown("backward").gradients == size * parameters
    assert memory.breakdown("step").gradients == 2 * parameters
