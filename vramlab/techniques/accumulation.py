"""Gradient accumulation: a window of micro-batches with the gradient of one large batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

B = TypeVar("B")


def accumulate(
    batches: Iterable[B],
    k: int,
    count: Callable[[B], int] | None = None,
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Window[B]]:
    """Group micro-batches into windows of one optimizer step each.

        for window in accumulate(loader, k=4, count=lambda batch: int((batch["labels"] != -100).sum())):
            for batch in window:
                total = F.cross_entropy(model(batch), batch["labels"], reduction="sum")
                window.share(total).backward()
            optimizer.step()
            optimizer.zero_grad()

    The last window holds what is left, and is divided by what it holds. An iterator of unknown length will do.

    Args:
        batches: micro-batches; ``k`` of them are held at a time, and ``k`` more while the next window is read, so keep them
            on the host and move them in the loop.
        k: micro-batches in a window.
        count: how many items a micro-batch's *summed* loss adds up, such as the tokens that are not ignored. None:
            losses are means over micro-batches of equal size, and each counts as one.
        no_sync: a context around all micro-batches of a window but the last, such as the ``no_sync`` of a
            `DistributedDataParallel` model.

    Raises:
        ValueError: ``k`` below 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is a whole number of at least 1, got {k!r}; 1 is a step for each micro-batch.")
    iterator = iter(batches)
    while micro_batches := list(islice(iterator, k)):
        counts = [1 if count is None else int(count(batch)) for batch in micro_batches]
        yield Window(len(micro_batches), items=sum(counts), batches=micro_batches, no_sync=no_sync)


class Window(Generic[B]):
    """The micro-batches of one optimizer step; their gradients add up to that of the mean loss over all their items.

    A mean over the whole batch weighs each *item* the same, so each micro-batch's summed loss is divided by the items
    of the window, not by the number of micro-batches. If how many those are is known only at the end, `share` divides
    by what the window would hold if all micro-batches were like the first that is not empty, and `close` corrects the
    gradients by one factor if they were not. With equal micro-batches that factor is 1 and nothing is touched.

    Args:
        micro_batches: how many the window will hold.
        items: how many items it will hold; None if that is not known yet.
        batches: what iterating over the window gives.
        no_sync: see `accumulate`.
    """

    def __init__(
        self,
        micro_batches: int,
        *,
        items: int | None = None,
        batches: Sequence[B] = (),
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._micro_batches, self._items, self._batches, self._no_sync = micro_batches, items, batches, no_sync
        self._divisor = items or 0
        self._total: torch.Tensor | float = 0.0
        self.count = items or 0  # of items: all, or those counted so far

    def __iter__(self) -> Iterator[B]:
        for i, batch in enumerate(self._batches, 1):
            with self._no_sync() if i < len(self._batches) else nullcontext():
                yield batch

    def __len__(self) -> int:
        return self._micro_batches

    def open(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let 16-bit parameters add up their gradients in fp32, if there are several micro-batches.

        In bf16, 256 + 1 is 256: small contributions would be lost. Costs 4 instead of 2 bytes a parameter until
        `close` rounds the sum once.
        """
        if self._micro_batches > 1:
            for parameter in parameters:
                if parameter.requires_grad and parameter.dtype.itemsize == 2:
                    keep_gradient_in(torch.float32, parameter)

    def share(self, total: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """This micro-batch's part of the window's loss, to call backward on.

        Args:
            total: the summed loss of the micro-batch's items, a scalar.
            count: how many items were summed, 0 if all were ignored; not needed if the window knows its items.

        Raises:
            ValueError: the window does not know its items and is not told these.
        """
        if count is None and self._items is None:
            raise ValueError("This window does not know how many items it holds: give share(total, count), or accumulate(..., count=...).")
        if self._items is None:
            self._divisor = self._divisor or (count or 0) * self._micro_batches
            self.count += count or 0
        self._total = self._total + total.detach().float()
        return total / max(1, self._divisor)  # nothing counted so far: the gradients are 0, whatever they are divided by

    def close(self, parameters: Iterable[torch.Tensor]) -> None:
        """Correct the gradients if the micro-batches were not all like the first. Call it before clipping and step."""
        # Nothing counted: the gradients are 0.
        factor = self._divisor / self.count if self._items is None and self.count else 1.0
        for parameter in parameters:
            if parameter.grad is not None and factor != 1:
                parameter.grad.mul_(factor)
            if parameter.grad_dtype not in (None, parameter.dtype):
                keep_gradient_in(parameter.dtype, parameter)
        self._divisor = self.count or self._divisor  # what the gradients are divided by now: a second call changes nothing

    @property
    def loss(self) -> float:
        """The summed loss so far over `count`: after the last micro-batch the mean loss; 0 if nothing counted."""
        return float(self._total) / max(1, self.count)


def keep_gradient_in(dtype: torch.dtype, parameter: torch.Tensor) -> None:
    grad, parameter.grad = parameter.grad, None  # torch changes the type only where there is no gradient
    parameter.grad_dtype = dtype
    parameter.grad = grad.to(dtype) if grad is not None else None
