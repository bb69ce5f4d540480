"""A model as parts in order: what each costs, without computing anything, and how they are dealt out to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from vramlab.tensors import map_tensors, storages_of, tensors_in

ADAMW_BYTES = 8
"""Optimizer state of a trained fp32 number: two moments."""


def parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of a model by name, in order: each is called with what the one before it gave.

    An `nn.Sequential` consists of its modules. Any other model says what it consists of in a method ``pipeline_parts()``,
    which returns modules whose composition is the model's forward; the first takes what the model takes. A module may
    be among them that is none of the model's own (`vramlab.tasks.models.Part`): it goes by its place, ``part0``.

    Raises:
        TypeError: no module, neither of the two, or parts that are no modules.
        ValueError: parameters of the model that are in no part, by name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"A pipeline splits a torch.nn.Module, got {type(model).__name__}; write pipeline(MyModel(), ...).")
    given = getattr(model, "pipeline_parts", None)
    if callable(given):
        modules = list(given())
    elif type(model).forward is nn.Sequential.forward:
        modules = list(model.children())
    else:
        raise TypeError(
            f"A pipeline must know a model's parts in order, and {type(model).__name__} is no nn.Sequential and has no pipeline_parts(). "
            "Write that method: def pipeline_parts(self): return [self.embedding, *self.blocks, self.head], modules whose composition is "
            "the forward."
        )
    if wrong := [part for part in modules if not isinstance(part, nn.Module)]:
        raise TypeError(
            f"pipeline_parts() of {type(model).__name__} returns modules, got a {type(wrong[0]).__name__} among them; make a module of it, "
            "for example with vramlab.tasks.models.Part."
        )
    held = {id(parameter) for part in modules for parameter in part.parameters()}
    if left_out := [name for name, parameter in model.named_parameters() if id(parameter) not in held]:
        raise ValueError(
            f"The parts of {type(model).__name__} hold all of its parameters, and these are in none: {', '.join(left_out[:8])}. Add the "
            "modules that hold them to pipeline_parts()."
        )
    names = {id(module): name for name, module in model.named_modules() if name}
    return [(names.get(id(part), f"part{i}"), part) for i, part in enumerate(modules)]


class Stage(nn.Module):
    """Some parts of a model, one after the other, each under its name in the model: ``blocks.3``.

    Args:
        parts: names and modules, as `parts_of` gives them.
    """

    def __init__(self, parts: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.parts = tuple(part for _, part in parts)
        for name, part in parts:
            *outer, last = name.split(".")
            place: nn.Module = self
            for container in outer:
                if container not in place._modules:
                    place.add_module(container, nn.Module())
                place = place.get_submodule(container)
            place.add_module(last, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = self.parts
        x = first(*args, **kwargs)
        for part in rest:
            x = part(x)
        return x


@dataclass(frozen=True)
class PartCost:
    """What a part takes."""

    name: str
    parameters: int = 0
    """Bytes."""
    trained: int = 0
    """Numbers that are trained: each has a gradient and optimizer state."""
    gradients: int = 0
    """Bytes."""
    activations: int = 0
    """Bytes that one micro-batch's forward keeps for backward."""
    flops: int = 0
    """Floating-point operations of one micro-batch's forward, of products, convolutions and attention."""

    def states(self, optimizer_bytes: float = ADAMW_BYTES) -> float:
        """Bytes of parameters, gradients and optimizer state, of which a trained number has ``optimizer_bytes``."""
        return self.parameters + self.gradients + optimizer_bytes * self.trained


