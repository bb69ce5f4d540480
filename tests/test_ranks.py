"""Training and recording in several ranks: what train(), run(), record() and Precision do there, from one start of two ranks."""

import dataclasses
import importlib
import importlib.util
import io
import itertools
import json
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vramlab as vl
from vramlab import experiments
from vramlab.command import main
from vramlab.memory.trace import Category, DeviceCounters, MemoryTrace
from vramlab.parallel import rank as rank_module
from vramlab.parallel.choose import choose_way
from vramlab.parallel.data import DataParallel
from vramlab.techniques.precision import Precision
from vramlab.training import StepReport, train

launching: Any = importlib.import_module("vramlab.parallel.launch")  # the package has a function of that name

CPU = torch.device("cpu")
TASK = vl.tasks.gpt("nano")
DDP = vl.Recipe(parallel="ddp", ranks=2, micro_batch=4)
PIPELINE = vl.Recipe(parallel="pipeline", ranks=2, stages=2, micro_batch=4, accumulation=4)
PARAMETERS = sum(p.nbytes for p in TASK.model().parameters())


# In the ranks


def same_model_other_numbers() -> dict[str, Any]:
    """The models of all ranks, and the random numbers each draws afterwards."""
    torch.manual_seed(dist.get_rank())  # loading this file has drawn some
    way = choose_way(DDP, CPU)
    with way.building():
        weights, drawn = torch.randn(3), (random.random(), float(np.random.rand()))
    return {"weights": weights, "drawn": drawn, "after": (float(torch.rand(1)), random.random(), float(np.random.rand()))}


def clipped(infinite_in: int | None = None, copies: bool = False) -> dict[str, Any]:
    """A step of a model whose first parameter is in rank 0 and whose second is in rank 1."""
    rank = dist.get_rank()
    mine = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    given = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    parameters = [mine[rank]] + ([mine[0]] if copies and rank == 1 else [])
    precision = Precision("amp-fp16", loss_scale=4.0)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    precision.backward(torch.stack([(p * given[0 if p is mine[0] else 1]).sum() for p in parameters]).sum())
    if infinite_in == rank:
        assert parameters[0].grad is not None
        parameters[0].grad[0] = float("inf")
    stepped = precision.step(optimizer, 1.0, group=dist.group.WORLD, copies=parameters[1:])
    return {"stepped": stepped, "parameters": [p.detach() for p in parameters], "scale": precision.scale}


