"""A figure that follows a run, drawn by the training loop itself between two timed steps."""

from __future__ import annotations

import time
from typing import Any

from vramlab.experiments import Run
from vramlab.notebook.plots import draw_legend, draw_series, draw_timeline
from vramlab.notebook.style import Picture, styled


class LivePlot:
    """Memory through the last recorded step, throughput and loss of a run, redrawn in place.

    A second thread that draws would fight with the training for Python's lock, so the loop calls `push` after each
    step, and a picture is drawn only when it costs no more than a tenth of the time since the last one.

    Args:
        unit: what the task's items are.
        budget: the share of wall time that drawing may take.
        interval: seconds between two pictures at least.
    """

    def __init__(self, unit: str = "items", budget: float = 0.1, interval: float = 0.2) -> None:
        self._unit, self._budget, self._interval = unit, budget, interval
        self._next = 0.0
        self._handle: Any = None
        self._run: Run | None = None
        self.frames = 0

    def show(self) -> None:
        """Put the figure into the output of the running cell; later updates replace it there."""
        from IPython.display import display

        self._handle = display(self, display_id=True)

    def push(self, run: Run) -> None:
        """The run has made a step: draw it if there is time."""
        self._run = run
        if time.perf_counter() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Draw now."""
        if self._handle is None:
            return
        start = time.perf_counter()
        self._handle.update(self)
        end = time.perf_counter()
        self._next = end + max(self._interval, (end - start) / self._budget)

    def picture(self) -> Picture:
        """The figure as it is now."""
        picture = Picture(11, 3.2, fixed=True)
        self.frames += 1
        with styled():
            memory, speed, loss = picture.axes_row(2.2, 1, 1)
            run = self._run
            reports = run.reports if run else []
            trace = next((r.memory for r in reversed(reports) if r.memory is not None), None)
            if trace is not None:
                draw_timeline(memory, trace)
                draw_legend(picture, [trace])
            else:
                memory.set(xlabel="allocations and releases", ylabel="allocated", xticks=[], yticks=[])
                memory.text(0.5, 0.5, "Start draws here", ha="center", va="center", color="#868e96", transform=memory.transAxes)
            timed = [r for r in reports if r.items_per_second is not None]
            draw_series(speed, f"{self._unit}/s", [r.step for r in timed], [r.items_per_second or 0.0 for r in timed])
            draw_series(loss, "loss", [r.step for r in reports], [r.loss for r in reports])
        picture.summary = "Live figure: memory through the last recorded step, throughput and loss over steps."
        return picture

    def __repr__(self) -> str:
        return "LivePlot(memory, throughput, loss)"  # constant, so that a notebook's stored output can be compared

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        data, metadata = self.picture()._repr_mimebundle_()
        return data | {"text/plain": repr(self)}, metadata
