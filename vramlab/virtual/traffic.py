"""What ranks send one another in a training step: bytes by collective, as called, and how long they may take. No torch."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vramlab.gpus import GPU
from vramlab.units import format_bytes


class Link(NamedTuple):
    """What connects cards: bytes/s of each rank's share of a collective (nccl-tests' bus bandwidth), and where that comes from."""

    name: str
    bandwidth: float
    source: str


WITHOUT_P2P = Link(
    "PCIe 4.0 x16 without P2P",
    14.5e9,
    "measured: nccl-tests' all-reduce of 128 MiB on eight RTX 4090, blog.chlc.cc/p/rtx4090-gpudirect-p2p-unlocked",
)
WITH_P2P = Link(
    "PCIe 4.0 x16 with P2P",
    24.5e9,
    "measured: nccl-tests' all-reduce of 32 MiB on six RTX 4090 with a patched driver, README of tinygrad/open-gpu-kernel-modules",
)
A100_NVLINK = Link(
    "NVLink (A100)",
    192e9,
    "measured: nccl-tests' all-reduce of 512 MiB on two A100-SXM4, a public log; one direction of its links has 300e9",
)


def links_of(card: GPU) -> list[Link]:
    """PCIe as the card has it, and NVLink for comparison: the card's own, or an A100's if it has none."""
    one_way = f"theoretical: {card.name}'s links in one direction"
    nvlink = Link(f"NVLink ({card.name})", card.nvlink / 2, one_way) if card.nvlink else A100_NVLINK
    return [WITH_P2P if card.p2p else WITHOUT_P2P, nvlink]


class Call(NamedTuple):
    """One collective: what it is, the ranks that take part, and the bytes of the whole tensor on one rank."""

    kind: str
    ranks: int
    nbytes: int


_SHARES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "gather": 1, "scatter": 1}
"""How often each part of the tensor passes a rank's link; the rank's own part stays where it is."""


@dataclass(frozen=True)
class Communication:
    """What one rank takes part in during a training step, counted from the collectives that the code calls. Times are estimated.

    ``calls`` has one entry a collective, in order.
    """

    calls: tuple[Call, ...]

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of the tensors, by kind: an all-gather's is what comes out, a reduce-scatter's what goes in."""
        sums: Counter[str] = Counter()
        for call in self.calls:
            sums[call.kind] += call.nbytes
        return dict(sums)

    @property
    def total(self) -> int:
        """Bytes of the tensors of all collectives."""
        return sum(call.nbytes for call in self.calls)

    @property
    def wire(self) -> int:
        """Bytes that leave this rank if collectives run in a ring: of an all-reduce over n ranks ``2 (n - 1) / n`` of its bytes.

        ``(n - 1) / n`` of an all-gather and a reduce-scatter, all of what is sent to one rank or handed on to all, nothing of what is
        received.

        Reference: ``doc/PERFORMANCE.md`` of NVIDIA/nccl-tests.
        """
        return sum(map(_wire, self.calls))

    def seconds(self, link: Link) -> float:
        """Estimated: ``wire`` at the link's bandwidth, without latencies, and as if nothing else were computed meanwhile."""
        return self.wire / link.bandwidth

    def estimates(self, card: GPU) -> dict[str, float]:
        """Estimated seconds by link: the card's PCIe, and NVLink."""
        return {link.name: self.seconds(link) for link in links_of(card)}

    def __str__(self) -> str:
        if not self.calls:
            return "nothing is sent"
        parts = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in self.by_kind.items())
        return f"{format_bytes(self.wire)} sent a step ({parts})"

    def words(self, card: GPU) -> str:
        """With the estimated times: ``1.2 GiB sent a step (all-reduce 1.6 GiB), estimated 0.09 s over PCIe...``."""
        if not self.calls:
            return str(self)
        times = ", ".join(f"{seconds:.2g} s over {name}" for name, seconds in self.estimates(card).items())
        return f"{self}; estimated {times}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(kind)}</td><td>{sum(c.kind == kind for c in self.calls)}</td><td>{format_bytes(nbytes)}</td></tr>"
            for kind, nbytes in self.by_kind.items()
        )
        return f"<table><tr><th>collective</th><th>calls</th><th>bytes</th></tr>{rows}</table><p>{html.escape(str(self))}</p>"


def _wire(call: Call) -> int:
    if call.kind == "receive" or call.ranks < 2:
        return 0
    shares = _SHARES.get(call.kind)
    return call.nbytes if shares is None else shares * call.nbytes * (call.ranks - 1) // call.ranks


def total(parts: Iterable[Communication]) -> Communication:
    """Of several ranks or steps together."""
    return Communication(tuple(call for part in parts for call in part.calls))
