"""What PyTorch's own host code allocated on the cards of benchmarks/judge, planned again on virtual ones: to the byte."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vramlab import Recipe, gpus, tasks
from vramlab.memory.allocator import CachingAllocator
from vramlab.planning import trace_steps
from vramlab.units import MiB
from vramlab.virtual.device import VirtualGPU

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACTS = json.loads((BENCHMARKS / "results" / "judge.json").read_text())
Row = dict[str, Any]


def load(name: str) -> Any:
    """A module of benchmarks/judge, which is no package."""
    paths = [str(BENCHMARKS / "judge"), str(BENCHMARKS)]
    sys.path[:0] = paths
    try:
        return importlib.import_module(name)
    finally:
        for path in paths:
            sys.path.remove(path)


rows, steps, build, run, _ = (load(name) for name in ("rows", "steps", "build", "run", "exchange"))


def quick() -> list[Row]:
    """Rows of small models, on every card; the others are planned by benchmarks/judge/run.py."""
    small = [row for row in FACTS["rows"] if "task" in row and row["task"][1] in ("nano", "mini", "llama-nano") and not row["task"][2]]
    usual = [row for row in small if row["task"][1] == "nano" or row["recipe"]["precision"] == "amp-bf16"]
    models = (
        "RTX 4090, transformers llama, amp=bf16",
        "T4, transformers bert, amp=fp16 scaler clip",
        "H100 SXM, transformers gpt2, amp=bf16 mask",
    )
    return [*usual, *(row for row in FACTS["rows"] if row["id"] in models)]


def judged_here() -> None:
    """Skip where torch is of another version than that which was judged."""
    judged = FACTS["torch"].split("+")[0]
    if torch.__version__.split(".")[:2] != judged.split(".")[:2]:
        pytest.skip(f"judged with torch {judged}")


@pytest.mark.parametrize("row", quick(), ids=lambda row: row["id"])
def test_planned_bytes_are_those_of_the_real_allocator(row: Row) -> None:
    judged_here()
    if "model" in row:
        if pytest.importorskip("transformers").__version__ != FACTS["transformers"]:
            pytest.skip(f"judged with transformers {FACTS['transformers']}")
        load("library")
    planned = steps.virtual(row, trace=False)["steps"]
    assert planned == [list(step) for step in zip(row["allocated"], row["reserved"], row["between"], strict=True)]


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
def test_a_plan_of_fewer_micro_batches_is_that_of_all(precision: str) -> None:
    judged_here()
    row = next(row for row in FACTS["rows"] if row.get("recipe", {}) == {"precision": precision, "accumulation": 4, "clip_norm": 1.0})
    family, size, options = row["task"]
    planned = trace_steps(getattr(tasks, family)(size, **options), Recipe(**row["recipe"]), gpus.gpu(row["card"]))
    assert planned["allocated"] == max(row["allocated"])
    # Three micro-batches are planned, and a fourth finds other holes: a small segment more or less.
    allocator, events = CachingAllocator(), planned["trace"].events
    allocator.replay(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True), events.moves)
    assert abs(allocator.peak_reserved - max(row["reserved"])) <= 2 * MiB


@pytest.mark.parametrize("row", FACTS["exchanges"], ids=lambda row: row["id"])
def test_fsdps_copies_ask_for_what_the_real_allocator_was_asked_for(row: Row) -> None:
    judged_here()
    assert run.asked(steps.virtual(row, trace=False)) == [int(nbytes) for nbytes in row["asked"].split()]


# Pieces, with what the real allocator was asked for on the judge's RTX 4090


def made_by(gpu: VirtualGPU, code: Callable[[], Any]) -> list[int]:
    """Bytes that code asks for, in order, and gives back: the order among releases that follow one another does not count."""
    before = len(gpu.trace.events.nbytes)
    code()
    events = gpu.trace.events
    found = [[int(n), ""] for i, n in enumerate(events.nbytes) if i >= before and i not in events.moves and i + 1 not in events.moves]
    return [nbytes for nbytes, _ in run.ordered(found)]


def test_autocast_casts_the_last_argument_first(gpu: VirtualGPU) -> None:
    x, layer = torch.zeros(64, 256, device=gpu.device), nn.Linear(256, 512).to(gpu.device)

    def forward() -> None:
        with torch.autocast(gpu.device.type, dtype=torch.bfloat16):
            layer(x)

    bias, weight, inputs, output, cublas = 1024, 262144, 32768, 65536, 8519680
    assert made_by(gpu, forward) == [bias, weight, inputs, output, cublas, -weight, -output, -inputs, -bias]


def test_scratch_comes_before_an_output_where_it_does_on_cuda(gpu: VirtualGPU) -> None:
    numbers = torch.zeros(1, 512, dtype=torch.long).to(gpu.device).expand(4, 512)
    table = torch.zeros(10, 64, device=gpu.device)
    assert made_by(gpu, lambda: F.embedding(numbers, table)) == [16384, 524288, -524288, -16384]


def test_gradients_are_added_at_indices_in_place_beside_scratch(gpu: VirtualGPU) -> None:
    weight, rows = nn.Parameter(torch.zeros(1000, 64, device=gpu.device)), torch.zeros(4, 100, dtype=torch.long).to(gpu.device)

    def step() -> None:
        (weight[rows].sum() + weight[rows[:1]].sum()).backward()

    forward = [102400, 4, -102400, 25600, 4, -25600, 4, -4, -4, 4]
    first = [256000, 800, 800, -800, 25600, 800, 800, 800, 1, -25600, -800, -800, -800, -800, -1]
    second = [256000, 3200, 3200, -3200, 102400, 3200, 3200, 3200, 1, -256000, -102400, -3200, -3200, -3200, -3200, -4, -4, -1]
    assert made_by(gpu, step) == [*forward, *first, *second]


def test_clipping_takes_the_norm_of_all_gradients_at_once(gpu: VirtualGPU) -> None:
    parameters = [nn.Parameter(torch.zeros(8, 8, device=gpu.device)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    assert made_by(gpu, lambda: nn.utils.clip_grad_norm_(parameters, 1.0))[:4] == [12, 4, 4, 4]


def test_in_inference_mode_composite_operators_are_what_they_are_made_of(gpu: VirtualGPU) -> None:
    x, layer = torch.zeros(64, 256, device=gpu.device), nn.Linear(256, 512).to(gpu.device)
    with torch.inference_mode():
        assert made_by(gpu, lambda: layer(x)) == [131072, 8519680, -131072]


def test_in_inference_mode_attention_takes_the_cards_kernel(gpu: VirtualGPU) -> None:
    x = torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16, device=gpu.device)
    with torch.inference_mode():
        F.scaled_dot_product_attention(x, x, x)
    assert "aten::_scaled_dot_product_flash_attention" in gpu.trace.events.operators


# The facts


def test_all_rows_were_judged() -> None:
    keys = ("id", "card", "task", "recipe", "rank", "model", "options")
    asked = json.loads(json.dumps(rows.rows()))
    assert [{key: row[key] for key in keys if key in row} for row in FACTS["rows"]] == asked
    assert [{key: value for key, value in row.items() if key != "asked"} for row in FACTS["exchanges"]] == rows.exchanges()


def test_every_row_has_an_id_of_its_own_a_card_and_a_recipe_that_exists() -> None:
    assert len({row["id"] for row in FACTS["rows"]}) == len(FACTS["rows"])
    for row in FACTS["rows"]:
        assert gpus.gpu(row["card"]).name in steps.CARDS
        assert ("task" in row) != ("model" in row)
        Recipe(**row.get("recipe", {}))


def test_judged_bytes_are_those_of_a_caching_allocator() -> None:
    for row in FACTS["rows"]:
        for allocated, reserved, between in zip(row["allocated"], row["reserved"], row["between"], strict=True):
            assert 0 < between <= allocated <= reserved, row["id"]
            assert allocated % 512 == between % 512 == reserved % (2 * MiB) == 0, row["id"]
        assert len(row["allocated"]) == steps.STEPS


def test_judged_copies_give_back_all_that_they_ask_for() -> None:
    for row in FACTS["exchanges"]:
        asked = [int(nbytes) for nbytes in row["asked"].split()]
        assert sorted(size for size in asked if size > 0) == sorted(-size for size in asked if size < 0), row["id"]


def test_what_is_said_of_all_rows_is_counted() -> None:
    summary = FACTS["summary"]
    assert summary["rows"] == len(FACTS["rows"])
    assert summary["failed"] == 0
    assert summary["equal in allocated"] <= summary["rows"]
    assert summary["exchanges"] == len(FACTS["exchanges"])
    assert summary["equal in every allocation"] <= summary["exchanges"]


# Comparing


def test_the_order_of_releases_that_follow_one_another_does_not_count() -> None:
    one, other = [[8, ""], [4, ""], [-8, ""], [-4, ""], [2, ""]], [[8, ""], [4, ""], [-4, ""], [-8, ""], [2, ""]]
    assert run.first_difference(one, other) == "all 5 events are equal"


@pytest.mark.parametrize("planned", [[[8, "b"], [4, "c"]], [[8, "b"]]])
def test_the_first_allocation_that_differs_is_named(planned: list[Any]) -> None:
    assert run.first_difference([[8, "a"], [2, "where"]], planned).startswith("event 1: judged +2 (where), planned ")


def test_the_greatest_difference_of_all_steps_is_told() -> None:
    row = {"real": {"steps": [[10, 20, 5], [10, 20, 5]]}, "virtual": {"steps": [[10, 20, 5], [7, 22, 5]]}}
    assert run.differences(row) == [-3, 2, 0]
    assert run.differences(row | {"real": {"error": "none"}}) is None


def test_copies_are_equal_only_if_every_allocation_is() -> None:
    steps = [[8, 2097152, 0]]
    row = {side: {"steps": steps, "events": [[8, side], [-8, side]]} for side in ("real", "virtual")}
    assert run.equal_in_every_allocation(row)
    other = {"steps": steps, "events": [[4, ""], [4, ""], [-4, ""], [-4, ""]]}
    assert not run.equal_in_every_allocation(row | {"virtual": other})
    assert not run.equal_in_every_allocation(row | {"virtual": {"error": "none"}})
    assert run.fact(row | {"id": "one", "types": ["float32"]}) == {"id": "one", "types": ["float32"], "asked": "8 -8"}


# Building


def test_without_cudas_headers_the_message_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"The judge needs the headers of a CUDA 13 build of torch, and .* has none: pip install"):
        build.headers()


def test_without_gcc_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="The judge is compiled with gcc, and there is none: apt install gcc"):
        build.build(tmp_path)


def test_a_process_of_the_judge_loads_its_libraries_first() -> None:
    environment = build.environment(Path("/folder"))
    assert environment["LD_PRELOAD"] == "/folder/shim.so /folder/blas.so"
    assert environment["LD_LIBRARY_PATH"].startswith("/folder")
