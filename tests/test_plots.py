"""plot(): what each kind of thing looks like, read back from the artists."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import subprocess
import sys
import weakref
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from torch import nn

import vramlab as vl
from vramlab.experiments import Comparison, Run
from vramlab.gpus import gpu
from vramlab.memory.trace import Category, Events, MemoryBreakdown, MemoryTrace, Phase
from vramlab.notebook import plots
from vramlab.notebook.style import Picture, painted
from vramlab.parallel.timeline import Timeline, Work
from vramlab.training import StepReport

TASK = vl.Task(lambda: nn.Linear(2, 2), lambda n, d: torch.randn(n, 2), lambda m, b: (m(b).sum(), len(b)), "rows", "rows task")
RECIPE = vl.Recipe(micro_batch=4)


def trace(*rows: tuple[int, Category, Phase], seeds: int = 0) -> MemoryTrace:
    """A trace made by hand: bytes, category and phase of each event; negative bytes release from the category."""
    n = len(rows)
    zeros = np.zeros(n, np.int32)
    columns = [np.array([row[i] for row in rows], kind) for i, kind in enumerate((np.int64, np.int8, np.int8))]
    return MemoryTrace(Events(np.arange(n), columns[0], columns[1], zeros, columns[2], zeros, ("",), ("aten::mm",), seeds))


P, G, A, T = Category.PARAMETERS, Category.GRADIENTS, Category.ACTIVATIONS, Category.TEMPORARY
STEP = trace(
    (3 * 2**20, P, Phase.BUILD),
    (2 * 2**20, A, Phase.FORWARD),
    (4 * 2**20, A, Phase.FORWARD),
    (1 * 2**20, T, Phase.FORWARD),
    (-1 * 2**20, T, Phase.FORWARD),
    (3 * 2**20, G, Phase.BACKWARD),
    (-4 * 2**20, A, Phase.BACKWARD),
    (-2 * 2**20, A, Phase.BACKWARD),
    (-3 * 2**20, G, Phase.STEP),
    seeds=1,
)


def run(*reports: StepReport, status: str = "finished", recipe: vl.Recipe = RECIPE) -> Run:
    return Run(TASK, recipe, torch.device("cpu"), list(reports), status)


def step(number: int, loss: float = 1.0, speed: float | None = None, memory: MemoryTrace | None = None) -> StepReport:
    return StepReport(number, loss, 0.5, speed, memory)


RUN = run(step(1, 5.0, None, STEP), step(2, 4.0, None, STEP), step(3, 3.0, 80.0), step(4, 2.0, 100.0))
COMPARISON = Comparison([RUN, run(step(1, 5.0, None, trace((2**20, P, Phase.FORWARD))), recipe=RECIPE.with_(optimizer="sgd"))])


def areas(ax: Any) -> dict[str, np.ndarray]:
    """The heights of each stacked area after each event, by colour."""
    found = {}
    for area in ax.collections:
        vertices = area.get_paths()[0].vertices
        n = (len(vertices) - 3) // 2  # one edge forth, the other back, and three corners
        lower, upper = vertices[1 : n + 1], vertices[n + 2 : 2 * n + 2][::-1]
        assert (lower[:, 0] == upper[:, 0]).all()
        found[to_hex(area.get_facecolor()[0])] = (upper - lower)[::2, 1]  # at each event an end and a beginning
    return found


# What can be drawn, and where.


@pytest.mark.parametrize("thing", [STEP, STEP.breakdown(), RUN, COMPARISON], ids=lambda thing: type(thing).__name__)
def test_each_kind_makes_a_picture_and_draws_into_given_axes(thing: Any) -> None:
    picture = vl.plot(thing)
    assert isinstance(picture, Picture)
    assert repr(picture) != "vramlab figure"
    assert picture.png()[:8] == b"\x89PNG\r\n\x1a\n"
    ax = Figure().subplots()
    assert vl.plot(thing, ax=ax) is ax
    assert vl.plot(thing, ax) is ax
    assert ax.patches or ax.collections


@pytest.mark.parametrize("thing", [None, 3, "run", {STEP}, nn.Linear(1, 1)])
def test_anything_else_is_refused(thing: Any) -> None:
    text = rf"^plot\(\) draws a MemoryTrace, .* or those of several ranks, got {type(thing).__name__}\.$"
    with pytest.raises(TypeError, match=text):
        vl.plot(thing)
    with pytest.raises(TypeError, match=text):
        vl.plot(thing, ax=Figure().subplots())


@pytest.mark.parametrize(
    ("things", "error", "kinds"),
    [
        ([3, "x"], TypeError, "int, str"),
        ({"a": STEP, "b": None}, TypeError, "MemoryTrace, NoneType"),
        ([], ValueError, "none"),
        ({}, ValueError, "none"),
    ],
)
def test_ranks_that_are_none_are_refused(things: Any, error: type[Exception], kinds: str) -> None:
    with pytest.raises(error, match=rf"^plot\(\) draws a bar for each trace, breakdown, plan or run .* got {kinds}\.$"):
        vl.plot(things)


def test_a_run_without_a_recorded_step_says_so() -> None:
    with pytest.raises(ValueError, match=r"^This run has no recorded step to draw; its status is 'ValueError: no'\.$"):
        vl.plot(run(status="ValueError: no"))


def test_matplotlibs_settings_stay_as_they_were() -> None:
    before = dict(mpl.rcParams)
    for thing in (STEP, STEP.breakdown(), RUN, COMPARISON):
        vl.plot(thing)
        vl.plot(thing, ax=Figure().subplots())
    with pytest.raises(TypeError):
        vl.plot(None)
    assert dict(mpl.rcParams) == before


def test_axes_of_a_part_of_a_figure_can_be_drawn_into() -> None:
    part, _ = Figure().subfigures(1, 2)
    assert vl.plot(STEP, ax=part.subplots()).collections


def test_given_axes_keep_the_callers_look() -> None:
    with mpl.rc_context({"axes.spines.top": True, "font.size": 17.0}):
        ax = Figure().subplots()
        vl.plot(STEP, ax=ax)
    assert ax.spines["top"].get_visible()
    assert ax.xaxis.label.get_fontsize() == 17.0


def test_no_pyplot_and_no_window_system() -> None:
    """pyplot keeps one current figure for all threads, and picks a backend."""
    source = (
        "import sys, torch, vramlab as vl, vramlab.notebook.lab, vramlab.notebook.live\n"
        "from vramlab.memory.trace import MemoryBreakdown\n"
        "vl.plot(MemoryBreakdown(parameters=3)).png()\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


# A trace.


def test_the_stacked_areas_are_the_trace() -> None:
    ax = vl.plot(STEP).axes[0]
    frame = STEP.timeline()
    found = areas(ax)
    for category in Category:
        assert found[category.color.lower()].tolist() == (frame[category.label] / 2**20).tolist()


def test_areas_of_a_real_step_are_its_bytes() -> None:
    real = vl.run(TASK, RECIPE, steps=2, device="cpu", progress=False).trace
    assert real is not None
    found = areas(vl.plot(real).axes[0])
    rows = real.timeline().iloc[max(0, real.events.seeds - 1) :]
    unit = 2**10 if real.peak >= 2**10 else 1
    for category in Category:
        np.testing.assert_allclose(found[category.color.lower()], rows[category.label] / unit, atol=1e-9)


def test_what_existed_before_is_one_moment_and_not_a_slope() -> None:
    seeded = trace(*[(2**20, P, Phase.BUILD)] * 5, (2**20, A, Phase.FORWARD), seeds=5)
    heights = areas(vl.plot(seeded).axes[0])
    assert heights[P.color.lower()].tolist() == [5, 5]
    assert heights[A.color.lower()].tolist() == [0, 1]


def test_the_peak_is_marked_with_its_bytes_and_phase() -> None:
    ax = vl.plot(STEP).axes[0]
    (marker,) = [line for line in ax.lines if line.get_marker() == "o"]
    peak = int(STEP.timeline()[[c.label for c in Category]].sum(axis=1).argmax())
    assert marker.get_xydata().tolist() == [[peak, 12.0]]
    assert STEP.peak == 12 * 2**20
    assert "12.00 MiB in backward" in [text.get_text() for text in ax.texts]
    assert ax.get_ylabel() == "allocated (MiB)"
    assert ax.get_ylim()[1] > 12


@pytest.mark.parametrize(("before", "side"), [(1, "left"), (30, "right")])
def test_the_peaks_text_stands_on_the_emptier_side(before: int, side: str) -> None:
    rows = [(1, A, Phase.FORWARD)] * before + [(2**10, A, Phase.FORWARD)] + [(-1, A, Phase.BACKWARD)] * (32 - before)
    (text,) = [t for t in vl.plot(trace(*rows)).axes[0].texts if "KiB" in t.get_text()]
    assert text.get_ha() == side


def test_phases_are_shaded_and_named_where_there_is_room() -> None:
    rows = [(1, A, Phase.FORWARD)] * 20 + [(1, G, Phase.BACKWARD)] * 20 + [(1, T, Phase.STEP)]
    ax = vl.plot(trace(*rows)).axes[0]
    assert [t.get_text() for t in ax.texts if t.get_text() in ("build", "forward", "backward", "step")] == ["forward", "backward"]
    assert [(p.get_x(), p.get_width(), to_hex(p.get_facecolor())) for p in ax.patches] == [
        (0, 20, plots.PHASE_SHADES["forward"]),
        (20, 20, plots.PHASE_SHADES["backward"]),
        (40, 1, plots.PHASE_SHADES["step"]),
    ]


def test_the_legend_names_what_can_be_seen_once_each() -> None:
    (legend,) = vl.plot(STEP).legends
    assert [text.get_text() for text in legend.get_texts()] == ["parameters", "gradients", "activations", "temporary"]
    assert [to_hex(patch.get_facecolor()) for patch in legend.get_patches()] == [c.color.lower() for c in (P, G, A, T)]


def test_a_long_trace_is_thinned_without_losing_its_peak() -> None:
    n = 50_000
    rng = np.random.default_rng(0)
    nbytes = rng.integers(-1000, 1001, n)
    nbytes[0] = 10**8
    nbytes[31_234], nbytes[31_235] = 2 * 10**8, -2 * 10**8  # a needle one event wide
    zeros = np.zeros(n, np.int32)
    phases = np.full(n, Phase.FORWARD, np.int8)
    long = MemoryTrace(Events(np.arange(n), nbytes, np.full(n, A, np.int8), zeros, phases, zeros, ("",), ("aten::mm",)))
    ax = vl.plot(long).axes[0]
    heights = areas(ax)[A.color.lower()]
    assert len(heights) <= plots.POINTS
    assert heights.max() == pytest.approx(long.peak / 2**20)
    (marker,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert marker.get_xydata()[0].tolist() == [31_234, pytest.approx(long.peak / 2**20)]


@pytest.mark.parametrize("nbytes", [0, 1, 5])
def test_the_smallest_traces_can_be_drawn(nbytes: int) -> None:
    ax = vl.plot(trace((nbytes, A, Phase.FORWARD))).axes[0]
    assert ax.get_ylabel() == "allocated (B)"
    assert vl.plot(trace(*[])).png()


def test_the_text_of_a_trace_is_its_peak_and_the_alternative_text_says_more() -> None:
    picture = vl.plot(STEP)
    assert repr(picture) == "Memory through one step: peak 12.00 MiB in backward."
    assert picture.alt == (f"{picture!r} Set by aten::mm. At the peak: parameters 3.00 MiB, gradients 3.00 MiB, activations 6.00 MiB.")


def test_the_peaks_cause_is_written_below_its_value_as_far_as_there_is_room() -> None:
    events = dataclasses.replace(STEP.events, operators=("aten::a_very_long_name_of_an_operator",), modules=("blocks.11.mlp.up",))
    cause = "aten::a_very_long_name_of_an_operator in blocks.11.mlp.up"
    wide = Figure((20, 4)).subplots()
    vl.plot(MemoryTrace(events), ax=wide)
    assert cause in [t.get_text() for t in wide.texts]
    narrow = Figure((2, 2)).subplots()
    vl.plot(MemoryTrace(events), ax=narrow)
    (text,) = [t.get_text() for t in narrow.texts if "aten" in t.get_text()]
    assert text.endswith("...")
    assert cause.startswith(text[:-3])


def lightness(color: str) -> float:
    """L* of CIE 1976, 0 to 100: how light a colour is in grey."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_two_categories_differ_in_grey_by_lightness_or_by_pattern() -> None:
    same = [
        (one.label, other.label)
        for one, other in itertools.combinations(Category, 2)
        if painted(one)["hatch"] == painted(other)["hatch"] and abs(lightness(one.color) - lightness(other.color)) <= 10
    ]
    assert same == []


