"""``python -m vramlab``: what each command prints, its JSON against the documented keys, its exit status, and one line for each error."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import vramlab as vl
from vramlab import answers, command, gpus
from vramlab.command import main, parsed, recipe_of
from vramlab.recipe import Recipe, choices
from vramlab.units import GiB

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## From the command line\n")[2].partition("\n## ")[0]
COMMANDS = list(answers.SCHEMAS)
NANO = ["plan", "nano", "--gpu", "RTX 4090", "--micro-batch", "2"]

TINY = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "llama": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    "bert": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    "roberta": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 34,
    },
}

MODULE = """
import torch, vramlab as vl

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

def loss(model, batch):
    return model(batch).square().sum(), len(batch)

def batch(size, device):
    return torch.randn(size, 4).to(device)

def task():
    return vl.Task(Net, batch, loss, name="mine")

ready = task()
instance = Net()

def number():
    return 3

def broken():
    raise KeyError("weights")

def refuses():
    raise ValueError("no such\\nsize")

def fails_in_the_step():
    return vl.Task(Net, lambda size, device: torch.randn(size, 5).to(device), loss)

def reads_values():
    return vl.Task(Net, batch, lambda model, batch: (model(batch).sum(), int(model(batch).long().sum())))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in a folder of its own; what it imports from there does not stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield
    for name in {"mine", "loud_task", "loud_ready", "outer", "bad", "ends"} & (set(sys.modules) - before):
        del sys.modules[name]


def answer(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    """The JSON that a command prints, and nothing else."""
    assert main([*words, "--json"]) == status
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(found, dict)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    """The one line that a command says on stderr, without the program's name."""
    assert main(words) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"vramlab: [^\n]+\n", err), err
    return err.removeprefix("vramlab: ").removesuffix("\n")


def configuration(path: Path, architecture: str, **changes: Any) -> str:
    model_type = next(name for name in TINY if architecture.lower().startswith(name))
    settings = {"architectures": [architecture], "model_type": model_type, "vocab_size": 64} | TINY[model_type] | changes
    path.write_text(json.dumps(settings))
    return str(path)


def shell(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VRAMLAB_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=180, env=environment, **options)


# The JSON is what --help says

KINDS = {
    "text": str,
    "object": dict,
    "list": list,
    "number": int | float,
    "bytes": int,
    "true or false": bool,
    "true, false or null": bool | None,
    "number or null": int | float | None,
    "bytes or null": int | None,
    "list or null": list | None,
    "object or null": dict | None,
    "text or null": str | None,
}


def check_schema(name: str, found: dict[str, Any]) -> None:
    schema = answers.SCHEMAS[name]
    assert list(found) == list(schema)
    wrong = {key: value for key, value in found.items() if not isinstance(value, KINDS[schema[key][0]])}
    assert wrong == {}
    assert found["schema"] == f"vramlab.{name}/1"
    assert found["vramlab"] == vl.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_key_of_the_json_with_its_type(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for key, (kind, _) in answers.SCHEMAS[name].items():
        assert f"\n  {key} ({kind}):" in told
    assert "exit status: 0 it fits" in told


def test_the_plan_in_json_is_that_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *NANO, "--in-use", "0.5 GiB", "--precision", "amp-bf16", "--sequence", "32")
    check_schema("plan", found)
    recipe = Recipe(micro_batch=2, precision="amp-bf16")
    plan = vl.plan(vl.tasks.gpt("nano", sequence=32), recipe, "RTX 4090", "0.5 GiB")
    for key in ("allocated", "reserved", "device", "margin", "capacity", "host", "retries", "fits", "cause"):
        assert found[key] == getattr(plan, key)
    assert found["recipe"] == dataclasses.asdict(recipe)
    assert found["breakdown"] == dict(plan.breakdown.items())
    assert found["in_use"] == GiB // 2
    assert found["gpu"] == {"name": "RTX 4090", "memory": plan.gpu.memory, "context": plan.gpu.context}
    assert [h["bytes"] for h in found["holders"]] == plan.holders(10)["bytes"].tolist()
    assert found["fits_with_expandable_segments"] is found["max_micro_batch"] is found["changes"] is None
    assert (found["model"], found["task"], found["unit"]) == ("nano", "gpt nano, 32 tokens", "tokens")


