"""run() and compare(): train for some steps and say what it held, how fast it was, and what it learnt."""

from __future__ import annotations

import dataclasses
import functools
import gc
import html
import random
import re
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from vramlab.devices import choose_device, explain_out_of_memory
from vramlab.gpus import GPU, gpu
from vramlab.memory.free import forget_backward, release
from vramlab.memory.report import OutOfMemoryReport
from vramlab.memory.trace import NO_EVENTS, MemoryBreakdown, MemoryTrace
from vramlab.parallel.launch import follow, settled
from vramlab.parallel.rank import is_last_round, tell
from vramlab.planning import Plan, named, plan, single_changes
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.training import StepReport, check_arguments, train
from vramlab.units import format_bytes
from vramlab.virtual import planner

if TYPE_CHECKING:
    import pandas as pd

# Torch's random numbers, the device's peak counters and the machine's speed are shared by all threads.
_alone = threading.Lock()
_running_in: int | None = None  # the thread that holds the lock
KEPT = " finished steps are kept in error.run."
PATIENCE = 20.0  # seconds that a run waits for another, such as a lab's two measured steps


@dataclass
class Run:
    """What a run measured, or what it needed on a virtual GPU. It can be read while the run goes on, and after it has ended."""

    task: Task
    recipe: Recipe
    device: torch.device | GPU
    """Where it ran; a `GPU` was a virtual one: sizes are planned, and there are no losses and no speeds."""
    reports: list[StepReport] = field(default_factory=list)
    status: str = "running"
    """running, finished, stopped, interrupted, or the error that ended it."""
    failed_trace: MemoryTrace | None = None
    """The trace of the step that failed, up to the failure, if it was a recorded one."""
    ranks: list[Run] = field(default_factory=list)
    """What each rank measured of its own memory, if there were several; losses and speeds are those of all together."""
    _highest: tuple[int, MemoryTrace | None, int | None] = field(default=(0, None, None), init=False, repr=False, compare=False)
    """How many reports were searched for the highest peak; the highest trace and counter of them."""

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step."""
        return [r.loss for r in self.reports]

    @property
    def trace(self) -> MemoryTrace | None:
        """The recorded step with the highest peak, the latest of equal ones; of several ranks, that of the fullest."""
        if self.ranks:
            return max((rank.trace for rank in self.ranks if rank.trace is not None), key=_peak, default=None)
        traces = [t for t in (self.failed_trace, self._search()[0]) if t is not None]
        return max(traces, key=_peak, default=None)

    @property
    def peak(self) -> int | None:
        """Peak allocated bytes. None before the first step.

        On CUDA the allocator's own counter over the steps that were not recorded (of a run of 1 or 2 steps, over those
        that were); elsewhere the bytes of all storages in the recorded steps. Of several ranks, that of the fullest.
        """
        if self.ranks:
            return max((rank.peak for rank in self.ranks if rank.peak is not None), default=None)
        counted = self._search()[1]
        return counted if counted is not None else _peak(self.trace) if self.trace is not None else None

    def _search(self) -> tuple[MemoryTrace | None, int | None]:
        """The highest trace of the reports, and the highest counter. A long run has many, and is asked after each step."""
        seen, highest, counted = self._highest
        new = self.reports[seen:]
        for report in new:
            if report.memory is not None and (highest is None or _peak(report.memory) >= _peak(highest)):
                highest = report.memory
            if report.counters is not None:
                counted = max(counted or 0, report.counters.allocated)
        self._highest = (seen + len(new), highest, counted)
        return highest, counted

    @property
    def breakdown(self) -> MemoryBreakdown:
        """Bytes by category at the peak."""
        return self.trace.breakdown() if self.trace is not None else MemoryBreakdown()

    @property
    def throughput(self) -> float | None:
        """Items per second: the median over the steps that were not recorded; None if all were (a run of 1 or 2 steps)."""
        return statistics.median(self._speeds()) if self._speeds() else None

    @property
    def throughput_range(self) -> tuple[float, float] | None:
        """Lower and upper quartile of items per second over the steps that were not recorded."""
        speeds = self._speeds()
        if not speeds:
            return None
        low, _, high = statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
        return low, high

    def _speeds(self) -> list[float]:
        return [r.items_per_second for r in self.reports if r.items_per_second is not None]

    def to_frame(self) -> pd.DataFrame:
        """One row a step: loss, seconds, items per second, and the peak of the recorded ones (missing elsewhere)."""
        import pandas as pd

        rows = [(r.step, r.loss, r.seconds, r.items_per_second, _peak(r.memory) if r.memory else None) for r in self.reports]
        frame = pd.DataFrame(rows, columns=["step", "loss", "seconds", f"{self.task.unit}_per_second", "peak_bytes"])
        return frame.astype({f"{self.task.unit}_per_second": "float64", "peak_bytes": "Int64"}).set_index("step")

    @cached_property
    def plan(self) -> Plan | None:
        """On CUDA the plan of the same step on this card, to lay beside the measurement; None elsewhere."""
        if isinstance(self.device, GPU) or self.device.type != "cuda":
            return None
        return plan(self.task, self.recipe, gpu())

    def _figures(self) -> dict[str, str]:
        speed, spread = self.throughput, self.throughput_range
        planned = {}
        if self.status != "running" and self.peak is not None and self.plan is not None:
            planned = {
                "planned": f"{format_bytes(self.plan.allocated)} allocated, measured / planned {self.peak / self.plan.allocated:.4f}"
            }
        return {
            "peak": f"{format_bytes(self.peak)} allocated" if self.peak is not None else "no recorded step",
            **planned,
            **({"ranks": ", ".join(format_bytes(rank.peak or 0) for rank in self.ranks)} if self.ranks else {}),
            "throughput": f"{speed:,.0f} {self.task.unit}/s ({spread[0]:,.0f} to {spread[1]:,.0f})" if speed and spread else "not measured",
            "loss": "not computed" if isinstance(self.device, GPU) else _first_to_last(self.losses),
            "steps": f"{len(self.reports)}, {self.status}",
        }

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {text}" for name, text in self._figures().items())
        return f"Run({self.task.name}, {self.recipe}, {where(self.device)}: {figures})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{name}</td><td>{html.escape(text)}</td></tr>" for name, text in self._figures().items())
        title = html.escape(f"{self.task.name}: {self.recipe}, {where(self.device)}")
        return f"<p><b>{title}</b></p><table>{rows}</table>{self.breakdown._repr_html_()}"


def where(device: torch.device | GPU) -> str:
    """``measured on cpu``, or ``planned for RTX 4090 (23.52 GiB)``."""
    return f"planned for {device}" if isinstance(device, GPU) else f"measured on {device}"


def _first_to_last(losses: list[float]) -> str:
    return f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else "no step"


@dataclass(frozen=True)
class Comparison:
    """Several runs of one task, side by side; the first is what the others are compared with."""

    runs: list[Run]

    def to_frame(self) -> pd.DataFrame:
        """One row a recipe: peak bytes, its ratio to the first run's, bytes by category, items per second and ratio, last loss."""
        import pandas as pd

        first = self.runs[0]
        shown = {label for run in self.runs for label, n in run.breakdown.items() if n}
        rows = []
        for run in self.runs:
            row: dict[str, object] = {"peak_bytes": run.peak, "peak_ratio": _ratio(run.peak, first.peak)}
            row |= {f"{label}_bytes": n if run.trace is not None else None for label, n in run.breakdown.items() if label in shown}
            row |= {f"{run.task.unit}_per_second": run.throughput, "speed_ratio": _ratio(run.throughput, first.throughput)}
            rows.append(row | {"last_loss": run.losses[-1] if run.losses else None, "status": run.status})
        frame = pd.DataFrame(rows, index=pd.Index(recipe_labels([r.recipe for r in self.runs]), name="recipe"))
        # A run that failed has gaps, and those must not make floats of bytes or objects of floats.
        return frame.astype({c: "Int64" if c.endswith("_bytes") else "float64" for c in frame.columns if c != "status"})

    def __repr__(self) -> str:
        peaks = ", ".join(format_bytes(run.peak) if run.peak is not None else run.status for run in self.runs)
        return f"Comparison({self.runs[0].task.name}: peaks {peaks})"

    def _repr_html_(self) -> str:
        def shown(name: str, value: object) -> str:
            if not isinstance(value, int | float) or value != value:
                return html.escape(str(value)) if isinstance(value, str) else ""
            return format_bytes(value) if name.endswith("_bytes") else f"{value:,.0f}" if name.endswith("_second") else f"{value:.3f}"

        frame = self.to_frame()
        head = "".join(f"<th>{html.escape(name.removesuffix('_bytes').replace('_', ' '))}</th>" for name in frame.columns)
        body = ""
        for label, row in zip(frame.index, frame.to_dict("records"), strict=True):
            cells = "".join(f"<td>{shown(str(name), value)}</td>" for name, value in row.items())
            body += f"<tr><th style='text-align:left'>{html.escape(label)}</th>{cells}</tr>"
        title = html.escape(f"{self.runs[0].task.name}, {where(self.runs[0].device)}")
        return f"<p><b>{title}</b></p><table><tr><th></th>{head}</tr>{body}</table>"


