"""Virtual ranks: what each of several cards holds and sends, against real gloo ranks, the C++ that is stood in for, and published peaks."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import vramlab as vl
from vramlab import planning
from vramlab.gpus import GPU, gpu
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.steady import rows_of
from vramlab.memory.trace import Category, MemoryTrace
from vramlab.parallel import launch
from vramlab.parallel.data import begin_with_zeros
from vramlab.tasks import Task
from vramlab.techniques.low_bit import _compiled_out_of_sight
from vramlab.virtual import backend
from vramlab.virtual.buckets import _assignment
from vramlab.virtual.device import VirtualGPU, virtual_gpu
from vramlab.virtual.ranks import dealt_out, enough_micro_batches, notes, stand_ins, virtual_rank
from vramlab.virtual.traffic import A100_NVLINK, WITHOUT_P2P, Call, Communication, links_of

RANKS = 4
CARD = gpu("RTX 4090")
STEPS = 6  # gloo's own threads hold what they send a moment longer, at times; the lowest of these peaks is without
WAYS = {
    "ddp": {"parallel": "ddp"},
    "ddp accumulating": {"parallel": "ddp", "accumulation": 3},
    "ddp accumulating twice, sgd": {"parallel": "ddp", "accumulation": 2, "optimizer": "sgd"},
    "ddp accumulating, foreach": {"parallel": "ddp", "accumulation": 2, "optimizer_impl": "foreach"},
    "zero1": {"parallel": "zero1"},
    "zero1 accumulating": {"parallel": "zero1", "accumulation": 3},
    "zero2": {"parallel": "zero2"},
    "zero2 accumulating": {"parallel": "zero2", "accumulation": 3},
    "fsdp": {"parallel": "fsdp"},
    "fsdp accumulating": {"parallel": "fsdp", "accumulation": 3},
    "fsdp foreach, clipped": {"parallel": "fsdp", "optimizer_impl": "foreach", "clip_norm": 1.0},
    "fsdp checkpointed": {"parallel": "fsdp", "checkpointing": "blocks"},
    "pipeline": {"parallel": "pipeline", "stages": RANKS, "accumulation": 6},
    "gpipe": {"parallel": "pipeline", "stages": RANKS, "accumulation": 4, "schedule": "gpipe"},
    "hybrid": {"parallel": "hybrid", "stages": 2, "accumulation": 4},
}


def recipe(way: str) -> vl.Recipe:
    """fp32, no dropout, attention written out, the optimizer's loop: the same tensors on the CPU and on a card."""
    options: dict[str, Any] = {"attention": "math", "optimizer_impl": "loop", "micro_batch": 2, "ranks": RANKS}
    return vl.Recipe(**options | WAYS[way])


