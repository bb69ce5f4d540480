"""Data parallelism on real gloo ranks: the same losses and gradients as one process on the same global batch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import vramlab as vl
from vramlab.memory.trace import MemoryTrace
from vramlab.parallel import RankWindow, ddp, launch, unused_parameters, windows
from vramlab.parallel.data import begin_with_zeros
from vramlab.techniques import Window, checkpoint_blocks, step_in_backward

VOCABULARY, WIDTH, LENGTH, SIZE = 11, 8, 5, 2
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
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(rank: int, number: int, kept: int) -> Batch:
    """Micro-batch ``number`` of a rank, of which ``kept`` tokens count."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    ids, labels = torch.randint(VOCABULARY, (2, SIZE, LENGTH), generator=generator)
    labels.view(-1)[kept:] = IGNORED
    return ids, labels


def items_of(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Case:
    """One way to train; what differs is how, never what comes out."""

    k: int = 1
    tied: bool = False
    frozen: bool = False
    checkpointed: bool = False
    amp: bool = False
    dtype: torch.dtype = torch.float32
    clip: float | None = None
    known: bool = True
    """Whether a window's items are counted before it begins."""
    kept: Callable[[int, int], int] = lambda rank, number: SIZE * LENGTH
    """Tokens that count in micro-batch ``number`` of a rank."""
    micro_batches: Callable[[int, int], int] = lambda rank, k: STEPS * k
    in_place: bool = False
    """Whether gradients are set to zero in DDP's buckets, and not to None."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = Words(self.tied).to(self.dtype)
        if self.frozen:
            model.embedding.requires_grad_(False)
            model.blocks[0].up.requires_grad_(False)
        if self.checkpointed:
            checkpoint_blocks(model)
        return model

    def batches(self, rank: int) -> list[Batch]:
        return [batch_of(rank, i, self.kept(rank, i)) for i in range(self.micro_batches(rank, self.k))]


def unlike(rank: int, number: int) -> int:
    """Tokens that count: other numbers in each micro-batch, none at all in some."""
    return (3 * rank + 5 * number + 2 * rank * number) % (SIZE * LENGTH - 1)


CASES = {
    "plain": Case(),
    "each token weighs the same": Case(kept=lambda rank, number: unlike(rank + 1, number)),
    "accumulation": Case(k=3),
    "accumulation, uneven tokens": Case(k=3, kept=unlike),
    "accumulation, uneven tokens counted on the way": Case(k=3, kept=unlike, known=False),
    "no token at all in the first micro-batches": Case(k=2, known=False, kept=lambda rank, number: 7 * (number % 2)),
    "nothing counts anywhere": Case(k=2, known=False, kept=lambda rank, number: 0),
    "accumulation in the buckets": Case(k=3, kept=unlike, in_place=True),
    "accumulation in the buckets, frozen and tied": Case(k=2, kept=unlike, known=False, frozen=True, tied=True, in_place=True),
    "bf16 parameters, set to zero": Case(k=3, dtype=torch.bfloat16, kept=unlike, in_place=True),
    "amp-bf16": Case(k=2, amp=True, kept=unlike),
    "bf16 parameters": Case(k=3, dtype=torch.bfloat16, known=False, kept=unlike),
    "bf16 parameters, ranks with fewer micro-batches": Case(
        k=3, dtype=torch.bfloat16, kept=unlike, micro_batches=lambda rank, k: 1 if rank % 2 else STEPS * k
    ),
    "checkpointed blocks": Case(k=2, checkpointed=True),
    "checkpointed and tied": Case(k=2, checkpointed=True, tied=True),
    "frozen": Case(k=2, frozen=True),
    "tied": Case(k=2, tied=True),
    "clipped": Case(k=2, clip=0.05, kept=unlike),
    "ranks with fewer micro-batches": Case(k=2, kept=unlike, micro_batches=lambda rank, k: STEPS * k - (rank % 2)),
    "ranks that run out windows earlier": Case(k=2, micro_batches=lambda rank, k: STEPS * k if rank == 0 else 1),
}


@dataclass
class Outcome:
    """What training gave on one rank, or in one process."""

    losses: list[float]
    counts: list[int]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    reductions: list[int]
    """How often gradients were sent, a window."""


def train(case: Case, model: nn.Module, parts: Iterator[Window[Batch]], reductions: Callable[[], int] = lambda: 0) -> Outcome:
    """The loop a user writes; ``parts`` are windows, of one process or of a rank."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    outcome = Outcome([], [], [], {}, [])
    for window in parts:
        before = reductions()
        window.open(model.parameters())
        for batch in window:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.amp):
                total = loss_of(model, batch)
            window.share(total, None if case.known else items_of(batch)).backward()
        window.close(model.parameters())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        outcome.gradients.append({name: p.grad.clone() for name, p in plain(model).named_parameters() if p.grad is not None})
        outcome.losses.append(window.loss)
        outcome.counts.append(window.count)
        outcome.reductions.append(reductions() - before)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not case.in_place)
    outcome.parameters = {name: p.detach().clone() for name, p in plain(model).named_parameters()}
    return outcome


def plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def in_rank(case: Case, group: Any) -> Outcome:
    sent: list[int] = []

    def counted(state, bucket):  # DDP compares annotations with the types themselves, and here they are text
        if bucket.is_last():
            sent.append(1)
        return default_hooks.allreduce_hook(None, bucket)

    model = ddp(case.model(), process_group=group)
    model.register_comm_hook(None, counted)
    batches = case.batches(dist.get_rank(group))
    if case.known:
        parts: Any = windows(batches, case.k, items_of, model=model)
    else:
        parts = (RankWindow(case.k, batches=batches[i * case.k : (i + 1) * case.k], model=model) for i in range(STEPS))
    return train(case, model, parts, lambda: len(sent))


def in_one_process(case: Case, ranks: int) -> Outcome:
    """Each window holds what all ranks' windows hold together."""
    ours = [case.batches(rank) for rank in range(ranks)]
    together = [[batch for batches in ours for batch in batches[i * case.k : (i + 1) * case.k]] for i in range(STEPS)]
    return train(case, case.model(), (Window(len(part), items=sum(map(items_of, part)), batches=part) for part in together))


def recorded(bucket_view: bool, group: Any) -> MemoryTrace:
    """A trace of a micro-batch whose gradients are added to others', on this rank, when the buckets have their final order."""
    torch.manual_seed(0)
    model = ddp(Words(), gradient_as_bucket_view=bucket_view, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, batch_of(0, 0, 6)).backward()
        optimizer.step()
    with vl.record(model, optimizer) as trace:
        loss_of(model, batch_of(0, 1, 6)).backward()
        optimizer.step()
    return trace


def uneven(how: Any, group: Any) -> list[int] | str:
    """Micro-batches in each window where rank 0 has 5 and every other one 2, with k = 2; or the error's text."""
    model = ddp(Words(), process_group=group)
    batches = [batch_of(dist.get_rank(group), i, 3) for i in range(5 if dist.get_rank(group) == 0 else 2)]
    sizes = []
    try:
        for window in windows(batches, 2, items_of, model=model, uneven=how):
            for batch in window:
                window.share(loss_of(model, batch)).backward()
            sizes.append(len(window))
    except ValueError as error:
        return str(error)
    return sizes


def without_data(group: Any) -> str:
    batches = [batch_of(0, 0, 3)] if dist.get_rank(group) == 0 else []
    with pytest.raises(ValueError, match="micro-batch") as caught:
        list(windows(batches, 1, items_of, model=ddp(Words(), process_group=group)))
    return str(caught.value)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def normed(group: Any) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]]:
    """The warnings of ddp(), and weights and buffers after wrapping and after two steps' forwards, of a model of each rank's own."""
    torch.manual_seed(10 + dist.get_rank(group))
    model = Normed()
    model.norm.running_mean.fill_(dist.get_rank(group) + 1.0)
    with pytest.warns(UserWarning, match="BatchNorm") if dist.get_rank(group) == 0 else torch.enable_grad() as caught:
        wrapped = ddp(model, process_group=group)
    wrapped_state = [value.clone() for value in model.state_dict().values()]
    for _ in range(2):
        wrapped(torch.randn(4, 3)).sum().backward()
    model.eval()  # the buffers of rank 0 travel before a forward, and this one does not change them
    wrapped(torch.randn(4, 3))
    return [str(w.message) for w in caught or []], wrapped_state, [value.clone() for value in model.state_dict().values()]


