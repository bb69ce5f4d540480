"""Cross-entropy in chunks: the value and gradients of the whole logits, and never the whole logits."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vramlab as vl
from vramlab.techniques.losses import chunked_cross_entropy

TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-14}, torch.float32: {"rtol": 1e-4, "atol": 1e-6}}


def problem(
    tokens: int = 13, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64, ignored: int = 0, bias: bool = True
) -> dict[str, Any]:
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,))
    target[torch.randperm(tokens)[:ignored]] = -100
    return {"hidden": hidden, "weight": weight, "target": target, "bias": torch.randn(vocabulary, dtype=dtype, requires_grad=bias)}


def plain(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, bias: Any = None, **options: Any) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def with_gradients(loss: torch.Tensor, p: dict[str, Any]) -> list[torch.Tensor | None]:
    leaves = [p["hidden"], p["weight"], p["bias"]]
    found = torch.autograd.grad(loss * 3, [leaf for leaf in leaves if leaf.requires_grad])
    return [loss, *found]


def assert_same(p: dict[str, Any], chunks: int, **options: Any) -> None:
    ours = with_gradients(chunked_cross_entropy(**p, chunks=chunks, **options), p)
    theirs = with_gradients(plain(**p, **options), p)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE[p["hidden"].dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunks", [1, 2, 4, 5, 13, 40])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("ignored", "label_smoothing"), [(0, 0.0), (4, 0.0), (4, 0.1), (12, 0.3)])
def test_value_and_gradients_are_those_of_the_whole_logits(
    dtype: torch.dtype, chunks: int, reduction: str, ignored: int, label_smoothing: float
) -> None:
    assert_same(problem(dtype=dtype, ignored=ignored), chunks, reduction=reduction, label_smoothing=label_smoothing)


@given(
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 25),
    st.booleans(),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_any_sizes(tokens: int, width: int, vocabulary: int, chunks: int, bias: bool, label_smoothing: float, data: Any) -> None:
    ignored = data.draw(st.integers(0, tokens - 1))
    reduction = data.draw(st.sampled_from(["mean", "sum"]))
    assert_same(
        problem(tokens, width, vocabulary, ignored=ignored, bias=bias), chunks, reduction=reduction, label_smoothing=label_smoothing
    )


def test_an_ignored_class_is_any_number() -> None:
    for ignore_index in (0, 3, -1):
        p = problem()
        p["target"][:4] = ignore_index
        assert_same(p, 4, ignore_index=ignore_index)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_where_all_are_ignored_loss_and_gradients_are_zero(chunks: int, reduction: str, label_smoothing: float) -> None:
    """`F.cross_entropy` gives NaN for the mean."""
    p = problem(ignored=13)
    loss = chunked_cross_entropy(**p, chunks=chunks, reduction=reduction, label_smoothing=label_smoothing)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in with_gradients(loss, p))
    assert plain(**p).isnan()


@pytest.mark.parametrize("chunks", [1, 8])
def test_an_empty_batch_has_loss_and_gradients_of_zero(chunks: int) -> None:
    for shape in [(0, 5), (0, 7, 5), (3, 0, 5)]:
        hidden, weight = torch.randn(shape, requires_grad=True), torch.randn(11, 5, requires_grad=True)
        loss = chunked_cross_entropy(hidden, weight, torch.zeros(shape[:-1], dtype=torch.int64), chunks)
        loss.backward()
        assert loss.item() == 0
        assert hidden.grad.shape == shape
        assert torch.equal(weight.grad, torch.zeros(11, 5))


def test_leading_dimensions_are_tokens_in_any_number_and_memory_order() -> None:
    p = problem(24)
    expected = with_gradients(chunked_cross_entropy(**p, chunks=4), p)
    for shape in [(24,), (4, 6), (2, 3, 4)]:
        view = p | {"hidden": p["hidden"].view(*shape, 5), "target": p["target"].view(shape)}
        loss = chunked_cross_entropy(**view, chunks=4)
        assert torch.equal(loss, expected[0])
        assert all(map(torch.equal, with_gradients(loss, p), expected))
    turned = {"hidden": p["hidden"].view(4, 6, 5).transpose(0, 1), "target": p["target"].view(4, 6).T}
    torch.testing.assert_close(chunked_cross_entropy(**p | turned, chunks=4), expected[0])
    one = chunked_cross_entropy(p["hidden"][0], p["weight"], p["target"][0], bias=p["bias"])
    torch.testing.assert_close(one, plain(p["hidden"][:1], p["weight"], p["target"][:1], bias=p["bias"]))


@pytest.mark.parametrize("which", ["hidden", "weight", "bias", "hidden weight", "weight bias"])
def test_what_is_frozen_gets_no_gradient(which: str) -> None:
    p = problem()
    for name in ("hidden", "weight", "bias"):
        p[name].requires_grad_(name in which.split())
    ours = with_gradients(chunked_cross_entropy(**p, chunks=4), p)
    theirs = with_gradients(plain(**p), p)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_without_gradients_the_value_is_the_same_and_has_no_graph() -> None:
    p = problem()
    with torch.no_grad():
        loss = chunked_cross_entropy(**p, chunks=4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(**p).detach())
    with torch.inference_mode():
        torch.testing.assert_close(chunked_cross_entropy(**p, chunks=4), loss)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_any_integer_type_count(dtype: torch.dtype) -> None:
    p = problem()
    torch.testing.assert_close(chunked_cross_entropy(**p | {"target": p["target"].to(dtype)}), chunked_cross_entropy(**p))


def test_a_target_outside_the_vocabulary_is_an_error_as_in_torch() -> None:
    p = problem()
    p["target"][5] = 11
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        chunked_cross_entropy(**p)


# A tied head


class TiedModel(nn.Module):
    def __init__(self, chunks: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.chunks = nn.Embedding(29, 6), nn.Linear(6, 6), chunks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(tokens[:, :-1])).tanh()
        weight, target = self.embedding.weight, tokens[:, 1:]
        return plain(hidden, weight, target) if self.chunks is None else chunked_cross_entropy(hidden, weight, target, self.chunks)


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_the_weight_may_be_the_embedding(chunks: int) -> None:
    tokens = torch.randint(29, (4, 9))
    ours, theirs = TiedModel(chunks), TiedModel(None)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close(p, q)


def test_it_learns_to_repeat() -> None:
    model = TiedModel(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tokens = torch.arange(29).repeat(3, 1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


# Two bytes


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_two_bytes_give_a_loss_in_fp32(dtype: torch.dtype, chunks: int) -> None:
    p = problem(64, 16, 31, dtype=torch.float32)
    p = {name: t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for name, t in p.items()}
    exact = {name: t.detach().double().requires_grad_() if t.is_floating_point() else t for name, t in p.items()}
    loss, *ours = with_gradients(chunked_cross_entropy(**p, chunks=chunks), p)
    expected, *theirs = with_gradients(plain(**exact), exact)
    assert loss.dtype is torch.float32
    assert abs(loss.item() - expected.item()) < 0.02 * expected.item()
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is dtype
        assert (a.double() - b).norm() < 0.03 * b.norm()


@pytest.mark.parametrize("chunks", [1, 4])
def test_under_bf16_autocast_loss_and_gradients_are_fp32_and_near_the_plain_ones(chunks: int) -> None:
    p = problem(64, 16, 31, dtype=torch.float32)
    exact = with_gradients(plain(**p), p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = chunked_cross_entropy(**p, chunks=chunks), plain(**p)
    for a, b, right in zip(with_gradients(ours, p), with_gradients(theirs, p), exact, strict=True):
        assert a.dtype is torch.float32
        assert (a - right).norm() < 2 * (b - right).norm() + 1e-3 * right.norm()


@pytest.mark.parametrize("autocast", [True, False])
def test_many_chunks_in_two_bytes_are_no_less_exact_than_the_whole(autocast: bool) -> None:
    """The weight's gradient is a sum over chunks: in bf16 each addition would be rounded, to four times the error with 64."""
    hidden, weight, target = torch.randn(4096, 64), torch.randn(500, 64) * 0.1, torch.randint(500, (4096,))
    if not autocast:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    right = torch.autograd.grad(plain(*exact, target), exact)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def errors(loss: Any, *options: int) -> list[float]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss(*leaves, target, *options)
        return [((g - r).norm() / r.norm()).item() for g, r in zip(torch.autograd.grad(value, leaves), right, strict=True)]

    whole = errors(lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t))
    rounded_once_more = 1.05 if autocast else 1.5  # each chunk's product, then their sum
    for chunks in (1, 8, 64):
        assert all(ours <= rounded_once_more * theirs for ours, theirs in zip(errors(chunked_cross_entropy, chunks), whole, strict=True))


