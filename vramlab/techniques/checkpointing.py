"""Activation checkpointing: keep the inputs of a model's blocks, compute the rest a second time in backward."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vramlab.tensors import storages_of, tensors_in

POLICIES = ("all", "selective")


def checkpoint_blocks(
    model: nn.Module,
    every: int = 1,
    policy: str = "all",
    *,
    blocks: type[nn.Module] | Callable[[nn.Module], bool] | None = None,
    debug: bool = False,
) -> CheckpointHandle:
    """Checkpoint every k-th repeated block of a model: same outputs and gradients, fewer bytes, one more forward.

    Dropout draws the same masks in the second pass, BatchNorm's running statistics are updated once, and models of the
    transformers library keep no cache for generation, which the second pass would fill again. Known limits: other things
    that a block counts or changes in forward are changed twice; ``debug`` finds those that change its result. What goes to
    ``saved_tensors_hooks`` inside a block, and what hooks on its modules store, stays in memory.

    To compile, checkpoint first: ``checkpoint_blocks(model)``, then ``torch.compile(model)``.

    Args:
        model: changed in place; ``handle.remove()`` changes it back.
        every: checkpoint the 1st, (1 + every)-th, (1 + 2 every)-th... block.
        policy: all: keep a block's inputs alone; selective: keep what matrix products, convolutions and attention gave,
            and recompute the cheap rest.
        blocks: the class of the blocks, or a function that says of a module whether it is one. None: see `find_blocks`.
        debug: compare every module's output in the second pass with the first, and name the first that differs. Keeps
            copies of all outputs.

    Returns:
        A handle with ``remove()``, ``explain()`` and the names of the ``blocks`` that are checkpointed; as a context
        manager it is removed at the end, and says which block a failing second pass was in.

    Raises:
        ValueError: ``every`` below 1, no such policy, no such block in the model, a block that is checkpointed already.
        RuntimeError: the device does not draw the same random numbers again. From backward with ``debug``: a module is not
            the same function in the second pass.

    Reference: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost; Korthikanti et al. 2022 (selective);
    ``torch/utils/checkpoint.py``.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every is a whole number of at least 1, got {every!r}; 2 checkpoints every second block.")
    if policy not in POLICIES:
        raise ValueError(f"A policy is 'all' or 'selective', got {policy!r}.")
    found = find_blocks(model, blocks)
    # A DTensor may hold a fake one.
    real = {p.device for p in model.parameters() if not p.is_meta and not isinstance(getattr(p, "_local_tensor", p), FakeTensor)}
    for device in real:
        if not _replays_random_numbers(device):
            raise RuntimeError(
                f"Checkpointing draws random numbers twice, and {device} drew others the second time: dropout would give wrong gradients "
                "in silence. Train there without checkpointing, or update torch."
            )
    return CheckpointHandle(model, dict(list(found.items())[::every]), policy, debug)


