"""budget(): a smaller card, on the CPU through the recorder, on CUDA (stubbed here) through the allocator's fraction."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import vramlab as vl
from vramlab import devices
from vramlab.gpus import CONTEXT
from vramlab.memory import allocator as rules
from vramlab.memory import recorder
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.budget import OutOfBudgetError, budget
from vramlab.memory.trace import DeviceCounters
from vramlab.units import GiB, MiB

CUDA = torch.device("cuda", 0)


def taken(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Stages(nn.Module):
    """Linear layers with a ReLU after each; 4 MiB of weights a layer."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


# What does not fit


def test_what_does_not_fit_raises_at_the_operator_in_the_words_of_a_virtual_card() -> None:
    with budget("64 MiB", in_use="4 MiB") as trace:
        kept = taken(32 * MiB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            taken(30 * MiB + 1)
    error = caught.value
    assert isinstance(error, OutOfBudgetError)
    assert str(error) == (
        "Budget out of memory. Tried to allocate 32.00 MiB, for 30.00 MiB. Of its 64.00 MiB others hold 4.00 MiB, "
        "32.00 MiB are allocated by PyTorch and 0 B reserved but unallocated; 28.00 MiB are free."
    )
    assert (error.requested, error.segment) == (30 * MiB + 1, 32 * MiB)
    assert trace.peak == kept.nbytes == error.trace.peak
    assert trace.counters == DeviceCounters(32 * MiB, 32 * MiB, None)
    assert (error.report.capacity, error.report.requested, error.report.where.split(".")[0]) == (60 * MiB, 30 * MiB + 1, "aten::empty")
    assert (
        error.report.summary().splitlines()[0].startswith("a budget of 64.00 MiB on cpu ran out of memory: 30.00 MiB more for aten::empty")
    )
    assert error.__notes__[0].startswith(error.report.summary())


def test_the_trace_of_an_error_ends_where_it_was_raised() -> None:
    with budget("64 MiB") as trace:
        kept = taken(40 * MiB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            taken(40 * MiB)
        del kept
        taken(50 * MiB)
    assert caught.value.trace.breakdown("end").total == 40 * MiB
    assert trace.breakdown("end").total == 0
    assert trace.peak == 50 * MiB


SIZES = st.lists(st.one_of(st.integers(0, MiB), st.integers(MiB, 12 * MiB), st.just(-1)), max_size=25)


def refuses(card: CachingAllocator, number: int, nbytes: int) -> bool:
    try:
        card.malloc(number, nbytes)
    except rules.OutOfMemoryError:
        return True
    return False


@given(SIZES, st.integers(20, 60))
def test_it_refuses_what_the_caching_allocator_refuses(sizes: list[int], capacity: int) -> None:
    """-1 lets go of the oldest."""
    card = CachingAllocator(capacity * MiB)
    held: dict[int, torch.Tensor] = {}
    with budget(capacity * MiB) as trace:
        for number, nbytes in enumerate(sizes):
            if nbytes >= 0:
                refused = refuses(card, number, nbytes)
                with pytest.raises(torch.OutOfMemoryError) if refused else nullcontext():
                    held[number] = taken(nbytes)
            elif held:
                oldest = min(held)
                card.free(oldest)
                del held[oldest]
    assert trace.counters == DeviceCounters(card.peak_allocated, card.peak_reserved, None)


def test_what_does_not_fit_is_not_kept_by_the_error() -> None:
    """A weak reference to the storage that did not fit, through the operator that made it."""
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.append(weakref.ref(out.untyped_storage()))
            return out

    with Watch(), budget("20 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        taken(30 * MiB)
    assert caught.value is not None
    assert seen[0]() is None


# Where it can happen


def test_it_raises_in_backward_and_the_next_backward_is_as_ever() -> None:
    model = Stages()
    x = torch.randn(256, 1024)
    with budget("36 MiB", model) as trace:  # one segment of 20 MiB for large storages: the weights, and one gradient
        loss = model(x).sum()
        with pytest.raises(torch.OutOfMemoryError, match=r"^Budget out of memory\.") as caught:
            loss.backward()
        assert caught.value.report.where.split(", ")[0].endswith("in backward")
        assert trace.last_phase == "backward"
        del loss, caught
        model.zero_grad()
        model.layers[0](x).sum().backward()
    assert model.layers[0].weight.grad is not None


def test_after_an_error_in_backward_autograd_keeps_nothing() -> None:
    model = Stages()
    hidden: list[Any] = []
    model.layers[1].register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out.untyped_storage())))

    def step() -> None:
        with budget("36 MiB", model):
            model(torch.randn(256, 1024)).sum().backward()

    with pytest.raises(torch.OutOfMemoryError):
        step()
    model.zero_grad()
    gc.collect()
    assert hidden[0]() is None