def run(
    task: Task,
    recipe: Recipe | None = None,
    *,
    steps: int = 20,
    device: torch.device | GPU | str = "auto",
    seed: int = 0,
    record_every: int = 50,
    progress: bool = True,
    on_step: Callable[[Run], bool | None] | None = None,
) -> Run:
    """Train for some optimizer steps and measure.

    The same seed gives the same parameters and data for every recipe; the caller's random numbers are untouched.

    Args:
        task, recipe, record_every: see `vramlab.training.train`.
        device: see `vramlab.devices.choose_device`; or a card such as ``"RTX 4090"``, which is a virtual one then.
        steps: optimizer steps, at least 3 for a throughput.
        seed: of parameters, data and dropout; of several ranks, each has its number added for its data.
        progress: show a bar.
        on_step: called after each step with the run so far; returning True stops it. Not with several ranks.

    With ``recipe.ranks`` above 1 the ranks are started here, unless this is one of them (see `vramlab.parallel.launch`); each
    takes micro-batches of its own, and the ``ranks`` of the run hold what each measured. Each rank's recorded steps lie in a
    temporary folder until the run ends: 26 kB a step of ``gpt("mini")`` under "ddp" (torch 2.14), so with ``record_every=1`` and 10,000
    steps 260 MB a rank.

    Returns:
        The `Run`. Ctrl-C ends it after the step it falls into and returns what was measured until then. Ranks started here end
        together after one more step; a second Ctrl-C ends them at once, and each rank's finished steps are kept.

    Raises:
        RuntimeError: another run in this process does not end within 20 seconds.
        ValueError: ``steps`` below 1; what `train` raises. The exception carries the finished steps as ``error.run``,
            and the memory of the failed step is released.
    """
    global _running_in
    recipe = Recipe() if recipe is None else recipe
    check_arguments(task, recipe, record_every)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is a whole number of at least 1, got {steps!r}; let on_step return True to stop earlier.")
    if recipe.ranks > 1 and not dist.is_initialized():
        return _run_ranks(task, recipe, steps, device, seed, record_every, progress, on_step)
    # A run inside a run (from on_step, say) would wait for itself.
    if not _alone.acquire(timeout=0 if _running_in == threading.get_ident() else PATIENCE):
        raise RuntimeError("One run at a time: another one is going on in this process (in a Lab, say). Stop it first.")
    try:
        _running_in = threading.get_ident()
        if recipe.ranks > 1:
            seed += dist.get_rank()  # data and dropout are each rank's own; the model is made from rank 0's numbers
        return _run_alone(task, recipe, steps, _choose(device), seed, record_every, progress, on_step)
    finally:
        _running_in = None
        _alone.release()


