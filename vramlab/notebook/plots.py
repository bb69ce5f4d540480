"""plot(): memory drawn into given axes or a new picture: traces, breakdowns, plans, laws, runs, comparisons, ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import singledispatch
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from vramlab.experiments import Comparison, Run, recipe_labels
from vramlab.gpus import GPU
from vramlab.memory.trace import Category, MemoryBreakdown, MemoryTrace
from vramlab.notebook.style import CARD, Picture, byte_unit, painted, styled
from vramlab.parallel.timeline import Timeline
from vramlab.planning import LawCurve, Plan
from vramlab.units import GiB, KiB, MiB, format_bytes

WORDS = 50  # points above the peak, for three lines of text
SIDE_BY_SIDE = 4  # timelines below a comparison
PHASE_SHADES = {"forward": "#ffffff", "backward": "#f1f3f5", "step": "#e3e7ea", "build": "#fafafa"}
WORK_COLORS = {"forward": "#56B4E9", "backward": "#0072B2"}
_LABELS = [c.label for c in Category]
POINTS = 2000  # more than a picture has columns


def plot(thing: Any, ax: Axes | None = None) -> Picture | Axes:
    """Draw memory: one look, a fixed colour and pattern for each category, and the same numbers in words.

    Args:
        thing: what to draw. A `MemoryTrace`: bytes after every event, stacked by category, phases shaded, the peak marked with
            its value and cause. A `MemoryBreakdown`: a stacked bar. A `Plan`: its last step and where the card ends; with
            ranks also a bar for each. ``plan.curve()``: planned bytes over the micro-batch. A `Run`: memory, speed and loss.
            A `Comparison`: a bar and a speed for each recipe, and the timelines of the first four on one axis. A mapping or a
            sequence of traces, breakdowns, plans or runs, one a rank: a bar for each at its own peak. A pipeline's `Timeline`, or a
            mapping of some: who computes which micro-batch when, and how long each rank waits.
        ax: axes to draw into, with the look they have: the memory alone, of several ranks the bars. None makes a new picture,
            which a notebook shows.

    Returns:
        The axes that were given, else a `Picture`: a matplotlib ``Figure`` with ``axes``, ``png()``, and the text ``alt``.

    Raises:
        TypeError: nothing that can be drawn.
        ValueError: a run without a recorded step, a difference of breakdowns, no rank.
    """
    with styled() if ax is None else nullcontext():
        return _plot(thing, ax)


@singledispatch
def _plot(thing: Any, ax: Axes | None) -> Picture | Axes:
    raise TypeError(
        "plot() draws a MemoryTrace, MemoryBreakdown, Run, Comparison, Plan, its curve(), a Timeline, or those of several ranks, "
        f"got {type(thing).__name__}."
    )


@_plot.register
def _(trace: MemoryTrace, ax: Axes | None) -> Picture | Axes:
    if ax is not None:
        return draw_timeline(ax, trace)
    picture = Picture(9, 3.4)
    (ax,) = picture.axes_row(1)
    draw_timeline(ax, trace)
    draw_legend(picture, [trace])
    picture.summary = f"Memory through one step: peak {format_bytes(trace.peak)} in {trace.peak_phase}."
    picture.details = _words(trace)
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
    picture.details = _listed(breakdown)
    return picture


@_plot.register
def _(run: Run, ax: Axes | None) -> Picture | Axes:
    if run.trace is None:
        raise ValueError(f"This run has no recorded step to draw; its status is {run.status!r}.")
    if ax is not None:
        return draw_timeline(ax, run.trace)
    if run.ranks:
        picture = Picture(11, max(3.4, 1.2 + 0.45 * len(run.ranks)))
        bars, memory, loss = picture.axes_row(1, 1.3, 0.6)
        draw_ranks(bars, {f"rank {i}": rank for i, rank in enumerate(run.ranks)})
        memory.set_title(f"rank {[rank.trace for rank in run.ranks].index(run.trace)}, the fullest")
    else:
        picture = Picture(11, 3.4)
        memory, speed, loss = picture.axes_row(2.2, 1, 1)
        draw_series(speed, f"{run.task.unit}/s", [r.step for r in run.reports if r.items_per_second is not None], run._speeds())
    draw_timeline(memory, run.trace)
    draw_series(loss, "loss", [r.step for r in run.reports], run.losses)
    draw_legend(picture, [run.trace, *(rank.breakdown for rank in run.ranks)])
    picture.summary = f"{run.task.name}, {run.recipe}: peak {format_bytes(run.peak or 0)}."
    speed_words = f"{run.throughput:,.0f} {run.task.unit}/s." if run.throughput else ""
    picture.details = f"{_words(run.trace)} {speed_words}".strip()
    return picture


@_plot.register
def _(plan: Plan, ax: Axes | None) -> Picture | Axes:
    trace = plan.trace.last_step()
    if ax is not None:
        return draw_capacity(draw_timeline(ax, trace), plan)
    if plan.ranks:
        picture = Picture(11, max(3.4, 1.2 + 0.45 * len(plan.ranks)))
        bars, memory = picture.axes_row(1, 1.3)
        draw_ranks(bars, {f"rank {rank.rank}": rank for rank in plan.ranks})
        memory.set_title(f"rank {plan.rank}, the fullest")
    else:
        picture = Picture(9, 3.4)
        (memory,) = picture.axes_row(1)
    draw_capacity(draw_timeline(memory, trace), plan)
    draw_legend(picture, [trace, *(rank.breakdown for rank in plan.ranks)])
    picture.summary, picture.details = repr(plan), _words(trace)
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
    picture.details = "Reserved: " + ", ".join(f"{format_bytes(p.reserved)} at {p.micro_batch}" for p in curve.points) + "."
    return picture


@_plot.register
def _(comparison: Comparison, ax: Axes | None) -> Picture | Axes:
    runs, labels = comparison.runs, recipe_labels([r.recipe for r in comparison.runs])
    breakdowns = {f"{i}  {label}": r.breakdown for i, (label, r) in enumerate(zip(labels, runs, strict=True), 1)}
    if ax is not None:
        return draw_card(draw_breakdowns(ax, breakdowns), _card_of(runs))
    traces = {label: r.trace for label, r in zip(breakdowns, runs, strict=True) if r.trace is not None}
    traces = dict(list(traces.items())[:SIDE_BY_SIDE])
    lines = sum(1 + _wrapped(label).count("\n") for label in breakdowns)
    height = 1.3 + 0.3 * len(breakdowns) + 0.13 * lines
    picture = Picture(11, height + (2.8 if traces else 0))
    timed = any(r.throughput for r in runs)
    widths = (2.6, 1) if timed else (1,)
    if traces:
        above, below = picture.axes_below((height, 2.8), widths, len(traces))
        draw_side_by_side(below, traces)
    else:
        above = picture.axes_row(*widths)
    draw_card(draw_breakdowns(above[0], breakdowns), _card_of(runs))
    if timed:
        draw_speeds(above[1], runs)
    draw_legend(picture, [*breakdowns.values(), *traces.values()])
    picture.summary = "Peaks: " + ", ".join(
        f"{label} {format_bytes(b.total)}" for label, b in zip(labels, breakdowns.values(), strict=True)
    )
    return picture


@_plot.register(Mapping)
@_plot.register(list)
@_plot.register(tuple)
def _(ranks: Any, ax: Axes | None) -> Picture | Axes:
    if not isinstance(ranks, Mapping):
        ranks = {f"rank {i}": item for i, item in enumerate(ranks)}
    if ranks and ax is None and all(isinstance(item, Timeline) for item in ranks.values()):
        return _timelines(ranks)
    if not ranks or not all(isinstance(item, MemoryTrace | MemoryBreakdown | Plan | Run) for item in ranks.values()):
        kinds = sorted({type(item).__name__ for item in ranks.values()})
        raise (ValueError if not ranks else TypeError)(
            f"plot() draws a bar for each trace, breakdown, plan or run of a list or a mapping, got {', '.join(kinds) or 'none'}."
        )
    if ax is not None:
        return draw_ranks(ax, ranks)
    picture = Picture(9, 1.2 + 0.45 * len(ranks))
    (ax,) = picture.axes_row(1)
    draw_ranks(ax, ranks)
    breakdowns = {str(name): _breakdown_of(item) for name, item in ranks.items()}
    draw_legend(picture, breakdowns.values())
    picture.summary = "Peaks: " + ", ".join(f"{name} {format_bytes(b.total)}" for name, b in breakdowns.items()) + "."
    return picture


@_plot.register
def _(timeline: Timeline, ax: Axes | None) -> Picture | Axes:
    return draw_work(ax, timeline) if ax is not None else _timelines({"": timeline})


def _timelines(timelines: Mapping[Any, Timeline]) -> Picture:
    """One below the other, on one scale of time."""
    rows = [max(1, len(timeline.ranks)) for timeline in timelines.values()]
    picture = Picture(9, 0.9 + sum(0.5 + 0.32 * n for n in rows))
    grid = picture.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=[n + 0.8 for n in rows])
    for ax, (name, timeline) in zip(grid[:, 0], timelines.items(), strict=True):
        draw_work(ax, timeline)
        ax.set_title(str(name))
        if ax is not grid[-1, 0]:
            ax.set_xlabel("")
    end = max(timeline.seconds for timeline in timelines.values())
    grid[0, 0].set_xlim(0, 1000 * end * 1.12 or 1)
    handles = [Patch(facecolor=color, label=kind) for kind, color in WORK_COLORS.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    words = [f"{name} {timeline.seconds:.3g} s, idle {_idle_words(timeline)}".strip() for name, timeline in timelines.items()]
    picture.summary = f"Who computes when: {'; '.join(words)}."
    return picture


def _idle_words(timeline: Timeline) -> str:
    return ", ".join(f"rank {rank} {share:.0%}" for rank, share in timeline.idle.items())


def draw_work(ax: Axes, timeline: Timeline) -> Axes:
    """A row for each rank, a block for each forward and backward with its micro-batch's number, and the idle share at the end."""
    begin = min((work.start for work in timeline.works), default=0.0)
    per_character = 1.12 * timeline.seconds / max(1.0, _characters(ax))  # seconds
    for row, rank in enumerate(timeline.ranks):
        for work in timeline.of(rank):
            start = 1000 * (work.start - begin)
            color = WORK_COLORS[work.kind]
            ax.barh(row, 1000 * work.seconds, left=start, height=0.8, color=color, edgecolor="white", linewidth=0.6)
            if work.seconds > 1.5 * per_character * len(str(work.micro_batch)):
                where: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small"}
                ax.text(
                    start + 500 * work.seconds, row, str(work.micro_batch), color="white" if work.kind == "backward" else "black", **where
                )
        ax.annotate(f"{timeline.idle[rank]:.0%} idle", (1000 * timeline.seconds, row), (4, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in timeline.ranks])
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel="milliseconds", xlim=(0, 1120 * timeline.seconds or 1), ylim=(max(1, len(timeline.ranks)) - 0.5, -0.5))
    return ax