class Uneven(nn.Module):
    """No parameter's rows divide by four."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(30, 66), nn.GELU(), nn.Linear(66, 30)) for _ in range(3))
        self.head = nn.Linear(30, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def squares(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


UNEVEN = Task(Uneven, lambda count, device: torch.ones(count, 30, device=device), squares, "uneven")


def lowest_peak(task: Task, way: str) -> int:
    """Of the steps after the first, in this rank."""
    with closing(vl.train(task, recipe(way), "cpu", record_every=1)) as steps:
        return min(report.memory.peak for report in itertools.islice(steps, 1, STEPS) if report.memory is not None)


def sizes_of_buckets() -> list[int]:
    """What DDP says of its rebuilt buckets."""
    model = DistributedDataParallel(several_layers(), bucket_cap_mb=1)
    for _ in range(4):  # it writes down what it did in the step before
        model(torch.ones(2, 300)).sum().backward()
    return [int(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]


def several_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(7)))


def on_real_ranks() -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {way: lowest_peak(vl.tasks.gpt("nano"), way) for way in WAYS}
    return found | {"uneven": lowest_peak(UNEVEN, "fsdp"), "buckets": sizes_of_buckets()}


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    """Of each rank."""
    return launch(on_real_ranks, ranks=RANKS, device="cpu", timeout=300)


def planned_peak(trace: MemoryTrace) -> int:
    """Bytes in tensors at the highest moment of the last step."""
    events = trace.events
    held = np.cumsum(np.where(events.category == Category.WORKSPACE, 0, events.nbytes))
    (begin, _), (end, _) = events.steps[-2:]
    return int(held[begin:end].max())


@pytest.mark.parametrize("way", WAYS)
def test_the_planned_peak_of_each_rank_is_that_of_a_real_one(way: str, real: list[dict[str, Any]]) -> None:
    instead, traces = planning.trace_ranks("", vl.tasks.gpt("nano"), recipe(way), CARD)
    assert list(instead) == list(range(RANKS))
    for traced, fields in traces.items():
        recorded = min(real[rank][way] for rank, other in instead.items() if other == traced)
        assert planned_peak(fields["trace"]) == pytest.approx(recorded, rel=0.002), traced


def test_shards_of_other_sizes_are_planned_as_the_first_and_the_last(real: list[dict[str, Any]]) -> None:
    instead, traces = planning.trace_ranks("", UNEVEN, recipe("fsdp"), CARD)
    assert instead == {0: 0, 1: 0, 2: 0, 3: 3}
    first, last = (planned_peak(traces[rank]["trace"]) for rank in (0, 3))
    assert last < first
    assert [first, last] == pytest.approx([real[0]["uneven"], real[3]["uneven"]], rel=0.01)
    assert all(real[rank]["uneven"] <= 1.01 * first for rank in (1, 2))


# Published peaks


def workloads() -> ModuleType:
    """benchmarks/workloads.py; benchmarks/ is no package."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("workloads")
    finally:
        sys.path.remove(folder)


BOOK = {"batch": 32, "mask": "kernel", "plain": False, "fused": True, "dtype": "bfloat16"}
PUBLISHED = {
    # litgpt @101e31d, extensions/thunder/README.md: TinyLlama 1.1B, bf16, max_memory_allocated in GB on A100-SXM4-40GB
    "TinyLlama, DDP on 8 cards": ("litgpt", {"batch": 4, "accumulation": 2}, 8, "ddp", "allocated", 32_040_000_000),
    "TinyLlama, FSDP on 8 cards": ("litgpt", {"batch": 4, "accumulation": 1}, 8, "fsdp", "allocated", 22_130_000_000),
    # LLMs-from-scratch @28c65cd, ch05/10_llm-training-speed: GPT-2 124M, bf16, memory_reserved in GiB on A100
    "GPT-2, DDP on 4 cards": ("book gpt2", BOOK, 4, "ddp", "reserved", 24_477_984_988),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_peaks(name: str) -> None:
    workload, options, ranks, way, quantity, measured = PUBLISHED[name]
    work = workloads().WORKLOADS[workload]
    with virtual_rank(0, ranks), virtual_gpu("A100 80GB") as card:
        with card.building():
            model = work.model(**options)
        model = DistributedDataParallel(model) if way == "ddp" else vl.parallel.fsdp(model)
        card.reset_peaks(0)  # of building
        work.steps(card, model, **options)
    assert getattr(card, f"peak_{quantity}") == pytest.approx(measured, rel=0.015)


# DDP's buckets


@pytest.fixture
def pair() -> Iterator[VirtualGPU]:
    """Rank 0 of 2."""
    with virtual_rank(0, 2), virtual_gpu("RTX 4090") as card:
        yield card


def test_buckets_are_those_of_the_reducer(real: list[dict[str, Any]]) -> None:
    with virtual_rank(0, 2), virtual_gpu("RTX 4090") as card:
        model = DistributedDataParallel(several_layers().to(card.device), bucket_cap_mb=1)
        for _ in range(2):
            model(torch.ones(2, 300, device=card.device)).sum().backward()
        calls = card.communication().calls
    sizes = real[0]["buckets"]
    whole = sum(p.nbytes for p in model.parameters())
    assert [call.nbytes for call in calls if call.kind == "all-reduce"] == [whole, *sizes]
    assert len(sizes) > 2


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1, max_size=30),
    st.lists(st.integers(1, 8000), min_size=1, max_size=3),
)
def test_tensors_are_put_into_buckets_as_torch_does(shapes: list[tuple[int, torch.dtype]], limits: list[int]) -> None:
    tensors = [torch.empty(n, dtype=dtype) for n, dtype in shapes]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    assert sorted(_assignment(tensors, limits), key=min) == theirs