def _run_ranks(
    task: Task,
    recipe: Recipe,
    steps: int,
    device: torch.device | GPU | str,
    seed: int,
    record_every: int,
    progress: bool,
    on_step: Callable[[Run], bool | None] | None,
) -> Run:
    """The same run in ``recipe.ranks`` processes, which tell of each step as it ends."""
    if on_step is not None:
        raise ValueError("on_step is called in this process, and several ranks train in theirs; call run() inside vl.parallel.launch().")
    place = _choose(device) if not isinstance(device, str) or device != "auto" else "auto"
    if isinstance(place, GPU):
        raise ValueError(f"{recipe.ranks} virtual cards train nothing; vl.plan(task, recipe, {place.name!r}) says what each needs.")
    if isinstance(place, torch.device) and place.index is not None:
        raise ValueError(f"Each rank takes a card of its own, got device={str(place)!r} for {recipe.ranks} ranks; write device='cuda'.")
    kind = settled(place if isinstance(place, str) else place.type, recipe.ranks)
    ranks = [Run(task, recipe, choose_device(kind)) for _ in range(recipe.ranks)]
    result = Run(task, recipe, ranks[0].device, ranks[0].reports, ranks=ranks)

    def heard(rank: int, news: _News) -> None:
        known = ranks[rank]
        known.device, known.status, known.failed_trace = news.device, news.status, news.failed_trace
        result.device = ranks[0].device
        if news.report is not None and news.report.step > len(known.reports):
            known.reports.append(news.report)
            if rank == 0:
                _advance(bar, result)

    try:
        with tqdm(total=steps, desc=task.name, disable=not progress, leave=False) as bar:
            work = (_one_rank, task, recipe, steps, seed, record_every)
            untold, interrupted = follow(*work, heard=heard, ranks=recipe.ranks, device=kind, seed=seed)
            for rank, everything in enumerate(untold):
                for news in everything:
                    heard(rank, news)
        result.status = "interrupted" if interrupted else ranks[0].status
    except KeyboardInterrupt:
        result.status = "interrupted"
    except BaseException as error:
        result.status = f"{type(error).__name__}: {error}"
        result.failed_trace = next((rank.failed_trace for rank in ranks if rank.failed_trace is not None), None)
        if not hasattr(error, "run"):  # else it is that of this process, a rank of torchrun's
            _keep(result, error)
        raise
    finally:
        for known in ranks:
            if result.status == "interrupted" or known.status == "running":
                known.status = "interrupted" if result.status == "interrupted" else "stopped"
    return result