def _breakdown_of(item: MemoryTrace | MemoryBreakdown | Plan | Run) -> MemoryBreakdown:
    if isinstance(item, MemoryBreakdown):
        return item
    return item.breakdown() if isinstance(item, MemoryTrace) else item.breakdown


def draw_ranks(ax: Axes, ranks: Mapping[Any, MemoryTrace | MemoryBreakdown | Plan | Run]) -> Axes:
    """One stacked bar a rank, each at its own peak, and where the card ends if they are planned."""
    draw_breakdowns(ax, {str(name): _breakdown_of(item) for name, item in ranks.items()})
    plans = [item for item in ranks.values() if isinstance(item, Plan)]
    if plans:
        return draw_card(ax, (plans[0].gpu.name, plans[0].capacity))
    return draw_card(ax, _card_of([item for item in ranks.values() if isinstance(item, Run)]))


def _card_of(runs: Sequence[Run]) -> tuple[str, int] | None:
    """The virtual card of runs, and what it leaves for PyTorch."""
    device = runs[0].device if runs else None
    return (device.name, device.left_for_pytorch(0)) if isinstance(device, GPU) else None


def draw_card(ax: Axes, card: tuple[str, int] | None) -> Axes:
    """A line where a card ends, across bars, if it is within reach of them."""
    if card is not None:
        unit = _UNITS[ax.get_xlabel().rpartition("(")[2].removesuffix(")")]
        end, right = card[1] / unit, ax.get_xlim()[1]
        if end < 2 * right:
            ax.set_xlim(0, max(right, end * 1.05))
            ax.axvline(end, color=CARD, linewidth=1.5, linestyle="--")
            text = f"{card[0]}: {format_bytes(card[1])}"
            ax.text(end, ax.get_ylim()[1], text, ha="right", va="bottom", color=CARD)
    return ax