@pytest.mark.parametrize("foreach", [False, True])
def test_it_raises_in_an_optimizer_step(foreach: bool) -> None:
    model = Stages(3)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    model(torch.randn(8, 1024)).sum().backward()
    with budget("44 MiB", model, optimizer) as trace, pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer.step()
    assert caught.value.report.where.split(", ")[0].endswith("in step")
    assert trace.breakdown("start").parameters == trace.breakdown("start").gradients == 12 * MiB


def test_storages_that_are_resized_count() -> None:
    """FSDP fills its parameters again so."""
    with budget("60 MiB"):
        tensor = taken(20 * MiB)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 80"):
            tensor.untyped_storage().resize_(80 * MiB)


def test_a_smaller_batch_fits_after_a_larger_one_did_not() -> None:
    """The search of a batch size: the error is dropped, then it is tried again. pytorch issue 27600."""
    model = Stages(3)
    tried = []
    with budget("60 MiB", model) as trace:
        batch = 4096
        while True:
            tried.append(batch)
            try:
                model(torch.randn(batch, 1024)).sum().backward()
                break
            except torch.OutOfMemoryError:
                batch //= 2
            model.zero_grad()
    assert tried == [4096, 2048, 1024]
    assert trace.peak <= 60 * MiB


def test_a_run_in_a_budget_fails_with_what_it_has_measured() -> None:
    task = vl.tasks.gpt("nano")
    with budget("4 MiB"), pytest.raises(torch.OutOfMemoryError, match=r"^Budget out of memory\.") as caught:
        vl.run(task, vl.Recipe(micro_batch=64), steps=3, device="cpu", progress=False)
    assert caught.value.run.status.startswith("OutOfBudgetError: Budget out of memory.")
    assert len(caught.value.run.failed_trace) > 0


# What counts


def test_model_and_optimizer_count_from_the_start() -> None:
    model = Stages(3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 1024)).sum().backward()
    optimizer.step()
    with budget("100 MiB", model, optimizer) as trace:
        pass
    assert trace.baseline == 48 * MiB + 3 * 4  # and three counts of steps
    assert trace.counters is not None
    assert trace.counters.allocated == 48 * MiB + 3 * 512
    with pytest.raises(
        ValueError, match=r"^A budget of 40\.00 MiB has no room for what the model and the optimizer hold already: .* Give a"
    ):
        with budget("40 MiB", model, optimizer):
            pass
    assert not _get_current_dispatch_mode_stack()


def test_what_existed_before_counts_from_its_first_use() -> None:
    batch = taken(30 * MiB)
    with budget("50 MiB") as trace:
        taken(30 * MiB)  # and it goes
        batch.add_(1)
        with pytest.raises(torch.OutOfMemoryError, match=r"30\.00 MiB are allocated"):
            taken(30 * MiB)
    assert trace.baseline == 30 * MiB


def test_other_devices_do_not_count() -> None:
    with budget("20 MiB") as trace:
        torch.empty(GiB, device="meta")
    assert len(trace) == 0


# Around and after it


def test_everything_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = torch.UntypedStorage.resize_
    with pytest.raises(torch.OutOfMemoryError), budget("20 MiB"):
        taken(30 * MiB)
    assert not _get_current_dispatch_mode_stack()
    assert torch.UntypedStorage.resize_ is resize
    assert taken(30 * MiB).nbytes == 30 * MiB


def test_what_is_found_at_the_end_is_not_refused_any_more() -> None:
    layer = nn.Linear(2048, 2048, bias=False)
    gradient = torch.zeros(2048, 2048)  # 16 MiB, which no operator sees
    with budget("20 MiB", layer) as trace:
        layer.weight.grad = gradient
    assert trace.breakdown("end").gradients == 16 * MiB


def test_a_budget_is_entered_once() -> None:
    once = budget("20 MiB")
    with once:
        pass
    with pytest.raises(RuntimeError, match="A recorder records once"), once:
        pass


