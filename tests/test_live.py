"""The live figure: drawn in place, only as often as it may, by whoever trains."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch
from torch import nn

import vramlab as vl
from vramlab.experiments import Run
from vramlab.notebook import live
from vramlab.notebook.live import LivePlot
from vramlab.notebook.style import Picture
from vramlab.training import StepReport

TASK = vl.Task(lambda: nn.Linear(2, 2), lambda n, d: torch.randn(n, 2), lambda m, b: (m(b).sum(), len(b)), "rows", "rows task")
RUN = vl.run(TASK, vl.Recipe(micro_batch=4), steps=4, device="cpu", progress=False)


class Clock:
    """A clock that moves when it is told to, and a display handle whose drawing takes as long as it is told."""

    def __init__(self, drawing: float = 0.0) -> None:
        self.now, self.drawing = 100.0, drawing
        self.drawn: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def update(self, thing: Any) -> None:
        self.drawn.append(self.now)
        self.now += self.drawing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    return clock


def shown(clock: Clock, **options: float) -> LivePlot:
    plot = LivePlot("rows", **options)
    plot._handle = clock
    return plot


def test_a_picture_is_drawn_at_most_once_an_interval(clock: Clock) -> None:
    plot = shown(clock, interval=0.2)
    for _ in range(100):  # a step each 10 ms
        plot.push(RUN)
        clock.now += 0.01
    assert len(clock.drawn) == 5
    assert all(b - a >= 0.2 - 1e-9 for a, b in zip(clock.drawn, clock.drawn[1:], strict=False))


@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_slow_drawing_takes_no_more_than_its_share(clock: Clock, budget: float) -> None:
    clock.drawing = 1.0
    plot = shown(clock, budget=budget)
    for _ in range(2000):
        plot.push(RUN)
        clock.now += 0.05
    assert len(clock.drawn) > 3
    assert len(clock.drawn) * 1.0 <= budget * (clock.now - 100) + 1.0


def test_the_first_push_draws_at_once_and_flush_always(clock: Clock) -> None:
    plot = shown(clock)
    plot.push(RUN)
    plot.push(RUN)
    assert len(clock.drawn) == 1
    plot.flush()
    assert len(clock.drawn) == 2


def test_nothing_is_drawn_before_it_is_shown() -> None:
    plot = LivePlot("rows")
    plot.push(RUN)
    plot.flush()
    assert plot.frames == 0


def test_showing_asks_for_a_display_that_can_be_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    calls: list[tuple[Any, Any]] = []
    clock = Clock()
    monkeypatch.setattr(IPython.display, "display", lambda thing, display_id=None: (calls.append((thing, display_id)), clock)[1])
    plot = LivePlot("rows")
    plot.show()
    assert calls == [(plot, True)]
    plot.push(RUN)
    assert len(clock.drawn) == 1


def test_the_picture_is_the_run_so_far() -> None:
    plot = LivePlot("rows")
    plot._run = RUN
    picture = plot.picture()
    memory, speed, loss = picture.axes
    assert isinstance(picture, Picture)
    assert memory.collections
    assert loss.lines[0].get_ydata().tolist() == RUN.losses
    assert speed.lines[0].get_xdata().tolist() == [3, 4]
    assert (speed.get_title(loc="left"), loss.get_title(loc="left")) == ("rows/s", "loss")


def test_memory_is_that_of_the_last_recorded_step() -> None:
    longer = vl.run(TASK, vl.Recipe(micro_batch=4, accumulation=3), steps=1, device="cpu", progress=False)
    plot = LivePlot("rows")
    for reports in ([*RUN.reports, *longer.reports], [*longer.reports, *RUN.reports]):
        plot._run = Run(TASK, RUN.recipe, RUN.device, reports)
        last = [r.memory for r in reports if r.memory is not None][-1]
        assert plot.picture().axes[0].get_xlim()[1] == len(last) - max(0, last.events.seeds - 1) - 1


def test_before_a_run_it_says_what_will_be_there() -> None:
    memory, _, _ = LivePlot("rows").picture().axes
    assert [text.get_text() for text in memory.texts] == ["Start draws here"]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0])
def test_a_loss_that_is_no_number_does_not_end_the_run_that_draws_it(clock: Clock, loss: float) -> None:
    plot = shown(clock)
    plot._run = Run(TASK, RUN.recipe, RUN.device, [*RUN.reports, StepReport(5, loss, 0.1, 3.0, None)])
    assert plot.picture().png()


def test_the_notebook_gets_a_constant_text_and_an_alternative_text() -> None:
    """Stored outputs are compared by their text, so it may not depend on what was measured."""
    plot = LivePlot("rows")
    texts = []
    for run in (None, RUN):
        plot._run = run
        data, metadata = plot._repr_mimebundle_()
        texts.append(data["text/plain"])
        assert base64.b64decode(data["image/png"])[:4] == b"\x89PNG"
        assert metadata["image/png"]["alt"].startswith("Live figure: memory through the last recorded step")
    assert texts == [repr(plot)] * 2 == ["LivePlot(memory, throughput, loss)"] * 2


def test_a_frame_is_drawn_once(clock: Clock) -> None:
    plot = LivePlot("rows")
    plot._run = RUN
    plot._repr_mimebundle_()
    assert plot.frames == 1
