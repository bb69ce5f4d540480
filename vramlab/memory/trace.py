"""MemoryTrace: every allocation and release of a run, and what can be read from it. Plain NumPy, no torch."""

from __future__ import annotations

import html
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from vramlab.units import format_bytes, round_up

if TYPE_CHECKING:
    import pandas as pd


class Category(IntEnum):
    """What a storage is for. ``label`` is the word shown, ``color`` its one colour everywhere."""

    PARAMETERS = 0  # and buffers
    OPTIMIZER_STATE = 1
    GRADIENTS = 2
    WEIGHT_COPIES = 3  # autocast's low-precision copies
    ACTIVATIONS = 4
    INPUTS = 5
    TEMPORARY = 6
    WORKSPACE = 7
    GATHERED_PARAMETERS = 8  # whole parameters of which a rank keeps a shard (FSDP)
    BUCKETS = 9  # DDP's, which gradients are views of
    COMMUNICATION = 10  # what is sent to and received from other ranks

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")

    @property
    def color(self) -> str:
        return _COLORS[self]


_OKABE_ITO = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#F0E442", "#999999", "#D55E00")
_COLORS = (*_OKABE_ITO, "#003F66", "#005C43", "#882255")  # its blue and green darker, and a wine that is on no such scale


class Phase(IntEnum):
    """When an event happened; ``BUILD`` is everything before the first forward."""

    BUILD = 0
    FORWARD = 1
    BACKWARD = 2
    STEP = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes by category at one moment. The fields are those of `Category`; ``total`` is their sum."""

    parameters: int = 0
    optimizer_state: int = 0
    gradients: int = 0
    weight_copies: int = 0
    activations: int = 0
    inputs: int = 0
    temporary: int = 0
    workspace: int = 0
    gathered_parameters: int = 0
    buckets: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def items(self) -> list[tuple[str, int]]:
        """``(label, bytes)`` for each category, in the order of the fields."""
        return [(c.label, getattr(self, f.name)) for c, f in zip(Category, fields(self), strict=True)]

    def __sub__(self, other: MemoryBreakdown) -> MemoryBreakdown:
        return MemoryBreakdown(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __repr__(self) -> str:
        parts = ", ".join(f"{label} {format_bytes(n)}" for label, n in self.items() if n)
        return f"MemoryBreakdown({format_bytes(self.total)}: {parts})"

    def _repr_html_(self) -> str:
        largest = max(1, *(abs(n) for n in astuple(self)))
        rows = [
            f"<tr><td>{c.label}</td><td style='text-align:right'>{n:,}</td><td style='text-align:right'>{format_bytes(n)}</td>"
            f"<td><div style='background:{c.color};height:0.8em;width:{12 * abs(n) / largest:.2f}em'></div></td></tr>"
            for c, (_, n) in zip(Category, self.items(), strict=True)
            if n
        ]
        total = f"<tr><th>total</th><th style='text-align:right'>{self.total:,}</th><th>{format_bytes(self.total)}</th><th></th></tr>"
        return f"<table><tr><th>category</th><th>bytes</th><th></th><th></th></tr>{''.join(rows)}{total}</table>"


@dataclass(frozen=True)
class Events:
    """The columns of a trace, one row an event, in the order they happened.

    All arrays have shape (events,). Positive bytes allocate, negative ones release; a storage that is resized has
    several events. The first ``seeds`` rows are what existed before the recording began.
    """

    storage: np.ndarray  # int64: a number for each storage
    nbytes: np.ndarray  # int64: signed
    category: np.ndarray  # int8: Category of the storage
    module: np.ndarray  # int32: index into modules, the module that allocated or owns the storage
    phase: np.ndarray  # int8: Phase of the event
    operator: np.ndarray  # int32: index into operators, the operator running at (or last before) the event
    modules: tuple[str, ...]
    operators: tuple[str, ...]
    seeds: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """For each optimizer step how many events had happened at its end, and a number for the optimizer that stepped."""
    moves: frozenset[int] = frozenset()
    """Allocations that take over the very memory which the event before has released."""
    line: np.ndarray | None = None  # int32: index into lines, the user's line that runs, in backward that which made the node
    lines: tuple[str, ...] = ()
    """``file:line``; empty where lines were not followed."""
    stream: np.ndarray | None = None  # int32: the CUDA stream whose memory the storage is; None: 0, the default, for all

    def last_step(self) -> tuple[int, int] | None:
        """Where the last optimizer step begins, at the end of the one before, and ends; None without two.

        In backward each parameter has an optimizer of its own: then from the last one's step to its next.
        """
        ends = [end for end, optimizer in self.steps if optimizer == self.steps[-1][1]]
        return (ends[-2], ends[-1]) if len(ends) > 1 else None


_none = np.zeros(0, np.int64)
NO_EVENTS = Events(_none, _none, _none, _none, _none, _none, ("",), ("",))


@dataclass(frozen=True)
class DeviceCounters:
    """What CUDA's own counters said over a recording: the peaks, in bytes, of one device.

    ``allocated`` and ``reserved`` are the caching allocator's; ``device`` is all memory in use on the card at the end
    of the recording as NVML reports it (reserved, context, other processes), None where NVML does not answer
    or was not asked.
    """

    allocated: int
    reserved: int
    device: int | None


class MemoryTrace:
    """Every allocation and release of a run on one device.

    Bytes are those of storages: a view, a tied weight or an expanded tensor adds nothing. ``at`` in the methods below
    names a moment: ``"peak"``, ``"start"`` (what existed before), ``"end"``, a phase (``"forward"``, ``"backward"``,
    ``"step"``: the highest moment in it), ``"end of forward"`` and so on (where the phase first ends), or the number of
    an event.

    Args:
        source: the events, or a function that gives those so far while a recording runs.
        device: name of the device the bytes are on.
        counters: the device's own counters, where it has them.
    """

    def __init__(self, source: Events | Callable[[], Events], device: str = "cpu", counters: DeviceCounters | None = None) -> None:
        self._source = source
        self.device = device
        self.counters = counters

    @classmethod
    def from_cuda_snapshot(cls, path: str | os.PathLike[str], *, device: int | None = None) -> MemoryTrace:
        """The trace of a real run from what ``torch.cuda.memory._dump_snapshot(path)`` wrote, see `vramlab.memory.snapshot`."""
        trace: MemoryTrace = importlib.import_module("vramlab.memory.snapshot").from_cuda_snapshot(path, device=device)
        return trace

    def finish(self, events: Events, device: str, counters: DeviceCounters | None) -> None:
        """The recording has ended: from now on the trace is these events."""
        self._source, self.device, self.counters = events, device, counters

    @property
    def events(self) -> Events:
        return self._source() if callable(self._source) else self._source

    @property
    def peak(self) -> int:
        """The highest number of bytes in storages at any moment."""
        events = self.events
        return int(_running(events)[_moment(events, "peak")])

    @property
    def baseline(self) -> int:
        """Bytes that existed before the recording began: ``peak - baseline`` is what the code itself added."""
        events = self.events
        return int(events.nbytes[: events.seeds].sum())

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak stands: forward, backward, step (or build)."""
        return self._peak_cause()[0]

    @property
    def last_phase(self) -> str:
        """The phase of the last event."""
        events = self.events
        return Phase(events.phase[-1]).label if len(events.phase) else Phase.BUILD.label

    def _peak_cause(self) -> tuple[str, str]:
        """The phase and the operator of the event that made the peak."""
        events = self.events  # once: another thread may record
        i = _moment(events, "peak") - 1
        return (Phase(events.phase[i]).label, events.operators[events.operator[i]]) if i >= 0 else (Phase.BUILD.label, "")

    @property
    def peak_event(self) -> int:
        """The number of the event that made the peak; -1 in an empty trace."""
        return _moment(self.events, "peak") - 1

    def breakdown(self, at: str | int = "peak") -> MemoryBreakdown:
        """Bytes by category at a moment.

        Raises:
            ValueError: no such moment in this trace.
        """
        events = self.events
        return _breakdown(events, _moment(events, at))

    def by_module(self, at: str | int = "peak", depth: int | None = None) -> pd.DataFrame:
        """Bytes by module and category at a moment, largest first.

        Args:
            at: the moment, see the class.
            depth: add up below this many dots: 2 gives ``blocks.0`` for ``blocks.0.mlp.up``. None: the innermost module.

        Returns:
            One row a module, one integer column a category that occurs, and ``total``.
        """
        import pandas as pd

        live = self._live(at)
        names = [n if depth is None else ".".join(n.split(".")[:depth]) for n in live["module"]]
        table = pd.pivot_table(live.assign(module=names), "bytes", "module", "category", "sum", fill_value=0, observed=True)
        table.columns = table.columns.astype(str)
        table = table[[c.label for c in Category if c.label in table.columns]].astype("int64")
        return table.assign(total=table.sum(axis=1)).sort_values("total", ascending=False, kind="stable")

    def holders(self, n: int = 10, at: str | int = "peak") -> pd.DataFrame:
        """The ``n`` largest storages alive at a moment: bytes, category, module, phase and operator that made them.

        Raises:
            ValueError: ``n`` below 1, or no such moment.
        """
        if n < 1:
            raise ValueError(f"n is a whole number of at least 1, got {n}.")
        return self._live(at).sort_values("bytes", ascending=False, kind="stable").head(n).reset_index(drop=True)

    def holders_by(self, column: str, n: int = 10, at: str | int = "peak") -> pd.DataFrame:
        """Bytes alive at a moment, added up by ``"line"``, ``"module"``, ``"operator"``, ``"category"`` or ``"phase"``, largest first.

        The line is the user's that ran when the storage was made, in backward that of the forward; empty where lines were not followed.

        Raises:
            ValueError: no such column, ``n`` below 1, or no such moment.
        """
        live = self._live(at)
        if column not in live.columns or column == "bytes" or n < 1:
            known = ", ".join(c for c in live.columns if c != "bytes")
            raise ValueError(f"Holders are listed by one of {known}, n at least 1; got {column!r} and n={n}.")
        return live.groupby(column, observed=True)["bytes"].sum().sort_values(ascending=False, kind="stable").head(n).reset_index()

    def timeline(self) -> pd.DataFrame:
        """Bytes by category after every event: one row an event, one column a category, and the event's ``phase``."""
        import pandas as pd

        events = self.events
        columns: dict[str, object] = {c.label: np.cumsum(np.where(events.category == c, events.nbytes, 0)) for c in Category}
        return pd.DataFrame(columns | {"phase": [Phase(p).label for p in events.phase]})

    def growth(self) -> MemoryBreakdown:
        """What is alive after the last optimizer step and was not after the second: 0 everywhere in a loop without a leak.

        Where several optimizers step in turn, these are the steps of the one that stepped last.

        Raises:
            ValueError: fewer than three of its steps were recorded.
        """
        events = self.events
        ends = [end for end, optimizer in events.steps if optimizer == events.steps[-1][1]]
        if len(ends) < 3:
            raise ValueError(f"Growth compares optimizer step 2 with the last: record at least 3 steps, got {len(ends)}.")
        return _breakdown(events, ends[-1]) - _breakdown(events, ends[1])

    def rounded(self, block: int = 512) -> MemoryTrace:
        """The same trace with every storage rounded up to the allocator's block (0 bytes stay 0), as CUDA hands them out.

        Raises:
            ValueError: a block below 1 byte.
        """
        if block < 1:
            raise ValueError(f"A block has at least 1 byte, got {block}.")
        events = self.events
        rounded = np.empty_like(events.nbytes)
        held: dict[int, int] = {}
        for i, (storage, nbytes) in enumerate(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True)):
            before = held.get(storage, 0)
            held[storage] = before + nbytes
            rounded[i] = round_up(held[storage], block) - round_up(before, block)
        return MemoryTrace(replace(events, nbytes=rounded), self.device, self.counters)

    def last_step(self) -> MemoryTrace:
        """The last optimizer step alone: what was there before it counts as having existed before. Without two steps: the whole trace."""
        begin_end = self.events.last_step()
        return self if begin_end is None else MemoryTrace(replace(self.events, seeds=begin_end[0]), self.device, self.counters)

    def _live(self, at: str | int) -> pd.DataFrame:
        """One row for each storage alive at a moment, with what allocated it."""
        import pandas as pd

        events = self.events
        until = _moment(events, at)
        storages, first, inverse = np.unique(events.storage[:until], return_index=True, return_inverse=True)
        held = np.zeros(len(storages), np.int64)
        np.add.at(held, inverse, events.nbytes[:until])
        first, held = first[held > 0], held[held > 0]

        def named(codes: np.ndarray, names: Iterable[str]) -> list[str]:
            table = list(names)
            return [table[code] for code in codes[first]]

        table = pd.DataFrame(
            {
                "bytes": held,
                "category": named(events.category, (c.label for c in Category)),
                "module": named(events.module, events.modules),
                "phase": named(events.phase, (p.label for p in Phase)),
                "operator": named(events.operator, events.operators),
            }
        )
        return table if events.line is None else table.assign(line=named(events.line, events.lines))

    def __len__(self) -> int:
        return len(self.events.nbytes)

    def __repr__(self) -> str:
        return f"MemoryTrace(peak {format_bytes(self.peak)} in {self.peak_phase} on {self.device}, {len(self):,} events)"

    def _repr_html_(self) -> str:
        phase, operator = map(html.escape, self._peak_cause())
        lines = [f"<p><b>{format_bytes(self.peak)}</b> at the peak on {html.escape(self.device)}, in {phase}, set by {operator}</p>"]
        if self.counters:
            c = self.counters
            device = "" if c.device is None else f", device {format_bytes(c.device)}"
            counted = f"allocated {format_bytes(c.allocated)}, reserved {format_bytes(c.reserved)}{device}"
            lines.append(f"<p>CUDA's own counters (with workspaces and whole blocks): {counted}</p>")
        return "".join(lines) + self.breakdown()._repr_html_()


