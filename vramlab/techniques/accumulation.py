"""Gradient accumulation: a window of micro-batches with the gradient of one large batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Window:
    """The micro-batches of one optimizer step; their gradients add up to that of the mean loss over all their items.

    A mean over the whole batch weighs each *item* the same, so each micro-batch's summed loss is divided by the items
    of the window, not by the number of micro-batches. How many those are is known only at the end, so `share` divides
    by what the window would hold if all micro-batches were like the first, and `close` corrects the gradients by one
    factor if they were not. With equal micro-batches that factor is 1 and nothing is touched.

    Args:
        micro_batches: how many the window will hold.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._divisor = 0
        self._total: torch.Tensor | float = 0.0
        self.count = 0

    def share(self, total: torch.Tensor, count: int) -> torch.Tensor:
        """This micro-batch's part of the window's loss, to call backward on.

        Args:
            total: the summed loss of the micro-batch's items, a scalar.
            count: how many items were summed; 0 if all were ignored.
        """
        self._divisor = self._divisor or max(1, count) * self._micro_batches
        self._total = self._total + total.detach().float()
        self.count += count
        return total / self._divisor

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        """Correct the gradients if the micro-batches were not all like the first. Call it before clipping and step."""
        if self.count in (0, self._divisor):  # nothing counted: the gradients are 0
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._divisor / self.count)

    @property
    def loss(self) -> float:
        """The mean loss over the window's items so far; 0 if none counted."""
        return float(self._total) / max(1, self.count)
