"""Pipelines on real gloo ranks: the same losses and gradients as one process on the same micro-batches, and who waits when."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import vramlab as vl
from vramlab.parallel import (
    ColumnParallelLinear,
    Pipeline,
    RowParallelLinear,
    Timeline,
    bubble,
    flow,
    hybrid,
    launch,
    pipeline,
    split_batch,
)
from vramlab.parallel.parts import (
    Boundary,
    PartCost,
    Stage,
    balanced_split,
    check_alike,
    least_maximum,
    parts_of,
    trace_parts,
)
from vramlab.parallel.pipelined import in_flight
from vramlab.parallel.timeline import Clock, Work
from vramlab.tasks.models import DecoderConfig, Part, decoder
from vramlab.techniques import Precision, Window, checkpoint_blocks, step_in_backward

VOCABULARY, WIDTH, LENGTH, SIZE, BLOCKS = 11, 8, 5, 2, 6
IGNORED = -100
STEPS = 2
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """A model of text without attention: embedding, blocks, head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]


class Nested(Words):
    """Its parts exchange a dictionary with a tuple, nothing, and a mask that has no gradient."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: Any = ids
        for part in self.pipeline_parts():
            x = part(x)
        return x

    def start(self, ids: torch.Tensor) -> dict[str, Any]:
        x = self.embedding(ids)
        return {"h": (x, x.detach() * 2), "mask": (ids > 3)[..., None], "none": None}

    def middle(self, given: dict[str, Any]) -> dict[str, Any]:
        x, other = given["h"]
        return {**given, "h": (self.block(x) * given["mask"] + other, x)}

    def end(self, given: dict[str, Any]) -> torch.Tensor:
        x, before = given["h"]
        return self.head(x + before)

    def pipeline_parts(self) -> list[nn.Module]:
        middle = [Part(Nested.middle, block=block) for block in self.blocks]
        return [Part(Nested.start, embedding=self.embedding), *middle, Part(Nested.end, head=self.head)]


def batch_of(copy: int, number: int, kept: int) -> Batch:
    """Micro-batch ``number`` of a copy of the pipeline, of which ``kept`` tokens count."""
    generator = torch.Generator().manual_seed(1000 * copy + number)
    ids, labels = torch.randint(VOCABULARY, (2, SIZE, LENGTH), generator=generator)
    labels.view(-1)[kept:] = IGNORED
    return ids, labels


def loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    ids, labels = batch
    total = F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, int((labels != IGNORED).sum())


def amp_loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


def all_tokens(copy: int, number: int) -> int:
    return SIZE * LENGTH


def unlike(copy: int, number: int) -> int:
    """Tokens that count: other numbers in each micro-batch, none at all in some."""
    return (3 * copy + 5 * number) % (SIZE * LENGTH - 1)


@dataclass(frozen=True)
class Case:
    """One way to train; what differs is how, never what comes out."""

    schedule: str = "1f1b"
    micro_batches: int = 4
    kind: Callable[[], Words] = Words
    frozen: bool = False
    checkpointed: bool = False
    amp: bool = False
    dtype: torch.dtype = torch.float32
    kept: Callable[[int, int], int] = all_tokens
    exact: bool = True
    """Whether one pipeline gives the very bits of one process."""
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Words:
        torch.manual_seed(0)
        model = self.kind().to(self.dtype)
        if self.frozen:
            model.embedding.requires_grad_(False)
            model.blocks[1].up.requires_grad_(False)
        return model

    def batches(self, copy: int, step: int) -> list[Batch]:
        numbers = range(step * self.micro_batches, (step + 1) * self.micro_batches)
        return [batch_of(copy, i, self.kept(copy, i)) for i in numbers]

    @property
    def loss(self) -> Any:
        return amp_loss_of if self.amp else loss_of


def tied() -> Words:
    return Words(tied=True)


CASES = {
    "1f1b": Case(),
    "gpipe": Case("gpipe"),
    "naive": Case("naive"),
    "1f1b, many micro-batches": Case(micro_batches=7),
    "gpipe, fewer micro-batches than stages": Case("gpipe", micro_batches=1),
    "naive, one micro-batch": Case("naive", micro_batches=1),
    "each token weighs the same": Case(kept=unlike, exact=False),
    "no token at all in the first micro-batches": Case(kept=lambda copy, number: 7 * (number % 4 > 1), exact=False),
    "nothing counts anywhere": Case(kept=lambda copy, number: 0),
    "tied": Case(kind=tied, exact=False),
    "tied, uneven tokens": Case("gpipe", kind=tied, kept=unlike, exact=False),
    "frozen": Case(frozen=True),
    "checkpointed": Case(checkpointed=True),
    "amp-bf16": Case(amp=True, options={"around": lambda: torch.autocast("cpu", torch.bfloat16)}),
    "bf16 parameters": Case(dtype=torch.bfloat16),
    "bf16 parameters, uneven tokens": Case(dtype=torch.bfloat16, kept=unlike, exact=False),
}

if flow.MIXED:
    CASES |= {"nested": Case(kind=Nested), "nested, gpipe": Case("gpipe", kind=Nested)}


@dataclass
class Outcome:
    """What training gave on one rank, or in one process."""

    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    split: tuple[int, ...] = ()


def train(model: nn.Module, names: dict[str, str], run: Callable[[int], Window[Any]]) -> Outcome:
    """The loop a user writes; ``run`` does the forward and backward of a step's window."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    outcome = Outcome()
    for step in range(STEPS):
        window = run(step)
        outcome.losses.append(window.loss)
        outcome.counts.append(window.count)
        outcome.gradients.append({names[name]: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {names[name]: p.detach().clone() for name, p in model.named_parameters()}
    return outcome


def in_rank(case: Case, stages: int, copies: int) -> Outcome:
    make = hybrid if copies > 1 else pipeline
    model = case.model()
    pipe = make(
        model,
        stages,
        loss=case.loss,
        example=batch_of(9, 9, 3),
        micro_batches=case.micro_batches,
        schedule=case.schedule,
        device="cpu",
        **case.options,
    )
    if case.checkpointed:
        checkpoint_blocks(pipe.stage, blocks=Block)
    outcome = train(pipe.stage, pipe.names, lambda step: pipe.window(case.batches(pipe.replica, step)))
    outcome.split = pipe.split
    return outcome


def in_one_process(case: Case, copies: int) -> Outcome:
    """Each window holds what all copies' windows hold together."""
    model = case.model()

    def run(step: int) -> Window[Any]:
        batches = [batch for copy in range(copies) for batch in case.batches(copy, step)]
        window: Window[Any] = Window(len(batches))
        window.open(model.parameters())
        for batch in batches:
            window.share(*case.loss(model, batch)).backward()
        window.close(model.parameters())
        return window

    return train(model, {name: name for name, _ in model.named_parameters()}, run)


# More that ranks are asked for


class Slow(nn.Module):
    """Takes its time in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return self.linear(x)


PAUSE = 0.03


def square(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).square().sum(), len(x)


def timed(stages: int) -> dict[str, Timeline]:
    found = {}
    for schedule in ("naive", "gpipe", "1f1b"):
        model = nn.Sequential(*(Slow() for _ in range(stages)))
        pipe = pipeline(model, loss=square, example=torch.ones(2, 4), micro_batches=4, schedule=schedule, device="cpu")
        pipe.window([torch.ones(2, 4)] * 4)
        clock = Clock(pipe.number, pipe.device)
        clock.start()
        pipe.window([torch.ones(2, 4)] * 4, clock=clock)
        found[schedule] = clock.gather()
    return found


def asked() -> list[tuple[int, int]]:
    """When each micro-batch of a window was asked for: how many forwards and backwards had been done here."""
    seen = []
    pipe = pipeline(Words(), loss=loss_of, example=batch_of(0, 0, 3), micro_batches=6, device="cpu")

    def batches() -> Iterator[Batch]:
        for i in range(6):
            seen.append((pipe._runs.job.forwards - 1, pipe._runs.job.backwards))
            yield batch_of(0, i, 3)

    pipe.window(batches())
    return seen


def peaks() -> dict[tuple[str, int], int]:
    """Bytes at the peak of a second window, by schedule and number of micro-batches."""
    found = {}
    for schedule, number in itertools.product(("1f1b", "gpipe"), (4, 8, 12)):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        pipe = pipeline(model, loss=square, example=torch.ones(32, 64), micro_batches=number, schedule=schedule, device="cpu")
        for _ in range(2):
            with vl.record(pipe.stage) as trace:
                pipe.window(torch.full((32, 64), float(i)) for i in range(number))
        found[schedule, number] = trace.peak
    return found


def normed() -> tuple[list[str], dict[str, torch.Tensor]]:
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.1), *(nn.Linear(1, 1) for _ in range(dist.get_world_size() - 1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pipeline(model, loss=square, example=torch.ones(2, 1), micro_batches=4, schedule="gpipe", device="cpu")
    pipe.window(split_batch(torch.arange(8.0)[:, None], 4))
    return [str(w.message) for w in caught], {name: buffer.clone() for name, buffer in pipe.stage.named_buffers()}


def clipped(mode: str, spoilt: int | None) -> dict[str, Any]:
    """Two steps clipped, in fp32 or with a loss scale; in stage ``spoilt`` a gradient is infinite in the first."""
    torch.manual_seed(0)
    model = Words(tied=True)
    precision = Precision(mode, loss_scale=1024.0)
    pipe = pipeline(model, loss=loss_of, example=batch_of(0, 0, 3), micro_batches=4, device="cpu")
    optimizer = torch.optim.SGD(pipe.stage.parameters(), lr=0.1)
    shown: dict[str, Any] = {"stepped": [], "scales": [], "norms": []}
    for step in range(2):
        pipe.window([batch_of(0, 4 * step + i, 7) for i in range(4)], scaled=precision.scaled)
        if not pipe.is_last:
            precision.scaled(torch.zeros(()))
        if step == 0 and pipe.number == spoilt:
            next(p for p in pipe.stage.parameters() if p.dim() == 1).grad[0] = float("inf")
        shown["stepped"].append(precision.step(optimizer, 0.05, group=pipe.group, copies=pipe.copies))
        shown["scales"].append(precision.scale)
        copied = {id(p) for p in pipe.copies}
        shown["norms"].append(sum(float(p.grad.square().sum()) for p in pipe.stage.parameters() if id(p) not in copied))
        optimizer.zero_grad()
    shown["parameters"] = {pipe.names[name]: p.detach().clone() for name, p in pipe.stage.named_parameters()}
    return shown


def clipped_in_one(mode: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Words(tied=True)
    precision = Precision(mode, loss_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        window: Window[Any] = Window(4)
        for i in range(4):
            precision.backward(window.share(*loss_of(model, batch_of(0, 4 * step + i, 7))))
        assert precision.step(optimizer, 0.05)
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def failing(how: str) -> str:
    """The text of what this rank raises before anything is sent."""
    pipe = pipeline(Words(), loss=loss_of, example=batch_of(0, 0, 3), micro_batches=4, device="cpu")
    batches: dict[str, Callable[[], Any]] = {
        "few": lambda: pipe.window([batch_of(0, 0, 3)] * 3),
        "many": lambda: pipe.window([batch_of(0, 0, 3)] * 5),
    }
    with pytest.raises(ValueError, match="micro-batches") as caught:
        batches[how]()
    return str(caught.value)


def split_linears(whole: bool) -> dict[str, tuple[torch.Tensor, ...]]:
    """Outputs and gradients of one Linear, of its columns and of its rows; of whole numbers sums are exact in any order."""
    torch.manual_seed(0)
    linear, x, g = nn.Linear(8, 12), torch.randn(3, 5, 8), torch.randn(3, 5, 12)
    if whole:
        for tensor in (linear.weight.data, linear.bias.data, x, g):
            tensor.mul_(8).round_()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in ("one", "columns", "rows"):
        inputs = x.clone().requires_grad_()
        module = {"one": lambda: linear, "columns": lambda: ColumnParallelLinear(linear), "rows": lambda: RowParallelLinear(linear)}[name]()
        y = module(inputs)
        y.backward(g)
        assert inputs.grad is not None
        weight, bias = module.weight.grad, module.bias.grad
        if name == "one":
            parts = weight.chunk(ranks, 0)[rank], bias.chunk(ranks)[rank], weight.chunk(ranks, 1)[rank], bias
            found[name] = (y.detach(), inputs.grad, *(part.clone() for part in parts))
            linear.weight.grad = linear.bias.grad = None
        else:
            found[name] = (y.detach(), inputs.grad, weight, bias)
    return found


def mlp() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A column split and a row split with nothing in between, and the same in one piece: output, gradients of the input and up."""
    torch.manual_seed(0)
    up, down, x = nn.Linear(8, 16), nn.Linear(16, 8), torch.randn(3, 8)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, theirs = ColumnParallelLinear(up, gather=False), RowParallelLinear(down, scatter=False)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = theirs(F.gelu(mine(a))), down(F.gelu(up(b)))
    y.square().sum().backward()
    z.square().sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    return [y.detach(), a.grad, mine.weight.grad], [z.detach(), b.grad, up.weight.grad.chunk(ranks, 0)[rank].clone()]


def checkpointed_input() -> tuple[bool, Any, int]:
    """Whether the data of stage 0 want a gradient, what they got, and how often its block was computed."""
    calls = []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(dist.get_world_size())))
    x = torch.ones(2, 4)
    pipe = pipeline(model, loss=square, example=x, micro_batches=4, device="cpu")
    pipe.stage.parts[0][0].register_forward_hook(lambda *_: calls.append(1))
    checkpoint_blocks(pipe.stage, blocks=lambda module: module is pipe.stage.parts[0])
    pipe.window([x] * 4)
    return x.requires_grad, x.grad, len(calls)


RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpipe": {"schedule": "gpipe"},
    "amp-bf16": {"precision": "amp-bf16"},
    "amp-fp16, clipped": {"precision": "amp-fp16", "clip_norm": 0.5},
    "bf16": {"precision": "bf16"},
    "checkpointing": {"checkpointing": "blocks"},
    "selective, every second": {"checkpointing": "selective", "checkpoint_every": 2},
    "loss in chunks": {"loss_chunks": 4},
    "offloaded activations": {"offload": "activations"},
    "offloaded optimizer": {"offload": "optimizer"},
    "written-out attention": {"attention": "math", "clip_norm": 0.5},
    "adafactor": {"optimizer": "adafactor"},
}


def losses_of(task: vl.Task, **options: Any) -> list[float]:
    torch.manual_seed(3)
    recipe = vl.Recipe(micro_batch=2, **{"accumulation": 4, "optimizer": "sgd", **options})
    return [report.loss for _, report in zip(range(3), vl.train(task, recipe, "cpu", record_every=None), strict=False)]


def without_schedule(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "schedule"}


def small(stages: int) -> vl.Task:
    """A GPT with tied embeddings and a block a stage."""
    config = DecoderConfig(layers=stages, heads=2, width=32, sequence=16, vocabulary=256)
    return dataclasses.replace(vl.tasks.gpt("nano", sequence=16), model=lambda: decoder(config))


