"""Numerical precision: autocast, pure bf16, TF32 and the dynamic loss scale, behind one object a training loop calls."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vramlab.tensors import map_tensors

_AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
_TF32 = {"fp32": "ieee", "tf32": "tf32"}
MODES = ("fp32", "tf32", "amp-fp16", "amp-bf16", "bf16")


class Precision:
    """One precision mode of a training loop.

        precision = Precision("amp-fp16")
        model = precision.prepare(model)
        with precision.autocast(device):
            loss = ...
        precision.backward(loss)
        precision.step(optimizer, clip_norm=1.0)

    Args:
        mode: fp32 (also no TF32 in convolutions, which torch has on by itself); tf32: fp32 numbers, products on tensor
            cores with 10 bits of mantissa; amp-bf16 and amp-fp16: products in 2 bytes by autocast, parameters stay
            fp32; bf16: parameters, gradients, optimizer state and activations in 2 bytes.
        loss_scale, growth_factor, backoff_factor, growth_interval: of amp-fp16: the first scale of the loss, by what
            it grows after so many good steps, and by what it shrinks after a step with an infinite gradient, which is
            skipped.

    Raises:
        ValueError: an unknown mode; from `prepare` and `autocast` too, see there.

    Reference: Micikevicius et al. 2018, Mixed Precision Training; ``torch/amp/grad_scaler.py``.
    """

    def __init__(
        self,
        mode: str,
        *,
        loss_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"Precision is one of {', '.join(map(repr, MODES))}, got {mode!r}.")
        self.mode = mode
        self.skipped_steps = 0
        self._options: dict[str, Any] = {"init_scale": loss_scale, "growth_factor": growth_factor}
        self._options |= {"backoff_factor": backoff_factor, "growth_interval": growth_interval}
        self._scaler: torch.amp.GradScaler | None = None
        self._loaded: dict[str, Any] = {}
        self._loss: torch.Tensor | None = None  # the sum of those that went backward in this window

    @property
    def scale(self) -> float:
        """What amp-fp16 multiplies the loss with now; 1 in the other modes. Reading it waits for the device."""
        if self.mode != "amp-fp16":
            return 1.0
        return self._scaler.get_scale() if self._scaler else float(self._loaded.get("scale", self._options["init_scale"]))

    def prepare(self, model: nn.Module) -> nn.Module:
        """Bring the model's parameters to this precision, in place (only bf16 changes them), and return it.

        Raises:
            ValueError: trained parameters that are 16-bit already in another mode than bf16, by name: what is called fp32 would
                be none, and the loss scaler cannot unscale fp16 gradients.
        """
        if self.mode == "bf16":
            return model.to(torch.bfloat16)
        half = [name for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point() and p.dtype.itemsize == 2]
        if half:
            shown = ", ".join(half[:5]) + (f" and {len(half) - 5} more" if len(half) > 5 else "")
            raise ValueError(
                f"{self.mode} trains fp32 parameters, and these have 16 bits: {shown}. Build the model in fp32, call .float() and not "
                ".half(), or set precision 'bf16'."
            )
        return model

    def inputs(self, batch: Any) -> Any:
        """The batch with its floating-point tensors in the type the model takes; only bf16 changes them, targets too."""
        if self.mode != "bf16":
            return batch
        return map_tensors(lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, batch)

    @contextmanager
    def autocast(self, device: torch.device | str) -> Iterator[None]:
        """The context for forward and loss; backward runs outside it.

        Raises:
            ValueError: the card has no bf16 arithmetic, or torch has no such autocast for the device.
        """
        device = torch.device(device)
        _refuse_emulated_bf16(self.mode, device)
        dtype = _AUTOCAST.get(self.mode)
        if dtype is None:
            with self._tf32(device):
                yield
            return
        known = torch.amp.is_autocast_available(device.type)
        with torch.autocast(device.type, dtype=dtype) if known else nullcontext():
            # torch only warns when it cannot do what it was asked for, and then computes in fp32.
            if not known or not torch.is_autocast_enabled(device.type) or torch.get_autocast_dtype(device.type) != dtype:
                raise ValueError(f"torch has no autocast to {dtype} on {device.type}; use precision 'fp32' or 'bf16'.")
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``, in amp-fp16 multiplied by the loss scale so that small gradients do not become 0."""
        with self._tf32(loss.device):
            self.scaled(loss).backward()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as `backward` takes it, for code that calls backward itself, such as a pipeline's schedule; counted as if it had."""
        scaler = self._scaler_on(loss.device)
        # Infinite or NaN if any of them is.
        self._loss = loss.detach().float() if self._loss is None else self._loss + loss.detach()
        return scaler.scale(loss) if scaler else loss

    def step(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        clip_norm: float | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        copies: Collection[torch.Tensor] = (),
    ) -> bool:
        """Unscale, clip the gradient's norm if asked to, and step, once a window.

        Args:
            optimizer: one, or all those of the window: the loss scale is brought up to date once for all. One that
                finds an infinite gradient is skipped alone.
            clip_norm: of all gradients of one optimizer together.
            group: ranks that hold different parameters of one model, such as the stages of a pipeline: the norm is that of all their
                gradients, and an infinite one in any of them lets all skip the step. Gradients that are DTensors know their
                ranks; their norm is taken as it is.
            copies: parameters that another rank of the group holds too, and counts in the norm.

        Returns:
            False if any optimizer was skipped for an infinite gradient, or nothing went backward since the last step.

        Raises:
            RuntimeError: backward has run, and no optimizer has a gradient, or one has, and backward did not run here;
                clipping with a step in backward.
            ValueError: amp-fp16 with fp16 parameters.
        """
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if self._loss is None:
            if any(map(_has_gradients, optimizers)):
                raise RuntimeError(
                    "The optimizer has gradients, and nothing went backward here since the last step: call precision.backward(loss) "
                    "instead of loss.backward(), zero_grad() after each step, and step() once a window with a list of all optimizers. "
                    "The zeros of zero_grad(set_to_none=False) are gradients too: with them, call step() only after a backward."
                )
            return False
        loss, self._loss = self._loss, None
        ready = [o for o in optimizers if _has_gradients(o) or getattr(o, "steps_in_backward", False)]
        if not ready:
            raise RuntimeError(
                "backward() has run and no parameter of the optimizer has a gradient: they are frozen, or not those of the model "
                "(moved or replaced after the optimizer was built), or the loss does not lead back to them."
            )
        scaler = self._scaler_on(loss.device)
        if clip_norm is not None and any(getattr(o, "steps_in_backward", False) for o in ready):
            raise RuntimeError(
                "Clipping needs all gradients at once, and an optimizer that steps in backward has used them up, "
                f"got clip_norm={clip_norm}; leave it out, or use an ordinary optimizer."
            )
        try:
            for each in ready:
                if scaler and (clip_norm is not None or group is not None):
                    scaler.unscale_(each)  # the norm of scaled gradients would be too large by the scale
                if scaler and group is not None:
                    _share_infinities(scaler, each, group)
                if clip_norm is not None:
                    _clip([p for part in each.param_groups for p in part["params"]], clip_norm, group, copies)
                if scaler:
                    scaler.step(each)
                else:
                    each.step()
        except BaseException:
            if scaler:  # it would refuse to unscale these optimizers again
                self._scaler, self._loaded = None, scaler.state_dict()
            raise
        return self._update(scaler, loss) if scaler else True

    def _update(self, scaler: torch.amp.GradScaler, loss: torch.Tensor) -> bool:
        before = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < before
        self.skipped_steps += skipped
        if not torch.isfinite(loss):
            warnings.warn(
                f"The loss itself is {loss.item()}: the forward pass left fp16's range (65504), which no loss scale mends. Use amp-bf16.",
                stacklevel=3,
            )
        return not skipped

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its counters; empty in the other modes, and before the first backward if none was loaded."""
        return self._scaler.state_dict() if self._scaler else dict(self._loaded)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the loss scale that `state_dict` gave; an empty state, or another mode, changes nothing."""
        if state and self.mode == "amp-fp16":
            self._loaded = dict(state)
            if self._scaler:
                self._scaler.load_state_dict(self._loaded)

    def _scaler_on(self, device: torch.device) -> torch.amp.GradScaler | None:
        if self.mode == "amp-fp16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(device.type, **self._options)
            self.load_state_dict(self._loaded)
        return self._scaler

    @contextmanager
    def _tf32(self, device: torch.device) -> Iterator[None]:
        """Set, and afterwards set back, how a card multiplies fp32 numbers; the other modes leave it as it is."""
        if self.mode not in _TF32 or device.type != "cuda":
            yield
            return
        with fp32_precision(_TF32[self.mode]):
            yield


