"""Switches for the options of a Recipe: one control each, what excludes what beside the control that was moved, the remedy as a button."""

from __future__ import annotations

import html
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import ipywidgets as w

from vramlab.recipe import Conflict, Recipe, choices, conflicts
from vramlab.tasks import Task

CHUNKS = (1, 2, 4, 8, 16, 32)
WIDTH = "7em"
SLIDERS = {"micro_batch": 64, "accumulation": 16}
"""Numbers that have a slider too, and how far it reaches at first, and at least.

The control is the field: it has a name and takes keys everywhere. A slider's handle has no name, and Notebook 7 takes its arrow keys.
"""
MOST = 1_000_000
"""What a field takes; more is a slip of the keyboard."""
CHOSEN = "vramlab-switches"
LOOK = f"""<style>
.{CHOSEN} .widget-toggle-button.mod-active {{ box-shadow: inset 0 -3px currentColor }}
.{CHOSEN} .widget-slider {{ margin-left: 6px }}
</style>"""
"""A line under what is chosen: its shade alone is hard to see, in the dark theme above all."""


@dataclass(frozen=True)
class Switch:
    """What a control is called and says when the pointer rests on it."""

    label: str
    tip: str


SWITCHES = {
    "precision": Switch("precision", "Number format: fp32; tf32; autocast to fp16 or bf16; everything in bf16"),
    "micro_batch": Switch("micro-batch", "Items in one forward and backward"),
    "accumulation": Switch("accumulation", "Micro-batches whose gradients are added up before one optimizer step"),
    "checkpointing": Switch("checkpointing", "Keep only the inputs of blocks and compute the rest again; selective keeps products too"),
    "checkpoint_every": Switch("every", "Checkpoint every k-th block"),
    "optimizer": Switch("optimizer", "AdamW keeps 8 bytes a parameter, SGD none, Adafactor about 0.02"),
    "optimizer_impl": Switch("as", "foreach needs a temporary as large as the parameters; fused and loop do not"),
    "optimizer_in_backward": Switch("in backward", "Step each parameter as soon as its gradient is there, then release the gradient"),
    "attention": Switch("attention", "sdpa: fused kernels; math: written out, the score matrix is stored"),
    "loss_chunks": Switch("loss chunks", "Split the loss over the vocabulary, so that all logits are never there at once"),
    "offload": Switch("offload", "Keep activations or the optimizer's state in host memory between uses"),
}
"""The options that have a switch, in the order in which they are shown."""

BESIDE = {
    "checkpointing": ("checkpoint_every",),
    "optimizer": ("optimizer_impl",),
    "attention": ("loss_chunks",),
}
"""What stands in the same row."""