def test_budgets_nest_and_the_inner_one_is_the_smaller() -> None:
    with budget("80 MiB") as outer:
        kept = taken(30 * MiB)
        with budget("40 MiB") as inner:
            with pytest.raises(torch.OutOfMemoryError, match=r"Of its 40\.00 MiB"):
                taken(41 * MiB)
            first = taken(30 * MiB)
        del first
        with budget("60 MiB"), pytest.raises(torch.OutOfMemoryError, match=r"Of its 80\.00 MiB") as caught:  # it is full before
            taken(55 * MiB)
        assert len(caught.value.__notes__) == 1  # and it alone explains itself
        with pytest.raises(
            ValueError, match=r"^A budget inside another is the smaller one: 81\.00 MiB are more than the 80\.00 MiB around it"
        ):
            with budget("81 MiB"):
                pass
        taken(45 * MiB)
    assert (outer.peak, inner.peak) == (75 * MiB, 30 * MiB)
    assert kept is not None


def test_a_recorder_inside_a_budget_records() -> None:
    with budget("64 MiB"), vl.record() as trace:
        with pytest.raises(torch.OutOfMemoryError):
            taken(70 * MiB)
        taken(MiB)
    assert trace.peak == MiB  # what was refused has never been there


# What is refused


@pytest.mark.parametrize(
    ("size", "message"), [("much", "A size is a number and a unit"), (0, "Nothing of a budget of 0 B is left"), (-1, "not negative")]
)
def test_a_size_that_is_none_is_refused(size: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budget(size)


def test_it_says_that_a_large_card_with_a_limit_is_no_small_card() -> None:
    """pytorch issue 69688: libraries that choose an algorithm by free memory see the whole card."""
    assert "may choose otherwise, and fail, on a truly small one (pytorch issue 69688)" in " ".join((vl.budget.__doc__ or "").split())


def test_gb_and_gib_are_told_apart() -> None:
    assert (budget("24 GB").size, budget("24 GiB").size) == (24 * 10**9, 24 * GiB)


def test_others_that_hold_everything_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^Nothing of a budget of 1\.00 GiB is left: others hold 1\.00 GiB; give a larger one, or lower in_use"
    ):
        budget("1 GiB", in_use="1 GiB")


@pytest.mark.parametrize("arguments", [(5,), (None, 5), (torch.optim.AdamW,)])
def test_other_things_than_a_model_and_an_optimizer_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(
        TypeError, match=r"^budget\(\) takes a size, a module and an optimizer, .*write budget\('12 GiB', model, optimizer\)\.$"
    ):
        budget("1 GiB", *arguments)


def test_a_virtual_card_has_a_size_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_virtual_device", lambda device: True)
    with pytest.raises(
        ValueError, match=re.escape("got meta. A virtual card has a size of its own: open one with virtual_gpu(gpu('RTX 4090')")
    ):
        budget("1 GiB", device="meta")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="^vramlab measures on 'cpu' and 'cuda', got 'mps'"):
        budget("1 GiB", device="mps")


def test_without_a_model_the_chosen_device_is_limited() -> None:
    assert budget("1 GiB").device == torch.device("cpu")
    assert budget("1 GiB").trace.device == "cpu"


# On CUDA


class Card:
    """A CUDA device of 80 GiB as far as a budget asks it, of which ``beside`` bytes are not this process's tensors."""

    total = 80 * GiB

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reserved: int = 0, cached: int = 0, beside: int = 400 * MiB) -> None:
        self.reserved, self.cached, self.beside, self.fraction = reserved, cached, beside, 1.0
        self.log: list[object] = []

        def empty_cache() -> None:
            self.reserved -= self.cached
            self.cached = 0

        def set_fraction(fraction: float, device: torch.device) -> None:
            assert device == CUDA
            self.fraction = fraction
            self.log.append(fraction)

        stubs = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "empty_cache": empty_cache,
            "get_device_properties": lambda device: SimpleNamespace(total_memory=self.total),
            "mem_get_info": lambda device: (self.total - self.beside - self.reserved, self.total),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.reserved - self.cached,
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "set_per_process_memory_fraction": set_fraction,
            "reset_peak_memory_stats": lambda device: self.log.append("peaks reset"),
            "max_memory_allocated": lambda device: 5,
            "max_memory_reserved": lambda device: 7,
            "memory_snapshot": lambda: [
                {"device": 0, "blocks": [{"size": 4 * GiB, "state": "active_allocated"}, {"size": 3 * MiB, "state": "inactive"}]},
                {"device": 1, "blocks": [{"size": 5 * GiB, "state": "inactive"}]},
            ],
        }
        for name, stub in stubs.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(devices, "memory_in_use", lambda device: 9)
        monkeypatch.setattr(recorder, "_home", lambda model, optimizer: CUDA)


