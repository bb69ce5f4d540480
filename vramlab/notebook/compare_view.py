"""The compare view: every run and every kept plan is a row; rows can be sorted, laid over one another, saved and copied."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets as w

from vramlab.experiments import Run, recipe_labels
from vramlab.gpus import GPU
from vramlab.memory.trace import Category, MemoryBreakdown, MemoryTrace
from vramlab.notebook.plots import draw_breakdowns, draw_legend
from vramlab.notebook.predictor import Answer
from vramlab.notebook.style import Picture, byte_unit, styled
from vramlab.notebook.svg import LINES, Frame, overlay
from vramlab.notebook.switches import CHOSEN
from vramlab.recipe import Recipe
from vramlab.units import format_bytes

COLUMNS = (
    ("what", "9.5em"),
    ("recipe", "25em"),
    ("peak", "7em"),
    ("reserved", "7em"),
    ("speed", "6.5em"),
    ("loss", "5em"),
    ("state", "16em"),
)
RIGHT = ("peak", "reserved", "speed", "loss")  # numbers
OVERLAY = Frame(900, 230)
CELL = (
    "display:inline-block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;vertical-align:top;box-sizing:border-box;"
    "padding-right:.8em"
)
COPY = """
const text = %s;
const say = (ok) => {
  element.innerHTML = `<span role="status">${ok ? "copied" : "not copied: press Ctrl+C"}</span>`;
  if (!ok && document.activeElement.select) document.activeElement.select();
};
const withoutClipboard = () => {  // on pages that are not secure: http from another machine
  const field = Object.assign(document.createElement("textarea"), {value: text});
  const before = document.activeElement;
  document.body.append(field);
  field.select();
  const ok = document.execCommand("copy");
  field.remove();
  before.focus();
  return ok;
};
if (!(navigator.userActivation && navigator.userActivation.isActive)) say(false);
else if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => say(true), () => say(withoutClipboard()));
else say(withoutClipboard());
"""
"""A script for the page, where ``element`` is the place of the output. It copies only
for some seconds after a click, so that a page that is loaded again leaves the clipboard alone: where the browser cannot tell of
clicks (``navigator.userActivation``), never."""
TEXT = "line-height:1.6;color:var(--jp-widgets-color,currentColor);font-size:13px"


@dataclass(frozen=True)
class Row:
    """One line of the comparison: what was measured, or planned."""

    number: int
    what: str
    """``run, cpu`` or ``plan, RTX 4090``."""
    recipe: Recipe
    peak: int | None
    reserved: int | None
    speed: float | None
    loss: float | None
    state: str
    breakdown: MemoryBreakdown
    trace: MemoryTrace | None
    losses: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; what is no finite number is null."""
        plain = {name: getattr(self, name) for name in ("number", "what", "peak", "reserved", "speed", "loss", "state")}
        found = plain | {"recipe": self.recipe.changes(), "by_category": dict(self.breakdown.items()), "losses": list(self.losses)}
        return {name: _finite(value) for name, value in found.items()}