def draw_side_by_side(axes: Sequence[Axes], traces: Mapping[str, MemoryTrace]) -> None:
    """Timelines that share their vertical axis, so that heights can be compared."""
    highest = max(traces.values(), key=lambda trace: trace.peak)
    for ax, (label, trace) in zip(axes, traces.items(), strict=True):
        draw_timeline(ax, trace, highest=highest.peak)
        ax.set_title(_cut(label, round(_characters(ax))), fontsize="medium", fontweight="normal")
        if ax is not axes[0]:
            ax.set_ylabel("")


def draw_timeline(ax: Axes, trace: MemoryTrace, highest: int | None = None) -> Axes:
    """Memory after every event, stacked by category, phases shaded, the peak marked with its value, phase and cause.

    Args:
        highest: bytes that the axis reaches up to, with room for words; None: the trace's own peak.
    """
    frame = trace.timeline().iloc[max(0, trace.events.seeds - 1) :]
    bytes_ = frame[_LABELS].to_numpy()  # (events, categories)
    kept = _highest_of_each(bytes_.sum(1))
    highest = trace.peak if highest is None else highest
    unit, name = byte_unit(highest)
    areas = ax.stackplot(kept, bytes_[kept].T / unit, step="post")
    for category, area in zip(Category, areas, strict=True):
        area.set(**painted(category))
    top = highest / unit / (1 - min(0.45, WORDS / _points(ax)))
    for phase, start, end in _stretches(frame["phase"].tolist()):
        ax.axvspan(start, end, color=PHASE_SHADES[phase], zorder=-1, linewidth=0)
        if start:
            ax.axvline(start, color="#bbbbbb", linewidth=0.8, zorder=0)
        if _characters(ax) * (end - start) / len(frame) > len(phase) + 1:
            ax.text((start + end) / 2, top * 0.985, phase, ha="center", va="top", color="#555555", clip_on=True)
    if len(frame):
        _mark_peak(ax, trace, int(bytes_.sum(1).argmax()), len(frame), unit)
    ax.set(xlim=(0, max(1, len(frame) - 1)), ylim=(0, top or 1), xlabel="allocations and releases", ylabel=f"allocated ({name})")
    return ax


