"""The factored optimizer: Adam's second moment of a matrix kept as one number a row and one a column."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

State = dict[str, Any]


def adafactor_update(grad: torch.Tensor, state: State, step: int, *, decay: float, eps: float, clip: float) -> torch.Tensor:
    """The direction Adafactor moves a parameter in, in the state's precision; brings ``state`` up to date in place.

    ``grad`` is only read. The state holds ``row_var`` (..., row, 1) and ``col_var`` (..., 1, column), or ``variance`` where
    that is smaller. ``step`` counts from 1. The root mean square of what is returned is at most ``clip``.
    """
    new = step**decay  # the weight of this step's squares, 1 in the first step
    if "variance" in state:
        state["variance"].mul_(1 - new).addcmul_(grad, grad, value=new).add_(eps * new)
        update = state["variance"].rsqrt().mul_(grad)
    else:
        columns, rows = factored_dims(grad.dim())
        for name, dims in (("row_var", columns), ("col_var", rows)):
            state[name].lerp_(mean_of_squares(grad, dims, state[name].dtype).add_(eps), new)
        # The second moment is row * column / mean(row), a matrix of rank 1: never multiplied out.
        update = grad * state["row_var"].div(state["row_var"].mean(rows, keepdim=True)).rsqrt_()
        update.mul_(state["col_var"].rsqrt())
    return update.div_(rms(update).div_(clip).clamp_(min=1))


def factored_dims(dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions along a row and along a column: the last and the one before it; for convolutions all others and the outputs."""
    return ((dims - 1,), (dims - 2,)) if dims < 4 else (tuple(range(1, dims)), (0,))