def by_recipe(stages: int) -> dict[str, list[float]]:
    task = small(stages)
    return {n: losses_of(task, parallel="pipeline", ranks=stages, stages=stages, **o) for n, o in RECIPES.items()}


def own_batches(copies: Sequence[int]) -> vl.Task:
    """A task whose micro-batches are those of some copies, one copy's window after the other's, three windows."""
    numbers = [(copy, 4 * step + i) for step in range(3) for copy in copies for i in range(4)]
    batches = iter([batch_of(copy, number, unlike(copy, number)) for copy, number in numbers])
    return vl.Task(tied, lambda size, device: next(batches), loss_of)


def random_batches(stages: int) -> list[float]:
    """What each rank saw of batches that random, NumPy and torch draw while dropout draws too."""
    import random

    import numpy as np

    seen: list[float] = []

    def batch(size: int, device: torch.device) -> torch.Tensor:
        x = torch.rand(size, 4)
        x[0, :2] = torch.tensor([random.random(), np.random.rand()])
        return x

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.append(float(x.sum()))
        return square(model, x)

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(stages)))

    way = "hybrid" if stages < dist.get_world_size() else "pipeline"
    recipe = vl.Recipe(parallel=way, ranks=dist.get_world_size(), stages=stages, accumulation=stages)  # type: ignore[arg-type]
    recipe = recipe.with_(micro_batch=2, accumulation=4)
    for _ in zip(range(2), vl.train(vl.Task(model, batch, loss), recipe, "cpu", record_every=None), strict=False):
        pass
    return seen