def normed_by_hand(group: Any) -> list[torch.Tensor]:
    """Buffers of a bf16 model after a window whose gradients DDP did not send, and a forward that does not change them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).bfloat16()
    model.register_buffer("seen", torch.zeros(1))
    wrapped = ddp(model, process_group=group)
    window: RankWindow[torch.Tensor] = RankWindow(2, batches=[torch.randn(2, 3, dtype=torch.bfloat16) for _ in range(2)], model=wrapped)
    window.open(model.parameters())
    for x in window:
        window.share(wrapped(x).sum(), 2).backward()
        model.seen += dist.get_rank(group) + 1
    window.close(model.parameters())
    wrapped(torch.zeros(1, 3, dtype=torch.bfloat16))
    return [model.seen.clone()]


def shown_by(group: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {name: in_rank(case, group) for name, case in CASES.items()}
    shown["bucket views"], shown["own gradients"] = recorded(True, group), recorded(False, group)
    shown["uneven"] = {how: uneven(how, group) for how in ("fill", "stop", "refuse")}
    shown["without data"], shown["normed"] = without_data(group), normed(group)
    shown["normed by hand"] = normed_by_hand(group)
    return shown


def exhibits() -> dict[int, dict[str, Any]]:
    """All that one launch of four real ranks is asked for, as four and as two pairs; starting them costs the most."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {4: shown_by(None), 2: shown_by(pairs[dist.get_rank() // 2])}


@pytest.fixture(scope="module")
def launched() -> list[dict[int, dict[str, Any]]]:
    return launch(exhibits, ranks=4, device="cpu", timeout=120)


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, launched: list[dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [shown[request.param] for shown in launched[: request.param]]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_ranks_learn_what_one_process_learns_on_the_same_batch(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    expected = in_one_process(case, len(ranks))
    # Sums in another order; in bf16 a gradient is rounded to 8 bits, at another scale where the divisor is another.
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if case.dtype is torch.bfloat16 else {"rtol": 2e-5, "atol": 1e-7}
    if case.amp:
        tolerance = {"rtol": 1e-4, "atol": 1e-6}
    for shown in ranks:
        outcome: Outcome = shown[name]
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-2 if case.dtype is torch.bfloat16 else 1e-5)
        assert outcome.counts == expected.counts
        for ours, theirs in zip(outcome.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)
        torch.testing.assert_close(outcome.parameters, expected.parameters, **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_step_with_the_same_bits(name: str, ranks: list[dict[str, Any]]) -> None:
    first: Outcome = ranks[0][name]
    for shown in ranks[1:]:
        torch.testing.assert_close(shown[name].gradients, first.gradients, rtol=0, atol=0)
        torch.testing.assert_close(shown[name].parameters, first.parameters, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype is not torch.bfloat16])
def test_gradients_travel_once_a_window(name: str, ranks: list[dict[str, Any]]) -> None:
    assert [shown[name].reductions for shown in ranks] == [[1] * len(ranks[0][name].losses)] * len(ranks)


def test_frozen_parameters_stay_as_they_were(ranks: list[dict[str, Any]]) -> None:
    case = CASES["frozen"]
    before = dict(case.model().named_parameters())
    for shown in ranks:
        for name, parameter in shown["frozen"].parameters.items():
            assert torch.equal(parameter, before[name]) == (not before[name].requires_grad), name


def test_a_trace_comes_back_from_each_rank_and_shows_the_buckets(ranks: list[dict[str, Any]]) -> None:
    nbytes = sum(p.numel() * 4 for p in Words().parameters())
    for shown in ranks:
        views, own = shown["bucket views"], shown["own gradients"]
        held = [(b.parameters, b.gradients, b.buckets) for b in (views.breakdown(), own.breakdown())]
        assert held == [(nbytes, 0, nbytes), (nbytes, nbytes, nbytes)]
        assert own.peak - views.peak == nbytes  # the gradients, beside the buckets


def test_a_sampler_that_is_told_the_epoch_deals_out_everything_in_another_order_each_time() -> None:
    """What the docstring of windows() sends people to: all ranks seed it alike, and tell it the epoch (user case DD-11)."""
    samplers = [DistributedSampler(range(10), num_replicas=2, rank=rank, seed=3) for rank in range(2)]
    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in samplers])
        assert sorted(itertools.chain(*epochs[-1])) == list(range(10))
    assert epochs[0] != epochs[1]