def test_what_does_not_fit_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    card = gpus.gpu("RTX 4090")
    held = card.memory - card.context - 24 * 2**20
    found = answer(capsys, *NANO, "--in-use", str(held), status=1)
    check_schema("plan", found)
    assert (found["fits"], found["fits_with_expandable_segments"]) == (False, False)
    assert found["margin"] < 0
    assert main([*NANO, "--in-use", str(held)]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_the_largest_micro_batch_is_found_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    card = gpus.gpu("RTX 4090")
    words = [*NANO, "--in-use", str(card.memory - card.context - 64 * 2**20), "--max-micro-batch"]
    most = answer(capsys, *words)["max_micro_batch"]
    plans = [vl.plan(vl.tasks.gpt("nano"), Recipe(micro_batch=n), card.with_(memory=card.context + 64 * 2**20)) for n in (most, most + 1)]
    assert [p.fits for p in plans] == [True, False]
    main(words)
    assert f"the largest micro-batch that fits: {most}\n" in capsys.readouterr().out


def test_changes_are_planned_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*NANO, "--changes", "--max-micro-batch", "--in-use", str(gpus.gpu("RTX 4090").memory - gpus.CONTEXT - 64 * 2**20)]
    found = answer(capsys, *words)
    check_schema("plan", found)
    plan = vl.plan(vl.tasks.gpt("nano"), Recipe(micro_batch=2), "RTX 4090", found["in_use"])
    assert found["changes"] == [vars(change) for change in plan.changes]
    assert len(found["changes"]) == 5
    main(words)
    told = capsys.readouterr().out
    for change in found["changes"]:
        assert re.search(rf"^  fits +[\d.]+ MiB reserved  {re.escape(change['words'])}$", told, re.MULTILINE)


def test_notes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "resnet-nano", "--gpu", "4090", "--micro-batch", "1"]
    notes = answer(capsys, *words)["notes"]
    assert any("cuDNN" in note for note in notes)
    main(words)
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"Note: {note}." in told for note in notes)


def test_a_run_in_json_has_peak_speed_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "run", "nano", "--steps", "4", "--device", "cpu", "--micro-batch", "2", "--sequence", "16", "--seed", "3")
    check_schema("run", found)
    same = vl.run(vl.tasks.gpt("nano", sequence=16), Recipe(micro_batch=2), steps=4, device="cpu", seed=3, progress=False)
    assert (found["peak"], found["losses"], found["steps"]) == (same.peak, same.losses, 4)
    assert found["breakdown"] == dict(same.breakdown.items())
    low, high = found["throughput_range"]
    assert 0 < low <= found["throughput"] <= high
    assert (found["device"], found["virtual"], found["status"]) == ("cpu", False, "finished")


def test_a_run_on_a_virtual_card_has_no_losses_and_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "run", "nano", "--steps", "3", "--device", "v100-sxm2-16gb", "--micro-batch", "2")
    check_schema("run", found)
    assert (found["losses"], found["throughput"], found["throughput_range"]) == ([None] * 3, None, None)
    assert (found["device"], found["virtual"]) == ("V100 SXM2 16GB", True)


def test_the_cards_in_json_have_every_figure_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gpus")
    check_schema("gpus", found)
    assert [c["name"] for c in found["cards"]] == [c.name for c in gpus.cards()]
    told = answers.SCHEMAS["gpus"]["cards"][1]
    for card, known in zip(found["cards"], gpus.cards(), strict=True):
        assert card["usable"] == known.memory - known.context
        assert {f.name for f in dataclasses.fields(gpus.GPU)} <= set(card)
        assert card["sources"] == dict(known.sources)
        assert card["capability"] == list(known.capability)
        assert [key for key in card if not re.search(rf"\b{key}\b", told)] == []