def exhibits() -> dict[str, Any]:
    """All that one launch is asked for; starting ranks costs the most."""
    ranks = dist.get_world_size()
    shown: dict[str, Any] = {"outcomes": {name: in_rank(case, ranks, 1) for name, case in CASES.items()}}
    shown["expected"] = {name: in_one_process(case, 1) for name, case in CASES.items()}  # with as many threads as the ranks have
    if ranks == 4:
        shown["hybrid"] = {name: in_rank(case, 2, 2) for name, case in CASES.items()}
        shown["hybrid recipe"] = losses_of(own_batches([dist.get_rank() // 2]), parallel="hybrid", ranks=4, stages=2, clip_norm=0.5)
        shown["hybrid random"] = random_batches(2)
    shown["timed"], shown["asked"], shown["peaks"], shown["normed"] = timed(ranks), asked(), peaks(), normed()
    shown["clipped"] = {mode: clipped(mode, None) for mode in ("fp32", "amp-fp16")}
    shown["spoilt"] = {stage: clipped("amp-fp16", stage) for stage in range(ranks)}
    shown["clipped in one"] = {mode: clipped_in_one(mode) for mode in ("fp32", "amp-fp16")}
    shown["failing"] = {how: failing(how) for how in ("few", "many")}
    shown["linears"] = {whole: split_linears(whole) for whole in (True, False)}
    shown["mlp"], shown["checkpointed input"], shown["recipes"] = mlp(), checkpointed_input(), by_recipe(ranks)
    shown["random"] = random_batches(ranks)
    return shown


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch(exhibits, ranks=2, device="cpu", timeout=200)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return launch(exhibits, ranks=4, device="cpu", timeout=300)


@pytest.fixture(params=[2, 4], ids=["2 stages", "4 stages"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return request.getfixturevalue({2: "two", 4: "four"}[request.param])


def assert_same(case: Case, outcomes: Sequence[Outcome], expected: Outcome, exact: bool) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if case.dtype is torch.bfloat16 or case.amp else {"rtol": 2e-5, "atol": 1e-7}
    if exact:
        tolerance = {"rtol": 0, "atol": 0}
    seen: set[str] = set()
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-2 if case.dtype is torch.bfloat16 else 1e-5)
        assert outcome.counts == expected.counts
        for ours, theirs in zip(outcome.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(ours, {name: theirs[name] for name in ours}, **tolerance)
        torch.testing.assert_close(outcome.parameters, {name: expected.parameters[name] for name in outcome.parameters}, **tolerance)
        assert outcome.gradients[0].keys() == outcome.parameters.keys() & expected.gradients[0].keys()
        seen |= outcome.parameters.keys()
    assert seen == expected.parameters.keys()


@pytest.mark.parametrize("name", CASES)
def test_stages_learn_what_one_process_learns(name: str, ranks: list[dict[str, Any]]) -> None:
    outcomes = [shown["outcomes"][name] for shown in ranks]
    assert_same(CASES[name], outcomes, ranks[0]["expected"][name], CASES[name].exact)


@pytest.mark.parametrize("name", CASES)
def test_a_grid_learns_what_one_process_learns_on_all_copies_batches(name: str, four: list[dict[str, Any]]) -> None:
    outcomes = [shown["hybrid"][name] for shown in four]
    assert_same(CASES[name], outcomes, in_one_process(CASES[name], 2), False)
    for first, second in ((0, 2), (1, 3)):  # the same stage of both copies
        torch.testing.assert_close(outcomes[first].gradients, outcomes[second].gradients, rtol=0, atol=0)
        torch.testing.assert_close(outcomes[first].parameters, outcomes[second].parameters, rtol=0, atol=0)


def test_tied_weights_stay_the_same_bits_in_both_stages(ranks: list[dict[str, Any]]) -> None:
    for name in ("tied", "tied, uneven tokens"):
        first, last = ranks[0]["outcomes"][name], ranks[-1]["outcomes"][name]
        assert torch.equal(first.gradients[1]["embedding.weight"], last.gradients[1]["embedding.weight"])
        assert torch.equal(first.parameters["embedding.weight"], last.parameters["embedding.weight"])


def test_equal_blocks_are_split_evenly(ranks: list[dict[str, Any]]) -> None:
    (split,) = {shown["outcomes"]["gpipe"].split for shown in ranks}
    assert sum(split) == BLOCKS + 2
    assert max(split) - min(split) <= 2


# Who waits


def test_in_a_naive_split_one_rank_works_at_a_time(ranks: list[dict[str, Any]]) -> None:
    timeline: Timeline = ranks[0]["timed"]["naive"]
    works = sorted(timeline.works, key=lambda work: work.start)
    for before, after in itertools.pairwise(works):
        assert after.start > before.end - PAUSE / 3  # clocks begin together, but for the end of a barrier
    assert [work.kind for work in works] == (["forward"] * len(ranks) + ["backward"] * len(ranks)) * 4
    assert sum(timeline.idle.values()) > len(ranks) - 1.2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_schedules_let_ranks_work_at_the_same_time(schedule: str, ranks: list[dict[str, Any]]) -> None:
    timeline: Timeline = ranks[0]["timed"][schedule]
    naive: Timeline = ranks[0]["timed"]["naive"]
    assert timeline.seconds < naive.seconds * 0.9
    forwards = [[work.micro_batch for work in timeline.of(rank) if work.kind == "forward"] for rank in timeline.ranks]
    backwards = [[work.micro_batch for work in timeline.of(rank) if work.kind == "backward"] for rank in timeline.ranks]
    assert forwards == backwards == [[0, 1, 2, 3]] * len(ranks)
    assert [work.kind for work in timeline.of(0)] == (
        ["forward"] * 4 + ["backward"] * 4
        if schedule == "gpipe"
        else [*["forward"] * len(ranks), *["backward", "forward"] * (4 - len(ranks)), *["backward"] * len(ranks)]
    )


def test_all_ranks_get_the_same_timeline(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        assert shown["timed"]["gpipe"] == ranks[0]["timed"]["gpipe"]
        assert {(work.rank, work.stage) for work in shown["timed"]["gpipe"].works} == {(i, i) for i in range(len(ranks))}


# What a rank holds


def test_micro_batches_are_asked_for_late_and_by_two_stages_alone(ranks: list[dict[str, Any]]) -> None:
    first, *middle, last = (shown["asked"] for shown in ranks)
    # Before forward i of the first stage, i - stages + 1 backwards are done; the last goes backward at once.
    assert first == [(i, max(0, i - len(ranks) + 1)) for i in range(6)]
    assert last == [(i, i) for i in range(6)]
    assert middle == [[]] * (len(ranks) - 2)


def test_1f1b_holds_no_more_for_more_micro_batches_and_gpipe_does(ranks: list[dict[str, Any]]) -> None:
    activation = 32 * 64 * 4
    for number, shown in enumerate(ranks):
        peaks = shown["peaks"]
        # Beside the micro-batches' numbers, 8 bytes each, that the schedule deals out.
        assert abs(peaks["1f1b", 12] - peaks["1f1b", 8]) <= 8 * 4 + 64, number
        assert peaks["gpipe", 12] - peaks["gpipe", 8] >= 4 * activation, number


# BatchNorm, clipping, precision, checkpoints


def test_batch_norm_sees_micro_batches_which_is_noted_once(ranks: list[dict[str, Any]]) -> None:
    notes, buffers = ranks[0]["normed"]
    (note,) = (text for text in notes if "BatchNorm" in text)
    assert re.search(r"BatchNorm \(0\) takes its mean over one micro-batch.*4 times a window.*LayerNorm do not", note)
    assert not any("BatchNorm" in text for shown in ranks[1:] for text in shown["normed"][0])
    # By hand: momentum 0.1 four times with means 0.5, 2.5, 4.5, 6.5 and variances 0.5; the whole batch would give 0.35 and 1.5 once.
    assert buffers["0.running_mean"].item() == pytest.approx(1.29395)
    assert buffers["0.running_var"].item() == pytest.approx(0.82805)
    assert buffers["0.num_batches_tracked"].item() == 4


@pytest.mark.parametrize("mode", ["fp32", "amp-fp16"])
def test_clipping_takes_the_norm_over_all_stages_and_tied_weights_once(mode: str, ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        mine = shown["clipped"][mode]
        assert mine["stepped"] == [True, True]
        expected = ranks[0]["clipped in one"][mode]
        torch.testing.assert_close(mine["parameters"], {n: expected[n] for n in mine["parameters"]}, rtol=2e-5, atol=1e-7)
    for step in range(2):
        assert sum(shown["clipped"][mode]["norms"][step] for shown in ranks) ** 0.5 == pytest.approx(0.05, rel=1e-4)


def test_an_infinite_gradient_in_any_stage_lets_all_skip_the_step(ranks: list[dict[str, Any]]) -> None:
    for spoilt in range(len(ranks)):
        for shown in ranks:
            mine = shown["spoilt"][spoilt]
            assert mine["stepped"] == [False, True]
            assert mine["scales"] == [512.0, 512.0]


def test_the_data_of_a_checkpointed_first_stage_get_no_gradient(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        assert shown["checkpointed input"][:2] == (False, None)
        assert shown["checkpointed input"][2] == 8  # four forwards, each a second time


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_carried_out_in_stages(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = losses_of(small(len(ranks)), **without_schedule(RECIPES[name]))
    for shown in ranks:
        # The data, too, are those of one process.
        assert shown["recipes"][name] == pytest.approx(expected, rel=1e-3 if "16" in name else 1e-5)


def test_a_recipe_is_carried_out_on_a_grid(four: list[dict[str, Any]]) -> None:
    expected = losses_of(own_batches([0, 1]), accumulation=8, clip_norm=0.5)
    for shown in four:
        assert shown["hybrid recipe"] == pytest.approx(expected, rel=1e-5)


def test_the_stages_of_a_copy_see_the_same_batches_and_copies_others(four: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    first, *middle, last = (shown["random"] for shown in four)
    # A first look by all, which is the first micro-batch as well; then those at the ends alone.
    assert [*middle, two[1]["random"][:0]] == [[first[0]]] * 2 + [[]]
    assert first == last
    assert len(set(first)) == 8
    assert two[0]["random"] == two[1]["random"]
    grid = [shown["hybrid random"] for shown in four]
    assert grid[0] == grid[1]
    assert grid[2] == grid[3]
    assert not set(grid[0]) & set(grid[2])


# One Linear over the ranks


def test_columns_and_rows_of_a_linear_give_its_exact_numbers(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        y, x, column_weight, column_bias, row_weight, row_bias = shown["linears"][True]["one"]
        for ours, theirs in zip(shown["linears"][True]["columns"], (y, x, column_weight, column_bias), strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(shown["linears"][True]["rows"], (y, x, row_weight, row_bias), strict=True):
            assert torch.equal(ours, theirs)


def test_columns_and_rows_of_any_linear_are_its_numbers_but_for_the_order_of_sums(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        y, x, column_weight, column_bias, row_weight, row_bias = shown["linears"][False]["one"]
        torch.testing.assert_close(shown["linears"][False]["columns"], (y, x, column_weight, column_bias))
        torch.testing.assert_close(shown["linears"][False]["rows"], (y, x, row_weight, row_bias))


def test_a_column_split_and_a_row_split_make_an_mlp(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        torch.testing.assert_close(*shown["mlp"])


def test_windows_of_another_length_are_refused_in_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        assert re.search("windows of 4 micro-batches, got 3: all stages count on as many. Drop the last", shown["failing"]["few"])
        assert "got 5" in shown["failing"]["many"]


# What one process alone can show


@pytest.fixture
def of_two() -> Iterator[None]:
    """This process is rank 0 of two, and the other one does not exist."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("task", [vl.tasks.gpt("nano"), vl.tasks.gpt("llama-nano"), vl.tasks.vit(), vl.tasks.resnet()], ids=str)
def test_the_parts_of_the_built_in_models_are_the_model(task: vl.Task) -> None:
    model, batch = task.model().eval(), task.batch(2, torch.device("cpu"))
    inputs = batch[:, :-1] if isinstance(batch, torch.Tensor) else batch[0]
    stage = Stage(parts_of(model))
    assert torch.equal(stage(inputs), model(inputs))
    assert {id(p) for p in stage.parameters()} == {id(p) for p in model.parameters()}


def test_parts_go_by_their_names_in_the_model() -> None:
    assert [name for name, _ in parts_of(Words())] == ["embedding", *(f"blocks.{i}" for i in range(BLOCKS)), "head"]
    assert [name for name, _ in parts_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))] == ["0", "1"]
    assert [name for name, _ in parts_of(vl.tasks.vit().model())][::5] == ["part0", "part5"]
    stage = Stage(parts_of(Words())[2:4])
    assert [name for name, _ in stage.named_parameters()][:2] == ["blocks.1.norm.weight", "blocks.1.norm.bias"]


class NoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)


class Forgetful(Words):
    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks]


class Loose(Words):
    def pipeline_parts(self) -> list[Any]:
        return [self.embedding, torch.relu, self.head]


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (3, TypeError, r"splits a torch.nn.Module, got int; write pipeline\(MyModel"),
        (NoParts(), TypeError, r"NoParts is no nn.Sequential and has no pipeline_parts\(\). Write that method"),
        (
            Loose(),
            TypeError,
            r"pipeline_parts\(\) of Loose returns modules, got a builtin_function_or_method among them; make a module of it",
        ),
        (Forgetful(), ValueError, r"The parts of Forgetful hold all of its parameters, and these are in none: head.weight. Add"),
    ],
)
def test_a_model_whose_parts_are_not_known_is_refused(model: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parts_of(model)


def test_the_cost_of_parts_is_that_of_arithmetic_by_hand() -> None:
    first, second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
    second.weight.requires_grad_(False)
    parts = parts_of(nn.Sequential(first, nn.GELU(), second))
    costs, boundaries = trace_parts(parts, [torch.zeros(3, 8)])
    a, gelu, b = costs
    assert a == PartCost("0", parameters=512, trained=128, gradients=512, activations=3 * 8 * 4, flops=2 * 3 * 8 * 16)
    assert gelu == PartCost("1", activations=3 * 16 * 4)
    assert b == PartCost("2", parameters=256, flops=2 * 3 * 16 * 4)  # a frozen product keeps its weight alone
    assert a.states() == 512 + 512 + 8 * 128
    assert [[tuple(t.shape) for t in boundary.tensors] for boundary in boundaries] == [[(3, 16)], [(3, 16)], [(3, 4)]]
    assert all(boundary.tensors[0].requires_grad for boundary in boundaries)


def test_a_checkpointed_part_keeps_its_inputs_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    (_, plain), (_, kept) = (trace_parts(parts_of(model), [torch.zeros(3, 8)], recomputed=r)[0] for r in ([], [model[1]]))
    assert plain.activations == (8 + 2 * 32) * 3 * 4
    assert kept.activations == 8 * 3 * 4


def test_nothing_is_computed_to_know_what_parts_cost() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    before, random = [t.clone() for t in model.state_dict().values()], torch.get_rng_state()
    x = torch.zeros(3, 2)
    with vl.record(model) as trace:
        trace_parts(parts_of(model), [x])
    assert trace.peak == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    torch.testing.assert_close(list(model.state_dict().values()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_types_that_travel_are_those_of_autocast() -> None:
    parts = parts_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    _, boundaries = trace_parts(parts, [torch.zeros(3, 2)], around=lambda: torch.autocast("cpu", torch.bfloat16))
    assert [boundary.tensors[0].dtype for boundary in boundaries] == [torch.bfloat16] * 2


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Gives(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what


@pytest.mark.parametrize(
    ("part", "error", "text"),
    [
        (Reads(), RuntimeError, r"part '1' \(Reads\) failed in it: .*Leave reading numbers \(.item\(\)"),
        (Gives("text"), TypeError, r"part '1' \(Gives\) gave a str. Return tensors, and give the next parts"),
        (Gives((torch.ones(1), 3)), TypeError, "gave a int"),
        (Gives(None), TypeError, "gave None"),
        (Gives(()), TypeError, r"gave \(\)"),
    ],
)
def test_a_part_that_gives_no_tensors_is_named_when_the_pipeline_is_made(part: nn.Module, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        trace_parts(parts_of(nn.Sequential(nn.Linear(2, 2), part, nn.Linear(2, 2))), [torch.zeros(3, 2)])


def test_what_crosses_a_boundary_comes_out_as_it_went_in() -> None:
    value = {"a": (torch.ones(2, 3).t(), None), "b": [torch.zeros(1)]}
    boundary = Boundary.of(value, "here")
    tensors = boundary.flatten(value, "here")
    assert all(tensor.is_contiguous() for tensor in tensors)
    back = boundary.unflatten(tensors)
    assert back["a"][1] is None
    assert torch.equal(back["a"][0], value["a"][0])
    assert torch.equal(back["b"][0], value["b"][0])
    for other in ({"a": (torch.ones(3, 2), torch.ones(1)), "b": [torch.zeros(1)]}, [torch.ones(3, 2), torch.zeros(1)]):
        with pytest.raises(
            ValueError, match=r"here was {'a': \('tensor', None\), 'b': \['tensor'\]} at first and is .* now. Return the same"
        ):
            boundary.flatten(other, "here")


@pytest.mark.parametrize("other", [torch.ones(2, 2), torch.ones(2, 3, dtype=torch.float64)])
def test_a_micro_batch_of_another_shape_is_refused_before_anything_is_sent(other: torch.Tensor) -> None:
    check_alike([torch.zeros(2, 3)], [torch.ones(2, 3)], "x")
    with pytest.raises(ValueError, match=r"x is float\d\d \(2, \d\), and was to be float32 \(2, 3\). Pad the micro-batches"):
        check_alike([other], [torch.ones(2, 3)], "x")


# The split

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=7)


@given(SIZES, st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], stages: int) -> None:
    def size(stage: int, first: int, end: int) -> float:
        return sum(sizes[first:end]) * (stage + 1)

    found = least_maximum(size, len(sizes), stages)
    cuts = [[0, *inner, len(sizes)] for inner in itertools.combinations(range(1, len(sizes)), stages - 1)]
    if not cuts:
        assert found is None
        return
    largest = {tuple(b - a for a, b in itertools.pairwise(cut)): max(itertools.starmap(size, _stages(cut))) for cut in cuts}
    assert found is not None
    assert largest[found] == min(largest.values())


def _stages(cut: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(stage, a, b) for stage, (a, b) in enumerate(itertools.pairwise(cut))]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=8), st.integers(2, 3))
def test_each_stage_gets_parts_and_all_are_dealt_out(numbers: list[tuple[int, int, int]], stages: int) -> None:
    costs = [PartCost(str(i), 4 * n, n, 4 * n, a, f) for i, (n, a, f) in enumerate(numbers)]
    if len(costs) < stages:
        return
    split = balanced_split(costs, stages)
    assert sum(split) == len(costs)
    assert len(split) == stages
    assert min(split) >= 1


def test_what_takes_long_and_what_holds_much_both_count() -> None:
    long = [PartCost("a", trained=1, flops=90), *(PartCost("b", trained=1, flops=10) for _ in range(9))]
    assert balanced_split(long, 2, optimizer_bytes=0) == (1, 9)
    large = [*(PartCost("b", trained=1, parameters=10) for _ in range(9)), PartCost("a", trained=1, parameters=90)]
    assert balanced_split(large, 2, optimizer_bytes=0) == (9, 1)
    held = [PartCost("a", trained=1, activations=100)] * 6
    assert balanced_split(held, 2, in_flight=[2, 1], optimizer_bytes=0) == (2, 4)
    assert balanced_split(held, 2, in_flight=[1, 1], optimizer_bytes=0) == (3, 3)


def test_a_stage_without_anything_to_train_is_not_made() -> None:
    costs = [PartCost("a", trained=1), PartCost("b"), PartCost("c"), PartCost("d", trained=1)]
    assert balanced_split(costs, 2) in {(1, 3), (2, 2), (3, 1)}
    with pytest.raises(ValueError, match="this model has 2 trained of 4 parts for 3 stages. Set fewer stages"):
        balanced_split(costs, 3)


@pytest.mark.parametrize(("schedule", "expected"), [("naive", [1, 1, 1, 1]), ("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1])])
def test_each_schedule_keeps_its_own_number_of_micro_batches(schedule: str, expected: list[int]) -> None:
    assert [in_flight(schedule, stage, 4, 6) for stage in range(4)] == expected
    assert in_flight(schedule, 0, 4, 1) == 1


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_batch_is_its_micro_batches_one_after_the_other(number: int, size: int) -> None:
    batch = {"x": torch.arange(number * size * 3).view(-1, 3), "y": (torch.arange(number * size), "text", 5)}
    pieces = split_batch(batch, number)
    assert len(pieces) == number
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch["x"])
    assert torch.equal(torch.cat([piece["y"][0] for piece in pieces]), batch["y"][0])  # type: ignore[arg-type]
    assert all(piece["y"][1:] == ("text", 5) for piece in pieces)


@pytest.mark.parametrize(
    "batch", [torch.zeros(10, 2), (torch.zeros(4, 2), torch.zeros(10)), torch.zeros(())], ids=["10", "one of two", "scalar"]
)
def test_a_batch_that_micro_batches_do_not_divide_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"4 do not divide a tensor of shape \((10.*)?\). Set micro_batches to a divisor"):
        split_batch(batch, 4)


# What is refused


def words(**options: Any) -> Pipeline:
    return Pipeline(Words(), options.pop("stages", 2), **{"loss": loss_of, "example": batch_of(0, 0, 3), "micro_batches": 4, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "zero bubble"}, "A schedule is one of '1f1b', 'gpipe', 'naive', got 'zero bubble'"),
        ({"stages": 1}, "at least 2 stages, and ranks are a multiple of them, got stages=1 in 2 ranks"),
        ({"stages": 3}, "got stages=3 in 2 ranks"),
        ({"micro_batches": 0}, "at least 1, got 0; 4 times the stages leaves little idle time"),
        (
            {"micro_batches": 1},
            r"got micro_batches=1 for stages=2. Set micro_batches \(accumulation in a Recipe\) to at least 2, or schedule='g",
        ),
        ({"split": [8]}, r"how many of the 8 parts each of the 2 stages gets, at least 1, got \(8,\). Leave it out"),
        ({"split": [8, 0]}, r"got \(8, 0\)"),
        ({"split": [4, 5]}, r"got \(4, 5\)"),
        ({"chunked": True}, r"A loss in chunks takes model.hidden\(\) and model.head, and of Words the last part is 'head'"),
    ],
)
@pytest.mark.usefixtures("of_two")
def test_a_pipeline_that_would_hang_or_fail_later_is_refused_when_it_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        words(device="cpu", **options)


@pytest.mark.usefixtures("of_two")
def test_a_split_that_leaves_a_stage_nothing_to_train_is_refused() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="stage 0 would hold 0 alone, without a trained parameter. Give it more parts"):
        Pipeline(model, 2, loss=square, example=torch.ones(1, 2), micro_batches=2, split=(1, 2), device="cpu")


@pytest.mark.usefixtures("of_two")
def test_tensors_without_a_gradient_are_refused_where_torch_cannot_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MIXED", False)
    with pytest.raises(NotImplementedError, match=r"and here a torch.float32 tensor of shape \(2, 5, 8\) has none. Install"):
        Pipeline(Nested(), 2, loss=loss_of, example=batch_of(0, 0, 3), micro_batches=2, split=(1, 7), device="cpu")
    words(device="cpu")


@pytest.mark.usefixtures("of_two")
def test_stages_and_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one stage a rank, got stages=4 in 2 ranks. Launch as many, or take hybrid\(\)"):
        pipeline(Words(), 4)
    for stages in (2, 3, 0):
        with pytest.raises(ValueError, match=f"at least twice, got stages={stages} in 2 ranks. Launch ranks=2"):
            hybrid(Words(), stages)


@pytest.mark.parametrize("make", [pipeline, lambda model: hybrid(model, 2)])
def test_a_pipeline_outside_of_ranks_says_where_it_belongs(make: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"(pipeline|hybrid)\(\) needs a process group; call it in a function that vl.parallel.launch"):
        make(Words())


@pytest.mark.usefixtures("of_two")
def test_a_step_in_backward_is_refused() -> None:
    pipe = words(device="cpu")
    optimizer = step_in_backward(pipe.stage, lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match=r"Here these step in backward: embedding.weight, blocks.0.* more. Use an ordinary optimizer"):
        pipe.window([batch_of(0, i, 3) for i in range(4)])
    optimizer.remove()
    pipe.window([batch_of(0, i, 3) for i in range(4)])


def never(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return torch.zeros((), requires_grad=True), 1


def twice(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return loss_of(model, batch)[0] + loss_of(model, batch)[0], 1


def nosy(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model.head(model.embedding(batch[0])).flatten(0, 1), batch[1].flatten()), 1


@pytest.mark.usefixtures("of_two")
def test_a_loss_that_uses_more_than_one_call_of_the_model_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"calls model\(inputs\) once, and this one returned without. Call the model that is given"):
        words(device="cpu", loss=never)
    with pytest.raises(AttributeError, match=r"the loss asks it for 'head'. Let it call model\(inputs\) once"):
        words(device="cpu", loss=nosy)


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """This process is rank 1 of two: what it receives has no meaning."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("second_of_two")
def test_a_second_call_of_the_model_is_noticed_in_the_last_stage() -> None:
    pipe = words(device="cpu", loss=twice)
    with pytest.raises(RuntimeError, match="the loss calls its model a second time. Let it call"):
        pipe.window([batch_of(0, i, 3) for i in range(4)])
    with pytest.raises(RuntimeError, match="this one returned without"):
        words(device="cpu").window([batch_of(0, i, 3) for i in range(4)], loss=never)


@pytest.mark.usefixtures("of_two")
def test_what_a_stage_raises_arrives_as_it_is() -> None:
    def odd(size: int) -> Iterator[Batch]:
        for i in range(size):
            ids, labels = batch_of(0, i, 3)
            yield ids[: 2 - i], labels

    with pytest.raises(ValueError, match=r"the input of micro-batch 2 is int64 \(1, 5\), and was to be int64 \(2, 5\). Pad"):
        words(device="cpu").window(odd(2))
    with pytest.raises(ValueError, match="windows of 4 micro-batches, got 1"):
        words(device="cpu").window(odd(1))
    pipe = words(device="cpu")
    pipe.stage.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        pipe.window([batch_of(0, i, 3) for i in range(4)])


@pytest.mark.usefixtures("of_two")
def test_linears_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="2 do not divide out_features=3. Use a size that they divide"):
        ColumnParallelLinear(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="2 do not divide in_features=3"):
        RowParallelLinear(nn.Linear(3, 4))
    assert RowParallelLinear(nn.Linear(4, 4, bias=False)).bias is None


# Timelines


def test_idle_time_is_what_is_not_work() -> None:
    works = [Work(0, 0, "forward", 0, 0.0, 1.0), Work(1, 1, "forward", 0, 1.0, 2.0), Work(0, 0, "backward", 0, 3.0, 4.0)]
    timeline = Timeline(tuple(works))
    assert timeline.seconds == 4.0
    assert timeline.idle == {0: 0.5, 1: 0.75}
    assert [work.seconds for work in timeline.of(1)] == [1.0]
    assert Timeline().seconds == 0.0
    assert Timeline().idle == {}


@given(st.integers(1, 8), st.integers(1, 32))
def test_more_micro_batches_leave_less_idle_time(stages: int, micro_batches: int) -> None:
    """Counted out for GPipe: a stage begins its m forwards `stage` late, and ends its backwards as late before the others."""
    works = []
    for stage, i in itertools.product(range(stages), range(micro_batches)):
        works.append(Work(stage, stage, "forward", i, stage + i, stage + i + 1))
        start = stages + micro_batches - 1 + (stages - 1 - stage) + i
        works.append(Work(stage, stage, "backward", i, start, start + 1))
    for share in Timeline(tuple(works)).idle.values():
        assert share == pytest.approx(bubble(stages, micro_batches))