# Refused


@pytest.mark.parametrize("chunks", [0, -3, 2.0, "8", None])
def test_chunks_are_counted(chunks: Any) -> None:
    with pytest.raises(ValueError, match=f"chunks is a whole number of at least 1, got {chunks!r}; 8 is a good start"):
        chunked_cross_entropy(**problem(), chunks=chunks)


def test_the_loss_of_each_token_is_refused() -> None:
    with pytest.raises(ValueError, match="reduction is 'mean' or 'sum', got 'none'; the loss of each token would need no chunks"):
        chunked_cross_entropy(**problem(), reduction="none")


@pytest.mark.parametrize("shape", [(13,), (13, 11)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_probabilities_of_classes_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    text = f"target is class numbers, got {dtype}; for probabilities of classes take F.cross_entropy on the whole logits"
    with pytest.raises(ValueError, match=text):
        chunked_cross_entropy(**problem() | {"target": torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": torch.zeros(12, dtype=torch.int64)},
        {"target": torch.zeros(13, 1, dtype=torch.int64)},
        {"weight": torch.zeros(5, 11)},
        {"weight": torch.zeros(5)},
        {"hidden": torch.zeros(13, 6)},
        {"hidden": torch.zeros(())},
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    shapes = {name: tuple((problem() | wrong)[name].shape) for name in ("hidden", "weight", "target")}
    got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    text = f"Shapes are hidden (..., width), weight (vocabulary, width), target (...), got {got}; slice or transpose."
    with pytest.raises(ValueError, match=re.escape(text)):
        chunked_cross_entropy(**problem() | wrong)


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.5, math.nan])
def test_smoothing_is_a_share(label_smoothing: float) -> None:
    with pytest.raises(ValueError, match=f"label_smoothing is from 0 to 1, got {label_smoothing!r}; 0.1 is usual"):
        chunked_cross_entropy(**problem(), label_smoothing=label_smoothing)


def test_a_second_derivative_is_refused() -> None:
    p = problem()
    text = "has no second derivative, and create_graph=True asks for one; take F.cross_entropy on the whole logits there"
    with pytest.raises(RuntimeError, match=text):
        torch.autograd.grad(chunked_cross_entropy(**p), p["hidden"], create_graph=True)


# Backward passes


def test_a_kept_graph_goes_backward_again_with_the_same_gradients() -> None:
    p = problem()
    loss = chunked_cross_entropy(**p, chunks=4)
    loss.backward(retain_graph=True)
    once = [p[name].grad.clone() for name in ("hidden", "weight", "bias")]
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    for name, gradient in zip(("hidden", "weight", "bias"), once, strict=True):
        torch.testing.assert_close(p[name].grad, 4 * gradient)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_scaled_loss_in_fp16_autocast_has_the_scaled_gradients() -> None:
    p = problem(64, 16, 31, dtype=torch.float32)
    right = with_gradients(plain(**p), p)
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked_cross_entropy(**p, chunks=4)
    scaled = with_gradients(scaler.scale(loss), p)
    for a, b in zip(scaled, right, strict=True):
        assert (a / scaler.get_scale() - b).norm() < 0.01 * b.norm()


def test_masked_logits_work_as_in_torch() -> None:
    p = problem()
    p["bias"] = torch.tensor([0.0] * 10 + [-math.inf], dtype=torch.float64)
    p["target"] %= 10
    p["target"][3] = -100
    assert_same(p, 4)


def test_tensors_without_data_pass() -> None:
    hidden, weight = torch.empty(4, 7, 5, device="meta", requires_grad=True), torch.empty(11, 5, device="meta", requires_grad=True)
    chunked_cross_entropy(hidden, weight, torch.empty(4, 7, dtype=torch.int64, device="meta"), chunks=3).backward()
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.shape == weight.shape


# Bytes


def rise(p: dict[str, Any], loss: Any, **options: Any) -> vl.MemoryTrace:
    with vl.record() as trace:
        loss(**p, **options).backward()
    for name in ("hidden", "weight", "bias"):
        p[name].grad = None
    return trace


SCALARS = 64


def test_never_the_whole_logits_and_the_peak_is_that_worked_out_by_hand() -> None:
    tokens, width, vocabulary = 512, 16, 1000
    p = problem(tokens, width, vocabulary, dtype=torch.float32)
    logits, gradients = 4 * tokens * vocabulary, 4 * (vocabulary * width + tokens * width + vocabulary)
    whole = rise(p, plain)
    assert whole.events.nbytes.max() == logits
    # Log-probabilities, and the gradients of them and of the logits.
    assert 3 * logits <= whole.peak - whole.baseline <= 3 * logits + SCALARS
    for chunks in (1, 2, 4, 8, 16):
        trace = rise(p, chunked_cross_entropy, chunks=chunks)
        assert trace.events.nbytes.max() == logits // chunks
        # A chunk's logits and log-probabilities, and all gradients.
        by_hand = 2 * logits // chunks + gradients
        assert by_hand <= trace.peak - trace.baseline <= by_hand + SCALARS
        assert trace.peak_phase == "forward"


def test_between_forward_and_backward_there_are_only_the_gradients_and_backward_adds_nothing() -> None:
    tokens, width, vocabulary = 512, 16, 1000
    p = problem(tokens, width, vocabulary, dtype=torch.float32)
    gradients = 4 * (vocabulary * width + tokens * width + vocabulary)
    with vl.record() as trace:
        loss = chunked_cross_entropy(**p, chunks=8)
    assert gradients <= trace.breakdown("end").total - trace.baseline <= gradients + SCALARS
    with vl.record() as trace:
        loss.backward()
    assert trace.peak - trace.baseline <= SCALARS


def test_without_gradients_nothing_stays() -> None:
    tokens, width, vocabulary = 512, 16, 1000
    p = problem(tokens, width, vocabulary, dtype=torch.float32)
    with torch.no_grad(), vl.record() as trace:
        loss = chunked_cross_entropy(**p, chunks=8)
    assert not loss.requires_grad
    assert trace.breakdown("end").total - trace.baseline <= SCALARS
    assert trace.peak - trace.baseline <= 2 * 4 * tokens * vocabulary // 8 + 4096


def test_in_bf16_autocast_too_the_logits_are_never_whole() -> None:
    tokens, width, vocabulary, chunks = 512, 16, 1000, 8
    p = problem(tokens, width, vocabulary, dtype=torch.float32)
    with vl.record() as trace, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(**p, chunks=chunks)
    logits, weight, hidden = 4 * tokens * vocabulary // chunks, 4 * vocabulary * width, 4 * tokens * width
    assert trace.events.nbytes.max() == logits
    # Two chunks in fp32, the gradients, and the weight once more in 2 bytes.
    assert trace.peak - trace.baseline <= 2 * logits + weight + hidden + weight // 2 + 16 * vocabulary
    loss.backward()


def test_no_product_is_computed_twice() -> None:
    def flops(loss: Any, **options: Any) -> int:
        p = problem(64, 16, 100, dtype=torch.float32)
        with FlopCounterMode(display=False) as counter:
            loss(**p, **options).backward()
        return counter.get_total_flops()

    assert flops(plain) == flops(chunked_cross_entropy, chunks=8) == 3 * 2 * 64 * 16 * 100
