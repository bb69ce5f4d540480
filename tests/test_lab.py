"""The lab without a browser: switches moved by program and from threads, what it says, and how it starts, stops and fails."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
import psutil
import pytest
import torch
from ipywidgets import Widget
from rows import TASK, batch, loss, model
from torch import nn

import vramlab as vl
from vramlab import experiments
from vramlab.gpus import GPU, gpu
from vramlab.memory.trace import MemoryTrace
from vramlab.notebook import lab as lab_module
from vramlab.notebook.compare_view import COPY
from vramlab.notebook.plan_view import PlanView, pieces, scale, verdict
from vramlab.notebook.predictor import Update
from vramlab.units import format_bytes

pytestmark = pytest.mark.usefixtures("cheap_collections")
CARD = gpu("RTX 4090")
SMALL = CARD.with_(memory="500 MiB", name="small")  # 50 MiB beside the context


@pytest.fixture(autouse=True)
def _nothing_goes_on_afterwards() -> Iterator[None]:
    yield
    labs = LABS[:]
    while LABS:
        lab = LABS.pop()
        lab.stop()
        lab._predictor.forget()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("vramlab")])
    assert not lab_module._training.locked()
    assert not lab_module._going
    del labs


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


LABS: list[vl.Lab] = []
"""Those of the running test, to be stopped at its end whatever happens."""


class Gate:
    """A task whose loss waits, for one micro-batch size, until it is let through; or raises."""

    def __init__(self, size: int, error: BaseException | None = None) -> None:
        self.size, self.error = size, error
        self.reached, self.open = threading.Event(), threading.Event()
        self.task = vl.Task(model, batch, self.loss, "rows", "gated task")

    def loss(self, net: nn.Module, rows: Any) -> Any:
        if len(rows[0]) == self.size:
            self.reached.set()
            assert self.open.wait(30)
            if self.error is not None:
                raise self.error
        return loss(net, rows)


def lab_of(task: vl.Task = TASK, place: GPU | None = None, **options: Any) -> vl.Lab:
    LABS.append(vl.Lab(task, vl.Recipe(**{"micro_batch": 4, **options}), device="cpu", gpu=place))
    return LABS[-1]


def text(widget: Any) -> str:
    """What a person reads of an HTML widget."""
    shown = re.sub(r"<details.*</details>", "", widget.value, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown)).strip()


def status(lab: vl.Lab) -> str:
    return text(lab.view.status)


def steps(lab: vl.Lab) -> int:
    """How far a training run is, as its status says."""
    found = re.search(r"(?:training|running) on .*: step ([\d,]+)", status(lab))
    return int(found[1].replace(",", "")) if found else 0


def rows(lab: vl.Lab) -> dict[str, list[str]]:
    """The memory table: category to its bytes, bytes before, and ratio."""
    found = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", lab.plan.memory.value)]
    return {re.sub("<[^>]+>", "", cells[0]): [re.sub("<[^>]+>", "", c) for c in cells[1:4]] for cells in found if cells}


def known(lab: vl.Lab) -> vl.Lab:
    lab.predict()
    lab.wait(60)
    return lab


def inside(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from inside(child)


# What a setting holds, measured here.


def test_the_lab_begins_where_the_recipe_stands_with_the_switches_it_is_given() -> None:
    recipe = vl.Recipe(precision="amp-bf16", micro_batch=16, accumulation=4, clip_norm=1.0)
    lab = vl.Lab(TASK, recipe, switches=("precision", "micro_batch"), device="cpu")
    assert lab.recipe == recipe
    assert list(lab.switches) == ["precision", "micro_batch"]
    assert vl.Lab(TASK, device="cpu").recipe == vl.Recipe()
    with pytest.raises(ValueError, match="^The lab has no switch 'lr'; it can have precision"):
        vl.Lab(TASK, switches=("lr",), device="cpu")


def test_a_card_that_others_fill_ends_a_run_with_an_error_and_the_next_one_starts() -> None:
    lab = vl.Lab(TASK, vl.Recipe(micro_batch=4), gpu="RTX 4090", in_use="100 GiB", device="cpu")
    with pytest.raises(ValueError, match="Nothing of RTX 4090"):
        lab.train(1)
    lab.set(in_use=0)
    assert lab.train(1).status == "finished"


def test_a_change_is_taken_whole_or_not_at_all() -> None:
    lab = vl.Lab(TASK, vl.Recipe(micro_batch=8), switches=("micro_batch",), device="cpu")
    assert lab._reachable({"micro_batch": 4}) == {"micro_batch": 4}
    with pytest.raises(ValueError, match=r"^This lab has no switch for accumulation; write vl\.Lab\(task, recipe\) for all of them\.$"):
        lab._reachable({"micro_batch": 4, "accumulation": 2})


def test_a_lab_with_several_ranks_trains_nothing() -> None:
    lab = vl.Lab(TASK, vl.Recipe(parallel="ddp", ranks=2), gpu="RTX 4090", device="cpu")
    with pytest.raises(ValueError, match=r"^A lab trains in this process, and this recipe has 2 ranks"):
        lab.train(1)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^loss_chunks=2 needs a Task with a chunked loss"):
        vl.Lab(TASK, vl.Recipe(loss_chunks=2), device="cpu")
    with pytest.raises(TypeError, match="^Training needs a Task, got str 'gpt'"):
        vl.Lab("gpt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RTX 4091"):
        vl.Lab(TASK, gpu="RTX 4091", device="cpu")


def test_twice_the_micro_batch_doubles_activations_and_leaves_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramlab.notebook.plan_view.settled", lambda since: True)
    lab = known(vl.Lab(vl.tasks.gpt("nano"), vl.Recipe(micro_batch=4), device="cpu"))
    LABS.append(lab)
    first = rows(lab)
    assert all(len(cells) == 1 for cells in first.values())  # there is nothing before
    lab.set(micro_batch=8)
    lab.wait(60)
    second = rows(lab)
    assert second["parameters"] == [first["parameters"][0], first["parameters"][0], "x 1.00"]
    assert second["activations"][1] == first["activations"][0]
    assert float(second["activations"][2].removeprefix("x ")) == pytest.approx(2, abs=0.02)
    assert text(lab.plan.verdict) == f"measured {second['total'][0]} at the peak on cpu"


def test_the_table_is_the_breakdown_of_a_run_and_what_goes_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramlab.notebook.plan_view.settled", lambda since: True)
    lab = known(lab_of())
    breakdown = vl.run(TASK, vl.Recipe(micro_batch=4), steps=2, device="cpu", progress=False).breakdown
    right = {label: format_bytes(n) for label, n in [*breakdown.items(), ("total", breakdown.total)] if n}
    assert {label: cells[0] for label, cells in rows(lab).items()} == right
    lab.set(optimizer="sgd")
    lab.wait(30)
    assert (rows(lab)["optimizer state"][0], rows(lab)["optimizer state"][2]) == ("0 B", "gone")
    lab.set(optimizer="adamw")
    lab.wait(30)
    assert rows(lab)["optimizer state"][1:] == ["0 B", "new"]


def test_before_is_what_stood_long_enough_to_be_seen() -> None:
    lab = known(lab_of())
    first = rows(lab)["total"][0]
    lab.plan._since -= 10  # it was looked at
    for micro_batch in (5, 6, 7):  # a slider on its way
        lab.set(micro_batch=micro_batch)
        lab.wait(30)
    assert rows(lab)["total"][1] == first


def test_a_known_setting_is_shown_at_once_and_measured_once() -> None:
    built: list[int] = []
    task = vl.Task(lambda: built.append(1) or model(), batch, loss, "rows")  # type: ignore[func-returns-value]
    lab = known(lab_of(task))
    lab.set(micro_batch=8)
    lab.wait(30)
    assert len(built) == 2
    lab.set(micro_batch=4)
    assert lab.answer is not None
    assert lab.answer.question.recipe.micro_batch == 4
    lab.wait(30)
    assert len(built) == 2


def test_switches_moved_fast_from_several_threads_end_at_what_they_say() -> None:
    lab = lab_of()
    barrier = threading.Barrier(4)

    def move(seed: int) -> None:
        barrier.wait()
        for i in range(25):
            lab.set(micro_batch=2 ** ((seed + i) % 6), optimizer=("sgd", "adamw")[(seed * i) % 2])

    threads = [threading.Thread(target=move, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lab.predict()
    lab.wait(60)
    right = vl.run(TASK, lab.recipe, steps=2, device="cpu", progress=False)
    assert lab.answer is not None
    assert (lab.answer.question.recipe, lab.answer.breakdown) == (lab.recipe, right.breakdown)


def test_an_error_while_measuring_is_shown_and_the_lab_goes_on() -> None:
    gate = Gate(8, ValueError("no <rows> & columns"))
    gate.open.set()
    lab = known(lab_of(gate.task))
    lab.set(micro_batch=8)
    lab.wait(30)
    assert text(lab.plan.verdict) == "no plan ValueError no &lt;rows&gt; &amp; columns"
    assert lab.compare.keep.disabled
    lab.set(micro_batch=16)
    lab.wait(30)
    assert text(lab.plan.verdict).startswith("measured")


# What a setting holds on a card.


@pytest.fixture(scope="module")
def planned() -> Iterator[vl.Lab]:
    lab = known(vl.Lab(vl.tasks.gpt("nano"), vl.Recipe(micro_batch=4), device="cpu", gpu=SMALL))
    worker = lab._predictor._worker
    if worker is not None:
        worker.join(90)
    yield lab
    lab._predictor.forget()


def test_the_bar_is_the_plan_and_its_pieces_add_up(planned: vl.Lab) -> None:
    planned.set(micro_batch=4, in_use=0)
    planned.wait()
    right = vl.plan(planned.task, planned.recipe, SMALL)
    answer = planned.answer
    assert answer is not None
    assert sum(n for _, n, _ in pieces(answer)) == right.device
    assert {label: n for label, n, _ in pieces(answer)}["CUDA context"] == SMALL.context
    assert re.findall(r"<b>([^<]+)</b>", planned.plan.facts.value)[:3] == [
        format_bytes(n) for n in (right.allocated, right.reserved, right.device)
    ]
    assert right.cause["line"] in text(planned.plan.facts)
    widths = [float(x) for x in re.findall(r"width:([\d.]+)%;box-shadow", planned.plan.bar.value)]
    assert sum(widths) == pytest.approx(100 * right.device / scale(answer), abs=0.1)


def test_the_bar_moves_within_100_ms_and_says_what_is_not_certain_yet(planned: vl.Lab) -> None:
    planned.set(micro_batch=4)
    planned.wait()
    before = planned.plan.bar.value
    start = time.perf_counter()
    planned.set(micro_batch=9)
    assert time.perf_counter() - start < 0.1
    assert planned.plan.bar.value != before
    planned.wait()
    assert text(planned.plan.verdict).endswith("traced")


def test_what_comes_from_another_card_says_so_in_each_number_and_in_what_is_kept(planned: vl.Lab) -> None:
    planned.set(micro_batch=4, gpu=SMALL, in_use=0)
    planned.wait()
    answer = planned.answer
    assert answer is not None
    sure = text(planned.plan.verdict) + text(planned.plan.facts) + planned.plan.bar.value + planned.plan.timeline.value
    assert "about" not in sure
    assert "as on" not in sure
    here = f"about {format_bytes(answer.allocated)} allocated of {format_bytes(SMALL.left_for_pytorch())}"
    borrowed = replace(answer, how="estimated", of=CARD, trace=MemoryTrace(answer.trace.events, "RTX 4090"))
    words = {True: "should fit", False: "should not fit", None: "not sure yet"}
    for (fits, word), waits in itertools.product(words.items(), (False, True)):
        planned.plan.update(Update(answer.question, replace(borrowed, fits=fits), busy=True, waits=waits))
        assert text(planned.plan.verdict) == f"{word} {here} as on RTX 4090, {'waits for the run' if waits else 'tracing ...'}"
        assert text(planned.plan.facts).count("about") == 3
        assert "Predicted peak, about:" in planned.plan.bar.value
        assert "one step, as on RTX 4090" in planned.plan.timeline.value
        assert not planned.plan.remedies.children
    fresh = lab_of()
    for fits, word in {True: "should fit", False: "should not fit", None: "not sure"}.items():
        fresh.compare.current(replace(borrowed, fits=fits))
        fresh.compare.keep.click()
        assert fresh.compare.rows[-1].state == f"{word}, as on RTX 4090"
    fresh.plan.update(Update(answer.question, borrowed, busy=True))
    assert f"peak about {format_bytes(answer.allocated)}" in str(fresh._still.picture().summary)
    planned.plan.update(Update(answer.question, answer))


@pytest.mark.parametrize("reserved", [None, 2**30])
@pytest.mark.parametrize("of", [None, CARD], ids=["its own law", "another card"])
@pytest.mark.parametrize("share", [0.4, 0.9, 1.1, 1.9, 2.1])
def test_what_is_allocated_alone_says_that_it_does_not_fit_only_beyond_the_margin(
    planned: vl.Lab, reserved: int | None, of: GPU | None, share: float
) -> None:
    planned.set(micro_batch=4, gpu=SMALL, in_use=0)
    planned.wait()
    assert planned.answer is not None
    allocated = int(share * SMALL.left_for_pytorch())
    answer = replace(planned.answer, allocated=allocated, reserved=reserved, fits=None, how="estimated" if of else "law", of=of)
    too_much = reserved is None and share > (2 if of else 1)
    assert answer.will_fit is (False if too_much else None)
    word = "should not fit" if of else "does not fit"
    assert re.sub("<[^>]+>", "", verdict(answer, busy=True)).startswith(word) is too_much


def test_before_is_no_estimate_from_another_card(planned: vl.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column has no place for "about"."""
    monkeypatch.setattr("vramlab.notebook.plan_view.settled", lambda since: True)
    planned.set(micro_batch=4, gpu=SMALL, in_use=0)
    planned.wait()
    own = planned.answer
    assert own is not None
    questions = [replace(own.question, recipe=vl.Recipe(micro_batch=n)) for n in (5, 6, 7)]
    view = PlanView(lambda **_: None)
    view.update(Update(questions[0], replace(own, question=questions[0], how="estimated", of=CARD), busy=True))
    view.update(Update(questions[1], replace(own, question=questions[1])))
    assert "before" not in view.memory.value
    view.update(Update(questions[2], replace(own, question=questions[2], how="estimated", of=CARD), busy=True))
    view.update(Update(questions[0], replace(own, question=questions[0])))
    assert "before" in view.memory.value
    assert view._before is not None
    assert view._before.question == questions[1]


