"""One Linear over several ranks, for teaching: its columns or its rows split, with the result and gradients of the whole.

With x of shape (..., in) and y = x A, where A = weightᵀ has shape (in, out):

- columns: each rank holds some columns of A, so some of y's features. It needs all of x, and no sum: y is gathered.
- rows: each rank holds some rows of A, so it needs the same features of x alone. Every rank has a part of *each* number
  of y, and these are summed.

After a column split, a row split needs no communication in between: that is how a transformer's MLP is split.

Reference: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class ColumnParallelLinear(nn.Module):
    """This rank's columns of a Linear: x (..., in) to all of y (..., out), or to this rank's features of it.

    Args:
        linear: the same on all ranks; this rank's part of it is copied.
        group: the ranks that share it; None: all.
        gather: give all of y; False: this rank's (..., out / ranks), as `RowParallelLinear` with ``scatter=False`` takes it.

    Raises:
        ValueError: the ranks do not divide the columns.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None, *, gather: bool = True) -> None:
        super().__init__()
        self.group, self.gather = group, gather
        self.weight = nn.Parameter(_mine(linear.weight, 0, group, "out_features"))  # (out / ranks, in)
        self.bias = nn.Parameter(_mine(linear.bias, 0, group, "out_features")) if linear.bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(_Replicated.apply(x, self.group), self.weight, self.bias)  # (..., out / ranks)
        return _Gathered.apply(y, self.group) if self.gather else y


class RowParallelLinear(nn.Module):
    """This rank's rows of a Linear: x (..., in), or this rank's features of it, to all of y (..., out).

    The bias is added once, to the sum; every rank keeps all of it.

    Args:
        linear: the same on all ranks; this rank's part of it is copied.
        group: the ranks that share it; None: all.
        scatter: take all of x and use this rank's features; False: x is (..., in / ranks) already.

    Raises:
        ValueError: the ranks do not divide the rows.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None, *, scatter: bool = True) -> None:
        super().__init__()
        self.group, self.scatter = group, scatter
        self.weight = nn.Parameter(_mine(linear.weight, 1, group, "in_features"))  # (out, in / ranks)
        self.bias = nn.Parameter(linear.bias.detach().clone()) if linear.bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scatter:
            x = _Scattered.apply(x, self.group)  # (..., in / ranks)
        y = _Summed.apply(F.linear(x, self.weight), self.group)  # (..., out)
        return y if self.bias is None else y + self.bias


def _mine(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None, what: str) -> torch.Tensor:
    """A copy of this rank's part of a tensor."""
    size, ranks = tensor.shape[dim], dist.get_world_size(group)
    if size % ranks:
        raise ValueError(f"The ranks share a Linear in equal parts, and {ranks} do not divide {what}={size}. Use a size that they divide.")
    return tensor.detach().chunk(ranks, dim)[dist.get_rank(group)].clone()


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _concatenated(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, -1)


def _slice(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


class _Replicated(torch.autograd.Function):
    """All ranks use the same x, each for its own features of y: the gradient is the sum of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


class _Gathered(torch.autograd.Function):
    """Each rank's features of y become all of y, on every rank: its own are what it has a gradient for."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return _concatenated(y, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _slice(grad, ctx.group), None


class _Scattered(torch.autograd.Function):
    """Of x this rank's features; the gradient of all of x is put together again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return _slice(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _concatenated(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum of all ranks' parts; each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        return _sum(y, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
