"""What PyTorch's own host code allocated on the cards of benchmarks/judge, planned again on virtual ones: to the byte."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from vramlab import Recipe, gpus
from vramlab.units import MiB

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


rows, steps, build, run = (load(name) for name in ("rows", "steps", "build", "run"))


def quick(seconds: float) -> list[Row]:
    """The rows that were planned fastest, as many as take so long together; each in under a second."""
    chosen: list[Row] = []
    for row in sorted(FACTS["rows"], key=lambda row: row["seconds"]):
        seconds -= row["seconds"]
        if seconds > 0 and row["seconds"] < 1:
            chosen.append(row)
    return chosen


@pytest.mark.parametrize("row", quick(40), ids=lambda row: row["id"])
def test_planned_bytes_are_those_of_the_real_allocator(row: Row) -> None:
    judged = FACTS["torch"].split("+")[0]
    if torch.__version__.split(".")[:2] != judged.split(".")[:2]:
        pytest.skip(f"judged with torch {judged}")
    if "model" in row and pytest.importorskip("transformers").__version__ != FACTS["transformers"]:
        pytest.skip(f"judged with transformers {FACTS['transformers']}")
    planned = steps.virtual(row, trace=False)["steps"]
    assert planned == [list(step) for step in zip(row["allocated"], row["reserved"], row["between"], strict=True)]


def test_all_rows_were_judged() -> None:
    keys = ("id", "card", "task", "recipe", "model", "options")
    asked = json.loads(json.dumps(rows.rows()))
    assert [{key: row[key] for key in keys if key in row} for row in FACTS["rows"]] == asked


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


def test_what_is_said_of_all_rows_is_counted() -> None:
    summary = FACTS["summary"]
    assert summary["rows"] == len(FACTS["rows"])
    assert summary["failed"] == 0
    assert summary["equal in allocated"] <= summary["rows"]


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