def test_areas_bars_and_the_legend_of_a_category_look_the_same() -> None:
    area = vl.plot(STEP).axes[0].collections[G]
    (bar,) = [p for p in vl.plot(STEP.breakdown()).axes[0].patches if p.get_width() and to_hex(p.get_facecolor()) == G.color.lower()]
    (entry,) = [p for p in vl.plot(STEP).legends[0].get_patches() if p.get_label() == G.label]
    for found in (area, bar, entry):
        assert found.get_hatch() == painted(G)["hatch"] == "////"


def test_no_figure_is_left_over() -> None:
    """pyplot, which would keep pictures, knows of none, and none lives on (user case NB-03)."""
    import matplotlib.pyplot as plt

    kept = []
    for _ in range(21):  # pyplot warns at the 21st
        picture = vl.plot(STEP)
        picture.png(scale=0.25)
        kept.append(weakref.ref(picture))
        del picture
    gc.collect()
    assert plt.get_fignums() == []
    assert [ref for ref in kept if ref() is not None] == []


# Breakdowns, runs and comparisons.


def bars(ax: Any) -> list[tuple[str, float, float, float]]:
    """Colour, row, start and width of each bar that can be seen."""
    return [
        (to_hex(bar.get_facecolor()), round(bar.get_y() + bar.get_height() / 2, 6), bar.get_x(), bar.get_width())
        for bar in ax.patches
        if bar.get_width()
    ]


