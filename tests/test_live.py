"""Live pictures: drawn by whoever trains, only as often as they may; and what is drawn, as SVG."""

from __future__ import annotations

import re
import xml.dom.minidom
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import vramlab as vl
from vramlab.experiments import Run
from vramlab.memory.trace import NO_EVENTS, Category, Events, MemoryTrace
from vramlab.notebook import live, svg
from vramlab.notebook.live import Live
from vramlab.notebook.run_view import RunView, progress
from vramlab.notebook.svg import COLUMNS, Frame
from vramlab.training import StepReport
from vramlab.units import format_bytes

TASK = vl.Task(lambda: nn.Linear(2, 2), lambda n, d: torch.randn(n, 2), lambda m, b: (m(b).sum(), len(b)), "rows", "rows task")
RUN = vl.run(TASK, vl.Recipe(micro_batch=4), steps=4, device="cpu", progress=False)
GPT = vl.run(vl.tasks.gpt("nano"), vl.Recipe(micro_batch=2), steps=2, device="cpu", progress=False)
FRAME = Frame(600, 200)


class Clock:
    """A clock that moves when it is told to, and a drawing that takes as long as it is told."""

    def __init__(self, drawing: float = 0.0) -> None:
        self.now, self.drawing = 100.0, drawing
        self.drawn: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def draw(self, run: Run) -> None:
        self.drawn.append(self.now)
        self.now += self.drawing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    return clock


def test_a_picture_is_drawn_at_most_five_times_a_second(clock: Clock) -> None:
    pictures = Live(clock.draw)
    for _ in range(1000):  # a step each 10 ms
        pictures.push(RUN)
        clock.now += 0.01
    assert len(clock.drawn) == pictures.frames == 50
    assert all(b - a >= 0.2 - 1e-9 for a, b in zip(clock.drawn, clock.drawn[1:], strict=False))


@pytest.mark.parametrize("budget", [0.02, 0.5])
def test_slow_drawing_takes_no_more_than_its_share(clock: Clock, budget: float) -> None:
    clock.drawing = 1.0
    pictures = Live(clock.draw, budget=budget)
    for _ in range(4000):
        pictures.push(RUN)
        clock.now += 0.05
    assert len(clock.drawn) > 3
    assert pictures.seconds == pytest.approx(len(clock.drawn) * 1.0)
    assert pictures.seconds <= budget * (clock.now - 100) + 1.0


def test_the_first_push_draws_at_once_and_flush_always(clock: Clock) -> None:
    pictures = Live(clock.draw)
    pictures.push(RUN)
    pictures.push(RUN)
    assert len(clock.drawn) == 1
    pictures.flush(RUN)
    assert len(clock.drawn) == 2


# What is drawn.


def parsed(picture: str) -> Any:
    """The SVG as a tree: it must be well formed, and say in words what it shows."""
    (root,) = xml.dom.minidom.parseString(picture).getElementsByTagName("svg")
    assert root.getAttribute("role") == "img"
    assert root.getAttribute("aria-label")
    return root


def words(picture: str) -> list[str]:
    found = []
    for node in parsed(picture).getElementsByTagName("text"):
        parts = [c.data if c.nodeType == c.TEXT_NODE else "".join(t.data for t in c.childNodes) for c in node.childNodes]
        found.append("".join(parts))
    return found


def test_the_timeline_marks_the_peak_and_shades_phases() -> None:
    trace = GPT.trace
    assert trace is not None
    picture = svg.timeline(trace, FRAME, title="one <step> & more")
    said = words(picture)
    assert f"{format_bytes(trace.peak)} in {trace.peak_phase}" in said
    assert {"forward", "backward", "one <step> & more"} <= set(said)
    assert picture.count("fill-opacity") >= 2  # backward and step have a shade
    dot = parsed(picture).getElementsByTagName("circle")[0]
    held = trace.timeline().drop(columns="phase").sum(axis=1).to_numpy()[max(0, trace.events.seeds - 1) :]
    assert float(dot.getAttribute("cx")) == pytest.approx(FRAME.x(held.argmax() / len(held)), abs=FRAME.inner[0] / COLUMNS)


