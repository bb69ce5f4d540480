"""AdamW with 8 bits a number of state, by torchao."""

from __future__ import annotations

from typing import Any

import torch


def adamw_8bit(params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW whose two moments are kept in 8 bits with a scale for each 256 numbers: about 2 bytes a parameter.

    Parameters of fewer than 4096 numbers, or of a count that 256 does not divide, keep two moments of their own dtype. The
    first step compiles, which takes half a minute.

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
    return AdamW8bit(params, lr=lr, **options)