# In words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (NANO, ["planned for RTX 4090 (23.52 GiB)", "FITS, 23.", "allocated", "optimizer state", "the peak is in", "lines that hold most"]),
        ([*NANO, "--in-use", "1 GiB"], [", of which others hold 1 GiB"]),
        ([*NANO, "--offload", "optimizer"], ["offloaded to host memory"]),
        (
            ["run", "nano", "--steps", "3", "--device", "cpu"],
            ["measured on cpu", "allocated", "tokens/s (quartiles", "3, finished", "activations"],
        ),
        (["run", "nano", "--steps", "2", "--device", "T4"], ["planned for T4", "not measured", "not computed"]),
        (["gpus"], ["RTX 4090 Laptop", "capability", "GB/s", "TFLOPS"]),
        ([], ["CUDA build", "nothing to mend"]),
    ],
)
def test_words_are_there_within_80_columns_and_without_colour(
    words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert [text for text in told if text not in out] == []
    assert [line for line in out.splitlines() if len(line) > 79] == []
    assert "\x1b" not in out
    assert err == ""


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)])
def test_help_fits_80_columns(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([*words, "-h"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m vramlab {' '.join(words)}")
    assert [line for line in out.splitlines() if len(line) > 79] == []


def long_plan(**changes: Any) -> dict[str, Any]:
    return {
        "margin": -5 * GiB,
        "fits": False,
        "fits_with_expandable_segments": True,
        "retries": 0,
        "allocated": 7,
        "reserved": 8,
        "device": 9,
        "host": 0,
        "breakdown": {"parameters": 10**15, "gradients": 1, "inputs": 0},
        "cause": {"phase": "step", "operator": "aten::" + "x" * 60, "module": "a.b" * 30, "line": "far/" * 40 + "a.py:3"},
        "holders": [{"line": "far/" * 40 + "a.py:3", "bytes": 3}, {"line": "", "bytes": 2}],
        "max_micro_batch": None,
        "ranks": [],
        "changes": None,
        "notes": [],
    } | changes


def test_long_names_and_paths_are_wrapped() -> None:
    text = answers.plan_text(long_plan(), "a title of " + "many words " * 20)
    assert [line for line in text.splitlines() if len(line) > 79] == []
    assert "5.00 GiB too much; fits with PYTORCH_ALLOC_CONF=expandable_segments:True" in " ".join(text.split())
    assert "not followed" in text
    assert "host" not in text
    assert "inputs" not in text


def test_a_cache_that_had_to_be_emptied_is_told() -> None:
    text = answers.plan_text(long_plan(fits=True, fits_with_expandable_segments=None, retries=3, margin=0), "t")
    assert "FITS, 0 B left, after the allocator has emptied its cache 3 times" in text


def test_a_run_that_failed_in_its_first_step_is_told_by_the_first_line_of_its_error() -> None:
    failed = {
        "losses": [],
        "throughput": None,
        "peak": None,
        "steps": 0,
        "status": "OutOfMemoryError: T4\nmore",
        "breakdown": {},
        "ranks": [],
    }
    text = answers.run_text(failed | {"unit": "tokens"}, "t")
    assert "no recorded step" in text
    assert "not computed" in text
    assert "steps       0, OutOfMemoryError: T4\n" in text
    assert "more" not in text


# Flags and recipes


def values(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    if known := choices(field.name):
        return st.sampled_from(known)
    if isinstance(field.default, bool):
        return st.booleans()
    if isinstance(field.default, int):
        return st.integers(-2, 10**6)
    return st.floats(allow_nan=False)


@given(st.fixed_dictionaries({}, optional={f.name: values(f) for f in dataclasses.fields(Recipe)}), st.booleans())
def test_flags_make_the_recipe_of_the_same_options(options: dict[str, Any], joined: bool) -> None:
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}={value}"] if joined or str(value).startswith("-") else [f"--{flag}", str(value)]
    for order in (["plan", "nano", *words], ["run", *words, "nano"]):
        try:
            expected = Recipe(**options)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                recipe_of(parsed(order))
        else:
            assert recipe_of(parsed(order)) == expected


@pytest.mark.parametrize("name", ["plan", "run"])
def test_every_option_of_a_recipe_has_its_docstring_as_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "-h"])
    told = " ".join(capsys.readouterr().out.split())
    docstrings = command._docstrings(Recipe)
    assert set(docstrings) == {f.name for f in dataclasses.fields(Recipe)}
    for field in dataclasses.fields(Recipe):
        assert f"{docstrings[field.name]} (default: {field.default})" in told
        assert all(value in told for value in choices(field.name))
    assert docstrings["micro_batch"] == "Items (sequences, images) in one forward and backward."


# Models


@pytest.mark.parametrize("name", ["nano", "llama-nano", "resnet-nano", "vit-nano"])
def test_a_built_in_name_is_a_task(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "plan", name, "--gpu", "4090", "--micro-batch", "1")["fits"]


def test_every_built_in_name_is_known() -> None:
    from vramlab.named import builtin_names, named_task

    names = builtin_names()
    assert {"gpt2-xl", "llama-8b", "vit-b-16", "resnet18", "nano", "vit-nano", "resnet-nano"} <= set(names)
    assert len({named_task(name).name for name in names}) == len(names) == len(set(names))


@pytest.mark.parametrize(
    "architecture",
    [
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "BertForMaskedLM",
        "RobertaForMaskedLM",
        "GPT2ForSequenceClassification",
        "BertForSequenceClassification",
    ],
)
def test_a_configuration_of_hugging_face_is_planned_and_runs(architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = configuration(tmp_path / "config.json", architecture)
    assert path
    found = answer(capsys, "plan", str(tmp_path), "--gpu", "4090", "--micro-batch", "2", "--sequence", "16")
    assert found["task"] == f"{architecture} of {tmp_path / 'config.json'}, 16 tokens"
    ran = answer(capsys, "run", path, "--device", "cpu", "--steps", "2", "--micro-batch", "2", "--sequence", "16")
    nbytes = 4 * parameters(path)[0]
    assert nbytes <= found["breakdown"]["parameters"] < 1.1 * nbytes
    assert nbytes <= ran["breakdown"]["parameters"] < 1.1 * nbytes
    assert all(0 < loss < 10 for loss in ran["losses"])
    assert ran["unit"] == ("sequences" if "Classification" in architecture else "tokens")


def parameters(path: str, **options: Any) -> tuple[int, set[torch.dtype]]:
    from vramlab.named import configured_task

    model = configured_task(Path(path), **options).model()
    return sum(p.numel() for p in model.parameters()), {p.dtype for p in model.parameters()}


def test_parameters_are_those_of_the_configuration_in_float32(tmp_path: Path) -> None:
    path = configuration(tmp_path / "a.json", "GPT2LMHeadModel", dtype="bfloat16")
    width, vocabulary, positions = 32, 64, 32
    count, dtypes = parameters(path)
    assert count == (vocabulary + positions) * width + 12 * width**2 + 13 * width + 2 * width
    assert dtypes == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "classes"),
    [
        ({}, 2),
        ({"num_labels": 1}, 1),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, 3),
        ({"problem_type": "regression", "num_labels": 2}, 2),
    ],
)
def test_a_classifier_gets_labels_of_its_problem(changes: dict[str, Any], classes: int, tmp_path: Path) -> None:
    from vramlab.named import configured_task

    task = configured_task(Path(configuration(tmp_path / "a.json", "BertForSequenceClassification", **changes)), 8)
    tokens, labels = task.batch(5, torch.device("cpu"))
    assert tokens.shape == (5, 8)
    assert len(labels) == 5
    assert labels.is_floating_point() == bool(changes)
    total, count = task.loss(task.model(), (tokens, labels))
    assert count == 5
    assert total.requires_grad