def test_a_breakdown_is_one_stacked_bar_with_its_total() -> None:
    breakdown = MemoryBreakdown(parameters=2**20, gradients=2**19, temporary=2**20)
    picture = vl.plot(breakdown)
    ax = picture.axes[0]
    assert bars(ax) == [(P.color.lower(), 0, 0, 1), (G.color.lower(), 0, 1, 0.5), (T.color.lower(), 0, 1.5, 1)]
    assert [t.get_text() for t in ax.texts] == ["2.50 MiB"]
    assert repr(picture) == "Memory by category: 2.50 MiB."
    assert vl.plot(MemoryBreakdown()).png()


def test_a_run_shows_memory_speed_and_loss() -> None:
    picture = vl.plot(RUN)
    memory, speed, loss = picture.axes
    assert areas(memory).keys() == {c.color.lower() for c in Category}
    assert speed.lines[0].get_xydata().tolist() == [[3, 80], [4, 100]]
    assert loss.lines[0].get_xydata().tolist() == [[1, 5], [2, 4], [3, 3], [4, 2]]
    assert (speed.get_title(loc="left"), loss.get_title(loc="left")) == ("rows/s", "loss")
    assert repr(picture) == "rows task, fp32, micro batch 4, adamw: peak 12.00 MiB."


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -3.0, 0.0], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_run_with_any_loss_and_speed_can_be_drawn(bad: float, first: bool) -> None:
    """A loss that overflows would otherwise end the training that draws it, and windows may count nothing."""
    values = [bad, 2.0] if first else [2.0, bad]
    odd = run(step(1, 1.0, None, STEP), *(step(i, v, abs(v)) for i, v in enumerate(values, 2)))
    picture = vl.plot(odd)
    loss = picture.axes[2]
    low, high = loss.get_ylim()
    assert np.isfinite([low, high]).all()
    assert low <= min(0.0, *(v for v in values if np.isfinite(v)))
    assert high >= 2.0
    assert picture.png()


