"""Training and recording in several ranks: what train(), run(), record() and Precision do there, from one start of two ranks."""

import io
import json
import random
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import vramlab as vl
from vramlab.command import main
from vramlab.memory.trace import Category, MemoryTrace
from vramlab.parallel.choose import choose_way
from vramlab.techniques.precision import Precision
from vramlab.training import train

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


def ddp_steps() -> list[tuple[float, MemoryTrace | None]]:
    found = []
    for report in train(TASK, DDP.with_(accumulation=2), "cpu", record_every=1):
        found.append((report.loss, report.memory))
        if report.step == 2:
            return found
    raise AssertionError


def work() -> dict[str, Any]:
    return {
        "building": same_model_other_numbers(),
        "clipped": clipped(),
        "infinite": clipped(infinite_in=1),
        "copies": clipped(copies=True),
        "sharded": sharded_traces(),
        "wrong size": said(lambda: choose_way(DDP.with_(ranks=3), CPU)),
        "ddp": ddp_steps(),
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


def test_ddp_keeps_its_buckets_beside_gradients_that_were_accumulated_outside(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (first, _), (second, trace) = rank["ddp"]
        assert second < first
        assert trace is not None
        assert trace.breakdown().buckets == trace.breakdown().gradients == PARAMETERS


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
