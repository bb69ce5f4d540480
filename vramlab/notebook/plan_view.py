"""The plan view: a bar of the predicted peak against the card, what it consists of, and what set it."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable
from typing import Any

import ipywidgets as w

from vramlab.gpus import GPU
from vramlab.memory.report import Change
from vramlab.memory.trace import Category
from vramlab.notebook.predictor import Answer, Question, Update, settled
from vramlab.notebook.style import byte_unit
from vramlab.notebook.svg import ALARM, BAD, GOOD, OPEN, SEEN, Frame, badge, nothing_yet, round_numbers, short, timeline
from vramlab.notebook.switches import discard
from vramlab.units import format_bytes

TIMELINE = Frame(620, 250)
HATCH = f"repeating-linear-gradient(45deg,{ALARM} 0 3px,transparent 3px 9px)"
CACHED = "repeating-linear-gradient(135deg,#adb5bd 0 2px,#dee2e6 2px 6px)"
CONTEXT, OTHERS = "#6c757d", "#343a40"
SPAN = "display:inline-block;white-space:nowrap;margin-right:1.3em"
LOOK = "line-height:1.35;color:var(--jp-widgets-color,currentColor);font-size:13px"


class PlanView:
    """Widgets that show the newest `Update` of a `Predictor`.

    Args:
        apply: called with options of the Recipe when a button that changes some is pressed.
    """

    def __init__(self, apply: Callable[..., None]) -> None:
        self._apply = apply
        self.verdict, self.bar, self.facts, self.memory = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.timeline = w.HTML(nothing_yet(TIMELINE, "the step's memory, once it is planned", "one step"), layout={"width": "100%"})
        self.use = w.Button(
            description="use", tooltip="Set the micro-batch to the largest that fits", layout={"width": "auto", "display": "none"}
        )
        self.use.on_click(lambda _: self._use())
        self.largest = w.HTML()
        self.remedies = w.VBox([])
        self.shown: Answer | None = None
        self._before: Answer | None = None  # what the present one is compared with
        self._since = 0.0
        self._largest: int | None = None
        self._drawn: Answer | None = None
        self.on_answer: Callable[[Answer], None] = lambda _: None

    def panel(self) -> w.VBox:
        """Verdict, bar, numbers and table."""
        fits = w.HBox([self.largest, self.use], layout={"align_items": "center"})
        return w.VBox(
            [self.verdict, self.bar, self.facts, fits, self.remedies, self.memory], layout={"flex": "1 1 470px", "min_width": "430px"}
        )

    def update(self, update: Update) -> None:
        """Show what is new."""
        if update.error is not None:
            self._failed(update)
        elif update.answer is not None:
            self._answer(update.answer, update.busy, update.waits)
        elif update.busy:
            self._waiting(update.question, update.waits)
        if update.largest is not None:
            self._largest_fits(update.largest)
        if update.changes is not None:
            self._offer(update.changes)

    # What is shown

    def _answer(self, answer: Answer, busy: bool, waits: bool) -> None:
        before = self.shown
        if before is None or before.question != answer.question:
            # The column before says no "about", so it takes no estimate from another card.
            if before is not None and not before.borrowed and (settled(self._since) or self._before is None):
                self._before = before
            self._since = time.monotonic()
            self._new_question(before, answer.question)
        self.shown = answer
        self.verdict.value = verdict(answer, busy, waits)
        self.bar.value = bar(answer)
        self.facts.value = facts(answer)
        self.memory.value = table(answer, self._before)
        if self._drawn is None or self._drawn.trace is not answer.trace or self._drawn.question != answer.question:
            self._drawn = answer
            self.timeline.value = picture(answer)
        self.on_answer(answer)

    def _waiting(self, question: Question, waits: bool) -> None:
        """Nothing is known of it yet: what is shown belongs to another recipe, so it is dimmed and says so."""
        self._new_question(self.shown, question)
        how = "planned" if question.card is not None else "measured"
        says = f"to be {how} when the run has ended" if waits else f"{_way(question)} {question.recipe}"
        self.verdict.value = _verdict(OPEN, "...", says, "the bar still shows the setting before" if self.shown is not None else "")
        self._dim()

    def _new_question(self, before: Answer | None, question: Question) -> None:
        same = before is not None and _family(before.question) == _family(question)
        if not same:
            self._largest = None
            self.largest.value = ""
            self.use.layout.display = "none"
        elif self._largest is not None:
            self._largest_fits(self._largest, question)
        if self.remedies.children:
            self._offer([])

    def _failed(self, update: Update) -> None:
        error = update.error
        text = html.escape(str(error))
        self.verdict.value = _verdict(BAD, "no plan", type(error).__name__, text)
        self._dim()

    def _dim(self) -> None:
        """What is shown belongs to another setting than the switches do."""
        if self.shown is not None:
            for widget, of in ((self.bar, bar), (self.facts, facts)):
                widget.value = f"<div style='opacity:.35'>{of(self.shown)}</div>"
            self.memory.value = f"<div style='opacity:.35'>{table(self.shown, self._before)}</div>"

    def refused(self) -> None:
        """The switches exclude one another: there is nothing to predict."""
        rest = "the bar still shows the setting before" if self.shown is not None else ""
        self.verdict.value = _verdict(BAD, "not possible", "these switches exclude one another, see beside them", rest)
        self._dim()

    def _largest_fits(self, largest: int, question: Question | None = None) -> None:
        self._largest = largest
        if question is None and self.shown is not None:
            question = self.shown.question
        here = question is not None and question.recipe.micro_batch == largest
        words = f"micro-batches up to <b>{largest:,}</b> fit" if largest else "<b>not even a micro-batch of 1 fits</b>"
        self.largest.value = f"<span style='{LOOK}'>{words}{', this is the largest' if here else ''}</span>"
        self.use.description = f"use {largest}"
        self.use.layout.display = "" if largest and not here else "none"

    def _use(self) -> None:
        if self._largest:
            self._apply(micro_batch=self._largest)

    def _offer(self, changes: list[Change]) -> None:
        """One button a change; those that fit say so first."""
        buttons = [self._change(change) for change in changes[:4]]
        says = (
            "one change to the recipe that fits, planned:" if changes and changes[0].fits else "no single change fits; the best, planned:"
        )
        head = [w.HTML(f"<span style='{LOOK}'>{says}</span>")] if buttons else []
        gone, self.remedies.children = (
            self.remedies.children,
            (*head, *([w.HBox(buttons, layout={"flex_flow": "row wrap"})] if buttons else [])),
        )
        for old in gone:
            discard(old)

    def _change(self, change: Change) -> w.Button:
        said = f"Set {change.options}: {format_bytes(change.reserved)} reserved, {'fits' if change.fits else 'does not fit'}"
        words = f"{change.words}: {format_bytes(change.reserved)}"
        button = w.Button(description=words, tooltip=said, layout={"width": "auto"}, icon="check" if change.fits else "times")
        button.on_click(lambda _: self._apply(**change.options))
        return button


def _family(question: Question) -> Any:
    return question.place, question.in_use, question.recipe.with_(micro_batch=1)


def _way(question: Question) -> str:
    return "planning" if question.card is not None else "measuring"


def _verdict(color: str, word: str, says: str, rest: str = "") -> str:
    small = f" <span style='opacity:.75'>{rest}</span>" if rest else ""
    return f"<div role='status' style='{LOOK};min-height:1.6em'>{badge(color, word)} {says}{small}</div>"


def verdict(answer: Answer, busy: bool, waits: bool = False) -> str:
    """Whether it fits, in a word, a number, and how that is known. What comes from another card is said to be about so much."""
    known = f"as on {html.escape(answer.of.name)}" if answer.of is not None else "by the law" if answer.how == "law" else answer.how
    if busy and not answer.exact:
        known += ", waits for the run" if waits else ", tracing ..." if answer.question.card is not None else ", measuring ..."
    capacity = answer.question.capacity
    if capacity is None:
        return _verdict(SEEN, "measured", f"<b>{format_bytes(answer.allocated)}</b> at the peak on {answer.question.place}")
    if capacity == 0:
        return _verdict(BAD, "no room", "the context and what others hold fill the card")
    fits = answer.will_fit
    if answer.borrowed:
        word = {True: "should fit", False: "should not fit", None: "..." if answer.reserved is None else "not sure yet"}[fits]
    else:
        word = {True: "fits", False: "does not fit", None: "..."}[fits]
    says = f"{_about(answer)}<b>{format_bytes(answer.allocated)}</b> allocated of {format_bytes(capacity)}"
    if answer.reserved is not None and not answer.borrowed:
        left = capacity - answer.reserved
        says += f", {format_bytes(abs(left))} {'left' if left >= 0 else 'too much reserved'}"
    return _verdict({True: GOOD, False: BAD, None: OPEN}[fits], word, says, known)


def _about(answer: Answer) -> str:
    return "about " if answer.borrowed else ""


def pieces(answer: Answer) -> list[tuple[str, int, str]]:
    """What the bar consists of, from left to right: name, bytes, colour."""
    parts = [(label, n, c.color) for c, (label, n) in zip(Category, answer.breakdown.items(), strict=True) if n]
    held = sum(n for _, n, _ in parts)
    ends = max(0, answer.allocated - held)
    if answer.question.card is None:
        return parts
    cached = max(0, (answer.reserved or answer.allocated) - held - ends)
    rest = [("ends of blocks", ends, "#ced4da"), ("cached by the allocator", cached, CACHED)]
    around = [("CUDA context", answer.question.card.context, CONTEXT), ("held by others", answer.question.in_use, OTHERS)]
    return [*parts, *(p for p in (*rest, *around) if p[1])]


def scale(answer: Answer) -> int:
    """Bytes that the bar's whole width stands for: the card, or a half, a quarter... of it for a small step, more for what does not fit."""
    total = sum(n for _, n, _ in pieces(answer))
    card = answer.question.card
    full = card.memory if card is not None else 2 ** math.ceil(math.log2(max(total, 1)))
    if total > 0.98 * full:
        return int(total * 1.06)
    if card is not None:
        while total < full / 8:
            full //= 2
        return int(full * 1.04)
    return int(full * 1.04)