def sharded_traces() -> list[MemoryTrace]:
    """Three recorded steps of four equal blocks that FSDP shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    traces = []
    for _ in range(3):
        with vl.record(model, optimizer) as trace:
            model(torch.randn(8, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        traces.append(trace)
    return traces


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ddp_steps(optimizer: str, accumulation: int) -> list[tuple[float, MemoryTrace]]:
    torch.manual_seed(dist.get_rank())
    recipe = DDP.with_(optimizer=optimizer, optimizer_impl="loop", accumulation=accumulation)
    with closing(train(TASK, recipe, "cpu", record_every=1)) as steps:
        return [(report.loss, report.memory) for report in itertools.islice(steps, 3) if report.memory is not None]


def adding_up(optimizer: str) -> dict[str, list[tuple[float, MemoryTrace]]]:
    """Steps of one micro-batch, of two, and of two whose gradients are made anew in each window, as PyTorch does it by itself."""
    found = {"one": ddp_steps(optimizer, 1), "two": ddp_steps(optimizer, 2)}
    ours = DataParallel._adds_up_in_buckets
    try:
        DataParallel._adds_up_in_buckets = lambda self, model: False  # type: ignore[method-assign]
        return found | {"beside": ddp_steps(optimizer, 2)}
    finally:
        DataParallel._adds_up_in_buckets = ours  # type: ignore[method-assign]


class Small(nn.Module):
    """An embedding and a layer; what is unused, sparse or of an unknown shape is asked for, and what DDP ignores."""

    def __init__(self, unused: bool = False, sparse: bool = False, lazy: bool = False, ignored: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 8, sparse=sparse), nn.LazyLinear(20) if lazy else nn.Linear(8, 20)
        if unused:
            self.unused = nn.Linear(8, 8)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, list(ignored))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(ids))


def small_loss(model: nn.Module, ids: torch.Tensor, chunks: int = 1) -> tuple[torch.Tensor, int]:
    return sum(part.square().sum() for part in model(ids).chunk(chunks)), ids.numel()


def leading_nowhere(model: nn.Module, ids: torch.Tensor, chunks: int = 1) -> tuple[torch.Tensor, int]:
    return torch.ones(3, requires_grad=True).sum(), 3


def leading_nowhere_later() -> Callable[..., tuple[torch.Tensor, int]]:
    """From the second window on."""
    asked = itertools.count()
    return lambda model, ids, chunks=1: (small_loss if next(asked) < 2 else leading_nowhere)(model, ids, chunks)


def small_task(model: Callable[[], nn.Module], loss: Callable[..., tuple[torch.Tensor, int]] = small_loss) -> vl.Task:
    return vl.Task(model, lambda size, device: torch.randint(20, (size, 4), device=device), loss, "small", chunked=True)


TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sparse": ({"sparse": True}, {"optimizer": "sgd"}),
    "sparse, zero1": ({"sparse": True}, {"optimizer": "sgd", "parallel": "zero1"}),
    "ignored": ({"ignored": ("layer.bias",)}, {}),
    "ignored, loss in chunks": ({"ignored": ("layer.bias",)}, {"loss_chunks": 2}),
    "ignored, zero1": ({"ignored": ("layer.bias",)}, {"parallel": "zero1"}),
}
"""What DDP adopts only in part: options of the model, and of the recipe."""


def trained(name: str, in_buckets: bool = True) -> dict[str, torch.Tensor]:
    """The parameters after three steps of two micro-batches."""
    options, recipe = TRAINED[name]
    torch.manual_seed(0)
    model = Small(**options)
    torch.manual_seed(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        if not in_buckets:
            patch.setattr(DataParallel, "_adds_up_in_buckets", lambda self, model: False)
        with closing(train(small_task(lambda: model), DDP.with_(accumulation=2, **recipe), "cpu", record_every=None)) as steps:
            list(itertools.islice(steps, 3))
    return {name: p.detach() for name, p in model.named_parameters()}


REFUSED: dict[str, tuple[dict[str, Any], Callable[..., Any], int, str]] = {
    "unused": (
        {"unused": True},
        lambda: small_loss,
        1,
        "RuntimeError: DDP sends gradients when backward has reached every parameter, and the last of this window did not reach 2 of 5: "
        "unused.weight, unused.bias. Freeze them with requires_grad_(False), or let the loss depend on them.",
    ),
    "nowhere": ({}, lambda: leading_nowhere, 1, "RuntimeError: backward() has run and no parameter of the optimizer has a gradient: "),
    "nowhere later": ({}, leading_nowhere_later, 2, "RuntimeError: backward() has run and no parameter of the optimizer has a gradient: "),
    "lazy": ({"lazy": True}, lambda: small_loss, 1, "ValueError: DDP needs the shapes of all parameters, and these have none yet: layer"),
}
"""What is refused in DDP's buckets too: options of the model, its loss, the step, the message."""


def refused(name: str, parallel: str) -> tuple[str, int, bool]:
    """The error, the step it came in, and whether that step moved a parameter."""
    options, loss, _, _ = REFUSED[name]
    torch.manual_seed(0)  # DDP sends out rank 0's weights, and that moves none
    model = Small(**options)
    done, before = 0, [p.detach().clone() for p in model.parameters() if name != "lazy"]

    def trains() -> None:
        nonlocal done, before
        for report in train(small_task(lambda: model, loss()), DDP.with_(accumulation=2, parallel=parallel), "cpu", record_every=None):
            done, before = report.step, [p.detach().clone() for p in model.parameters()]
            assert done < 3

    error = said(trains)
    return error, done + 1, any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=name != "lazy"))