def find_blocks(model: nn.Module, kind: type[nn.Module] | Callable[[nn.Module], bool] | None = None) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, in order.

    Args:
        model: any module.
        kind: their class, or a function that says whether a module is one. None: look at each ``ModuleList``,
            ``ModuleDict`` or ``Sequential`` that holds modules of one class alone; the blocks' class is that of the
            list with the most parameters (of a mixture of experts the layers, not the experts in them), and the blocks
            are what all such lists hold (a ResNet's stages, say).

    Raises:
        ValueError: none found.
    """
    if kind is not None:
        chosen = (lambda m: isinstance(m, kind)) if isinstance(kind, type) else kind
        found = {name: module for name, module in model.named_modules() if chosen(module)}
        if not found:
            what = f"block of class {kind.__name__}" if isinstance(kind, type) else f"module of which blocks={kind!r} is true"
            raise ValueError(f"{type(model).__name__} has no {what}; name the class of one of its modules.")
        return found

    lists = [(module, blocks) for module in model.modules() if (blocks := _held_of_one_class(module))]
    # Lists of such lists are stages, and a list without a forward is never called, so never checkpointed.
    lists = [(m, blocks) for m, blocks in lists if not all(_held_of_one_class(b) or type(b).forward is nn.Module.forward for b in blocks)]
    # A model of one layer keeps it in a list too; a Sequential of one module is only a wrapper.
    repeated = [b for _, b in lists if len(b) > 1] or [b for module, b in lists if isinstance(module, nn.ModuleList)]
    if not repeated:
        raise ValueError(
            f"Checkpointing needs repeated blocks: {type(model).__name__} has no ModuleList or Sequential of one class. "
            "Name their class: checkpoint_blocks(model, blocks=MyBlock)."
        )
    kind = type(max(repeated, key=_size)[0])
    ids = {id(block) for _, blocks in lists for block in blocks if type(block) is kind}
    found = {name: module for name, module in model.named_modules() if id(module) in ids}
    # Of blocks in blocks, such as a Sequential of Sequentials, the inner ones.
    return {name: module for name, module in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def _held_of_one_class(module: nn.Module) -> list[nn.Module]:
    """What a list of modules holds, if that is of one class; else nothing."""
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return []
    held = list(module.values()) if isinstance(module, nn.ModuleDict) else list(module)
    return held if len({type(block) for block in held}) == 1 else []


@functools.cache
def _replays_random_numbers(device: torch.device) -> bool:
    """Whether dropout has the same mask in the second pass. Not on every device that torch knows (pytorch pull 194478)."""
    # Not an operator of the code around, and nothing that a recorder should see.
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # others cannot always be forked
            x = torch.ones(64, device=device, requires_grad=True)
            y = checkpoint(F.dropout, x, use_reentrant=False)
            (mask,) = torch.autograd.grad(y.sum(), x)
            return torch.equal(y.detach(), mask)


def _size(modules: list[nn.Module]) -> tuple[int, int]:
    return sum(p.numel() for module in modules for p in module.parameters()), len(modules)


class CheckpointHandle:
    """Blocks whose forward is checkpointed until `remove` is called, or until the ``with`` block ends that it is used in."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], policy: str, debug: bool) -> None:
        twice = [name for name, block in blocks.items() if isinstance(vars(block).get("forward"), _CheckpointedForward)]
        if twice:
            raise ValueError(f"A block is checkpointed once, and {', '.join(twice)} already is; call remove() of that handle first.")
        self.blocks = list(blocks)
        self._policy = policy
        self._modules = list(blocks.values())
        self._own = [vars(block).get("forward") for block in self._modules]
        self._forwards = [_CheckpointedForward(block, name, policy, debug) for name, block in blocks.items()]
        for block, forward in zip(self._modules, self._forwards, strict=True):
            block.forward = forward
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        self._caching = [config for config in configs if getattr(config, "use_cache", None) is True]
        for config in self._caching:
            config.use_cache = False

    def explain(self) -> str:
        """What the checkpoints did until now, and why the peak may not have fallen."""
        calls, skipped, again, kept = (sum(getattr(f, n) for f in self._forwards) for n in ("calls", "skipped", "recomputed", "kept"))
        blocks = f"{len(self.blocks)} block{'s' * (len(self.blocks) != 1)}"
        said = f"{blocks} checkpointed, called {calls} times, recomputed {again} times"
        if self._policy == "selective":
            said += f", {kept} results of products and attention kept"
        if not calls:
            why = f"all {skipped} calls were under no_grad" if skipped else "the model does not call them"
        elif not again:
            why = "backward has not run, or nothing in the blocks and their inputs requires grad"
        elif sum(f.most_waiting for f in self._forwards) > 1:
            return f"{said}. If the peak did not fall, it stands elsewhere: look at trace.peak_phase and trace.breakdown()."
        else:
            return (
                f"{said}. At its backward everything in a block is alive, so one block saves nothing of its own peak: checkpoint "
                "smaller parts."
            )
        return f"{said}. Nothing was saved: {why}."

    def remove(self) -> None:
        """Give the blocks their own forward back."""
        for block, own in zip(self._modules, self._own, strict=True):
            if own is None:
                vars(block).pop("forward", None)
            else:
                block.forward = own
        for config in self._caching:
            config.use_cache = True
        self._modules, self._own, self._caching = [], [], []

    def __enter__(self) -> CheckpointHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointError):
            last = max(self._forwards, key=lambda forward: forward.last_recomputed)  # a block raises this after its second pass
            error.add_note(_other_path(last.name))
        self.remove()