def _mark_peak(ax: Axes, trace: MemoryTrace, at: int, events: int, unit: int) -> None:
    """A dot, and beside it, on the emptier side, what the peak is and what set it."""
    ax.plot([at], [trace.peak / unit], "o", color="black", markersize=4)
    left = at > events / 2
    room = round(_characters(ax) * max(at, events - at) / events)
    where: dict[str, Any] = {"textcoords": "offset points", "ha": "right" if left else "left", "va": "bottom", "path_effects": _HALO}
    cause = _cut(_cause(trace), room)
    value = f"{format_bytes(trace.peak)} in {trace.peak_phase}"
    value = value if 1.2 * len(value) <= room else format_bytes(trace.peak)  # bold is wider
    aside = -7 if left else 7
    ax.annotate(value, (at, trace.peak / unit), (aside, 14 if cause else 3), fontweight="bold", **where)
    ax.annotate(cause, (at, trace.peak / unit), (aside, 3), color="#333333", fontsize="small", **where)


_HALO = [withStroke(linewidth=2.5, foreground="white")]  # words stay readable where lines cross them


def _characters(ax: Axes) -> float:
    """About how many characters fit side by side into axes; before they are laid out, so a little less is promised."""
    return ax.bbox.width * 72 / ax.figure.dpi / 5.5


def _points(ax: Axes) -> float:
    """About how high axes are."""
    return ax.bbox.height * 72 / ax.figure.dpi


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: max(length, 12) - 3].rstrip(' ,')}..."


def _cause(trace: MemoryTrace) -> str:
    """Operator and module of the event that made the peak; empty if it stood before."""
    events, i = trace.events, trace.peak_event
    if i < max(events.seeds, 0):
        return ""
    module = events.modules[events.module[i]]
    return events.operators[events.operator[i]] + (f" in {module}" if module else "")


