"""A recipe that differs from a traced one in its optimizer needs its step alone: that is traced, and put into the known trace.

Forward and backward do not depend on the optimizer. The step depends on them by its gradients, so the model is built, its parameters get
gradients like those that the known step found, and the optimizer steps. Where that is all, the result is the full trace, event by event.
Each condition is checked, and what does not meet them is traced in full:

- `separable`: what the recipe says;
- `Noted.conditions`: both optimizers found the same: parameters and gradients of one layout, each gradient in memory of its own,
  the same modules, hooks, default type and stream; and neither read a value nor used the host's memory;
- `vramlab.memory.splice.stands_alone`: the steps share no memory with the rest;
- the known optimizer's own step, traced alone and put in its own place, gives the known trace and its peak. Tried once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from vramlab.gpus import GPU
from vramlab.memory import steady
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.now import shown_operator
from vramlab.memory.splice import Last, put_in, same_events, stands_alone
from vramlab.memory.trace import Events, MemoryTrace
from vramlab.parallel.way import Way
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.techniques.choose import parameters_of
from vramlab.techniques.precision import Precision
from vramlab.tensors import storages_of
from vramlab.training import checked_model, train_window
from vramlab.virtual import backend
from vramlab.virtual.device import VirtualGPU, virtual_gpu
from vramlab.virtual.memo import watching

LEARNING_RATE = 1e-3  # any: it is a number, and takes no memory


def separable(recipe: Recipe) -> bool:
    """Whether a step comes after backward, on one card, from gradients and nothing else.

    amp-fp16 is outside: its loss scaler looks at the gradients before the step, with a fused optimizer in another way. So is the
    8-bit optimizer, whose state consists of wrapped tensors.
    """
    alone = recipe.ranks == 1 and not recipe.optimizer_in_backward and recipe.offload != "optimizer"
    return alone and recipe.precision != "amp-fp16" and recipe.optimizer in ("sgd", "adamw", "adafactor")


# What a step finds and leaves

Layout = tuple[Any, ...]
"""Shape, strides, dtype, device, offset, class; and of each storage its number among those that the step found, and its bytes."""


@dataclass(frozen=True)
class Noted:
    """What an optimizer found when it stepped, and what it left."""

    parameters: tuple[tuple[str, Layout, Layout | None], ...]
    """For each the name of its module, its layout, and that of its gradient; None: it has none."""
    module: str
    """The one that ran last: the trace counts to it what the step allocates."""
    around: tuple[Any, ...]
    """How many hooks all optimizers have, the default type, the stream."""
    said: tuple[int, int]
    """How many values were read before, and how many notes were made."""
    said_after: tuple[int, int] = (-1, -1)
    last: Last = ("", "")

    @property
    def conditions(self) -> tuple[Any, ...]:
        """All that the step's events depend on."""
        return self.parameters, self.module, self.around

    @property
    def silent(self) -> bool:
        """Whether nothing was read or noted in the step, which would be missing from the plan, or be there of another optimizer."""
        return self.said == self.said_after


@contextmanager
def noting_steps(virtual: VirtualGPU, noted: list[Noted]) -> Iterator[None]:
    """Note each optimizer step inside."""
    now = virtual.now

    def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        modules, storages = tuple(now.modules), dict[int, int]()
        found = [
            (modules[virtual.owner(p)], _layout(p, storages), None if p.grad is None else _layout(p.grad, storages))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        hooks = len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)
        around = (*hooks, torch.get_default_dtype(), backend.current.number)
        noted.append(Noted(tuple(found), modules[now.module], around, _said(virtual)))

    def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        last = shown_operator(list(now.operators)[now.operator]), list(now.lines)[now.line]
        noted[-1] = replace(noted[-1], said_after=_said(virtual), last=last)

    handles = optimizers.register_optimizer_step_pre_hook(begins), optimizers.register_optimizer_step_post_hook(ends)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layout(tensor: torch.Tensor, storages: dict[int, int]) -> Layout:
    held = tuple((storages.setdefault(storage._cdata, len(storages)), storage.nbytes()) for storage in storages_of(tensor))
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(), type(tensor), held