def bar(answer: Answer) -> str:
    """The stacked bar, the line where the card ends, hatched beyond it, and an axis."""
    parts, full, card = pieces(answer), scale(answer), answer.question.card
    total = sum(n for _, n, _ in parts)
    body = "".join(
        f"<div title='{html.escape(label)}: {format_bytes(n)}' style='background:{color};width:{100 * n / full:.3f}%;"
        "box-shadow:inset -1px 0 rgba(255,255,255,.6)'></div>"
        for label, n, color in parts
    )
    said = html.escape(
        f"Predicted peak{', about' if answer.borrowed else ''}: {', '.join(f'{label} {format_bytes(n)}' for label, n, _ in parts)}",
        quote=True,
    )
    line = note = over = ""
    if card is not None:
        end = 100 * card.memory / full
        if total > card.memory:
            over = (
                f"<div title='beyond the card: {format_bytes(total - card.memory)}' style='position:absolute;top:0;height:34px;"
                f"left:{end:.3f}%;width:{100 * (total - card.memory) / full:.3f}%;background:{HATCH}'></div>"
            )
        if end < 100:
            line = f"<div style='position:absolute;top:-5px;height:44px;left:calc({end:.3f}% - 1px);border-left:3px solid {ALARM}'></div>"
            mark = f"<span style='color:{ALARM}'>|</span>"
            note = f"<b style='font-weight:600'>{mark} {html.escape(card.name)} ends at {format_bytes(card.memory)}</b>"
        else:
            note = f"<span style='opacity:.75'>{html.escape(card.name)} ends far to the right, at {format_bytes(card.memory)}</span>"
        if total > card.memory:
            note += f" <span style='{SPAN}'>/// {format_bytes(total - card.memory)} beyond it</span>"
    unit, name = byte_unit(full)
    ticks = "".join(
        f"<span style='position:absolute;left:{100 * v * unit / full:.2f}%;transform:translateX(-50%);opacity:.75'>{short(v)}</span>"
        for v in round_numbers(0, 0.94 * full / unit, 8)[1:]
    )
    stack = f"<div style='display:flex;height:34px;background:rgba(128,128,128,.16)'>{body}</div>{over}{line}"
    axis = f"{ticks}<span style='position:absolute;right:0;opacity:.75'>{name}</span>"
    return (
        f"<div role='img' aria-label='{said}' style='{LOOK}'><div style='position:relative;margin-top:7px'>{stack}</div>"
        f"<div style='position:relative;height:17px;font-size:11px'>{axis}</div>"
        f"<div style='font-size:12px'>{note}</div></div>"
    )