def test_the_stack_is_as_high_as_the_peak_and_as_the_categories() -> None:
    trace = GPT.trace
    assert trace is not None
    picture = svg.timeline(trace, FRAME)
    highest = {}
    for node in parsed(picture).getElementsByTagName("path"):
        if (color := node.getAttribute("fill")).startswith("#"):
            heights = [float(y) for y in re.findall(r"V([\d.]+)", node.getAttribute("d"))]
            highest[color] = min(heights)
    top = trace.peak * 1.22
    assert min(highest.values()) == pytest.approx(FRAME.y(trace.peak / top), abs=0.6)
    parameters = trace.breakdown().parameters
    assert highest["#0072B2"] == pytest.approx(FRAME.y(parameters / top), abs=0.6)


@pytest.mark.parametrize(("times", "drawn"), [(0.5, True), (2.0, True), (2.5, False), (1000, False)])
def test_the_line_where_the_card_ends_is_drawn_within_reach(times: float, drawn: bool) -> None:
    trace = GPT.trace
    assert trace is not None
    picture = svg.timeline(trace, FRAME, capacity=int(times * trace.peak), limit="a card: its bytes")
    assert ("a card: its bytes" in words(picture)) == drawn
    ys = [float(y) for y in re.findall(r'y="(-?[\d.]+)"', picture)]
    assert all(0 <= y <= FRAME.height for y in ys)


def test_a_long_trace_keeps_its_peak_and_its_picture_small() -> None:
    count = 100 * COLUMNS
    nbytes = np.where(np.arange(count) % 2 == 0, 1000, -1000)
    nbytes[2 * 7777] += 5000  # one needle
    nbytes[2 * 7777 + 1] -= 5000
    one = np.zeros(count, np.int32)
    events = Events(np.arange(count) // 2, nbytes, one.astype(np.int8) + 4, one, one.astype(np.int8) + 1, one, ("",), ("aten::add",))
    picture = svg.timeline(MemoryTrace(events), FRAME)
    assert len(picture) < 20_000
    needle = min(float(y) for y in re.findall(r"V([\d.]+)", picture))
    assert needle == pytest.approx(FRAME.y(1 / 1.22), abs=0.6)


def test_an_empty_trace_is_drawn_as_nothing() -> None:
    assert "nothing was allocated" in words(svg.timeline(MemoryTrace(NO_EVENTS), FRAME))


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(numbers, min_size=1, max_size=400))
def test_any_series_is_well_formed_and_inside_its_frame(values: list[float]) -> None:
    picture = svg.series("loss", list(range(1, len(values) + 1)), values, FRAME)
    parsed(picture)
    finite = [v for v in values if np.isfinite(v)]
    if finite:
        line = parsed(picture).getElementsByTagName("path")[-1].getAttribute("d")
        points = [tuple(map(float, p.split())) for p in re.findall(r"[ML]([\d.-]+ [\d.-]+)", line)]
        assert all(0 <= x <= FRAME.width and 0 <= y <= FRAME.height for x, y in points)
        assert len(points) <= 161
    else:
        assert "not computed" in words(picture)


def test_a_series_shows_its_last_value_and_its_unit() -> None:
    assert words(svg.series("peak", [1, 2], [2**20, 3 * 2**20], FRAME, unit="bytes"))[-2:] == ["peak 3.00 MiB", "step 2"]
    assert "rows/s 12,345" in words(svg.series("rows/s", [1, 2], [1.0, 12345.0], FRAME))
    assert svg.series("a<b", [], [], FRAME).count("a&lt;b") >= 1


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_round_numbers_are_few_and_inside(low: float, span: float) -> None:
    found = svg.round_numbers(low, low + span)
    assert len(found) <= 6
    assert all(low - 1e-6 * abs(low) - span * 1e-6 <= v <= low + span * (1 + 1e-6) + 1e-6 * abs(low) for v in found)