@dataclass(frozen=True)
class _News:
    """What a rank tells of its run: each finished step, and how the run ended."""

    device: torch.device | GPU
    status: str
    report: StepReport | None = None
    failed_trace: MemoryTrace | None = None


def _one_rank(task: Task, recipe: Recipe, steps: int, seed: int, record_every: int) -> list[_News]:
    """In a rank; returns what there was nobody to tell."""
    untold: list[_News] = []

    def say(news: _News) -> bool:
        if not (told := tell(news)):
            untold.append(news)
        return told

    def on_step(run: Run) -> bool:
        say(_News(run.device, run.status, run.reports[-1]))
        return is_last_round(run.reports[-1].step)

    try:
        done = run(task, recipe, steps=steps, seed=seed, record_every=record_every, progress=False, on_step=on_step)
    except BaseException as error:
        failed: Run | None = getattr(error, "run", None)
        if failed is not None and say(_News(failed.device, failed.status, failed_trace=failed.failed_trace)):
            del error.run  # type: ignore[attr-defined]  # all of it was told
        raise
    say(_News(done.device, done.status))
    return untold


def _advance(bar: Any, run: Run) -> None:
    """Show one more step."""
    if bar.disable:
        return
    bar.set_postfix_str(f"loss {run.reports[-1].loss:.3f}, peak {format_bytes(run.peak or 0)}", refresh=False)
    bar.update()


def _keep(run: Run, error: BaseException) -> None:
    """Let an exception carry the finished steps, and say so; once, if a rank's exception did already."""
    error.run = run  # type: ignore[attr-defined]
    notes = [note for note in getattr(error, "__notes__", []) if not note.endswith(KEPT)]
    error.__notes__ = [*notes, f"{len(run.reports)}{KEPT}"]


def _run_alone(
    task: Task,
    recipe: Recipe,
    steps: int,
    device: torch.device | GPU,
    seed: int,
    record_every: int,
    progress: bool,
    on_step: Callable[[Run], bool | None] | None,
) -> Run:
    result = Run(task, recipe, device)
    devices = [device] if isinstance(device, torch.device) and device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            _python_random(seed),
            tqdm(total=steps, desc=task.name, disable=not progress, leave=False) as bar,
        ):
            for report in _reports(task, recipe, device, seed, record_every):
                result.reports.append(report)
                _advance(bar, result)
                if report.interrupted:
                    raise KeyboardInterrupt
                if (on_step is not None and on_step(result)) or report.step == steps:
                    break
        result.status = "finished" if len(result.reports) == steps else "stopped"
    except KeyboardInterrupt as error:
        result.status = "interrupted"
        result.failed_trace = getattr(error, "trace", None)
        _release_memory(error)
    except BaseException as error:
        result.status = f"{type(error).__name__}: {error}"
        result.failed_trace = getattr(error, "trace", None)
        _keep(result, error)
        _explain(error, result)
        _release_memory(error)
        raise
    return result