def facts(answer: Answer) -> str:
    """Allocated, reserved, device, and what set the peak."""
    sizes: list[tuple[str, int | None, str]] = [
        ("allocated", answer.allocated, "blocks that tensors and workspaces have, as torch.cuda.max_memory_allocated()")
    ]
    if answer.question.card is not None:
        sizes.append(("reserved", answer.reserved, "taken from the driver, as torch.cuda.max_memory_reserved()"))
        sizes.append(("device", answer.device, "in use on the card by everything, as nvidia-smi shows it"))
    numbers = "".join(
        f"<span style='{SPAN}' title='{tip}'>{name} {'<b>...' if n is None else f'{_about(answer)}<b>{format_bytes(n)}'}</b></span>"
        for name, n, tip in sizes
    )
    cause = answer.cause
    module = f" in {html.escape(cause['module'])}" if cause["module"] else ""
    where = f", {html.escape(cause['line'])}" if cause["line"] else ""
    operator = html.escape(cause["operator"].replace("aten::", "").replace("aten.", "")) or "the build"
    reason = f"<div>set by <b>{operator}</b>{module}, in {cause['phase'] or 'build'}<span style='opacity:.75'>{where}</span></div>"
    return f"<div style='{LOOK}'>{numbers}{reason}</div>"


def table(answer: Answer, before: Answer | None) -> str:
    """What the peak consists of, by category, beside what it was with the setting before."""
    old: dict[str, int] = {} if before is None else dict(before.breakdown.items()) | {"total": before.breakdown.total}
    rows = ""
    for category, (label, n) in zip(Category, answer.breakdown.items(), strict=True):
        if n or old.get(label):
            rows += _row(label, n, old.get(label), category.color)
    rows += _row(
        "total", answer.breakdown.total, old.get("total"), "transparent", "border-top:1px solid rgba(128,128,128,.5);font-weight:600"
    )
    head = "".join(f"<th style='text-align:{side};opacity:.75;font-weight:400'>{name}</th>" for name, side in (_HEAD if old else _HEAD[:2]))
    return f"<table style='{LOOK};border-spacing:0.9em 0;border-collapse:separate;margin-top:3px'><tr>{head}</tr>{rows}</table>"


