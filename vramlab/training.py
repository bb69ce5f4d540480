"""The one training loop: a Task and a Recipe on a device, a report for every optimizer step."""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramlab.devices import PeakCounters, Stopwatch, building, choose_device, is_virtual_device
from vramlab.interrupts import deferred_interrupt
from vramlab.memory.recorder import record
from vramlab.memory.trace import DeviceCounters, MemoryTrace
from vramlab.parallel.choose import choose_way
from vramlab.parallel.way import Way
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.techniques.accumulation import Window
from vramlab.techniques.choose import around_forward, around_window
from vramlab.techniques.precision import Precision


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the window's items; NaN on a virtual GPU, which computes nothing."""
    seconds: float
    items_per_second: float | None
    """None for a recorded step: recording costs time, so throughput comes from the others. None on a virtual GPU."""
    memory: MemoryTrace | None
    """The step's trace if it was recorded."""
    counters: DeviceCounters | None = None
    """CUDA's own peaks in a step that was not recorded: a recorder keeps autograd from working in place here and there."""
    skipped: bool = False
    """The loss scaler found an infinite gradient and left the parameters as they were."""
    interrupted: bool = False
    """Ctrl-C came during this step; asked for the next one, `train` raises KeyboardInterrupt."""


def train(
    task: Task,
    recipe: Recipe,
    device: torch.device | str = "auto",
    *,
    record_every: int | None = 50,
    learning_rate: float = 1e-3,
) -> Generator[StepReport, None, None]:
    """Train without end, one optimizer step a window; the caller decides when to stop.

    Steps 1 and 2 (the optimizer's state appears during the first) and every ``record_every``-th are recorded. Ctrl-C
    waits for the end of the step, a second one does not.

    Args:
        task: what is trained.
        recipe: how memory is saved.
        device: see `vramlab.devices.choose_device`.
        record_every: record each k-th step; None: none at all.
        learning_rate: of the optimizer; Adafactor takes the relative step of its paper instead.

    Yields:
        A `StepReport` an optimizer step. If a step fails, the exception carries the trace so far as ``trace``.

    Raises:
        RuntimeError: several ranks, and no process group of that many.
        TypeError, ValueError: a Task whose loss is not a scalar sum with a graph and a count, a model without parameters,
            ``record_every`` below 1.
    """
    check_arguments(task, recipe, record_every)
    device = choose_device(device)
    virtual = is_virtual_device(device)
    precision = Precision(recipe.precision, loss_scale=recipe.loss_scale)
    way = choose_way(recipe, device)
    way.sees(task, precision)
    with way.building(), building(device):
        model = precision.prepare(checked_model(task.model()))
    model = way.place(model)
    if not model.training:  # else norms that are frozen in eval mode stay so
        model.train()
    optimizer = way.optimizer(model, learning_rate)

    with way.changed(model):
        for step in itertools.count(1):
            recorded = record_every is not None and (step <= 2 or step % record_every == 0)
            with deferred_interrupt() as interrupted:
                with (
                    PeakCounters(device, ask_driver=False) as peaks,
                    keep_trace(record(model, optimizer)) if recorded else nullcontext() as trace,
                    Stopwatch(device) as watch,
                ):
                    window, stepped = train_window(task, recipe, way, model, optimizer, precision)
                    # Reading the value waits for the device; on a virtual one there is none.
                    loss = math.nan if virtual else window.loss
            speed = None if recorded or virtual else window.count / watch.seconds
            counters = None if recorded else peaks.result
            yield StepReport(step, loss, watch.seconds, speed, trace, counters, skipped=not stepped, interrupted=bool(interrupted))
            if interrupted:
                raise KeyboardInterrupt