@pytest.mark.parametrize("as_view", [True, False])
def test_a_gradient_is_kept_once_as_a_view_of_a_bucket_and_twice_otherwise(as_view: bool, pair: VirtualGPU) -> None:
    model = DistributedDataParallel(nn.Linear(512, 512, bias=False).to(pair.device), gradient_as_bucket_view=as_view)
    before = pair.allocated
    for _ in range(2):
        model(torch.ones(1, 512, device=pair.device)).sum().backward()
    weight = model.module.weight
    assert weight.grad is not None
    assert weight.grad._is_view() is as_view
    # The bucket is there from the start, and cuBLAS takes its workspaces.
    assert pair.allocated - before == (0 if as_view else weight.nbytes) + 2 * CARD.cublas_workspace


def test_gradients_of_zeros_are_views_of_the_buckets_from_the_start(pair: VirtualGPU) -> None:
    layer = nn.Linear(512, 512, bias=False).to(pair.device)
    before = pair.allocated
    begin_with_zeros(layer.parameters())
    model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    assert pair.allocated - before == layer.weight.nbytes  # the bucket; the zero has gone
    with model.no_sync():
        model(torch.ones(1, 512, device=pair.device)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad._is_view()
    assert pair.allocated - before == layer.weight.nbytes + 2 * CARD.cublas_workspace
    assert not pair.communication().by_kind.get("all-reduce")


def test_without_synchronisation_gradients_lie_beside_the_buckets(pair: VirtualGPU) -> None:
    model = DistributedDataParallel(nn.Linear(512, 512, bias=False).to(pair.device), gradient_as_bucket_view=True)
    with model.no_sync():
        model(torch.ones(1, 512, device=pair.device)).sum().backward()
    assert not pair.communication().by_kind.get("all-reduce")
    assert model.module.weight.grad is not None
    assert not model.module.weight.grad._is_view()
    model(torch.ones(1, 512, device=pair.device)).sum().backward()
    assert pair.communication().by_kind["all-reduce"] == model.module.weight.nbytes
    assert model.module.weight.grad._is_view()


class WithUnused(nn.Module):
    """``unused`` layers come after the one that is used."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(unused))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize(("unused", "named"), [(1, "unused.0.weight, unused.0.bias."), (5, "unused.3.weight, unused.3.bias, ....")])
def test_the_forward_after_a_backward_that_missed_parameters_is_refused(
    unused: int, named: str, accumulation: int, pair: VirtualGPU
) -> None:
    model = DistributedDataParallel(WithUnused(unused).to(pair.device))
    x = torch.ones(1, 4, device=pair.device)
    for _ in range(accumulation - 1):
        with model.no_sync():
            model(x).sum().backward()
    model(x).sum().backward()
    text = rf"the last synchronised one did not reach {2 * unused} of {2 + 2 * unused}: .*{re.escape(named)} Freeze them with"
    with pytest.raises(RuntimeError, match=text), model.no_sync():
        model(x)


def test_a_forward_without_a_backward_is_nothing_that_has_begun(pair: VirtualGPU) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4).to(pair.device))
    x = torch.ones(1, 4, device=pair.device)
    model(x)
    for _ in range(2):
        model(x).sum().backward()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("way", ["ddp", "zero1"])
def test_a_model_with_unused_parameters_has_no_plan_in_copies(way: str, accumulation: int) -> None:
    task = Task(lambda: WithUnused(1), lambda count, device: torch.ones(count, 4, device=device), squares, "unused")
    with pytest.raises(RuntimeError, match="did not reach 2 of 4: unused.0.weight, unused.0.bias. Freeze them"):
        planning.trace_steps(task, vl.Recipe(parallel=way, ranks=2, accumulation=accumulation), CARD)


@pytest.mark.parametrize(
    ("what", "options"),
    [("find_unused_parameters=True", {"find_unused_parameters": True}), (r"_set_static_graph\(\)", {"static_graph": True})],
)
def test_ddp_with_other_options_is_refused(what: str, options: dict[str, Any], pair: VirtualGPU) -> None:
    with pytest.raises(NotImplementedError, match=rf"DistributedDataParallel runs with its defaults.*{what} is not carried out there"):
        DistributedDataParallel(nn.Linear(4, 4).to(pair.device), **options)


def test_sparse_gradients_and_communication_hooks_are_refused(pair: VirtualGPU) -> None:
    with pytest.raises(NotImplementedError, match="a parameter with sparse gradients is not carried out there"):
        DistributedDataParallel(nn.Embedding(8, 4, sparse=True).to(pair.device))
    model = DistributedDataParallel(nn.Linear(4, 4).to(pair.device))
    with pytest.raises(NotImplementedError, match="a communication hook is not carried out there"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def test_ddp_on_real_tensors_is_left_alone(pair: VirtualGPU) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    assert type(model.reducer).__module__ == "torch._C._distributed_c10d"


# What is compiled


class Compiling(torch.optim.Optimizer):
    """As torchao's 8-bit AdamW: operators make the state, and the rest is compiled."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["average"] = torch.zeros_like(p)
            torch.compile(Compiling.moved, fullgraph=True)(p.detach(), p.grad, self.state[p]["average"])

    @staticmethod
    def moved(p: torch.Tensor, gradient: torch.Tensor, average: torch.Tensor) -> None:
        average.copy_((average.double() + gradient.double()).to(average.dtype))
        p.sub_(average)


@pytest.mark.parametrize("way", ["none", "zero1"])
def test_a_compiled_step_makes_its_state_and_holds_nothing_else(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramlab.techniques.choose.adamw_8bit", _compiled_out_of_sight(Compiling))
    shared = {"parallel": way, "ranks": 2} if way != "none" else {}
    fields = planning.trace_steps(UNEVEN, vl.Recipe(optimizer="adamw-8bit", **shared), CARD)
    trace = fields["trace"]
    sizes = [p.nbytes for p in Uneven().parameters()]
    state = sum(sizes) if way == "none" else 4 * dealt_out([tuple(p.shape) for p in Uneven().parameters()], 2)[0]
    assert trace.breakdown("end").optimizer_state == state
    phases = trace.timeline()
    stepping = phases[phases["phase"] == "step"]
    assert len(stepping)
    assert stepping[Category.TEMPORARY.label].max() <= 16  # the loss and the count of the window


# Ranks


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_has_a_number(rank: int, ranks: int) -> None:
    with (
        pytest.raises(ValueError, match=f"numbered from 0 and there is at least one, got rank={rank} of ranks={ranks}"),
        virtual_rank(rank, ranks),
    ):
        pass


def test_a_virtual_rank_takes_the_place_of_the_default_group_and_gives_it_back() -> None:
    with virtual_rank(1, 3):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        with pytest.raises(RuntimeError, match=r"this process is rank 1 of 3 in one; use vramlab\.plan\(\)"), virtual_rank(0, 2):
            pass
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), virtual_rank(0, 2):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_a_plan_that_fails_leaves_no_group() -> None:
    def failing(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        total, count = squares(model, batch)
        total.register_hook(lambda gradient: 1 // 0)
        return total, count

    with pytest.raises(ZeroDivisionError):
        planning.trace_steps(Task(UNEVEN.model, UNEVEN.batch, failing, "failing"), recipe("fsdp"), CARD)
    assert not dist.is_initialized()
    assert backend.current is backend.default
    assert planning.trace_steps(UNEVEN, recipe("fsdp"), CARD)["allocated"] > 0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=4, max_size=20), st.integers(1, 4))
def test_parameters_are_dealt_out_as_zero_one_does(shapes: list[list[int]], ranks: int) -> None:
    with virtual_rank(0, ranks):
        optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.empty(*shape)) for shape in shapes], torch.optim.SGD, lr=0.1)
        parts = [[p.numel() for group in part for p in group["params"]] for part in optimizer._partition_parameters()]
    assert dealt_out([tuple(shape) for shape in shapes], ranks) == [sum(part) for part in parts]