def test_the_loss_is_the_models_own_mean_times_the_items(tmp_path: Path) -> None:
    from vramlab.named import configured_task

    task = configured_task(Path(configuration(tmp_path / "a.json", "LlamaForCausalLM")), 16)
    model, tokens = task.model(), task.batch(3, torch.device("cpu"))
    total, count = task.loss(model, tokens)
    assert count == 48
    logits = model(input_ids=tokens).logits[:, :-1]
    own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert total.item() / count == pytest.approx(own.item(), rel=1e-5)


def test_keys_and_values_are_not_kept(tmp_path: Path) -> None:
    from vramlab.named import configured_task

    task = configured_task(Path(configuration(tmp_path / "a.json", "LlamaForCausalLM", use_cache=True)), 16)
    assert task.model()(input_ids=torch.zeros(1, 4, dtype=torch.int64)).past_key_values is None


@pytest.mark.parametrize(("positions", "tokens"), [(34, 32), (32, 32), (131072, 2048), (5, 5)])
def test_the_sequence_is_the_longest_up_to_2048(positions: int, tokens: int, tmp_path: Path) -> None:
    from vramlab.named import configured_task

    task = configured_task(Path(configuration(tmp_path / "a.json", "BertForMaskedLM", max_position_embeddings=positions)))
    assert task.name.endswith(f", {tokens} tokens")