def work() -> dict[str, Any]:
    return {
        "trained": {name: (trained(name), trained(name, in_buckets=False)) for name in TRAINED},
        "refused": {(name, parallel): refused(name, parallel) for name in REFUSED for parallel in ("ddp", "zero1")},
        "building": same_model_other_numbers(),
        "clipped": clipped(),
        "infinite": clipped(infinite_in=1),
        "copies": clipped(copies=True),
        "sharded": sharded_traces(),
        "wrong size": said(lambda: choose_way(DDP.with_(ranks=3), CPU)),
        "ddp": {optimizer: adding_up(optimizer) for optimizer in ("adamw", "sgd")},
        "run": vl.run(TASK, DDP, steps=1, progress=False).losses,
        "pipeline": vl.run(TASK, PIPELINE, steps=2, progress=False).trace,
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return vl.parallel.launch(work, ranks=2, device="cpu", timeout=180)


def test_all_ranks_make_the_same_model_and_draw_other_numbers_afterwards(ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["building"] for rank in ranks)
    assert torch.equal(one["weights"], two["weights"])
    assert one["drawn"] == two["drawn"]
    assert all(a != b for a, b in zip(one["after"], two["after"], strict=True))


def test_rank_0_goes_on_with_its_numbers_as_one_process_would(ranks: list[dict[str, Any]]) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        assert torch.equal(torch.randn(3), ranks[0]["building"]["weights"])
        assert float(torch.rand(1)) == ranks[0]["building"]["after"][0]


def test_the_norm_is_that_of_all_ranks_gradients(ranks: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(ranks[0]["clipped"]["parameters"], [torch.tensor([-0.6, 0.0])])  # 3 of a norm of 5
    torch.testing.assert_close(ranks[1]["clipped"]["parameters"], [torch.tensor([-0.8])])


def test_a_copy_counts_once_in_the_norm_and_is_clipped_too(ranks: list[dict[str, Any]]) -> None:
    torch.testing.assert_close(ranks[0]["copies"]["parameters"], [torch.tensor([-0.6, 0.0])])
    torch.testing.assert_close(ranks[1]["copies"]["parameters"], [torch.tensor([-0.8]), torch.tensor([-0.6, 0.0])])


def test_an_infinite_gradient_in_one_rank_lets_all_skip_the_step_and_shrink_the_scale(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["infinite"] | {"parameters": 0} == {"stepped": False, "parameters": 0, "scale": 2.0}
        assert all(not p.any() for p in rank["infinite"]["parameters"])
        assert (rank["clipped"]["stepped"], rank["clipped"]["scale"]) == (True, 4.0)


def test_a_recorder_follows_the_parameters_that_fsdp_gathers_and_frees(ranks: list[dict[str, Any]]) -> None:
    block = 4 * (2 * 64 * 256 + 256 + 64)
    for rank in ranks:
        for step, trace in enumerate(rank["sharded"], 1):
            events = trace.events
            most = {c: int(np.cumsum(np.where(events.category == c, events.nbytes, 0)).max()) for c in Category}
            assert most[Category.PARAMETERS] == most[Category.GRADIENTS] == 2 * block  # half of four
            assert most[Category.OPTIMIZER_STATE] == 4 * block + 4 * 4 * 4  # and a counter for each of 16 parameters
            assert block <= most[Category.GATHERED_PARAMETERS] <= 2 * block  # the next is gathered while one works
            assert 0 < most[Category.COMMUNICATION] <= 3 * block
            assert most[Category.INPUTS] == 4 * 8 * 64
            if step > 1:  # all that was gathered has gone again
                assert trace.baseline == 2 * block + 4 * block + 4 * 4 * 4


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_micro_batches_add_up_in_the_buckets_of_ddp_and_cost_nothing(optimizer: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        one, two, beside = ([trace.peak for _, trace in rank["ddp"][optimizer][name]] for name in ("one", "two", "beside"))
        assert two == pytest.approx(one, abs=64)  # a few numbers of the window
        assert [b - t for b, t in zip(beside, two, strict=True)][1:] == pytest.approx([PARAMETERS] * 2, abs=64)
        for _, trace in rank["ddp"][optimizer]["two"]:
            gradients = np.where(trace.events.category == Category.GRADIENTS, trace.events.nbytes, 0)
            assert np.cumsum(gradients).max() < PARAMETERS / 3  # one after the other, and gone when it is added
            assert trace.breakdown().buckets == PARAMETERS
        assert rank["ddp"][optimizer]["beside"][1][1].breakdown().gradients == PARAMETERS


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_adds_up_in_the_buckets_is_the_same_to_the_bit(optimizer: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        two, beside = ([loss for loss, _ in rank["ddp"][optimizer][name]] for name in ("two", "beside"))
        assert two == beside
        assert len(set(two)) == 3


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_without_a_place_in_the_buckets_learn_as_they_do_without_zeros(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ours, theirs = rank["trained"][name]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    apart = [key for key, value in ranks[0]["trained"][name][0].items() if not torch.equal(value, ranks[1]["trained"][name][0][key])]
    # zero1 sends out what one rank's optimizer has moved
    assert apart == list(TRAINED[name][0].get("ignored", ()) if TRAINED[name][1].get("parallel") != "zero1" else ())


@pytest.mark.parametrize("parallel", ["ddp", "zero1"])
@pytest.mark.parametrize("name", REFUSED)
def test_zeros_in_the_buckets_hide_no_error_and_move_nothing(name: str, parallel: str, ranks: list[dict[str, Any]]) -> None:
    _, _, step, message = REFUSED[name]
    for rank in ranks:
        error, when, moved = rank["refused"][name, parallel]
        assert error.startswith(message)
        assert (when, moved) == (step, False)


def test_a_group_of_another_size_than_the_recipe_is_refused(ranks: list[dict[str, Any]]) -> None:
    right = "RuntimeError: The recipe shares the work between ranks=3, and the process group has 2. Launch as many, or set ranks=2."
    assert [rank["wrong size"] for rank in ranks] == [right, right]


def test_run_inside_a_rank_takes_part_in_one_run(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["run"] == ranks[1]["run"]


def test_a_recorder_tells_the_forwards_of_a_pipeline_from_its_backwards(ranks: list[dict[str, Any]]) -> None:
    """Else what later micro-batches keep for backward would pass for temporary."""
    one = vl.run(TASK, vl.Recipe(micro_batch=4, accumulation=4), steps=2, device="cpu", progress=False).breakdown.activations
    for stage, rank in enumerate(ranks):
        trace = rank["pipeline"]
        phases = trace.timeline()["phase"]
        assert ((phases == "forward") & (phases.shift() != "forward")).sum() == 3 + stage  # the first begins with two at once
        assert one * (0.85 if stage == 0 else 0.45) < trace.breakdown().activations < one


# From outside


def test_run_starts_the_ranks_and_keeps_what_each_measured() -> None:
    run = vl.run(TASK, DDP, steps=3, device="cpu", progress=False)
    assert (run.status, len(run.ranks), len(run.losses)) == ("finished", 2, 3)
    assert run.losses == run.ranks[1].losses
    assert run.trace in [rank.trace for rank in run.ranks]
    assert run.peak == max(rank.peak or 0 for rank in run.ranks)
    assert [rank.breakdown.buckets for rank in run.ranks] == [PARAMETERS, PARAMETERS]
    assert "ranks" in repr(run)
    assert run.throughput is not None


def then(action: Callable[[], None], *, rank: int) -> Any:
    """The task; in one rank something happens when all ranks have told of two steps and begin the third."""
    batches = itertools.count(1)

    def batch(size: int, device: torch.device) -> Any:
        if next(batches) == 3:
            dist.barrier()
            if dist.get_rank() == rank:
                action()
        return TASK.batch(size, device)

    return dataclasses.replace(TASK, batch=batch)


def ctrl_c(process: int) -> None:
    os.kill(process, signal.SIGINT)


def folder_of_the_launch() -> Path:
    from vramlab.parallel.rank import _followed  # here, as this travels with what it refers to

    return _followed[0][0]


class Bar:
    """Keeps what a progress bar shows."""

    def __init__(self, **options: Any) -> None:
        self.shown: list[str] = []
        self.disable = options["disable"]
        bars.append(self)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.shown.append(text)

    def update(self) -> None: ...


bars: list[Bar] = []


@pytest.fixture
def nobody_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No process is left behind, nor a file, nor a signal handler. ``tmp_path`` is where launch() makes its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def there() -> tuple[Any, ...]:
        return {p.pid for p in psutil.Process().children(recursive=True)}, sorted(tmp_path.iterdir()), signal.getsignal(signal.SIGINT)

    before = there()
    yield
    assert there() == before


@pytest.mark.usefixtures("nobody_stays")
def test_the_first_ctrl_c_ends_all_ranks_after_the_same_step() -> None:
    parent = os.getpid()
    run = vl.run(then(lambda: ctrl_c(parent), rank=1), DDP, steps=100_000, device="cpu", progress=False)
    assert 3 <= len(run.reports) < 100_000
    assert [len(rank.reports) for rank in run.ranks] == [len(run.reports)] * 2
    assert run.losses == run.ranks[1].losses
    assert [run.status, *(rank.status for rank in run.ranks)] == ["interrupted"] * 3


@pytest.mark.usefixtures("nobody_stays")
def test_the_second_ctrl_c_ends_all_ranks_at_once_and_keeps_what_they_had_finished() -> None:
    parent = os.getpid()

    def twice() -> None:
        ctrl_c(parent)
        while not (folder_of_the_launch() / "stop").exists():  # it has heard the first
            time.sleep(0.01)
        ctrl_c(parent)
        time.sleep(600)

    run = vl.run(then(twice, rank=0), DDP, steps=100_000, device="cpu", progress=False)
    assert [[report.step for report in one.reports] for one in (run, *run.ranks)] == [[1, 2]] * 3
    assert [run.status, *(rank.status for rank in run.ranks)] == ["interrupted"] * 3
    assert run.peak is not None
    assert run.device == run.ranks[0].device == CPU


@pytest.mark.usefixtures("nobody_stays")
def test_an_error_in_one_rank_carries_the_finished_steps_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramlab.experiments.tqdm", Bar)
    with pytest.raises(ZeroDivisionError) as caught:
        vl.run(then(lambda: print(1 // 0), rank=1), DDP, steps=100_000, device="cpu")
    run = caught.value.run
    assert [[report.step for report in one.reports] for one in (run, *run.ranks)] == [[1, 2]] * 3
    error = "ZeroDivisionError: integer division or modulo by zero"
    assert [run.status, *(rank.status for rank in run.ranks)] == [error, "stopped", error]
    assert caught.value.__notes__ == ["Raised in rank 1 of 2; the other ranks were stopped.", "2 finished steps are kept in error.run."]
    (bar,) = bars
    assert [re.sub("[0-9.]+ (MiB)", r"x \1", shown) for shown in bar.shown] == [f"loss {loss:.3f}, peak x MiB" for loss in run.losses]
    assert not bar.disable


def test_ctrl_c_before_the_ranks_have_begun_ends_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_when_it_starts(*args: Any, **kwargs: Any) -> Any:
        agent = start(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return agent

    start = launching.subprocess.Popen
    monkeypatch.setattr(launching.subprocess, "Popen", interrupted_when_it_starts)
    run = vl.run(TASK, DDP, device="cpu", progress=False)
    assert (run.status, run.reports, [rank.reports for rank in run.ranks]) == ("interrupted", [], [[], []])


# An agent without torch and without ranks, for what is tried often: it says so and goes on until it is ended, or gives results.
GOES_ON = """
import pathlib, subprocess, sys
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
for rank in "01":
    (folder / f"ready-{rank}").touch()
sys.stdin.read()
"""
RETURNS = """
import pathlib, pickle, sys
for rank in "01":
    (pathlib.Path(sys.argv[1]) / f"result-{rank}").write_bytes(pickle.dumps(int(rank)))
sys.stdin.read()
"""


def instead_of_the_agent(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "command", lambda role, folder, ranks: [sys.executable, "-c", text, folder])


def launched() -> tuple[list[int], bool]:
    return launching.launch(int, ranks=2, device="cpu"), False


def followed() -> tuple[list[int], bool]:
    return launching.follow(int, heard=lambda rank, value: None, ranks=2, device="cpu", seed=0)


@pytest.mark.usefixtures("nobody_stays")
@pytest.mark.parametrize(
    ("owner", "name"),
    [(launching._Job, "__init__"), (launching._Job, "_stop"), (launching._Output, "forward"), (tempfile.TemporaryDirectory, "cleanup")],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("call", [launched, followed])
def test_no_ctrl_c_is_lost_whenever_it_comes(
    call: Callable[[], tuple[list[int], bool]], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not came:
            came.append(True)
            signal.raise_signal(signal.SIGINT)
        return original(self, *args, **kwargs)

    came: list[bool] = []
    original = getattr(owner, name)
    instead_of_the_agent(RETURNS, monkeypatch)
    monkeypatch.setattr(owner, name, interrupted)
    try:
        results, noticed = call()
    except KeyboardInterrupt:
        noticed = True
    else:
        assert results == [0, 1]
    assert came == [True]
    assert noticed


@pytest.mark.usefixtures("nobody_stays")
@pytest.mark.parametrize("gap", [0.0005, 0.005])
@pytest.mark.parametrize("begins", ["call", "ready-1"])
@pytest.mark.parametrize("call", [launched, followed])
def test_however_fast_ctrl_c_is_repeated_nothing_stays(
    call: Callable[[], tuple[list[int], bool]], begins: str, gap: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside, over = True, threading.Event()

    def heard(number: int, frame: Any) -> None:
        if inside:
            raise KeyboardInterrupt

    def repeat() -> None:
        while not list(tmp_path.glob(f"vramlab-*/{begins}")):
            time.sleep(0.0005)
        while not over.wait(gap):
            ctrl_c(os.getpid())

    instead_of_the_agent(GOES_ON, monkeypatch)
    own = signal.signal(signal.SIGINT, heard)
    key = threading.Thread(target=repeat)
    key.start()
    try:
        call()
    except KeyboardInterrupt:
        inside = False
    finally:
        over.set()
        key.join()
        time.sleep(0.01)  # what was sent has come
        signal.signal(signal.SIGINT, own)
    assert not inside


def same_batch(size: int, device: torch.device) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return TASK.batch(size, device)


SAME = dataclasses.replace(TASK, batch=same_batch)
EIGHT_BIT = vl.Recipe(optimizer="adamw-8bit", micro_batch=4)


def eight_bit_in_ranks() -> dict[str, experiments.Run]:
    ways = {"ddp": DDP.with_(optimizer="adamw-8bit"), "zero1": DDP.with_(optimizer="adamw-8bit", parallel="zero1", accumulation=2)}
    return {name: vl.run(SAME, way, steps=3, progress=False) for name, way in ways.items()}


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.filterwarnings("ignore")
def test_eight_bits_learn_in_ranks_what_they_learn_in_one_process() -> None:
    alone = vl.run(SAME, EIGHT_BIT, steps=3, device="cpu", progress=False)
    assert alone.losses[2] < alone.losses[0]
    ours = vl.parallel.launch(eight_bit_in_ranks, ranks=2, device="cpu", timeout=500)
    for runs in ours:
        for run in runs.values():
            assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    state = alone.breakdown.optimizer_state
    assert 2 * PARAMETERS / 4 < state < 2.3 * PARAMETERS / 4
    assert [runs["ddp"].breakdown.optimizer_state for runs in ours] == [state, state]
    assert sum(runs["zero1"].breakdown.optimizer_state for runs in ours) == state
    for way, run in {"ddp": DDP, "zero1": DDP.with_(parallel="zero1", accumulation=2)}.items():
        plan = vl.plan(TASK, run.with_(optimizer="adamw-8bit"), "RTX 4090")
        planned = [rank.breakdown.optimizer_state for rank in plan.ranks]
        assert planned == pytest.approx([runs[way].breakdown.optimizer_state for runs in ours], rel=0.001)


def test_half_a_value_is_not_heard_until_it_is_whole(tmp_path: Path) -> None:
    one, two = (len(data).to_bytes(8, "big") + data for data in map(pickle.dumps, ("first", "second")))
    told = launching._Told(tmp_path, 1)
    assert list(told.values()) == []
    for written, heard in ((one + two[:3], ["first"]), (two[3:12], []), (two[12:], ["second"]), (b"", [])):
        with open(tmp_path / "told-1", "ab") as file:
            file.write(written)
        assert list(told.values()) == heard


def test_what_a_rank_told_is_closed_while_somebody_listens(tmp_path: Path) -> None:
    """Else Windows would keep the folder."""
    told = tmp_path / "told-0"
    told.write_bytes(2 * (len(data := pickle.dumps("heard")).to_bytes(8, "big") + data))
    for value in launching._Told(tmp_path, 0).values():
        assert value == "heard"
        assert str(told) not in [file.path for file in psutil.Process().open_files()]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize("size", [10, 100_000], ids=["at closing", "at writing"])
def test_what_a_rank_could_not_tell_for_want_of_space_leaves_nothing(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(rank_module, "_followed", [(tmp_path, 0)])
    told, before = launching._Told(tmp_path, 0), resource.getrlimit(resource.RLIMIT_FSIZE)
    rank_module.tell("first")
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "told-0").stat().st_size + 12, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            rank_module.tell("x" * size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    rank_module.tell("second")
    assert list(told.values()) == ["first", "second"]


@pytest.mark.parametrize(("cards", "device"), [(1, "cpu"), (2, "cuda")])
def test_before_a_rank_has_told_anything_a_run_says_where_they_start(cards: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, device: str, **options: Any) -> Any:
        asked.append(device)
        raise KeyboardInterrupt

    asked: list[str] = []
    for module in (launching, experiments):
        monkeypatch.setattr(module, "choose_device", lambda name: torch.device("cuda" if name == "auto" else name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(experiments, "follow", interrupted)
    with pytest.warns(UserWarning, match="there are 1: they run on the CPU") if cards < 2 else nullcontext():
        run = vl.run(TASK, DDP, progress=False)
    assert [one.device.type for one in (run, *run.ranks)] == [device] * 3
    assert asked == [device]


def test_a_run_without_a_bar_is_not_asked_for_its_peak_and_one_with_a_bar_looks_at_each_step_once() -> None:
    class Counted(list[Any]):
        asked = 0

        def __getitem__(self, which: Any) -> Any:
            found = super().__getitem__(which)
            Counted.asked += len(found) if isinstance(which, slice) else 0
            return found

        def __iter__(self) -> Any:
            Counted.asked += len(self)
            return super().__iter__()

    counters = DeviceCounters(allocated=5, reserved=7, device=None)
    for disable in (True, False):
        Counted.asked, told = 0, [Counted(), Counted()]
        ranks = [experiments.Run(TASK, DDP, CPU, reports) for reports in told]
        run, bar = experiments.Run(TASK, DDP, CPU, told[0], ranks=ranks), Bar(disable=disable)
        for step in range(1, 101):
            for reports in told:
                reports.append(StepReport(step, 1.0, 0.1, 1.0, None, counters))
            experiments._advance(bar, run)
        assert len(bar.shown) == (0 if disable else 100)
        assert Counted.asked == (0 if disable else 200)
        assert run.peak == 5


def test_where_nobody_listens_a_rank_returns_its_steps_or_keeps_them_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, where run() is called in the rank itself."""

    def here(function: Callable[..., Any], *args: Any, heard: Any, ranks: int, device: str, seed: int) -> tuple[list[Any], bool]:
        return [function(*args)], False

    monkeypatch.setattr("vramlab.experiments.follow", here)
    alone, options = vl.Recipe(micro_batch=2), {"device": "cpu", "seed": 0, "record_every": 50, "progress": False, "on_step": None}
    run = experiments._run_ranks(TASK, alone, 2, **options)
    assert (run.status, len(run.reports), len(run.ranks)) == ("finished", 2, 1)
    count = itertools.count()
    failing = dataclasses.replace(TASK, batch=lambda size, device: TASK.batch(size // (next(count) < 1), device))
    with pytest.raises(ZeroDivisionError) as caught:
        experiments._run_ranks(failing, alone, 2, **options)
    assert len(caught.value.run.reports) == 1  # type: ignore[attr-defined]
    assert caught.value.__notes__ == ["1 finished steps are kept in error.run."]


def test_the_command_line_trains_in_ranks() -> None:
    with redirect_stdout(io.StringIO()) as out:
        assert main(["run", "nano", "--parallel", "ddp", "--ranks", "2", "--steps", "1", "--device", "cpu", "--json"]) == 0
    answer = json.loads(out.getvalue())
    assert len(answer["ranks"]) == 2
    assert max(rank["peak"] for rank in answer["ranks"]) == answer["peak"]
    assert answer["breakdown"]["buckets"] == PARAMETERS


def test_the_command_line_plans_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "nano", "--gpu", "RTX 4090", "--parallel", "pipeline", "--ranks", "2", "--stages", "2", "--accumulation", "2"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert answer["reserved"] == max(rank["reserved"] for rank in answer["ranks"])
    assert all(rank["sent"] > 0 and rank["fits"] for rank in answer["ranks"])
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("rank    allocated     reserved   sent a step") + 1 :][:2]
    assert [line.split()[0] for line in table] == ["0", "1"]
    assert all(line.endswith("fits") and len(line) < 80 for line in table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_step": lambda run: None}, r"^on_step is called in this process, and several ranks train in theirs; .*launch"),
        ({"device": "RTX 4090"}, r"^2 virtual cards train nothing; vl\.plan\(task, recipe, 'RTX 4090'\) says what each needs\.$"),
        (
            {"device": torch.device("cuda", 0)},
            r"^Each rank takes a card of its own, got device='cuda:0' for 2 ranks; write device='cuda'\.$",
        ),
    ],
    ids=["on_step", "card", "index"],
)
def test_what_ranks_cannot_have_is_refused(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramlab.experiments.choose_device", torch.device)
    with pytest.raises(ValueError, match=message):
        vl.run(TASK, DDP, **options)


def test_training_in_ranks_without_a_process_group_says_who_starts_them() -> None:
    right = (
        "parallel='ddp' trains in 2 processes, and this one has no process group. vl.run(task, recipe) starts them; "
        "call train() in a function that vl.parallel.launch(function, ranks=...) runs."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(right)}$"):
        next(train(TASK, DDP, "cpu"))
