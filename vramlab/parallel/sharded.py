"""Sharding: each rank holds a part of the parameters, gradients and optimizer state, and gathers one block at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as as_forward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from vramlab.devices import is_virtual_device
from vramlab.parallel.data import DataParallel, RankWindow, batch_norm_note, is_sharded, listed
from vramlab.parallel.way import Loss, Way
from vramlab.techniques.accumulation import Window
from vramlab.techniques.checkpointing import find_blocks
from vramlab.techniques.choose import optimizer_of, parameters_of
from vramlab.techniques.in_backward import hooked_parameters, step_in_backward
from vramlab.techniques.precision import Precision

Zero = Literal[2, 3]
Reduce = Literal["each", "last"]
Blocks = type[nn.Module] | Callable[[nn.Module], bool] | None

_sharded_from = WeakTensorKeyDictionary()
"""The plain parameters that shards have taken the place of, to their names; whoever still holds them holds the past."""


# FSDP: parameters, gradients and state


def fsdp(
    model: nn.Module,
    zero: Zero = 3,
    *,
    mesh: DeviceMesh | None = None,
    blocks: Blocks = None,
    apart: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce: Reduce = "each",
    offload: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Shard a model over the ranks with FSDP2, block by block, in place.

        model = vl.parallel.fsdp(MyModel())                      # on the CPU: each block goes to the card when it is sharded
        optimizer = torch.optim.AdamW(model.parameters())        # after sharding
        for window in vl.parallel.windows(loader, k=4, count=..., model=model):
            ...

    Each rank keeps a part of every parameter, of its gradient and of the optimizer's state: see `sharded_bytes`. A block's
    parameters are gathered for its forward and again for its backward; its gradients are averaged over the ranks as
    soon as they are complete. The numbers are those of one process on all the ranks' micro-batches.

    The weights and buffers of the mesh's first rank go to all. Every rank must use the same blocks in each forward, or
    some wait for others in vain. Checkpoint blocks before or after.

    Under autocast autograd keeps a 16-bit copy of each weight from forward to backward, on every rank, unless blocks are
    checkpointed; ``param_dtype`` avoids that, with numbers that are not those of autocast.

    Args:
        model: in its final precision; what is frozen is frozen before.
        zero: 3: each block's parameters are given up between forward and backward; 2: they stay gathered, which saves one of two
            gathers, so only gradients and optimizer state are sharded at the peak.
        mesh: the ranks that share, one dimension; two dimensions: copies of the model (first) and shards (second). None: all ranks.
        blocks: see `find_blocks`.
        apart: what is outside the blocks and as large as one, embeddings and heads say, gets a group of its own. False: the root
            gathers it for the whole of forward and backward, for losses that use such a weight themselves.
        param_dtype: gather and compute in this type while shards, gradients and state keep theirs.
        reduce_dtype: in which gradients are averaged. None: fp32, or what they are if they have more digits.
        reduce: "each": average the gradients of each micro-batch. "last": only the window's last, which saves traffic and keeps the
            gradients of the whole model on every rank until then: `gathered_gradient_bytes`. See `windows`, or call ``model.no_sync()``.
        offload: parameters, gradients and optimizer state are in host memory; the optimizer steps there.
        optimizer: one that exists already, to be told at once whether it is of no use any more.

    Returns:
        The model; its parameters are DTensors.

    Raises:
        RuntimeError: no process group, or one that cannot reach the host's memory, with ``offload``.
        TypeError: no module.
        ValueError: a value out of range, no blocks, no trained parameters, lazy, scalar or shared ones that cannot be grouped,
            a model or part of it that is wrapped or sharded already, an optimizer of parameters that are replaced.

    Reference: Rajbhandari et al. 2020, ZeRO; Zhao et al. 2023, PyTorch FSDP; ``torch/distributed/fsdp/_fully_shard``.
    """
    _check_options(zero, reduce, param_dtype)
    groups = shard_groups(model, blocks, apart=apart)
    if not dist.is_initialized():
        raise RuntimeError("fsdp() needs a process group; call it in a function that vl.parallel.launch(function, ranks=2) runs.")
    mesh = mesh or init_device_mesh(_device_type(model), (dist.get_world_size(),))
    narrow = any((param_dtype or p.dtype).itemsize == 2 for p in model.parameters() if p.requires_grad)
    if reduce == "last" and narrow:
        raise ValueError(
            "reduce='last' adds up gradients of one type, and these have 16 bits, which torch adds up in fp32 only from the second on: "
            "a parameter that only the last micro-batch uses would fail. Set reduce='each', or train fp32 parameters."
        )
    if offload:
        _check_offload(mesh)
    if optimizer is not None:
        _refuse_optimizer(optimizer, {p: name for name, p in model.named_parameters()})
    if not any(mesh.get_coordinate() or ()) and (note := batch_norm_note(model)):
        warnings.warn(note, stacklevel=2)

    ties = _ties(model)
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype or (torch.float32 if narrow else None))
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    _shard(model, groups, zero, mesh=mesh, mp_policy=policy, offload_policy=place)
    _check_ties(model, ties)
    if mesh.size() < dist.get_world_size():
        model.process_group = _group_of(mesh)  # type: ignore[assignment]
    if reduce == "last":
        model.no_sync = MethodType(_no_sync, model)  # type: ignore[assignment]
    return model


