"""Lab: switches for a Recipe, what each does to memory, and a run to watch, stop and compare."""

from __future__ import annotations

import html
import importlib.util
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import ipywidgets as w
import torch
from IPython.display import display

from vramlab.devices import choose_device
from vramlab.experiments import Comparison, Run, run
from vramlab.memory.trace import Category, MemoryBreakdown
from vramlab.notebook.live import LivePlot
from vramlab.recipe import Recipe, choices
from vramlab.tasks import Task
from vramlab.training import check_arguments
from vramlab.units import format_bytes

_training = threading.Lock()  # one training at a time in a process
_idle = threading.Event()  # set while there is none
_idle.set()


class Lab:
    """The widgets: move a switch and see the memory of one step by category, beside what it was before; Start trains.

    Each new setting is measured by really running two recorded steps of the task in the background; the newest
    request wins. Training runs in a thread, so the notebook stays usable, and draws its figure between steps.

    Args:
        task: what is trained.
        recipe: where the switches stand at first.
        device: see `vramlab.devices.choose_device`.

    `start`, `stop` and `train` do what the buttons do; ``runs`` holds the finished ones. `train` blocks: for scripts,
    continuous integration, and front ends that show nothing from threads.
    """

    def __init__(self, task: Task, recipe: Recipe | None = None, *, device: torch.device | str = "auto") -> None:
        recipe = Recipe() if recipe is None else recipe
        check_arguments(task, recipe)
        self.task, self.device = task, choose_device(device)
        self.runs: list[Run] = []
        self.plot = LivePlot(task.unit)
        self._measured: dict[Recipe, MemoryBreakdown] = {}
        self._shown: MemoryBreakdown | None = None
        self._wanted: Recipe | None = None
        self._worker: threading.Thread | None = None
        self._state = threading.Lock()  # guards the three above: front ends call back from several threads
        self._stop, self._done = threading.Event(), threading.Event()
        self._done.set()
        self._build(recipe)

    # The switches

    def _build(self, recipe: Recipe) -> None:
        def buttons(name: str, options: tuple[Any, ...]) -> w.ToggleButtons:
            return w.ToggleButtons(options=options, value=getattr(recipe, name), style={"button_width": "auto"})

        sizes = sorted({1, 2, 4, 8, 16, 32, 64, recipe.micro_batch})
        windows = sorted({1, 2, 4, 8, recipe.accumulation})
        self.switches: dict[str, Any] = {
            "precision": buttons("precision", choices("precision")),
            "micro_batch": w.SelectionSlider(options=sizes, value=recipe.micro_batch, continuous_update=False),
            "accumulation": w.SelectionSlider(options=windows, value=recipe.accumulation, continuous_update=False),
            "checkpointing": buttons("checkpointing", choices("checkpointing")),
            "optimizer": buttons("optimizer", self._optimizers(recipe)),
        }
        self._base = recipe
        self.start_button = w.Button(description="Start", icon="play", button_style="success", tooltip="Train with these switches")
        self.stop_button = w.Button(description="Stop", icon="stop", disabled=True, tooltip="Stop after this step")
        self.status, self.memory, self.table = w.HTML(), w.HTML(), w.HTML()
        self._say("Move a switch: two steps are measured at once. Start trains until Stop.")
        for switch in self.switches.values():
            switch.observe(lambda _: self._guard(self.measure), "value")
        self.start_button.on_click(lambda _: self._guard(self.start))
        self.stop_button.on_click(lambda _: self.stop())

    @staticmethod
    def _optimizers(recipe: Recipe) -> tuple[str, ...]:
        """Those that are installed, and what the recipe asks for: training then says what is missing."""
        missing = "adamw-8bit" if importlib.util.find_spec("torchao") is None else None
        return tuple(name for name in choices("optimizer") if name != missing or name == recipe.optimizer)

    @property
    def recipe(self) -> Recipe:
        """What the switches say."""
        return self._base.with_(**{name: switch.value for name, switch in self.switches.items()})

    def set(self, **options: Any) -> None:
        """Move switches by program: ``lab.set(micro_batch=8, precision="amp-bf16")``.

        Raises:
            ValueError: there is no such switch, or it has no such position; then none is moved.
        """
        for name, value in options.items():
            if name not in self.switches:
                raise ValueError(f"The lab has no switch {name!r}; it has {', '.join(self.switches)}.")
            positions = self.switches[name].options
            if value not in positions or isinstance(value, bool):
                raise ValueError(f"The switch {name!r} has no position {value!r}; it has {', '.join(map(str, positions))}.")
        for name, value in options.items():
            self.switches[name].value = value

    # Measuring a setting

    def measure(self) -> None:
        """Show the memory of one step with these switches: at once if it is known, else measured in the background."""
        with self._state:
            recipe = self.recipe
            known = self._measured.get(recipe)
            self._wanted = recipe if known is None else None
            if known is not None:
                self._show_measured(recipe, known)
            elif self._worker is None:
                self._worker = threading.Thread(target=self._measure_wanted, name="vramlab-measure", daemon=True)
                self._worker.start()

    def wait(self, timeout: float = 60.0) -> None:
        """Block until what was asked for is measured, and training has ended.

        Raises:
            TimeoutError: it takes longer than ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while (worker := self._worker) is not None or not self._done.is_set():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"The lab is still busy after {timeout} seconds; call stop() first.")
            if worker is not None:
                worker.join(left)
            else:
                self._done.wait(left)

    def _measure_wanted(self) -> None:
        while True:
            _idle.wait()  # a training run goes first, in whatever lab
            with self._state:
                recipe = self._wanted
                if recipe is None:
                    self._worker = None
                    return
                self._say(f"measuring {recipe} ...")
            self._measure_one(recipe)

    def _measure_one(self, recipe: Recipe) -> None:
        """Measure a setting, and show it, or why it cannot be, unless another is wanted by then or training goes first."""
        error: Exception | None = None
        try:
            result = run(self.task, recipe, steps=2, device=self.device, progress=False, on_step=lambda _: self._is_outdated(recipe))
        except Exception as caught:
            error = caught
        with self._state:
            if error is None and result.status == "finished":
                self._measured[recipe] = result.breakdown
            elif error is None:  # stopped: what is wanted now is measured next
                return
            if self._wanted == recipe:
                self._wanted = None
                if error is None:
                    self._show_measured(recipe, result.breakdown)
                else:
                    self._show_error(error)

    def _is_outdated(self, recipe: Recipe) -> bool:
        return self._wanted != recipe or not _idle.is_set()

    def _show_measured(self, recipe: Recipe, breakdown: MemoryBreakdown) -> None:
        self._show_memory(breakdown)
        self._say(f"measured: {recipe}, {format_bytes(breakdown.total)} at the peak of step 1 and 2")

    def _show_memory(self, now: MemoryBreakdown) -> None:
        before, self._shown = self._shown or now, now
        largest = max(now.total, before.total, 1)
        rows = ""
        for category, (label, nbytes), (_, old) in zip(Category, now.items(), before.items(), strict=True):
            if nbytes or old:
                rows += _row(label, nbytes, old, category.color, largest)
        rows += _row("total", now.total, before.total, "#333333", largest)
        head = "<tr><th></th><th style='text-align:right'>at the peak</th><th style='text-align:right'>before</th><th></th><th></th></tr>"
        self.memory.value = f"<table style='border-spacing:0.8em 0.1em'>{head}{rows}</table>"

    # Training

    def start(self) -> None:
        """Train in the background with these switches until `stop`."""
        if "google.colab" in sys.modules:  # shows nothing that comes from a thread: train in the callback instead
            self.train()
        elif self._begin():
            threading.Thread(target=self._train, args=(None,), name="vramlab-train", daemon=True).start()

    def train(self, steps: int | None = None) -> Run:
        """Train in the calling thread, and return the run; Ctrl-C (the notebook's interrupt button) stops it.

        Raises:
            RuntimeError: another run is going on.
            Exception: what made the run fail.
        """
        if not self._begin():
            raise RuntimeError("One run at a time: another run is going on in this process. Stop it first.")
        self._train(steps)
        if self._error is not None:
            raise self._error
        return self.runs[-1]

    def stop(self) -> None:
        """End the run after the step it is in."""
        self._stop.set()

    def _begin(self) -> bool:
        if not _training.acquire(blocking=False):
            self._say("<b>One run at a time: another run is going on in this process. Stop it first.</b>")
            return False
        _idle.clear()
        self._stop.clear()
        self._done.clear()
        self._error: BaseException | None = None
        self.start_button.disabled, self.stop_button.disabled = True, False
        return True

    def _train(self, steps: int | None) -> None:
        recipe = self.recipe
        self._say(f"training {recipe}")
        try:
            options: dict[str, Any] = {"device": self.device, "progress": False, "record_every": 20, "on_step": self._step}
            result = run(self.task, recipe, steps=sys.maxsize if steps is None else steps, **options)
            self.runs.append(result)
            self._say(f"{result.status} after {len(result.reports)} steps: {recipe}")
        except Exception as error:
            self._error = error
            if (failed := getattr(error, "run", None)) is not None:
                self.runs.append(failed)
            self._show_error(error)
        finally:
            self._guard(self._show_runs)
            self.start_button.disabled, self.stop_button.disabled = False, True
            _idle.set()
            _training.release()
            self._done.set()

    def _step(self, result: Run) -> bool:
        self.plot.push(result)
        last = result.reports[-1]
        speed = f", {last.items_per_second:,.0f} {self.task.unit}/s" if last.items_per_second is not None else ""
        self._say(f"training {result.recipe}: step {last.step}, loss {last.loss:.3f}{speed}, peak {format_bytes(result.peak or 0)}")
        return self._stop.is_set()

    def _show_runs(self) -> None:
        self.plot.flush()
        if self.runs:
            self.table.value = Comparison(self.runs)._repr_html_()

    # What the reader sees

    def _say(self, message: str) -> None:
        self.status.value = f"<span>{message}</span>"

    def _show_error(self, error: BaseException) -> None:
        details = html.escape("".join(traceback.format_exception(error)))
        self.status.value = (
            f"<div style='color:#b00020'><b>{type(error).__name__}</b>: {html.escape(str(error))}"
            f"<details><summary>traceback</summary><pre>{details}</pre></details></div>"
        )

    def _guard(self, action: Callable[[], object]) -> None:
        """Run what a widget or a thread asked for; an error there would be seen by nobody, so it goes to the status line."""
        try:
            action()
        except Exception as error:
            self._show_error(error)

    def __repr__(self) -> str:
        return f"Lab({self.task.name})"

    def _ipython_display_(self) -> None:
        labels = {"micro_batch": "micro-batch"}
        rows = [w.HBox([w.Label(labels.get(n, n), layout={"width": "7.5em"}), switch]) for n, switch in self.switches.items()]
        switches = w.VBox([*rows, w.HBox([self.start_button, self.stop_button])])
        top = w.VBox(
            [w.HTML(f"<b>{html.escape(self.task.name)}</b>, measured on {self.device}"), w.HBox([switches, self.memory]), self.status]
        )
        _show_widget(top, f"{self!r}: switches")
        self.plot.show()
        _show_widget(self.table, f"{self!r}: finished runs")
        self.measure()


def _show_widget(widget: w.Widget, text: str) -> None:
    """Display a widget with a constant text, so that stored outputs can be compared, and a hint where no kernel runs."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    hint = "<p><em>Interactive: run this cell to use it.</em></p>"
    display({"text/plain": text, "text/html": hint, "application/vnd.jupyter.widget-view+json": view}, raw=True)


def _row(label: str, nbytes: int, before: int, color: str, largest: int) -> str:
    cells = (f"<b>{format_bytes(nbytes)}</b>", format_bytes(before), f"x {nbytes / before:.2f}" if before else "new")
    right = "".join(f"<td style='text-align:right'>{cell}</td>" for cell in cells)
    bar = f"<div style='background:{color};height:0.8em;width:{14 * nbytes / largest:.2f}em'></div>"
    return f"<tr><td>{label}</td>{right}<td style='min-width:14em'>{bar}</td></tr>"
