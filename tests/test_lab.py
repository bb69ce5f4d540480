"""The lab without a browser: switches moved by program and from threads, what it says, and how it starts, stops and fails."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets
import pytest
from rows import TASK, batch, loss, model
from torch import nn

import vramlab as vl
from vramlab import experiments, training
from vramlab.notebook import lab as lab_module
from vramlab.notebook.live import LivePlot
from vramlab.recipe import choices

pytestmark = pytest.mark.usefixtures("cheap_collections")


@pytest.fixture(autouse=True)
def _nothing_goes_on_afterwards() -> Iterator[None]:
    yield
    while LABS:
        LABS.pop().stop()
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("vramlab")])
    assert not lab_module._training.locked()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
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


def lab_of(task: vl.Task = TASK, **options: Any) -> vl.Lab:
    LABS.append(vl.Lab(task, vl.Recipe(**{"micro_batch": 4, **options}), device="cpu"))
    return LABS[-1]


def text(widget: Any) -> str:
    """What a person reads of an HTML widget."""
    shown = re.sub(r"<details>.*</details>", "", widget.value, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", shown).strip()


def steps(lab: vl.Lab) -> int:
    """How far a training run is, as its status says."""
    found = re.search(r"training .*: step (\d+)", text(lab.status))
    return int(found[1]) if found else 0


def rows(lab: vl.Lab) -> dict[str, list[str]]:
    """The memory table: category to its bytes, bytes before, and ratio."""
    found = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", lab.memory.value)]
    return {cells[0]: [re.sub("<[^>]+>", "", c) for c in cells[1:4]] for cells in found if cells}


def measured(lab: vl.Lab) -> vl.Lab:
    lab.measure()
    lab.wait(30)
    return lab


# The switches.


def test_the_switches_begin_where_the_recipe_stands() -> None:
    recipe = vl.Recipe(precision="amp-bf16", micro_batch=16, accumulation=4, checkpointing="blocks", optimizer="sgd", clip_norm=1.0)
    assert vl.Lab(TASK, recipe, device="cpu").recipe == recipe
    assert vl.Lab(TASK, device="cpu").recipe == vl.Recipe()


def test_odd_sizes_of_the_recipe_are_positions_too() -> None:
    lab = lab_of(micro_batch=6, accumulation=3)
    assert lab.recipe == vl.Recipe(micro_batch=6, accumulation=3)
    assert lab.switches["micro_batch"].options == (1, 2, 4, 6, 8, 16, 32, 64)
    assert lab.switches["accumulation"].options == (1, 2, 3, 4, 8)


def test_each_switch_offers_choices_of_the_recipe() -> None:
    lab = lab_of()
    for name in ("precision", "checkpointing", "optimizer"):
        assert set(lab.switches[name].options) <= set(choices(name))
        assert len(lab.switches[name].options) > 1
    assert list(lab.switches) == ["precision", "micro_batch", "accumulation", "checkpointing", "optimizer"]


def test_set_moves_switches_and_the_recipe_follows() -> None:
    lab = lab_of(clip_norm=2.0)
    lab.set(micro_batch=8, precision="amp-bf16", optimizer="sgd")
    assert lab.recipe == vl.Recipe(micro_batch=8, precision="amp-bf16", optimizer="sgd", clip_norm=2.0)
    assert (lab.switches["micro_batch"].value, lab.switches["precision"].value) == (8, "amp-bf16")
    lab.wait(30)


def test_an_unknown_switch_is_refused_and_names_the_known() -> None:
    right = r"^The lab has no switch 'lr'; it has precision, micro_batch, accumulation, checkpointing, optimizer\.$"
    with pytest.raises(ValueError, match=right):
        lab_of().set(lr=1)


@pytest.mark.parametrize(("name", "value"), [("micro_batch", 3), ("precision", "fp8"), ("accumulation", None), ("checkpointing", True)])
def test_an_unknown_position_is_refused_and_nothing_moves(name: str, value: Any) -> None:
    lab = lab_of()
    before = lab.recipe
    with pytest.raises(ValueError, match=rf"^The switch '{name}' has no position {value!r}; it has "):
        lab.set(**{"optimizer": "sgd", name: value})
    assert lab.recipe == before


def test_a_recipe_that_is_not_carried_out_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CARRIED_OUT", {"precision": ("fp32",)})
    with pytest.raises(NotImplementedError, match=r"^train\(\) does not carry out precision='bf16' yet\."):
        vl.Lab(TASK, vl.Recipe(precision="bf16"), device="cpu")
    with pytest.raises(TypeError, match="^Training needs a Task, got str 'gpt'"):
        vl.Lab("gpt")  # type: ignore[arg-type]


# What a setting holds.


def test_twice_the_micro_batch_doubles_activations_and_leaves_parameters() -> None:
    lab = measured(vl.Lab(vl.tasks.gpt("nano"), vl.Recipe(micro_batch=4), device="cpu"))
    first = rows(lab)
    assert all(ratio in ("x 1.00", "new") for _, _, ratio in first.values())
    lab.set(micro_batch=8)
    lab.wait(60)
    second = rows(lab)
    assert second["parameters"] == [first["parameters"][0], first["parameters"][0], "x 1.00"]
    assert second["optimizer state"][2] == "x 1.00"
    assert second["activations"][1] == first["activations"][0]
    assert float(second["activations"][2].removeprefix("x ")) == pytest.approx(2, abs=0.02)
    assert text(lab.status).startswith("measured: fp32, micro batch 8, adamw, ")
    assert text(lab.status).endswith(f"{second['total'][0]} at the peak of step 1 and 2")


def test_the_table_is_the_breakdown_of_a_run() -> None:
    lab = measured(lab_of())
    breakdown = vl.run(TASK, vl.Recipe(micro_batch=4), steps=2, device="cpu", progress=False).breakdown
    from vramlab.units import format_bytes

    right = {label: format_bytes(n) for label, n in [*breakdown.items(), ("total", breakdown.total)] if n}
    assert {label: cells[0] for label, cells in rows(lab).items()} == right


def test_what_appears_is_new_and_what_goes_is_shown_as_nothing() -> None:
    lab = measured(lab_of())
    lab.set(optimizer="sgd")
    lab.wait(30)
    assert rows(lab)["optimizer state"][0] == "0 B"
    assert rows(lab)["optimizer state"][2] == "x 0.00"
    lab.set(optimizer="adamw")
    lab.wait(30)
    assert rows(lab)["optimizer state"][1:] == ["0 B", "new"]


def test_a_known_setting_is_shown_at_once_and_measured_once() -> None:
    built: list[int] = []
    task = vl.Task(lambda: built.append(1) or model(), batch, loss, "rows")  # type: ignore[func-returns-value]
    lab = measured(lab_of(task))
    lab.set(micro_batch=8)
    lab.wait(30)
    assert len(built) == 2
    before = rows(lab)
    lab.set(micro_batch=4)
    assert rows(lab)["activations"][:2] == before["activations"][1::-1]
    assert text(lab.status).startswith("measured: fp32, micro batch 4, adamw, ")
    lab.wait(30)
    assert len(built) == 2


def test_the_newest_request_wins() -> None:
    gate = Gate(16)
    lab = measured(lab_of(gate.task))
    lab.set(micro_batch=16)
    assert gate.reached.wait(30)
    lab.set(micro_batch=32)
    lab.set(micro_batch=64)
    gate.open.set()
    lab.wait(30)
    assert text(lab.status).startswith("measured: fp32, micro batch 64, adamw")
    assert vl.Recipe(micro_batch=32) not in lab._measured  # nobody waited for it


def test_a_known_setting_is_not_overtaken_by_an_older_request() -> None:
    gate = Gate(16)
    lab = measured(lab_of(gate.task))
    lab.set(micro_batch=8)
    lab.wait(30)
    right = text(lab.status), rows(lab)["total"][0]
    lab.set(micro_batch=16)
    assert gate.reached.wait(30)
    lab.set(micro_batch=8)  # back again, while 16 is still being measured
    assert (text(lab.status), rows(lab)["total"][0]) == right
    gate.open.set()
    lab.wait(30)
    assert (text(lab.status), rows(lab)["total"][0]) == right


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
    lab.wait(60)
    lab.measure()
    lab.wait(60)
    assert text(lab.status).startswith(f"measured: {lab.recipe}, ")
    right = vl.run(TASK, lab.recipe, steps=2, device="cpu", progress=False)
    assert lab._measured[lab.recipe] == right.breakdown


def test_an_error_while_measuring_is_shown_and_the_lab_goes_on() -> None:
    gate = Gate(8, ValueError("no <rows> & columns"))
    gate.open.set()
    lab = measured(lab_of(gate.task))
    lab.set(micro_batch=8)
    lab.wait(30)
    assert text(lab.status) == "ValueError : no &lt;rows&gt; &amp; columns"
    assert "<details>" in lab.status.value
    assert "<rows>" not in lab.status.value
    lab.set(micro_batch=16)
    lab.wait(30)
    assert text(lab.status).startswith("measured: fp32, micro batch 16")


def test_an_error_that_nobody_waits_for_any_more_is_not_shown() -> None:
    gate = Gate(8, ValueError("old"))
    lab = measured(lab_of(gate.task))
    lab.set(micro_batch=8)
    assert gate.reached.wait(30)
    lab.set(micro_batch=16)
    gate.open.set()
    lab.wait(30)
    assert text(lab.status).startswith("measured: fp32, micro batch 16")


# Training.


def test_start_trains_in_the_background_until_stop() -> None:
    lab = lab_of()
    assert (lab.start_button.disabled, lab.stop_button.disabled) == (False, True)
    lab.start()
    until(lambda: steps(lab) >= 5)
    assert (lab.start_button.disabled, lab.stop_button.disabled) == (True, False)
    until(lambda: "rows/s" in text(lab.status))  # in the steps that are not recorded
    status = text(lab.status)
    assert re.fullmatch(r"training fp32, micro batch 4, adamw: step \d+, loss \d\.\d{3}, (?:[\d,]+ rows/s, )?peak [\d.]+ KiB", status), (
        status
    )
    lab.stop()
    lab.wait(30)
    (run,) = lab.runs
    assert (run.status, run.recipe) == ("stopped", vl.Recipe(micro_batch=4))
    assert len(run.reports) >= 5
    assert text(lab.status) == f"stopped after {len(run.reports)} steps: fp32, micro batch 4, adamw"
    assert (lab.start_button.disabled, lab.stop_button.disabled) == (False, True)
    assert "fp32, micro batch 4, adamw" in lab.table.value


def test_the_buttons_do_the_same() -> None:
    lab = lab_of()
    lab.start_button.click()
    until(lambda: steps(lab) >= 3)
    lab.stop_button.click()
    lab.wait(30)
    assert lab.runs[0].status == "stopped"


def test_finished_runs_are_listed_and_compared_with_the_first() -> None:
    lab = lab_of()
    lab.train(4)
    lab.set(micro_batch=8)
    lab.wait(30)
    lab.train(3)
    assert [(r.status, len(r.reports), r.recipe.micro_batch) for r in lab.runs] == [("finished", 4, 4), ("finished", 3, 8)]
    assert re.findall(r"<th style='text-align:left'>(.*?)</th>", lab.table.value) == ["fp32, micro batch 4, adamw", "+ micro batch 8"]


def test_train_blocks_and_returns_the_run() -> None:
    lab = lab_of()
    run = lab.train(3)
    assert run is lab.runs[-1]
    assert run.losses == vl.run(TASK, vl.Recipe(micro_batch=4), steps=3, device="cpu", progress=False).losses
    assert text(lab.status) == "finished after 3 steps: fp32, micro batch 4, adamw"


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_train_refuses_what_run_refuses(steps: Any) -> None:
    lab = lab_of()
    with pytest.raises(ValueError, match=rf"^steps is a whole number of at least 1, got {steps!r}"):
        lab.train(steps)
    assert text(lab.status).startswith("ValueError : steps is a whole number")
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
    assert text(lab.status) == "interrupted after 3 steps: fp32, micro batch 4, adamw"


def test_the_figure_is_fed_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_of()
    pushed, flushed = [], []
    monkeypatch.setattr(lab.plot, "push", lambda run: pushed.append(len(run.reports)))
    monkeypatch.setattr(lab.plot, "flush", lambda: flushed.append(1))
    lab.train(4)
    assert pushed == [1, 2, 3, 4]
    assert flushed == [1]  # the last state is drawn whatever time has passed
    assert isinstance(lab.plot, LivePlot)


# One at a time.

REFUSED = "One run at a time: another run is going on in this process. Stop it first."


@pytest.mark.parametrize("same", [True, False], ids=["the same lab", "a second lab"])
def test_a_second_start_is_refused_where_it_was_asked_for(same: bool) -> None:
    gate = Gate(4)
    first = lab_of(gate.task)
    second = first if same else lab_of()
    first.start()
    assert gate.reached.wait(30)
    second.start()
    assert text(second.status) == REFUSED
    with pytest.raises(RuntimeError, match=f"^{re.escape(REFUSED)}$"):
        second.train(1)
    first.stop()
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
    lab.measure()
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
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^The lab is still busy after 0\.05 seconds; call stop\(\) first\.$"):
        lab.wait(0.05)
    assert time.monotonic() - start < 20
    lab.stop()
    gate.open.set()
    lab.wait(30)
    lab.wait(0)  # nothing to wait for


def test_wait_waits_for_a_measurement_too() -> None:
    gate = Gate(4)
    lab = lab_of(gate.task)
    lab.measure()
    assert gate.reached.wait(30)
    with pytest.raises(TimeoutError, match="still busy after 0 seconds"):
        lab.wait(0)
    gate.open.set()
    lab.wait(30)
    assert rows(lab)


def test_a_switch_moved_during_training_is_measured_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "PATIENCE", 0.01)  # to try during training would be an error at once
    lab = measured(lab_of())
    lab.start()
    until(lambda: steps(lab) >= 3)
    lab.set(micro_batch=8)
    lab.set(optimizer="sgd")
    time.sleep(0.05)
    assert vl.Recipe(micro_batch=8, optimizer="sgd") not in lab._measured  # training goes first
    lab.stop()
    lab.wait(30)
    assert text(lab.status).startswith("measured: fp32, micro batch 8, sgd, ")
    assert lab.runs[0].recipe == vl.Recipe(micro_batch=4)  # and the run kept the settings it began with
    assert list(lab._measured) == [vl.Recipe(micro_batch=4), vl.Recipe(micro_batch=8, optimizer="sgd")]


def test_a_switch_moved_just_before_start_is_measured_afterwards() -> None:
    """Start stops the measurement that is going on; it must be made up for."""
    gate = Gate(8)
    lab = measured(lab_of(gate.task))
    lab.set(micro_batch=8)
    assert gate.reached.wait(30)
    lab.start()
    gate.open.set()
    until(lambda: steps(lab) >= 3)
    lab.stop()
    lab.wait(30)
    assert text(lab.status).startswith("measured: fp32, micro batch 8, adamw, ")


def test_a_switch_moved_while_another_lab_trains_is_measured_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "PATIENCE", 0.01)  # to try during training would be an error at once
    first, second = lab_of(), lab_of()
    first.start()
    until(lambda: steps(first) >= 3)
    second.set(micro_batch=8)
    time.sleep(0.05)
    assert second._measured == {}
    first.stop()
    first.wait(30)
    second.wait(30)
    assert text(second.status).startswith("measured: fp32, micro batch 8, adamw, ")


# Errors.


@pytest.mark.parametrize("blocking", [True, False])
def test_an_error_in_training_is_shown_and_the_lab_stays_usable(blocking: bool) -> None:
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
    assert text(lab.status) == "KeyError : &#x27;&lt;b&gt;third&lt;/b&gt;&#x27;"
    assert "failing" in lab.status.value  # the traceback, folded away
    assert "<b>third" not in lab.status.value
    assert [(r.status[:8], len(r.reports)) for r in lab.runs] == [("KeyError", 2)]
    assert "KeyError" in lab.table.value
    assert (lab.start_button.disabled, lab.stop_button.disabled) == (False, True)
    assert lab.train(2).status == "finished"
    assert len(lab.runs) == 2


def test_an_error_before_the_first_step_is_shown_too() -> None:
    lab = lab_of(vl.Task(nn.Tanh, batch, loss, "rows"))
    lab.start()
    lab.wait(30)
    assert text(lab.status).startswith("ValueError : Training needs parameters with requires_grad, and Tanh has none")
    assert "no step" not in lab.table.value
    lab.table  # noqa: B018


def test_an_error_in_a_callback_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Front ends swallow what callbacks raise."""
    lab = lab_of()

    def fail() -> None:
        raise RuntimeError("in the callback")

    monkeypatch.setattr(lab, "start", fail)
    monkeypatch.setattr(lab, "measure", fail)
    lab.start_button.click()
    assert text(lab.status) == "RuntimeError : in the callback"
    lab.switches["micro_batch"].value = 8
    assert text(lab.status) == "RuntimeError : in the callback"


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
    lab.start_button.click()
    assert set(threads) == {threading.current_thread()}
    assert [(r.status, len(r.reports)) for r in lab.runs] == [("stopped", 3)]