def test_a_run_that_starts_leaves_the_estimate_of_this_setting_and_says_that_the_rest_waits(
    planned: vl.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lab_of(planned.task, CARD)
    known(lab)
    until(lambda: lab._predictor._worker is None)
    released = threading.Event()
    monkeypatch.setattr(lab._predictor, "_work", lambda: released.wait(30))
    lab.set(gpu="RTX 3090")
    assert text(lab.plan.verdict).endswith("as on RTX 4090, tracing ...")
    bar, row = lab.plan.bar.value, lab.compare._current
    lab_module._idle.clear()
    lab.virtual = True
    try:
        lab_module._going.append(lab)
        lab._predictor.give_way()
    finally:
        lab_module._going.remove(lab)
        lab_module._idle.set()
        released.set()
    assert text(lab.plan.verdict).endswith("as on RTX 4090, waits for the run")
    assert (lab.plan.bar.value, lab.compare._current) == (bar, row)


def test_what_does_not_fit_is_hatched_and_said_and_the_largest_that_fits_is_a_button(planned: vl.Lab) -> None:
    planned.set(micro_batch=64)
    planned.wait()
    assert text(planned.plan.verdict).startswith("does not fit")
    assert "repeating-linear-gradient(45deg,#D55E00" in planned.plan.bar.value
    assert "beyond it" in planned.plan.bar.value
    until(lambda: planned.plan.remedies.children)
    largest = vl.plan(planned.task, planned.recipe, SMALL).max_micro_batch
    assert text(planned.plan.largest) == f"micro-batches up to {largest} fit"
    assert planned.plan.use.layout.display == ""
    planned.plan.use.click()
    assert planned.recipe.micro_batch == largest
    planned.wait()
    assert text(planned.plan.verdict).startswith("fits")
    assert text(planned.plan.largest).endswith("this is the largest")
    assert planned.plan.use.layout.display == "none"
    assert "repeating-linear-gradient(45deg" not in planned.plan.bar.value


def test_a_change_that_is_offered_is_a_button(planned: vl.Lab) -> None:
    planned.set(micro_batch=64)
    planned.wait()
    until(lambda: planned.plan.remedies.children)
    button = planned.plan.remedies.children[1].children[0]
    assert re.fullmatch(r"[\w ,-]+: [\d.]+ [KMG]iB", button.description)
    before = planned.recipe
    button.click()
    assert planned.recipe != before
    planned.set(**{name: getattr(before, name) for name in planned.switches})


def test_what_others_hold_and_the_card_are_controls_too(planned: vl.Lab) -> None:
    planned.set(micro_batch=4, in_use="10 MiB")
    planned.wait()
    assert planned.question.in_use == pytest.approx(10 * 2**20, abs=2**20)
    assert "held by others" in planned.plan.bar.value
    planned.set(gpu="RTX 3060", in_use=0)
    assert planned.question.card == gpu("RTX 3060")
    planned.wait()
    assert "RTX 3060" in planned.plan.bar.value
    planned.set(gpu=SMALL)
    with pytest.raises(ValueError, match="RTX 4091"):
        planned.set(gpu="RTX 4091")
    assert not planned.in_use.disabled
    assert lab_of().in_use.disabled is False
    assert known(lab_of()).in_use.disabled  # a CPU has no card that others could hold


def test_switches_that_exclude_one_another_are_not_planned_and_not_started(planned: vl.Lab) -> None:
    planned.set(micro_batch=4)
    planned.wait()
    planned.set(optimizer_in_backward=True, accumulation=2)
    assert text(planned.plan.verdict).startswith("not possible")
    assert planned.view.start.disabled
    with pytest.raises(ValueError, match="nothing to accumulate"):
        planned.train(1)
    planned.view.start.click()
    assert not lab_module._training.locked()
    planned.set(accumulation=1, optimizer_in_backward=False)
    assert not planned.view.start.disabled
    planned.wait()


def test_a_small_step_on_a_large_card_is_magnified_and_says_where_the_card_ends() -> None:
    lab = known(lab_of(place=CARD))
    assert "RTX 4090 ends far to the right" in lab.plan.bar.value
    assert lab.answer is not None
    assert scale(lab.answer) < CARD.memory / 2


# Training.


def test_start_trains_in_the_background_until_stop() -> None:
    lab = lab_of()
    lab.start()
    until(lambda: steps(lab) >= 5)
    assert (lab.view.start.disabled, lab.view.stop.disabled) == (True, False)
    until(lambda: "rows/s" in status(lab))  # in the steps that are not recorded
    said = status(lab)
    assert re.fullmatch(r"training on cpu : step [\d,]+, (?:[\d,]+ rows/s, )?loss \d\.\d{3}, peak [\d.]+ KiB", said), said
    lab.stop()
    lab.wait(30)
    (run,) = lab.runs
    assert (run.status, run.recipe) == ("stopped", vl.Recipe(micro_batch=4))
    assert status(lab) == f"stopped after {len(run.reports)} steps: fp32, micro batch 4, adamw"
    assert (lab.view.start.disabled, lab.view.stop.disabled) == (False, True)
    assert [row.state for row in lab.compare.rows] == [f"{len(run.reports)} steps, stopped"]


def test_before_the_first_step_it_says_that_the_interrupt_does_not_reach_it() -> None:
    gate = Gate(4)
    lab = lab_of(gate.task)
    lab.start()
    assert gate.reached.wait(30)
    assert status(lab) == ("starting on cpu : fp32, micro batch 4, adamw. Stop ends it; the kernel's interrupt does not reach it.")
    lab.stop()
    assert status(lab) == "stopping after this step ..."
    gate.open.set()
    lab.wait(30)
    assert len(lab.runs[0].reports) == 1  # within one step


def test_ten_starts_and_stops_in_a_row() -> None:
    lab = lab_of()
    for _ in range(10):
        lab.view.start.click()
        until(lambda: not lab._done.is_set())
        lab.view.stop.click()
        lab.wait(30)
    assert [r.status for r in lab.runs] == ["stopped"] * 10
    assert len(lab.compare.rows) == 10


def test_a_run_on_a_virtual_card_is_like_any_other() -> None:
    lab = lab_of(place=CARD)
    run = lab.train(3)
    assert run.device == CARD
    assert [r.memory is not None for r in run.reports] == [True, True, False]
    assert "a virtual card computes nothing" in lab.view.series[2].value
    assert "planned for RTX 4090" in lab.view.step.value
    (row,) = lab.compare.rows
    assert (row.what, row.peak, row.loss, row.speed) == ("run, RTX 4090", run.peak, None, None)
    lab.start()
    until(lambda: steps(lab) >= 2)
    lab.set(micro_batch=8)  # while the planner process is taken
    assert text(lab.plan.verdict).startswith("... to be planned when the run has ended")
    lab.stop()
    lab.wait(60)
    assert lab.answer is not None
    assert (lab.answer.question.recipe.micro_batch, lab.answer.exact) == (8, True)


def test_an_out_of_memory_error_is_explained_and_the_next_run_works() -> None:
    lab = lab_of(place=SMALL, micro_batch=2_000_000)
    lab.start()
    lab.wait(60)
    assert status(lab) == "out of memory small: who held it stands below"
    assert text(lab.view.details).startswith("small ran out of memory: ")
    assert "held by category" in lab.view.details.value
    assert [row.state for row in lab.compare.rows] == ["0 steps, out of memory"]
    lab.set(micro_batch=4)
    assert lab.train(2).status == "finished"
    assert lab.view.details.value == ""


def test_finished_runs_are_rows_with_what_differs_from_the_first() -> None:
    lab = lab_of()
    lab.train(4)
    lab.set(micro_batch=8, optimizer="sgd")
    lab.train(3)
    assert [(r.status, len(r.reports), r.recipe.micro_batch) for r in lab.runs] == [("finished", 4, 4), ("finished", 3, 8)]
    assert list(lab.compare.labels().values()) == ["fp32, micro batch 4, adamw", "+ micro batch 8, sgd"]


def test_train_blocks_and_returns_the_run() -> None:
    lab = lab_of()
    run = lab.train(3)
    assert run is lab.runs[-1]
    assert run.losses == vl.run(TASK, vl.Recipe(micro_batch=4), steps=3, device="cpu", progress=False).losses
    assert status(lab) == "finished after 3 steps: fp32, micro batch 4, adamw"


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_train_refuses_what_run_refuses(steps: Any) -> None:
    lab = lab_of()
    with pytest.raises(ValueError, match=rf"^steps is a whole number of at least 1, got {steps!r}"):
        lab.train(steps)
    assert status(lab).startswith("ValueError steps is a whole number")
    assert lab.train(1).status == "finished"


def test_ctrl_c_ends_train_and_the_run_is_kept() -> None:
    steps: list[int] = []

    def interrupted(net: nn.Module, data: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return loss(net, data)

    lab = lab_of(vl.Task(model, batch, interrupted, "rows"))
    run = lab.train()
    assert (run.status, len(run.reports)) == ("interrupted", 3)
    assert status(lab) == "interrupted after 3 steps: fp32, micro batch 4, adamw"
    assert len(lab.compare.rows) == 1


def test_the_pictures_are_fed_by_the_loop_and_the_last_state_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_of()
    pushed, flushed = [], []
    monkeypatch.setattr(lab.live, "push", lambda run: pushed.append(len(run.reports)))
    monkeypatch.setattr(lab.live, "flush", lambda run: flushed.append(len(run.reports)))
    lab.train(4)
    assert pushed == [1, 2, 3, 4]
    assert flushed == [4]


# One at a time.

REFUSED = "One run at a time: another run is going on in this process. Stop it first."


@pytest.mark.parametrize("same", [True, False], ids=["the same lab", "a second lab"])
def test_a_second_start_is_refused_where_it_was_asked_for_and_can_stop_the_first(same: bool) -> None:
    gate = Gate(4)
    first = lab_of(gate.task)
    second = first if same else lab_of()
    first.start()
    assert gate.reached.wait(30)
    second.start()
    assert status(second).startswith(REFUSED)
    with pytest.raises(RuntimeError, match=f"^{re.escape(REFUSED)}$"):
        second.train(1)
    assert not second.view.stop.disabled
    second.view.stop.click()  # the first may be gone from the page: its cell was run again
    gate.open.set()
    first.wait(30)
    assert [r.status for r in first.runs] == ["stopped"]
    assert second.train(1).status == "finished"


def test_a_run_elsewhere_is_waited_for() -> None:
    going, enough = threading.Event(), threading.Event()

    def hold(run: Any) -> None:
        going.set()
        assert enough.wait(30)

    thread = threading.Thread(target=lambda: vl.run(TASK, steps=1, device="cpu", progress=False, on_step=hold))
    thread.start()
    assert going.wait(30)
    lab = lab_of()
    lab.predict()
    lab.start()
    enough.set()
    until(lambda: steps(lab) >= 3)
    lab.stop()
    lab.wait(30)
    thread.join(30)
    assert lab.runs[0].status == "stopped"


def test_wait_gives_up_with_a_remedy() -> None:
    gate = Gate(4)
    lab = lab_of(gate.task)
    lab.start()
    assert gate.reached.wait(30)
    with pytest.raises(TimeoutError, match=r"^The lab is still busy after 0\.05 seconds; call stop\(\) first\.$"):
        lab.wait(0.05)
    lab.stop()
    gate.open.set()
    lab.wait(30)
    lab.wait(0)  # nothing to wait for


def test_wait_waits_for_a_measurement_too() -> None:
    gate = Gate(4)
    lab = lab_of(gate.task)
    lab.predict()
    assert gate.reached.wait(30)
    with pytest.raises(TimeoutError, match="still busy after 0 seconds"):
        lab.wait(0)
    gate.open.set()
    lab.wait(30)
    assert rows(lab)


@pytest.mark.parametrize("own", [True, False], ids=["in the same lab", "in another lab"])
def test_a_switch_moved_during_training_is_measured_afterwards(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "PATIENCE", 0.01)  # to try during training would be an error at once
    lab = known(lab_of())
    trains = lab if own else lab_of()
    trains.start()
    until(lambda: steps(trains) >= 3)
    lab.set(micro_batch=8)
    lab.set(optimizer="sgd")
    assert text(lab.plan.verdict).startswith("... to be measured when the run has ended")
    time.sleep(0.2)
    assert lab.answer is not None
    assert lab.answer.question.recipe == vl.Recipe(micro_batch=4)  # training goes first
    trains.stop()
    trains.wait(30)
    lab.wait(30)
    assert lab.answer.question.recipe == vl.Recipe(micro_batch=8, optimizer="sgd")
    assert trains.runs[0].recipe == vl.Recipe(micro_batch=4)  # and the run kept the settings it began with


def test_a_switch_moved_just_before_start_is_measured_afterwards() -> None:
    """Start stops the measurement that is going on; it must be made up for."""
    gate = Gate(8)
    lab = known(lab_of(gate.task))
    lab.set(micro_batch=8)
    assert gate.reached.wait(30)
    lab.start()
    gate.open.set()
    until(lambda: steps(lab) >= 3)
    lab.stop()
    lab.wait(30)
    assert lab.answer is not None
    assert lab.answer.question.recipe.micro_batch == 8


# Errors.


@pytest.mark.parametrize("blocking", [True, False])
def test_an_error_in_training_is_shown_and_the_finished_steps_stay(blocking: bool) -> None:
    calls: list[int] = []

    def failing(net: nn.Module, data: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("<b>third</b>")
        return loss(net, data)

    lab = lab_of(vl.Task(model, batch, failing, "rows"))
    if blocking:
        with pytest.raises(KeyError, match="third"):
            lab.train(9)
    else:
        lab.start()
        lab.wait(30)
    assert status(lab) == "KeyError &#x27;&lt;b&gt;third&lt;/b&gt;&#x27;"
    assert "failing" in lab.view.details.value  # the traceback, folded away
    assert "<b>third" not in lab.view.details.value + lab.view.status.value
    assert [(r.status[:8], len(r.reports)) for r in lab.runs] == [("KeyError", 2)]
    assert [(r.state, len(r.losses)) for r in lab.compare.rows] == [("2 steps, KeyError", 2)]
    assert "over 2 steps" in lab.view.series[2].value  # drawn though the error came at once
    assert (lab.view.start.disabled, lab.view.stop.disabled) == (False, True)
    assert lab.train(2).status == "finished"
    assert len(lab.runs) == 2
    assert lab.view.details.value == ""


def test_an_error_before_the_first_step_is_shown_too() -> None:
    lab = lab_of(vl.Task(nn.Tanh, batch, loss, "rows"))
    lab.start()
    lab.wait(30)
    assert status(lab).startswith("ValueError Training needs parameters with requires_grad, and Tanh has none")
    assert [row.peak for row in lab.compare.rows] == [None]


def test_an_error_in_a_callback_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Front ends swallow what callbacks raise."""
    lab = lab_of()

    def fail() -> None:
        raise RuntimeError("in the callback")

    monkeypatch.setattr(lab, "start", fail)
    monkeypatch.setattr(lab, "predict", fail)
    lab.view.start.click()
    assert status(lab) == "RuntimeError in the callback"
    lab.view.say("")
    lab.switches["micro_batch"].value = 8
    assert status(lab) == "RuntimeError in the callback"


def test_a_change_that_needs_a_switch_this_lab_has_not_says_so() -> None:
    lab = vl.Lab(TASK, switches=("precision",), device="cpu")
    lab.plan._apply(checkpointing="blocks")
    assert status(lab).startswith("ValueError This lab has no switch for checkpointing; write vl.Lab(task, recipe)")


# Comparing.


@pytest.fixture(scope="module")
def compared() -> Iterator[vl.Lab]:
    lab = vl.Lab(TASK, vl.Recipe(micro_batch=4), device="cpu")
    lab.train(4)
    lab.set(micro_batch=64)
    lab.train(5)
    lab.wait()
    lab.compare.keep_plan()
    yield lab
    lab._predictor.forget()


def test_a_plan_that_is_kept_is_a_row_and_only_while_it_is_known(compared: vl.Lab) -> None:
    plan = compared.compare.rows[2]
    assert (plan.what, plan.recipe, plan.state, plan.loss) == ("plan, cpu", vl.Recipe(micro_batch=64), "measured", None)
    assert compared.answer is not None
    assert plan.peak == compared.answer.allocated
    fresh = lab_of()
    assert fresh.compare.keep.disabled
    fresh.compare.keep_plan()
    assert fresh.compare.rows == []


@pytest.mark.parametrize("column", ["what", "recipe", "peak", "reserved", "speed", "loss", "state"])
def test_a_click_on_a_heading_sorts_up_then_down_then_not(compared: vl.Lab, column: str) -> None:
    view = compared.compare
    values = []
    for _ in range(3):
        view.heads[column].click()
        values.append([row.number for row in view.in_order()])
        assert [box.children[0].description for box in view._table.children[1:]] == [str(n) for n in values[-1]]
    assert values[2] == [1, 2, 3]
    if column in ("peak", "speed", "loss"):
        known = [r for r in view.rows if getattr(r, column) is not None]
        up = [r.number for r in sorted(known, key=lambda r: getattr(r, column))]
        assert values[0][: len(up)] == up
        assert [n for n in values[1] if n in up] == up[::-1] or len({getattr(r, column) for r in known}) < len(known)
        assert set(values[1][len(up) :]) == {r.number for r in view.rows} - set(up)  # without a value: last, either way


def test_rows_that_are_picked_are_laid_over_one_another(compared: vl.Lab) -> None:
    view = compared.compare
    view.all.click()
    assert view.picture.value.count(format_bytes(view.rows[0].breakdown.total)) >= 1
    view.view.value = "timelines"
    assert view.picture.value.count('<path fill="none" stroke="#') == 6  # each line, and its sample
    view.all.click()
    assert "tick rows" in view.picture.value
    view.view.value = "bars"


def test_what_is_saved_can_be_read_again(compared: vl.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, png = compared.save("mine.json")
    report = json.loads(file.read_text())
    assert (report["task"], report["unit"], len(report["rows"])) == ("rows task", "rows", 3)
    assert report["rows"][1]["recipe"] == {"micro_batch": 64}
    assert report["rows"][1]["losses"] == compared.runs[1].losses
    assert png.read_bytes()[:4] == b"\x89PNG"
    for number in (1, 2):
        compared.compare.saver.click()
        assert (tmp_path / f"lab-rows-task-{number}.json").exists()
        assert f"lab-rows-task-{number}.png" in text(compared.compare.note)
    with pytest.raises(ValueError, match="^There is nothing to save yet: press Start for a run"):
        lab_of().save()
    empty = lab_of()
    empty.compare._guard(empty.save)
    assert text(empty.compare.note).startswith("ValueError: There is nothing to save yet")


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    lab = lab_of(vl.Task(model, batch, lambda m, b: (loss(m, b)[0] * float("nan"), len(b[1])), "rows"))
    lab.train(3)
    file, _ = lab.save(tmp_path / "nan.json")
    assert json.loads(file.read_text())["rows"][0]["losses"] == [None] * 3
    assert "nan" in lab.compare._lines[1].value


def test_copy_recipe_copies_and_shows_the_python_line_that_makes_it(compared: vl.Lab) -> None:
    view = compared.compare
    view.picks[2].value = True
    view.copy.click()
    assert view.python.value == "recipe = vl.Recipe(micro_batch=64)"
    assert view.python.layout.display == ""
    namespace: dict[str, Any] = {"vl": vl}
    exec(view.python.value, namespace)
    assert namespace["recipe"] == compared.runs[1].recipe
    (sent,) = view.copied.outputs  # what the page runs
    assert f"const text = {json.dumps(view.python.value)};" in sent["data"]["application/javascript"]
    view.picks[1].value = True
    view.copy.click()
    exec(view.python.value, namespace)
    assert namespace["recipes"] == [compared.runs[0].recipe, compared.runs[1].recipe]
    view.picks[1].value = view.picks[2].value = False
    view.all.click()
    view.all.click()
    # Where the browser cannot tell of clicks, a page that is loaded again would copy at once.
    assert "if (!(navigator.userActivation && navigator.userActivation.isActive)) say(false);\nelse" in COPY
    assert view.copied.outputs == ()  # a page that is shown again must not copy again


# Front ends.


def test_colab_trains_in_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows nothing that comes from a thread."""
    threads: list[threading.Thread] = []
    lab: vl.Lab

    def watched(net: nn.Module, data: Any) -> Any:
        threads.append(threading.current_thread())
        if len(threads) == 3:
            lab.stop()
        return loss(net, data)

    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    lab = lab_of(vl.Task(model, batch, watched, "rows"))
    lab.view.start.click()
    assert set(threads) == {threading.current_thread()}
    assert [(r.status, len(r.reports)) for r in lab.runs] == [("stopped", 3)]


def test_colab_shows_errors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    gate = Gate(4, ValueError("no"))
    gate.open.set()
    lab = lab_of(gate.task)
    lab.view.start.click()
    assert status(lab) == "ValueError no"


def displayed(monkeypatch: pytest.MonkeyPatch, lab: vl.Lab) -> list[dict[str, str]]:
    """What the front end is sent when the lab is shown, and later updates of it."""
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, thing: Any) -> None:
            shown.append(thing._repr_mimebundle_()[0])

    def display(thing: Any, raw: bool = False, display_id: Any = None) -> Any:
        shown.append(thing if raw else thing._repr_mimebundle_()[0])
        return Handle()

    monkeypatch.setattr(lab_module, "display", display)
    lab._ipython_display_()
    lab.wait(30)
    return shown


def test_the_outputs_text_is_constant_and_a_still_picture_stays_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored outputs are compared by their text; ids differ each time."""
    view = "application/vnd.jupyter.widget-view+json"
    texts = []
    for micro_batch in (4, 8):
        lab = lab_of(micro_batch=micro_batch)
        shown = displayed(monkeypatch, lab)
        lab.train(2)
        texts.append([(bundle["text/plain"], bundle.get("text/html")) for bundle in shown])
        assert all(view in bundle for bundle in shown)
        assert len({bundle["image/png"] for bundle in shown[1:]}) == 3  # nothing yet, what is measured, the run
        assert rows(lab)  # showing it measures where the switches stand
    hint = "<p><em>Interactive: run this cell to use it.</em></p>"
    assert texts == [[("Lab(rows task)", hint), *[("Lab(rows task): a still picture", None)] * 3]] * 2
    assert repr(lab_of()) == "Lab(rows task)"


def test_every_part_of_the_widget_tree_can_be_reached_and_says_what_it_is() -> None:
    lab = vl.Lab(vl.Task(model, batch, loss, "rows", "<b>task</b>"), device="cpu")
    found = list(inside(lab.panel()))
    parts = [*lab.switches.values(), lab.place, lab.in_use, lab.view.start, lab.view.stop, lab.view.status, lab.plan.bar, lab.plan.verdict]
    assert {id(w) for w in (*parts, lab.compare.saver, lab.compare.copy)} <= {id(w) for w in found}
    assert "<b>task" not in "".join(w.value for w in found if isinstance(w, ipywidgets.HTML))
    assert "cpu, this machine" in [words for words, _ in lab.place.options]
    for control in found:
        if isinstance(control, ipywidgets.Button):
            assert control.description
            assert control.tooltip


def test_two_labs_know_nothing_of_each_other() -> None:
    first, second = known(lab_of()), known(lab_of(micro_batch=16))
    first.set(optimizer="sgd")
    first.wait()
    first.train(2)
    assert (second.recipe, second.runs, second.compare.rows) == (vl.Recipe(micro_batch=16), [], [])
    assert second.answer is not None
    assert second.answer.question.recipe == vl.Recipe(micro_batch=16)


# Nothing piles up.


def test_a_thousand_pictures_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = known(lab_of())
    displayed(monkeypatch, lab)
    run = lab.train(40)
    lab.view.draw(run)
    widgets, figures, comms = len(Widget._instances if hasattr(Widget, "_instances") else []), len(plt.get_fignums()), _comms()
    for _ in range(200):
        lab.view.draw(run)
    held = psutil.Process().memory_info().rss
    for _ in range(800):
        lab.view.draw(run)
    assert psutil.Process().memory_info().rss - held < 8 * 2**20
    assert len(plt.get_fignums()) == figures == 0
    assert len(Widget._instances if hasattr(Widget, "_instances") else []) == widgets
    assert _comms() == comms


def test_moving_switches_leaves_no_widgets_behind() -> None:
    lab = known(lab_of())
    lab.set(optimizer_in_backward=True, accumulation=2)
    lab.set(accumulation=1, optimizer_in_backward=False)
    before = _comms()
    for _ in range(20):
        lab.set(optimizer_in_backward=True, accumulation=2)
        lab.set(accumulation=1, optimizer_in_backward=False)
    assert _comms() == before


def _comms() -> int:
    import comm

    return len(comm.get_comm_manager().comms)


def test_live_pictures_take_at_most_their_share_of_the_time() -> None:
    lab = lab_of()
    start = time.perf_counter()
    lab.start()
    time.sleep(3)
    lab.stop()
    lab.wait(30)
    spent = time.perf_counter() - start
    assert lab.live.frames >= 3
    assert lab.live.frames <= 5 * spent + 3
    assert lab.live.seconds < 0.05 * spent  # a budget of 2 %, and room for a busy machine


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_real_card_it_plans_for_this_card_and_trains_on_it() -> None:
    lab = vl.Lab(vl.tasks.gpt("nano"), vl.Recipe(micro_batch=4), device="cuda")
    LABS.append(lab)
    known(lab)
    assert lab.answer is not None
    assert lab.question.card == gpu()
    run = lab.train(5)
    assert run.peak == pytest.approx(lab.answer.allocated, rel=0.1)
    assert run.throughput