def mean_of_squares(x: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Over some dimensions, which stay with size 1; the squares are never there all at once."""
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=dtype)
    return norm.square_().div_(x.numel() // norm.numel())


def rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square, a scalar in fp32 or better."""
    return torch.linalg.vector_norm(x, dtype=_at_least_fp32(x.dtype)).div_(math.sqrt(x.numel()))


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018, algorithms 4 to 6): adaptive steps with almost no optimizer state.

    Which second moments are factored: matrices over rows and columns; a stack of matrices (3-D) each for itself;
    kernels of convolutions (4-D and more) as the matrix (outputs, everything else). Only if rows + columns are fewer
    numbers than the parameter; vectors, scalars and thin matrices keep a full second moment. `state_bytes` gives the bytes.

    Args:
        params: parameters or groups, as for every torch optimizer; groups may have options of their own.
        lr: the step size. None: the paper's relative step min(1e-2, 1/sqrt(step)), whose first number is then
            ``group["lr"]``, so that a scheduler scales the step; `get_last_lr` gives the result.
        beta2_decay: the second moment forgets with 1 - step ** beta2_decay.
        eps: added to squared gradients, and the smallest root mean square of a parameter that scales its step.
        d: clipping threshold: the update's root mean square is at most this.
        weight_decay: decoupled, as in AdamW: parameters shrink by step size * weight_decay.
        beta1: keep a running average of the updates (4 bytes a parameter); None keeps none.
        scale_parameter: multiply the step by the parameter's own root mean square.
        relative_step: None: True without lr, False with one.
        foreach: one operation at a time for all parameters: fewer calls, which counts where many are small, but all
            updates (4 bytes a parameter) are held at once. Otherwise one, and the longer factor of its parameter.
        stochastic_rounding: round new bf16 parameters up or down by chance, so that small updates are not lost.
        seed: of the rounding.

    State is fp32 beside parameters of 2 bytes, also after `load_state_dict`, and fp64 beside fp64.

    Raises:
        ValueError: an option out of range, lr together with relative_step, complex parameters.
        RuntimeError: from `step`, before anything is changed: a sparse gradient, with the parameter's shape (and name,
            if ``params`` were named).

    Reference: Shazeer & Stern 2018; ``torch/optim/_adafactor.py``.

    Differences from ``torch.optim.Adafactor``, all tested:

    - eps is 1e-30 added to squares, as in the paper. torch raises the mean of rows to 1.2e-7 and second moments to
      1.4e-14: matrices with gradients below 3e-4 step further there, gradients below 1e-7 less.
    - lr is the step size and not a cap on 1/sqrt(step), so that a scheduler's numbers are those used; weight decay
      follows the relative step.
    - Convolutions are one matrix. torch takes a stack of their last two dimensions, which may need more than the
      parameter. 2 x 2 is not factored, for nothing is saved.
    - State beside bf16 is fp32, and the result is rounded by chance.
    - d may be below 1, empty parameters are left alone, no value is read from the device. Without maximize: negate the loss.

    Differences from transformers' Adafactor: convolutions, 2 x 2 and rounding as above; weight decay is not scaled by the
    parameter; the average of updates holds no step size, so that lr = 0 stops at once; no warmup_init: take a scheduler.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        beta2_decay: float = -0.8,
        eps: tuple[float, float] = (1e-30, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float | None = None,
        scale_parameter: bool = True,
        relative_step: bool | None = None,
        foreach: bool = False,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay, "beta1": beta1}
        options |= {"scale_parameter": scale_parameter, "relative_step": relative_step, "foreach": foreach}
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        super().__init__(params, options | {"stochastic_rounding": stochastic_rounding})

    def add_param_group(self, param_group: State) -> None:
        """Add parameters, with options of their own if they have any."""
        super().add_param_group(param_group)
        try:
            _settle(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step over all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _refuse_sparse(group)
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None and p.numel()]
            options = {"decay": group["beta2_decay"], "eps": group["eps"][0], "clip": group["d"]}
            if group["foreach"]:
                states = [self._state_for_step(p, group) for p in ready]
                updates = _updates_together([p.grad for p in ready], states, **options)
                for p, state, update in zip(ready, states, updates, strict=True):
                    self._apply(p, state, update, group)
            else:
                for p in ready:
                    state = self._state_for_step(p, group)
                    self._apply(p, state, adafactor_update(p.grad, state, state["step"], **options), group)
        return loss

    def get_last_lr(self) -> list[float]:
        """Each group's step size in its last step, before parameters scale it."""
        steps = [max((self.state[p]["step"] for p in g["params"] if p in self.state), default=1) for g in self.param_groups]
        return [_step_size(group, step) for group, step in zip(self.param_groups, steps, strict=True)]

    def _state_for_step(self, p: torch.Tensor, group: State) -> State:
        state = self.state[p]
        if not state:
            state |= _new_state(p, group["beta1"] is not None)
        state["step"] += 1
        return state

    def _apply(self, p: torch.Tensor, state: State, update: torch.Tensor, group: State) -> None:
        """Move a parameter against its update, which is overwritten."""
        if "average" in state:
            update.copy_(state["average"].lerp_(update, 1 - group["beta1"]))
        scale = rms(p).clamp_(min=group["eps"][1]) if group["scale_parameter"] else update.new_ones(())
        size = _step_size(group, state["step"])
        kept = 1 - size * group["weight_decay"]
        if p.dtype is torch.bfloat16 and group["stochastic_rounding"]:
            update.mul_(scale).mul_(-size).add_(p, alpha=kept)
            p.copy_(round_stochastically(update, self._generator(p.device)))
        else:
            if kept != 1:
                p.mul_(kept)
            p.addcmul_(update, scale, value=-size)

    # The random numbers of the rounding belong to what is saved

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if device.type in ("meta", torch._C._get_privateuse1_backend_name()):
            return None  # virtual tensors have no numbers to round
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def __getstate__(self) -> State:
        return super().__getstate__() | {"_seed": self._seed, "_generators": self._generators}

    def state_dict(self) -> State:
        """torch's format, and beside it ``rounding``: by device the random numbers that round bf16 parameters."""
        return super().state_dict() | {"rounding": {str(d): g.get_state() for d, g in self._generators.items()}}

    def load_state_dict(self, state_dict: State) -> None:
        """Continue to the bit: state keeps the precision it was saved in, where torch casts it to that of the parameter."""
        loaded: State = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))  # as other hooks have left it
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for number, p in zip(chain.from_iterable(g["params"] for g in loaded["param_groups"]), parameters, strict=True):
            for name, value in loaded["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state[p][name] = value.to(p.device, copy=True)
        for device in {p.device for p in parameters}:
            numbers, generator = loaded.get("rounding", {}).get(str(device)), self._generator(device)
            if numbers is not None and generator is not None:
                generator.set_state(numbers)


def state_bytes(shape: Iterable[int], beta1: float | None = None, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of optimizer state that Adafactor keeps for a parameter of this shape and dtype."""
    shape = torch.Size(shape)
    numbers = sum(s.numel() for s in _second_moment(shape).values())
    average = shape.numel() if beta1 is not None else 0
    return (numbers + average if shape.numel() else 0) * _at_least_fp32(dtype).itemsize


def round_stochastically(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """fp32 values to bf16, up or down with the probabilities that make the mean right; overwrites ``values``.

    bf16 is the upper half of fp32: a random lower half, added, carries over as often as it should. What bf16 holds
    exactly stays as it is, infinities too; beyond its largest number the next one up is infinity.
    """
    nan = values.isnan()  # the carry could run through a NaN's bits, and make it a zero
    bits = values.view(torch.int32)
    noise = torch.empty_like(bits, dtype=torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)
    bits.add_(1 << 15).add_(noise).bitwise_and_(-1 << 16)
    return values.masked_fill_(nan, math.nan).to(torch.bfloat16)


def _updates_together(grads: list[torch.Tensor], states: list[State], *, decay: float, eps: float, clip: float) -> Iterator[torch.Tensor]:
    """`adafactor_update` of many parameters, the same to the bit, with one call an operation where shapes allow it."""
    updates: dict[int, torch.Tensor] = {}
    for factored in (True, False):
        numbers = [i for i, state in enumerate(states) if ("row_var" in state) is factored]
        if numbers:
            directions = _factored_directions if factored else _full_directions
            made = directions([grads[i] for i in numbers], [states[i] for i in numbers], decay, eps)
            norms = [rms(update) for update in made]
            torch._foreach_div_(norms, clip)
            torch._foreach_clamp_min_(norms, 1)
            torch._foreach_div_(made, norms)
            updates |= dict(zip(numbers, made, strict=True))
    return (updates.pop(i) for i in range(len(grads)))


def _full_directions(grads: list[torch.Tensor], states: list[State], decay: float, eps: float) -> list[torch.Tensor]:
    new = [state["step"] ** decay for state in states]
    variances = [state["variance"] for state in states]
    torch._foreach_mul_(variances, [1 - n for n in new])
    torch._foreach_addcmul_(variances, grads, grads, new)
    torch._foreach_add_(variances, [eps * n for n in new])
    updates = list(torch._foreach_rsqrt(variances))
    torch._foreach_mul_(updates, grads)
    return updates


def _factored_directions(grads: list[torch.Tensor], states: list[State], decay: float, eps: float) -> list[torch.Tensor]:
    new = [state["step"] ** decay for state in states]
    row_vars, col_vars = [state["row_var"] for state in states], [state["col_var"] for state in states]
    dims = [factored_dims(grad.dim()) for grad in grads]
    for i, factors in enumerate((row_vars, col_vars)):
        squares = [mean_of_squares(g, d[i], f.dtype) for g, d, f in zip(grads, dims, factors, strict=True)]
        torch._foreach_add_(squares, eps)
        torch._foreach_lerp_(factors, squares, new)
    rows = list(torch._foreach_div(row_vars, [r.mean(d[1], keepdim=True) for r, d in zip(row_vars, dims, strict=True)]))
    torch._foreach_rsqrt_(rows)
    updates = list(torch._foreach_mul(grads, rows))
    torch._foreach_mul_(updates, torch._foreach_rsqrt(col_vars))
    return updates


def _second_moment(shape: torch.Size) -> dict[str, torch.Size]:
    """Names and shapes of the state: factored, if that is smaller."""
    if len(shape) >= 2:
        along = dict(zip(("row_var", "col_var"), factored_dims(len(shape)), strict=True))
        factors = {name: torch.Size(1 if i in dims else n for i, n in enumerate(shape)) for name, dims in along.items()}
        if sum(s.numel() for s in factors.values()) < shape.numel():
            return factors
    return {"variance": shape}


def _new_state(p: torch.Tensor, average: bool) -> State:
    shapes = _second_moment(p.shape) | ({"average": p.shape} if average else {})
    return {"step": 0} | {name: torch.zeros(s, dtype=_at_least_fp32(p.dtype), device=p.device) for name, s in shapes.items()}


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _step_size(group: State, step: int) -> float:
    return group["lr"] * min(1.0, 1e2 / math.sqrt(step)) if group["relative_step"] else group["lr"]


def _refuse_sparse(group: State) -> None:
    for i, p in enumerate(group["params"]):
        if p.grad is not None and p.grad.layout is not torch.strided:
            name = f"parameter {group['param_names'][i]!r}" if "param_names" in group else "a parameter"
            raise RuntimeError(
                f"Adafactor does not support sparse gradients, and {name} of shape {tuple(p.shape)} has one; "
                "make its embedding with sparse=False, or give it to torch.optim.SparseAdam."
            )


def _settle(group: State) -> None:
    """Decide what lr and relative_step of a new group are, and check its options."""
    if group["relative_step"] is None:
        group["relative_step"] = group["lr"] is None
    if group["relative_step"] and group["lr"] is not None:
        raise ValueError(f"Adafactor's relative step replaces lr, got lr={group['lr']}; leave lr out, or set relative_step=False.")
    if not group["relative_step"] and group["lr"] is None:
        raise ValueError("Adafactor needs a step size where relative_step=False, got lr=None; give lr=1e-3, say.")
    if group["relative_step"]:
        group["lr"] = 1e-2
    rules = {
        "lr": ("a number of at least 0", lambda v: isinstance(v, int | float) and 0 <= v < math.inf),
        "beta2_decay": ("at most 0", lambda v: v <= 0),
        "eps": ("(at least 1.2e-38, at least 0), or gradients of zeros would give NaN", _eps_is_fine),
        "d": ("above 0", lambda v: v > 0),
        "weight_decay": ("at least 0", lambda v: v >= 0),
        "beta1": ("at least 0 and below 1, or None", lambda v: v is None or 0 <= v < 1),
    }
    for name, (rule, fine) in rules.items():
        if not fine(group[name]):
            default = inspect.signature(Adafactor).parameters[name].default
            raise ValueError(f"Adafactor's {name} is {rule}, got {group[name]!r}; the default is {default}.")
    for p in group["params"]:
        if p.is_complex():
            raise ValueError(
                f"Adafactor takes real parameters, got {p.dtype} of shape {tuple(p.shape)}; "
                "keep it as nn.Parameter(torch.view_as_real(parameter))."
            )
        if hasattr(p, "placements"):  # a DTensor; importing them to ask takes half a second
            raise ValueError(
                f"Adafactor's means are those of whole rows and columns, got a shard of a parameter of shape {tuple(p.shape)}; "
                "use vl.parallel.ddp and zero1, which leave parameters whole, or AdamW."
            )


def _eps_is_fine(eps: Any) -> bool:
    first, second = eps
    return first is not None and first >= torch.finfo(torch.float32).tiny and second >= 0
