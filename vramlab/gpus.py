"""Cards: memory as PyTorch reports it, compute capability, speed and links, with a source for every figure. No torch at import."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vramlab.units import KiB, MiB, format_bytes, parse_bytes

CONTEXT = 450 * MiB
"""Bytes of a CUDA context: what a process takes on a card before its first tensor, with lazily loaded kernels."""
CONTEXT_RANGE = (250 * MiB, 600 * MiB)
"""It varies with driver, card and kernels in use: 256 MiB on RTX 3090 (InvokeAI issue 9413), 426 MiB on RTX 6000 Ada
(unsloth-zoo PR 1053), around 400 MB (pytorch issues 107667, 109888), 459 and 507 MiB in use on RTX 4090 (RLinf issue 255)."""
DRIVER_SHARE = 512 * MiB
"""The rule for a card whose ``total_memory`` was not seen: nvidia-smi's total less this. The gaps that were seen on GeForce
and GDDR6 data centre cards under drivers of 2025 and 2026: 378 (RTX 3060), 381 (RTX 4060), 442 (RTX 4070 Ti SUPER),
448 (T4), 463 (RTX 5080), 471 (L4), 480 (RTX 4090) and 505 MiB (RTX 5090)."""

_ARCHITECTURES = {
    (5, 0): "Maxwell",
    (6, 0): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (13, 0): "unknown",
}
"""From which compute capability on."""


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One card. The first three are needed; of the others None means not known here, or that the hardware has none.

    ``memory`` and ``context`` are bytes, and text such as ``"24 GiB"`` is read too.

    Raises:
        ValueError: no name, no memory, a negative context, or a capability that is not a pair of whole numbers.
        TypeError: ``memory`` or ``context`` is neither text nor a whole number.
    """

    name: str
    memory: int
    """Bytes, what ``torch.cuda.get_device_properties().total_memory`` gives: less than nvidia-smi's total and than the box says."""
    capability: tuple[int, int]
    """Compute capability, as ``torch.cuda.get_device_capability()`` gives it."""
    context: int = CONTEXT
    """Bytes of one process's CUDA context; see ``CONTEXT_RANGE``."""
    sms: int | None = None
    """Streaming multiprocessors."""
    clock: float | None = None
    """Boost clock in GHz."""
    bandwidth: float | None = None
    """Of the card's memory, bytes/s."""
    fp32: float | None = None
    """Peak TFLOPS of float32 outside the tensor cores."""
    tf32: float | None = None
    """Peak dense TFLOPS of TF32; None before Ampere."""
    fp16: float | None = None
    """Peak dense TFLOPS of float16 products added up in float32, which is how PyTorch multiplies."""
    nvlink: float | None = None
    """Bytes/s to all neighbours, both directions together; 0 for none."""
    p2p: bool | None = None
    """Whether cards of this kind read one another's memory over PCIe with the stock driver."""
    pcie: float | None = None
    """Bytes/s in one direction."""
    note: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Figure -> where it comes from. Empty for a card of your own."""

    def __post_init__(self) -> None:
        for size in ("memory", "context"):
            object.__setattr__(self, size, parse_bytes(getattr(self, size)))
        if not self.name:
            raise ValueError("A GPU has a name, got ''; write for example GPU(name='mine', memory='24 GiB', capability=(8, 9)).")
        if self.memory == 0:
            raise ValueError("A GPU has memory, got 0 bytes; write for example memory='24 GiB'.")
        pair = self.capability
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(type(part) is int and part >= 0 for part in pair):
            raise ValueError(f"A compute capability is a pair of whole numbers such as (8, 9), got {pair!r}.")

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory)})"

    @property
    def architecture(self) -> str:
        """Ampere, Ada, ..., by the compute capability; "unknown" for what came before or after the table."""
        known = [name for since, name in _ARCHITECTURES.items() if self.capability >= since]
        return known[-1] if known else "unknown"

    @property
    def supports_bf16(self) -> bool:
        """Tensor cores for bfloat16: compute capability 8.0 and up. Older cards compute it, slowly, in float32."""
        return self.capability >= (8, 0)

    @property
    def bf16(self) -> float | None:
        """Peak dense TFLOPS of bfloat16: those of float16 where there are tensor cores for it."""
        return self.fp16 if self.supports_bf16 else None

    @property
    def cublas_workspace(self) -> int:
        """Bytes that PyTorch allocates for cuBLAS by default, once for every handle and stream that multiplies.

        4096 KiB x 2 + 16 KiB x 8 before Hopper, 4096 KiB x 8 from there on. Source: ``parseChosenWorkspaceSize`` in
        ``ATen/cuda/CublasHandlePool.cpp``. Read in the machine code of torch 2.14.1: majors 9 to 12 take the larger size. On
        the way there: 9.0 alone until pytorch PR 175344 (February 2026) added majors 10 and 12, and PR 189312 (July 2026)
        major 11. By these dates torch 2.11 gives Blackwell the smaller size still; that was not verified.
        ``CUBLAS_WORKSPACE_CONFIG`` overrides it.
        """
        return 4096 * 8 * KiB if 9 <= self.capability[0] <= 12 else 4096 * 2 * KiB + 16 * 8 * KiB

    def left_for_pytorch(self, in_use: int = 0) -> int:
        """Bytes that PyTorch can reserve: without the CUDA context, and what others hold.

        Raises:
            ValueError: nothing is left.
        """
        left = self.memory - self.context - in_use
        if left <= 0:
            raise ValueError(
                f"Nothing of {self} is left: its context takes {format_bytes(self.context)} and others "
                f"{format_bytes(in_use)}; lower in_use."
            )
        return left

    def with_(self, **changes: Any) -> GPU:
        """The same card with other figures, for example ``gpu("RTX 4090").with_(memory="20 GiB")``."""
        sources = {**self.sources, **dict.fromkeys(changes, "given by the user")}
        return dataclasses.replace(self, **{"sources": sources, **changes})


class _Rates(NamedTuple):
    """Fused multiply-adds in one SM and clock: float32, TF32, float16 with float32 sums (0 where there is none)."""

    fp32: int
    tf32: int
    fp16: int


# NVIDIA's whitepapers of Volta, Turing, GA100, GA102, Ada, Hopper and RTX Blackwell; GeForce cards add up float32 at half the
# rate of the professional ones (Turing whitepaper's table: RTX 2080 Ti 113.8 against 56.9 TFLOPS, Quadro RTX 6000 130.5 for both).
_VOLTA = _TURING = _Rates(64, 0, 512)
_TURING_GEFORCE = _Rates(64, 0, 256)
_GA100 = _Rates(64, 512, 1024)
_PRO = _Rates(128, 256, 512)  # A10, A6000, L4, L40S, RTX 6000 Ada
_GEFORCE = _Rates(128, 128, 256)  # RTX 30 to RTX 50
_HOPPER = _Rates(128, 1024, 2048)


class Figure(NamedTuple):
    """A value and where it comes from."""

    value: Any
    source: str


class _Entry(NamedTuple):
    gpu: GPU
    core: frozenset[str]
    """Words that a name of this card has..."""
    all: frozenset[str]
    """...and all that it may have."""


def _card(name: str, capability: Figure, rates: _Rates, sms: Figure, clock: Figure, *, core: str, more: str = "", **figures: Any) -> _Entry:
    """A row of the table. TFLOPS that no source gave are computed; None as a figure leaves them out."""
    note = figures.pop("note", "")
    figures |= {"capability": capability, "sms": sms, "clock": clock}
    for kind, rate in rates._asdict().items():
        computed = round(sms.value * clock.value * rate * 2 / 1000, 1)
        text = f"computed: {sms.value} SMs x {clock.value} GHz x {rate} multiply-adds x 2"
        figures.setdefault(kind, Figure(computed, text) if rate else Figure(None, "the hardware has none"))
    figures["context"] = Figure(CONTEXT, "a default within CONTEXT_RANGE")
    values = {figure: value for figure, (value, _) in figures.items()}
    sources = {figure: source for figure, (_, source) in figures.items()}
    needed = frozenset(core.split())
    return _Entry(GPU(name=name, note=note, sources=sources, **values), needed, needed | frozenset(more.split()))


def _mib(mib: int, source: str) -> Figure:
    """A ``total_memory`` in MiB (PyTorch prints "MB")."""
    return Figure(mib * MiB, source)


def _by_rule(smi: int) -> Figure:
    text = f"not seen from torch: nvidia-smi's {smi:,} MiB (public logs) less DRIVER_SHARE, a conservative rule"
    return Figure(smi * MiB - DRIVER_SHARE, text)


def _gb(per_second: float, source: str) -> Figure:
    return Figure(per_second * 1e9, source)


_LOG = "public log of torch.cuda.get_device_properties"
_BANNER = "public log, Ultralytics banner"
_OOM = "lower edge of the rounded total in out-of-memory texts"
_WHITEPAPER = "NVIDIA whitepaper, as quoted in public repositories"
_DATASHEET = "NVIDIA datasheet"
_SPEC = "datasheet figure on spec pages"
_GENERAL = "general knowledge, no source seen"

_PCIE = "GT/s x lanes x 128/130 / 8"
_X16_3 = _gb(15.75, f"{_PCIE}: 3.0 x16")
_X8_4 = _gb(15.75, f"{_PCIE}: 4.0 x8")
_X16_4 = _gb(31.5, f"{_PCIE}: 4.0 x16")
_X16_5 = _gb(63.0, f"{_PCIE}: 5.0 x16")

_NO_LINK = _gb(0, "NVIDIA to the press: none on the Ada generation (tweaktown.com, meterpreter.org)")
_NO_LINK_G = _gb(0, _GENERAL)
_BRIDGE = Figure(None, "by a bridge over two cards; bandwidth not seen")
_NO_P2P = Figure(False, "NVIDIA's forum for the RTX 4090 (reported by purepc.pl); NVIDIA/nccl-tests issue 117")
_P2P = Figure(True, _GENERAL)
_P2P_UNKNOWN = Figure(None, "not known; torch.cuda.can_device_access_peer decides")

_SM_LOG = "public log (multi_processor_count)"
_CC_LOG = "public log (major, minor)"
_CC_BY_CHIP = "that of all Ada cards"

_A100 = {
    "fp32": Figure(19.5, _DATASHEET),
    "tf32": Figure(156.0, _DATASHEET),
    "fp16": Figure(312.0, _DATASHEET),
    "p2p": _P2P,
    "pcie": _X16_4,
}
_A100_LINK = _gb(600, "NVIDIA, as quoted by overclock3d.net and denvrdata.com: 600 GB/s between A100s")
_H100_SXM = {"tf32": Figure(494.5, _DATASHEET), "nvlink": _gb(900, _GENERAL), "p2p": _P2P, "pcie": _X16_5}
_H100_FP32 = Figure(67.0, f"{_DATASHEET}; at a higher clock than the tensor figures")
_V100 = {"p2p": _P2P, "pcie": _X16_3}
_V100_16 = _mib(16_130, f"{_BANNER} (V100-SXM2-16GB, torch 1.7); 16,160 in others")
_V100_32 = _mib(32_486, f"{_OOM} that name a V100-32GB: 31.73 GiB; V100-PCIE-32GB printed 32,510 in an older {_LOG}")
_V100_CC, _V100_SMS = Figure((7, 0), _CC_LOG), Figure(80, _SM_LOG)
_V100_SXM = {**_V100, "fp32": Figure(15.7, _DATASHEET), "fp16": Figure(125.0, _DATASHEET), "nvlink": _gb(300, _GENERAL)}
_V100_PCIE = {**_V100, "fp32": Figure(14.0, _DATASHEET), "fp16": Figure(112.0, _DATASHEET), "nvlink": _NO_LINK_G}
_V100_PCIE_CLOCK = Figure(1.38, "general knowledge; gives the datasheet's TFLOPS")

_TABLE = [
    _card(
        "RTX 2080 Ti",
        Figure((7, 5), _CC_LOG),
        _TURING_GEFORCE,
        Figure(68, _SM_LOG),
        Figure(1.635, "Founders Edition; gives the whitepaper's TFLOPS (cards to the reference run at 1.545)"),
        core="2080 ti",
        more="rtx 11gb",
        memory=_mib(10_825, f"{_BANNER} (torch 2.6, 2025); 11,009 to 11,020 under older drivers"),
        bandwidth=_gb(616, f"{_SPEC} (cputronic.com, gpu.spicedreamphone.com)"),
        fp16=Figure(56.9, _WHITEPAPER),
        nvlink=_gb(100, _GENERAL),
        p2p=Figure(False, "NVIDIA/nccl-tests issue 117"),
        pcie=_X16_3,
    ),
    _card(
        "RTX 3060",
        Figure((8, 6), _CC_LOG),
        _GEFORCE,
        Figure(28, _SM_LOG),
        Figure(1.777, f"{_SPEC} (topcpu.net)"),
        core="3060",
        more="rtx 12gb",
        memory=_mib(11_910, f"{_BANNER} (torch 2.10, 2026); 11,938 to 12,045 earlier, xMem's runs had 12,622,168,064 bytes"),
        bandwidth=_gb(360, f"{_SPEC} (topcpu.net)"),
        fp32=Figure(12.7, f"{_SPEC} (topcpu.net)"),
        nvlink=_NO_LINK_G,
        p2p=_P2P_UNKNOWN,
        pcie=_X16_4,
        note="The card with 12 GB.",
    ),
    _card(
        "RTX 3090",
        Figure((8, 6), _CC_LOG),
        _GEFORCE,
        Figure(82, _SM_LOG),
        Figure(1.695, _SPEC),
        core="3090",
        more="rtx 24gb",
        memory=_mib(24_089, "lower edge of 23.53 GiB, the least in logs of 2026 that name the card (most: 23.56)"),
        bandwidth=_gb(936, _WHITEPAPER),
        fp32=Figure(35.6, _WHITEPAPER),
        fp16=Figure(71.0, _WHITEPAPER),
        nvlink=_gb(112.5, f"{_WHITEPAPER}: four links, 56.25 GB/s each way"),
        p2p=Figure(None, "disputed: NVIDIA/nccl issue 1127"),
        pcie=_X16_4,
        note="Under older drivers 24,259 to 24,268 MiB.",
    ),
    _card(
        "RTX 4060",
        Figure((8, 9), f"{_SPEC} (fpsbench.com)"),
        _GEFORCE,
        Figure(24, f"{_SPEC} (fpsbench.com)"),
        Figure(2.46, f"{_SPEC} (fpsbench.com, itcreations.com)"),
        core="4060",
        more="rtx 8gb",
        memory=_mib(7_807, f"{_BANNER} (torch 2.5.1, 2026); xMem's runs had 8,318,222,336 bytes under an older driver"),
        bandwidth=_gb(272, f"{_SPEC} (fpsbench.com)"),
        nvlink=_NO_LINK,
        p2p=_P2P_UNKNOWN,
        pcie=_X8_4,
    ),
    _card(
        "RTX 4060 Ti 16GB",
        Figure((8, 9), "public report (compute capability 8.9)"),
        _GEFORCE,
        Figure(34, "4352 shaders / 128"),
        Figure(2.535, _SPEC),
        core="4060 ti 16gb",
        more="rtx",
        memory=_mib(15_938, "lower edge of 15.57 GiB in a public log; 15.60 in another"),
        bandwidth=_gb(288, _GENERAL),
        nvlink=_NO_LINK,
        p2p=_P2P_UNKNOWN,
        pcie=_X8_4,
        note="There is one with 8 GB too.",
    ),
    _card(
        "RTX 4070 Ti SUPER",
        Figure((8, 9), _CC_LOG),
        _GEFORCE,
        Figure(66, _SM_LOG),
        Figure(2.61, f"{_SPEC} (svethardware.cz, thefpsreview.com)"),
        core="4070 ti super",
        more="rtx 16gb",
        memory=_mib(15_934, f"{_LOG} (2026)"),
        bandwidth=_gb(672, f"{_SPEC} (topcpu.net)"),
        fp32=Figure(44.1, f"{_SPEC} (topcpu.net)"),
        nvlink=_NO_LINK,
        p2p=_NO_P2P,
        pcie=_X16_4,
    ),
    _card(
        "RTX 4080",
        Figure((8, 9), _CC_LOG),
        _GEFORCE,
        Figure(76, _SM_LOG),
        Figure(2.505, f"{_SPEC} (svethardware.cz, thefpsreview.com)"),
        core="4080",
        more="rtx 16gb",
        memory=_by_rule(16_376),
        bandwidth=_gb(716.8, f"{_SPEC} (topcpu.net)"),
        fp32=Figure(48.7, f"{_SPEC} (topcpu.net)"),
        nvlink=_NO_LINK,
        p2p=_NO_P2P,
        pcie=_X16_4,
        note="Under an older driver torch reported 16,049 MiB; no log of a recent one was seen.",
    ),
    _card(
        "RTX 4090",
        Figure((8, 9), _CC_LOG),
        _GEFORCE,
        Figure(128, _SM_LOG),
        Figure(2.52, f"{_SPEC} (svethardware.cz, thefpsreview.com)"),
        core="4090",
        more="rtx 24gb",
        memory=_mib(24_084, "23.52 GiB with driver R580 and CUDA 13, pytorch issue 182941: the conservative value"),
        bandwidth=_gb(1008, f"{_SPEC} (svethardware.cz)"),
        fp32=Figure(82.6, f"{_SPEC} (svethardware.cz)"),
        fp16=Figure(165.2, "RTX Blackwell whitepaper V1.1, appendix A, as quoted in a public repository"),
        nvlink=_NO_LINK,
        p2p=_NO_P2P,
        pcie=_X16_4,
        note="Under drivers of 2023 torch reported 24,217 MiB on Linux, the optimistic value; on Windows and WSL 24,563 MiB.",
    ),
    _card(
        "RTX 4090 Laptop",
        Figure((8, 9), "public report (compute capability 8.9)"),
        _GEFORCE,
        Figure(76, f"{_SPEC} (hmc-tech.com)"),
        Figure(1.95, f"{_SPEC} (hmc-tech.com), at 140 W"),
        core="4090 laptop",
        more="rtx 16gb",
        memory=_by_rule(16_376),
        bandwidth=_gb(576, f"{_SPEC} (hmc-tech.com)"),
        tf32=Figure(37.9, f"{_SPEC} (hmc-tech.com), at 140 W"),
        fp16=Figure(75.9, f"{_SPEC} (hmc-tech.com), at 140 W; 66.0 at 120 W"),
        nvlink=_NO_LINK,
        p2p=Figure(None, "a laptop has one"),
        pcie=Figure(None, "x8 or x16, by laptop"),
        note="On Windows torch reports 15.99 GiB.",
    ),
    _card(
        "RTX 5080",
        Figure((12, 0), _CC_LOG),
        _GEFORCE,
        Figure(84, _SM_LOG),
        Figure(2.62, f"{_SPEC} (notebookcheck.net)"),
        core="5080",
        more="rtx 16gb",
        memory=_mib(15_840, f"{_BANNER} (Linux); 16,302 on Windows in a {_LOG}"),
        bandwidth=_gb(960, f"{_SPEC} (notebookcheck.net, biggo.com)"),
        nvlink=_NO_LINK_G,
        p2p=_P2P_UNKNOWN,
        pcie=Figure(_X16_5.value, f"{_X16_5.source} ({_GENERAL})"),
    ),
    _card(
        "RTX 5090",
        Figure((12, 0), _WHITEPAPER),
        _GEFORCE,
        Figure(170, _SM_LOG),
        Figure(2.407, "general knowledge; gives the whitepaper's TFLOPS"),
        core="5090",
        more="rtx 32gb",
        memory=_mib(32_102, f"{_BANNER} (torch 2.12, cu130); 32,120 in another"),
        bandwidth=_gb(1792, "general knowledge; a public log has 1.79 TB/s"),
        fp16=Figure(209.5, "RTX Blackwell whitepaper V1.1, appendix A, as quoted in a public repository"),
        nvlink=_NO_LINK_G,
        p2p=Figure(False, "only with patched modules: voipmonitor/rtx6kpro"),
        pcie=Figure(_X16_5.value, f"{_X16_5.source} ({_GENERAL})"),
    ),
    _card(
        "T4",
        Figure((7, 5), _CC_LOG),
        _TURING,
        Figure(40, _SM_LOG),
        Figure(1.59, f"{_SPEC} (sysrqmts.com)"),
        core="t4",
        more="16gb",
        memory=_mib(14_912, f"{_BANNER} (2026); 14,930 in 2025, 15,095 to 15,109 under older drivers"),
        bandwidth=_gb(320, _DATASHEET),
        fp32=Figure(8.1, _DATASHEET),
        fp16=Figure(65.0, _DATASHEET),
        nvlink=_NO_LINK_G,
        p2p=_P2P,
        pcie=_X16_3,
    ),
    _card(
        "V100 SXM2 16GB",
        _V100_CC,
        _VOLTA,
        _V100_SMS,
        Figure(1.53, _SPEC),
        core="v100",
        more="sxm sxm2 16gb",
        memory=_V100_16,
        bandwidth=_gb(900, _DATASHEET),
        **_V100_SXM,
    ),
    _card(
        "V100 SXM2 32GB",
        _V100_CC,
        _VOLTA,
        _V100_SMS,
        Figure(1.53, _SPEC),
        core="v100",
        more="sxm sxm2 32gb",
        memory=_V100_32,
        bandwidth=_gb(900, _DATASHEET),
        **_V100_SXM,
    ),
    _card(
        "V100 PCIe 16GB",
        _V100_CC,
        _VOLTA,
        _V100_SMS,
        _V100_PCIE_CLOCK,
        core="v100",
        more="pcie 16gb",
        memory=_V100_16,
        bandwidth=_gb(900, _DATASHEET),
        **_V100_PCIE,
    ),
    _card(
        "V100 PCIe 32GB",
        _V100_CC,
        _VOLTA,
        _V100_SMS,
        _V100_PCIE_CLOCK,
        core="v100",
        more="pcie 32gb",
        memory=_V100_32,
        bandwidth=_gb(900, _DATASHEET),
        **_V100_PCIE,
    ),
    _card(
        "A10",
        Figure((8, 6), "public log (nvidia-smi's compute_cap)"),
        _PRO,
        Figure(72, f"{_SPEC} (sysrqmts.com)"),
        Figure(1.695, f"{_SPEC} (sysrqmts.com)"),
        core="a10",
        more="24gb pcie",
        memory=_by_rule(23_028),
        bandwidth=_gb(600, _DATASHEET),
        fp32=Figure(31.2, _DATASHEET),
        fp16=Figure(125.0, _DATASHEET),
        nvlink=_NO_LINK_G,
        p2p=_P2P,
        pcie=_X16_4,
    ),
    _card(
        "A10G",
        Figure((8, 6), _CC_LOG),
        _PRO,
        Figure(80, _SM_LOG),
        Figure(1.71, _GENERAL),
        core="a10g",
        more="24gb",
        memory=_mib(22_587, f"{_LOG}; out-of-memory texts of 22.06 GiB agree"),
        bandwidth=_gb(600, "baseten.co, A10 against A10G"),
        fp32=Figure(None, "sources disagree: more than the A10's (baseten.co), the same (Lightning's throughput.py)"),
        tf32=Figure(None, "not seen"),
        fp16=Figure(None, "sources disagree: less than the A10's (baseten.co), the same (Lightning's throughput.py)"),
        nvlink=_NO_LINK_G,
        p2p=_P2P,
        pcie=Figure(None, "not seen"),
    ),
    _card(
        "L4",
        Figure((8, 9), _CC_BY_CHIP),
        _PRO,
        Figure(58, "7,424 shaders / 128: only these give the datasheet's TFLOPS"),
        Figure(2.04, _SPEC),
        core="l4",
        more="24gb",
        memory=_mib(22_563, f"{_BANNER} (torch 2.11, 2026); 22,693 in 2025"),
        bandwidth=_gb(300, f"{_DATASHEET}, as quoted by sourcecode.com"),
        fp32=Figure(30.3, _DATASHEET),
        tf32=Figure(60.0, f"{_DATASHEET}: 120 with sparsity"),
        fp16=Figure(121.0, f"{_DATASHEET}: 242 with sparsity"),
        nvlink=_NO_LINK,
        p2p=_P2P,
        pcie=_X16_4,
    ),
    _card(
        "L40S",
        Figure((8, 9), _CC_LOG),
        _PRO,
        Figure(142, _SM_LOG),
        Figure(2.52, "general knowledge; gives the datasheet's TFLOPS"),
        core="l40s",
        more="48gb",
        memory=_mib(45_589, f"{_LOG} (ECC on)"),
        bandwidth=_gb(864, _DATASHEET),
        fp32=Figure(91.6, _DATASHEET),
        tf32=Figure(183.0, _DATASHEET),
        fp16=Figure(362.0, _DATASHEET),
        nvlink=_NO_LINK,
        p2p=_P2P,
        pcie=_X16_4,
    ),
    _card(
        "RTX 6000 Ada",
        Figure((8, 9), _CC_LOG),
        _PRO,
        Figure(142, _SM_LOG),
        Figure(2.505, f"{_SPEC} (grafikkarten.com)"),
        core="6000 ada",
        more="rtx 48gb",
        memory=Figure(50_865_307_648, f"{_LOG}, exact (2026, ECC off); 48,520 to 48,622 MiB in others"),
        bandwidth=_gb(960, f"{_SPEC} (grafikkarten.com)"),
        fp32=Figure(91.1, f"{_SPEC} (grafikkarten.com)"),
        nvlink=_NO_LINK,
        p2p=_P2P,
        pcie=_X16_4,
        note="With ECC on 44.43 GiB (DINGYANB/MTVCrafter issue 21).",
    ),
    _card(
        "RTX A6000",
        Figure((8, 6), _CC_LOG),
        _PRO,
        Figure(84, _SM_LOG),
        Figure(1.8, f"{_SPEC} (sysrqmts.com)"),
        core="a6000",
        more="rtx 48gb",
        memory=_mib(48_532, "lower edge of 47.40 GiB in a public log of 2026 (ECC off); 48,676 under an older driver"),
        bandwidth=_gb(768, f"{_SPEC} (sysrqmts.com)"),
        fp32=Figure(38.7, _WHITEPAPER),
        fp16=Figure(154.8, _WHITEPAPER),
        nvlink=_gb(112.5, f"{_WHITEPAPER}: by a bridge, both directions"),
        p2p=_P2P,
        pcie=_X16_4,
        note="With ECC on 44.55 GiB.",
    ),
    _card(
        "A100 40GB",
        Figure((8, 0), _CC_LOG),
        _GA100,
        Figure(108, _SM_LOG),
        Figure(1.41, _SPEC),
        core="a100",
        more="sxm sxm4 40gb",
        memory=Figure(42_405_855_232, "deviceQuery of an SXM4 card, exact (upb-pc2.atlassian.net); the same 40,441 MiB with torch 2.11"),
        bandwidth=_gb(1555, _DATASHEET),
        nvlink=_A100_LINK,
        **_A100,
        note="The SXM4 module. xMem's runs had 42,474,471,424 bytes, older drivers gave 40,514 to 40,536 MiB.",
    ),
    _card(
        "A100 40GB PCIe",
        Figure((8, 0), _CC_LOG),
        _GA100,
        Figure(108, _SM_LOG),
        Figure(1.41, _SPEC),
        core="a100",
        more="pcie 40gb",
        memory=_mib(40_326, f"{_LOG} (A100-PCIE-40GB)"),
        bandwidth=_gb(1555, _DATASHEET),
        nvlink=_BRIDGE,
        **_A100,
    ),
    _card(
        "A100 80GB",
        Figure((8, 0), _CC_LOG),
        _GA100,
        Figure(108, _SM_LOG),
        Figure(1.41, _SPEC),
        core="a100",
        more="sxm sxm4 80gb",
        memory=_mib(81_038, f"{_BANNER} (A100-SXM4-80GB), the least; 81,153 with torch 2.7, 81,222 with 2.9"),
        bandwidth=_gb(2039, _DATASHEET),
        nvlink=_A100_LINK,
        **_A100,
        note="The SXM4 module.",
    ),
    _card(
        "A100 80GB PCIe",
        Figure((8, 0), _CC_LOG),
        _GA100,
        Figure(108, _SM_LOG),
        Figure(1.41, _SPEC),
        core="a100",
        more="pcie 80gb",
        memory=_mib(81_154, f"{_BANNER} (A100 80GB PCIe, torch 2.6)"),
        bandwidth=_gb(1935, _GENERAL),
        nvlink=_BRIDGE,
        **_A100,
    ),
    _card(
        "H100 SXM",
        Figure((9, 0), _CC_LOG),
        _HOPPER,
        Figure(132, _SM_LOG),
        Figure(1.83, "general knowledge; gives the datasheet's TFLOPS"),
        core="h100",
        more="sxm sxm5 hbm3 80gb",
        memory=_mib(81_082, f"{_LOG}; 81,090 in another"),
        bandwidth=_gb(3350, _DATASHEET),
        fp32=_H100_FP32,
        fp16=Figure(989.4, _DATASHEET),
        **_H100_SXM,
    ),
    _card(
        "H100 PCIe",
        Figure((9, 0), _CC_LOG),
        _HOPPER,
        Figure(114, _SM_LOG),
        Figure(1.62, "general knowledge; gives the datasheet's TFLOPS"),
        core="h100",
        more="pcie 80gb",
        memory=_mib(81_008, _LOG),
        bandwidth=_gb(2000, _DATASHEET),
        fp32=Figure(51.0, _H100_FP32.source),
        tf32=Figure(378.0, _DATASHEET),
        fp16=Figure(756.0, _DATASHEET),
        nvlink=_BRIDGE,
        p2p=_P2P,
        pcie=_X16_5,
    ),
    _card(
        "H200",
        Figure((9, 0), _CC_LOG),
        _HOPPER,
        Figure(132, _SM_LOG),
        Figure(1.83, "general knowledge; gives the datasheet's TFLOPS"),
        core="h200",
        more="sxm sxm5 141gb",
        memory=_mib(143_156, f"{_BANNER} (torch 2.11)"),
        bandwidth=_gb(4800, _DATASHEET),
        fp32=_H100_FP32,
        fp16=Figure(989.0, _DATASHEET),
        **_H100_SXM,
    ),
]

# Reading names

_IGNORED = frozenset(("nvidia", "geforce", "tesla", "quadro", "gpu", "graphics", "card", "generation"))
_VOCABULARY = _IGNORED.union(*(entry.all for entry in _TABLE))
_SIZE = re.compile(r"([1-9]\d*)g(?:i?b)?")
_LONGEST = 80  # characters of a name, without spaces; _readings goes one call deeper a word


def cards() -> list[GPU]:
    """All cards of the table, GeForce first."""
    return [entry.gpu for entry in _TABLE]


def gpu(name: str | GPU | None = None) -> GPU:
    """The card of a name; without one, this machine's.

    Case, spaces, dashes and the words NVIDIA, GeForce, Tesla, Quadro and GPU do not count, "RTX" and the size may be left
    out where one card is left: ``"4090"``, ``"nvidia geforce rtx 4090"``, ``"a100-80gb"``, ``"H100 SXM"``.

    Args:
        name: a name, a GPU (which is returned as it is), or None: torch's current CUDA device with its exact memory,
            or the driver's first card where torch sees none. Figures that neither tells come from the table.

    Raises:
        ValueError: no such card, several of that name, or no card in this machine.
        TypeError: neither text nor a GPU.
    """
    if isinstance(name, GPU):
        return name
    if name is None:
        return _this_machine()
    if not isinstance(name, str):
        raise TypeError(f"A GPU is a name or a GPU, got {name!r}; write for example gpu('RTX 4090').")
    found = _fitting(name)
    if not found:
        raise ValueError(_unknown(name))
    if len(found) > 1:
        *most, last = (card.name for card in found)
        raise ValueError(f"{name!r} fits {', '.join(most)} and {last}; name one of them.")
    return found[0]


def _fitting(name: str) -> list[GPU]:
    """The cards that a name may mean; if it is one card's whole name, that one only."""
    text = _compact(name)
    readings = [frozenset(words) - _IGNORED for words in _readings(text)] if len(text) <= _LONGEST else []
    found = [entry.gpu for entry in _TABLE if any(entry.core <= words <= entry.all for words in readings)]
    exact = [card for card in found if _compact(card.name) == _bare(text)]
    return exact or found