def _shard(model: nn.Module, groups: Mapping[str, list[nn.Module]], zero: Zero, *, mesh: DeviceMesh, **policies: Any) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    averages = _averages(mesh)
    for modules in groups.values():
        _start_equal(modules, mesh)
        # No longer than to the next group, or all of the model would be on the card at once.
        plain = {p: names[id(p)] for module in modules for p in module.parameters() if not is_sharded(p)}
        root = modules == [model]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            # The root is needed at once in backward, and torch keeps it if it is not told.
            reshard_after_forward=(None if root else True) if zero == 3 else False,
            **policies,
        )
        _sharded_from.update(plain)
        del plain
        if not averages:
            cast(FSDPModule, modules[0]).set_force_sum_reduction_for_comms(True)  # of this group alone


def _check_options(zero: Any, reduce: Any, param_dtype: Any) -> None:
    if isinstance(zero, bool) or zero not in (2, 3):
        raise ValueError(f"fsdp() does zero=2 and zero=3, got {zero!r}; for zero=1 use vl.parallel.zero1.")
    if reduce not in ("each", "last"):
        raise ValueError(f"reduce is 'each' or 'last', got {reduce!r}; 'each' micro-batch needs less memory.")
    if param_dtype is not None and not (isinstance(param_dtype, torch.dtype) and param_dtype.is_floating_point):
        raise ValueError(f"param_dtype is a floating-point type such as torch.bfloat16, got {param_dtype!r}.")


def _device_type(model: nn.Module) -> str:
    if "nccl" in dist.get_backend_config():
        return "cuda"
    return next(model.parameters()).device.type


def _check_offload(mesh: DeviceMesh) -> None:
    group = mesh.get_group(0)
    if mesh.device_type == "cuda" and "cpu:" not in (config := dist.get_backend_config(group)):
        raise RuntimeError(
            f"offload=True keeps gradients in host memory, where ranks need gloo to take their norm, and this process group has "
            f"{config!r}. Call init_process_group('cpu:gloo,cuda:nccl'), as vl.parallel.launch does."
        )


