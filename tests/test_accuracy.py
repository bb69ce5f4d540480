"""The facts of benchmarks/ground_truth.json, the models that its rows name, and a few of its rows run on a virtual card.

The virtual card is opened in processes of their own, as the benchmark does it.
"""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TRACES = Path(__file__).parents[2] / "shared" / "data" / "cuda_traces"
FACTS = json.loads((BENCHMARKS / "ground_truth.json").read_text())
ROWS: dict[str, dict[str, Any]] = {row["id"]: row for row in FACTS["rows"]}


def load(name: str) -> Any:
    """A module of benchmarks/, which is no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


workloads = load("workloads")
accuracy = load("accuracy")


def on_meta(name: str, **options: Any) -> torch.nn.Module:
    real = "RegNet" in options.get("model", "")  # RegNets compute their widths with tensors
    with torch.device("cpu" if real else "meta"):
        return workloads.WORKLOADS[name].model(**options)


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# The facts


def test_every_row_has_an_id_of_its_own() -> None:
    ids = [row["id"] for kind in ("rows", "not_scored") for row in FACTS[kind]]
    assert len(set(ids)) == len(ids) == 506


def test_every_row_has_a_source_a_card_bytes_and_a_workload() -> None:
    from vramlab.gpus import gpu

    for row in ROWS.values():
        assert row["source"].startswith(("github ", "transformers docs ")), row["id"]
        assert type(row["bytes"]) is int, row["id"]
        assert row["bytes"] > 0, row["id"]
        assert row["quantity"] in ("reserved", "allocated", "requested"), row["id"]
        assert row["workload"] in workloads.WORKLOADS, row["id"]
        gpu(row["card"])


def test_others_gave_whole_numbers_of_bytes() -> None:
    for row in ROWS.values():
        assert all(type(n) is int and n > 0 for n in row["others"].values()), row["id"]


def test_what_is_not_scored_has_a_reason() -> None:
    assert all(row["reason"] and row["source"] for row in FACTS["not_scored"])


def test_runs_that_ran_out_of_memory_tell_the_cards_memory() -> None:
    ran_out = [row for row in ROWS.values() if row["out_of_memory"]]
    assert len(ran_out) == 9
    assert all(row["memory"] > row["bytes"] for row in ran_out)


def test_rows_that_informed_a_constant_are_rows() -> None:
    assert all(row in ROWS for rows in FACTS["informed"].values() for row in rows)


# The models: parameters as their authors or libraries count them

COUNTS: list[tuple[str, dict[str, Any], int]] = [
    ("grid text", {"model": "openai-community/gpt2"}, 124_439_808),
    ("grid text", {"model": "distilbert/distilgpt2"}, 81_912_576),
    ("grid text", {"model": "cerebras/Cerebras-GPT-111M"}, 111_050_496),
    ("grid text", {"model": "EleutherAI/gpt-neo-125M"}, 125_198_592),
    ("grid text", {"model": "facebook/opt-125m"}, 125_239_296),
    ("grid text", {"model": "facebook/opt-350m"}, 331_196_416),
    ("grid text", {"model": "T5-small"}, 60_506_624),
    ("grid text", {"model": "t5-base"}, 222_903_552),
    ("attention table", {"model": "gpt2-large"}, 774_030_080),
    ("attention table", {"model": "EleutherAI/pythia-410m-deduped"}, 405_334_016),
    ("attention table", {"model": "distilbert-base-uncased", "head": "MaskedLM"}, 66_985_530),
    ("attention table", {"model": "albert/albert-base-v2", "head": "MaskedLM"}, 11_221_680),
    ("attention table", {"model": "microsoft/biogpt"}, 346_763_264),
    ("distilbert reviews", {}, 66_955_010),
    ("grid images", {"model": "ConvNeXtTiny"}, 28_589_128),
    ("grid images", {"model": "ConvNeXtBase"}, 88_591_464),
    ("grid images", {"model": "VGG16"}, 138_357_544),
    ("grid images", {"model": "VGG19"}, 143_667_240),
    ("grid images", {"model": "ResNet101"}, 44_549_160),
    ("grid images", {"model": "ResNet152"}, 60_192_808),
    ("grid images", {"model": "MobileNetV2"}, 3_504_872),
    ("grid images", {"model": "RegNetX400MF"}, 5_495_976),
    ("grid images", {"model": "RegNetY400MF"}, 4_344_144),
    ("vit ladder", {}, 303_311_882),
    ("course training", {"size": "small", "context": 8}, 128_625_408),
    ("course training", {"size": "medium", "context": 8}, 423_183_360),
    ("course training", {"size": "large", "context": 8}, 969_411_840),
    ("course training", {"size": "xl-2025", "context": 8}, 1_998_235_200),
    ("course training", {"size": "xl-2026", "context": 8}, 3_406_809_600),
    ("litgpt", {}, 1_100_048_384),
    ("book gpt2", {"mask": "buffer", "plain": True}, 163_009_536),
    ("book gpt2", {"mask": "kernel", "plain": False}, 163_009_536),
]


@pytest.mark.parametrize(("workload", "options", "parameters"), COUNTS, ids=[str([*o.values()] or w) for w, o, _ in COUNTS])
def test_models_have_the_parameters_that_are_published(workload: str, options: dict[str, Any], parameters: int) -> None:
    if workload != "course training" and workload not in ("litgpt", "book gpt2"):
        pytest.importorskip("transformers" if workload.startswith(("grid text", "attention", "distilbert")) else "torchvision")
    assert count(on_meta(workload, **options)) == parameters


@pytest.mark.parametrize("model", ["MobeNetV3Small", "MobeNetV3Large", "MnasNet"])
def test_small_image_models_of_the_grid_have_ten_classes(model: str) -> None:
    assert [*on_meta("grid images", model=model).parameters()][-1].shape == (10,)


# Scoring


def row(**changes: Any) -> dict[str, Any]:
    facts = {"id": "a", "source": "s", "table": "t", "name": "m", "card": "RTX 3060", "quantity": "reserved", "bytes": 1_000}
    return facts | {"out_of_memory": False, "memory": 10**10, "others": {"xMem": 1_100}, "transformers": None} | changes


@pytest.mark.parametrize(
    ("ran_out", "fits", "right", "error"),
    [(False, True, True, 0.02), (False, False, False, 0.02), (True, False, True, None), (True, True, False, None)],
)
def test_a_run_that_ran_out_is_scored_by_its_verdict_alone(ran_out: bool, fits: bool, right: bool, error: float | None) -> None:
    found = accuracy.scored(row(out_of_memory=ran_out), {"predicted": 1_020, "fits": fits, "seconds": 1.0})
    assert found["verdict_right"] is right
    assert found.get("relative_error") == (None if error is None else pytest.approx(error))


def test_summaries_count_errors_and_verdicts_of_each_tool() -> None:
    found = [accuracy.scored(row(bytes=b), {"predicted": 1_000, "fits": True, "seconds": 2.0}) for b in (1_000, 1_000, 1_250, 500)]
    ours = accuracy.tables(found)["t"]["tools"]["vramlab"]
    assert (ours["rows"], ours["median"], ours["p90"], ours["greatest"]) == (4, pytest.approx(0.1), 1.0, 1.0)
    assert (ours["verdicts"], ours["verdicts_wrong"], ours["median_seconds"]) == (4, 0, 2.0)
    assert accuracy.tables(found)["t"]["tools"]["xMem"]["median"] == pytest.approx(0.11)


def test_published_figures_are_summed_up_by_confidence_over_their_tables() -> None:
    given = [row(table=t, confidence=c) for t, c in (("t", "high"), ("u", "high"), ("u", "medium"))]
    found = accuracy.tables([accuracy.scored(r, {"predicted": 1_000, "fits": True, "seconds": 1.0}) for r in given])
    counts = {name: group["tools"]["vramlab"]["rows"] for name, group in found.items() if group["tools"]}
    assert counts == {"t": 1, "u": 2, "published, high confidence": 2, "published, medium confidence": 1}


def test_a_tool_that_says_fits_for_a_run_that_ran_out_is_told() -> None:
    found = [accuracy.scored(row(out_of_memory=True), {"fits": False, "seconds": 1.0})]
    theirs = accuracy.tables(found)["t"]["tools"]["xMem"]
    assert (theirs["rows"], theirs["verdicts_wrong"], theirs["fits_but_ran_out"]) == (0, 1, 1)


def test_rows_of_another_transformers_are_skipped_with_the_reason() -> None:
    by_python, skipped = accuracy.interpreters([row(id=v, transformers=v) for v in (None, "4.51.3", "4.46.3")], "own", {"4.46.3": "old"})
    assert {python: [r["id"] for r in rows] for python, rows in by_python.items()} == {"own": [None], "old": ["4.46.3"]}
    assert skipped == {"4.51.3": "needs transformers 4.51.3: give --python 4.51.3=PATH"}


def test_a_worker_that_dies_is_told_and_the_next_row_goes_on(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text('#!/bin/sh\nwhile read id; do case $id in bad) echo why >&2; exit 3;; esac; echo "{\\"id\\": \\"$id\\"}"; done\n')
    dying.chmod(0o755)
    found = list(accuracy.ask(str(dying), [row(id="good"), row(id="bad"), row(id="fine")], rivals=False))
    assert [f["id"] for f in found if "error" not in f] == ["good", "fine"]
    assert next(f["error"] for f in found if f["id"] == "bad") == "the process ended with 3: why"


# On the virtual card, in a process of its own


def planned(ids: list[str]) -> dict[str, dict[str, Any]]:
    found = accuracy.ask(sys.executable, [ROWS[id_] for id_ in ids], rivals=False)
    return {result["id"]: accuracy.scored(ROWS[result["id"]], result) for result in found}


def test_rows_come_out_as_they_were_measured() -> None:
    bounds = {
        "op-attn-h100-d64-L1024": 0.001,
        "op-ce-v8192": 0.001,
        "op-layernorm-n2048": 0.001,
        "cs336-small-eager-ctx512": 0.005,
        "raschka-gpt2-7": 0.02,  # reserved: which cached block serves a request moves it
    }
    found = planned(list(bounds))
    errors = {id_: found[id_].get("relative_error", found[id_].get("error")) for id_ in bounds}
    assert all(isinstance(errors[id_], float) and abs(errors[id_]) <= bound for id_, bound in bounds.items()), errors


def test_a_run_that_ran_out_of_memory_does_not_fit() -> None:
    pytest.importorskip("torchvision")
    id_ = "xmem-vgg16_sgd_657_0_b7d3-rtx4060"
    assert planned([id_])[id_]["verdict_right"]


# The public traces of the course's 423M model on a real card


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function of this module, in a new process; gives what it returns."""
    code = f"import json, test_accuracy; print(json.dumps(test_accuracy.{function.__name__}(*{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


