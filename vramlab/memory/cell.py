"""CellMemory: what one cell of a notebook did to the memory. Plain data and text, no torch."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from vramlab.gpus import GPU
from vramlab.memory.trace import MemoryTrace
from vramlab.units import format_bytes

SHOWN = 5  # lines of code that hold memory at the peak


@dataclass(frozen=True)
class CellMemory:
    """Peak, change and holders of one cell. All sizes are bytes.

    On the CPU they are those of storages, on CUDA and on a virtual card those of the caching allocator's blocks.
    """

    device: str
    trace: MemoryTrace
    """Every allocation and release while the cell ran."""
    before: int
    """Allocated when the cell began; on the CPU of what the cell has used."""
    allocated: int
    """The peak."""
    after: int
    """Allocated when it ended."""
    reserved: int | None = None
    """The peak that PyTorch took from the driver; None on the CPU."""
    card: GPU | None = None
    """The card that the cell was planned for; None: it really ran."""
    in_use: int = 0
    """What others hold of that card."""
    fits: bool = True
    """Whether it fits that card."""
    value: str = ""
    """The text of the cell's last expression, where that could not travel."""
    reads: dict[str, int] = field(default_factory=dict, repr=False)
    """Where a planned cell read floating-point numbers, which gave 0.0: line and how often."""
    notes: list[str] = field(default_factory=list, repr=False)
    """What is missing from the bytes, because its size is not published."""
    stayed: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables that could not travel to the planner process, and why."""
    error: str = ""
    """The error that ended the cell early."""
    shown: int = field(default=SHOWN, repr=False)
    """How many lines of code are listed."""

    @property
    def change(self) -> int:
        """What the cell has left behind; negative: released."""
        return self.after - self.before

    @property
    def device_peak(self) -> int | None:
        """On a card everything in use at the peak, as nvidia-smi would show it: reserved, CUDA context, others."""
        return None if self.card is None or self.reserved is None else self.reserved + self.card.context + self.in_use

    @property
    def capacity(self) -> int | None:
        """What the card leaves for PyTorch."""
        return None if self.card is None else self.card.left_for_pytorch(self.in_use)

    @property
    def cause(self) -> str:
        """What was running when the peak was reached: phase, operator, module and line."""
        events, i = self.trace.events, self.trace.peak_event
        if i < events.seeds or i < 0:
            return "before the cell"
        line = events.lines[events.line[i]] if events.line is not None else ""
        module = events.modules[events.module[i]]
        phase = f" in {self.trace.peak_phase}" if self.trace.peak_phase != "build" else ""
        return f"{events.operators[events.operator[i]]}{phase}{f', {module}' if module else ''}{f', {line}' if line else ''}"

    def holders(self) -> list[tuple[str, int]]:
        """The lines of code whose tensors were alive at the peak, largest first; what existed before has none."""
        if not len(self.trace):
            return []
        by = "line" if self.trace.events.line is not None else "operator"
        rows = self.trace.holders_by(by, 10**6)
        return [(str(name) or "before the cell, or not by its code", int(n)) for name, n in rows.itertuples(index=False)]

    def _verdict(self) -> str:
        if self.card is None or self.capacity is None or self.reserved is None:
            return ""
        if not self.fits:
            return f"does not fit {self.card}: {format_bytes(self.reserved - self.capacity)} too much"
        far = self.capacity - self.reserved
        return f"fits {self.card}, {format_bytes(far)} left" if far >= 0 else f"fits {self.card}, after emptying its cache"

    def _lines(self) -> list[str]:
        sizes = f"peak {format_bytes(self.allocated)} allocated"
        if self.reserved is not None:
            sizes += f", {format_bytes(self.reserved)} reserved"
        if self.device_peak is not None:
            sizes += f", device {format_bytes(self.device_peak)}"
        where = f"planned for {self.device}" if self.card is not None else self.device
        lines = [
            f"{where}: {sizes}" + (f"; {self._verdict()}" if self.card else ""),
            f"change {'+' if self.change >= 0 else ''}{format_bytes(self.change)}: "
            f"{format_bytes(self.before)} before, {format_bytes(self.after)} after",
        ]
        if len(self.trace):
            lines.append(f"the peak was set by {self.cause}")
        if self.error:
            lines.append(f"the cell ended early: {self.error}")
        if self.reads:
            lines.append(f"numbers that were read and gave 0.0: {', '.join(f'{n} at {line}' for line, n in self.reads.items())}")
        lines += [f"Note: {note}." for note in self.notes]
        return lines + [f"{name} stayed in the notebook: {why}" for name, why in self.stayed.items()]

    def _rows(self) -> list[tuple[str, str]]:
        found = self.holders()
        rows = [(format_bytes(n), name) for name, n in found[: self.shown]]
        if rest := found[self.shown :]:
            rows.append((format_bytes(sum(n for _, n in rest)), f"{len(rest)} other lines"))
        return rows

    def __repr__(self) -> str:
        lines = self._lines()
        if rows := self._rows():
            lines += ["held at the peak, by the line that made it:", *(f"  {size:>11}  {name}" for size, name in rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        first, *others = map(html.escape, self._lines())
        cell = "<tr><td style='text-align:right'>{}</td><td style='text-align:left'>{}</td></tr>"
        rows = "".join(cell.format(size, html.escape(name)) for size, name in self._rows())
        held = f"<div><b>held at the peak, by the line that made it</b><table>{rows}</table></div>" if rows else ""
        by_category = f"<div style='margin-right:2em'>{self.trace.breakdown()._repr_html_()}</div>" if len(self.trace) else ""
        return f"<p><b>{first}</b><br>{'<br>'.join(others)}</p><div style='display:flex;flex-wrap:wrap'>{by_category}{held}</div>"
