"""Pictures of memory as SVG text: drawn in a millisecond, sharp at any size, in the colours of a light or a dark page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vramlab.memory.trace import Category, MemoryTrace, Phase
from vramlab.notebook.style import byte_unit
from vramlab.units import format_bytes

COLUMNS = 280  # of a timeline: more than the eye tells apart at its width, and each costs bytes on the way to the page
ALARM = "#D55E00"
"""Of lines and areas. Words in it would be hard to read: 3.9 to 1 on white, where WCAG 2.2 asks for 4.5."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GOOD, BAD, OPEN, SEEN = "#00785a", "#b84a00", "#6c757d", "#0072B2"
"""Behind white words, with a contrast of 4.5 to 1 or more: fits, does not, not known yet, measured."""
SHADES = {Phase.BUILD: 0.0, Phase.FORWARD: 0.0, Phase.BACKWARD: 0.05, Phase.STEP: 0.11}
"""How dark each phase's background is, of the page's own text colour."""


@dataclass(frozen=True)
class Frame:
    """Where a plot's axes are in its picture, and what their ends mean."""

    width: int
    height: int
    left: int = 46
    right: int = 8
    top: int = 24
    bottom: int = 22

    @property
    def inner(self) -> tuple[int, int]:
        """Width and height between the axes' ends."""
        return self.width - self.left - self.right, self.height - self.top - self.bottom

    def x(self, share: float) -> float:
        return self.left + share * self.inner[0]

    def y(self, share: float) -> float:
        return self.top + (1 - share) * self.inner[1]

    def picture(self, body: str, label: str) -> str:
        """The SVG, which shrinks with its place and says in a sentence what it shows."""
        style = f"display:block;width:100%;max-width:{self.width}px;height:auto;font:11px var(--jp-ui-font-family,sans-serif)"
        said = html.escape(label, quote=True)
        head = f'<svg role="img" aria-label="{said}" viewBox="0 0 {self.width} {self.height}" style="{style}" fill="currentColor">'
        return f"{head}{body}</svg>"


def timeline(trace: MemoryTrace, frame: Frame, *, capacity: int | None = None, limit: str = "", title: str = "one step") -> str:
    """Memory through one step: stacked by category, phases shaded, the peak marked, a line where the card ends.

    Args:
        trace: the step; see `MemoryTrace.last_step`.
        capacity: bytes where the line is; not drawn where it is far above.
        limit: what the line is called.
    """
    events = trace.events
    first = max(0, events.seeds - 1)
    held = np.array([np.cumsum(np.where(events.category == c, events.nbytes, 0))[first:] for c in Category], np.float64)
    total = held.sum(0)
    if not len(total):
        return nothing_yet(frame, "nothing was allocated")
    peak = float(total.max())
    reach = capacity is not None and capacity < 2.2 * peak
    top = max(peak * 1.22, capacity * 1.12 if reach and capacity else 0, 1.0)
    kept, edges = _highest_of_each(total, COLUMNS), _edges(len(total), COLUMNS)
    shares = edges[:-1] / len(total)  # each column from edge to edge: one that was as thin as its event could vanish in rounding
    body = [_phases(events.phase[first:], frame), _axis(top, frame)]
    for category in reversed(Category):
        if held[category].max() > peak / 500:
            heights = held[: category + 1, kept].sum(0) / top
            body.append(f'<path fill="{category.color}" d="{_area(shares, heights, frame)}"/>')
    at = int(total.argmax())
    said = f"{format_bytes(int(peak))} in {trace.peak_phase}"
    where = float(shares[np.searchsorted(edges, at, side="right") - 1]) + 0.5 / (len(edges) - 1)
    if reach and capacity is not None:
        body.append(_limit(capacity / top, limit, frame, left=where > 0.5))
    body.append(_marked(where, peak / top, said, frame))
    body.append(f'<text x="{frame.left}" y="12" font-weight="600">{html.escape(title)}</text>')
    body.append(_note("allocations and releases, in order", frame))
    return frame.picture("".join(body), f"{title}: peak {said}.")


