"""plot(): the memory of a trace, a run or a comparison, drawn into given axes or a new picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import singledispatch
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from vramlab.experiments import Comparison, Run, recipe_labels
from vramlab.memory.trace import Category, MemoryBreakdown, MemoryTrace
from vramlab.notebook.style import Picture, byte_unit, styled
from vramlab.planning import LawCurve, Plan
from vramlab.units import format_bytes

PHASE_SHADES = {"forward": "#ffffff", "backward": "#f1f3f5", "step": "#e3e7ea", "build": "#fafafa"}
_LABELS = [c.label for c in Category]
POINTS = 2000  # more than a picture has columns


def plot(thing: Any, ax: Axes | None = None) -> Picture | Axes:
    """Draw a MemoryTrace, MemoryBreakdown, Run, Comparison, Plan or a plan's curve.

    Args:
        thing: what to draw.
        ax: axes to draw its memory into; None makes a new picture, which a notebook shows.

    Returns:
        The axes that were given, else the picture (a matplotlib ``Figure``).

    Raises:
        TypeError: nothing that can be drawn.
    """
    with styled() if ax is None else nullcontext():
        return _plot(thing, ax)


@singledispatch
def _plot(thing: Any, ax: Axes | None) -> Picture | Axes:
    raise TypeError(f"plot() draws a MemoryTrace, MemoryBreakdown, Run, Comparison or Plan, got {type(thing).__name__}.")


@_plot.register
def _(trace: MemoryTrace, ax: Axes | None) -> Picture | Axes:
    if ax is not None:
        return draw_timeline(ax, trace)
    picture = Picture(9, 3.4)
    (ax,) = picture.axes_row(1)
    draw_timeline(ax, trace)
    draw_legend(picture, [trace])
    picture.summary = f"Memory through one step: peak {format_bytes(trace.peak)} in {trace.peak_phase}."
    return picture


@_plot.register
def _(breakdown: MemoryBreakdown, ax: Axes | None) -> Picture | Axes:
    if ax is not None:
        return draw_breakdowns(ax, {"": breakdown})
    picture = Picture(9, 1.6)
    (ax,) = picture.axes_row(1)
    draw_breakdowns(ax, {"": breakdown})
    draw_legend(picture, [breakdown])
    picture.summary = f"Memory by category: {format_bytes(breakdown.total)}."
    return picture


@_plot.register
def _(run: Run, ax: Axes | None) -> Picture | Axes:
    if run.trace is None:
        raise ValueError(f"This run has no recorded step to draw; its status is {run.status!r}.")
    if ax is not None:
        return draw_timeline(ax, run.trace)
    picture = Picture(11, 3.4)
    memory, speed, loss = picture.axes_row(2.2, 1, 1)
    draw_timeline(memory, run.trace)
    draw_series(speed, f"{run.task.unit}/s", [r.step for r in run.reports if r.items_per_second is not None], run._speeds())
    draw_series(loss, "loss", [r.step for r in run.reports], run.losses)
    draw_legend(picture, [run.trace])
    picture.summary = f"{run.task.name}, {run.recipe}: peak {format_bytes(run.peak or 0)}."
    return picture


@_plot.register
def _(plan: Plan, ax: Axes | None) -> Picture | Axes:
    trace = plan.trace.last_step()
    if ax is not None:
        return draw_capacity(draw_timeline(ax, trace), plan)
    picture = Picture(9, 3.4)
    (ax,) = picture.axes_row(1)
    draw_capacity(draw_timeline(ax, trace), plan)
    draw_legend(picture, [trace.breakdown()])
    picture.summary = repr(plan)
    return picture


@_plot.register
def _(curve: LawCurve, ax: Axes | None) -> Picture | Axes:
    if ax is not None:
        return draw_curve(ax, curve)
    picture = Picture(6, 3.4)
    (ax,) = picture.axes_row(1)
    draw_curve(ax, curve)
    fitting = [point.micro_batch for point in curve.points if point.fits]
    picture.summary = f"{curve.plan.task.name} on {curve.plan.gpu.name}: micro-batch {max(fitting, default=0)} fits."
    return picture


@_plot.register
def _(comparison: Comparison, ax: Axes | None) -> Picture | Axes:
    labels = recipe_labels([r.recipe for r in comparison.runs])
    breakdowns = {f"{i}  {label}": r.breakdown for i, (label, r) in enumerate(zip(labels, comparison.runs, strict=True), 1)}
    if ax is not None:
        return draw_breakdowns(ax, breakdowns)
    lines = sum(1 + _wrapped(label).count("\n") for label in breakdowns)
    picture = Picture(11, 1.3 + 0.3 * len(breakdowns) + 0.13 * lines)
    memory, speed = picture.axes_row(2.6, 1)
    draw_breakdowns(memory, breakdowns)
    draw_speeds(speed, comparison.runs)
    draw_legend(picture, breakdowns.values())
    picture.summary = "Peaks: " + ", ".join(
        f"{label} {format_bytes(b.total)}" for label, b in zip(labels, breakdowns.values(), strict=True)
    )
    return picture


def draw_timeline(ax: Axes, trace: MemoryTrace) -> Axes:
    """Memory after every event, stacked by category, phases shaded, the peak marked with its value and phase."""
    frame = trace.timeline().iloc[max(0, trace.events.seeds - 1) :]
    bytes_ = frame[_LABELS].to_numpy()  # (events, categories)
    kept = _highest_of_each(bytes_.sum(1))
    unit, name = byte_unit(trace.peak)
    ax.stackplot(kept, bytes_[kept].T / unit, colors=[c.color for c in Category], step="post", linewidth=0)
    top = trace.peak / unit * 1.25
    for phase, start, end in _stretches(frame["phase"].tolist()):
        ax.axvspan(start, end, color=PHASE_SHADES[phase], zorder=-1, linewidth=0)
        if end - start > len(frame) / 15:
            ax.text((start + end) / 2, top * 0.985, phase, ha="center", va="top", color="#666666")
    if len(frame):
        at = int(bytes_.sum(1).argmax())
        right = at > len(frame) / 2  # the text goes to the emptier side
        ax.plot([at], [trace.peak / unit], "o", color="black", markersize=4)
        ax.annotate(
            f"{format_bytes(trace.peak)} in {trace.peak_phase}",
            (at, trace.peak / unit),
            (-7 if right else 7, 3),
            textcoords="offset points",
            ha="right" if right else "left",
            fontweight="bold",
        )
    ax.set(xlim=(0, max(1, len(frame) - 1)), ylim=(0, top or 1), xlabel="allocations and releases", ylabel=f"allocated ({name})")
    return ax


def draw_capacity(ax: Axes, plan: Plan) -> Axes:
    """A line where the card ends, if it is within reach of the picture."""
    unit, _ = byte_unit(plan.trace.last_step().peak)
    end, top = plan.capacity / unit, ax.get_ylim()[1]
    if end < 2.5 * top:
        ax.set_ylim(0, max(top, end * 1.15))
        ax.axhline(end, color="#D55E00", linewidth=1.5, linestyle="--")
        ax.annotate(
            f"{plan.gpu.name}: {format_bytes(plan.capacity)} for PyTorch", (0, end), (4, 3), textcoords="offset points", color="#D55E00"
        )
    return ax


def draw_curve(ax: Axes, curve: LawCurve) -> Axes:
    """Reserved and allocated bytes over the micro-batch, with a line where the card ends; what does not fit is hollow."""
    unit, name = byte_unit(curve.plan.capacity)
    sizes = [point.micro_batch for point in curve.points]
    for label, color, style in (("reserved", "#495057", "-"), ("allocated", "#E69F00", "--")):
        ax.plot(sizes, [getattr(point, label) / unit for point in curve.points], color=color, linestyle=style, label=label)
    for point in curve.points:
        ax.plot([point.micro_batch], [point.reserved / unit], "o", color="#495057", markerfacecolor="#495057" if point.fits else "white")
    end = curve.plan.capacity / unit
    ax.axhline(end, color="#D55E00", linewidth=1.5, linestyle=":")
    label = f"{curve.plan.gpu.name}: {format_bytes(curve.plan.capacity)}"
    ax.annotate(label, (sizes[0], end), (0, 3), textcoords="offset points", color="#D55E00")
    highest = max(end, *(point.reserved / unit for point in curve.points))
    ax.set(xlabel="micro-batch", ylabel=f"planned ({name})", ylim=(0, 1.15 * highest))
    ax.legend(frameon=False, loc="lower right")
    ax.grid(axis="y")
    return ax


def draw_breakdowns(ax: Axes, breakdowns: dict[str, MemoryBreakdown]) -> Axes:
    """One stacked bar for each breakdown, from top to bottom, with its total beside.

    Raises:
        ValueError: negative bytes: a difference has no bar.
    """
    for breakdown in breakdowns.values():
        if any(n < 0 for _, n in breakdown.items()):
            raise ValueError(f"plot() draws bytes that are held, and this is a difference: {breakdown!r}. Show it as a table.")
    unit, name = byte_unit(max((b.total for b in breakdowns.values()), default=0))
    left = np.zeros(len(breakdowns))
    rows = np.arange(len(breakdowns))
    for category in Category:
        widths = np.array([dict(b.items())[category.label] for b in breakdowns.values()]) / unit
        ax.barh(rows, widths, left=left, height=0.68, color=category.color, edgecolor="white", linewidth=0.5)
        left += widths
    for row, (end, breakdown) in enumerate(zip(left, breakdowns.values(), strict=True)):
        ax.annotate(format_bytes(breakdown.total), (end, row), (4, 0), textcoords="offset points", va="center", fontweight="bold")
    ax.set_yticks(rows, [_wrapped(label) for label in breakdowns])
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel=f"allocated at the peak ({name})", xlim=(0, left.max(initial=0) * 1.18 or 1), ylim=(len(breakdowns) - 0.5, -0.5))
    return ax


def draw_speeds(ax: Axes, runs: Sequence[Run]) -> Axes:
    """Items per second of each run, the quartiles as a thin line."""
    rows = np.arange(len(runs))
    ax.barh(rows, [run.throughput or 0 for run in runs], height=0.68, color="#495057")
    for row, run in enumerate(runs):
        if run.throughput_range is not None:
            ax.plot(run.throughput_range, (row, row), color="#adb5bd", linewidth=3)
    ax.set_yticks(rows, [""] * len(runs))
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel=f"{runs[0].task.unit}/s (measured)", ylim=(len(runs) - 0.5, -0.5))
    return ax


def draw_series(ax: Axes, title: str, steps: Sequence[int], values: Sequence[float]) -> Axes:
    """A quantity over steps; what is no finite number leaves a gap."""
    finite = [v for v in values if np.isfinite(v)]
    ax.plot(steps, [v if np.isfinite(v) else np.nan for v in values], color="#495057", marker="o" if len(steps) < 3 else "", markersize=4)
    low, high = min([0.0, *finite]), max([0.0, *finite])
    ax.set(title=title, xlabel="step", xlim=(1, max([10, *steps])), ylim=(low * 1.15, high * 1.15 or (1.0 if low == 0 else 0.0)))
    ax.grid(axis="y")
    return ax


def draw_legend(picture: Picture, shown: Iterable[MemoryTrace | MemoryBreakdown]) -> None:
    """The categories that can be seen, below the axes."""
    highest = np.zeros(len(Category))
    for item in shown:
        rows = item.timeline()[_LABELS].to_numpy() if isinstance(item, MemoryTrace) else [[n for _, n in item.items()]]
        highest = np.maximum(highest, np.max(rows, axis=0, initial=0))
    handles = [Patch(color=c.color, label=c.label) for c in Category if highest[c] > highest.sum() / 1000]
    where: Any = "lower left" if picture.get_layout_engine() is None else "outside lower left"
    picture.legend(handles=handles, loc=where, ncols=max(1, len(handles)), handlelength=1.2, columnspacing=1.4, frameon=False)


def _wrapped(label: str) -> str:
    return textwrap.fill(label, 40)  # long recipes leave room for the bars


def _highest_of_each(totals: np.ndarray) -> np.ndarray:
    """Indices of at most POINTS events: all, or the highest of each stretch, so that no peak gets lost."""
    if len(totals) <= POINTS:
        return np.arange(len(totals))
    edges = np.linspace(0, len(totals), POINTS + 1).astype(int)
    return np.array([a + totals[a:b].argmax() for a, b in pairwise(edges)])


def _stretches(phases: list[str]) -> list[tuple[str, int, int]]:
    """Runs of equal phases as (phase, first, last + 1)."""
    cuts = [0, *(i for i in range(1, len(phases)) if phases[i] != phases[i - 1]), len(phases)]
    return [(phases[a], a, b) for a, b in pairwise(cuts) if b > a]