def shard_groups(model: nn.Module, blocks: Blocks = None, *, apart: bool = True) -> dict[str, list[nn.Module]]:
    """The modules that `fsdp` gathers together, by the name of the first, in the order in which they are sharded; the root is the last.

    Each block is a group. What is outside them is gathered with the root, except modules that hold as many numbers as the
    smallest block, with ``apart``. Modules that share a parameter are one group.

    Raises:
        TypeError: no module.
        ValueError: see `fsdp`.
    """
    _check_model(model)
    try:
        found = find_blocks(model, blocks)
    except ValueError as error:
        raise ValueError(f"Sharding gathers one block at a time. {error} As fsdp(model, blocks=MyBlock).") from None
    groups = {name: [block] for name, block in found.items()}
    smallest = min(_numel(block.parameters()) for block in found.values())
    owners = _owners(model)
    for names in owners.values():
        if len({_block_of(name, found) for name in names}) > 1:
            raise ValueError(
                f"A parameter is gathered with one group, and blocks are groups of their own: {listed(sorted(names))} share one "
                "parameter. Name larger blocks that hold all of them, or untie them."
            )
    taken: set[str] = set()
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not apart or name in taken or _block_of(name, found) is not None or _numel(own) < max(1, smallest):
            continue
        together = list(dict.fromkeys(other for p in own for other in owners[id(p)]))
        modules = [model.get_submodule(other) for other in together]
        if not any(True for module in modules for _ in module.children()):
            groups[name] = modules
            taken.update(together)
    return groups | {"": [model]}


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"fsdp() shards a torch.nn.Module, got {type(model).__name__}; write fsdp(MyModel()).")
    named = list(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            raise ValueError(
                f"A model is shared once, as a whole: here {repr(name) if name else 'all of it'} is "
                f"{'a DistributedDataParallel' if isinstance(module, DistributedDataParallel) else 'sharded'} already; give a new one."
            )
    if lazy := [name for name, p in named if is_lazy(p)]:
        raise ValueError(f"Sharding needs the shapes of all parameters, and these have none yet: {listed(lazy)}. Call the model once.")
    if spread := [name for name, p in named if not p.is_contiguous()]:
        raise ValueError(f"Shards are contiguous, and these parameters are not: {listed(spread)}. Make them so with .contiguous().")
    if scalars := [name for name, p in named if p.dim() == 0]:
        raise ValueError(
            f"Parameters are divided along their first dimension, and these have none: {listed(scalars)}. Give them the shape (1,)."
        )
    if not any(p.requires_grad for _, p in named):
        raise ValueError(
            f"Sharding is for training, and none of this model's {len(named)} parameters requires a gradient. Unfreeze what is trained."
        )
    stepped = [name for name, p in named if p in hooked_parameters and hooked_parameters[p][0]() is not None]
    if stepped:
        raise ValueError(f"Shards replace the parameters, and these step in backward already: {listed(stepped)}. {_REBUILD}")


_REBUILD = "Build the optimizer after fsdp(), from model.parameters()."


def _numel(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Of each parameter the names of the modules that hold it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _block_of(name: str, blocks: Mapping[str, Any]) -> str | None:
    parts = name.split(".")
    return next((head for i in range(len(parts)) if (head := ".".join(parts[: i + 1])) in blocks), None)


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _check_ties(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    for tied in ties:
        if len({id(model.get_parameter(name)) for name in tied}) > 1:
            raise RuntimeError(
                f"{listed(tied)} were one parameter and are several after sharding, so they would drift apart. "
                "This is a fault of vramlab; untie them, and report it please."
            )


@torch.no_grad()
def _start_equal(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Bring what of these modules is not sharded yet to the device, with the values of the mesh's first rank."""
    device = _device(mesh)
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers()) if not is_sharded(t) and not t.is_meta]
    for tensor in dict.fromkeys(tensors):
        if tensor.device != device:
            tensor.data = tensor.to(device)
        for group in reversed(mesh.get_all_groups()):  # first among shards, then from the first copy to the others
            dist.broadcast(tensor.detach(), group=group, group_src=0)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, getattr(torch, mesh.device_type).current_device())


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim > 1:
        raise ValueError(f"A mesh of two dimensions holds all {dist.get_world_size()} ranks, got one of {mesh.size()}; give one dimension.")
    return mesh.get_group()


@contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    """Around forward and backward: gradients stay whole on this rank and are not averaged."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


# gloo's average


_averaging: dict[str, bool] = {}


def _averages(mesh: DeviceMesh) -> bool:
    """Whether the ranks' reduce-scatter averages, which gloo's has not always done: it added up (pytorch issue 162338)."""
    if is_virtual_device(torch.device(mesh.device_type)):
        return True
    return all(_gloo_averages(group, _device(mesh)) for group in mesh.get_all_groups() if dist.get_backend(group) == "gloo")


def _gloo_averages(group: dist.ProcessGroup, device: torch.device) -> bool:
    if group.group_name not in _averaging:
        ranks = dist.get_world_size(group)
        numbers = torch.full((ranks,), dist.get_rank(group) + 1.0, device=device)
        mean = torch.zeros(1, device=device)
        try:
            # The older name warns in releases that have the newer.
            reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            reduce_scatter(mean, numbers, op=dist.ReduceOp.AVG, group=group)
        except (RuntimeError, ValueError):  # older ones refuse it
            mean.fill_(math.nan)
        _averaging[group.group_name] = mean.item() == (ranks + 1) / 2
    return _averaging[group.group_name]


# Optimizers


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their norm, over all of the model, is at most ``max_norm``; sharded or not.

    Returns:
        The norm before, the same number on all ranks. ``clip_grad_norm_`` of shards gives a DTensor, whose ``item()`` can be that of
        this rank's part alone.
    """
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if is_sharded(norm) else norm)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that was built before its model was sharded: it would step parameters that no model has any more.

    Raises:
        ValueError: it holds parameters that shards have taken the place of.
    """
    _refuse_optimizer(optimizer, _sharded_from)


def _refuse_optimizer(optimizer: torch.optim.Optimizer, replaced: Mapping[Any, str]) -> None:
    stale = [replaced[p] for group in optimizer.param_groups for p in group["params"] if p in replaced]
    if stale:
        raise ValueError(
            f"Shards take the place of the model's parameters, and this {type(optimizer).__name__} has the old ones, so its steps would "
            f"change nothing: {listed(stale)}. {_REBUILD}"
        )


def zero1(model: nn.Module, optimizer_factory: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Divide the optimizer of a model in `ddp` over the ranks: each keeps the state of some parameters, steps them, and sends them to all.

        model = vl.parallel.ddp(MyModel().to(device))
        optimizer = vl.parallel.zero1(model, lambda params: torch.optim.AdamW(params, lr=1e-3))

    Parameters and gradients stay whole on every rank. A parameter is not divided, so optimizers that look at a whole
    matrix, such as Adafactor, are right, and the largest parameter is the least that some rank keeps the state of.

    Args:
        model: from `ddp`, whose gradients are the same on all ranks.
        optimizer_factory: makes the optimizer of this rank's part, given groups.

    Returns:
        An optimizer whose groups hold all parameters, so clipping, GradScaler and schedulers use it as any other. Its ``state_dict``
        needs ``consolidate_state_dict()`` on all ranks before.

    Raises:
        TypeError: the model is not from `ddp`.
        ValueError: no parameter is trained.

    Reference: Rajbhandari et al. 2020, ZeRO, P_os; ``torch/distributed/optim/zero_redundancy_optimizer.py``.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"zero1() divides the optimizer of a model whose gradients are equal on all ranks, got a {type(model).__name__}; "
            "wrap it before: model = vl.parallel.ddp(model)."
        )
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch 2.13 scripts other optimizers on the way
        from torch.distributed.optim import ZeroRedundancyOptimizer

    # It calls this with the groups of its part, whatever a class would do.
    make = cast(Any, optimizer_factory)
    return ZeroRedundancyOptimizer(parameters_of(model), make, process_group=model.process_group)


# Bytes


@dataclass(frozen=True)
class ShardedBytes:
    """Bytes on each rank, from shapes alone."""

    parameters: int
    """Shards, padded so that all ranks have as many rows: between steps."""
    gradients: int
    """Shards of the averaged gradients."""
    gathered: int
    """The two largest groups whole: one computes while the next is gathered. All groups for zero=2."""
    reduced: int
    """The largest group's gradients whole, in the type they are averaged in: what the reduce-scatter reads."""