def allowed(log: list[object]) -> float:
    """The first fraction that was set, in bytes."""
    return float(log[0]) * Card.total  # type: ignore[arg-type]


def test_on_cuda_the_fraction_leaves_the_context_and_others_out_and_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, reserved=3 * GiB, cached=2 * GiB)
    card.fraction = 0.9
    with budget("24 GiB", in_use="1 GiB") as trace:
        assert allowed(card.log) == pytest.approx(23 * GiB - 400 * MiB, abs=1)
        assert card.cached == 0  # what is only cached would count as in use
        assert card.log[1:] == ["peaks reset"]
    assert card.fraction == 0.9
    assert (trace.device, trace.counters) == ("cuda:0", DeviceCounters(5, 7, 9))


@pytest.mark.parametrize(
    ("beside", "context"), [(300 * MiB, 300 * MiB), (0, CONTEXT), (9 * GiB, CONTEXT)], ids=["alone", "unknown", "others too"]
)
def test_the_context_is_measured_where_it_can_be_told_from_others(monkeypatch: pytest.MonkeyPatch, beside: int, context: int) -> None:
    card = Card(monkeypatch, reserved=GiB, beside=beside)
    with budget("24 GiB"):
        assert allowed(card.log) == pytest.approx(24 * GiB - context, abs=1)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", CUDA])
def test_cuda_can_be_named(monkeypatch: pytest.MonkeyPatch, device: torch.device | str) -> None:
    Card(monkeypatch)
    monkeypatch.setattr(recorder, "_home", lambda model, optimizer: None)
    assert budget("24 GiB", device=device).device == CUDA


def test_more_than_the_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    with pytest.raises(
        ValueError, match=r"^A budget is at most the card: 81\.00 GiB are more than the 80\.00 GiB of cuda:0\. To see .*virtual_gpu\.$"
    ):
        with budget("81 GiB"):
            pass
    assert card.log == []


def test_what_is_in_use_beyond_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, reserved=13 * GiB, cached=GiB)
    with pytest.raises(
        ValueError,
        match=r"^A budget of 12\.00 GiB leaves 11\.61 GiB beside the CUDA context and others, and 12\.00 GiB are reserved on cuda:0 "
        r"already; give a larger budget, or let go of tensors first: vramlab\.free\(\) says who holds them\.$",
    ):
        with budget("12 GiB"):
            pass
    assert card.log == []


def test_on_cuda_the_inner_budget_is_the_smaller_too(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    with budget("12 GiB"):
        outer = card.fraction
        with budget("8 GiB"):
            assert card.fraction < outer
        assert card.fraction == outer
        with pytest.raises(ValueError, match="^A budget inside another is the smaller one"), budget("16 GiB"):
            pass
        assert card.fraction == outer
    assert card.fraction == 1.0


class Full(TorchDispatchMode):
    """A card that has no room, in CUDA's words."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card(monkeypatch, reserved=2 * GiB)
    with Full():
        yield card


def test_cudas_error_is_put_in_terms_of_the_budget(full: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own message speaks of the whole card: pytorch issue 111363."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GiB)
    with pytest.raises(torch.OutOfMemoryError) as caught, budget("3 GiB"):
        taken(2 * MiB)
    error = caught.value
    assert str(error) == (
        "Budget out of memory. Tried to allocate 20.00 MiB, for 20.00 MiB. Of its 3.00 GiB the CUDA context and others hold 400.00 MiB, "
        "1.00 GiB are allocated by PyTorch and 1.00 GiB reserved but unallocated; 624.00 MiB are free."
    )
    assert isinstance(error, OutOfBudgetError)
    assert (error.requested, error.segment) == (20 * MiB, 20 * MiB)
    assert (error.report.reserved, error.report.largest_hole) == (2 * GiB, 3 * MiB)
    assert "total capacity of 80.00 GiB" in str(error.__cause__)
    assert error.__cause__ is not None
    assert error.__cause__.__traceback__ is None  # its frames hold tensors
    assert full.fraction == 1.0
