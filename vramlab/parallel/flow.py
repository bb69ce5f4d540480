"""What a stage of a pipeline does with one micro-batch: where its inputs come from, and how a loss is taken apart over the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from vramlab.parallel.parts import Boundary, Stage, check_alike
from vramlab.parallel.timeline import Clock
from vramlab.parallel.way import Loss
from vramlab.techniques.accumulation import Window
from vramlab.tensors import tensors_in


class _Given(BaseException):
    """No error: it ends a loss that has told its inputs."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = args, kwargs


class _StandIn(nn.Module):
    """What a loss gets in place of the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"A pipeline's stages know their own parts of the model, and the loss asks it for {name!r}. Let it call model(inputs) once "
                "and use nothing else of it."
            ) from None


class _Asked(_StandIn):
    """Tells what it is called with, and ends the loss."""

    def __init__(self, chunked: bool) -> None:
        super().__init__()
        if chunked:
            self.hidden = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not forward(): whoever watches modules would see one begin that never ends.
        raise _Given(args, kwargs)


class _Last(_StandIn):
    """Answers with what the last stage makes of what it received."""

    def __init__(self, stage: Stage, received: Any, chunked: bool) -> None:
        super().__init__()
        self.stage = stage
        self._received = [received]
        if chunked:
            self.hidden, self.head = self._hidden, stage.parts[-1]

    def _take(self) -> Any:
        if not self._received:
            raise RuntimeError(
                "A micro-batch passes through a pipeline once, and the loss calls its model a second time. Let it call model(inputs) once, "
                "with both inputs in one batch for example."
            )
        return self._received.pop()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stage(self._take())

    def _hidden(self, *args: Any, **kwargs: Any) -> Any:
        x = self._take()
        for part in self.stage.parts[:-1]:
            x = part(x)
        return x

    @property
    def called(self) -> bool:
        return not self._received


def inputs_of(loss: Loss, batch: Any, chunked: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a loss calls its model with."""
    try:
        loss(_Asked(chunked), batch)
    except _Given as given:
        return given.inputs
    raise RuntimeError(_NOT_CALLED)


_NOT_CALLED = "A pipeline's loss(model, micro_batch) calls model(inputs) once, and this one returned without. Call the model that is given."


@dataclass
class Job:
    """One window's work, and how far it has come."""

    batches: Iterator[Any]
    loss: Loss
    window: Window[Any]
    scaled: Callable[[torch.Tensor], torch.Tensor]
    clock: Clock | None = None
    forwards: int = 0
    backwards: int = 0

    def timed(self, kind: str, number: int) -> AbstractContextManager[Any]:
        """Around a forward or a backward."""
        return self.clock.work(kind, number) if self.clock is not None else nullcontext()

    def next(self) -> Any:
        """The next micro-batch.

        Raises:
            ValueError: there is none.
        """
        try:
            return next(self.batches)
        except StopIteration:
            raise ValueError(number_text(len(self.window), self.forwards - 1)) from None


class Runs:
    """What a schedule calls as its stage: fetches micro-batches where they are needed, and shares the loss in the last stage.

    Args:
        stage: this rank's part of the model.
        inputs: tensors like those that the first stage is called with.
        before, after: what it receives and what it sends; None: it is the first, the last.
        around: context of the forward in all stages but the last, where the loss has its own.
        chunked: see `Pipeline`.
    """

    job: Job

    def __init__(
        self,
        stage: Stage,
        inputs: Sequence[torch.Tensor],
        before: Boundary | None,
        after: Boundary | None,
        around: Callable[[], AbstractContextManager[Any]],
        chunked: bool,
    ) -> None:
        self.stage, self.before, self.after = stage, before, after
        self._inputs = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs]
        self._around, self._chunked = around, chunked

    def __call__(self, *received: torch.Tensor) -> Any:
        """The forward of the next micro-batch."""
        job = self.job
        with job.timed("forward", job.forwards):
            job.forwards += 1
            if self.after is None:
                return self._last(received)
            args, kwargs = self._first() if self.before is None else ((self.before.unflatten(received),), {})
            with self._around():
                given = self.stage(*args, **kwargs)
            return self.after.flatten(given, "the output of a stage")

    def _first(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = inputs_of(self.job.loss, self.job.next(), self._chunked)
        check_alike(tensors_in((args, kwargs)), self._inputs, f"the input of micro-batch {self.job.forwards}")
        return args, kwargs

    def _last(self, received: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.before is not None
        model = _Last(self.stage, self.before.unflatten(received), self._chunked)
        model.training = self.stage.training
        total, count = self.job.loss(model, self.job.next())
        if not model.called:
            raise RuntimeError(_NOT_CALLED)
        return self.job.scaled(self.job.window.share(total, count))


MIXED = hasattr(PipelineStage, "_get_grad_send_meta")
"""Whether torch lets tensors without a gradient travel beside others; not in 2.11."""


def refuse_mixed(boundaries: Sequence[Boundary]) -> None:
    """Refuse what this version of torch cannot send between stages.

    Raises:
        NotImplementedError: tensors without a gradient at a boundary.
    """
    alone = [t for boundary in boundaries for t in boundary.tensors if not t.requires_grad]
    if alone and not MIXED:
        raise NotImplementedError(
            f"In torch {torch.__version__} everything that travels between stages has a gradient, and here a {alone[0].dtype} tensor of "
            f"shape {tuple(alone[0].shape)} has none. Install torch 2.13 or newer, make it anew in each stage, or set another split."
        )


class LazyStage(PipelineStage):
    """A stage that has a buffer for what it receives only from then until its backward.

    `PipelineStage` has one for each micro-batch of a window, for as long as it lives, for activations and gradients: with
    1F1B most of them are empty at any time. It also lets all stages vote on whether they know their shapes, and these do.
    """

    runs: Runs

    def forward_maybe_with_nosync(self, *received: torch.Tensor, **_: Any) -> Any:
        return self.runs(*received)

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on("meta"):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on("meta"):
            return super()._prepare_backward_infra(*args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        job = self.runs.job
        with job.timed("backward", job.backwards):
            job.backwards += 1
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for infos in (self.args_recv_info[bwd_chunk_id], self.grad_recv_info.get(bwd_chunk_id, ())):
            self._move(infos, torch.device("meta"))

    @staticmethod
    def _move(infos: Any, device: torch.device) -> None:
        """Give what is received a new, empty buffer; on the meta device one without memory, which keeps its shape."""
        for info in infos:
            buffer = getattr(info, "buffer", None)
            if isinstance(buffer, torch.Tensor):
                empty = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device)
                info.buffer = empty.requires_grad_(buffer.requires_grad)

    @contextmanager
    def _on(self, device: str) -> Iterator[None]:
        before, self.device = self.device, torch.device(device)
        try:
            yield
        finally:
            self.device = before


def number_text(expected: int, found: int) -> str:
    return (
        f"This pipeline was made for windows of {expected} micro-batches, got {found}: all stages count on as many. Drop the last, "
        "incomplete window, or make a pipeline for its number."
    )


def talking_device(device: torch.device) -> torch.device:
    """Where ranks tell each other numbers: on the host if the process group reaches it, as reading them there waits for nothing."""
    return torch.device("cpu") if "cpu:" in str(dist.get_backend_config()) else device
