"""Offload: keep activations, or the optimizer and its state, in host memory while the device does not need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vramlab.tensors import consists_of_tensors


class offload_activations(saved_tensors_hooks):  # noqa: N801  a context manager, named like torch's own
    """Inside this context what autograd saves for backward goes to host memory, and comes back when backward needs it.

        with offload_activations(model):
            loss = model(batch).mean()
        loss.backward()

    Pinned memory on CUDA, so that copies need no detour. Around checkpointed blocks it moves what they keep: the tensors
    they get by position. A tensor that autograd saves twice is moved twice, and a view brings no more than itself. On the
    CPU everything is in host memory already and nothing is moved. Inside `torch.compile`d code hooks are not called, and
    selective checkpointing keeps its results where hooks do not see them.

    What is moved is the value at the time of saving: gradients are right also if the tensor is changed in place later.
    What stays is guarded as torch guards it.

    Args:
        model: its parameters and buffers stay where they are, also where autograd saves views of them.
        min_bytes: smaller tensors stay on the device: moving them costs more than it saves.

    Raises:
        RuntimeError: from backward: a tensor that stayed was changed in place after it was saved.

    Reference: ``torch.autograd.graph.save_on_cpu``; Ren et al. 2021, ZeRO-Offload.
    """

    def __init__(self, model: nn.Module, min_bytes: int = 1 << 20) -> None:
        self._model, self._min_bytes = model, min_bytes
        self._weights: set[int] = set()
        self.moved_bytes = 0
        super().__init__(self._pack, _unpack)

    def __enter__(self) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._weights = {t.untyped_storage()._cdata for t in tensors if _is_plain(t)}
        super().__enter__()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._moves(tensor):
            # Torch no longer guards a tensor that goes through hooks. Detached, for an output that is held by its own node is
            # never released.
            return tensor.detach(), tensor._version
        self.moved_bytes += tensor.nbytes
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")  # with its strides
        # Both copies are in the order of the device's stream, so neither needs to be waited for.
        return host.copy_(tensor, non_blocking=True), tensor.device

    def _moves(self, tensor: torch.Tensor) -> bool:
        if not _is_plain(tensor) or not _on_device(tensor) or tensor.nbytes < self._min_bytes:
            return False
        storage = tensor.untyped_storage()
        return storage._cdata not in self._weights and tensor.nbytes <= storage.nbytes()  # an expanded one would grow


def _unpack(packed: Any) -> torch.Tensor:
    tensor, origin = packed
    if isinstance(origin, torch.device):
        return tensor.to(origin, non_blocking=True)
    if tensor._version != origin:
        raise RuntimeError(
            f"Backward needs a tensor of shape {tuple(tensor.shape)} as it was when autograd saved it, at version {origin}, and it was "
            f"changed in place since, to version {tensor._version}. Change a copy of it, or change it after backward."
        )
    return tensor


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer that lives in host memory: gradients go there, the step runs on the CPU, parameters come back.

    The device holds parameters and gradients alone; the host holds fp32 parameters, their gradients during the step,
    and the state. bf16 parameters so get an fp32 original for nothing. Clipping, GradScaler and schedulers use it as
    any other optimizer.

    Parameters that somebody else changes, by loading the model say, are taken over at the next step. A change through
    ``p.data`` alone is the exception: torch does not count it, and the next step undoes it.

    Args:
        params: parameters or groups, on any device.
        optimizer_factory: makes the optimizer of the copies in host memory, given groups.

    Raises:
        ValueError: the factory makes something else than an optimizer of the groups it is given. From
            ``load_state_dict``: not a state of this kind, or of other parameters.
        TypeError: it is copied or pickled.

    Reference: Ren et al. 2021, ZeRO-Offload.
    """

    def __init__(self, params: Any, optimizer_factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        self._host: dict[torch.Tensor, torch.Tensor] = {}
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}
        super().__init__(params, {})
        inner = optimizer_factory([self._host_group(group) for group in self.param_groups])
        groups = inner.param_groups if isinstance(inner, torch.optim.Optimizer) else []
        if [list(map(id, g["params"])) for g in groups] != [[id(self._host[p]) for p in g["params"]] for g in self.param_groups]:
            raise ValueError(
                f"The factory makes an optimizer of the groups it is given, and it made a {type(inner).__name__} of other parameters; "
                "write for example lambda groups: torch.optim.AdamW(groups, lr=1e-3)."
            )
        self._inner = inner
        self.defaults = inner.defaults  # schedulers of momentum look for it here
        self._share_options()

    def _host_group(self, group: dict[str, Any]) -> dict[str, Any]:
        for p in group["params"]:
            self._host[p] = _host_copy(p)
            self._seen[p] = _identity(p)
        return {**_options(group), "params": [self._host[p] for p in group["params"]]}

    def _share_options(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options(inner))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """More parameters, on any device."""
        super().add_param_group(param_group)
        if hasattr(self, "_inner"):  # not from the constructor of torch's class
            self._inner.add_param_group(self._host_group(self.param_groups[-1]))
            self._share_options()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Gradients to the host, one step there, parameters back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_over()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_options(group))  # a scheduler sets the learning rate here
        stepped = [(p, h) for p, h in self._host.items() if p.grad is not None]
        try:
            for p, h in stepped:
                h.grad = p.grad.to(h.device, h.dtype, copy=True)  # type: ignore[union-attr]
            self._inner.step()
        finally:
            for _, h in stepped:
                h.grad = None
        for p, h in stepped:
            self._give_back(p, h)
        return loss

    def _take_over(self) -> None:
        """Into the copies what somebody else wrote into the parameters."""
        for p, h in self._host.items():
            if self._seen[p] != _identity(p):
                now = p.detach().cpu()
                # Where a rounded parameter is still the rounded copy, the copy keeps its digits.
                h.copy_(torch.where(h.to(now.dtype) == now, h, now.to(h.dtype)))
                self._seen[p] = _identity(p)

    def _give_back(self, p: torch.Tensor, h: torch.Tensor) -> None:
        p.copy_(h)
        self._seen[p] = _identity(p)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer in host memory, and its fp32 parameters."""
        self._take_over()
        parameters = [[self._host[p].detach() for p in group["params"]] for group in self.param_groups]
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_options(group))
        return {"optimizer": self._inner.state_dict(), "parameters": parameters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, parameters included.

        Raises:
            ValueError: it is not from an offloaded optimizer, or from one of other parameters.
        """
        if state_dict.keys() != {"optimizer", "parameters"}:
            raise ValueError(
                f"The state of an offloaded optimizer has an optimizer and parameters, and this one has {sorted(map(str, state_dict))}; "
                "load what state_dict() of an OffloadedOptimizer gave."
            )
        expected = [[tuple(p.shape) for p in group["params"]] for group in self.param_groups]
        found = [[tuple(value.shape) for value in group] for group in state_dict["parameters"]]
        if expected != found:
            raise ValueError(
                f"The state has a value for each parameter: its groups have the shapes {found}, these {expected}; "
                "make the optimizer of the same model."
            )
        self._inner.load_state_dict(state_dict["optimizer"])
        for group, values in zip(self.param_groups, state_dict["parameters"], strict=True):
            for p, value in zip(group["params"], values, strict=True):
                self._give_back(p, self._host[p].copy_(value))
        self._share_options()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "An offloaded optimizer is tied to the parameters of its model and cannot be copied; save its state_dict() instead."
        )


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _host_copy(p: torch.Tensor) -> torch.Tensor:
    # float64 and complex numbers keep their digits
    return p.detach().to("cpu", torch.promote_types(p.dtype, torch.float32), copy=True).requires_grad_(True)


def _identity(p: torch.Tensor) -> tuple[int, int]:
    """Differs after each change in place that torch counts, and after other memory was given to the parameter."""
    return p._version, p.data_ptr()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has one storage of its own."""
    return tensor.layout is torch.strided and not consists_of_tensors(type(tensor))