def test_a_comparison_has_a_row_a_recipe() -> None:
    picture = vl.plot(COMPARISON)
    memory, speed, *below = picture.axes
    assert [t.get_text() for t in memory.get_yticklabels()] == ["1  fp32, micro batch 4, adamw", "2  + sgd"]
    rows = bars(memory)
    assert [(color, row) for color, row, _, _ in rows] == [
        (P.color.lower(), 0),
        (P.color.lower(), 1),
        (G.color.lower(), 0),
        (A.color.lower(), 0),
    ]
    assert [(start, width) for _, _, start, width in rows] == [(0, 3), (0, 1), (3, 3), (6, 6)]
    assert [t.get_text() for t in memory.texts] == ["12.00 MiB", "1.00 MiB"]
    assert memory.yaxis_inverted()  # the first on top
    assert [bar.get_width() for bar in speed.patches] == [90, 0]
    assert speed.lines[0].get_xydata().tolist() == [[85, 0], [95, 0]]
    assert repr(picture) == "Peaks: fp32, micro batch 4, adamw 12.00 MiB, + sgd 1.00 MiB"
    assert [ax.get_title(loc="left") for ax in below] == ["1  fp32, micro batch 4, adamw", "2  + sgd"]
    assert below[0].get_ylim() == below[1].get_ylim()  # so heights can be compared
    assert areas(below[1])[P.color.lower()].tolist() == [1]


