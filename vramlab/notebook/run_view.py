"""The run view: Start and Stop, what the run does now in words, and its memory, speed and loss while it goes on."""

from __future__ import annotations

import dataclasses
import html
import math
import traceback
from typing import Any

import ipywidgets as w

from vramlab.experiments import Run, where
from vramlab.gpus import GPU
from vramlab.memory.report import OutOfMemoryReport
from vramlab.memory.trace import MemoryTrace
from vramlab.notebook.svg import BAD, Frame, badge, nothing_yet, series, timeline
from vramlab.units import format_bytes

SERIES = Frame(450, 83, top=17, bottom=8)
STEP = Frame(620, 250)
SAID = "line-height:1.35;color:var(--jp-widgets-color,currentColor);font-size:13px"


class RunView:
    """Widgets that show a `Run` as it goes on, in place.

    Args:
        unit: what the task's items are.
        step: the widget that shows the memory through one step; the plan view has it when nothing runs.
    """

    def __init__(self, unit: str, step: w.HTML) -> None:
        self._unit, self.step = unit, step
        self.start = w.Button(description="Start", icon="play", button_style="success", tooltip="Train with these switches until Stop")
        self.stop = w.Button(description="Stop", icon="stop", disabled=True, tooltip="Stop after the step that is going on")
        self.status = w.HTML(layout={"flex": "1 1 0", "min_width": "320px"})
        self.details = w.HTML()  # of an error
        self.series = [
            w.HTML(nothing_yet(SERIES, "" if i else "Start draws here", name), layout={"width": "100%"})
            for i, name in enumerate(self._names)
        ]
        self._drawn: MemoryTrace | None = None

    @property
    def _names(self) -> tuple[str, str, str]:
        return "peak", f"{self._unit}/s", "loss"

    def controls(self) -> w.VBox:
        """The buttons with the status beside them, and room for an error."""
        row = w.HBox([self.start, self.stop, self.status], layout={"align_items": "center", "flex_flow": "row wrap"})
        return w.VBox([row, self.details])

    def pictures(self) -> w.HBox:
        """Memory through one step beside the series over steps."""
        over = w.VBox(self.series, layout={"flex": "1 1 300px", "min_width": "280px", "max_width": "460px"})
        left = w.Box([self.step], layout={"flex": "1 1 480px", "min_width": "420px", "max_width": "630px"})
        return w.HBox([left, over], layout={"flex_flow": "row wrap"})

    def say(self, message: str, *, strong: bool = False) -> None:
        """What is going on, as HTML."""
        self.status.value = f"<div role='status' style='{SAID}'>{f'<b>{message}</b>' if strong else message}</div>"

    def running(self, now: bool) -> None:
        """Which of the two buttons can be pressed."""
        self.start.disabled, self.stop.disabled = now, not now

    def draw(self, run: Run) -> None:
        """The run as it is now: status, series, and the last recorded step if it is a new one."""
        self.say(progress(run))
        reports = run.reports
        peaks = [(r.step, held) for r in reports if (held := _peak(r.memory, r.counters)) is not None]
        speeds = [(r.step, r.items_per_second) for r in reports if r.items_per_second is not None]
        losses = [(r.step, r.loss) for r in reports]
        lines: tuple[tuple[str, Any, str, str], ...] = (
            ("peak", peaks, "bytes", "#E69F00"),
            (f"{self._unit}/s", speeds, "", "currentColor"),
            ("loss", losses, "", "#0072B2"),
        )
        for widget, (name, points, unit, color) in zip(self.series, lines, strict=True):
            steps, values = [s for s, _ in points], [float(v) for _, v in points]
            if not any(map(math.isfinite, values)):
                virtual = isinstance(run.device, GPU) and name != "peak"
                why = "a virtual card computes nothing" if virtual else "no step yet" if name == "peak" else "from the third step on"
                widget.value = nothing_yet(SERIES, why, name)
            else:
                widget.value = series(name, steps, values, SERIES, unit=unit, color=color)
        last = next((r for r in reversed(reports) if r.memory is not None), None)
        if last is not None and last.memory is not self._drawn:
            self._drawn = last.memory
            assert last.memory is not None
            self.step.value = timeline(last.memory, STEP, title=f"step {last.step}, {where(run.device)}")

    def error(self, error: BaseException) -> None:
        """What went wrong: for an out-of-memory error who held the memory, for others the traceback, folded away."""
        report = getattr(error, "report", None)
        name = html.escape(type(error).__name__)
        if isinstance(report, OutOfMemoryReport):
            self.say(f"{badge(BAD, 'out of memory')} {html.escape(report.device)}: who held it stands below", strong=True)
            # Planning the ways out takes seconds; the plan view offers them as buttons.
            self.details.value = f"<div style='{SAID}'>{dataclasses.replace(report, plan_changes=None)._repr_html_()}</div>"
            return
        text = html.escape("".join(traceback.format_exception(error)))
        self.say(f"{badge(BAD, name)} {html.escape(str(error).splitlines()[0] if str(error) else '')}", strong=True)
        self.details.value = f"<details style='{SAID}'><summary>traceback</summary><pre>{text}</pre></details>"


def progress(run: Run) -> str:
    """``training on cpu: step 41, 12,300 tokens/s, loss 3.101, peak 15.05 MiB``."""
    if not run.reports:
        return ""
    last = run.reports[-1]
    virtual = isinstance(run.device, GPU)
    parts = [f"step {last.step:,}"]
    if last.items_per_second is not None:
        parts.append(f"{last.items_per_second:,.0f} {html.escape(run.task.unit)}/s")
    if not virtual:
        parts.append(f"loss {last.loss:.3f}")
    parts.append(f"peak {format_bytes(run.peak or 0)}")
    place = f"running on a virtual {html.escape(run.device.name)}" if isinstance(run.device, GPU) else f"training on {run.device}"
    return f"<b>{place}</b>: {', '.join(parts)}"


def _peak(memory: MemoryTrace | None, counters: object) -> int | None:
    if memory is not None:
        return memory.counters.allocated if memory.counters is not None else memory.peak
    return getattr(counters, "allocated", None)