@pytest.mark.parametrize("attribute", ["task", "ready"])
def test_a_factory_in_the_working_directory_is_found_and_what_it_prints_is_no_json(
    attribute: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each in a module of its own: what was planned before is not run again, and prints nothing.
    loud = MODULE.replace("    return torch", "    print('a batch')\n    return torch").replace(
        "def task():", "def task():\n    print('a task')"
    )
    (tmp_path / f"loud_{attribute}.py").write_text(loud)
    assert main(["plan", f"loud_{attribute}:{attribute}", "--gpu", "4090", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["task"] == "mine"
    assert "a task" in err
    assert "a batch" in err


# Errors: one line, status 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["plna"], r"argument COMMAND: invalid choice: 'plna' \(choose from .*run.*\); python -m vramlab --help says more\."),
        (["--jsn"], r"unknown '--jsn'; python -m vramlab --help says more\."),
        (["plan"], r"the following arguments are required: MODEL; python -m vramlab plan --help says more\."),
        (
            ["plan", "nano", "--micro-bach", "2"],
            r"unknown '--micro-bach', the nearest: --micro-batch, .*; python -m vramlab plan --help says more\.",
        ),
        (["run", "nano", "--gpu", "4090"], r"unknown '--gpu'.*; python -m vramlab run --help says more\."),
        (["plan", "nano", "--micro", "2"], r"unknown '--micro', .*"),
        (["plan", "nano", "--micro-batch", "two"], r"argument --micro-batch: invalid int value: 'two'; .*"),
        (["plan", "nano", "--clip-norm", "x"], r"argument --clip-norm: invalid float value: 'x'; .*"),
        (["plan", "nano", "--precision", "amp"], r"argument --precision: invalid choice: 'amp' \(choose from .*amp-bf16.*\); .*"),
        ([*NANO, "--micro-batch", "0"], r"Recipe\.micro_batch is a whole number of at least 1, got 0\."),
        ([*NANO, "--clip-norm", "nan", "--ranks", "0"], r"Recipe\.clip_norm is a positive number, got nan\. Recipe\.ranks is .*, got 0\."),
        (
            [*NANO, "--optimizer-in-backward", "--accumulation", "2"],
            r"A step in backward .* Got optimizer_in_backward=True, accumulation=2\. Set .*",
        ),
        (["plan", "resnet-nano", "--gpu", "4090", "--loss-chunks", "2"], r"loss_chunks=2 needs a Task with a chunked loss, .*"),
        (
            ["plan", "nano", "--gpu", "RTX 4091"],
            r"No card 'RTX 4091' is known; the nearest: RTX 4090, .*\. 'python -m vramlab gpus' lists them\.",
        ),
        (["plan", "nano", "--gpu", "zzz"], r"No card 'zzz' is known\. 'python -m vramlab gpus' lists them\."),
        (["plan", "nano", "--gpu", "H100"], r"'H100' fits H100 SXM and H100 PCIe; name one of them\."),
        (["run", "nano", "--device", "RTX 4091"], r"No card 'RTX 4091' is known; the nearest: .*"),
        (["run", "nano", "--device", "gpu"], r"A device is 'auto', 'cpu', 'cuda' or 'cuda:1', got 'gpu'\."),
        (["run", "nano", "--steps", "0", "--device", "cpu"], r"steps is a whole number of at least 1, got 0; .*"),
        ([*NANO, "--in-use", "much"], r"A size is a number and a unit \(B, KiB, MiB, GiB\), got 'much'; .*"),
        ([*NANO, "--in-use", "40 GiB"], r"Nothing of RTX 4090 .* lower in_use\."),
        ([*NANO, "--sequence", "5000"], r"A sequence has 1 to 64 tokens for 'nano', got 5000\."),
        (
            ["plan", "resnet18", "--gpu", "4090", "--sequence", "8"],
            r"A sequence is for models of text, and 'resnet18' takes images; leave it out\.",
        ),
        (
            ["plan", "gpt2-xxl", "--gpu", "4090"],
            r"No model 'gpt2-xxl' is known; the nearest: gpt2-xl, .*\. A model is one of nano, .*, or module:factory\.",
        ),
        (["plan", "", "--gpu", "4090"], r"No model '' is known\. A model is one of .*"),
        (
            ["plan", "openai/gpt2", "--gpu", "4090"],
            r"No model 'openai/gpt2' is known.* Nothing is downloaded: .* save its config\.json and name that\. .*",
        ),
        (
            ["plan", "a:b", "--gpu", "4090", "--sequence", "8"],
            r"A sequence is for models that are made here, and 'a:b' makes its own batches; .*",
        ),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(line, refusal(capsys, *words))


def test_a_machine_without_a_card_asks_for_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_seen_by_torch", lambda: None)
    monkeypatch.setattr(gpus, "_seen_by_driver", lambda: None)
    assert refusal(capsys, "plan", "nano") == "There is no CUDA card in this machine: name one, such as --gpu 'RTX 4090'."


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mine:instance", r"'mine:instance' is a Net, which lacks a batch and a loss: return vramlab\.Task\(model=.*"),
        ("mine:Net", r"'mine:Net' makes a Net, which lacks a batch and a loss: return vramlab\.Task\(model=.*"),
        ("mine:number", r"'mine:number' makes a int, and a vramlab\.Task is needed; return .*"),
        ("mine:tsk", r"The module of 'mine:tsk' has no 'tsk'; the nearest: task.*; give module:factory\."),
        ("mine:", r"The module of 'mine:' has no ''; give module:factory\."),
        (":task", r"A model is module:factory, got the module ''; write for example train:task\."),
        (".mine:task", r"A model is module:factory, got the module '\.mine'; .*"),
        ("nothing:task", r"There is no module 'nothing' in .* or among what is installed; give module:factory\."),
        ("outer.nothing:task", r"There is no module 'outer\.nothing' in .*"),
        ("bad:task", r"ModuleNotFoundError at .*bad\.py:1: No module named 'not_there'"),
        ("ends:task", r"Importing 'ends' ended Python with status 4; put what the script does under if __name__ == '__main__'\."),
        ("mine:broken", r"KeyError at .*mine\.py:\d+: 'weights'"),
        ("mine:refuses", r"ValueError at .*mine\.py:\d+: no such size"),
        ("mine:fails_in_the_step", r"RuntimeError at .*mine\.py:9: .*"),
        ("mine:reads_values", r"(UnknownValueError at .*mine\.py:\d+: )?.*mine\.py:\d+.*"),
    ],
)
def test_a_factory_that_makes_no_task_is_one_line(name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").touch()
    (tmp_path / "bad.py").write_text("import not_there\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(4)\n")
    assert re.fullmatch(line, refusal(capsys, "plan", name, "--gpu", "4090"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, r"No configuration can be read from 'a\.json': No such file or directory; give the path of a config\.json\."),
        ("{", r"'a\.json' is no JSON: .*; give the config\.json of a model\."),
        ("[1]", r"A config\.json holds an object, 'a\.json' holds a list; give that of a model\."),
        ("{}", r"The architectures of a config\.json end in ForCausalLM, .*, and 'a\.json' has no architectures; mend that, or .*"),
        (
            '{"architectures": ["T5ForConditionalGeneration"]}',
            r"The architectures .* has architectures=\['T5ForConditionalGeneration'\]; .*",
        ),
        ('{"architectures": "LlamaForCausalLM"}', r"The architectures .* has architectures='LlamaForCausalLM'; .*"),
        (
            '{"architectures": ["AForCausalLM"], "model_type": "lama"}',
            r"This transformers knows no model_type 'lama'; the nearest: .*llama.*",
        ),
        ('{"architectures": ["AForCausalLM"]}', r"This transformers knows no model_type 'None'.*"),
        (
            '{"architectures": ["AForCausalLM"], "model_type": "llama", "quantization_config": {"bits": 4}}',
            r"'a\.json' is that of quantised weights, which are not trained; drop its quantization_config\.",
        ),
        (
            '{"architectures": ["AForCausalLM"], "model_type": "llama", "vocab_size": "many"}',
            r"transformers does not take 'a\.json': .*; mend it\.",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(
    content: str | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    assert re.fullmatch(line, refusal(capsys, "plan", "a.json", "--gpu", "4090"))


@pytest.mark.parametrize("tokens", ["1", "35"])
def test_a_sequence_that_the_configuration_has_no_positions_for_is_refused(
    tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configuration(tmp_path / "a.json", "RobertaForMaskedLM")
    assert refusal(capsys, "plan", path, "--gpu", "4090", "--sequence", tokens) == (
        f"A sequence has 2 to 34 tokens for this config.json, got {tokens}."
    )


def test_a_configuration_without_bounds_takes_any_sequence_of_2_and_more() -> None:
    from vramlab.named import _sequence

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert (_sequence(config, None), _sequence(config, 10**5)) == (2048, 10**5)
    with pytest.raises(ValueError, match=r"^A sequence has at least 2 tokens for this config\.json, got 1\.$"):
        _sequence(config, 1)


def test_a_missing_transformers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = configuration(tmp_path / "a.json", "GPT2LMHeadModel")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(capsys, "plan", path, "--gpu", "4090").endswith("pip install 'vramlab[models]'")


def test_a_traceback_is_shown_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nani", "--gpu", "4090", "--traceback"]) == 2
    assert re.match(r"Traceback .*\nValueError: No model 'nani'.*\nvramlab: No model 'nani'", capsys.readouterr().err, re.DOTALL)


def test_a_planner_process_that_died_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MODULE + "\ndef dies():\n    return vl.Task(lambda: __import__('os')._exit(7), batch, loss)\n")
    assert main(["plan", "mine:dies", "--gpu", "4090"]) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(r"vramlab: The planner process ended with exit code 7 .* The next call starts a new process\.\n", line)


# Out of memory, interrupts, pipes


def test_a_run_that_is_out_of_memory_says_so_and_ends_with_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    card = gpus.gpu("T4")
    monkeypatch.setattr(gpus, "gpu", lambda name: card.with_(memory=card.context + 24 * 2**20))
    assert main(["run", "nano", "--device", "T4", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    check_schema("run", found)
    assert found["status"].startswith("OutOfMemoryError: T4")
    assert found["peak"] > 0
    assert re.fullmatch(r"vramlab: T4 out of memory[^\n]+\n", err)
    assert found["report"]["device"] == "T4"
    assert found["report"]["changes"]
    assert main(["run", "nano", "--device", "T4"]) == 1
    out = capsys.readouterr().out
    assert "one change to the recipe, planned again" in out
    assert [line for line in out.splitlines() if len(line) > 79] == []


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce] can't allocate memory: 9 bytes"), True),
        (ValueError("x"), False),
    ],
)
def test_out_of_memory_has_several_faces(error: Exception, is_one: bool) -> None:
    assert command._is_out_of_memory(error) is is_one


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus, "cards", interrupted)
    assert refusal(capsys, "gpus", status=130) == "interrupted"


def test_an_interrupted_run_tells_what_it_has_and_ends_with_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = "    import os, signal\n    calls.append(1)\n    len(calls) == 3 and os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "mine.py").write_text(MODULE.replace("    return torch", f"{batch}    return torch") + "\ncalls = []\n")
    assert main(["run", "mine:ready", "--device", "cpu"]) == 130
    assert "3, interrupted" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_in_a_shell_ends_a_plan_with_130_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import pathlib, time, vramlab as vl\n\ndef model():\n    pathlib.Path('begun').touch()\n    time.sleep(100)\n\n"
        "def task():\n    return vl.Task(model, print, print)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "vramlab", "plan", "mine:task", "--gpu", "4090"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    end = time.monotonic() + 120
    while not Path("begun").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "vramlab: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of a POSIX shell")
def test_a_reader_that_has_enough_is_no_error() -> None:
    code = "import sys; from vramlab.command import main; [main(['gpus', '--json']) for _ in range(9)]"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.wait(60) == 0


# What is imported, and from where it is started


@pytest.mark.parametrize("words", [["gpus"], ["gpus", "--json"], ["plan", "--help"], ["plan", "nano", "--gpu", "none"], ["lab", "--json"]])
def test_these_do_without_torch(words: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None; from vramlab.command import main; main({words!r})"
    result = shell("-c", code)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_the_module_without_a_command_describes_the_machine() -> None:
    result = shell("-m", "vramlab")
    assert result.returncode == 0, result.stderr
    assert [line.split("  ")[0] for line in result.stdout.splitlines()][:3] == ["torch", "CUDA build", "device"]


def test_the_module_passes_the_status_on() -> None:
    result = shell("-m", "vramlab", "plan", "nano", "--gpu", "4091")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"{vl.__version__}\n")


# lab


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find(name))


def with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_lab_starts_what_the_makefile_starts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_all(monkeypatch)
    found = answer(capsys, "lab")
    check_schema("lab", found)
    assert (found["ready"], found["missing"], found["notebooks"]) == (True, [], str(ROOT / "notebooks"))
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "jupyterlab $(LAB_FLAGS)" in line]
    makefile = shlex.split(line.partition("-m jupyterlab $(LAB_FLAGS)")[2].replace("root_dir=notebooks", f"root_dir={ROOT / 'notebooks'}"))
    assert found["command"][:3] == [sys.executable, "-m", "jupyterlab"]
    assert found["command"][3 : 3 + len(makefile)] == makefile
    assert set(found["command"][3 + len(makefile) :]) <= {"--allow-root", "--no-browser"}


def test_lab_opens_no_browser_without_a_screen_and_lets_root_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all(monkeypatch)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "getuid", lambda: 0, raising=False)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert command._lab_answer()["command"][-2:] == ["--allow-root", "--no-browser"]
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(os, "getuid", lambda: 1000, raising=False)
    assert command._lab_answer()["command"][-1].startswith("--LabApp")