def _said(virtual: VirtualGPU) -> tuple[int, int]:
    return sum(virtual.reads.values()), len(virtual.notes)


# The step alone


@dataclass(eq=False)
class Known:
    """A recipe that was traced in full: the fields of its plan, and what its steps found and left."""

    recipe: Recipe
    fields: dict[str, Any]
    noted: list[Noted]
    certain: bool | None = None
    """Whether its own step, traced alone, gives its own trace; None: not tried yet."""


def with_other_optimizer(known: Known, task: Task, recipe: Recipe, card: GPU, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What a full trace would give for a recipe that differs from a known one in its optimizer; None: only a full trace can say.

    Args:
        known: of a recipe that is `separable`, as the other is.
        asked: gets what the code asked the card for, see `vramlab.virtual.memo.Memo`.
    """
    began = time.perf_counter()
    if known.certain is False:
        return None
    try:
        *own, events = _spliced(known, task, [recipe] if known.certain else [known.recipe, recipe], card, asked)
    except Exception:  # the full trace says what is wrong
        return None
    for tried in own:
        known.certain = tried is not None and same_events(tried, known.fields["trace"].events) and _peak(tried) == known.fields["allocated"]
    if events is None or not known.certain:
        return None
    return known.fields | {
        "allocated": _peak(events),
        "trace": MemoryTrace(events, str(card)),
        "seconds": time.perf_counter() - began,
    }


def _spliced(known: Known, task: Task, recipes: list[Recipe], card: GPU, asked: dict[str, Any]) -> list[Events | None]:
    """For each recipe the known events with the steps of its optimizer; None: a condition is not met."""
    noted: list[Noted] = []
    before, n = known.fields["trace"].events, len(known.noted)
    with virtual_gpu(card, limited=False) as virtual, watching(virtual, "card", asked), noting_steps(virtual, noted):
        traces = _run_alone(task, recipes, known.noted, virtual)
        used_host = virtual.peak_host > 0

    def put(events: Events, i: int) -> Events | None:
        steps, mine = noted[i : i + n], replace(events, steps=events.steps[i : i + n])
        alike = [step.conditions for step in steps] == [step.conditions for step in known.noted]
        silent = not used_host and all(step.silent for step in (*steps, *known.noted))
        if not (alike and silent and stands_alone(mine) and stands_alone(before)):
            return None
        return put_in(before, mine, [(old.last, new.last) for old, new in zip(known.noted, steps, strict=True)])

    return [put(events, i * n) for i, events in enumerate(traces)]


def _run_alone(task: Task, recipes: list[Recipe], noted: list[Noted], virtual: VirtualGPU) -> list[Events]:
    """Step each recipe's optimizer as often as was noted, in the training loop's window, with gradients like those that were found.

    Returns:
        For each all events so far, while its state is there.
    """
    precision, now = Precision(recipes[0].precision), virtual.now
    with virtual.building():  # on the card at once, which takes less time than the way there
        model = precision.prepare(checked_model(task.model())).to(virtual.device)
    virtual.name_modules(model)
    layouts = [layout for _, _, layout in noted[0].parameters]
    gradients = [None if at is None else torch.empty_strided(*at[:2], dtype=at[2], device=at[3]) for at in layouts]

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        for parameter, gradient in zip(parameters_of(model), gradients, strict=True):
            parameter.grad = gradient
        now.module = now.modules.setdefault(noted[0].module, len(now.modules))
        return torch.zeros((), device=virtual.device, requires_grad=True), 1

    bare, traces = replace(task, batch=lambda size, device: None, loss=loss), []
    for recipe in recipes:
        plain = Recipe(**{name: getattr(recipe, name) for name in ("precision", "optimizer", "optimizer_impl", "clip_norm")})
        way = Way(plain, virtual.device)
        optimizer = way.optimizer(model, LEARNING_RATE)
        for _ in noted:
            train_window(bare, plain, way, model, optimizer, precision)
        traces.append(virtual.trace.events)
    return traces


def _peak(events: Events) -> int:
    """The most bytes that CUDA's caching allocator hands out for these events."""
    allocator, rows = CachingAllocator(), steady.rows_of(events)
    allocator.replay(rows.events, rows.moves, rows.streams)
    return allocator.peak_allocated
