"""AdamW with 8 bits a number of state, by torchao."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramlab.tensors import is_virtual


def adamw_8bit(params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW whose two moments are kept in 8 bits with a scale for each 256 numbers: about 2 bytes a parameter.

    Parameters of fewer than 4096 numbers, or of a count that 256 does not divide, keep two moments of their own dtype. The
    first step compiles, which takes half a minute. A recorder sees the state but not what a compiled step allocates on
    the way; on a virtual GPU nothing is compiled, and the step has no temporary memory.

    Args:
        params: parameters or groups, as for every torch optimizer.
        lr: the step size.
        options: betas, eps, weight_decay, block_size and so on, as torchao names them.

    Raises:
        ImportError: torchao is not installed, or has no ``torchao.optim.AdamW8bit``.

    Reference: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization; ``torchao/optim/adam.py``.
    """
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(f"8-bit AdamW is torchao's torchao.optim.AdamW8bit, got: {error}; pip install --upgrade torchao.") from error
    return _compiled_out_of_sight(AdamW8bit)(params, lr=lr, **options)


@functools.cache
def _compiled_out_of_sight(kind: Any) -> Any:
    """The optimizer, whose compiled step also works while operators are watched: torch refuses to compile then."""
    # Without what torch puts around the step of a class when it makes the first optimizer of it: hooks belong around ours.
    inner = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step

    class Unwatched(kind):  # type: ignore[misc, unused-ignore]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if any(is_virtual(p) for group in self.param_groups for p in group["params"]):
                with mock.patch.object(torch, "compile", return_value=lambda *args: None):
                    inner(self)  # makes the state
            else:
                with _disable_current_modes():
                    inner(self)
            return loss

        def __reduce__(self) -> Any:  # by the name of its class, pickle would find the one that this is made from
            return _unfilled, (kind,), self.__getstate__()

    Unwatched.__name__, Unwatched.__qualname__ = kind.__name__, kind.__qualname__
    return Unwatched


def _unfilled(kind: Any) -> Any:
    """An optimizer for pickle and copy to fill."""
    made = _compiled_out_of_sight(kind)
    return made.__new__(made)
