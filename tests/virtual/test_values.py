"""Reading a virtual card: what came from the CPU is true, other whole numbers are refused, a float is 0.0 and counted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vramlab.virtual.device import VirtualGPU, virtual_gpu
from vramlab.virtual.values import MOST_DATA, MOST_FLOATS, MOST_INTEGERS, UnknownValueError

Tensors = list[torch.Tensor]


def unknown(gpu: VirtualGPU, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=gpu.device)


# Random programs


def _same(tensors: Tensors, i: int, j: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors[i % len(tensors)], tensors[j % len(tensors)]


def _part(t: torch.Tensor, n: int) -> torch.Tensor:
    """A view of a tensor, chosen by a number."""
    views: list[Callable[[], torch.Tensor]] = [
        lambda: t[n % t.shape[0]],
        lambda: t[: 1 + n % t.shape[0]],
        lambda: t[n % t.shape[0] :],
        lambda: t[:, n % t.shape[1]],
        lambda: t.T,
        lambda: t.reshape(-1)[:: 1 + n % 3],
        lambda: t.unsqueeze(0),
        lambda: t.diagonal(),
        lambda: t.narrow(1, n % t.shape[1], 1),
        lambda: t.chunk(2, 1)[0],
        lambda: t.detach(),
    ]
    return views[n % len(views)]()


NEW: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
    "add": lambda a, b, n: a + b,
    "subtract": lambda a, b, n: a - n,
    "multiply": lambda a, b, n: a * b % 1000,
    "divide": lambda a, b, n: a // (1 + n),
    "true divide": lambda a, b, n: (a / 4).long(),
    "where": lambda a, b, n: torch.where(a > n, a, b),
    "compare": lambda a, b, n: (a <= b).long(),
    "logic": lambda a, b, n: ((a > 2) & ~(b > 2) | (a == b)).to(torch.int64),
    "bits": lambda a, b, n: a & 7 ^ b | 1,
    "shift": lambda a, b, n: (a & 255) << 2 >> 1,
    "clamp": lambda a, b, n: a.clamp(0, 1 + n),
    "cumulative": lambda a, b, n: (a % 10).cumsum(n % 2),
    "sort": lambda a, b, n: a.sort(dim=n % 2).values,
    "argsort": lambda a, b, n: a.argsort(dim=n % 2, stable=True),
    "flip": lambda a, b, n: a.flip(n % 2).contiguous(),
    "roll": lambda a, b, n: a.roll(n, 0),
    "maximum": lambda a, b, n: torch.maximum(a, b),
    "reduce": lambda a, b, n: a.sum(n % 2, keepdim=True).expand(3, 3),
    "most": lambda a, b, n: a.amax(n % 2, keepdim=True) + b,
    "gather": lambda a, b, n: a.gather(n % 2, b.remainder(3)),
    "select": lambda a, b, n: a[b[0].remainder(3)],
    "fill": lambda a, b, n: a.masked_fill(b > n, n),
    "triangle": lambda a, b, n: a.tril(n % 3 - 1),
    "cat": lambda a, b, n: torch.cat([a, b])[n % 4 : n % 4 + 3],
    "stack": lambda a, b, n: torch.stack([a, b]).amin(0),
    "narrower": lambda a, b, n: a.to(torch.int16).long(),
    "bytes": lambda a, b, n: a.view(torch.uint8)[:, ::8].long(),
    "clone": lambda a, b, n: a.T.clone(),
    "equal shape": lambda a, b, n: torch.full_like(a, n) + torch.zeros_like(b),
    "foreach": lambda a, b, n: torch._foreach_add([a, b], n)[0],
    "put": lambda a, b, n: torch.index_put(a, (b.remainder(3),), torch.tensor(n, device=a.device)),
    "scatter": lambda a, b, n: a.scatter(n % 2, b.remainder(3), n),
    "one hot": lambda a, b, n: torch.nn.functional.one_hot(a.remainder(3), 3).sum(0),
    "pad": lambda a, b, n: torch.nn.functional.pad(a, (1, 0))[:, :3],
    "repeat": lambda a, b, n: a.repeat(2, 1)[1:4],
    "search": lambda a, b, n: torch.searchsorted(a.sort(1).values.contiguous(), b.contiguous()),
    "count": lambda a, b, n: torch.bincount(a.reshape(-1).remainder(9), minlength=9).view(3, 3),
    "places": lambda a, b, n: torch.cat([(a > n).nonzero().reshape(-1), b.new_zeros(9)])[:9].view(3, 3),
    "mask": lambda a, b, n: torch.cat([a[b > n], b.new_ones(9)])[:9].view(3, 3),
    "unique": lambda a, b, n: torch.cat([a.unique(), b.reshape(-1)])[:9].view(3, 3),
}
IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
    "add": lambda a, b, n: a.add_(n),
    "add a tensor": lambda a, b, n: a.add_(b.reshape(-1)[0].clone()),
    "multiply": lambda a, b, n: a.mul_(2).remainder_(1000),
    "fill": lambda a, b, n: a.fill_(n),
    "zero": lambda a, b, n: a.zero_(),
    "copy": lambda a, b, n: a.copy_(b.reshape(-1)[0].clone().expand_as(a)),
    "copy from the CPU": lambda a, b, n: a.copy_(torch.full(a.shape, n)),
    "set one": lambda a, b, n: a.__setitem__(..., n),
    "set where": lambda a, b, n: a.__setitem__(a > n, 3),
    "fill where": lambda a, b, n: a.masked_fill_(a < n, 1),
    "swap": lambda a, b, n: a.copy_(a.flip(0)),
    "out": lambda a, b, n: torch.add(a.clone(), 1, out=a),
    "foreach": lambda a, b, n: torch._foreach_add_([a], 1),
    "by data": lambda a, b, n: a.data.sub_(1),
    "clamp": lambda a, b, n: a.clamp_(max=n),
}
POISON: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy": lambda a, u: a.copy_(u.expand_as(a)),
    "add": lambda a, u: a.add_(u),
    "where": lambda a, u: a.masked_fill_(u.expand_as(a) > 3, 0),
    "put": lambda a, u: a.index_put_((u.new_zeros(1),), u.expand_as(a[:1])) if a.dim() else a.copy_(u),
    "mask": lambda a, u: a.__setitem__(u.expand_as(a) > 3, 7),
    "foreach": lambda a, u: torch._foreach_copy_([a], [u.expand_as(a)]),
    "out": lambda a, u: torch.mul(u.expand_as(a), 1, out=a),
}
STEPS = st.one_of(
    st.tuples(st.just("new"), st.sampled_from(sorted(NEW)), *[st.integers(0, 9)] * 3),
    st.tuples(st.just("in place"), st.sampled_from(sorted(IN_PLACE)), *[st.integers(0, 9)] * 3),
    st.tuples(st.just("in place on a view"), st.sampled_from(sorted(IN_PLACE)), *[st.integers(0, 9)] * 3),
)
BAD_STEPS = st.tuples(st.sampled_from(["poison", "poison a view"]), st.sampled_from(sorted(POISON)), *[st.integers(0, 9)] * 3)


def _run(program: list[tuple[str, str, int, int, int]], device: torch.device, bad: torch.Tensor) -> Tensors:
    """The tensors that a program makes, on one device; ``bad`` is what it gets for a number that a card has computed."""
    tensors = [torch.arange(9).view(3, 3).to(device), torch.tensor([[5, 1, 2], [0, 7, 7], [3, 3, 8]], device=device)]
    for kind, name, i, j, n in program:
        a, b = _same(tensors, i, j)
        if kind == "new":
            tensors.append(NEW[name](a, b, n))
            continue
        if not kind.endswith("a view") or (a._is_view() and 0 in a.stride()):
            a = tensors[i % 2]
        target = _part(a, n) if kind.endswith("a view") else tensors[i % 2]
        IN_PLACE[name](target, b, n) if kind.startswith("in place") else POISON[name](target, bad)
    return tensors


@pytest.fixture(scope="module")
def card() -> Any:
    with virtual_gpu("RTX 4090") as gpu:
        yield gpu


@settings(max_examples=120, deadline=None)
@given(program=st.lists(STEPS, max_size=12))
def test_programs_without_an_unknown_number_read_as_on_the_cpu(program: Any) -> None:
    with virtual_gpu() as gpu:
        virtual = _run(program, gpu.device, torch.empty(0))
        real = _run(program, torch.device("cpu"), torch.empty(0))
        assert [t.tolist() for t in virtual] == [t.tolist() for t in real]
        assert [t.stride() for t in virtual] == [t.stride() for t in real]
        assert not gpu.reads


@settings(max_examples=150, deadline=None)
@given(program=st.lists(st.one_of(STEPS, BAD_STEPS), max_size=12), value=st.integers(0, 9))
def test_no_program_reads_a_wrong_number(program: Any, value: int) -> None:
    """The same program with different values in the place of what a card computes: what reads true is the same in all of them."""
    with virtual_gpu() as gpu:
        real = _run(program, torch.device("cpu"), torch.tensor(value))
        try:
            virtual = _run(program, gpu.device, unknown(gpu))
        except UnknownValueError:
            return  # a shape depends on it
        for v, r in zip(virtual, real, strict=True):
            try:
                assert v.tolist() == r.tolist()
            except UnknownValueError:
                continue
            assert v.stride() == r.stride()


@pytest.mark.parametrize("name", sorted(POISON))
def test_what_an_unknown_number_is_written_to_is_unknown(gpu: VirtualGPU, name: str) -> None:
    known = torch.arange(9, device=gpu.device).view(3, 3)
    view = known[1]
    POISON[name](known, unknown(gpu))
    for tensor in (known, view, known + 1):
        with pytest.raises(UnknownValueError):
            tensor.tolist()


@pytest.mark.parametrize("name", sorted(POISON))
def test_a_view_that_an_unknown_number_is_written_to_makes_its_base_unknown(gpu: VirtualGPU, name: str) -> None:
    known = torch.arange(9, device=gpu.device).view(3, 3)
    POISON[name](known[2], unknown(gpu))
    with pytest.raises(UnknownValueError):
        known.tolist()


def test_a_part_of_unknown_numbers_that_is_written_leaves_the_rest_unknown(gpu: VirtualGPU) -> None:
    numbers = unknown(gpu, 3)
    numbers[:1].zero_()
    with pytest.raises(UnknownValueError):
        numbers.tolist()
    numbers.fill_(3)
    assert numbers.tolist() == [3, 3, 3]


# Every way to read


READS: dict[str, tuple[Callable[[torch.Tensor], Any], Any]] = {
    "item": (lambda t: t[1].item(), 2),
    "int": (lambda t: int(t[1]), 2),
    "float": (lambda t: float(t[1]), 2.0),
    "bool": (lambda t: bool(t[0] == 1), True),
    "if": (lambda t: 1 if (t > 1).any() else 0, 1),
    "range": (lambda t: list(range(t[1])), [0, 1]),
    "list index": (lambda t: "abcd"[t[1]], "c"),
    "slice": (lambda t: [1, 2, 3][: t[1]], [1, 2]),
    "tensor slice": (lambda t: torch.arange(5)[: t[1]].tolist(), [0, 1]),
    "real tensor index": (lambda t: torch.arange(5)[t[1]].item(), 2),
    "tolist": (lambda t: t.tolist(), [1, 2, 3]),
    "iterate": (lambda t: [int(x) for x in t], [1, 2, 3]),
    "in": (lambda t: (2 in t, 9 in t), (True, False)),
    "equal": (lambda t: (torch.equal(t, t.clone()), torch.equal(t, t + 1)), (True, False)),
    "numpy": (lambda t: t.cpu().numpy().tolist(), [1, 2, 3]),
    "force": (lambda t: t.numpy(force=True).tolist(), [1, 2, 3]),
    "np.asarray": (lambda t: np.asarray(t.cpu()).tolist(), [1, 2, 3]),
    "f-string": (lambda t: f"{t[1]:03d}", "002"),
    "percent": (lambda t: "%d" % t[1], "2"),  # noqa: UP031
    "shape": (lambda t: tuple(torch.zeros(int(t.max()), 2).shape), (3, 2)),
    "view": (lambda t: tuple(torch.zeros(6).view(t[1], -1).shape), (2, 3)),
    "arange": (lambda t: len(torch.arange(t[1], device=t.device)), 2),
    "split": (lambda t: [len(x) for x in torch.zeros(6, device=t.device).split(t.tolist())], [1, 2, 3]),
    "nonzero": (lambda t: (t > 1).nonzero().reshape(-1).tolist(), [1, 2]),
    "where": (lambda t: torch.where(t > 1)[0].tolist(), [1, 2]),
    "mask": (lambda t: t[t > 1].tolist(), [2, 3]),
    "masked_select": (lambda t: t.masked_select(t > 1).tolist(), [2, 3]),
    "unique": (lambda t: t.unique().tolist(), [1, 2, 3]),
    "unique_consecutive": (lambda t: t.unique_consecutive().tolist(), [1, 2, 3]),
    "bincount": (lambda t: t.bincount().tolist(), [0, 1, 1, 1]),
    "repeat_interleave": (lambda t: t.repeat_interleave(t).tolist(), [1, 2, 2, 3, 3, 3]),
    "copy into a real one": (lambda t: torch.zeros(3, dtype=torch.int64).copy_(t).tolist(), [1, 2, 3]),
    "set in a real one": (lambda t: _set(torch.zeros(2, dtype=torch.int64), t[2]), [3, 0]),
    "one_hot": (lambda t: torch.nn.functional.one_hot(t).shape, (3, 4)),
    "allclose": (lambda t: torch.allclose(t, t + 1), False),
    "math": (lambda t: math.gcd(t[1], 4), 2),
}


def _set(real: torch.Tensor, virtual: torch.Tensor) -> list[int]:
    real[0] = virtual
    return real.tolist()


@pytest.mark.parametrize("way", sorted(READS))
def test_a_known_number_reads_true(gpu: VirtualGPU, way: str) -> None:
    read, expected = READS[way]
    assert read(torch.tensor([1, 2, 3], device=gpu.device)) == expected
    assert not gpu.reads


@pytest.mark.parametrize("way", sorted(READS))
def test_an_unknown_number_is_refused_with_operator_line_and_remedy(gpu: VirtualGPU, way: str) -> None:
    numbers = unknown(gpu, 3)
    with pytest.raises(UnknownValueError) as error:
        READS[way][0](numbers)
    assert re.search(r"aten::[\w.]+ at .*test_values\.py:\d+ needs", str(error.value))
    assert "Compute them on the CPU" in str(error.value)


def test_a_float_reads_zero_and_is_counted_where_it_is_read(gpu: VirtualGPU) -> None:
    loss = torch.empty((), device=gpu.device)
    values = [loss.item(), float(loss), loss.tolist(), loss.cpu().numpy().item(), f"{loss:.1f}"]
    assert values == [0.0, 0.0, 0.0, 0.0, "0.0"]
    ((line, count),) = gpu.reads.items()
    assert re.fullmatch(r".*test_values\.py:\d+", line)
    assert count == 5
    for _ in range(3):
        int(loss)
    assert sorted(gpu.reads.values()) == [3, 5]


def test_a_float_that_came_from_the_cpu_reads_true(gpu: VirtualGPU) -> None:
    scale = torch.tensor(2.5, device=gpu.device)
    assert (scale * 2).item() == 5.0
    assert (torch.arange(3, device=gpu.device) / 2).tolist() == [0.0, 0.5, 1.0]
    assert not gpu.reads


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_too_many_numbers_are_not_followed(gpu: VirtualGPU, dtype: torch.dtype) -> None:
    most = MOST_FLOATS if dtype.is_floating_point else MOST_INTEGERS
    kept, left = torch.ones(most, dtype=dtype, device=gpu.device), torch.ones(most + 1, dtype=dtype, device=gpu.device)
    assert kept[-1].item() == 1
    if dtype.is_floating_point:
        assert left[-1].item() == 0.0
        assert sum(gpu.reads.values()) == 1
    else:
        with pytest.raises(UnknownValueError):
            left[-1].item()


def test_batches_and_draws_of_floats_are_not_followed_and_masks_are(gpu: VirtualGPU) -> None:
    batch, drawn = torch.ones(MOST_DATA + 1).to(gpu.device), torch.rand(MOST_DATA + 1, device=gpu.device)
    for unknown in (batch, drawn, batch * 2, torch.empty(MOST_DATA + 1, device=gpu.device).copy_(torch.ones(MOST_DATA + 1))):
        assert unknown[0].item() == 0.0
    assert sum(gpu.reads.values()) == 4
    mask = torch.ones(8, 2048, device=gpu.device)
    assert bool(torch.all(mask == 1))
    positions = torch.arange(MOST_DATA + 1, device=gpu.device) * 0.5
    assert positions[-1].item() == MOST_DATA / 2


@pytest.mark.parametrize("check", ["isnan", "isinf", "isposinf", "isneginf"])
def test_nothing_is_computed_so_nothing_is_infinite(gpu: VirtualGPU, check: str) -> None:
    numbers = torch.empty(10_000, device=gpu.device)
    assert getattr(torch, check)(numbers).any().item() is False
    assert getattr(torch, check)(numbers).sum().item() == 0
    assert getattr(torch, check)(torch.tensor([math.inf, -math.inf, math.nan], device=gpu.device)).any().item() is True


def test_virtual_numbers_are_finite_and_equal_to_themselves(gpu: VirtualGPU) -> None:
    numbers = torch.empty(10_000, device=gpu.device)
    assert torch.isfinite(numbers).all().item() is True
    assert (numbers != numbers).any().item() is False
    assert (numbers.abs() == math.inf).any().item() is False
    assert torch.isfinite(torch.tensor([1.0, math.nan], device=gpu.device)).tolist() == [True, False]


@pytest.mark.parametrize("question", [lambda x: x > 0, lambda x: x == x.clone(), lambda x: x == 0, lambda x: x != x.roll(1)])
def test_other_questions_about_unknown_floats_are_refused(gpu: VirtualGPU, question: Any) -> None:
    with pytest.raises(UnknownValueError):
        bool(question(torch.empty(10_000, device=gpu.device)).any())


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, lambda t: torch.full_like(t, 4), lambda t: t.new_zeros(3)])
@pytest.mark.parametrize("of", [torch.bool, torch.int64])
def test_numbers_that_depend_on_a_shape_alone_are_known(gpu: VirtualGPU, make: Any, of: torch.dtype) -> None:
    real = make(torch.empty(3, dtype=of))
    assert make(unknown(gpu, 3, dtype=of)).tolist() == real.tolist()


@pytest.mark.parametrize("operation", [lambda r, v: r + v, lambda r, v: r.add_(v), lambda r, v: torch.stack([r, v.expand(3)])])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_real_and_virtual_do_not_mix_where_cpu_and_cuda_do_not(gpu: VirtualGPU, operation: Any, dtype: torch.dtype) -> None:
    real = torch.ones(3, dtype=dtype)
    with pytest.raises(RuntimeError, match="same device"):
        operation(real, torch.tensor(2, dtype=dtype, device=gpu.device))
    assert real.tolist() == [1, 1, 1]


@pytest.mark.parametrize("index", [[0, 2], [True, False, True]])
def test_a_real_tensor_is_not_indexed_with_one_of_a_card(gpu: VirtualGPU, index: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="indices should be either on cpu"):
        torch.arange(3)[torch.tensor(index, device=gpu.device)]
    assert torch.arange(3, device=gpu.device)[torch.tensor(index)].tolist() == [0, 2]


def test_a_number_without_dimensions_from_the_cpu_goes_into_a_card_s_tensor(gpu: VirtualGPU) -> None:
    assert (torch.arange(3, device=gpu.device) + torch.tensor(4)).tolist() == [4, 5, 6]


def test_what_is_known_is_printed_as_on_a_card_and_the_rest_shows_no_number(gpu: VirtualGPU) -> None:
    assert repr(torch.tensor([1, 2], device=gpu.device)) == "tensor([1, 2], device='vgpu:0')"
    assert str(torch.tensor([1, 2], device=gpu.device).cpu()) == "tensor([1, 2])"
    assert repr(torch.empty(2, device=gpu.device)) == "FakeTensor(..., device='vgpu:0', size=(2,))"
    assert f"{torch.tensor([1, 2], device=gpu.device)}".startswith("tensor(")
    assert not gpu.reads


def test_a_tensor_that_is_saved_or_sent_says_that_it_has_no_data(gpu: VirtualGPU, tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"has no data that could be saved or sent, here one of shape \(2,\); leave out saving"):
        torch.save({"a": torch.ones(2, device=gpu.device)}, tmp_path / "a.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt")["a"].tolist() == [1, 1]


def test_the_cards_random_numbers_are_not_taken_from_the_cpus(gpu: VirtualGPU) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    drawn = [torch.randint(0, 100, (5,), device=gpu.device).tolist() for _ in range(2)]
    assert torch.equal(torch.rand(4), expected)
    assert drawn[0] != drawn[1]
    assert sorted(torch.randperm(5, device=gpu.device).tolist()) == list(range(5))


def test_copies_of_known_numbers_are_known_and_of_their_own(gpu: VirtualGPU) -> None:
    numbers = torch.arange(4, device=gpu.device)
    copies = [numbers.clone(), numbers.cpu(), numbers.to(torch.int32), numbers.contiguous().view(2, 2).T.contiguous()]
    numbers.zero_()
    assert [c.flatten().tolist() for c in copies] == [[0, 1, 2, 3]] * 3 + [[0, 2, 1, 3]]


def test_bytes_of_known_numbers_are_known_as_another_type(gpu: VirtualGPU) -> None:
    assert torch.tensor([1, 5], device=gpu.device).view(torch.int32).tolist() == [1, 0, 5, 0]
    assert torch.tensor([1.0], device=gpu.device).view(torch.int32).tolist() == [0x3F800000]


def test_a_mask_of_known_places_selects_unknown_floats(gpu: VirtualGPU) -> None:
    values, mask = torch.empty(3, 4, device=gpu.device), torch.tensor([True, False, True], device=gpu.device)
    assert values[mask].shape == (2, 4)
    assert values.masked_select(mask[:, None]).shape == (8,)
    values[mask] = 1.0
    values[mask, :2] = torch.empty(2, 2, device=gpu.device)
    assert values.shape == (3, 4)
    values[unknown(gpu, 3, dtype=torch.bool)] = 0.0  # no shape depends on it
    with pytest.raises(UnknownValueError, match="masked_select"):
        values.masked_select(unknown(gpu, 3, 4, dtype=torch.bool))


def test_a_storage_that_is_gone_takes_what_was_known_with_it(gpu: VirtualGPU) -> None:
    for n in range(200):  # addresses are used again
        known = torch.tensor([n, n], device=gpu.device)
        assert known.tolist() == [n, n]
        del known
        with pytest.raises(UnknownValueError):
            unknown(gpu, 2).tolist()
    assert len(gpu._values._twins) <= 2