@pytest.mark.parametrize(
    ("way", "shapes", "instead"),
    [
        ("ddp", [(3, 3)], [0, 0, 0, 0]),
        ("zero1", [(100,), (100,), (100,), (100,)], [0, 0, 0, 0]),
        ("zero1", [(99,), (100,), (40,), (20,)], [0, 1, 2, 3]),
        ("zero1", [(1000,), (999,), (998,), (900,)], [0, 0, 0, 3]),
        ("zero2", [(8, 3), (4,)], [0, 0, 0, 0]),
        ("fsdp", [(8, 3), (4,)], [0, 0, 0, 0]),
        ("fsdp", [(8, 3), (5,)], [0, 0, 0, 3]),
        ("pipeline", [(3,)], [0, 1, 2, 3]),
        ("hybrid", [(3,)], [0, 1, 0, 1]),
    ],
)
def test_which_ranks_are_run(way: str, shapes: list[tuple[int, ...]], instead: list[int]) -> None:
    assert stand_ins(recipe(way), lambda: [(shape, True) for shape in shapes]) == instead


def test_what_is_frozen_has_no_share_of_the_optimizer() -> None:
    parameters = [((1000,), False), ((10,), True), ((10,), True), ((10,), True), ((10,), True)]
    assert stand_ins(recipe("zero1"), lambda: parameters) == [0, 0, 0, 0]