def _other_path(block: str) -> str:
    return (
        f"This was block {block!r}. In its second pass it took another path: it counts its calls, fills a cache, reads something that has "
        "changed, or autocast was on in one pass only. checkpoint_blocks(..., debug=True) names the module."
    )


class _CheckpointedForward:
    """A block's forward, checkpointed. An object and no closure, so that a copied model calls the copy's own blocks."""

    _clock = 0

    def __init__(self, block: nn.Module, name: str, policy: str, debug: bool) -> None:
        self.name = name
        self.calls = self.skipped = self.recomputed = self.last_recomputed = self.kept = 0
        self.waiting = self.most_waiting = 0  # calls whose backward has not begun: what a weight-shared block saves on
        self.in_place = ""  # the operator that changes what is kept
        self._block, self._policy, self._debug = block, policy, debug
        self.__wrapped__ = block.forward  # the name under which inspect finds the arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.skipped += 1
            return self.__wrapped__(*args, **kwargs)
        self.calls += 1
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        comparison = _Comparison(self._block, self.name) if self._debug else None
        # Each tensor by itself: so autograd keeps it and notices when it is changed, and the second pass gets lists and dictionaries
        # as they were, whatever the block or the caller does to them. A dataclass is one leaf, so a parameter says on which device
        # the random state is.
        leaves, structure = tree_flatten((args, kwargs))
        out = checkpoint(
            partial(self._call, comparison, structure, [(args, kwargs)]),
            next(self._block.parameters(), None),
            *leaves,
            use_reentrant=False,
            context_fn=partial(self._contexts, comparison),
            early_stop=comparison is None,  # to compare what the block itself gives, it must run to its end
        )
        if self._policy == "selective" and not self.kept and self.calls == 1:
            warnings.warn(
                f"Selective checkpointing keeps products and attention, and {self.name!r} has none: all is recomputed.", stacklevel=2
            )
        return out

    def _call(self, comparison: _Comparison | None, structure: Any, first: list[Any], _: Any, *leaves: Any) -> Any:
        # The first pass works on the caller's own containers, and lets go of them.
        args, kwargs = first.pop() if first else tree_unflatten(leaves, structure)
        out = self.__wrapped__(*args, **kwargs)
        if comparison:
            comparison.compare(self._block, args, out)
        return out

    def _contexts(self, comparison: _Comparison | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first: list[Any] = []
        second: list[Any] = [_FrozenStatistics(self._block), _Counted(self)]
        if self._policy == "selective":
            keeping = create_selective_checkpoint_contexts(partial(self._keep, set()))
            first.append(keeping[0])
            second.append(keeping[1])
        if comparison:
            first.append(comparison)
            second.append(comparison)
        return _All(first) if first else nullcontext(), _All(second)

    def _keep(self, kept: set[int], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().removeprefix("aten::").split(".")[0]
        if name in KEPT:
            self.kept += 1
            made = getattr(context, "op_output", None)  # torch 2.11 asks before it is there: then only torch notices a change in place
            kept.update(storage._cdata for tensor in tensors_in(made) for storage in storages_of(tensor))
            return CheckpointPolicy.MUST_SAVE
        if name.endswith("_") and any(storage._cdata in kept for tensor in tensors_in(args[:1]) for storage in storages_of(tensor)):
            self.in_place = name
        return CheckpointPolicy.PREFER_RECOMPUTE


KEPT = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_grouped_mm", "linear", "mkldnn_linear", "convolution"}
KEPT |= {"_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
KEPT |= {"flex_attention", "_flash_attention_forward", "_efficient_attention_forward"}
KEPT |= {
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
        "attention_math",
        "attention_math_for_mps",
    )
}
"""Operators whose results selective checkpointing keeps: those that cost the most to compute again for their bytes."""


class _All:
    """Several contexts as one that can be entered again: a kept graph is recomputed once for each backward."""

    def __init__(self, contexts: list[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


class _Counted:
    """Notes that a block is recomputed, and which was the last."""

    def __init__(self, forward: _CheckpointedForward) -> None:
        self._forward = forward

    def __enter__(self) -> None:
        _CheckpointedForward._clock += 1
        self._forward.recomputed += 1
        self._forward.waiting = 0
        self._forward.last_recomputed = _CheckpointedForward._clock

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # What selective checkpointing raises says neither where nor by what.
        if error is not None and "has been mutated" in str(error):
            error.add_note(
                f"Block {self._forward.name!r} changes a result in place that selective checkpointing keeps, with "
                f"{self._forward.in_place or 'some operator'}. Use its form without the underscore (inplace=False), or policy='all'."
            )
        elif error is not None and _UNKNOWN in str(error):
            error.add_note(_other_path(self._forward.name))


_UNKNOWN = "encountered during backward but not found in storage"


class _Comparison:
    """The outputs of a block's modules in the first pass, and whether the second gives the same."""

    def __init__(self, block: nn.Module, name: str) -> None:
        self._block = block
        self._inner = [module for inner, module in block.named_modules() if inner]
        self._names = {module: f"{name}.{inner}" if inner else name for inner, module in block.named_modules()}
        self._first: list[list[torch.Tensor]] = []
        self._passes = 0

    def __enter__(self) -> None:
        self._passes += 1
        self._position = 0
        self._running = [self._block]
        self._handles = [module.register_forward_pre_hook(self._begin) for module in self._inner]
        self._handles += [module.register_forward_hook(self.compare) for module in self._inner]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for handle in self._handles:
            handle.remove()
        if error is not None and _UNKNOWN in str(error):
            raise self._impure(self._running[-1]) from error

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def compare(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook of the modules in the block; called for the block itself, whose own hooks run once."""
        if dataclasses.is_dataclass(output):
            output = [getattr(output, field.name) for field in dataclasses.fields(output)]
        self._running.pop()
        with torch._C._DisableTorchDispatch():  # looking is no operator of the block: selective checkpointing would replay it
            found = [tensor.detach() for tensor in tensors_in(output)]
            if self._passes == 1:
                self._first.append([tensor.clone() for tensor in found])
                return
            expected = self._first[self._position] if self._position < len(self._first) else []
            self._position += 1
            same = len(found) == len(expected) and all(map(_equal, found, expected))
        if not same:
            raise self._impure(module)

    def _impure(self, module: nn.Module) -> RuntimeError:
        return RuntimeError(
            f"Checkpointing computes a block twice, and {self._names[module]!r} gave something else the second time: it is no pure "
            "function of its inputs and parameters. Take what it counts, caches or draws out of the block, or leave the block out."
        )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


class _FrozenStatistics:
    """While a block is computed again, its norms with running statistics do not count the batch twice.

    Entered once for each backward through the block, of which a kept graph allows several.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __enter__(self) -> None:
        norms = [m for m in self._block.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats]
        self._before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
        for norm in norms:
            norm.momentum = 0.0  # running = 1 * running + 0 * batch
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked = norm.num_batches_tracked.clone()

    def __exit__(self, *error: object) -> None:
        for norm, momentum, count in self._before:
            norm.momentum, norm.num_batches_tracked = momentum, count