def _running(events: Events) -> np.ndarray:
    """Bytes in storages after 0, 1, 2... events; shape (events + 1,)."""
    return np.concatenate(([0], np.cumsum(events.nbytes)))


def _breakdown(events: Events, count: int) -> MemoryBreakdown:
    """Bytes by category when the first ``count`` events have happened."""
    sums = np.zeros(len(Category), np.int64)
    np.add.at(sums, events.category[:count], events.nbytes[:count])
    return MemoryBreakdown(*sums.tolist())


def _moment(events: Events, at: str | int) -> int:
    """How many events have happened at the moment that ``at`` names."""
    count, seeds = len(events.nbytes), events.seeds
    if isinstance(at, int | np.integer):  # pandas and NumPy give the second kind
        if not 0 <= at < count:
            raise ValueError(f"An event's number is at least 0 and below {count}, got {at}.")
        return int(at) + 1
    running = _running(events)
    labels = {p.label: p for p in Phase}
    if at == "start":
        return seeds
    if at == "end":
        return count
    if at == "peak":  # what existed before existed at once: no peak among the seeds
        return seeds + int(running[seeds:].argmax())
    phase = at.removeprefix("end of ") if isinstance(at, str) else None
    if phase not in labels:
        known = ", ".join(f"{label!r}, 'end of {label}'" for label in labels)
        raise ValueError(f"A moment is 'peak', 'start', 'end', an event's number or one of {known}, got {at!r}.")
    inside = seeds + 1 + np.flatnonzero(events.phase[seeds:] == labels[phase])
    if not len(inside):
        raise ValueError(f"This trace has no event in phase {phase!r}.")
    if phase == at:
        moments = np.union1d(inside - 1, inside)  # what was there when the phase began was there in it
        return int(moments[running[moments].argmax()])
    breaks = np.flatnonzero(np.diff(inside) > 1)
    return int(inside[breaks[0]] if len(breaks) else inside[-1])