# Streams


def test_memory_of_a_stream_is_used_again_on_that_stream_alone() -> None:
    with virtual_gpu("RTX 4090") as card:
        other = torch.vgpu.Stream()  # type: ignore[attr-defined]
        assert torch.vgpu.current_stream() is torch.vgpu.default_stream()  # type: ignore[attr-defined]
        with torch.vgpu.stream(other):  # type: ignore[attr-defined]
            assert torch.vgpu.current_stream() is other  # type: ignore[attr-defined]
            tensor = torch.empty(30 << 20, dtype=torch.uint8, device=card.device)
        del tensor
        reserved = card.reserved
        again = torch.empty(30 << 20, dtype=torch.uint8, device=card.device)
        assert card.reserved == reserved + again.nbytes
        with torch.vgpu.stream(other):  # type: ignore[attr-defined]
            third = torch.empty(30 << 20, dtype=torch.uint8, device=card.device)
        assert card.reserved == reserved + again.nbytes
        assert third.device == card.device
    stream = card.trace.events.stream
    assert stream is not None
    assert set(stream.tolist()) == {0, other.number}


def test_a_replayed_trace_of_a_sharded_model_reserves_what_the_run_did() -> None:
    with virtual_rank(0, RANKS), virtual_gpu("RTX 4090") as card:
        with closing(vl.train(vl.tasks.gpt("nano"), recipe("fsdp"), card.device, record_every=None)) as steps:
            for _ in itertools.islice(steps, 3):
                pass
            rows = rows_of(card.trace.events)
            reserved = card.reserved
    assert len(set(rows.streams.values())) > 1  # gathering and averaging have streams of their own
    replayed = CachingAllocator()
    replayed.replay(rows.events, rows.moves, rows.streams)
    assert replayed.reserved == reserved


# What is sent


def test_bytes_on_the_wire_by_hand() -> None:
    calls = (
        Call("all-reduce", 4, 4000),
        Call("all-gather", 4, 4000),
        Call("reduce-scatter", 4, 4000),
        Call("broadcast", 4, 100),
        Call("send", 4, 10),
        Call("receive", 4, 10),
        Call("all-reduce", 1, 999),
    )
    sent = Communication(calls)
    assert sent.wire == 6000 + 3000 + 3000 + 100 + 10
    assert sent.total == 4000 + 4000 + 4000 + 100 + 10 + 10 + 999
    assert sent.by_kind["all-reduce"] == 4999
    assert sent.seconds(WITHOUT_P2P) == pytest.approx(sent.wire / 14.5e9)