def test_an_overlay_names_each_line_and_tells_them_apart_without_colour() -> None:
    trace = GPT.trace
    assert trace is not None
    picture = svg.overlay([("1 first", trace), ("2 second", trace)], FRAME)
    assert [w for w in words(picture) if w.startswith(("1", "2 "))][-2:] == [
        f"{n}: {format_bytes(trace.peak)}" for n in ("1 first", "2 second")
    ]
    dashes = {
        p.getAttribute("stroke-dasharray") for p in parsed(picture).getElementsByTagName("path") if p.getAttribute("stroke-width") == "2"
    }
    assert len(dashes) == 2


# The run view.


def view() -> RunView:
    import ipywidgets

    return RunView("rows", ipywidgets.HTML())


def test_the_pictures_are_the_run_so_far() -> None:
    shown = view()
    shown.draw(RUN)
    last = RUN.reports[-1]
    assert f"loss over 4 steps, last {last.loss:.3f}" in shown.series[2].value
    assert "rows/s over 2 steps" in shown.series[1].value  # those that were not recorded
    assert "peak over 2 steps" in shown.series[0].value
    assert "step 2, measured on cpu" in shown.step.value
    assert progress(RUN) == (
        f"<b>training on cpu</b>: step 4, {last.items_per_second:,.0f} rows/s, loss {last.loss:.3f}, peak {format_bytes(RUN.peak or 0)}"
    )
    assert progress(Run(TASK, RUN.recipe, RUN.device)) == ""


def test_memory_is_that_of_the_last_recorded_step_and_drawn_once() -> None:
    shown = view()
    shown.draw(RUN)
    shown.step.value = "kept"
    shown.draw(RUN)
    assert shown.step.value == "kept"  # the same step need not be sent again
    longer = Run(TASK, RUN.recipe, RUN.device, [*RUN.reports, GPT.reports[0]])
    shown.draw(longer)
    assert "step 1, measured on cpu" in shown.step.value


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0])
def test_a_loss_that_is_no_number_does_not_end_the_run_that_draws_it(loss: float) -> None:
    shown = view()
    shown.draw(Run(TASK, RUN.recipe, RUN.device, [*RUN.reports, StepReport(5, loss, 0.1, 3.0, None)]))
    parsed(shown.series[2].value)


def test_before_the_first_unrecorded_step_it_says_when_there_will_be_a_speed() -> None:
    shown = view()
    shown.draw(Run(TASK, RUN.recipe, RUN.device, RUN.reports[:2]))
    assert "from the third step on" in shown.series[1].value


@pytest.mark.parametrize("before", [0, 1, 700, 2999])
def test_a_peak_of_one_event_among_thousands_is_drawn_as_wide_as_any_column_under_its_mark(before: int) -> None:
    sizes = [2**20] * before + [2**33, -(2**33)] + [2**20] * (3000 - before)
    count = len(sizes)
    one = np.zeros(count, np.int32)
    nbytes, category = np.array(sizes), np.full(count, int(Category.ACTIVATIONS), np.int8)
    events = Events(np.arange(count), nbytes, category, one, one.astype(np.int8) + 1, one, ("",), ("aten::add",))
    picture = svg.timeline(MemoryTrace(events, "cpu"), FRAME)
    ((x, y),) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture)
    (outline,) = re.findall(r'<path fill="#[^"]+" d="([^"]+)"', picture)
    columns = [(float(top), float(left), float(right)) for left, top, right in re.findall(r"H(\d+)V([\d.]+)(?=H(\d+))", outline)]
    top, left, right = min(columns)
    assert top == pytest.approx(float(y), abs=0.2)
    assert right - left >= 1
    assert left <= float(x) <= right


@pytest.mark.parametrize("color", [svg.GOOD, svg.BAD, svg.OPEN, svg.SEEN])
def test_white_words_on_a_badge_can_be_read(color: str) -> None:
    """WCAG 2.2, contrast (minimum): (L1 + 0.05) / (L2 + 0.05) of 4.5 or more, with the relative luminance of sRGB."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    assert 1.05 / (np.dot(linear, [0.2126, 0.7152, 0.0722]) + 0.05) >= 4.5
    assert f"background:{color};color:#fff" in svg.badge(color, "word")