def train_window(
    task: Task, recipe: Recipe, way: Way, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> tuple[Window, bool]:
    """One optimizer step over a window of micro-batches; returns the window and whether the parameters moved."""
    # As the variables of a loop do, these hold the last batch and loss through the optimizer's step.
    batch = total = None

    def batches() -> Iterator[Any]:
        nonlocal batch
        for _ in range(recipe.accumulation):
            batch = precision.inputs(task.batch(recipe.micro_batch, way.device))
            yield batch

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        nonlocal total
        with precision.autocast(way.device), around_forward(model, recipe):
            result = task.loss(model, batch) if recipe.loss_chunks == 1 else task.loss(model, batch, recipe.loss_chunks)
            total, count = checked_loss(result)
        return total, count

    with around_window(recipe):
        window = way.window(model, batches(), loss, precision)
        stepped = way.step(precision, optimizer)
    way.clear(model, optimizer)
    return window, stepped


def checked_model(model: Any) -> nn.Module:
    """What ``Task.model`` returned, if it is a new module.

    Raises:
        TypeError: it is no module, or one that a run was given before: that would be trained on, in the last run's precision.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Task.model returns a torch.nn.Module, got {_short(model)}; write for example model=lambda: MyModel().")
    if model in _given:
        raise TypeError(
            f"Task.model makes a new model for every run, and this {type(model).__name__} was given to one before; "
            "write model=lambda: MyModel(), or model=lambda: copy.deepcopy(my_model)."
        )
    _given.add(model)
    return model


_given: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def checked_loss(result: Any) -> tuple[torch.Tensor, int]:
    """What ``Task.loss`` returned, if it is a summed loss and a count.

    Raises:
        TypeError: not a pair of a tensor and a whole number.
        ValueError: the tensor is not a scalar or has no graph, or the count is negative.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise TypeError(
            f"Task.loss returns (sum of losses, number of items), got {_short(result)}; return for example (loss.sum(), len(loss))."
        )
    total, count = result
    try:
        if isinstance(count, bool) or getattr(count, "dtype", None) is torch.bool:
            raise TypeError
        count = operator.index(count)  # NumPy's integers and tensors of one integer too
    except TypeError:
        raise TypeError(
            f"Task.loss returns a whole number of items as its second value, got {_short(count)}; return for example labels.numel()."
        ) from None
    if count < 0:
        raise ValueError(f"Task.loss returns a number of items of at least 0, got {count}; count those that were summed.")
    if total.dim() != 0:
        raise ValueError(f"Task.loss returns one number, the sum of the losses, got shape {tuple(total.shape)}; add .sum().")
    if not total.requires_grad:
        raise ValueError(
            "Task.loss returns a loss that leads back to parameters, and this one has no grad; drop .detach(), .item() or no_grad."
        )
    return total, count


@contextmanager
def keep_trace(recorder: Any) -> Iterator[MemoryTrace]:
    """A recorder whose trace an exception takes along, as its attribute ``trace``."""
    with recorder as trace:
        try:
            yield trace
        except BaseException as error:
            error.trace = trace  # type: ignore[attr-defined]
            raise


def check_arguments(task: Task, recipe: Recipe, record_every: int | None = None) -> None:
    """Refuse before anything is built what cannot be trained.

    Raises:
        TypeError: not a Task, not a Recipe.
        ValueError: ``record_every`` below 1, a chunked loss for a task without one.
    """
    if not isinstance(task, Task):
        raise TypeError(f"Training needs a Task, got {_short(task)}; take for example vl.tasks.gpt('nano').")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"Training needs a Recipe, got {_short(recipe)}; write for example vl.Recipe(precision='amp-bf16').")
    if record_every is not None and (not isinstance(record_every, int) or record_every < 1):
        raise ValueError(f"record_every is a whole number of at least 1, got {record_every!r}; a large one records steps 1 and 2 alone.")
    if recipe.loss_chunks > 1 and not task.chunked:
        raise ValueError(
            f"loss_chunks={recipe.loss_chunks} needs a Task with a chunked loss, and {task.name!r} has none; set loss_chunks=1, "
            "or give Task(..., loss=lambda model, batch, chunks=1: ..., chunked=True) with vl.techniques.chunked_cross_entropy."
        )


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