@pytest.mark.parametrize(
    ("card", "names"),
    [
        ("RTX 4090", ["PCIe 4.0 x16 without P2P", "NVLink (A100)"]),
        ("RTX 3090", ["PCIe 4.0 x16 without P2P", "NVLink (RTX 3090)"]),
        ("A100 80GB", ["PCIe 4.0 x16 with P2P", "NVLink (A100 80GB)"]),
    ],
)
def test_each_link_has_a_bandwidth_and_a_source(card: str, names: list[str]) -> None:
    links = links_of(gpu(card))
    assert [link.name for link in links] == names
    assert all(link.source.startswith(("measured: ", "theoretical: ")) and link.bandwidth > 1e9 for link in links)
    assert links[1].bandwidth > links[0].bandwidth


def test_times_are_called_estimated() -> None:
    sent = Communication((Call("all-reduce", 2, 29_000_000_000),))
    assert str(sent) == "27.01 GiB sent a step (all-reduce 27.01 GiB)"
    assert sent.words(CARD).endswith("; estimated 2 s over PCIe 4.0 x16 without P2P, 0.15 s over NVLink (A100)")
    assert sent.estimates(CARD)[A100_NVLINK.name] == pytest.approx(29 / 192)
    assert Communication(()).words(CARD) == "nothing is sent"
    assert "<td>all-reduce</td><td>1</td>" in sent._repr_html_()


def sent_in_full(way: vl.Recipe, rank: int) -> Communication:
    """All micro-batches are run."""
    with (
        virtual_rank(rank, way.ranks),
        virtual_gpu("RTX 4090") as card,
        closing(vl.train(vl.tasks.gpt("nano"), way, card.device, record_every=None)) as steps,
    ):
        for _ in itertools.islice(steps, 2):
            pass
        return card.communication(2)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "zero2", "pipeline", "hybrid"])
def test_what_a_long_window_sends_is_counted_from_a_short_one(way: str) -> None:
    long = recipe(way).with_(accumulation=11)
    assert enough_micro_batches(long, planning.MICRO_BATCHES) < 11
    for rank in {0, RANKS - 1}:
        planned = planning.trace_steps(vl.tasks.gpt("nano"), long, CARD, rank=rank)["communication"]
        full = sent_in_full(long, rank)
        assert (planned.by_kind, planned.wire, len(planned.calls)) == (full.by_kind, full.wire, len(full.calls))


def test_each_way_sends_what_the_textbook_says() -> None:
    model = vl.tasks.gpt("nano").model()
    nbytes = sum(p.nbytes for p in model.parameters())
    sent = {
        way: planning.trace_steps(vl.tasks.gpt("nano"), recipe(way), CARD)["communication"].by_kind for way in ("ddp", "zero1", "zero2")
    }
    small = 64  # the loss and how many items it is of
    assert sent["ddp"]["all-reduce"] == pytest.approx(nbytes, abs=small)
    assert sent["zero1"] == {"all-reduce": pytest.approx(nbytes, abs=small), "broadcast": nbytes}
    assert sent["zero2"]["all-gather"] == sent["zero2"]["reduce-scatter"] == nbytes


@pytest.mark.parametrize(
    ("card", "text"), [("RTX 4090", "they lie in host memory"), ("A100 80GB", r"544 MB with two and 688 MB with more")]
)
def test_the_buffers_of_nccl_are_named(card: str, text: str) -> None:
    (note,) = notes(recipe("ddp"), gpu(card))
    assert text in note
    assert notes(vl.Recipe(), gpu(card)) == []


# Categories and plans