def test_a_comparison_shows_the_timelines_of_the_first_four_and_no_speeds_that_are_not_measured() -> None:
    planned = [run(step(1, 0.0, None, STEP), recipe=RECIPE.with_(micro_batch=n)) for n in range(1, 7)]
    picture = vl.plot(Comparison(planned))
    assert len(picture.axes) == 1 + plots.SIDE_BY_SIDE
    assert picture.png()


def planned_run() -> Run:
    return Run(TASK, RECIPE, gpu("RTX 3060"), [step(1, 0.0, None, trace((7 << 30, P, Phase.FORWARD)))], "finished")


def test_where_the_card_ends_is_drawn_if_it_is_near() -> None:
    end = gpu("RTX 3060").left_for_pytorch()
    memory = vl.plot(Comparison([planned_run()])).axes[0]
    assert memory.lines[0].get_xdata()[0] == pytest.approx(end / 2**30)
    assert memory.get_xlim()[1] > end / 2**30
    assert memory.texts[-1].get_text().startswith("RTX 3060: 11.")
    far = Run(TASK, RECIPE, gpu("H200"), planned_run().reports, "finished")
    assert not vl.plot(Comparison([far])).axes[0].lines


# Ranks.


@pytest.mark.parametrize(
    "ranks",
    [
        [STEP, STEP.breakdown()],
        (RUN, STEP),
        {0: STEP, 1: RUN},
        [planned_run(), planned_run()],
    ],
    ids=lambda ranks: type(ranks).__name__,
)
def test_ranks_get_a_bar_each_at_their_own_peak(ranks: Any) -> None:
    picture = vl.plot(ranks)
    (ax,) = picture.axes
    expected = ["0", "1"] if isinstance(ranks, dict) else ["rank 0", "rank 1"]
    assert [t.get_text() for t in ax.get_yticklabels()] == expected
    items = list(ranks.values()) if isinstance(ranks, dict) else ranks
    totals = [plots._breakdown_of(item).total for item in items]
    unit = 2**30 if totals[0] >= 2**30 else 2**20
    widths = {row: sum(width for _, r, _, width in bars(ax) if r == row) for row in (0, 1)}
    assert [widths[row] * unit for row in (0, 1)] == pytest.approx(totals)
    assert repr(picture).startswith(f"Peaks: {expected[0]} ")
    assert len(ax.lines) == isinstance(items[0], Run) * (ranks[0] is not RUN if not isinstance(ranks, dict) else 0)
    given = Figure().subplots()
    assert vl.plot(ranks, ax=given) is given
    assert picture.png()


