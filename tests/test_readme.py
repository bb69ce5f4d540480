"""README as a stranger uses it: its code runs, its tables are those that were measured, its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import vramlab as vl

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def names() -> dict[str, Any]:
    """What a reader has already: a model, an optimizer, data."""
    model = vl.tasks.gpt("nano").model()
    tokens = torch.randint(256, (2, 17))
    batches = [SimpleNamespace(inputs=tokens[:, :-1], targets=tokens[:, 1:]) for _ in range(5)]
    hidden = model.hidden
    model.hidden = lambda batch: hidden(getattr(batch, "inputs", batch))  # type: ignore[assignment]
    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": tokens[:, :-1],
        "device": torch.device("cpu"),
        "loader": batches,
        "count_tokens": lambda batch: batch.targets.numel(),
    }


def test_the_code_runs_from_top_to_bottom() -> None:
    assert len(BLOCKS) == 6
    namespace = names()
    for block in BLOCKS[:3]:
        exec(block, namespace)
    assert namespace["trace"].peak > namespace["trace"].baseline
    assert [run.status for run in [namespace["run"]]] == ["finished"]


def test_the_plan_and_the_virtual_card_work() -> None:
    """In a process of its own: the second half adds a device type to it."""
    code = f"""
import torch
import vramlab as vl
from torch import nn
MyModel = lambda: nn.Linear(8, 8)
batch = torch.zeros(4, 8)
exec({BLOCKS[3]!r})
print(plan.fits, plan.cause["phase"], len(plan.holders(10)), gpu.peak_allocated > 4 * 72)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True).stdout
    assert out.split() == ["True", "step", "10", "True"]


def test_the_ranks_work() -> None:
    block = BLOCKS[4].replace("vl.parallel.launch(work, ranks=2)", "print(vl.parallel.launch(work, ranks=2))")
    code = f"import torch\nimport vramlab as vl\nexec({block!r})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True).stdout
    assert out.splitlines()[-1] == "[437760, 437760]"


def test_the_techniques_work_in_a_loop_of_ones_own() -> None:
    namespace = names()
    model: nn.Module = namespace["model"]
    before = [p.detach().clone() for p in model.parameters()]
    exec(BLOCKS[5], namespace)
    assert namespace["window"].loss < 6
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(BLOCKS[5].splitlines()) < 18


def test_the_one_line_without_a_notebook_runs() -> None:
    (line,) = re.findall(r"^python -c .*$", README, re.MULTILINE)
    command = [sys.executable, *shlex.split(line)[1:]]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    peak, throughput = out.split()
    assert int(peak) > 0
    assert float(throughput) > 0


def test_the_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    readme = importlib.import_module("readme")
    assert readme.rendered(README) == README, "run python benchmarks/readme.py"


def test_links_lead_to_files() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in t]
    assert len(targets) > 5
    assert [t for t in targets if not (ROOT / t).exists()] == []