def sharded_bytes(
    groups: Sequence[Sequence[torch.Size]], ranks: int, zero: Zero = 3, *, itemsize: int = 4, reduce_itemsize: int = 4
) -> ShardedBytes:
    """What `fsdp` takes on each rank, by hand: ``ceil(rows / ranks)`` rows of each parameter, groups whole where they are in use.

    A group that holds everything, as when only the root is sharded, is gathered whole: no less than one card needs.

    Args:
        groups: the shapes of the trained parameters of each group of `shard_groups`, each parameter once.
        ranks: how many share.
        zero: see `fsdp`.
        itemsize: bytes of a number of parameters and gradients.
        reduce_itemsize: bytes of a number while gradients are averaged.
    """
    shards = [sum(_shard_numel(shape, ranks) for shape in group) for group in groups]
    whole = sorted((shard * ranks for shard in shards), reverse=True)
    return ShardedBytes(
        parameters=sum(shards) * itemsize,
        gradients=sum(shards) * itemsize,
        gathered=sum(whole[:2] if zero == 3 else whole) * itemsize,
        reduced=max(whole, default=0) * reduce_itemsize,
    )


def _shard_numel(shape: torch.Size, ranks: int) -> int:
    return math.ceil(shape[0] / ranks) * math.prod(shape[1:])


