"""OutOfMemoryReport: what an out-of-memory error would have to say. Plain data and text, no torch."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vramlab.memory.trace import MemoryBreakdown, MemoryTrace
from vramlab.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 5  # rows of each table


@dataclass(frozen=True)
class Change:
    """One change to the recipe, and what the step then needs on the same card, planned."""

    words: str
    """``checkpointing blocks``"""
    options: dict[str, Any]
    """The Recipe's fields that change."""
    allocated: int
    reserved: int
    fits: bool


@dataclass(frozen=True)
class OutOfMemoryReport:
    """Who held the memory when there was no more, and what would change that. All sizes are bytes."""

    device: str
    requested: int
    """What the operator asked for."""
    segment: int
    """What the driver was asked for, the number in PyTorch's message."""
    capacity: int | None
    """What PyTorch may reserve; None where it is not known."""
    allocated: int
    reserved: int
    where: str
    """The operator that asked, its phase, module and line."""
    trace: MemoryTrace
    """All events until then."""
    largest_hole: int = 0
    """The largest free piece of what is reserved."""
    plan_changes: Callable[[], list[Change]] | None = field(default=None, repr=False, compare=False)
    """Plans single changes to the recipe; None where there is no recipe."""

    @property
    def cached(self) -> int:
        """Reserved, and not allocated: in pieces between allocated ones, none large enough."""
        return self.reserved - self.allocated

    @property
    def fits_in_one_piece(self) -> bool:
        """Whether it is fragmentation alone that it failed for: together the free pieces would have been enough."""
        return self.capacity is not None and self.requested <= self.capacity - self.allocated

    @property
    def breakdown(self) -> MemoryBreakdown:
        """Bytes by category at the end."""
        return self.trace.breakdown("end") if len(self.trace) else MemoryBreakdown()

    def holders(self, by: str = "line", n: int = SHOWN) -> pd.DataFrame:
        """Bytes at the end by ``"line"``, ``"module"``, ``"operator"`` or ``"category"``, largest first."""
        return self.trace.holders_by(by, n, at="end")

    @cached_property
    def changes(self) -> list[Change]:
        """Single changes to the recipe, each planned again, those that fit first and of these the one that needs least change
        to the numbers; empty without a recipe. Takes seconds the first time."""
        return self.plan_changes() if self.plan_changes is not None else []

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            "device": self.device,
            "requested": self.requested,
            "segment": self.segment,
            "capacity": self.capacity,
            "allocated": self.allocated,
            "reserved": self.reserved,
            "cached": self.cached,
            "largest_hole": self.largest_hole,
            "fits_in_one_piece": self.fits_in_one_piece,
            "where": self.where,
            "by_category": {label: n for label, n in self.breakdown.items() if n},
            "by_module": self._rows("module"),
            "by_line": self._rows("line"),
            "changes": [vars(change) for change in self.changes],
        }

    def _rows(self, by: str) -> list[dict[str, Any]]:
        if not len(self.trace) or (by == "line" and len(self.trace.events.lines) < 2):
            return []
        return [{by: name, "bytes": int(n)} for name, n in self.holders(by).itertuples(index=False)]

    def _sections(self) -> list[tuple[str, list[tuple[str, int]]]]:
        rows = {by: [(row[by] or f"(no {by})", row["bytes"]) for row in self._rows(by)] for by in ("module", "line")}
        held = sorted(((label, n) for label, n in self.breakdown.items() if n), key=lambda item: -item[1])
        return [("held by category", held), ("by module", rows["module"]), ("by line", rows["line"])]

    def summary(self) -> str:
        """Three lines: what failed, what was held, what fragmentation cost."""
        room = f" of {format_bytes(self.capacity)}" if self.capacity is not None else ""
        lines = [
            f"{self.device} ran out of memory: {format_bytes(self.requested)} more for {self.where}.",
            f"Allocated {format_bytes(self.allocated)}, reserved {format_bytes(self.reserved)}{room}.",
        ]
        if self.cached:
            lines.append(f"{format_bytes(self.cached)} of it is free, in pieces of at most {format_bytes(self.largest_hole)}.")
            if self.fits_in_one_piece:
                lines[-1] += " Together that is enough for it: try PYTORCH_ALLOC_CONF=expandable_segments:True."
            else:
                lines[-1] += " Even in one piece that is too little."
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.summary()]
        for title, rows in self._sections():
            if rows:
                lines += ["", title, *(f"  {format_bytes(n):>11}  {name}" for name, n in rows)]
        if self.plan_changes is not None:
            lines += ["", "one change to the recipe, planned again"]
            lines += [f"  {'fits' if c.fits else 'no':4}  {format_bytes(c.reserved):>11} reserved  {c.words}" for c in self.changes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def table(title: str, rows: list[tuple[str, str]]) -> str:
            cell = "<tr><td style='text-align:right'>{}</td><td style='text-align:left'>{}</td></tr>"
            cells = "".join(cell.format(size, html.escape(name)) for size, name in rows)
            return f"<div style='margin-right:2em'><b>{title}</b><table>{cells}</table></div>"

        tables = [table(title, [(format_bytes(n), name) for name, n in rows]) for title, rows in self._sections() if rows]
        if self.plan_changes is not None:
            verdicts = [(f"{'fits' if c.fits else 'no'}, {format_bytes(c.reserved)} reserved", c.words) for c in self.changes]
            tables.append(table("one change to the recipe, planned again", verdicts))
        summary = "<br>".join(map(html.escape, self.summary().splitlines()))
        return f"<p>{summary}</p><div style='display:flex;flex-wrap:wrap'>{''.join(tables)}</div>"
