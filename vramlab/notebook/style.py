"""How vramlab's figures look, and a figure that shows itself in a notebook without pyplot's global state."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vramlab.units import GiB, KiB, MiB

RC: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "axes.grid": False,
    "grid.alpha": 0.3,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


_drawing = threading.RLock()


@contextmanager
def styled() -> Iterator[None]:
    """Draw in vramlab's style. matplotlib's settings belong to the process, so one thread draws at a time."""
    with _drawing, mpl.rc_context(RC):
        yield


class Picture(Figure):
    """A figure that a notebook shows as a sharp PNG, with a sentence of real numbers as its text.

    Made apart from pyplot, which keeps one current figure for all threads.

    Args:
        width, height: inches, at 100 pixels an inch in the notebook.
        fixed: keep set margins instead of fitting them to the labels, which costs as long as drawing.
    """

    def __init__(self, width: float, height: float, *, fixed: bool = False) -> None:
        with styled():
            super().__init__(figsize=(width, height), dpi=100, layout=None if fixed else "constrained")
        if fixed:
            self.subplots_adjust(left=0.07, right=0.99, top=0.9, bottom=0.26, wspace=0.2)
        self.summary = "vramlab figure"

    def axes_row(self, *widths: float) -> list[Axes]:
        """Axes side by side, as wide as the numbers say."""
        with styled():
            grid = self.subplots(1, len(widths), squeeze=False, width_ratios=widths)
        return list(grid[0])

    def png(self, scale: float = 2.0) -> bytes:
        """The picture, ``scale`` times as many pixels as it is shown with."""
        buffer = io.BytesIO()
        canvas = FigureCanvasAgg(self)  # its own, since savefig() would draw everything twice
        with styled():
            self.set_dpi(100 * scale)
            canvas.print_png(buffer)
            self.set_dpi(100)
        return buffer.getvalue()

    def __repr__(self) -> str:
        return self.summary

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        width, height = (round(100 * inches) for inches in self.get_size_inches())
        data = {"image/png": base64.b64encode(self.png()).decode(), "text/plain": repr(self)}
        return data, {"image/png": {"width": width, "height": height, "alt": self.summary}}


def byte_unit(largest: float) -> tuple[int, str]:
    """The unit in which an axis up to ``largest`` bytes reads well, and its name."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if largest >= unit:
            return unit, name
    return 1, "B"
