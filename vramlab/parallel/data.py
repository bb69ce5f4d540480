"""Data parallelism: each rank holds the model and works on its own micro-batches; gradients are averaged over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count as count_from
from itertools import islice
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from vramlab.parallel.way import Loss, Way
from vramlab.recipe import Recipe
from vramlab.techniques.accumulation import Window, keep_gradient_in
from vramlab.techniques.in_backward import hooked_parameters
from vramlab.techniques.precision import Precision

B = TypeVar("B")
Uneven = Literal["fill", "stop", "refuse"]
SHOWN_NAMES = 8


def ddp(model: nn.Module, *, dry_run: Callable[[nn.Module], Any] | None = None, **options: Any) -> DistributedDataParallel:
    """Wrap a model in `DistributedDataParallel`, after the checks whose failure would show late or as a hang.

    The weights and buffers of rank 0 go to all ranks. Gradients are views into DDP's buckets (``gradient_as_bucket_view``):
    without that every rank keeps a second copy of them. No memory is saved beside one card: each rank holds the
    parameters, gradients and optimizer state of the whole model.

    Args:
        model: on this rank's device, in its final precision; what is frozen is frozen before.
        dry_run: ``dry_run(model)`` gives a loss; see `unused_parameters`. With it, parameters without a gradient are refused.
        options: of `DistributedDataParallel`: ``process_group`` for copies on some ranks only; ``find_unused_parameters=True`` lets
            parameters go without a gradient, and costs a walk through the graph in every forward.

    Raises:
        RuntimeError: no process group.
        TypeError: no module.
        ValueError: no trained parameter, lazy parameters, a part that is wrapped already, parameters that step in backward,
            a parameter without a gradient in the dry run.
    """
    _check_model(model)
    if not dist.is_initialized():
        raise RuntimeError("ddp() needs a process group; call it in a function that vl.parallel.launch(function, ranks=2) runs.")
    if dry_run is not None and not options.get("find_unused_parameters"):
        _refuse_unused(unused_parameters(model, dry_run))
    if dist.get_rank(options.get("process_group")) == 0 and (note := batch_norm_note(model)):
        warnings.warn(note, stacklevel=2)
    return DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **options})


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"ddp() wraps a torch.nn.Module, got {type(model).__name__}; write ddp(MyModel().to(device)).")
    wrapped = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    if wrapped:
        where = repr(wrapped[0]) if wrapped[0] else "all of it"
        raise ValueError(
            f"A model is wrapped once, as a whole: a part that is wrapped already averages its gradients again, and no_sync does not reach "
            f"it. Here {where} is a DistributedDataParallel; give its .module."
        )
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(f"DDP needs the shapes of all parameters, and these have none yet: {listed(lazy)}. Call the model once before.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "DDP averages gradients, and no parameter of this model requires any: "
            f"it has {sum(1 for _ in model.parameters())} parameters, all frozen. Unfreeze what is trained, or use the model without ddp()."
        )
    _refuse_steps_in_backward(model)


def _refuse_steps_in_backward(model: nn.Module) -> None:
    stepped = [
        name
        for name, parameter in model.named_parameters()
        # What FSDP shards steps when its gradient is averaged.
        if parameter in hooked_parameters and hooked_parameters[parameter][0]() is not None and not is_sharded(parameter)
    ]
    if stepped:
        raise ValueError(
            f"A step in backward uses this rank's gradient before it is averaged, so the ranks would drift apart. Here these step in "
            f"backward: {listed(stepped)}. Use an ordinary optimizer, or one rank."
        )


def _refuse_unused(names: Sequence[str]) -> None:
    if names:
        raise ValueError(
            f"DDP waits in every backward for a gradient of each parameter, and {len(names)} got none in the dry run: {listed(names)}. "
            "Freeze them with requires_grad_(False), let the loss depend on them, or set find_unused_parameters=True, which costs time."
        )


def batch_norm_note(model: nn.Module) -> str:
    """What to know about the model's BatchNorms on several ranks; empty if it has none."""
    norms = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.training
    ]
    if not norms:
        return ""
    return (
        f"BatchNorm ({listed(norms)}) takes the mean over one rank's micro-batch, so results depend on the number of ranks. On CUDA "
        "nn.SyncBatchNorm.convert_sync_batchnorm(model) takes it over all ranks'; GroupNorm and LayerNorm do not depend on it."
    )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which each rank holds a part; importing them to ask takes half a second."""
    return hasattr(parameter, "placements")


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def unused_parameters(model: nn.Module, loss: Callable[[nn.Module], Any]) -> list[str]:
    """The trained parameters that get no gradient from one forward and backward, by name.

    It runs on this rank alone, before the model is wrapped, and leaves gradients, buffers and random numbers as they
    were. It needs the memory of a step. A parameter that only some batches use is found only where this one does not.

    Args:
        loss: ``loss(model)`` gives a scalar with a graph, or a tuple that begins with one, as ``Task.loss`` does.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = [parameter.grad for _, parameter in trained]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    cards = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    try:
        for _, parameter in trained:
            parameter.grad = None
        with torch.random.fork_rng(devices=cards), torch.enable_grad():
            result = loss(model)
            (result[0] if isinstance(result, tuple) else result).backward()
        return [name for name, parameter in trained if parameter.grad is None]
    finally:
        for (_, parameter), gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def windows(
    batches: Iterable[B],
    k: int,
    count: Callable[[B], int] | None = None,
    *,
    model: nn.Module,
    uneven: Uneven = "fill",
) -> Iterator[RankWindow[B]]:
    """Group this rank's micro-batches into windows of one optimizer step each, which all ranks take together.

        model = vl.parallel.ddp(MyModel().to(device))
        for window in vl.parallel.windows(loader, k=4, count=lambda batch: int((batch["labels"] != -100).sum()), model=model):
            for batch in window:
                total = F.cross_entropy(model(batch["ids"]), batch["labels"], reduction="sum")
                window.share(total).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    With ``set_to_none=False`` gradients stay views of DDP's buckets, and the next window adds up there; where they are ``None`` it
    makes them beside the buckets, 4 bytes a parameter more. The first window has both, and in the second's first forward DDP copies its
    buckets into new ones; `train` goes without these too. Leave it out with ``k=1`` and FSDP, which gain nothing, with 16-bit parameters,
    whose sums are fp32, and with ``find_unused_parameters=True``: an optimizer moves what has a zero, and leaves alone what has none.
    For the same reason `Precision.step` does not see, with zeros, that a loss leads to no parameter.

    The gradients are those of one process on all the ranks' micro-batches: each *item* weighs the same, whichever rank
    and micro-batch it is in. They travel once a window, in the last micro-batch's backward. Before each window the
    ranks tell each other what they have (16 bytes a rank), so that none waits for one that has run out: a window
    may hold fewer micro-batches on some ranks, and where one has none left, ``uneven`` decides.

    Args:
        batches: this rank's own micro-batches; `DistributedSampler` deals them out (call its ``set_epoch``).
        k: micro-batches in a window, the same on all ranks.
        count: how many items a micro-batch's *summed* loss adds up. None: losses are means over micro-batches of equal size.
        model: from `ddp`.
        uneven: "fill": a rank that has run out repeats its last micro-batch with weight 0 until all have (BatchNorm sees
            the repetition); "stop": all end when the first has run out, and what the others have left is not trained on;
            "refuse": ranks with more micro-batches than others are an error.

    Raises:
        ValueError: ``k`` below 1, an unknown ``uneven``, ``static_graph=True`` with several micro-batches, a rank without
            any micro-batch to repeat, or uneven ranks that are refused. The last two are raised in all ranks.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is a whole number of at least 1, got {k!r}; 1 is a step for each micro-batch.")
    if uneven not in get_args(Uneven):
        raise ValueError(f"uneven is 'fill', 'stop' or 'refuse', got {uneven!r}.")
    if k > 1:
        _refuse_static_graph(model)
    return _windows(iter(batches), k, count, model, uneven)


def _windows(iterator: Iterator[B], k: int, count: Callable[[B], int] | None, model: nn.Module, uneven: Uneven) -> Iterator[RankWindow[B]]:
    repeated: list[B] = []
    for number in count_from(1):
        mine = list(islice(iterator, k))
        items = [1 if count is None else int(count(batch)) for batch in mine]
        table = _everyone([len(mine), sum(items)], model)
        sizes = [size for size, _ in table]
        if max(sizes) == 0:
            return
        if min(sizes) == 0 and number == 1:
            raise ValueError(_empty_text(sizes))
        if min(sizes) == 0 and uneven == "stop":
            return
        if min(sizes) < max(sizes) and uneven == "refuse":
            raise ValueError(_uneven_text(sizes, number))
        everything = sum(counted for _, counted in table)
        repeated = mine[-1:] or repeated
        # Each forward and backward of a sharded model is one of all ranks; a copy's gradients travel in the last backward alone.
        wanted = max(sizes) if any(map(is_sharded, model.parameters())) else 1
        filled = mine + repeated * (wanted - len(mine))
        yield RankWindow(max(sizes), items=everything, batches=filled, model=model, counted=len(mine))


def _empty_text(sizes: Sequence[int]) -> str:
    return f"Each rank needs at least one micro-batch, and {_held(sizes)}. Give every rank data, or use fewer ranks."


def _uneven_text(sizes: Sequence[int], number: int) -> str:
    return (
        f"uneven='refuse' wants the same number of micro-batches on all ranks, and in window {number} {_held(sizes)}. Deal them out evenly "
        "(DistributedSampler), or set uneven='fill' or 'stop'."
    )


def _held(sizes: Sequence[int]) -> str:
    return ", ".join(f"rank {rank} has {size}" for rank, size in enumerate(sizes))


def _refuse_static_graph(model: nn.Module) -> None:
    if getattr(model, "static_graph", False):
        raise ValueError(
            "static_graph=True learns the graph from the first backward, and fails when that one is not synchronised, as in a window of "
            "several micro-batches. Leave static_graph=False, or accumulate nothing."
        )


def _everyone(mine: Sequence[int], model: nn.Module) -> list[list[int]]:
    """These numbers of all ranks that hold a copy of the model, in their order."""
    group = _group(model)
    table = torch.zeros(dist.get_world_size(group), len(mine), dtype=torch.int64)
    table[dist.get_rank(group)] = torch.tensor(mine)
    table = table.to(_home(model))
    dist.all_reduce(table, group=group)
    rows: list[list[int]] = table.tolist()
    return rows


def _group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which the gradients are averaged; None: all."""
    return getattr(model, "process_group", None)


