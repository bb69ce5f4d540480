"""A task that trains in no time, for tests of what happens around training: is the sum of four numbers positive?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import vramlab as vl


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 4, device=device)
    return x, (x.sum(1) > 0).long()


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x).float(), y, reduction="sum"), len(y)


TASK = vl.Task(model, batch, loss, "rows", "rows task")
