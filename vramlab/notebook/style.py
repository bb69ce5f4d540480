"""How vramlab's figures look, and a figure that shows itself in a notebook without pyplot's global state."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from vramlab.memory.trace import Category
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


COLORS = 128  # of a PNG
CARD = "#D55E00"
"""Where a card ends, and what is beyond it."""
HATCHES = {
    Category.OPTIMIZER_STATE: "---",
    Category.GRADIENTS: "////",
    Category.WEIGHT_COPIES: "....",
    Category.INPUTS: "xxxx",
    Category.TEMPORARY: "\\\\\\\\",
    Category.WORKSPACE: "++++",
    Category.GATHERED_PARAMETERS: "|||",
    Category.BUCKETS: "oo",
    Category.COMMUNICATION: "**",
}
"""A pattern where a colour alone would be like its neighbour's in grey. The colours are Okabe and Ito's, which differ for
colour-blind readers: https://jfly.uni-koeln.de/color/."""


def painted(category: Category) -> dict[str, Any]:
    """How an area of a category is filled, as arguments of matplotlib's patches."""
    return {"facecolor": category.color, "hatch": HATCHES.get(category, ""), "edgecolor": (1, 1, 1, 0.6), "linewidth": 0}


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
        self.details = ""
        """More numbers, for those who cannot see the picture."""

    def axes_row(self, *widths: float) -> list[Axes]:
        """Axes side by side, as wide as the numbers say."""
        with styled():
            grid = self.subplots(1, len(widths), squeeze=False, width_ratios=widths)
        return list(grid[0])

    def axes_below(self, rows: tuple[float, float], upper: Sequence[float], lower: int) -> tuple[list[Axes], list[Axes]]:
        """Axes side by side, as wide as the numbers say, above others of the same size that share their vertical axis.

        Args:
            rows: heights of both.
            upper: widths.
            lower: how many are below.
        """
        with styled():
            grid = self.add_gridspec(2, 1, height_ratios=rows)
            above = grid[0].subgridspec(1, len(upper), width_ratios=upper).subplots(squeeze=False)
            below = grid[1].subgridspec(1, lower).subplots(squeeze=False, sharey=True)
        return list(above[0]), list(below[0])

    def png(self, scale: float = 2.0) -> bytes:
        """The picture, ``scale`` times as many pixels as it is shown with."""
        buffer = io.BytesIO()
        canvas = FigureCanvasAgg(self)  # its own, since savefig() would draw everything twice
        with styled():
            self.set_dpi(100 * scale)
            canvas.draw()
            self.set_dpi(100)
        # A palette: a third of the bytes, and they are stored in notebooks.
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
        picture.quantize(COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "PNG")
        return buffer.getvalue()

    @property
    def alt(self) -> str:
        """The picture in words."""
        return f"{self.summary} {self.details}".strip()

    def __repr__(self) -> str:
        return self.summary

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        width, height = (round(100 * inches) for inches in self.get_size_inches())
        data = {"image/png": base64.b64encode(self.png()).decode(), "text/plain": repr(self)}
        return data, {"image/png": {"width": width, "height": height, "alt": self.alt}}


def byte_unit(largest: float) -> tuple[int, str]:
    """The unit in which an axis up to ``largest`` bytes reads well, and its name."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if largest >= unit:
            return unit, name
    return 1, "B"