class FromTheStep(accuracy.OnCard):
    """Counts what is made from the measured step on, as the trace does: it does not know what lived before."""

    def reset(self) -> None:
        self._sizes.clear()
        self._now = self._peak = 0


def rise(context: int, amp: bool) -> int:
    """Peak of what one training step of the 423M model makes, in requested bytes."""
    from vramlab.virtual.device import virtual_gpu

    torch.set_num_threads(1)
    options = {"size": "medium", "context": context, "amp": amp}
    workload = workloads.WORKLOADS["course training"]
    with virtual_gpu("A100 80GB") as gpu:
        place = FromTheStep(gpu, requested=True)
        with place.building():
            model = workload.model(**options)
        return workload.steps(place, model.to(gpu.device), **options)


@pytest.mark.skipif(not TRACES.exists(), reason="needs the real CUDA traces")
@pytest.mark.parametrize(("trace", "context", "amp"), [("lm423m_fp32_ctx128", 128, False), ("lm423m_bf16_ctx512", 512, True)])
def test_a_step_of_the_course_model_rises_as_on_a_real_card(trace: str, context: int, amp: bool) -> None:
    recorded = json.loads(gzip.decompress((TRACES / f"{trace}_training_warm.json.gz").read_bytes()))["peak_requested_bytes_of_trace"]
    assert in_a_process(rise, context, amp) == pytest.approx(recorded, rel=0.005)