def series(
    title: str, steps: Sequence[float], values: Sequence[float], frame: Frame, *, unit: str = "", color: str = "currentColor"
) -> str:
    """A quantity over steps with its last value beside the title; what is no finite number leaves a gap."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return nothing_yet(frame, "not computed" if len(values) else "", title)
    of_bytes = unit == "bytes"
    low, high = min(0.0, *finite), max(0.0, *finite)
    top, bottom = (high + 0.15 * (high - low), low) if high > low else (1.0, 0.0)
    kept = _thinned(len(values), 160)
    last = max(10.0, float(steps[-1]))
    line, pen = [], "M"
    for i in kept:
        if math.isfinite(values[i]):
            share = (values[i] - bottom) / (top - bottom)
            line.append(f"{pen}{frame.x(steps[i] / last):.0f} {frame.y(share):.1f}")
            pen = "L"
        else:
            pen = "M"
    shown = format_bytes(int(finite[-1])) if of_bytes else f"{finite[-1]:,.0f}" if abs(finite[-1]) >= 100 else f"{finite[-1]:.3f}"
    body = [
        _axis(top, frame, bottom, of_bytes=of_bytes),
        f'<path fill="none" stroke="{color}" stroke-width="1.8" stroke-linejoin="round" stroke-linecap="round" d="{"".join(line)}"/>',
        f'<text x="{frame.left}" y="12"><tspan font-weight="600">{html.escape(title)}</tspan> {shown}</text>',
        f'<text x="{frame.x(1):.0f}" y="12" text-anchor="end" opacity=".75">step {steps[-1]:,.0f}</text>',
    ]
    return frame.picture("".join(body), f"{title} over {len(values)} steps, last {shown}.")


def overlay(traces: Sequence[tuple[str, MemoryTrace]], frame: Frame) -> str:
    """The memory of several steps as lines, one over the other, each in its own colour and dash."""
    totals = []
    for _, trace in traces:
        events = trace.events
        totals.append(np.cumsum(events.nbytes)[max(0, events.seeds - 1) :].astype(np.float64))
    top = max((float(t.max(initial=1.0)) for t in totals), default=1.0) * 1.1
    body = [_axis(top, frame)]
    for i, ((name, _), total) in enumerate(zip(traces, totals, strict=True)):
        if not len(total):
            continue
        kept = _highest_of_each(total, COLUMNS)
        points = zip(kept / max(1, len(total) - 1), total[kept] / top, strict=True)
        line = "M" + "L".join(f"{frame.x(x):.0f} {frame.y(y):.1f}" for x, y in points)
        look = f'fill="none" stroke="{LINES[i % len(LINES)]}" stroke-width="2" stroke-dasharray="{DASHES[i % len(DASHES)]}"'
        body.append(f'<path {look} d="{line}"/>')
        y = frame.top + 14 * i + 4
        body.append(f'<path {look} d="M{frame.width - 280} {y}h28"/>')
        words = f"{name if len(name) < 32 else name[:30] + '...'}: {format_bytes(int(total.max()))}"
        body.append(f'<text x="{frame.width - 246}" y="{y + 4}">{html.escape(words)}</text>')
    body.append(f'<text x="{frame.left}" y="12" font-weight="600">memory through one step</text>')
    body.append(_note("from the step's first allocation to its last", frame))
    said = ", ".join(f"{name} {format_bytes(int(t.max(initial=0)))}" for (name, _), t in zip(traces, totals, strict=True))
    return frame.picture("".join(body), f"Memory through one step, peaks: {said}.")


def badge(color: str, word: str) -> str:
    """A word in white on a colour that leaves it readable."""
    return f"<b style='background:{color};color:#fff;border-radius:3px;padding:1px 7px'>{word}</b>"


def nothing_yet(frame: Frame, why: str, title: str = "") -> str:
    """Empty axes that say what will be there."""
    x, y = frame.x(0.5), frame.y(0.5)
    body = (
        f'<text x="{frame.left}" y="12" font-weight="600">{html.escape(title)}</text>'
        f'<path fill="none" stroke="currentColor" stroke-opacity=".3" d="M{frame.left} {frame.top}V{frame.y(0):.0f}H{frame.x(1):.0f}"/>'
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" opacity=".65">{html.escape(why)}</text>'
    )
    return frame.picture(body, f"{title} {why}".strip())


def _area(shares: np.ndarray, heights: np.ndarray, frame: Frame) -> str:
    """The outline of what is below a line of steps."""
    xs = np.rint(frame.left + shares * frame.inner[0]).astype(int).tolist()
    ys = np.round(frame.top + (1 - heights) * frame.inner[1], 1).tolist()
    parts = [f"M{xs[0]} {frame.y(0):.0f}"]
    last: object = None
    for x, y in zip(xs, ys, strict=True):
        if y != last:
            parts.append(f"H{x}V{y:g}")
            last = y
    return "".join(parts) + f"H{frame.x(1):.0f}V{frame.y(0):.0f}Z"


def _phases(phases: np.ndarray, frame: Frame) -> str:
    """A shade behind each stretch of a phase, and its name where there is room."""
    cuts = [0, *(np.flatnonzero(np.diff(phases)) + 1).tolist(), len(phases)]
    body = ""
    for a, b in pairwise(cuts):
        phase = Phase(phases[a])
        x, width = frame.x(a / len(phases)), (b - a) / len(phases) * frame.inner[0]
        if SHADES[phase]:
            body += f'<rect x="{x:.1f}" y="{frame.top}" width="{width:.1f}" height="{frame.inner[1]}" fill-opacity="{SHADES[phase]}"/>'
        if width > 48:
            body += f'<text x="{x + width / 2:.0f}" y="{frame.top + 11}" text-anchor="middle" opacity=".7">{phase.label}</text>'
    return body


def _axis(top: float, frame: Frame, bottom: float = 0.0, *, of_bytes: bool = True) -> str:
    """Left and lower axis with a few round numbers."""
    unit, name = byte_unit(int(top)) if of_bytes else (1, "")
    body = f'<path fill="none" stroke="currentColor" stroke-opacity=".45" d="M{frame.left} {frame.top}V{frame.y(0):.0f}H{frame.x(1):.0f}"/>'
    for value in round_numbers(bottom / unit, top / unit):
        y = frame.y((value * unit - bottom) / (top - bottom))
        body += f'<path stroke="currentColor" stroke-opacity=".12" d="M{frame.left} {y:.1f}H{frame.x(1):.0f}"/>'
        body += f'<text x="{frame.left - 5}" y="{y + 4:.1f}" text-anchor="end" opacity=".75">{short(value)}</text>'
    return body + (f'<text x="{frame.left - 5}" y="12" text-anchor="end" opacity=".75">{name}</text>' if name else "")


def round_numbers(low: float, high: float, most: int = 5) -> list[float]:
    """At most so many multiples of 1, 2 or 5 times a power of ten between two numbers."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * f for f in (1, 2, 5, 10) if span / (power * f) <= most)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """``12k`` for 12,000: what an axis has room for."""
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{round(value, 6):g}"


def _limit(y: float, words: str, frame: Frame, *, left: bool) -> str:
    """A line where the card ends, and what it is, on one side of it."""
    height = frame.y(y)
    x, anchor = (frame.left + 4, "start") if left else (frame.x(1) - 4, "end")
    return (
        f'<path d="M{frame.left} {height:.1f}H{frame.x(1):.0f}" stroke="{ALARM}" stroke-width="1.5" stroke-dasharray="6 3"/>'
        f'<text x="{x:.0f}" y="{height - 4:.1f}" text-anchor="{anchor}" font-weight="600">{html.escape(words)}</text>'
    )


def _marked(x: float, y: float, words: str, frame: Frame) -> str:
    """A dot with words on its emptier side."""
    at, height = frame.x(x), frame.y(y)
    anchor, shift = ("end", -7) if x > 0.55 else ("start", 7)
    return (
        f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3.5"/>'
        f'<text x="{at + shift:.1f}" y="{height - 3:.1f}" text-anchor="{anchor}" font-weight="700">{html.escape(words)}</text>'
    )


def _note(words: str, frame: Frame) -> str:
    return f'<text x="{frame.x(1):.0f}" y="{frame.height - 6}" text-anchor="end" opacity=".75">{html.escape(words)}</text>'


def _highest_of_each(totals: np.ndarray, columns: int) -> np.ndarray:
    """Indices of at most so many events: the highest of each stretch, so that no peak gets lost."""
    return np.array([a + int(totals[a:b].argmax()) for a, b in pairwise(_edges(len(totals), columns))])


def _edges(count: int, columns: int) -> np.ndarray:
    """Where at most so many stretches of events begin, and where the last ends."""
    return np.linspace(0, count, min(count, columns) + 1).astype(int)


def _thinned(count: int, most: int) -> list[int]:
    """Indices of at most about so many values, evenly, the last among them."""
    if count <= most:
        return list(range(count))
    return np.unique(np.linspace(0, count - 1, most).astype(int)).tolist()