@contextmanager
def fp32_precision(precision: str) -> Iterator[None]:
    """Inside, CUDA's matrix products, convolutions and recurrent layers on fp32 numbers use "ieee" or "tf32".

    Set with the API that torch has since 2.9 alone, so ``allow_tf32`` cannot be read inside, nor
    ``torch.backends.cudnn.flags`` used: torch refuses a mixture. Afterwards all settings are what they were, also in what
    they inherit later.
    """
    backends: Any = torch.backends
    changed: list[tuple[Any, str]] = []
    try:
        # First what is above the others, also above products. Those below follow it, unless they were set themselves, or
        # in releases where it did not reach them (pytorch issue 179445). Convolutions start with a default that nothing
        # brings back once they are set, so they are left alone if they follow.
        for setting in (backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            if setting.fp32_precision != precision:
                changed.append((setting, setting.fp32_precision))
                setting.fp32_precision = precision
        yield
    finally:
        for setting, old in changed:
            inherited = setting is backends.cudnn and old == backends.fp32_precision
            setting.fp32_precision = "none" if inherited else old


def _clip(parameters: Sequence[torch.Tensor], clip_norm: float, group: dist.ProcessGroup | None, copies: Collection[torch.Tensor]) -> None:
    """Scale the gradients so that their norm, over all ranks of the group, is at most ``clip_norm``."""
    if group is None or any(hasattr(p.grad, "placements") for p in parameters):  # DTensors; importing them to ask takes half a second
        nn.utils.clip_grad_norm_(parameters, clip_norm)
        return
    known = {id(p) for p in copies}
    gradients = [p.grad for p in parameters if p.grad is not None]
    mine = [p.grad for p in parameters if p.grad is not None and id(p) not in known]
    square = nn.utils.get_total_norm(mine).to(gradients[0].device, torch.float64).square()
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(parameters, clip_norm, square.sqrt().float())


def _share_infinities(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """What one rank's gradients hold, all ranks know: else some would step and others not, and their loss scales part."""
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _refuse_emulated_bf16(mode: str, device: torch.device) -> None:
    # Of a virtual card too, whose module answers as torch.cuda does; others count capabilities differently.
    if "bf16" not in mode or device.type not in ("cuda", torch._C._get_privateuse1_backend_name()):
        return
    ask = getattr(getattr(torch, device.type, None), "get_device_capability", None)
    found = ask(device) if ask is not None else None
    if isinstance(found, tuple) and found < (8, 0):
        has = f"{device} has {found[0]}.{found[1]}"
        raise ValueError(f"bf16 needs a card of compute capability 8.0 (Ampere), and {has}. Use precision 'amp-fp16'.")
