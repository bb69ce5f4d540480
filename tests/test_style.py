"""The look of figures: their own settings, sharp pictures with a text, and nothing of matplotlib's state changed."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from PIL import Image

from vramlab.memory.trace import Category
from vramlab.notebook.style import RC, Picture, byte_unit


def size_of(png: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(png)).size


def test_a_picture_is_a_matplotlib_figure_with_its_own_look() -> None:
    picture = Picture(4, 2)
    (ax,) = picture.axes_row(1)
    assert isinstance(picture, Figure)
    assert picture.get_size_inches().tolist() == [4, 2]
    assert not ax.spines["top"].get_visible()
    assert ax.title.get_fontsize() == RC["axes.titlesize"]


@pytest.mark.parametrize("fixed", [False, True])
def test_the_png_has_twice_the_pixels_it_is_shown_with(fixed: bool) -> None:
    picture = Picture(4, 2.5, fixed=fixed)
    picture.axes_row(1, 2)
    assert size_of(picture.png()) == (800, 500)
    assert size_of(picture.png(scale=1)) == (400, 250)
    assert picture.dpi == 100


def test_a_png_keeps_its_colours_and_is_small() -> None:
    picture = Picture(4, 2)
    (ax,) = picture.axes_row(1)
    colors = [category.color for category in Category]
    ax.bar(range(len(colors)), [1] * len(colors), color=colors)
    png = picture.png()
    shown = {pixel for _, pixel in Image.open(io.BytesIO(png)).convert("RGB").getcolors(10**6)}
    for color in colors:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert min(max(abs(a - b) for a, b in zip(pixel, wanted, strict=True)) for pixel in shown) <= 6, color
    assert len(png) < 20_000


def test_the_notebook_gets_the_picture_its_size_and_its_text() -> None:
    picture = Picture(4, 2.5)
    picture.axes_row(1)
    picture.summary = "Peaks: fp32 3.00 GiB."
    data, metadata = picture._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert data["text/plain"] == repr(picture) == "Peaks: fp32 3.00 GiB."
    assert size_of(base64.b64decode(data["image/png"])) == (800, 500)
    assert metadata == {"image/png": {"width": 400, "height": 250, "alt": "Peaks: fp32 3.00 GiB."}}
    assert repr(Picture(1, 1)) == "vramlab figure"


def test_the_same_picture_is_the_same_bytes() -> None:
    picture = Picture(3, 2)
    (ax,) = picture.axes_row(1)
    ax.plot([1, 2, 3])
    assert picture.png() == picture.png()


def test_axes_stand_side_by_side_as_wide_as_asked() -> None:
    picture = Picture(9, 3, fixed=True)
    left, right = picture.axes_row(3, 1)
    assert left.get_position().width == pytest.approx(3 * right.get_position().width)
    assert left.get_position().x1 < right.get_position().x0


def test_matplotlibs_settings_stay_as_they_were() -> None:
    before = dict(mpl.rcParams)
    picture = Picture(3, 2)
    picture.axes_row(1, 1)
    picture.png()
    assert dict(mpl.rcParams) == before


def test_a_failed_drawing_leaves_the_settings_as_they_were() -> None:
    before = dict(mpl.rcParams)
    picture = Picture(3, 2)
    (ax,) = picture.axes_row(1)
    ax.set_title("$\\frac{1}{$")  # not a formula
    with pytest.raises(ValueError, match="frac"):
        picture.png()
    assert dict(mpl.rcParams) == before


class Hook(Artist):
    """Does something while its figure is being drawn."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def draw(self, renderer: Any) -> None:
        self.action()


def test_threads_that_draw_at_the_same_time_leave_the_settings_as_they_were() -> None:
    """rcParams belong to the process: a thread that restores what it found while another drew makes that permanent."""
    before = dict(mpl.rcParams)
    first_is_in, second_is_in, first_is_done = threading.Event(), threading.Event(), threading.Event()
    pictures = Picture(2, 1, fixed=True), Picture(2, 1, fixed=True)
    # If the second may draw at the same time, the first ends before it does.
    pictures[0].add_artist(Hook(lambda: (first_is_in.set(), second_is_in.wait(0.2))))
    pictures[1].add_artist(Hook(lambda: (second_is_in.set(), first_is_done.wait(5))))

    def draw_first() -> None:
        pictures[0].png()
        first_is_done.set()

    def draw_second() -> None:
        assert first_is_in.wait(5)
        pictures[1].png()

    threads = [threading.Thread(target=draw) for draw in (draw_first, draw_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert second_is_in.is_set()
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("largest", "unit"),
    [
        (0, (1, "B")),
        (1023, (1, "B")),
        (1024, (2**10, "KiB")),
        (2**20 - 1, (2**10, "KiB")),
        (2**20, (2**20, "MiB")),
        (2**30, (2**30, "GiB")),
        (24 * 2**30, (2**30, "GiB")),
    ],
)
def test_an_axis_has_the_unit_in_which_it_reads_well(largest: int, unit: Any) -> None:
    assert byte_unit(largest) == unit