def _readings(text: str) -> Iterator[list[str]]:
    """All ways to cut a text without spaces into known words and sizes: "sxm40gb" is SXM and 40 GB, not SXM4 and 0 GB."""
    if not text:
        yield []
    for word in _VOCABULARY:
        if text.startswith(word):
            yield from ([word, *rest] for rest in _readings(text[len(word) :]))
    if size := _SIZE.match(text):
        yield from ([f"{size[1]}gb", *rest] for rest in _readings(text[size.end() :]))


def _compact(name: str) -> str:
    return re.sub(r"[\s\-_/,()]+", "", name.lower())


def _bare(text: str) -> str:
    """A compact name without vendor words, sizes written "80gb"."""
    return re.sub(r"(\d+)g(?:ib)?$", r"\1gb", re.sub("|".join(_IGNORED), "", text))


def _unknown(name: str) -> str:
    plain = {_compact(card.name).removeprefix("rtx"): card.name for card in cards()}
    wanted = _bare(_compact(name)).removeprefix("rtx")
    longer = [known for known in plain if wanted and known.startswith(wanted)]  # "4060 Ti": RTX 4060 Ti 16GB, not RTX 4060
    near = longer or difflib.get_close_matches(wanted, plain, n=1, cutoff=0.5)
    hint = f"; the nearest is {plain[near[0]]!r}" if near else ""
    return (
        f"No card {name!r} is known{hint}. Known are {', '.join(plain.values())}. "
        "Describe any other: GPU(name='mine', memory='24 GiB', capability=(8, 9))."
    )