def test_lab_without_jupyterlab_says_how_to_install_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_all(monkeypatch)
    without(monkeypatch, "jupyterlab", "PIL")
    assert refusal(capsys, "lab") == (
        "JupyterLab needs jupyterlab, pillow: pip install 'vramlab[lab,models]', or 'make lab' where the notebooks are."
    )
    found = answer(capsys, "lab")
    check_schema("lab", found)
    assert (found["ready"], found["missing"], found["command"]) == (False, ["jupyterlab", "pillow"], [])


def test_lab_without_notebooks_says_where_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_all(monkeypatch)
    monkeypatch.setattr(command, "__file__", str(tmp_path / "site-packages" / "vramlab" / "command.py"))
    assert refusal(capsys, "lab") == (
        "There is no folder 'notebooks' here or beside the package; run it in a checkout of vramlab, which has them."
    )
    assert answer(capsys, "lab")["notebooks"] is None


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(5)", 5), ("pass", 0)])
def test_lab_ends_as_the_server_does(code: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_lab_answer", lambda: {"missing": [], "notebooks": "x", "command": [sys.executable, "-c", code]})
    assert main(["lab"]) == status


def test_lab_waits_for_the_server_after_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"import time, pathlib; time.sleep(1); pathlib.Path({str(tmp_path / 'ended')!r}).touch()"
    monkeypatch.setattr(command, "_lab_answer", lambda: {"missing": [], "notebooks": "x", "command": [sys.executable, "-c", code]})
    wait, calls = subprocess.Popen.wait, []

    def interrupted_once(self: Any, *args: Any, **options: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return wait(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted_once)
    assert refusal(capsys, "lab", status=130) == "interrupted"
    assert (tmp_path / "ended").exists()


# README


@pytest.mark.skipif(not torch.__version__.startswith("2.14"), reason="judged with torch 2.14")
def test_the_plan_that_readme_shows_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r"^python -m vramlab (plan .* --json)$", SECTION, re.MULTILINE)
    assert main(shlex.split(line)) == 1
    found = json.loads(capsys.readouterr().out)
    (shown,) = re.findall(r"```text\n(.*?)```", SECTION, re.DOTALL)
    for text in shown.splitlines():
        if text.strip() in "{}...":
            continue
        ((key, value),) = json.loads("{" + text.strip().rstrip(",").replace(", ...", "") + "}").items()
        close(found[key], value, key)


def close(found: Any, shown: Any, key: str) -> None:
    if isinstance(shown, dict):
        for name, value in shown.items():
            close(found[name], value, name)
    elif isinstance(shown, int) and not isinstance(shown, bool):
        assert found == pytest.approx(shown, rel=0.01), key
    elif key != "torch":
        assert found == shown, key


def test_the_job_that_readme_shows_is_short_and_its_command_is_understood() -> None:
    (job,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    assert len(job.splitlines()) == 8
    (steps,) = [entry["steps"] for entry in yaml.safe_load(job)["jobs"].values()]
    words = shlex.split(steps[-1]["run"])
    assert words[:3] == ["python", "-m", "vramlab"]
    options = parsed(words[3:])
    assert (options.model, options.gpu, options.in_use) == ("mypackage.train:task", "RTX 4090", "0.8 GiB")
    assert recipe_of(options) == Recipe(precision="amp-bf16")


def test_the_commands_that_readme_names_exist() -> None:
    for line in re.findall(r"`python -m vramlab ([^`]+)`", SECTION):
        assert parsed(shlex.split(line)).command in COMMANDS
    assert {name for name in COMMANDS if re.search(rf"\b{name}\b", SECTION)} == set(COMMANDS)


def test_the_status_is_told_in_the_documentation() -> None:
    for status in ("0 it fits", "1 it does not", "2 bad input", "130 after Ctrl-C"):
        assert status in textwrap.dedent(command.__doc__ or "").replace("\n", " ")