def test_a_rank_says_what_is_gathered_and_sent() -> None:
    trace = planning.trace_steps(vl.tasks.gpt("nano"), recipe("fsdp"), CARD)["trace"]
    nbytes = sum(p.nbytes for p in vl.tasks.gpt("nano").model().parameters())
    held = trace.breakdown()
    assert held.parameters == nbytes // RANKS
    assert 0 < held.gathered_parameters < nbytes
    assert held.communication > 0
    buckets = planning.trace_steps(vl.tasks.gpt("nano"), recipe("ddp"), CARD)["trace"].breakdown()
    assert (buckets.parameters, buckets.buckets, buckets.gradients) == (nbytes, nbytes, pytest.approx(0, abs=nbytes // 4))


SMALL: GPU = CARD.with_(memory=CARD.context + 40 * 2**20)


@pytest.fixture(scope="module")
def plans() -> dict[str, planning.Plan]:
    return {way: vl.plan(vl.tasks.gpt("nano"), recipe(way), SMALL) for way in ("fsdp", "pipeline", "zero1")}


@pytest.mark.parametrize("way", ["fsdp", "pipeline", "zero1"])
def test_a_plan_of_several_ranks_is_that_of_the_fullest(way: str, plans: dict[str, planning.Plan]) -> None:
    plan = plans[way]
    assert [rank.rank for rank in plan.ranks] == list(range(RANKS))
    fullest = plan.ranks[plan.rank]
    assert plan.reserved == fullest.reserved == max(rank.reserved for rank in plan.ranks)
    assert (plan.allocated, plan.device, plan.trace, plan.communication) == (
        fullest.allocated,
        fullest.device,
        fullest.trace,
        fullest.communication,
    )
    assert plan.fits is all(rank.fits for rank in plan.ranks)
    assert all(plan.ranks[rank.traced].reserved == rank.reserved for rank in plan.ranks)
    assert all(rank.ranks == () for rank in plan.ranks)


def test_one_rank_that_does_not_fit_is_enough(plans: dict[str, planning.Plan]) -> None:
    pipeline = plans["pipeline"]
    assert pipeline.ranks[0].fits  # the embedding alone
    crowded = vl.plan(pipeline.task, pipeline.recipe.with_(micro_batch=64), SMALL)
    assert crowded.ranks[0].fits
    assert not crowded.ranks[1].fits
    assert not crowded.fits
    assert "rank 1 the fullest: does not fit" in repr(crowded) or "rank 2 the fullest: does not fit" in repr(crowded)


def test_a_plan_shows_its_ranks(plans: dict[str, planning.Plan]) -> None:
    plan = plans["fsdp"]
    assert "planned for 4 x RTX 4090, rank 0 the fullest: " in repr(plan)
    assert "planned for rank 3 of 4 on RTX 4090: " in repr(plan.ranks[3])
    shown = plan._repr_html_()
    assert shown.count("<tr><td>") == RANKS
    assert "estimated" in shown
    assert "PCIe 4.0 x16 without P2P" in shown
    assert "NCCL&#x27;s buffers are not counted" in shown
    alone = plan.ranks[0]._repr_html_()
    assert "<table><tr><th>rank</th>" not in alone
    assert "estimated" in alone


@pytest.mark.parametrize("way", ["fsdp", "zero1"])
def test_the_law_of_several_ranks_is_that_of_a_plan(way: str, plans: dict[str, planning.Plan]) -> None:
    plan = plans[way]
    assert plan.law_error == ""
    point, other = plan.law(7), vl.plan(plan.task, plan.recipe.with_(micro_batch=7), SMALL)
    assert (point.allocated, point.reserved, point.fits, point.exact) == (other.allocated, other.reserved, other.fits, True)
    assert plan.memory_law is not None


def test_the_largest_micro_batch_is_that_of_all_ranks(plans: dict[str, planning.Plan]) -> None:
    plan = plans["fsdp"]
    largest = plan.max_micro_batch
    assert vl.plan(plan.task, plan.recipe.with_(micro_batch=largest), SMALL).fits
    assert not vl.plan(plan.task, plan.recipe.with_(micro_batch=largest + 1), SMALL).fits
    assert [point.micro_batch for point in plan.curve(3).points][-1] > largest


def test_what_moves_a_tensor_to_a_card_may_also_set_its_data() -> None:
    with virtual_gpu("RTX 4090") as card:
        with card.building("cpu"):
            layer = nn.Linear(8, 8)
            layer.register_buffer("steps", torch.zeros(3))
        weight = layer.weight
        for tensor in (weight, layer.steps):
            tensor.data = tensor.to(card.device)
        assert weight is layer.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
        assert weight.device == layer.steps.device == card.device
        out = F.linear(torch.ones(2, 8, device=card.device), weight) + layer.steps.sum()
        out.sum().backward()
        assert weight.grad is not None
        assert weight.grad.device == card.device
        weight.data = torch.zeros(8, 8, device=card.device)
        assert weight.shape == (8, 8)
    real = torch.ones(2)
    real.data = torch.zeros(2)
    assert real.tolist() == [0.0, 0.0]
