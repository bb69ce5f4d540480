"""Numerical precision: autocast, pure bf16 and the dynamic loss scale, behind one object a training loop calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from vramlab.tensors import map_tensors

_AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}


class Precision:
    """One precision mode of a training loop.

        precision = Precision("amp-fp16")
        model = precision.prepare(model)
        with precision.autocast(device):
            loss = ...
        precision.backward(loss)
        precision.step(optimizer, clip_norm=1.0)

    Args:
        mode: fp32; amp-bf16 and amp-fp16: products in 2 bytes by autocast, parameters stay fp32; bf16: parameters,
            gradients, optimizer state and activations in 2 bytes.
        loss_scale: first loss scale of amp-fp16, which doubles after ``growth_interval`` good steps and halves after
            a step with an infinite gradient, which is skipped.

    Raises:
        ValueError: an unknown mode.

    Reference: Micikevicius et al. 2018, Mixed Precision Training; ``torch/amp/grad_scaler.py``.
    """

    def __init__(self, mode: str, *, loss_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        if mode not in ("fp32", "bf16", *_AUTOCAST):
            raise ValueError(f"Precision is 'fp32', 'amp-bf16', 'amp-fp16' or 'bf16', got {mode!r}.")
        self.mode = mode
        self.skipped_steps = 0
        self._loss_scale, self._growth_interval = loss_scale, growth_interval
        self._scaler: torch.amp.GradScaler | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Bring the model's parameters to this precision, in place (only bf16 changes them), and return it."""
        return model.to(torch.bfloat16) if self.mode == "bf16" else model

    def inputs(self, batch: Any) -> Any:
        """The batch with its floating-point tensors in the type the model takes; only bf16 changes them."""
        if self.mode != "bf16":
            return batch
        return map_tensors(lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, batch)

    def autocast(self, device: torch.device | str) -> AbstractContextManager[Any]:
        """The context for forward and loss; backward runs outside it."""
        if self.mode not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(torch.device(device).type, dtype=_AUTOCAST[self.mode])

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``, in amp-fp16 multiplied by the loss scale so that small gradients do not become 0."""
        scaler = self._scaler_on(loss.device)
        (scaler.scale(loss) if scaler else loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip_norm: float | None = None) -> bool:
        """Unscale, clip the gradient's norm if asked to, and step.

        Returns:
            False if an infinite gradient made the loss scaler skip this step.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scaler = self._scaler_on(parameters[0].device)
        if scaler and clip_norm is not None:
            scaler.unscale_(optimizer)  # the norm of scaled gradients would be too large by the scale
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        if not scaler:
            optimizer.step()
            return True
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
        self.skipped_steps += skipped
        return not skipped

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its counters; empty in the other modes."""
        return self._scaler.state_dict() if self._scaler else {}

    def _scaler_on(self, device: torch.device) -> torch.amp.GradScaler | None:
        if self.mode == "amp-fp16" and self._scaler is None:
            self._scaler = torch.amp.GradScaler(device.type, init_scale=self._loss_scale, growth_interval=self._growth_interval)
        return self._scaler
