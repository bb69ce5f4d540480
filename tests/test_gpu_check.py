"""benchmarks/gpu_check.py without a card: its dry run, how it compares events, and the whole of it on the judge's card."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vramlab as vl
from vramlab import gpus
from vramlab.training import check_arguments

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def load(*names: str) -> Iterator[Any]:
    """Modules of benchmarks/, which is no package."""
    paths = [str(BENCHMARKS), str(BENCHMARKS / "judge")]
    sys.path[:0] = paths
    try:
        yield from [importlib.import_module(name) for name in names]
    finally:
        for path in paths:
            sys.path.remove(path)


check, build = load("gpu_check", "build")


def script(*arguments: str, driver: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", driver] if driver else [str(BENCHMARKS / "gpu_check.py")]), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300, check=False)


# The dry run


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a dry run printed and wrote."""
    path = tmp_path_factory.mktemp("dry") / "gpu_check.json"
    began = time.monotonic()
    done = script("--dry-run", "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    return done.stdout, json.loads(path.read_text())


def test_a_dry_run_plans_two_pairs_and_measures_nothing(dry: tuple[str, dict[str, Any]]) -> None:
    _, report = dry
    assert [row["name"] for row in report["pairs"]] == list(check.PAIRS)[:2]
    for row in report["pairs"]:
        assert 0 < row["planned"]["allocated"] <= row["planned"]["reserved"] < row["planned"]["device"]
        assert row["planned"]["fits"] is True
        assert not {"measured", "error"} & set(row)
    assert report["measured"] is False
    assert report["complete"] is True
    assert report["context"] == {"planned": gpus.CONTEXT, "measured": None, "range": list(gpus.CONTEXT_RANGE)}


def test_a_dry_run_holds_the_allocator_to_what_was_computed_from_its_rules(dry: tuple[str, dict[str, Any]]) -> None:
    _, report = dry
    assert [row["not_as_computed"] for row in report["allocator"]] == [{}] * 2 * len(check.cases())


def test_a_dry_run_tells_what_it_ran_on_and_its_table_fits_100_columns(dry: tuple[str, dict[str, Any]]) -> None:
    said, report = dry
    assert report["torch"] == torch.__version__
    assert report["card"]["name"] == check.DRY_CARD
    *lines, written = said.splitlines()
    assert max(map(len, lines)) <= 100
    assert "not measured" in said
    assert written.startswith("Written to ")


def test_the_budget_ends_it_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "out.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run", "--budget-seconds", "0", "--output", str(path)])
    assert check.main() == 0
    report = json.loads(path.read_text())
    assert report["pairs"] == []
    assert report["complete"] is False
    assert "not all were reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "this measures on a CUDA card, and torch sees none here; --dry-run does what can be done without one."),
        (["--dry-run", "--pairs", "gpt3"], "No pair's name contains 'gpt3'; they are gpt nano, fp32; "),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# Pairs and cases


def test_there_are_twenty_pairs() -> None:
    assert len(check.PAIRS) == 20


@pytest.mark.parametrize("name", check.PAIRS)
def test_a_pair_is_something_that_can_be_trained_under_a_name_that_fits_its_column(name: str) -> None:
    pair = check.PAIRS[name]
    check_arguments(pair.task(), vl.Recipe(**pair.recipe))
    assert len(name) <= 42


def test_words_choose_pairs_in_the_order_of_the_table() -> None:
    assert check.chosen([], False) == list(check.PAIRS)
    assert check.chosen(["vit", "resnet18, fp32"], True) == ["resnet18, fp32", "vit-b-16, amp-bf16"]


@pytest.mark.parametrize("case", check.cases(), ids=lambda case: case.name)
def test_the_model_of_the_allocator_does_what_was_computed(case: Any) -> None:
    found = check.states(check.Modelled, case, False)
    assert found["end"] | case.facts == found["end"]
    assert len(found["after"]) == len(case.operations)