def draw_capacity(ax: Axes, plan: Plan) -> Axes:
    """A line where the card ends, if it is within reach of the picture."""
    unit, _ = byte_unit(plan.trace.last_step().peak)
    end, top = plan.capacity / unit, ax.get_ylim()[1]
    if end < 2.5 * top:
        ax.set_ylim(0, max(top, end * 1.15))
        ax.axhline(end, color=CARD, linewidth=1.5, linestyle="--")
        text = f"{plan.gpu.name}: {format_bytes(plan.capacity)} for PyTorch"
        ax.annotate(text, (0, end), (4, 3), textcoords="offset points", color=CARD)
    return ax


def draw_curve(ax: Axes, curve: LawCurve) -> Axes:
    """Reserved and allocated bytes over the micro-batch, and where the card ends; what does not fit is hollow."""
    unit, name = byte_unit(curve.plan.capacity)
    sizes = [point.micro_batch for point in curve.points]
    for label, color, style in (("reserved", "#333333", "-"), ("allocated", "#0072B2", "--")):
        ax.plot(sizes, [getattr(point, label) / unit for point in curve.points], color=color, linestyle=style, label=label)
    for point in curve.points:
        ax.plot([point.micro_batch], [point.reserved / unit], "o", color="#333333", markerfacecolor="#333333" if point.fits else "white")
    end = curve.plan.capacity / unit
    highest = 1.2 * max(end, *(point.reserved / unit for point in curve.points))
    ax.axhspan(end, highest, color=CARD, alpha=0.08, linewidth=0)
    ax.axhline(end, color=CARD, linewidth=1.5, linestyle="--")
    label = f"{curve.plan.gpu.name}: {format_bytes(curve.plan.capacity)}"
    ax.annotate(label, (sizes[0], end), (0, 3), textcoords="offset points", color=CARD)
    largest = max((point for point in curve.points if point.fits), key=lambda point: point.micro_batch, default=None)
    if largest is not None:
        text = f"{largest.micro_batch} fits: {format_bytes(largest.reserved)}"
        arrow = {"arrowstyle": "-", "color": "#333333"}
        where: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "top", "arrowprops": arrow, "path_effects": _HALO}
        ax.annotate(text, (largest.micro_batch, largest.reserved / unit), (18, -44), fontweight="bold", **where)
    ax.set(xlabel="micro-batch", ylabel=f"planned peak ({name})", ylim=(0, highest), xlim=(0, sizes[-1] * 1.03))
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
        ax.barh(rows, widths, left=left, height=0.68, **painted(category))
        left += widths
    for row, (end, breakdown) in enumerate(zip(left, breakdowns.values(), strict=True)):
        ax.annotate(format_bytes(breakdown.total), (end, row), (4, 0), textcoords="offset points", va="center", fontweight="bold")
    ax.set_yticks(rows, [_wrapped(label) for label in breakdowns])
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel=f"in tensors at the peak ({name})", xlim=(0, left.max(initial=0) * 1.18 or 1), ylim=(len(breakdowns) - 0.5, -0.5))
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
    handles = [Patch(**painted(c), label=c.label) for c in Category if highest[c] > highest.sum() / 1000]
    where: Any = "lower left" if picture.get_layout_engine() is None else "outside lower left"
    inches = sum(0.5 + 0.085 * len(str(handle.get_label())) for handle in handles)
    rows = 1 + int(inches > picture.get_figwidth())
    picture.legend(handles=handles, loc=where, ncols=max(1, -(-len(handles) // rows)), handlelength=1.2, columnspacing=1.4, frameon=False)


def _words(trace: MemoryTrace) -> str:
    """What a timeline shows, for those who cannot see it."""
    cause = _cause(trace)
    return f"{f'Set by {cause}. ' if cause else ''}At the peak: {_listed(trace.breakdown())}"


def _listed(breakdown: MemoryBreakdown) -> str:
    return ", ".join(f"{label} {format_bytes(n)}" for label, n in breakdown.items() if n) + "."


_UNITS = {"GiB": GiB, "MiB": MiB, "KiB": KiB, "B": 1}


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
