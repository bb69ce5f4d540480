"""Pictures that follow a run: drawn by the training loop itself between two timed steps, and only as often as it may."""

from __future__ import annotations

import time
from collections.abc import Callable

from vramlab.experiments import Run


class Live:
    """Calls ``draw`` with a run that goes on, at most so often and for at most such a share of the time.

    A second thread that draws would fight with the training for Python's lock, so the loop calls `push` after each step.

    Args:
        draw: shows the run as it is now.
        budget: the share of wall time that drawing may take.
        interval: seconds between two pictures at least.
    """

    def __init__(self, draw: Callable[[Run], None], budget: float = 0.02, interval: float = 0.2) -> None:
        self._draw, self._budget, self._interval = draw, budget, interval
        self._next = 0.0
        self.frames = 0
        self.seconds = 0.0
        """What drawing has taken so far."""

    def push(self, run: Run) -> None:
        """The run has made a step: draw it if there is time."""
        if time.perf_counter() >= self._next:
            self.flush(run)

    def flush(self, run: Run) -> None:
        """Draw now."""
        start = time.perf_counter()
        self._draw(run)
        end = time.perf_counter()
        self.frames += 1
        self.seconds += end - start
        self._next = end + max(self._interval, (end - start) / self._budget)
