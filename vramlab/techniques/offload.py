"""Offload: keep activations, or the optimizer and its state, in host memory while the device does not need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class offload_activations(saved_tensors_hooks):  # noqa: N801  a context manager, named like torch's own
    """Inside this context what autograd saves for backward goes to host memory, and comes back when backward needs it.

        with offload_activations(model):
            loss = model(batch).mean()
        loss.backward()

    Pinned memory on CUDA, so that copies need no detour. Around checkpointed blocks it moves what they keep: their
    inputs. A tensor that autograd saves twice is moved twice. On the CPU everything is in host memory already and
    nothing is moved. Inside `torch.compile`d code hooks are not called.

    Args:
        model: its parameters stay where they are, also where autograd saves views of them.
        min_bytes: smaller tensors stay on the device: moving them costs more than it saves.

    Reference: ``torch.autograd.graph.save_on_cpu``; Ren et al. 2021, ZeRO-Offload.
    """

    def __init__(self, model: nn.Module, min_bytes: int = 1 << 20) -> None:
        self._model, self._min_bytes = model, min_bytes
        self.moved_bytes = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not _on_device(tensor) or tensor.nbytes < self._min_bytes or tensor.layout is not torch.strided or self._is_weight(tensor):
            return tensor
        self.moved_bytes += tensor.nbytes
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        # Both copies are in the order of the device's stream, so neither needs to be waited for.
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(p.untyped_storage().data_ptr() == storage for p in self._model.parameters())


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer that lives in host memory: gradients go there, the step runs on the CPU, parameters come back.

    The device holds parameters and gradients alone; the host holds fp32 parameters, their gradients during the step,
    and the state. bf16 parameters so get an fp32 original for nothing. Clipping, GradScaler and schedulers use it as
    any other optimizer.

    Args:
        params: parameters or groups, on any device.
        optimizer_factory: makes the optimizer of the copies in host memory, given groups.

    Reference: Ren et al. 2021, ZeRO-Offload.
    """

    def __init__(self, params: Any, optimizer_factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        super().__init__(params, {})
        self._host = [[_host_copy(p) for p in group["params"]] for group in self.param_groups]
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        self._inner = optimizer_factory([{"params": host, **o} for host, o in zip(self._host, options, strict=True)])
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({k: v for k, v in inner.items() if k != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Gradients to the host, one step there, parameters back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner, host in zip(self.param_groups, self._inner.param_groups, self._host, strict=True):
            inner.update({k: v for k, v in group.items() if k != "params"})  # a scheduler sets the learning rate here
            for p, h in zip(group["params"], host, strict=True):
                h.grad = p.grad.to(h.device, h.dtype, copy=True) if p.grad is not None else None
        self._inner.step()
        for group, host in zip(self.param_groups, self._host, strict=True):
            for p, h in zip(group["params"], host, strict=True):
                if h.grad is not None:
                    p.copy_(h)
                    h.grad = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer in host memory, and its fp32 parameters."""
        return {"optimizer": self._inner.state_dict(), "parameters": [[h.detach() for h in host] for host in self._host]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, parameters included."""
        self._inner.load_state_dict(state_dict["optimizer"])
        with torch.no_grad():
            for group, host, saved in zip(self.param_groups, self._host, state_dict["parameters"], strict=True):
                for p, h, value in zip(group["params"], host, saved, strict=True):
                    p.copy_(h.copy_(value))
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({k: v for k, v in inner.items() if k != "params"})


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _host_copy(p: torch.Tensor) -> torch.Tensor:
    return p.detach().to("cpu", torch.float32, copy=True).requires_grad_(True)