_HEAD = (("at the peak, tensors", "left"), ("now", "right"), ("before", "right"), ("", "left"))


def _row(label: str, now: int, before: int | None, color: str, style: str = "") -> str:
    ratio = "new" if not before else "gone" if not now else f"x {now / before:.2f}"
    swatch = f"<span style='display:inline-block;width:.8em;height:.8em;background:{color};margin-right:.5em'></span>"
    cells = (f"<b>{format_bytes(now)}</b>", *(() if before is None else (format_bytes(before), ratio)))
    right = "".join(f"<td style='text-align:right;{style}'>{cell}</td>" for cell in cells)
    return f"<tr><td style='{style}'>{swatch}{label}</td>{right}</tr>"


def picture(answer: Answer) -> str:
    """Memory through the step that was planned or measured."""
    card = answer.question.card
    where = card.name if isinstance(card, GPU) else str(answer.question.place)
    title = f"one step, measured on {where}" if answer.how == "measured" else f"one step, planned for {where}"
    if answer.of is not None:
        title = f"one step, as on {answer.of.name}"
    capacity = answer.question.capacity
    limit = f"{where}: {format_bytes(capacity)} for PyTorch" if capacity else ""
    return timeline(answer.trace.last_step(), TIMELINE, capacity=capacity or None, limit=limit, title=title)