def gathered_gradient_bytes(model: nn.Module) -> int:
    """What ``reduce="last"`` of `fsdp` keeps on every rank between micro-batches: the gradients of the whole model."""
    return sum(p.numel() * p.dtype.itemsize for p in model.parameters() if p.requires_grad)


# For train()


class ZeroOne(DataParallel):
    """The whole model in every rank, and a part of the optimizer."""

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """The recipe's optimizer, divided."""
        return zero1(model, optimizer_of(self.recipe, learning_rate))


class Sharded(Way):
    """A part of parameters, gradients and optimizer state in every rank ("fsdp"), or of gradients and state alone ("zero2")."""

    def place(self, model: nn.Module) -> nn.Module:
        """The model, sharded; each block goes to the device only to be divided."""
        recipe = self.recipe
        model = fsdp(
            model,
            2 if recipe.parallel == "zero2" else 3,
            mesh=init_device_mesh(self.device.type, (recipe.ranks,)),
            apart=recipe.loss_chunks == 1,  # a chunked loss uses the head's weight itself
            offload=recipe.offload == "optimizer",
        )
        # A loss may call other methods than forward, and use weights.
        model.within = _called  # type: ignore[assignment]
        as_forward(model, "within")
        return model

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """The recipe's optimizer of the shards; where they are in host memory, so is what it keeps."""
        make = optimizer_of(self.recipe.with_(offload="none"), learning_rate)
        return step_in_backward(model, make) if self.recipe.optimizer_in_backward else make(parameters_of(model))

    def window(self, model: nn.Module, batches: Iterator[Any], loss: Loss, precision: Precision) -> Window[Any]:
        """See `Way.window`."""

        def gathered(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
            result: tuple[torch.Tensor, int] = model.within(lambda: loss(model, batch))
            return result

        # Autocast's cache would keep a copy of every weight to the end of forward, also of those that are given up by then.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return super().window(model, batches, gathered if self.recipe.loss_chunks > 1 else loss, precision)
        finally:
            torch.set_autocast_cache_enabled(cached)

    def new_window(self, model: nn.Module) -> Window[Any]:
        """This rank's part of the window."""
        return RankWindow(self.recipe.accumulation, batches=range(self.recipe.accumulation), model=model)

    def step(self, precision: Precision, optimizer: torch.optim.Optimizer) -> bool:
        """Clip and step; the norm is that of all ranks' shards."""
        check_optimizer(optimizer)
        return super().step(precision, optimizer)


def _called(function: Callable[[], Any]) -> Any:
    return function()