class Switches:
    """The controls of a lab. ``widgets`` holds them by option.

    Args:
        task: what is trained; decides what can be switched.
        recipe: where the controls stand at first, and what the options without a control are.
        names: the options that get a control; None: all that have one.
        moved: called after one or several controls have been moved.

    Raises:
        ValueError: an option that has no switch.
    """

    def __init__(self, task: Task, recipe: Recipe, names: Sequence[str] | None, moved: Callable[[], None]) -> None:
        names = tuple(SWITCHES) if names is None else tuple(names)
        for name in names:
            if name not in SWITCHES:
                raise ValueError(f"The lab has no switch {name!r}; it can have {', '.join(SWITCHES)}.")
        self._task, self._base, self._moved = task, recipe, moved
        self._lock = threading.RLock()
        self._held = 0  # while it is above 0, moves are collected
        self._last = ""  # the option that was moved last
        self._dragged = ""  # the option whose slider is being moved
        self.widgets: dict[str, Any] = {name: self._control(name) for name in SWITCHES if name in names}
        self.sliders = {name: self._slider(name) for name in SLIDERS if name in self.widgets}
        self._reaches = {name: slider.max for name, slider in self.sliders.items()}  # at first
        self.effective, self.words = w.HTML(), w.HTML(LOOK)
        self._messages = {name: w.VBox([], layout={"display": "none"}) for name in self.widgets}
        for name, widget in self.widgets.items():
            widget.observe(lambda _, name=name: self._on_move(name), "value")
        for name, slider in self.sliders.items():
            slider.observe(lambda change, name=name: self._on_drag(name, change["new"]), "value")
        self._follow()

    @property
    def options(self) -> dict[str, Any]:
        """Every option of the recipe as the controls stand, also where they exclude one another."""
        return asdict(self._base) | {name: widget.value for name, widget in self.widgets.items()}

    @property
    def conflicts(self) -> list[Conflict]:
        """What excludes what as the controls stand."""
        return conflicts(**self.options)

    @property
    def recipe(self) -> Recipe:
        """What the controls say.

        Raises:
            ValueError: they exclude one another; the message says which, and the ways out.
        """
        return Recipe(**self.options)

    def set(self, **options: Any) -> None:
        """Move controls by program, all before anything is planned.

        Raises:
            ValueError: there is no such switch, or it has no such position; then none is moved.
        """
        for name, value in options.items():
            if name not in self.widgets:
                raise ValueError(f"The lab has no switch {name!r}; it has {', '.join(self.widgets)}.")
            if not self._accepts(name, value):
                raise ValueError(f"The switch {name!r} has no position {value!r}; it has {self._positions(name)}.")
        with self.together():
            for name, value in options.items():
                self._reach(name, value)
                self.widgets[name].value = value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Several moves count as one."""
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                last = self._held == 0
            if last:
                self._follow()
                self._moved()

    def panel(self) -> w.VBox:
        """The controls in rows, each with room for what it is told."""
        beside = {second: first for first, seconds in BESIDE.items() for second in seconds}
        rows: list[w.Widget] = []
        for name in self.widgets:
            if beside.get(name) in self.widgets:
                continue
            row = [
                *self._labelled(name),
                *([self.sliders[name]] if name in self.sliders else []),
                *(self.widgets[n] for n in BESIDE.get(name, ()) if n in self.widgets),
            ]
            if name == "accumulation":
                row.append(self.effective)
            messages = [self._messages[n] for n in (name, *BESIDE.get(name, ())) if n in self.widgets]
            rows += [w.HBox(row, layout={"flex_flow": "row wrap", "align_items": "center"}), *messages]
        panel = w.VBox([*rows, self.words])
        panel.add_class(CHOSEN)
        return panel

    def _labelled(self, name: str) -> list[w.Widget]:
        """The control, with its label in front where it puts its own above."""
        widget, switch = self.widgets[name], SWITCHES[name]
        if not isinstance(widget, w.ToggleButtons):
            return [widget]
        tip = html.escape(switch.tip, quote=True)
        words = f"<div title='{tip}' style='width:{WIDTH};text-align:right;padding-right:4px'>{switch.label}</div>"
        return [w.HTML(words, layout={"margin": "0 0 0 2px"}), widget]

    # One control

    def _control(self, name: str) -> Any:
        value = getattr(self._base, name)
        switch = SWITCHES[name]
        common: dict[str, Any] = {"description": switch.label, "tooltip": switch.tip, "style": {"description_width": WIDTH}}
        if name in SLIDERS:
            return w.BoundedIntText(min=1, max=max(MOST, 2 * value), value=value, layout={"width": "12em"}, **common)
        if name == "optimizer_in_backward":
            return w.Checkbox(value=value, indent=False, layout={"width": "auto", "margin": "0 8px 0 7.8em"}, **common)
        if name == "checkpoint_every":
            return w.BoundedIntText(min=1, max=999, value=value, layout={"width": "7.5em"}, **_near(common))
        if name == "loss_chunks":
            options = sorted({*CHUNKS, value})
            why = "" if self._task.chunked else f"; {self._task.name} has no chunked loss, see Task(chunked=True)"
            near = _near(common, "6em") | {"tooltip": switch.tip + why}
            return w.Dropdown(options=options, value=value, disabled=not self._task.chunked, layout={"width": "10.5em"}, **near)
        if name == "optimizer_impl":
            return w.Dropdown(options=choices(name), value=value, layout={"width": "9em"}, **_near(common, "1.5em"))
        options_of = _installed(self._base) if name == "optimizer" else choices(name)
        tips = _tips(name, options_of)
        layout = {"width": "auto", "margin": "0 6px 0 0"}
        return w.ToggleButtons(
            options=options_of, value=value, tooltips=tips, tooltip=switch.tip, layout=layout, style={"button_width": "auto"}
        )

    def _slider(self, name: str) -> w.IntSlider:
        value = self.widgets[name].value
        tip = f"{SWITCHES[name].tip}; the field beside it takes any number"
        layout = {"width": "13em" if name == "micro_batch" else "9em"}
        return w.IntSlider(min=1, max=max(SLIDERS[name], 2 * value), value=value, readout=False, layout=layout, tooltip=tip)

    def _accepts(self, name: str, value: Any) -> bool:
        known = choices(name)
        if known:
            return isinstance(value, str) and value in self.widgets[name].options
        if name == "optimizer_in_backward":
            return isinstance(value, bool)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return whole and (name != "loss_chunks" or value == 1 or self._task.chunked)

    def _positions(self, name: str) -> str:
        if choices(name):
            return ", ".join(map(str, self.widgets[name].options))
        if name == "optimizer_in_backward":
            return "True, False"
        return (
            "1 alone, for this task has no chunked loss" if name == "loss_chunks" and not self._task.chunked else "whole numbers from 1 on"
        )

    def _reach(self, name: str, value: Any) -> None:
        """Make room for a value that the control does not reach yet."""
        widget = self.widgets[name]
        if isinstance(widget, w.BoundedIntText) and value > widget.max:
            widget.max = 2 * value
        elif name == "loss_chunks" and value not in widget.options:
            widget.options = sorted({*widget.options, value})

    # After a move

    def _on_move(self, name: str) -> None:
        with self._lock:
            self._last = name
            if self._held:
                return
        self._follow()
        self._moved()

    def _on_drag(self, name: str, value: int) -> None:
        self._dragged = name
        self.widgets[name].value = value
        self._dragged = ""

    def _slide(self, name: str, value: int) -> None:
        """Put the slider where the field is. It reaches as far as at first, or twice as far as the value, if the field does.

        While it is dragged it reaches as far as before, or the handle would leave the pointer; at its left end the handle stays anyway.
        """
        slider, first = self.sliders[name], self._reaches[name]
        if self._dragged == name and slider.min < value <= slider.max:
            return
        reach = first if value <= first else min(2 * value, self.widgets[name].max)
        slider.max = max(reach, slider.max)
        slider.value = value
        slider.max = reach  # after the value, which it would cut

    def _follow(self) -> None:
        """What depends on the controls: sliders, the effective batch, what has no effect now, what excludes what, the recipe in words."""
        options = self.options
        for name in self.sliders:
            self._slide(name, options[name])
        total = options["micro_batch"] * options["accumulation"] * (options["ranks"] // options["stages"])
        self.effective.value = f"<span style='white-space:nowrap'>effective batch <b>{total:,}</b></span>"
        if "checkpoint_every" in self.widgets:
            self.widgets["checkpoint_every"].disabled = options["checkpointing"] == "none"
        found = self.conflicts
        self._show_conflicts(found)
        self.words.value = f"{LOOK}<div style='margin:4px 0 0 2px;line-height:1.4;max-width:36em'>{_in_words(options, found)}</div>"

    def _show_conflicts(self, found: list[Conflict]) -> None:
        """Each beside the switch that was moved last of those it names."""
        places: dict[str, list[w.Widget]] = {name: [] for name in self.widgets}
        for conflict in found:
            shown = [name for name in conflict.options if name in self.widgets]
            place = self._last if self._last in shown else shown[0] if shown else next(iter(self.widgets), None)
            if place is not None:
                places[place].append(self._conflict(conflict))
        for name, messages in places.items():
            box = self._messages[name]
            if messages or box.children:
                gone, box.children = box.children, tuple(messages)
                box.layout.display = "" if messages else "none"
                for message in gone:
                    discard(message)

    def _conflict(self, conflict: Conflict) -> w.Widget:
        text = f"<div role='alert' style='line-height:1.3;max-width:33em'><b>! {html.escape(conflict.rule)}</b></div>"
        buttons = [self._remedy(name, value) for name, value in conflict.changes if name in self.widgets and self._accepts(name, value)]
        tail = [] if buttons else [w.HTML(html.escape(conflict.remedy))]
        return w.VBox([w.HTML(text), w.HBox([*buttons, *tail])], layout={"margin": "0 0 4px 1em", "border_left": "3px solid #D55E00"})

    def _remedy(self, name: str, value: Any) -> w.Button:
        words = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
        button = w.Button(description=f"set {SWITCHES[name].label} {words}", tooltip=f"{name}={value!r}", layout={"width": "auto"})
        button.on_click(lambda _: self.set(**{name: value}))
        return button


def _in_words(options: dict[str, Any], excluded: list[Conflict]) -> str:
    """What the controls say, and the Python line for it, which one click selects."""
    if excluded:
        return "<span role='status'>no recipe: these switches exclude one another</span>"
    recipe = Recipe(**options)
    code = f"<code style='user-select:all;background:none;color:inherit' title='one click selects it'>vl.{html.escape(repr(recipe))}</code>"
    return f"<span role='status'>{html.escape(str(recipe))}</span><br><span style='opacity:.75'>{code}</span>"


def _near(common: dict[str, Any], width: str = "3em") -> dict[str, Any]:
    """The same for a control that stands beside another."""
    return common | {"style": {"description_width": width}}


def _installed(recipe: Recipe) -> tuple[str, ...]:
    """Those that are installed, and what the recipe asks for: training then says what is missing."""
    missing = "adamw-8bit" if importlib.util.find_spec("torchao") is None else None
    return tuple(name for name in choices("optimizer") if name != missing or name == recipe.optimizer)


TIPS = {
    "fp32": "4 bytes everywhere",
    "tf32": "the bytes of fp32, faster products on Ampere and newer",
    "amp-fp16": "autocast to float16 with a loss scaler",
    "amp-bf16": "autocast to bfloat16",
    "bf16": "parameters, gradients and state in 2 bytes",
    "blocks": "keep only the inputs of blocks",
    "selective": "keep the results of products too",
    "adamw": "8 bytes of state a parameter",
    "sgd": "no state (no momentum)",
    "adafactor": "about 0.02 bytes of state a parameter",
    "adamw-8bit": "about 2 bytes of state a parameter",
    "sdpa": "the fused kernels of PyTorch",
    "math": "written out: the score matrix is stored",
    "activations": "what backward needs waits in host memory",
}


def _tips(name: str, options: Sequence[str]) -> list[str]:
    return ["nothing of the kind" if option == "none" else TIPS.get(option, f"{name} {option}") for option in options]


def discard(widget: w.Widget) -> None:
    """A widget that is shown no more lives on in kernel and page, with its layout and style, until each is closed."""
    for child in getattr(widget, "children", ()):
        discard(child)
    for part in (getattr(widget, "style", None), getattr(widget, "layout", None), widget):
        if isinstance(part, w.Widget):
            part.close()
