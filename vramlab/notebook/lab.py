"""Lab: switches for a Recipe, what each does to memory on a card, and runs to watch, stop and compare."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as w
import torch
from IPython.display import display

from vramlab import gpus
from vramlab.devices import choose_device
from vramlab.experiments import Run, run
from vramlab.gpus import GPU
from vramlab.notebook.compare_view import CompareView
from vramlab.notebook.live import Live
from vramlab.notebook.plan_view import PlanView
from vramlab.notebook.plots import draw_legend, draw_timeline, plot
from vramlab.notebook.predictor import Answer, Predictor, Question, Update, refuse_ranks
from vramlab.notebook.run_view import RunView
from vramlab.notebook.style import Picture
from vramlab.notebook.switches import Switches
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.training import check_arguments
from vramlab.units import GiB, format_bytes, parse_bytes

_training = threading.Lock()  # one training at a time in a process
_idle = threading.Event()  # set while there is none
_idle.set()
_going: list[Lab] = []  # the lab that trains

HINT = "<p><em>Interactive: run this cell to use it.</em></p>"
SEEN = 5.0  # seconds that the cell waits for the first answer
BUSY = "One run at a time: another run is going on in this process. Stop it first."


def _virtual_run() -> bool:
    """Whether the run that goes on has the planner process."""
    return any(lab.virtual for lab in _going[:])


class Lab:
    """Switches of a recipe, the peak they lead to on a card, and runs.

    Move a switch and the bar of the predicted peak moves: at once by the law of the step's sizes where there is one, exactly as soon
    as the step is traced on a virtual card in another process; the newest request wins. On a CPU two real steps are measured instead.
    Start trains: here, or on the virtual card that is chosen, in a thread, so the notebook stays usable.

    Args:
        task: what is trained.
        recipe: where the switches stand at first.
        switches: the options that get one, for example ``("precision", "micro_batch")``; None: all.
        gpu: a card, or its name: a virtual one is chosen at first; None: ``device``.
        in_use: bytes of the card that others hold, ``"0.8 GiB"``.
        device: of this machine, see `vramlab.devices.choose_device`.

    `start`, `stop` and `train` do what the buttons do; ``runs`` holds the finished ones. `train` blocks: for scripts,
    continuous integration, and front ends that show nothing from threads.

    Raises:
        ValueError: no such switch or card, a size that is none, what `vramlab.training.check_arguments` refuses.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe | None = None,
        *,
        switches: Sequence[str] | None = None,
        gpu: GPU | str | None = None,
        in_use: int | str = 0,
        device: torch.device | str = "auto",
    ) -> None:
        recipe = Recipe() if recipe is None else recipe
        check_arguments(task, recipe)
        self.task, self.device = task, choose_device(device)
        self.runs: list[Run] = []
        chosen: torch.device | GPU = self.device if gpu is None else gpus.gpu(gpu)
        self._stop, self._done = threading.Event(), threading.Event()
        self._done.set()
        self._error: BaseException | None = None
        self.virtual = False
        """Whether the last run was started on a virtual card."""
        self._switches = Switches(task, recipe, switches, lambda: self._guard(self.predict))
        self.plan = PlanView(lambda **options: self._guard(lambda: self.set(**self._reachable(options))))
        self.view = RunView(task.unit, self.plan.timeline)
        self.compare = CompareView(task.unit, task.name)
        self.live = Live(self.view.draw)
        self._still = _Still(self)
        self._predictor = Predictor(task, self._show, _idle, _virtual_run)
        self.place, self.in_use = self._place_controls(chosen, parse_bytes(in_use))
        self.view.say("Move a switch and see what it does to the peak. Start trains until Stop.")
        self.view.start.on_click(lambda _: self._guard(self.start))
        self.view.stop.on_click(lambda _: self.stop())

    def _place_controls(self, chosen: torch.device | GPU, in_use: int) -> tuple[w.Dropdown, w.BoundedFloatText]:
        mine = [(f"{self._named(self.device)}, this machine", self.device)]
        cards = [(f"virtual {card}", card) for card in sorted(gpus.cards(), key=lambda c: (c.memory, c.name))]
        if isinstance(chosen, GPU) and chosen not in [card for _, card in cards]:
            cards.insert(0, (f"virtual {chosen}", chosen))
        tip = "Where it runs: this machine, or a card that is not here. Virtual cards compute nothing, their memory is the card's."
        place = w.Dropdown(options=[*mine, *cards], value=chosen, description="card", tooltip=tip, layout={"width": "24em"})
        place.style.description_width = "3em"
        tip = "GiB of the card that others hold: the desktop, a browser, another process"
        held = w.BoundedFloatText(value=round(in_use / GiB, 3), min=0, max=1024, step=0.1, description="others hold (GiB)", tooltip=tip)
        held.layout.width, held.style.description_width = "14em", "8.5em"
        for control in (place, held):
            control.observe(lambda _: self._guard(self.predict), "value")
        return place, held

    @staticmethod
    def _named(device: torch.device) -> str:
        return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)

    # The switches

    @property
    def switches(self) -> dict[str, Any]:
        """The controls, by option of the Recipe."""
        return self._switches.widgets

    @property
    def recipe(self) -> Recipe:
        """What the switches say.

        Raises:
            ValueError: they exclude one another; the message says which, and the ways out.
        """
        return self._switches.recipe

    def set(self, **options: Any) -> None:
        """Move switches by program: ``lab.set(micro_batch=8, precision="amp-bf16")``; ``gpu=`` and ``in_use=`` are known too.

        Raises:
            ValueError: there is no such switch or card, or it has no such position; then none is moved.
        """
        card = gpus.gpu(options.pop("gpu")) if "gpu" in options else None
        in_use = parse_bytes(options.pop("in_use")) if "in_use" in options else None
        with self._switches.together():
            self._switches.set(**options)
            if card is not None:
                if card not in [place for _, place in self.place.options]:
                    self.place.options = [*self.place.options, (f"virtual {card}", card)]
                self.place.value = card
            if in_use is not None:
                self.in_use.value = round(in_use / GiB, 3)

    def _reachable(self, options: dict[str, Any]) -> dict[str, Any]:
        """A suggested change, if this lab has switches for all of it: a part would not save what was planned.

        Raises:
            ValueError: it has not.
        """
        if missing := [name for name in options if name not in self.switches]:
            raise ValueError(f"This lab has no switch for {', '.join(missing)}; write vl.Lab(task, recipe) for all of them.")
        return options

    # What they lead to

    @property
    def question(self) -> Question:
        """The recipe and the place, as the controls stand."""
        place = self.place.value
        on_card = isinstance(place, GPU) or place.type == "cuda"
        return Question(self.recipe, place, round(self.in_use.value * GiB) if on_card else 0)

    def predict(self) -> None:
        """Show what the switches lead to: at once if it is known, else as soon as it is planned or measured."""
        self.in_use.disabled = isinstance(self.place.value, torch.device) and self.place.value.type == "cpu"
        excluded = self._switches.conflicts
        if self not in _going:  # while it trains Start is off
            self.view.start.disabled = bool(excluded)
        if excluded:
            self._predictor.forget()
            self.plan.refused()
            self.compare.current(None)
        else:
            self._predictor.ask(self.question)

    def _show(self, update: Update) -> None:
        self.plan.update(update)
        if update.answer is not None or update.busy or update.error is not None:
            self.compare.current(update.answer)
        if update.answer is not None and update.answer.exact and self._done.is_set():
            self._guard(self._still.draw)

    @property
    def answer(self) -> Answer | None:
        """What the plan view shows."""
        return self.plan.shown

    def wait(self, timeout: float = 60.0) -> None:
        """Block until what was asked for is known exactly, and training has ended.

        Raises:
            TimeoutError: it takes longer than ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        for ready in (self._done.wait, self._predictor.wait):
            if not ready(max(0.0, end - time.monotonic())):
                raise TimeoutError(f"The lab is still busy after {timeout} seconds; call stop() first.")

    # Training

    def start(self) -> None:
        """Train in the background with these switches until `stop`."""
        if "google.colab" in sys.modules:  # shows nothing that comes from a thread: train in the callback instead
            self._train_here()
        elif self._begin():
            threading.Thread(target=self._train, args=(None, self.question), name="vramlab-train", daemon=True).start()

    def _train_here(self) -> None:
        if self._begin():
            self._train(None, self.question)

    def train(self, steps: int | None = None) -> Run:
        """Train in the calling thread, and return the run; Ctrl-C (the notebook's interrupt button) stops it.

        Raises:
            RuntimeError: another run is going on.
            ValueError: the switches exclude one another.
            Exception: what made the run fail.
        """
        question = self.question
        if not self._begin():
            raise RuntimeError(BUSY)
        self._train(steps, question)
        if self._error is not None:
            raise self._error
        return self.runs[-1]

    def stop(self) -> None:
        """End the run after the step it is in: this lab's, or where this lab has none that of another lab."""
        for lab in [self] if not self._done.is_set() else _going[:]:
            lab._stop.set()
            lab.view.say("stopping after this step ...")

    def _begin(self) -> bool:
        question = self.question  # raises before anything is taken
        refuse_ranks(question.recipe)
        if not _training.acquire(blocking=False):
            self.view.say(f"{BUSY} <span style='font-weight:400'>The Stop button here does that too.</span>", strong=True)
            self.view.stop.disabled = False  # the other lab's own may be gone from the page
            return False
        self.virtual = isinstance(question.place, GPU)
        _going.append(self)
        _idle.clear()
        self._predictor.give_way()
        self._stop.clear()
        self._done.clear()
        self._error = None
        self.view.running(True)
        self.view.details.value = ""
        place = f"a virtual {question.place.name}" if isinstance(question.place, GPU) else str(question.place)
        self.view.say(
            f"<b>starting on {html.escape(place)}</b>: {question.recipe}. Stop ends it; the kernel's interrupt does not reach it."
        )
        return True

    def _train(self, steps: int | None, question: Question) -> None:
        try:
            device = question.place
            if isinstance(device, GPU) and question.in_use:
                device.left_for_pytorch(question.in_use)  # refuses a card that is full already
                device = device.with_(memory=device.memory - question.in_use)
            options: dict[str, Any] = {"device": device, "progress": False, "record_every": 20, "on_step": self._step}
            result = run(self.task, question.recipe, steps=sys.maxsize if steps is None else steps, **options)
            self._ended(result)
            self.view.say(f"<b>{result.status}</b> after {len(result.reports)} steps: {result.recipe}")
        except Exception as error:
            self._error = error
            if (failed := getattr(error, "run", None)) is not None:
                self._ended(failed)
            self.view.error(error)
        finally:
            self.view.running(False)
            self.view.start.disabled = bool(self._switches.conflicts)
            _going.remove(self)
            _idle.set()
            self._done.set()
            _training.release()
            self._guard(self._still.draw)

    def _step(self, result: Run) -> bool:
        self.live.push(result)
        return self._stop.is_set()

    def _ended(self, result: Run) -> None:
        """The last state is drawn whatever time has passed, and the run becomes a row."""
        self.runs.append(result)
        self._guard(lambda: self.live.flush(result))
        self._guard(lambda: self.compare.add_run(result))

    def save(self, path: str | Path | None = None) -> tuple[Path, Path]:
        """Write the rows of the comparison as JSON and as a picture; see `CompareView.save`."""
        return self.compare.save(path)

    # What the reader sees

    def _guard(self, action: Callable[[], object]) -> None:
        """Run what a widget or a thread asked for; an error there would be seen by nobody, so it goes to the status line."""
        try:
            action()
        except Exception as error:
            self.view.error(error)

    def __repr__(self) -> str:
        return f"Lab({self.task.name})"

    def panel(self) -> w.VBox:
        """All widgets, as they are shown."""
        title = w.HTML(f"<b style='font-size:15px'>{html.escape(self.task.name)}</b>", layout={"margin": "0 2em 0 0"})
        head = w.HBox([title, self.place, self.in_use], layout={"flex_flow": "row wrap", "align_items": "center"})
        left = w.VBox([self._switches.panel()], layout={"flex": "0 1 500px", "min_width": "440px"})
        middle = w.HBox([left, self.plan.panel()], layout={"flex_flow": "row wrap", "border_top": "1px solid rgba(128,128,128,.4)"})
        run_ = w.VBox([self.view.controls(), self.view.pictures()], layout={"border_top": "1px solid rgba(128,128,128,.4)"})
        runs = w.VBox([self.compare.panel()], layout={"border_top": "1px solid rgba(128,128,128,.4)"})
        return w.VBox([head, middle, run_, runs], layout={"max_width": "1130px"})

    def _ipython_display_(self) -> None:
        panel = self.panel()
        view = {"version_major": 2, "version_minor": 0, "model_id": panel.model_id}
        # A constant text, so that stored outputs can be compared, and a hint where no kernel runs.
        display({"text/plain": repr(self), "text/html": HINT, "application/vnd.jupyter.widget-view+json": view}, raw=True)
        self._still.show()
        self._guard(self.predict)
        self._predictor.wait(SEEN)  # the lab is on the page already; a kernel that ends soon would leave no picture


class _Still:
    """What stays in the stored notebook, for readers without a kernel: one picture. Where the lab itself is shown, it is not seen."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._nothing = w.Box(layout={"display": "none"})
        self._handle: Any = None

    def show(self) -> None:
        self._handle = display(self, display_id=True)

    def draw(self) -> None:
        if self._handle is not None:
            self._handle.update(self)

    def picture(self) -> Picture:
        """The last run, else what is planned."""
        lab = self._lab
        finished = [r for r in lab.runs if r.trace is not None]
        if finished:
            drawn = plot(finished[-1])
            assert isinstance(drawn, Picture)
            return drawn
        picture = Picture(9, 3.2 if lab.answer is not None else 0.5)
        (ax,) = picture.axes_row(1)
        if lab.answer is None:
            ax.set_axis_off()
            ax.text(0, 0.5, f"{lab!r}: run this cell to use it", va="center")
            return picture
        step = lab.answer.trace.last_step()
        draw_timeline(ax, step)
        draw_legend(picture, [step])
        place = lab.answer.question.place
        peak = f"peak {'about ' if lab.answer.borrowed else ''}{format_bytes(lab.answer.allocated)}"
        picture.summary = f"{lab.task.name}, {lab.answer.question.recipe}, {place}: {peak}."
        # Without the recipe: in full it is often wider than the picture.
        ax.set_title(f"{lab.task.name}, {place}: {peak}", fontsize=9)
        return picture

    def __repr__(self) -> str:
        return f"{self._lab!r}: a still picture"  # constant

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = self.picture()._repr_mimebundle_()
        view = {"version_major": 2, "version_minor": 0, "model_id": self._nothing.model_id}
        return data | {"text/plain": repr(self), "application/vnd.jupyter.widget-view+json": view}, metadata
