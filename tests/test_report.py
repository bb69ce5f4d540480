"""The report of an out-of-memory error: who holds what, what fragmentation cost, and changes that are true when planned."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

import vramlab as vl
from vramlab.gpus import gpu
from vramlab.memory.report import Change, OutOfMemoryReport
from vramlab.memory.trace import NO_EVENTS, Category, Events, MemoryTrace, Phase
from vramlab.planning import plan, single_changes
from vramlab.units import GiB, MiB

SMALL = gpu("RTX 4060").with_(name="small card", memory=gpu("RTX 4060").context + 60 * MiB)
TASK = vl.tasks.gpt("mini")


@functools.cache
def failed() -> torch.OutOfMemoryError:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        vl.run(TASK, vl.Recipe(micro_batch=16), steps=2, device=SMALL, progress=False)
    return caught.value


def report(**fields: Any) -> OutOfMemoryReport:
    rows = [(0, 6 * MiB, Category.PARAMETERS, 1, Phase.BUILD, 1), (1, 3 * MiB, Category.ACTIVATIONS, 0, Phase.FORWARD, 2)]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    storage, nbytes, category, module, phase, line = columns
    events = Events(
        storage, nbytes, category, module, phase, np.zeros(2, int), ("", "head"), ("aten::mm",), line=line, lines=("", "a.py:1", "b.py:2")
    )
    default: dict[str, Any] = {
        "device": "RTX 4090",
        "requested": 10 * MiB,
        "segment": 20 * MiB,
        "capacity": 24 * MiB,
        "allocated": 9 * MiB,
        "reserved": 20 * MiB,
        "where": "aten::mm in forward, module head, b.py:2",
        "trace": MemoryTrace(events),
        "largest_hole": 8 * MiB,
    }
    return OutOfMemoryReport(**default | fields)


def test_the_summary_says_what_failed_what_is_held_and_what_fragmentation_cost() -> None:
    assert report().summary().splitlines() == [
        "RTX 4090 ran out of memory: 10.00 MiB more for aten::mm in forward, module head, b.py:2.",
        "Allocated 9.00 MiB, reserved 20.00 MiB of 24.00 MiB.",
        "11.00 MiB of it is free, in pieces of at most 8.00 MiB. "
        "Together that is enough for it: try PYTORCH_ALLOC_CONF=expandable_segments:True.",
    ]
    assert "Even in one piece that is too little." in report(requested=GiB).summary()
    assert "of it is free" not in report(reserved=9 * MiB).summary()
    assert "reserved 20.00 MiB." in report(capacity=None).summary()


def test_the_text_lists_holders_by_category_module_and_line() -> None:
    text = str(report())
    assert re.search(r"held by category\n +6.00 MiB  parameters\n +3.00 MiB  activations", text)
    assert re.search(r"by module\n +6.00 MiB  head\n +3.00 MiB  \(no module\)", text)
    assert re.search(r"by line\n +6.00 MiB  a.py:1\n +3.00 MiB  b.py:2", text)
    assert "one change to the recipe" not in text
    assert max(map(len, text.splitlines())) < 140


def test_changes_are_planned_when_they_are_asked_for_and_once() -> None:
    asked = []

    def changes() -> list[Change]:
        asked.append(1)
        return [
            Change("loss chunks 8", {"loss_chunks": 8}, 5 * MiB, 8 * MiB, True),
            Change("bf16", {"precision": "bf16"}, 9, 9 * GiB, False),
        ]

    it = report(plan_changes=changes)
    assert asked == []
    assert "  fits     8.00 MiB reserved  loss chunks 8\n  no       9.00 GiB reserved  bf16" in str(it)
    assert "loss chunks 8" in it._repr_html_()
    assert it.to_dict()["changes"][0]["options"] == {"loss_chunks": 8}
    assert asked == [1]


def test_it_is_plain_data_and_html_without_script() -> None:
    data = json.loads(json.dumps(report().to_dict()))
    assert data["by_category"] == {"parameters": 6 * MiB, "activations": 3 * MiB}
    assert data["by_line"][0] == {"line": "a.py:1", "bytes": 6 * MiB}
    page = report(where="<script>")._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_nothing_held_is_reported_too() -> None:
    empty = report(trace=MemoryTrace(NO_EVENTS), allocated=0, reserved=0)
    assert "ran out of memory" in str(empty)
    assert empty.to_dict()["by_module"] == []


def test_an_error_of_a_virtual_card_carries_its_report() -> None:
    it = failed().report
    assert it.device == "small card"
    assert it.capacity == 60 * MiB
    assert it.allocated <= it.reserved <= it.capacity
    assert it.requested > it.capacity - it.reserved
    assert sum(n for _, n in it.breakdown.items()) == it.trace.breakdown("end").total
    assert abs(it.trace.breakdown("end").total - it.allocated) < 2 * MiB  # blocks are rounded
    assert re.search(r"aten::\S+ in (forward|backward|step), .*\.py:\d+", it.where)
    assert any("print(error.report) lists who holds the memory" in note for note in failed().__notes__)
    modules = [row["module"] for row in it.to_dict()["by_module"]]
    assert any(name.startswith("blocks.") for name in modules)


def test_its_changes_are_true_when_planned() -> None:
    changes = failed().report.changes
    assert 1 <= len(changes) <= 5
    for change in changes:
        planned = plan(TASK, vl.Recipe(micro_batch=16).with_(**change.options), SMALL)
        assert (planned.allocated, planned.reserved, planned.fits) == (change.allocated, change.reserved, change.fits)
    assert [c.fits for c in changes] == sorted((c.fits for c in changes), reverse=True)


def test_a_plan_offers_changes_too() -> None:
    planned = plan(TASK, vl.Recipe(micro_batch=16), SMALL)
    assert not planned.fits
    assert planned.changes == failed().report.changes


def test_a_card_without_bf16_is_offered_fp16_and_conflicts_are_not_offered() -> None:
    offered = [o for change in single_changes(TASK, vl.Recipe(micro_batch=2), gpu("T4"), n=99) for o in change.options.items()]
    assert ("precision", "amp-fp16") in offered
    assert ("precision", "bf16") not in offered
    clipped = single_changes(TASK, vl.Recipe(micro_batch=1, clip_norm=1.0), gpu("T4"), n=99)
    assert all("optimizer_in_backward" not in change.options and "micro_batch" not in change.options for change in clipped)


def test_code_on_a_virtual_card_without_a_run_has_a_report_without_changes() -> None:
    from vramlab.virtual.planner import shared

    def here() -> tuple[str, bool]:
        from vramlab.virtual.device import virtual_gpu

        with virtual_gpu("RTX 4060") as card:
            kept = torch.zeros(GiB, device=card.device)  # 4 GiB
            try:
                torch.zeros(GiB, device=card.device)
            except torch.OutOfMemoryError as error:
                del kept
                return str(error.report), error.report.plan_changes is None
        raise AssertionError("it fits")

    text, without = shared().call(here)
    assert "RTX 4060 ran out of memory: 4.00 GiB more for aten::zeros" in text or "4.00 GiB more for aten::" in text
    assert "test_report.py:" in text
    assert without


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """What torch.cuda would say after an error."""
    blocks = [{"size": 7 * MiB, "state": "inactive"}, {"size": 9 * MiB, "state": "active_allocated"}]
    segments = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": [{"size": GiB, "state": "inactive"}]}]
    said = {"memory_snapshot": segments, "memory_allocated": 9 * MiB, "memory_reserved": 20 * MiB, "mem_get_info": (80 * MiB, GiB)}
    for name, value in (said | {"get_device_name": "NVIDIA card", "current_device": 0}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    return torch.device("cuda")


def test_cudas_own_error_is_explained_from_its_counters(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    from vramlab import experiments

    monkeypatch.setattr(experiments, "gpu", lambda: gpu("RTX 4090"))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of ...")
    experiments._explain(error, experiments.Run(TASK, vl.Recipe(), cuda))
    it = error.report
    assert (it.requested, it.allocated, it.reserved, it.largest_hole) == (3 * GiB // 2, 9 * MiB, 20 * MiB, 7 * MiB)
    assert it.capacity == 100 * MiB
    assert it.plan_changes is not None
    assert "NVIDIA card ran out of memory: 1.50 GiB more" in error.__notes__[0]


def test_a_recorder_explains_it_with_its_trace_and_once(cuda: torch.device) -> None:
    from vramlab.devices import explain_out_of_memory

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    explain_out_of_memory(error, cuda, report().trace)
    first = error.report
    assert "an operator in forward" in str(first)
    assert "a.py:1" in str(first)
    explain_out_of_memory(error, cuda, MemoryTrace(NO_EVENTS))
    assert error.report is first
    assert len(error.__notes__) == 1
    for other in (ValueError("no"), None):
        explain_out_of_memory(other, cuda, report().trace)
    plain = torch.OutOfMemoryError("out of memory")
    explain_out_of_memory(plain, torch.device("cpu"), report().trace)
    assert not hasattr(plain, "report")


def test_other_errors_are_left_alone() -> None:
    from vramlab import experiments

    error = ValueError("something else")
    experiments._explain(error, experiments.Run(TASK, vl.Recipe(), torch.device("cpu")))
    assert not hasattr(error, "report")