def _home(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class RankWindow(Window[B]):
    """One rank's part of the micro-batches of one optimizer step.

    The gradients of all ranks, averaged by DDP, add up to that of the mean loss over all items of all ranks. If how
    many those are is known only at the end, the ranks agree on a divisor at the first `share`, and `close` corrects
    the gradients; all ranks call both the same number of times. After the loop over the window, `loss` and `count` are
    those of all ranks. How gradients stay in DDP's buckets between windows says `windows`.

    Args:
        micro_batches: how many the largest part of all ranks holds.
        items: how many items all ranks' parts hold; None if that is not known yet.
        batches: what iterating over the window gives, for the last with synchronised gradients.
        model: its gradients are averaged over the ranks; with a ``no_sync`` method, as `ddp` gives, only once a window.
        counted: how many of the micro-batches count, from the first; the others repeat what has been counted already. None: all.

    Raises:
        ValueError: parameters that step in backward, ``static_graph=True`` and several micro-batches.
    """

    def __init__(
        self,
        micro_batches: int,
        *,
        items: int | None = None,
        batches: Sequence[B] = (),
        model: nn.Module,
        counted: int | None = None,
    ) -> None:
        no_sync: Callable[[], AbstractContextManager[Any]] = getattr(model, "no_sync", nullcontext)
        super().__init__(micro_batches, items=items, batches=batches, no_sync=no_sync)
        _refuse_steps_in_backward(model)
        if micro_batches > 1:
            _refuse_static_graph(model)
        self._model, self._world = model, dist.get_world_size(_group(model))
        self._counted, self._shared = counted, 0
        self._agreed = self._by_hand = False
        self._narrow: list[torch.Tensor] = []  # whose gradients FSDP leaves in 16 bits

    def __iter__(self) -> Iterator[B]:
        for i, batch in enumerate(self._batches, 1):
            with nullcontext() if i == len(self._batches) and not self._by_hand else self._no_sync():
                yield batch
        self._agree()

    def __len__(self) -> int:
        return len(self._batches) or self._micro_batches

    def open(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let 16-bit parameters add up their gradients in fp32, if there are several micro-batches.

        DDP's buckets are 16-bit then and take no others, so `close` averages the sums over the ranks instead of DDP. FSDP
        averages each micro-batch's in fp32, leaves them 16-bit, and adds the next to whatever is there: `share` makes that fp32.
        """
        parameters = list(parameters)
        if any(map(is_sharded, parameters)):
            self._narrow = [p for p in parameters if self._micro_batches > 1 and p.requires_grad and p.dtype.itemsize == 2]
            return
        super().open(parameters)
        self._by_hand = any(parameter.grad_dtype not in (None, parameter.dtype) for parameter in parameters)

    def share(self, total: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """This micro-batch's part of the window's loss, to call backward on; see `Window.share`."""
        if self._items is None and count is not None and not self._divisor:
            self._divisor = sum(counted for (counted,) in _everyone([count * self._micro_batches], self._model))
        for parameter in self._narrow:
            if parameter.grad is not None and parameter.grad.dtype != torch.float32:
                keep_gradient_in(torch.float32, parameter)
        self._shared += 1
        repeats = self._counted is not None and self._shared > self._counted
        # DDP divides by the number of ranks.
        return super().share(total * 0 if repeats else total, count) * self._world

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        """Correct the gradients if the items were not known before. Call it in all ranks, before clipping and step."""
        parameters = list(parameters)
        self._agree()
        if self._by_hand:
            self._average([parameter for parameter in parameters if parameter.requires_grad])
        super().close(parameters)

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        """The mean over the ranks of each gradient; all take part in each, also where this rank has none."""
        add_up(parameters, _group(self._model))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._world)
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_forward_param_sync = True  # as after a synchronised backward: the next forward sends the buffers
        self._by_hand = False

    def _agree(self) -> None:
        """Make the loss and, if it was not known, the count those of all ranks; once."""
        if self._agreed:
            return
        self._agreed = True
        total = self._total if isinstance(self._total, torch.Tensor) else torch.tensor(self._total)
        sums = torch.zeros(2, dtype=torch.float64, device=_home(self._model))
        sums[0] = total.double()
        sums[1] = 0 if self._items is not None else self.count
        dist.all_reduce(sums, group=_group(self._model))
        self._total = sums[0]
        if self._items is None:
            self.count = int(sums[1])


def add_up(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """The sum over the group's ranks of each gradient; all take part in each, also where this rank has none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    for work in [dist.all_reduce(p.grad, group=group, async_op=True) for p in parameters if p.grad is not None]:
        if work is not None:  # None: this rank is not in the group
            work.wait()


def begin_with_zeros(parameters: Iterable[torch.Tensor]) -> None:
    """Let DDP, when it makes its buckets next, make gradients of zeros that are views of them.

    It copies the gradients that it finds into new buckets and puts the views in their place; these here are a single zero,
    seen as many, into which nothing can be added. Only for parameters that have such a view, which those with sparse gradients and
    those that DDP is told to ignore have not, and that get a gradient in each window: an optimizer leaves alone what has none,
    and moves what has a zero.

    Reference: ``torch/csrc/distributed/c10d/reducer.cpp``: ``initialize_bucket_views``.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(parameter)


class DataParallel(Way):
    """The whole model in every rank, each with its own micro-batches.

    Several micro-batches add up their gradients in DDP's buckets. Without that, those under ``no_sync`` would make gradients beside
    the buckets, 4 bytes a parameter more. What has a zero looks as if it had a gradient, to optimizers and to `Precision.step`, so each
    window finds out which parameters its last backward reached.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._in_buckets: dict[torch.Tensor, str] = {}  # whose gradients are views of the buckets between windows too, and their names
        self._reached: set[int] = set()  # of these, by id: a parameter that held itself would outlive its training
        self._buckets_are_final = False

    def place(self, model: nn.Module) -> nn.Module:
        """The model in DDP's wrapper; its weights are those of rank 0."""
        model = super().place(model)
        _check_model(model)  # lazy parameters have no zeros
        trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
        names = trained if self._adds_up_in_buckets(model) else {}
        begin_with_zeros(names)
        zeros = [p.grad for p in names]
        wrapped = ddp(model if self.recipe.loss_chunks == 1 else _WithLoss(model))
        self._in_buckets = {p: name for (p, name), zero in zip(names.items(), zeros, strict=True) if p.grad is not zero}
        self._forget_others(names)
        for parameter in self._in_buckets:
            parameter.register_post_accumulate_grad_hook(_noting(self._reached))
        return wrapped

    def window(self, model: nn.Module, batches: Iterator[Any], loss: Loss, precision: Precision) -> Window[Any]:
        """See `Way.window`.

        Raises:
            RuntimeError: the last backward reached some parameters and not all.
        """

        def inside(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
            self._reached.clear()
            result: tuple[torch.Tensor, int] = loss(model, batch) if self.recipe.loss_chunks == 1 else model(loss, batch)
            return result

        window = super().window(model, batches, inside, precision)
        self._check_reached()
        return window

    def _check_reached(self) -> None:
        """DDP notices only in the next forward, when the optimizer has moved the parameters with gradients of this rank alone."""
        missing = [name for parameter, name in self._in_buckets.items() if id(parameter) not in self._reached]
        if missing and self._reached:
            raise RuntimeError(
                f"DDP sends gradients when backward has reached every parameter, and the last of this window did not reach {len(missing)} "
                f"of {len(self._in_buckets)}: {listed(missing)}. Freeze them with requires_grad_(False), or let the loss depend on them."
            )
        if missing:  # the loss leads to none of them; the step says so where there is no gradient
            for parameter in self._in_buckets:
                parameter.grad = None

    def new_window(self, model: nn.Module) -> Window[Any]:
        """This rank's part of the window."""
        return RankWindow(self.recipe.accumulation, batches=range(self.recipe.accumulation), model=model)

    def clear(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See `Way.clear`. Zeros for those whose gradients lie in the buckets; `window` has refused those that should have none."""
        if not self._in_buckets:
            super().clear(model, optimizer)
            return
        self._forget_others(model.parameters())
        if self._buckets_are_final:
            optimizer.zero_grad(set_to_none=False)
        else:  # the next forward makes them anew, in the order in which gradients came; real ones would hold the old ones until then
            begin_with_zeros(self._in_buckets)
            self._buckets_are_final = True

    def _forget_others(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter not in self._in_buckets:
                parameter.grad = None

    def _adds_up_in_buckets(self, model: nn.Module) -> bool:
        """Not one micro-batch alone, whose gradients go there one by one; nor 16-bit parameters, which add up in fp32."""
        return self.recipe.accumulation > 1 and all(p.dtype.itemsize > 2 for p in model.parameters() if p.requires_grad)


def _noting(reached: set[int]) -> Callable[[torch.Tensor], None]:
    return lambda parameter: reached.add(id(parameter))


class _WithLoss(nn.Module):
    """A model and its loss as one module: a loss in chunks calls other methods than forward, and DDP prepares for its own alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        ignored = [f"model.{name}" for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ())]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)

    def forward(self, loss: Loss, batch: Any) -> tuple[torch.Tensor, int]:
        return loss(self.model, batch)