def test_an_allocator_that_does_otherwise_is_found_out() -> None:
    case = next(c for c in check.cases() if c.operations == [(0, 513)])
    right = check.states(check.Modelled, case, False)
    wrong = {"after": [(1536, 2 << 20)], "end": right["end"] | {"allocated": 1536}}
    assert check.case_result(case, False, wrong, None)["not_as_computed"] == {"allocated": 1536}
    assert check.case_result(case, False, right, right)["first_difference"] is None
    expected = "request 0 of 513 bytes: allocated 1,024 and reserved 2,097,152 modelled, 1,536 and 2,097,152 measured"
    assert check.case_result(case, False, right, wrong)["first_difference"] == expected


def test_random_requests_hold_little_and_give_back_only_what_is_held() -> None:
    held: dict[int, int] = {}
    for handle, nbytes in check._random(0):
        if nbytes:
            assert handle not in held
            held[handle] = nbytes
        else:
            del held[handle]
        assert sum(held.values()) <= 1088 << 20


# Planned beside measured


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, str]]:
    """Events that allocate and release blocks."""
    events: list[tuple[int, int, str]] = []
    held: dict[int, int] = {}
    for block in range(draw(st.integers(1, 12))):
        held[block] = draw(st.integers(1, 5)) * 512
        events.append((held[block], block, "here"))
        released = draw(st.lists(st.sampled_from(sorted(held)), unique=True, max_size=3))
        events += [(-held.pop(one), one, "") for one in released]
    return events


@given(histories(), st.booleans())
def test_a_history_is_equal_to_itself_at_other_addresses(events: list[tuple[int, int, str]], which: bool) -> None:
    moved = [(nbytes, 1000 + 7 * block, "there") for nbytes, block, _ in events]
    assert check.first_difference(events, moved, which=which) is None


@given(histories())
def test_the_order_of_releases_between_two_allocations_does_not_count(events: list[tuple[int, int, str]]) -> None:
    groups: list[list[tuple[int, int, str]]] = []
    for event in events:
        if not groups or event[0] > 0:
            groups.append([])
        groups[-1].append(event)
    turned = [event for first, *rest in groups for event in [first, *reversed(rest)]]
    assert check.first_difference(events, turned, which=True) is None


@given(histories(), st.data())
def test_the_first_allocation_of_another_size_is_named(events: list[tuple[int, int, str]], data: st.DataObject) -> None:
    sizes = [i for i, event in enumerate(events) if event[0] > 0]
    number = data.draw(st.integers(0, len(sizes) - 1))
    changed = list(events)
    changed[sizes[number]] = (events[sizes[number]][0] + 512, events[sizes[number]][1], "there")
    # What is released of the changed block later differs too, but that comes after.
    planned, measured = events[sizes[number]][0], events[sizes[number]][0] + 512
    found = check.first_difference(events, changed, which=True)
    assert found == f"allocation {number}: planned {planned:,} (here), measured {measured:,} (there)"


def test_a_release_that_only_one_side_has_is_named() -> None:
    planned = [(512, 0, "a"), (1024, 1, "b"), (-512, 0, ""), (2048, 2, "c")]
    measured = [(512, 7, "x"), (1024, 8, "y"), (2048, 9, "z")]
    expected = "released before allocation 2 of 2,048 (z): planned 512 of 2 allocations ago"
    assert check.first_difference(planned, measured, which=True) == expected
    assert check.first_difference(planned, measured, which=False) == "released before allocation 2 of 2,048 (z): planned 512"


def test_which_of_two_equal_blocks_is_released_counts_only_where_asked() -> None:
    one, other = ([(512, 0, ""), (512, 1, ""), (-512, block, ""), (512, 2, "")] for block in (0, 1))
    assert check.first_difference(one, other, which=False) is None
    assert check.first_difference(one, other, which=True) == (
        "released before allocation 2 of 512 (): planned 512 of 2 allocations ago; measured 512 of 1 allocations ago"
    )