def test_a_rank_that_has_run_out_waits_for_nobody(ranks: list[dict[str, Any]]) -> None:
    assert [shown["uneven"]["fill"] for shown in ranks] == [[2, 2, 1], *[[2, 1, 1]] * (len(ranks) - 1)]
    assert [shown["uneven"]["stop"] for shown in ranks] == [[2]] * len(ranks)


def test_uneven_ranks_are_refused_in_all_ranks_with_what_each_has(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        assert re.search("uneven='refuse'.* in window 2 rank 0 has 2, rank 1 has 0.*DistributedSampler", shown["uneven"]["refuse"])


def test_a_rank_without_any_data_is_refused_in_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for shown in ranks:
        assert re.search("at least one micro-batch, and rank 0 has 1, rank 1 has 0.*fewer ranks", shown["without data"])


def test_weights_and_buffers_come_from_rank_0(ranks: list[dict[str, Any]]) -> None:
    for moment in (1, 2):
        for shown in ranks[1:]:
            torch.testing.assert_close(shown["normed"][moment], ranks[0]["normed"][moment], rtol=0, atol=0)


def test_buffers_come_from_rank_0_also_where_ddp_does_not_send_the_gradients(ranks: list[dict[str, Any]]) -> None:
    assert [shown["normed by hand"] for shown in ranks] == [[torch.tensor([2.0])]] * len(ranks)


def test_batch_norm_is_noted_once(ranks: list[dict[str, Any]]) -> None:
    notes = [shown["normed"][0] for shown in ranks]
    assert notes[1:] == [[]] * (len(ranks) - 1)
    assert len(notes[0]) == 1
    assert re.search(r"BatchNorm \(norm\).*one rank's micro-batch.*SyncBatchNorm", notes[0][0])


# What one process alone can show


class Branching(nn.Module):
    """One layer is never called, one's output is left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.left_out, self.frozen = (nn.Linear(2, 2) for _ in range(4))
        self.norm = nn.BatchNorm1d(2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(F.dropout(x, 0.5))
        self.left_out(x)
        return self.norm(self.used(x))


def branching_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(3, 2)).square().sum()


UNUSED = ["never.weight", "never.bias", "left_out.weight", "left_out.bias"]


def test_parameters_without_a_gradient_are_named() -> None:
    assert unused_parameters(Branching(), branching_loss) == UNUSED
    assert unused_parameters(Words(), lambda model: (loss_of(model, batch_of(0, 0, 3)), 3)) == []


def test_the_dry_run_leaves_no_trace() -> None:
    model = Branching()
    model.used.weight.grad = torch.full((2, 2), 5.0)
    before, random, gradient = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state(), model.used.weight.grad
    unused_parameters(model, branching_loss)
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.used.weight.grad is gradient
    assert torch.equal(gradient, torch.full((2, 2), 5.0))
    assert model.used.bias.grad is None


def test_the_dry_run_leaves_no_trace_when_it_fails() -> None:
    model = Branching()
    gradient = model.used.weight.grad = torch.full((2, 2), 5.0)

    def fails(model: nn.Module) -> torch.Tensor:
        branching_loss(model).backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        unused_parameters(model, fails)
    assert model.used.weight.grad is gradient
    assert torch.equal(model.norm.running_mean, torch.zeros(2))


@pytest.mark.usefixtures("alone")
def test_unused_parameters_are_refused_before_wrapping_or_found_on_request() -> None:
    with pytest.raises(ValueError, match=r"4 got none in the dry run: never.weight, .*left_out.bias\. Freeze.*find_unused_parameters=True"):
        ddp(Branching().eval(), dry_run=branching_loss)
    model = ddp(Branching().eval(), dry_run=branching_loss, find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
    assert ddp(Words(), dry_run=lambda model: loss_of(model, batch_of(0, 0, 3))).gradient_as_bucket_view


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (lambda: 3, TypeError, r"ddp\(\) wraps a torch.nn.Module, got int; write"),
        (nn.ReLU, ValueError, "no parameter of this model requires any: it has 0 parameters.*Unfreeze"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), ValueError, "it has 2 parameters, all frozen. Unfreeze"),
        (Lazy, ValueError, "these have none yet: linear.weight, linear.bias. Call the model once"),
        (lambda: DistributedDataParallel(nn.Linear(2, 2)), ValueError, "Here all of it is a DistributedDataParallel; give its .module"),
        (lambda: nn.Sequential(nn.ReLU(), DistributedDataParallel(nn.Linear(2, 2))), ValueError, "Here '1' is a Distr"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_what_ddp_cannot_wrap_is_refused_with_a_remedy(model: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ddp(model())


def test_ddp_outside_of_ranks_says_where_it_belongs() -> None:
    with pytest.raises(RuntimeError, match=r"needs a process group; call it in a function that vl.parallel.launch"):
        ddp(Words())


@pytest.mark.parametrize("k", [0, -1, True, 1.0])
def test_a_window_of_no_micro_batch_is_refused(k: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"at least 1, got {k!r}; 1 is a step for each")):
        windows([], k, model=Words())


def test_an_unknown_way_to_end_is_refused() -> None:
    with pytest.raises(ValueError, match="uneven is 'fill', 'stop' or 'refuse', got 'join'"):
        windows([], 1, model=Words(), uneven="join")  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_static_graph_is_refused_where_backward_is_not_always_synchronised() -> None:
    model = ddp(Words(), static_graph=True)
    for attempt in (lambda: windows([], 2, model=model), lambda: RankWindow(2, model=model)):
        with pytest.raises(ValueError, match="static_graph=True learns the graph from the first backward.*Leave static_graph=False"):
            attempt()
    assert list(windows([], 1, model=model)) == []


@pytest.mark.usefixtures("alone")
def test_a_step_in_backward_is_refused_before_and_after_wrapping() -> None:
    model = Words()
    wrapped = ddp(model)
    optimizer = step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    for attempt in (lambda: ddp(model), lambda: RankWindow(1, model=wrapped), lambda: list(windows([0], 1, model=wrapped))):
        with pytest.raises(ValueError, match=r"before it is averaged.* step in backward: .*embedding.weight.* more\. Use an ordinary"):
            attempt()
    optimizer.remove()
    RankWindow(1, model=wrapped)


@pytest.mark.usefixtures("alone")
def test_a_window_that_counts_on_the_way_must_be_told() -> None:
    window: RankWindow[Batch] = RankWindow(1, model=ddp(Words()))
    with pytest.raises(ValueError, match="does not know how many items it holds"):
        window.share(torch.ones((), requires_grad=True))


def storages(model: nn.Module) -> list[int]:
    """Where the gradients lie."""
    return [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("alone")
def test_gradients_of_zeros_become_parts_of_the_buckets_whenever_those_are_made() -> None:
    plain = CASES["frozen"].model()
    begin_with_zeros(plain.parameters())
    trained = [p for p in plain.parameters() if p.requires_grad]
    assert len(storages(plain)) == len(trained)
    assert all(p.grad is not None and p.grad.untyped_storage().nbytes() == p.element_size() for p in trained)
    model = ddp(plain)
    first = storages(plain)
    assert len(set(first)) == 1  # before any backward
    with model.no_sync():
        loss_of(model, batch_of(0, 0, 10)).backward()
    assert storages(plain) == first
    loss_of(model, batch_of(0, 1, 10)).backward()
    assert storages(plain) == first
    begin_with_zeros(plain.parameters())
    with model.no_sync():
        out = loss_of(model, batch_of(0, 0, 10))
        assert len(set(storages(plain))) == 1
        assert all(not p.grad.any() for p in trained if p.grad is not None)
        final = storages(plain)
        out.backward()
    loss_of(model, batch_of(0, 1, 10)).backward()
    assert storages(plain) == final
    alone = CASES["frozen"].model()
    sum(loss_of(alone, batch_of(0, i, 10)) for i in range(2)).backward()
    torch.testing.assert_close([p.grad for p in trained], [p.grad for p in alone.parameters() if p.requires_grad])


@pytest.mark.usefixtures("alone")
def test_micro_batches_without_a_count_weigh_the_same() -> None:
    batches = [batch_of(0, i, 10) for i in range(2)]
    model, single = ddp(CASES["plain"].model()), CASES["plain"].model()
    for window in windows(batches, 2, model=model):
        for batch in window:
            window.share(loss_of(model, batch)).backward()
    (sum(loss_of(single, batch) for batch in batches) / 2).backward()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
