"""Who computes when: the busy intervals of each rank of a pipeline, and how much of the time it waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vramlab.devices import synchronize


@dataclass(frozen=True)
class Work:
    """One forward or backward of one micro-batch on one rank."""

    rank: int
    stage: int
    kind: str
    """forward (in the last stage with the loss) or backward."""
    micro_batch: int
    """Counted from 0."""
    start: float
    """Seconds since the ranks began together."""
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The work of some ranks on one clock."""

    works: tuple[Work, ...] = ()

    @property
    def ranks(self) -> list[int]:
        """Whose work is in it."""
        return sorted({work.rank for work in self.works})

    @property
    def seconds(self) -> float:
        """From the first start to the last end, of all ranks."""
        return max(work.end for work in self.works) - min(work.start for work in self.works) if self.works else 0.0

    def of(self, rank: int) -> list[Work]:
        """One rank's work, in the order of its start."""
        return sorted((work for work in self.works if work.rank == rank), key=lambda work: work.start)

    @property
    def idle(self) -> dict[int, float]:
        """Of each rank, the share of the time in which it does nothing."""
        return {rank: 1 - sum(work.seconds for work in self.of(rank)) / (self.seconds or 1) for rank in self.ranks}


def bubble(stages: int, micro_batches: int) -> float:
    """The idle share of each rank if all stages take equally long: ``(stages - 1) / (micro_batches + stages - 1)``.

    It is that of GPipe and of 1F1B, and with one micro-batch that of the naive split, in which one rank works at a time.

    Reference: Huang et al. 2019, GPipe, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    return (stages - 1) / (micro_batches + stages - 1)


class Clock:
    """Notes one rank's work as it happens; on CUDA with events, so that nothing waits.

    Args:
        stage: this rank's.
        device: where it computes.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage, self._device = stage, device
        self._marks: list[tuple[str, int, Any, Any]] = []

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait for the group's ranks; now is 0. The clocks of different machines need not agree."""
        synchronize(self._device)
        dist.barrier(group)
        self._marks.clear()
        self._origin = self._now()

    @contextmanager
    def work(self, kind: str, micro_batch: int) -> Iterator[None]:
        """Around a forward or a backward."""
        before = self._now()
        yield
        self._marks.append((kind, micro_batch, before, self._now()))

    def timeline(self) -> Timeline:
        """This rank's work since `start`. Waits for the device."""
        synchronize(self._device)
        rank = dist.get_rank()
        works = (Work(rank, self._stage, kind, i, self._seconds(a), self._seconds(b)) for kind, i, a, b in self._marks)
        return Timeline(tuple(works))

    def gather(self, group: dist.ProcessGroup | None = None) -> Timeline:
        """The work of all ranks of the group; each calls it and gets the same."""
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, self.timeline().works, group=group)
        return merged(everyone)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: Any) -> float:
        return mark - self._origin if self._device.type != "cuda" else self._origin.elapsed_time(mark) / 1000


def merged(parts: Sequence[Sequence[Work]]) -> Timeline:
    """One timeline of several ranks' works."""
    return Timeline(tuple(work for works in parts for work in works))