@contextmanager
def _python_random(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's generators too, for tasks whose batches use them, and put them back."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def _choose(device: torch.device | GPU | str) -> torch.device | GPU:
    """A device of this machine, or a virtual card."""
    if isinstance(device, GPU):
        return device
    if isinstance(device, str) and not _DEVICE.fullmatch(device):
        try:
            return gpu(device)
        except ValueError as error:
            raise ValueError(f"A device is 'auto', 'cpu', 'cuda', 'cuda:1' or a card. {error}") from None
    return choose_device(device)


_DEVICE = re.compile(r"(auto|[a-z]+(:\d+)?)?")  # cards have digits in their names


def _reports(task: Task, recipe: Recipe, device: torch.device | GPU, seed: int, record_every: int) -> Iterator[StepReport]:
    if isinstance(device, GPU):
        with closing(planner.shared().stream(_virtual_reports, task, recipe, device, seed, record_every)) as reports:
            yield from reports
    else:
        _seed(seed, device)
        yield from train(task, recipe, device, record_every=record_every)


def _virtual_reports(task: Task, recipe: Recipe, card: GPU, seed: int, record_every: int) -> Iterator[StepReport]:
    """In the planner process."""
    from vramlab.virtual.device import virtual_gpu

    with _python_random(seed), virtual_gpu(card) as virtual:
        torch.default_generator.manual_seed(seed)
        with closing(train(named(task, virtual), recipe, virtual.device, record_every=record_every)) as reports:
            yield from reports


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that the run uses. ``torch.manual_seed`` would seed those of all cards, which nobody restores."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _explain(error: BaseException, failed: Run) -> None:
    """Let an out-of-memory error say who held the memory, and what change to the recipe would fit."""
    card = failed.device if isinstance(failed.device, GPU) else None
    if isinstance(failed.device, torch.device) and failed.device.type == "cuda":
        explain_out_of_memory(error, failed.device, failed.failed_trace or MemoryTrace(NO_EVENTS))
        card = gpu()
    report = getattr(error, "report", None)
    if isinstance(report, OutOfMemoryReport) and card is not None:
        plan_changes = functools.partial(single_changes, failed.task, failed.recipe, card)
        error.report = dataclasses.replace(report, plan_changes=plan_changes)  # type: ignore[attr-defined]


def _release_memory(error: BaseException) -> None:
    """Let go of the model and its activations, which an exception keeps as long as somebody keeps the exception."""
    release(error)
    forget_backward()
    gc.collect()


def compare(
    task: Task,
    recipes: Iterable[Recipe],
    *,
    steps: int = 10,
    device: torch.device | GPU | str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Run several recipes one after the other, each from scratch, and lay them side by side.

    A recipe that runs out of memory gets a row that says so; the others still run. Any other error ends it, and carries
    the runs so far as ``error.runs``. Ctrl-C ends the comparison with the
    rows it has.

    Args:
        task: what is trained.
        recipes: the first is what the others are compared with.
        steps, device, seed, progress: see `run`.

    Raises:
        TypeError: one recipe and not a list of them.
        ValueError: no recipe.
    """
    if isinstance(recipes, Recipe):
        raise TypeError("compare() takes several recipes, got one alone; write compare(task, [recipe, recipe.with_(...)]).")
    recipes = list(recipes)
    if not recipes:
        raise ValueError("compare() needs at least one recipe, got none; write compare(task, [recipe, recipe.with_(...)]).")
    for recipe in recipes:
        check_arguments(task, recipe)
    runs: list[Run] = []
    for recipe in recipes:
        try:
            runs.append(run(task, recipe, steps=steps, device=device, seed=seed, progress=progress))
        except Exception as error:
            if failed := getattr(error, "run", None):
                runs.append(failed)
            if failed is None or not _is_out_of_memory(error):
                error.runs = runs  # type: ignore[attr-defined]
                raise
        if runs[-1].status == "interrupted":
            break
        gc.collect()  # a model in a reference cycle would count in the next run's device memory
    return Comparison(runs)


def _is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch raises a plain RuntimeError, and NumPy a MemoryError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def recipe_labels(recipes: list[Recipe]) -> list[str]:
    """Short names that tell the recipes apart: the first in full, of the others what differs from it."""
    first, *others = recipes
    changed = [[name for name in vars(r) if getattr(r, name) != getattr(first, name)] for r in others]
    return [str(first), *("+ " + r.words(names) if names else "the same" for r, names in zip(others, changed, strict=True))]


def _peak(trace: MemoryTrace) -> int:
    return trace.counters.allocated if trace.counters is not None else trace.peak


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None