def test_runs_of_one_recipe_and_failures_get_rows_of_their_own() -> None:
    comparison = Comparison([RUN, RUN, run(status="OutOfMemoryError: no")])
    memory = vl.plot(comparison).axes[0]
    assert [t.get_text() for t in memory.get_yticklabels()] == ["1  fp32, micro batch 4, adamw", "2  the same", "3  the same"]
    assert [t.get_text() for t in memory.texts] == ["12.00 MiB", "12.00 MiB", "0 B"]
    assert vl.plot(Comparison([run(status="failed")])).png()


def test_each_category_has_one_colour_in_every_picture() -> None:
    assert len({c.color for c in Category}) == len(Category)
    shown = set(areas(vl.plot(STEP).axes[0])) | {color for color, *_ in bars(vl.plot(STEP.breakdown()).axes[0])}
    assert shown <= {c.color.lower() for c in Category}


def test_a_difference_has_no_bar() -> None:
    with pytest.raises(ValueError, match=r"^plot\(\) draws bytes that are held, and this is a difference: .*Show it as a table\.$"):
        vl.plot(MemoryBreakdown(activations=5) - MemoryBreakdown(activations=8))


def test_long_labels_leave_room_for_the_bars() -> None:
    recipe = vl.Recipe(micro_batch=2)
    other = recipe.with_(precision="amp-bf16", checkpointing="blocks", optimizer="adafactor", optimizer_in_backward=True, loss_chunks=8)
    task = vl.tasks.gpt("nano", sequence=8)
    picture = vl.plot(vl.compare(task, [recipe, other], steps=1, device="cpu", progress=False))
    memory = picture.axes[0]
    assert max(len(line) for label in memory.get_yticklabels() for line in label.get_text().splitlines()) <= 40
    picture.png()  # laid out
    assert memory.get_position().width > 0.35


# A pipeline's work

ONE_AFTER_THE_OTHER = Timeline(
    (Work(0, 0, "forward", 0, 1.0, 1.5), Work(1, 1, "forward", 0, 1.5, 2.0), Work(1, 1, "backward", 0, 2.0, 3.0))
)


def test_a_timeline_shows_each_work_as_long_as_it_took_and_how_long_each_rank_waits() -> None:
    picture = plots.plot(ONE_AFTER_THE_OTHER)
    (ax,) = picture.axes
    blocks = [
        (patch.get_y() + patch.get_height() / 2, patch.get_x(), patch.get_width(), to_hex(patch.get_facecolor())) for patch in ax.patches
    ]
    forward, backward = (plots.WORK_COLORS[kind].lower() for kind in ("forward", "backward"))
    assert blocks == [(0, 0, 500, forward), (1, 500, 500, forward), (1, 1000, 1000, backward)]
    assert [text.get_text() for text in ax.texts] == ["0", "75% idle", "0", "0", "25% idle"]
    assert repr(picture) == "Who computes when: 2 s, idle rank 0 75%, rank 1 25%."


def test_several_timelines_share_the_scale_of_time() -> None:
    short = Timeline((Work(0, 0, "forward", 0, 0.0, 0.5),))
    picture = plots.plot({"long": ONE_AFTER_THE_OTHER, "short": short})
    assert [ax.get_title(loc="left") for ax in picture.axes] == ["long", "short"]
    assert picture.axes[0].get_xlim() == picture.axes[1].get_xlim()
    assert picture.axes[0].get_xlim()[1] > 2000


def test_a_timeline_is_drawn_into_axes_and_an_empty_one_too() -> None:
    ax = Picture(4, 2).axes_row(1)[0]
    assert plots.plot(ONE_AFTER_THE_OTHER, ax) is ax
    assert plots.plot(Timeline()).png()