def test_a_side_that_goes_on_longer_is_named() -> None:
    one = [(512, 0, "a")]
    both = [*one, (1024, 1, "b")]
    assert check.first_difference(one, both, which=True) == "allocation 1: planned 0 (no more), measured 1,024 (b)"
    assert check.first_difference(both, one, which=True) == "allocation 1: planned 1,024 (b), measured 0 (no more)"


def test_the_first_planned_allocations_may_belong_to_what_was_before() -> None:
    planned = [(4, 0, "scale"), (4, 1, "scale"), (512, 2, "batch"), (1024, 3, "")]
    measured = [(512, 0, "batch"), (1024, 1, "")]
    assert check.first_difference(planned, measured, which=True, slack=2) is None
    assert check.first_difference(planned, measured, which=True, slack=1) is not None


PLANNED = {"adamw": {}, "step in backward": {"optimizer": "sgd", "optimizer_in_backward": True}, "accumulation": {"accumulation": 2}}


@pytest.fixture(scope="module", params=PLANNED)
def planned(request: pytest.FixtureRequest) -> Any:
    return vl.plan(vl.tasks.gpt("nano"), vl.Recipe(**PLANNED[request.param]), "RTX 4090")


def test_the_events_of_a_plan_replayed_give_its_bytes(planned: Any) -> None:
    events, _ = check.planned_events(planned.trace)
    assert check.replayed(events) == {"allocated": planned.allocated, "reserved": planned.reserved}


def test_a_measurement_equal_to_the_plan_shows_no_difference_and_another_shows_it(planned: Any) -> None:
    events, cut = check.planned_events(planned.trace)
    history = [(nbytes, block + (1 << 40), "x.py:1") for nbytes, block, _ in events]
    assert 0 < cut < len(events)
    assert check.compared_events(planned.trace, history, cut, True) is None
    late = next(i for i in range(len(history) - 1, 0, -1) if history[i][0] > 0)
    later = [*history[:late], (history[late][0] + 512, *history[late][1:]), *history[late + 1 :]]
    assert check.compared_events(planned.trace, later, cut, False).startswith("step 2, allocation ")
    early = next(i for i, event in enumerate(history) if event[0] > 0)
    earlier = [(history[early][0] + 512, *history[early][1:]), *history[early + 1 :]]
    assert check.compared_events(planned.trace, earlier, cut, False) is None
    assert check.compared_events(planned.trace, earlier, cut, True).startswith("from the building on, allocation 0: ")


def test_a_plan_whose_storages_move_and_grow_keeps_its_blocks() -> None:
    #           made, made, goes over to 3 (two events), grows, shrinks to nothing
    storages, sizes, moves = [1, 2, 1, 3, 2, 2], [512, 1024, -512, 512, 1024, -2048], frozenset({3})
    events = SimpleNamespace(
        storage=np.array(storages), nbytes=np.array(sizes), moves=moves, steps=((2, 0), (6, 0)), line=None, lines=(),
        operator=np.zeros(6, int), operators=("op",),
    )  # fmt: skip
    found, cut = check.planned_events(SimpleNamespace(events=events))
    assert [event[:2] for event in found] == [(512, 0), (1024, 1), (-1024, 1), (2048, 4), (-2048, 4)]
    assert cut == 2


# What fails is told, and the rest goes on


def failing() -> Any:
    raise NotImplementedError("no shape function")


def test_a_pair_that_cannot_be_planned_keeps_what_was_measured() -> None:
    measured = {"allocated": 1, "reserved": 2, "device": None, "history": [], "first_events": 0}
    row = check.pair_row("gpt nano, fp32", failing, measured)
    assert row["error"] == "planning: NotImplementedError: no shape function"
    assert row["measured"] == {"allocated": 1, "reserved": 2, "device": None}


def test_a_pair_that_cannot_be_measured_keeps_its_plan() -> None:
    row = check.pair_row("gpt nano, fp32", lambda: ({"allocated": 1}, None), {"error": "OutOfMemoryError: x", "out_of_memory": True})
    assert row["error"] == "measuring: OutOfMemoryError: x"
    assert row["planned"] == {"allocated": 1}
    assert "difference" not in row