@dataclass(frozen=True)
class Boundary:
    """What travels from one part to the next: tensors in any nesting of tuples, lists and dictionaries, or None in places."""

    structure: TreeSpec
    present: tuple[bool, ...]
    """Of each leaf, whether it is a tensor; else it is None."""
    tensors: tuple[torch.Tensor, ...]
    """Without data: their shapes and types, contiguous, and whether they want a gradient."""

    @classmethod
    def of(cls, value: Any, where: str) -> Boundary:
        """The boundary that this value crosses.

        Raises:
            TypeError: something in it that is neither a tensor nor None.
        """
        leaves, structure = tree_flatten(value)
        wrong = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, torch.Tensor)]
        if wrong or not any(leaf is not None for leaf in leaves):
            what = f"a {type(wrong[0]).__name__}" if wrong else repr(value)
            raise TypeError(
                f"Tensors travel from part to part, in tuples, lists and dictionaries, and {where} gave {what}. Return tensors, and give "
                "the next parts what they can know by themselves when they are made."
            )
        return cls(structure, tuple(leaf is not None for leaf in leaves), tuple(_bare(leaf) for leaf in leaves if leaf is not None))

    def flatten(self, value: Any, where: str) -> tuple[torch.Tensor, ...]:
        """The tensors in a value like the one that was expected, contiguous.

        Raises:
            ValueError: it is unlike that one.
        """
        leaves, structure = tree_flatten(value)
        tensors = tuple(leaf for leaf in leaves if leaf is not None)
        present = tuple(leaf is not None for leaf in leaves)
        if structure != self.structure or present != self.present:
            first, now = _nesting(self.present, self.structure), _nesting(present, structure)
            raise ValueError(
                f"What travels between stages has the same nesting each time, and {where} was {first} at first and is {now} now. "
                "Return the same in each forward; a tensor of zeros can stand for None."
            )
        check_alike(tensors, self.tensors, where)
        return tuple(tensor.contiguous() for tensor in tensors)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value that consists of these tensors."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if here else None for here in self.present], self.structure)


def check_alike(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], where: str) -> None:
    """Refuse what does not fit the buffers that others receive it in, before anything is sent.

    Raises:
        ValueError: other shapes or types.
    """
    found, wanted = [_described(t) for t in tensors], [_described(t) for t in expected]
    if found != wanted:
        raise ValueError(
            f"All micro-batches of a pipeline have the shapes of the first, as others wait for them: {where} is {', '.join(found)}, and "
            f"was to be {', '.join(wanted)}. Pad the micro-batches, or leave out a last one that is smaller."
        )


def _nesting(present: Sequence[bool], structure: TreeSpec) -> Any:
    return tree_unflatten(["tensor" if here else None for here in present], structure)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of this shape and type, without data."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)


def trace_parts(
    parts: Sequence[tuple[str, nn.Module]],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    recomputed: Sequence[nn.Module] = (),
) -> tuple[list[PartCost], list[Boundary]]:
    """What each part costs and gives, from one forward in which nothing is computed and nothing gets memory.

    Args:
        parts: of the model, wherever their parameters are.
        args, kwargs: what the first is called with; only shapes and types matter.
        device: on which it would run: autocast and attention differ between devices.
        around: the context of a forward, such as autocast.
        recomputed: modules that are checkpointed: of what is in them, backward finds their inputs alone.

    Raises:
        TypeError: a part that gives something else than tensors.
        RuntimeError: a part that cannot run without data, by name.
    """
    costs, boundaries = [], []
    device = torch.device(device)
    # Outside of all that looks on: no operator of the code around.
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), _NoData(allow_non_fake_inputs=True), around():
        state = [{name: _empty_like(t, device) for name, t in _state_of(part)} for _, part in parts]
        known = {storage._cdata for tensors in state for t in tensors.values() for storage in storages_without_data(t)}
        x: Any = None
        for i, ((name, part), tensors) in enumerate(zip(parts, state, strict=True)):
            kept, where = _Kept(known), _where(parts, i)
            with FlopCounterMode(display=False) as counter, kept.watch(part, recomputed):
                try:
                    given = (map_tensors(_empty_like, list(args)), map_tensors(_empty_like, dict(kwargs or {}))) if i == 0 else ([x], {})
                    x = functional_call(part, tensors, tuple(given[0]), given[1])
                except Exception as error:
                    raise RuntimeError(
                        f"The shapes of what a pipeline's stages exchange come from a forward without data, and {where} failed in it: "
                        f"{error}. Leave reading numbers (.item(), boolean masks) out of forward."
                    ) from error
            boundaries.append(Boundary.of(x, where))
            trained = [p for p in part.parameters() if p.requires_grad]
            costs.append(
                PartCost(
                    name,
                    parameters=sum(t.nbytes for t in (*part.parameters(), *part.buffers())),
                    trained=sum(p.numel() for p in trained),
                    gradients=sum(p.nbytes for p in trained),
                    activations=kept.nbytes,
                    flops=counter.get_total_flops(),
                )
            )
    return costs, boundaries


def _where(parts: Sequence[tuple[str, nn.Module]], i: int) -> str:
    return f"part {parts[i][0]!r} ({type(parts[i][1]).__name__})"


class _NoData(FakeTensorMode):
    avoid_device_init = True  # else tensors of a virtual card would look for real kernels


