"""Optimizer in backward: step each parameter as soon as its gradient is there, and release the gradient at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

hooked_parameters = WeakTensorKeyDictionary()
"""The parameters that step in backward, to a weak reference to what steps them, and its hooks."""


def step_in_backward(model: nn.Module, optimizer_factory: OptimizerFactory) -> StepInBackward:
    """Let ``loss.backward()`` step the optimizer, so that no more than a few gradients are alive at a time.

        optimizer = step_in_backward(model, lambda params: torch.optim.AdamW(params, lr=1e-3))
        loss.backward()       # gradients are used and released on the way
        optimizer.step()      # ends the step; nothing is left to do
        optimizer.zero_grad()

    A parameter that occurs several times in the model is stepped once, when all its contributions are added up.

    Args:
        model: every parameter that has ``requires_grad`` now gets a hook.
        optimizer_factory: makes the optimizer of one parameter, given as a list.

    Returns:
        An optimizer: schedulers set its learning rates, ``state_dict`` is keyed by parameter names, ``remove()`` takes
        the hooks away again.

    Raises:
        ValueError: the model has no parameters to train, they have hooks of this kind already, or the factory makes
            something else than an optimizer of the parameter it is given.
        RuntimeError: from ``backward()``, if a gradient comes a second time before ``step()`` (accumulation), or if what
            is returned here was not kept. From ``step()``, after ``remove()``, with a closure, or with a GradScaler: that is
            noticed only when the parameters have moved by scaled gradients, so load them again.

    Clipping by the norm of all gradients is impossible too: ``clip_grad_norm_`` finds none and does nothing. An
    exception in backward leaves those parameters stepped that it had reached.

    Reference: ``Tensor.register_post_accumulate_grad_hook``; Lv et al. 2023, Full Parameter Fine-tuning for Large
    Language Models with Limited Resources (LOMO).
    """
    return StepInBackward(model, optimizer_factory)


class StepInBackward(torch.optim.Optimizer):
    """One optimizer a parameter behind the face of one optimizer; see `step_in_backward`."""

    steps_in_backward = True  # no gradients are left for step(), and that is right
    _step_supports_amp_scaling = True  # lets a GradScaler call step() without gradients, which refuses it

    def __init__(self, model: nn.Module, optimizer_factory: OptimizerFactory) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError(
                f"A step in backward needs parameters with requires_grad, and {type(model).__name__} has none; "
                "call requires_grad_() on those to train."
            )
        for name, p in named.items():
            owner, handles = hooked_parameters.get(p, (lambda: None, []))
            if owner() is not None:  # a second hook would find the gradient gone and do nothing
                raise ValueError(f"A parameter steps in backward once, and {name!r} does already; call remove() on that optimizer first.")
            _remove(handles)
        self._stepped: set[str] = set()
        self._optimizers = {name: _optimizer_of(p, name, optimizer_factory) for name, p in named.items()}
        super().__init__(list(named.values()), {})
        self._share_groups()
        self._handles: list[Any] = []
        for name, p in named.items():
            hook = partial(_gradient_is_there, weakref.ref(self), self._handles, name)
            self._handles.append(p.register_post_accumulate_grad_hook(hook))
            hooked_parameters[p] = weakref.ref(self), self._handles

    def _share_groups(self) -> None:
        # The groups of the single optimizers themselves: what a scheduler sets here is what they use.
        self.param_groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]

    def _step_one(self, name: str, parameter: torch.Tensor) -> None:
        if name in self._stepped:
            parameter.grad = None  # the next step must not find it
            raise RuntimeError(
                f"A step in backward uses each gradient at once, and {name!r} got a second one before step(): it cannot accumulate. "
                "Call step() after each backward, or use an ordinary optimizer."
            )
        self._stepped.add(name)
        self._optimizers[name].step()
        parameter.grad = None

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End the step: backward has done the work."""
        if closure is not None:
            raise RuntimeError("A step in backward takes no closure, for backward is the step; call backward(), then step().")
        if not self._handles:
            raise RuntimeError("These hooks were removed, so this optimizer steps nothing; call step_in_backward(model, ...) again.")
        self._stepped.clear()
        if self.__dict__.pop("found_inf", None) is not None:  # a GradScaler leaves it here
            self.__dict__.pop("grad_scale", None)
            raise RuntimeError(
                "A GradScaler must see all gradients before a step, and a step in backward has used them one by one, still scaled. "
                "Load the parameters again, and use bf16 autocast without a scaler, or an ordinary optimizer."
            )

    @property  # type: ignore[override]
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of all parameters."""
        return {p: state for optimizer in self._optimizers.values() for p, state in optimizer.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """The constructor of torch's class sets an empty one; the single optimizers have theirs."""

    def state_dict(self) -> dict[str, Any]:
        """The state of each parameter's optimizer by the parameter's name."""
        return {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: parameters are missing or unknown, by name.
        """
        if state_dict.keys() != self._optimizers.keys():
            missing, unknown = self._optimizers.keys() - state_dict.keys(), state_dict.keys() - self._optimizers.keys()
            raise ValueError(
                f"The state has a name for each trained parameter; missing are {sorted(missing)}, unknown {sorted(unknown)}. "
                "Load what state_dict() of step_in_backward on the same model gave."
            )
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state_dict[name])
        self._share_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: hooks are set once."""
        if hasattr(self, "_handles"):  # not from the constructor of torch's class
            raise NotImplementedError(
                "A step in backward takes its parameters from the model, once; after unfreezing or adding some, "
                "call remove() and step_in_backward(model, ...) again."
            )
        super().add_param_group(param_group)

    def remove(self) -> None:
        """Take the hooks away: backward leaves gradients in ``grad`` again."""
        if self._handles:  # else another optimizer may have them by now
            _remove(self._handles)
            for group in self.param_groups:
                del hooked_parameters[group["params"][0]]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("A step in backward is tied to the parameters of its model and cannot be copied; save its state_dict() instead.")

    def __repr__(self) -> str:
        kinds = sorted({type(optimizer).__name__ for optimizer in self._optimizers.values()})
        return f"StepInBackward({len(self._optimizers)} parameters, each with {' or '.join(kinds)} of its own)"


def _gradient_is_there(owner: Callable[[], StepInBackward | None], handles: list[Any], name: str, parameter: torch.Tensor) -> None:
    # Held weakly: Python does not see the way from a parameter to its hook, so a cycle through it would never be released.
    optimizer = owner()
    if optimizer is None:
        _remove(handles)
        raise RuntimeError(
            f"The optimizer that step_in_backward returned is gone, so nothing steps {name!r}; keep it in a variable. "
            "Its hooks are removed now, and backward leaves gradients in grad again."
        )
    optimizer._step_one(name, parameter)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _optimizer_of(parameter: nn.Parameter, name: str, factory: OptimizerFactory) -> torch.optim.Optimizer:
    optimizer = factory([parameter])
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    if [id(p) for group in groups for p in group["params"]] != [id(parameter)]:
        raise ValueError(
            f"The factory makes an optimizer of the one parameter it is given, and for {name!r} it made another object "
            f"({type(optimizer).__name__}); write for example lambda params: torch.optim.AdamW(params, lr=1e-3)."
        )
    return optimizer