def test_colab_shows_errors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    gate = Gate(4, ValueError("no"))
    gate.open.set()
    lab = lab_of(gate.task)
    lab.start_button.click()
    assert text(lab.status) == "ValueError : no"


def displayed(monkeypatch: pytest.MonkeyPatch, lab: vl.Lab) -> list[dict[str, str]]:
    import IPython.display

    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, thing: Any) -> None:
            thing._repr_mimebundle_()

    def display(thing: Any, raw: bool = False, display_id: Any = None) -> Any:
        shown.append(thing if raw else thing._repr_mimebundle_()[0])
        return Handle()

    monkeypatch.setattr(lab_module, "display", display)
    monkeypatch.setattr(IPython.display, "display", display)
    lab._ipython_display_()
    lab.wait(30)
    return shown


def test_the_outputs_text_is_constant_and_the_widgets_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored outputs are compared by their text; ids differ each time."""
    texts = []
    for micro_batch in (4, 8):
        lab = lab_of(micro_batch=micro_batch)
        shown = displayed(monkeypatch, lab)
        texts.append([(bundle["text/plain"], bundle.get("text/html")) for bundle in shown])
        views: list[Any] = [bundle.get("application/vnd.jupyter.widget-view+json") for bundle in shown]
        assert [view is not None for view in views] == [True, False, True]
        assert views[2]["model_id"] == lab.table.model_id
        assert "image/png" in shown[1]
        assert rows(lab)  # showing it measures where the switches stand
    hint = "<p><em>Interactive: run this cell to use it.</em></p>"
    assert (
        texts
        == [
            [
                ("Lab(rows task): switches", hint),
                ("LivePlot(memory, throughput, loss)", None),
                ("Lab(rows task): finished runs", hint),
            ]
        ]
        * 2
    )
    assert repr(lab_of()) == "Lab(rows task)"


def test_a_displayed_lab_draws_while_it_trains_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_of()
    displayed(monkeypatch, lab)
    before = lab.plot.frames
    lab.train(3)
    assert lab.plot.frames >= before + 2


def test_every_part_of_the_widget_tree_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = vl.Lab(vl.Task(model, batch, loss, "rows", "<b>task</b>"), device="cpu")
    seen: list[Any] = []
    monkeypatch.setattr(lab_module, "_show_widget", lambda widget, text: seen.append(widget))
    displayed(monkeypatch, lab)

    def inside(widget: Any) -> Iterator[Any]:
        yield widget
        for child in getattr(widget, "children", ()):
            yield from inside(child)

    found = {id(w) for top in seen for w in inside(top)}
    assert {id(w) for w in (*lab.switches.values(), lab.start_button, lab.stop_button, lab.status, lab.memory, lab.table)} <= found
    html = "".join(w.value for top in seen for w in inside(top) if isinstance(w, ipywidgets.HTML))
    assert "<b>task" not in html
    assert "measured on cpu" in html