class CompareView:
    """The table and what stands below it.

    Args:
        unit: what the task's items are.
        task: its name.
    """

    def __init__(self, unit: str, task: str) -> None:
        self._boxes: dict[int, w.HBox] = {}
        self._unit, self._task = unit, task
        self.rows: list[Row] = []
        self.sorted_by, self.downwards = "", False
        self.picks: dict[int, Any] = {}  # by number: the row's checkbox
        self._lines: dict[int, w.HTML] = {}
        self._current: Answer | None = None
        heads = {name: {"speed": f"{unit}/s"}.get(name, name) for name, _ in COLUMNS}
        self.heads = {name: self._head(name, heads[name], width) for name, width in COLUMNS}
        self.keep = self._button("keep plan", "thumb-tack", "Make a row of the plan that is shown above", self.keep_plan)
        self.all = self._button("compare all", "check-square-o", "Pick all rows, or none", self._pick_all)
        self.saver = self._button(
            "save", "download", "Write the rows as JSON and a picture as PNG into this folder", lambda: self._told(self.save())
        )
        self.copy = self._button("copy recipe", "clipboard", "Copy the Python line of the picked rows, or of the last", self._copy)
        self.view = w.ToggleButtons(
            options=("bars", "timelines"),
            tooltips=("peaks by category", "memory through one step, laid over one another"),
            style={"button_width": "auto"},
        )
        self.view.add_class(CHOSEN)
        self.view.observe(lambda _: self._draw(), "value")
        layout = {"width": "60em", "max_width": "98%", "display": "none"}
        self.python = w.Text(
            description="Python", layout=layout, tooltip="What was copied; where the browser forbids it, press Ctrl+C here"
        )
        self.copied = w.Output()  # runs the script that copies, and shows what it says
        self.note, self.picture = w.HTML(), w.HTML()
        self._table = w.VBox([])
        self._refresh()

    def panel(self) -> w.VBox:
        """Buttons, table, picture."""
        buttons = [self.keep, self.all, self.view, self.saver, self.copy, self.note]
        bar = w.HBox(buttons, layout={"flex_flow": "row wrap", "align_items": "center"})
        return w.VBox([bar, w.HBox([self.python, self.copied], layout={"flex_flow": "row wrap"}), self._table, self.picture])

    # Rows

    def add_run(self, run: Run) -> None:
        """A finished, stopped or failed run."""
        place = run.device.name if isinstance(run.device, GPU) else str(run.device)
        trace = run.trace
        counters = [c for c in (*(r.counters for r in run.reports), trace.counters if trace else None) if c is not None]
        losses = () if isinstance(run.device, GPU) else tuple(run.losses)
        ended = run.status.split(":")[0]
        state = f"{len(run.reports)} steps, {'out of memory' if 'OutOfMemory' in ended else ended}"
        reserved = max((c.reserved for c in counters), default=None)
        loss = losses[-1] if losses else None
        self._add(f"run, {place}", run.recipe, run.peak, reserved, run.throughput, loss, state, run.breakdown, trace, losses)

    def current(self, answer: Answer | None) -> None:
        """What is planned now, of which a row can be kept; None while that is not known."""
        self._current = answer
        self.keep.disabled = answer is None

    def keep_plan(self) -> None:
        """Make a row of what is planned now."""
        answer = self._current
        if answer is None:
            return
        question = answer.question
        place = question.place.name if isinstance(question.place, GPU) else str(question.place)
        capacity = question.capacity
        state = "measured" if capacity is None else {True: "fits", False: "does not fit", None: "..."}[answer.will_fit]
        if answer.of is not None:
            state = {True: "should fit", False: "should not fit", None: "not sure"}[answer.will_fit] + f", as on {answer.of.name}"
        trace = answer.trace.last_step()
        self._add(f"plan, {place}", question.recipe, answer.allocated, answer.reserved, None, None, state, answer.breakdown, trace)

    def _add(self, *columns: Any) -> None:
        self.rows.append(Row(len(self.rows) + 1, *columns))
        self._refresh()

    def labels(self) -> dict[int, str]:
        """By number: the first recipe in full, of the others what differs from it."""
        return dict(zip((r.number for r in self.rows), recipe_labels([r.recipe for r in self.rows]), strict=True)) if self.rows else {}

    def in_order(self) -> list[Row]:
        """The rows as they are sorted; what has no value comes last."""
        name = self.sorted_by
        if not name:
            return list(self.rows)
        labels = self.labels()
        keyed = [(labels[r.number] if name == "recipe" else getattr(r, name), r) for r in self.rows]
        known = [(k, r) for k, r in keyed if k is not None and k == k]
        rest = [r for k, r in keyed if k is None or k != k]
        return [r for _, r in sorted(known, key=lambda item: item[0], reverse=self.downwards)] + rest

    def picked(self) -> list[Row]:
        """The rows whose boxes are ticked, in the order of the table."""
        return [row for row in self.in_order() if self.picks[row.number].value]

    def sort(self, name: str) -> None:
        """By a column; once more: the other way round; a third time: as they came."""
        if self.sorted_by != name:
            self.sorted_by, self.downwards = name, False
        elif not self.downwards:
            self.downwards = True
        else:
            self.sorted_by, self.downwards = "", False
        self._refresh()

    # What is written and copied

    def save(self, path: str | Path | None = None) -> tuple[Path, Path]:
        """Write the rows as JSON, and the picked ones (or all) as a PNG beside it.

        Args:
            path: of the JSON file; None: a new name in the working folder.

        Returns:
            Both paths.

        Raises:
            ValueError: there is no row yet.
        """
        if not self.rows:
            raise ValueError("There is nothing to save yet: press Start for a run, or keep the plan that is shown.")
        file = Path(path) if path is not None else _new_name(self._task)
        file.write_text(json.dumps({"task": self._task, "unit": self._unit, "rows": [r.to_dict() for r in self.rows]}, indent=1) + "\n")
        png = file.with_suffix(".png")
        png.write_bytes(self.drawing().png())
        return file, png

    def drawing(self) -> Picture:
        """Peaks by category, and the memory through one step, of the picked rows, or of all."""
        rows = self.picked() or self.rows
        labels = self.labels()
        bars = {f"{r.number}  {labels[r.number]}": r.breakdown for r in rows}
        picture = Picture(12, 2.2 + 0.45 * len(rows))
        left, right = picture.axes_row(1.2, 1)
        with styled():
            draw_breakdowns(left, bars)
            traces = [(r.number, r.trace) for r in rows if r.trace is not None]
            unit, name = byte_unit(max((t.peak for _, t in traces), default=1))
            for i, (number, trace) in enumerate(traces):
                held = trace.timeline()[[c.label for c in Category]].sum(axis=1).to_numpy()[max(0, trace.events.seeds - 1) :]
                shares = [100 * k / max(1, len(held) - 1) for k in range(len(held))]
                right.plot(shares, held / unit, color=LINES[i % len(LINES)], linestyle=("-", "--", ":", "-.")[i % 4], label=str(number))
            right.set(xlabel="through one step (% of its allocations)", ylabel=f"allocated ({name})", ylim=(0, None))
            if traces:
                right.legend(frameon=False)
            draw_legend(picture, list(bars.values()))
        picture.summary = "Peaks: " + ", ".join(f"{r.number} {format_bytes(r.breakdown.total)}" for r in rows)
        return picture

    # Widgets

    def _button(self, words: str, icon: str, tip: str, act: Callable[[], object]) -> w.Button:
        button = w.Button(description=words, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(lambda _: self._guard(act))
        return button

    def _head(self, name: str, words: str, width: str) -> w.Button:
        right = name in RIGHT
        layout = {"width": width, "height": "24px", "margin": "0", "padding": "0 .8em 0 0" if right else "0"}
        layout |= {"display": "flex", "justify_content": "flex-end" if right else "flex-start"}  # above its column's texts
        button = w.Button(
            description=words, tooltip=f"Sort by {words}", layout=layout, style={"button_color": "transparent", "font_weight": "bold"}
        )
        button.on_click(lambda _: self._guard(lambda: self.sort(name)))
        return button

    def _refresh(self) -> None:
        """The table as its rows are now; a row's widgets stay the same."""
        labels = self.labels()
        for row in self.rows:
            if row.number not in self.picks:
                box = w.Checkbox(
                    value=False, description=str(row.number), indent=False, layout={"width": "3.5em"}, tooltip="Lay over the others"
                )
                box.observe(lambda _: self._guard(self._draw), "value")
                self.picks[row.number], self._lines[row.number] = box, w.HTML()
            self._lines[row.number].value = _line(row, labels[row.number])
        for name, button in self.heads.items():
            arrow = "" if name != self.sorted_by else " (down)" if self.downwards else " (up)"
            button.description = {"speed": f"{self._unit}/s"}.get(name, name) + arrow
        head = w.HBox([w.HTML(layout={"width": "3.5em"}), *self.heads.values()]) if not self._table.children else self._table.children[0]
        lines = [self._row_box(row) for row in self.in_order()]
        self._table.children = (head, *lines) if self.rows else (head,)
        self._table.layout.display = "" if self.rows else "none"
        for button in (self.all, self.view, self.saver, self.copy):
            button.disabled = not self.rows
        self.keep.disabled = self._current is None
        self._draw()

    def _row_box(self, row: Row) -> w.HBox:
        if row.number not in self._boxes:  # a widget lives until it is closed
            pair = [self.picks[row.number], self._lines[row.number]]
            self._boxes[row.number] = w.HBox(pair, layout={"align_items": "center"})
        return self._boxes[row.number]

    def _pick_all(self) -> None:
        every = all(box.value for box in self.picks.values())
        for box in self.picks.values():
            box.value = not every

    def _draw(self) -> None:
        """Lay the picked rows over one another."""
        rows, labels = self.picked(), self.labels()
        if not rows:
            self.picture.value = f"<span style='{TEXT};opacity:.75'>tick rows to lay them over one another</span>" if self.rows else ""
            return
        if self.view.value == "timelines":
            traces = [(f"{r.number} {labels[r.number]}", r.trace) for r in rows if r.trace is not None]
            self.picture.value = overlay([(name, trace) for name, trace in traces if trace is not None], OVERLAY)
        else:
            self.picture.value = bars(rows, labels)

    def _copy(self) -> None:
        rows = self.picked() or self.rows[-1:]
        lines = [f"vl.{row.recipe!r}" for row in rows]
        self.python.value = f"recipe = {lines[0]}" if len(lines) == 1 else f"recipes = [{', '.join(lines)}]"
        self.python.layout.display = ""
        self.python.focus()
        script = {"application/javascript": COPY % json.dumps(self.python.value), "text/plain": "press Ctrl+C in the field"}
        self.copied.outputs = ({"output_type": "display_data", "data": script, "metadata": {}},)

    def _told(self, files: tuple[Path, Path]) -> None:
        self.note.value = f"<span role='status' style='{TEXT}'>written: {' and '.join(html.escape(f.name) for f in files)}</span>"

    def _guard(self, act: Callable[[], object]) -> None:
        """An error in a callback would be seen by nobody."""
        try:
            self.note.value, self.copied.outputs = "", ()
            act()
        except Exception as error:
            self.note.value = f"<b role='status' style='{TEXT}'>{html.escape(f'{type(error).__name__}: {error}')}</b>"


def _line(row: Row, label: str) -> str:
    loss = "" if row.loss is None else "nan" if math.isnan(row.loss) else f"{row.loss:.3f}"
    speed = "" if row.speed is None else f"{row.speed:,.0f}"
    sizes = ["" if n is None else format_bytes(n) for n in (row.peak, row.reserved)]
    texts = (row.what, label, *sizes, speed, loss, row.state)
    cells = ""
    for (name, width), text in zip(COLUMNS, texts, strict=True):
        side = "right" if name in RIGHT else "left"
        said = html.escape(text, quote=True)
        cells += f"<span title='{said}' style='{CELL};width:{width};text-align:{side}'>{said}</span>"
    return f"<div style='{TEXT};white-space:nowrap'>{cells}</div>"


def bars(rows: list[Row], labels: dict[int, str]) -> str:
    """One stacked bar a row, on one scale, with its total."""
    most = max(1, *(row.breakdown.total for row in rows))
    body = ""
    for row in rows:
        pieces = "".join(
            f"<div title='{label}: {format_bytes(n)}' style='background:{c.color};width:{72 * n / most:.3f}%'></div>"
            for c, (label, n) in zip(Category, row.breakdown.items(), strict=True)
            if n
        )
        name = html.escape(f"{row.number}  {labels[row.number]}")
        total = f"<b style='margin-left:.5em;white-space:nowrap'>{format_bytes(row.breakdown.total)}</b>"
        body += (
            f"<div style='display:flex;align-items:center;margin:2px 0'><div style='flex:0 0 21em;{CELL}' title='{name}'>{name}</div>"
            f"<div style='flex:1;display:flex;height:18px'>{pieces}{total}</div></div>"
        )
    held = [dict(row.breakdown.items()) for row in rows]
    swatch = "<span style='margin-right:1.2em'><span style='display:inline-block;width:.8em;height:.8em;background:{}'></span> {}</span>"
    legend = "".join(swatch.format(c.color, c.label) for c in Category if any(of[c.label] for of in held))
    said = html.escape(", ".join(f"{r.number} {format_bytes(r.breakdown.total)}" for r in rows), quote=True)
    return (
        f"<div role='img' aria-label='Peaks: {said}' style='{TEXT};max-width:900px'>{body}<div style='font-size:12px'>{legend}</div></div>"
    )


def _new_name(task: str) -> Path:
    stem = "lab-" + (re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task")
    number = 1
    while (path := Path(f"{stem}-{number}.json")).exists():
        number += 1
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
