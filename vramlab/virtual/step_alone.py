"""A recipe that differs from a traced one in its optimizer needs its step alone: that is traced, and put into the known trace.

The step depends on forward and backward by its gradients, so the model is built, its parameters get gradients like those that the known
step found, and the optimizer steps. Where that is all, and forward and backward do not look at what the optimizer did, the result is the
full trace, event by event. Each condition is checked, and what does not meet them is traced in full:

- `separable`: what the recipe says;
- `Noted.conditions`: both optimizers found the same: parameters and gradients of one layout, each gradient in memory of its own,
  the same modules, default type and stream; and neither read a value nor used the host's memory;
- `Noted.alone` and `_separate`: the optimizer did not reach forward by a hook, by a parameter whose value is known and read, by how much
  memory is free or allocated, or by a parameter's version;
- `vramlab.memory.splice.stands_alone`: the steps share no memory with the rest;
- the known optimizer's own step, traced alone and put in its own place, gives the known trace and its peak. Tried once.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
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
from vramlab.virtual.travel import pickled

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
    """The default type, the stream."""
    alone: bool
    """Whether no hook of the code runs with the step."""
    followed: bool
    """Whether there is a parameter of which values and gradient are known: the optimizer computes with them."""
    said: tuple[int, int, int]
    """How often a value was read before, how many notes there were, and how often the card's memory or a version was asked for."""
    said_after: tuple[int, int, int] = (-1, -1, -1)
    last: Last = ("", "")

    @property
    def conditions(self) -> tuple[Any, ...]:
        """All that the step's events depend on."""
        return self.parameters, self.module, self.around

    @property
    def silent(self) -> bool:
        """Whether nothing was read or noted in the step, which would be missing from the plan, or be there of another optimizer."""
        return self.said == self.said_after


def _separate(noted: list[Noted], events: Events) -> bool:
    """Whether a run's steps can be taken out of its events; and once an optimizer has stepped, nobody asks for what depends on it."""
    before, after = noted[0].said, noted[-1].said_after
    unread = before[0] == after[0] or not any(step.followed for step in noted)
    return unread and before[2] == after[2] and all(step.alone and step.silent for step in noted) and stands_alone(events)


class _Versions:
    """Counts how often the code reads the version of a tensor in certain storages: optimizers raise it by different numbers."""

    guards = ("vramlab.techniques.offload", "torch.utils.checkpoint")
    """Modules that read it to raise an error, and for nothing else."""

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.asked = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        original: Any = torch.Tensor._version

        def version(tensor: torch.Tensor) -> Any:
            if sys._getframe(1).f_globals.get("__name__") not in self.guards:
                self.asked += any(storage._cdata in self.storages for storage in storages_of(tensor))
            return original.__get__(tensor)

        FakeTensor._version = property(version)  # type: ignore[assignment]
        try:
            yield
        finally:
            del FakeTensor._version


@contextmanager
def noting_steps(virtual: VirtualGPU, noted: list[Noted]) -> Iterator[None]:
    """Note each optimizer step inside."""
    now, versions = virtual.now, _Versions()

    def said() -> tuple[int, int, int]:
        return sum(virtual.reads.values()) + virtual.known_reads, len(virtual.notes), virtual.memory_asked + versions.asked

    def is_ours(hook: Any) -> bool:
        return hook in (begins, ends) or virtual.is_its_hook(hook)

    def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        modules, storages = tuple(now.modules), dict[int, int]()
        found = [
            (modules[virtual.owner(p)], _layout(p, storages), None if p.grad is None else _layout(p.grad, storages))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        versions.storages.update(storages)
        hooks = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        others = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        alone = not any(others) and all(is_ours(hook) for some in hooks for hook in some.values())
        pairs = ((p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        followed = any(virtual.knows(p) and virtual.knows(gradient) for p, gradient in pairs)
        around = torch.get_default_dtype(), backend.current.number
        noted.append(Noted(tuple(found), modules[now.module], around, alone, followed, said()))

    def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        last = shown_operator(list(now.operators)[now.operator]), list(now.lines)[now.line]
        noted[-1] = replace(noted[-1], said_after=said(), last=last)

    handles = optimizers.register_optimizer_step_pre_hook(begins), optimizers.register_optimizer_step_post_hook(ends)
    try:
        with versions.counted():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _layout(tensor: torch.Tensor, storages: dict[int, int]) -> Layout:
    held = tuple((storages.setdefault(storage._cdata, len(storages)), storage.nbytes()) for storage in storages_of(tensor))
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(), type(tensor), held


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
    if known.certain is None and not _separate(known.noted, known.fields["trace"].events):
        known.certain = False
    if known.certain is False:
        return None
    try:
        own_task = pickle.loads(pickled(task))  # a model that it carries is used up by a run, and the full trace may need it yet
        *own, events = _spliced(known, own_task, [recipe] if known.certain else [known.recipe, recipe], card, asked)
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
        if not alike or used_host or not _separate(steps, mine):
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