def test_a_pair_that_was_measured_is_compared_and_shown(planned: Any) -> None:
    events, cut = check.planned_events(planned.trace)
    sizes = {name: getattr(planned, name) for name in ("allocated", "reserved", "device")}
    measured = {**sizes, "reserved": 2 * planned.reserved, "history": events, "first_events": cut, "throughput": {"median": 1234567.8}}
    row = check.pair_row("gpt nano, fp32", lambda: (sizes, planned.trace), measured)
    assert row["difference"] == {"allocated": 0, "reserved": planned.reserved, "device": 0}
    assert row["ratio"] == {"allocated": 1, "reserved": 2, "device": 1}
    assert row["replayed"] == {"allocated": planned.allocated, "reserved": planned.reserved}
    assert row["first_difference"] is None
    assert check._pair_line(row).split()[-4:] == ["+0", "2.0000", "1.0000", "1,234,568"]


def test_a_table_with_long_errors_fits_and_names_them(dry: tuple[str, dict[str, Any]]) -> None:
    report = json.loads(json.dumps(dry[1]))
    report["pairs"][0]["error"] = "measuring: " + "x" * 300
    report["pairs"][1]["first_difference"] = "step 2, allocation 7: " + "y" * 300
    report["allocator"][3] |= {"measured": {}, "first_difference": "request 0 " + "z" * 300}
    report["allocator_errors"] = ["the process ended with -11: " + "w" * 300]
    report["run"] = {"shown": "Run(" + "v" * 300}
    report["summary"] = check.summary(report)
    shown = check.table(report)
    assert max(map(len, shown.splitlines())) <= 100
    for text in ("measuring: xxx", "step 2, allocation 7: yyy", "request 0 zzz", "ended with -11: www", "vl.run: Run(vvv", "1 failed"):
        assert text in shown


def test_a_measuring_process_tells_its_error_and_one_that_takes_too_long_is_ended() -> None:
    slow, wrong = check.Process(), check.Process()
    assert slow.ask("pair", "gpt nano, fp32", 0.1) == {"error": "stopped after 0 s: the budget is used up"}
    found = wrong.ask("pair", "no such pair", 120)
    assert found["out_of_memory"] is False
    assert found["error"]  # without CUDA that is what it says, with it that there is no such pair


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    check.write(path, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        check.write(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# All of it, on the judge's card

# The planner hides CUDA's cards from itself; the judge's it cannot hide, so it is not shown.
DRIVER = """
import runpy, sys
from vramlab.virtual import planner
options = planner._popen_options
def without_judge(handle):
    found = options(handle)
    found["env"].pop("LD_PRELOAD")
    return found
planner._popen_options = without_judge
sys.argv[0] = "benchmarks/gpu_check.py"
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def judge(folder: Path) -> dict[str, str]:
    """The environment in which torch finds the judge's card."""
    if torch.version.cuda is None or shutil.which("gcc") is None:
        pytest.skip("needs a CUDA build of torch, and gcc")
    if not torch.__version__.startswith("2.14"):
        pytest.skip("judged with torch 2.14")
    made = build.environment(build.build(folder))
    # The judge has no cuDNN, whose attention a Hopper card takes first.
    return {name: made[name] for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")} | {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}


def test_on_the_judges_card_what_is_planned_is_measured_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "judged.json"
    arguments = ("--pairs", "gpt nano", "--output", str(path))
    done = script(*arguments, driver=DRIVER, **judge(tmp_path / "judge"))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    (row,) = report["pairs"]
    assert row["difference"] == {"allocated": 0, "reserved": 0}
    assert row["first_difference"] is None
    assert row["replayed"] == {size: row["measured"][size] for size in ("allocated", "reserved")}
    assert row["measured"]["throughput"]["steps"] >= 2
    real = [case for case in report["allocator"] if "measured" in case]
    assert len(real) >= len(check.cases())  # memory that is mapped by pages is beyond the judge
    assert [case["first_difference"] for case in real if not case["expandable_segments"]] == [None] * len(check.cases())