# This machine


def _this_machine() -> GPU:
    card = _seen_by_torch() or _seen_by_driver()
    if card is None:
        raise ValueError("There is no CUDA card in this machine, so name the one to plan for, for example gpu('RTX 4090').")
    return card


def _seen_by_torch() -> GPU | None:
    import torch

    if not torch.cuda.is_available():
        return None
    # Neither call creates a context.
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    exact = {"memory": seen.total_memory, "capability": (seen.major, seen.minor), "sms": seen.multi_processor_count}
    return _completed(seen.name, exact, "torch.cuda.get_device_properties on this machine")


def _seen_by_driver() -> GPU | None:
    """The driver's first card: for a torch that is a CPU build, or too new for the driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = str(pynvml.nvmlDeviceGetName(handle))
        total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    except pynvml.NVMLError:  # no card, or a platform that does not tell
        return None
    finally:
        pynvml.nvmlShutdown()
    return _completed(name, {"memory": total - DRIVER_SHARE, "capability": capability}, "NVML on this machine, memory less DRIVER_SHARE")


def _completed(name: str, exact: dict[str, Any], source: str) -> GPU:
    """What was seen, and from the table what was not. Two cards of one name (RTX 4060 Ti) are told apart by their memory."""
    size = -(-exact["memory"] // (1 << 30))
    for card in _fitting(name) or _fitting(f"{name} {size}GB"):
        same = all(getattr(card, figure) == value for figure, value in exact.items() if figure != "memory")
        if same and abs(card.memory - exact["memory"]) < 0.1 * card.memory:
            sources = {**card.sources, **dict.fromkeys(exact, source)}
            return card.with_(name=name, sources=sources, **exact)
    return GPU(name=name, sources=dict.fromkeys(exact, source), **exact)