def _state_of(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from part.named_parameters()
    yield from part.named_buffers()


def _empty_like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    return empty.requires_grad_(tensor.requires_grad)


def storages_without_data(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor, also of one without data."""
    return storages_of(tensor) or [tensor.untyped_storage()]


class _Kept:
    """Counts the bytes that autograd keeps; each storage once, and none of ``known``, to which they are added."""

    def __init__(self, known: set[int]) -> None:
        self._known, self.nbytes = known, 0
        self._alive: list[torch.UntypedStorage] = []  # else another storage could get the number

    @contextmanager
    def watch(self, part: nn.Module, recomputed: Sequence[nn.Module]) -> Iterator[None]:
        inside = [module for module in part.modules() if any(module is other for other in recomputed)]
        depth = 0

        def enters(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal depth
            if not depth:
                self._count(tensors_in((args, kwargs)))
            depth += 1

        def leaves(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal depth
            depth -= 1

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if not depth:
                self._count([tensor])
            return tensor

        handles = [module.register_forward_pre_hook(enters, with_kwargs=True) for module in inside]
        handles += [module.register_forward_hook(leaves, always_call=True) for module in inside]
        try:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _count(self, tensors: Sequence[torch.Tensor]) -> None:
        for storage in (storage for tensor in tensors for storage in storages_without_data(tensor)):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._alive.append(storage)
                self.nbytes += storage.nbytes()


def balanced_split(
    costs: Sequence[PartCost], stages: int, *, in_flight: Sequence[int] | None = None, optimizer_bytes: float = ADAMW_BYTES
) -> tuple[int, ...]:
    """How many parts each stage gets, so that the largest stage is as small as can be.

    A stage's size is its share of all floating-point operations or its share of all bytes, whichever is larger: the
    slowest stage sets the pace, and the fullest card what fits.

    Args:
        costs: of the parts, in order.
        stages: how many; each gets a part that is trained.
        in_flight: of how many micro-batches each stage keeps the activations at once; None: as in 1F1B with many.
        optimizer_bytes: of optimizer state, a trained number.

    Raises:
        ValueError: fewer trained parts than stages.
    """
    in_flight = list(in_flight) if in_flight is not None else [stages - i for i in range(stages)]
    flops = [0.0, *accumulate(float(cost.flops) for cost in costs)]
    states = [0.0, *accumulate(cost.states(optimizer_bytes) for cost in costs)]
    activations = [0.0, *accumulate(float(cost.activations) for cost in costs)]
    trained = [0, *accumulate(cost.trained for cost in costs)]
    nbytes = states[-1] + activations[-1] * sum(in_flight) / stages

    def size(stage: int, first: int, end: int) -> float:
        if trained[first] == trained[end]:
            return float("inf")
        held = states[end] - states[first] + (activations[end] - activations[first]) * in_flight[stage]
        return max((flops[end] - flops[first]) / (flops[-1] or 1), held / (nbytes or 1))

    found = least_maximum(size, len(costs), stages)
    if found is None:
        have = sum(cost.trained > 0 for cost in costs)
        raise ValueError(
            f"Each stage trains something, and this model has {have} trained of {len(costs)} parts for {stages} stages. "
            "Set fewer stages, or let pipeline_parts() give smaller parts."
        )
    return found


def least_maximum(size: Callable[[int, int, int], float], parts: int, stages: int) -> tuple[int, ...] | None:
    """Cut ``parts`` in order into ``stages`` pieces of at least one such that the largest is smallest; of such cuts, the most even.

    Args:
        size: ``size(stage, first, end)`` of the stage that holds the parts ``first`` to ``end - 1``; infinite: not allowed.

    Returns:
        The length of each piece; None if no cut is allowed.

    By dynamic programming: the best cut of the first j parts into s pieces follows from those into s - 1.
    """
    Best = tuple[float, float, tuple[int, ...]]
    best: list[Best | None] = [(0.0, 0.0, ()), *[None] * parts]
    for stage in range(stages):
        later: list[Best | None] = [None] * (parts + 1)
        for end in range(1, parts + 1):
            for first in range(end):
                before = best[first]
                if before is None or (mine := size(stage, first, end)) == float("inf"):
                    continue
                candidate = (max(before[0], mine), before[1] + mine * mine, (*before[2], end - first))
                kept = later[end]
                if kept is None or candidate < kept:
                    later[end] = candidate
        best = later
    return best[parts][2] if best[parts] is not None else None  # type: ignore[index]


def batch_norms(model: nn.Module) -> list[str]:
    """The norms over a batch that are in training, by name."""
    return [name or type(module).__name__ for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
