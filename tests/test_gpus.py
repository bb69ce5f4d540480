"""Cards: every figure has a source, forgiving names, this machine's card. No card is needed: torch.cuda and NVML are stubbed."""

import contextlib
import copy
import dataclasses
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vramlab.gpus import CONTEXT, CONTEXT_RANGE, DRIVER_SHARE, GPU, cards, gpu
from vramlab.units import GiB, MiB

CARDS = {card.name: card for card in cards()}
FIGURES = [field.name for field in dataclasses.fields(GPU) if field.name not in ("name", "note", "sources")]
every_card = pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)

# What the box says, in GiB.
NOMINAL = {
    "RTX 2080 Ti": 11,
    "RTX 3060": 12,
    "RTX 3090": 24,
    "RTX 4060": 8,
    "RTX 4060 Ti 16GB": 16,
    "RTX 4070 Ti SUPER": 16,
    "RTX 4080": 16,
    "RTX 4090": 24,
    "RTX 4090 Laptop": 16,
    "RTX 5080": 16,
    "RTX 5090": 32,
    "T4": 16,
    "V100 SXM2 16GB": 16,
    "V100 SXM2 32GB": 32,
    "V100 PCIe 16GB": 16,
    "V100 PCIe 32GB": 32,
    "A10": 24,
    "A10G": 24,
    "L4": 24,
    "L40S": 48,
    "RTX 6000 Ada": 48,
    "RTX A6000": 48,
    "A100 40GB": 40,
    "A100 40GB PCIe": 40,
    "A100 80GB": 80,
    "A100 80GB PCIe": 80,
    "H100 SXM": 80,
    "H100 PCIe": 80,
    "H200": 141,
}

# Fused multiply-adds in one SM and clock, by NVIDIA's whitepapers: fp32, tf32, fp16 with fp32 sums.
RATES = {(7, 0): (64, None, 512), (7, 5): (64, None, 512), (8, 0): (64, 512, 1024), (9, 0): (128, 1024, 2048)}
PROFESSIONAL, GEFORCE = (128, 256, 512), (128, 128, 256)
OTHER_CLOCK = {("H100 SXM", "fp32"), ("H100 PCIe", "fp32"), ("H200", "fp32")}
"""The datasheet's float32 is at a higher clock than its tensor figures."""


def rates(card: GPU) -> tuple[int, int | None, int]:
    if card.name == "RTX 2080 Ti":
        return (64, None, 256)
    geforce = card.name.startswith("RTX") and card.name not in ("RTX A6000", "RTX 6000 Ada")
    return RATES.get(card.capability, GEFORCE if geforce else PROFESSIONAL)


# The table


@every_card
@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_has_a_source_also_one_that_is_not_known(card: GPU, figure: str) -> None:
    assert card.sources[figure].strip()


@every_card
def test_no_source_is_of_a_figure_that_does_not_exist(card: GPU) -> None:
    assert set(card.sources) == set(FIGURES)


@every_card
@pytest.mark.parametrize(("index", "figure"), [(0, "fp32"), (1, "tf32"), (2, "fp16")])
def test_tflops_are_sms_times_clock_times_rate(card: GPU, index: int, figure: str) -> None:
    tflops, rate = getattr(card, figure), rates(card)[index]
    assert card.sms is not None
    assert card.clock is not None
    if rate is None:
        assert tflops is None
        assert card.sources[figure] == "the hardware has none"
    elif card.name == "A10G":
        assert tflops is None  # its sources disagree
    else:
        computed = card.sms * card.clock * rate * 2 / 1000
        assert (tflops == pytest.approx(computed, rel=0.02)) is ((card.name, figure) not in OTHER_CLOCK)
        if card.sources[figure].startswith("computed"):
            assert tflops == round(computed, 1)
            assert card.sources[figure] == f"computed: {card.sms} SMs x {card.clock} GHz x {rate} multiply-adds x 2"


@every_card
def test_torch_reports_a_little_less_than_the_box_says(card: GPU) -> None:
    assert 0.9 * NOMINAL[card.name] * GiB < card.memory < NOMINAL[card.name] * GiB


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("RTX 3060", 12_622_168_064), ("RTX 4060", 8_318_222_336), ("A100-SXM4-40GB", 42_474_471_424)],
)
def test_memory_is_not_above_what_xmems_runs_had(name: str, nbytes: int) -> None:
    """``gpu_total_bytes`` of the published measurements, of drivers that kept less for themselves than those of today."""
    assert 0.98 * nbytes < gpu(name).memory < nbytes


def test_the_4090_has_the_conservative_memory_and_names_the_optimistic() -> None:
    card = gpu("RTX 4090")
    assert card.memory == 25_253_904_384 == 24_084 * MiB
    assert "24,217 MiB on Linux, the optimistic value" in card.note


@pytest.mark.parametrize(("name", "smi"), [("RTX 4080", 16_376), ("RTX 4090 Laptop", 16_376), ("A10", 23_028)])
def test_memory_that_was_not_seen_is_nvidia_smis_total_less_the_largest_gap(name: str, smi: int) -> None:
    assert gpu(name).memory == smi * MiB - DRIVER_SHARE
    assert gpu(name).sources["memory"].startswith(f"not seen from torch: nvidia-smi's {smi:,} MiB")


def test_only_those_three_are_marked_as_not_seen() -> None:
    assert [card.name for card in cards() if "not seen" in card.sources["memory"]] == ["RTX 4080", "RTX 4090 Laptop", "A10"]


@every_card
def test_links_are_what_their_kind_can_be(card: GPU) -> None:
    """GT/s x lanes x 128/130 / 8, rounded to three digits as everywhere."""
    rates_of_pcie = {(gt, lanes): gt * lanes * 128 / 130 / 8 for gt, lanes in ((8, 16), (16, 8), (16, 16), (32, 16))}
    assert card.pcie is None or any(card.pcie == pytest.approx(rate * 1e9, rel=1e-3) for rate in rates_of_pcie.values())
    assert card.nvlink in (None, 0, 100e9, 112.5e9, 300e9, 600e9, 900e9)


@pytest.mark.parametrize("card", [card for card in CARDS.values() if card.architecture == "Ada"], ids=str)
def test_no_ada_card_has_nvlink(card: GPU) -> None:
    assert card.nvlink == 0


@pytest.mark.parametrize("card", [card for card in CARDS.values() if rates(card)[2] == 256], ids=str)
def test_no_geforce_card_is_said_to_read_another_over_pcie(card: GPU) -> None:
    assert not card.p2p


@every_card
def test_bandwidth_is_in_bytes_a_second(card: GPU) -> None:
    assert card.bandwidth is not None
    assert 200e9 < card.bandwidth < 10_000e9


# One card


@pytest.mark.parametrize(
    ("capability", "architecture", "bf16", "workspace"),
    [
        ((3, 5), "unknown", False, 8_519_680),
        ((5, 2), "Maxwell", False, 8_519_680),
        ((6, 1), "Pascal", False, 8_519_680),
        ((7, 0), "Volta", False, 8_519_680),
        ((7, 5), "Turing", False, 8_519_680),
        ((8, 0), "Ampere", True, 8_519_680),
        ((8, 6), "Ampere", True, 8_519_680),
        ((8, 9), "Ada", True, 8_519_680),
        ((9, 0), "Hopper", True, 33_554_432),
        ((10, 0), "Blackwell", True, 33_554_432),
        ((11, 0), "Blackwell", True, 33_554_432),
        ((12, 0), "Blackwell", True, 33_554_432),
        ((13, 0), "unknown", True, 8_519_680),
    ],
)
def test_the_capability_decides_architecture_bf16_and_cublas(
    capability: tuple[int, int], architecture: str, bf16: bool, workspace: int
) -> None:
    """Workspace: ``parseChosenWorkspaceSize`` as in torch 2.14.1, where majors 9 to 12 take 32 MiB."""
    card = GPU(name="mine", memory=GiB, capability=capability, fp16=100.0)
    assert card.architecture == architecture
    assert card.supports_bf16 is bf16
    assert card.bf16 == (100.0 if bf16 else None)
    assert card.cublas_workspace == workspace


def test_a_card_of_your_own_needs_three_figures() -> None:
    card = GPU(name="mine", memory=24 * GiB, capability=(8, 9))
    assert str(card) == "mine (24.00 GiB)"
    assert card.context == CONTEXT == 450 * MiB
    assert CONTEXT_RANGE[0] <= card.context <= CONTEXT_RANGE[1]
    assert [getattr(card, figure) for figure in FIGURES if figure not in ("memory", "capability", "context")] == [None] * 9
    assert card.sources == {}
    assert gpu(card) is card


def test_sizes_are_read_from_text() -> None:
    card = GPU(name="mine", memory="24 GiB", capability=(8, 9), context="0.5 GiB")  # type: ignore[arg-type]
    assert (card.memory, card.context) == (24 * GiB, GiB // 2)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"name": ""}, ValueError, "A GPU has a name, got ''; write for example GPU(name='mine', memory='24 GiB', capability=(8, 9))."),
        ({"memory": 0}, ValueError, "A GPU has memory, got 0 bytes; write for example memory='24 GiB'."),
        ({"memory": "0 GiB"}, ValueError, "A GPU has memory, got 0 bytes; write for example memory='24 GiB'."),
        ({"memory": -1}, ValueError, "A size is not negative, got -1."),
        ({"memory": "much"}, ValueError, "A size is a number and a unit (B, KiB, MiB, GiB), got 'much'; write for example '12 GiB'."),
        ({"memory": 2.5e9}, TypeError, "A size is text or a whole number of bytes, got 2500000000.0; write for example '12 GiB'."),
        ({"context": -1}, ValueError, "A size is not negative, got -1."),
        *(
            ({"capability": pair}, ValueError, f"A compute capability is a pair of whole numbers such as (8, 9), got {pair!r}.")
            for pair in ("8.9", 8.9, (8,), (8, 9, 0), (8, -1), (8, 9.0), (True, 0), [8, 9], None)
        ),
    ],
)
def test_a_card_that_cannot_be_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text) + "$"):
        GPU(**{"name": "mine", "memory": GiB, "capability": (8, 9), **changes})
    with pytest.raises(error, match=re.escape(text) + "$"):
        gpu("RTX 4090").with_(**changes)


def test_with_changes_figures_and_their_sources_and_leaves_the_original() -> None:
    card = gpu("RTX 4090")
    smaller = card.with_(memory="20 GiB", context=0)
    assert (smaller.memory, smaller.context) == (20 * GiB, 0)
    assert smaller.sources == {**card.sources, "memory": "given by the user", "context": "given by the user"}
    assert dataclasses.replace(smaller, memory=card.memory, context=card.context) == card
    assert gpu("RTX 4090") == card


def test_with_takes_sources_too() -> None:
    assert gpu("T4").with_(memory=GiB, sources={"memory": "measured"}).sources == {"memory": "measured"}


@every_card
def test_a_card_survives_pickling_copying_and_serves_as_a_key(card: GPU) -> None:
    for other in (pickle.loads(pickle.dumps(card)), copy.deepcopy(card)):
        assert other == card
        assert other.sources == card.sources
        assert {card: 1}[other] == 1


def test_no_two_cards_are_the_same() -> None:
    assert len(set(cards())) == len(CARDS) == len(cards())


# Names


VENDOR = st.sampled_from(["", "NVIDIA", "GeForce", "Tesla", "Quadro", "nvidia geforce", "NVIDIA GPU"])


@st.composite
def spellings(draw: st.DrawFn) -> tuple[str, GPU]:
    """A card's name with other case, other separators (or none) and vendor words; RTX and the box's size come and go."""
    card = draw(st.sampled_from(list(CARDS.values())))
    words = card.name.split()
    if words[0] == "RTX" and draw(st.booleans()):
        words = words[1:]
    if not any(word.endswith("GB") for word in words) and draw(st.booleans()):
        words.append(f"{NOMINAL[card.name]}{draw(st.sampled_from(['', ' ', '-']))}{draw(st.sampled_from(['G', 'GB', 'GiB']))}")
    words = [draw(VENDOR), *words, draw(st.sampled_from(["", "GPU", "Graphics Card"]))]
    text = "".join(draw(st.sampled_from(["", " ", "-", "_", "  ", " - "])) + word for word in words)
    flips = draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    return "".join(letter.swapcase() if flip else letter for letter, flip in zip(text, flips, strict=True)), card


@given(spellings())
def test_case_separators_and_vendor_words_do_not_count(spelling: tuple[str, GPU]) -> None:
    text, card = spelling
    assert gpu(text) is card


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("geforce rtx 4090", "RTX 4090"),
        ("RTX 4090 (24 GB)", "RTX 4090"),
        ("4070tisuper", "RTX 4070 Ti SUPER"),
        ("4060 8gb", "RTX 4060"),
        ("4060ti 16g", "RTX 4060 Ti 16GB"),
        ("a100-80gb", "A100 80GB"),
        ("A100 80G", "A100 80GB"),
        ("a100sxm480gb", "A100 80GB"),
        ("a100sxm80gb", "A100 80GB"),
        ("a100sxm40gb", "A100 40GB"),
        ("A100 80GB PCIE", "A100 80GB PCIe"),
        ("h100 sxm", "H100 SXM"),
        ("h100-sxm5-80gb", "H100 SXM"),
        ("v100sxm216gb", "V100 SXM2 16GB"),
        ("V100 PCIe 32 GiB", "V100 PCIe 32GB"),
        ("l424gb", "L4"),
        ("l40s48gb", "L40S"),
        ("a1024gb", "A10"),
        ("a10g", "A10G"),
        ("6000 ada", "RTX 6000 Ada"),
        ("a6000", "RTX A6000"),
    ],
)
def test_short_names_are_enough(text: str, name: str) -> None:
    assert gpu(text) is CARDS[name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 5080", "RTX 5080"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_the_names_that_torch_prints_are_read(text: str, name: str) -> None:
    assert gpu(text) is CARDS[name]


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("a100", "A100 40GB, A100 40GB PCIe, A100 80GB and A100 80GB PCIe"),
        ("A100 SXM4", "A100 40GB and A100 80GB"),
        ("H100", "H100 SXM and H100 PCIe"),
        ("H100 80GB", "H100 SXM and H100 PCIe"),
        ("V100", "V100 SXM2 16GB, V100 SXM2 32GB, V100 PCIe 16GB and V100 PCIe 32GB"),
        ("Tesla V100 32GB", "V100 SXM2 32GB and V100 PCIe 32GB"),
    ],
)
def test_a_name_of_several_cards_is_refused_with_their_names(text: str, candidates: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' fits {candidates}; name one of them\\.$"):
        gpu(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("RTX 4095", "; the nearest is 'RTX 4090'"),
        ("4090 12GB", "; the nearest is 'RTX 4090'"),
        ("4070 Ti", "; the nearest is 'RTX 4070 Ti SUPER'"),
        ("4060 Ti", "; the nearest is 'RTX 4060 Ti 16GB'"),
        ("NVIDIA H2000", "; the nearest is 'H200'"),
        ("RTX 4090 D", "; the nearest is 'RTX 4090'"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "; the nearest is 'A100 80GB'"),
        ("Radeon", ""),
        ("rtx", ""),
        ("GPU", ""),
        ("", ""),
        ("gpu" * 10_000, ""),
    ],
)
def test_an_unknown_name_gets_the_nearest_the_known_and_the_way_out(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match="is known") as error:
        gpu(text)
    assert str(error.value) == (
        f"No card {text!r} is known{hint}. Known are {', '.join(CARDS)}. "
        "Describe any other: GPU(name='mine', memory='24 GiB', capability=(8, 9))."
    )


@given(st.text() | st.text(alphabet="a1048gbrtxsmpcie -"))
def test_any_text_is_a_card_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert gpu(text) in CARDS.values()


@pytest.mark.parametrize("thing", [4090, 24.0, b"RTX 4090", ("RTX 4090",), torch.device("cpu")])
def test_what_is_neither_text_nor_a_card_is_refused(thing: Any) -> None:
    text = f"A GPU is a name or a GPU, got {thing!r}; write for example gpu('RTX 4090')."
    with pytest.raises(TypeError, match=re.escape(text)):
        gpu(thing)


def test_the_callers_list_is_not_the_table() -> None:
    cards().clear()
    assert cards() == list(CARDS.values())


# This machine


def stub_torch(monkeypatch: pytest.MonkeyPatch, *properties: SimpleNamespace, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])


def seen(name: str, memory: int, capability: tuple[int, int], sms: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, total_memory=memory, major=capability[0], minor=capability[1], multi_processor_count=sms)


def stub_driver(monkeypatch: pytest.MonkeyPatch, fails: str = "", **card: Any) -> list[str]:
    """Let NVML know one card, or fail in one function; returns the list in which its end is noted."""
    log: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: log.append("shutdown"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: card["name"])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(total=card["total"]))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: card["capability"])

    def fail(*args: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    if fails:
        monkeypatch.setattr(pynvml, fails, fail)
    return log


def test_torchs_current_device_with_exact_memory_and_the_tables_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    other = seen("NVIDIA GeForce RTX 3060", 12 * GiB, (8, 6), 28)
    stub_torch(monkeypatch, other, seen("NVIDIA GeForce RTX 4090", 25_393_364_992, (8, 9), 128), current=1)
    card, table = gpu(), CARDS["RTX 4090"]
    assert card == table.with_(name="NVIDIA GeForce RTX 4090", memory=25_393_364_992)
    where = "torch.cuda.get_device_properties on this machine"
    assert card.sources == {**table.sources, "memory": where, "capability": where, "sms": where}


def test_cards_of_one_name_are_told_apart_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_torch(monkeypatch, seen("NVIDIA GeForce RTX 4060 Ti", 15_944 * MiB, (8, 9), 34))
    assert gpu().bandwidth == CARDS["RTX 4060 Ti 16GB"].bandwidth
    stub_torch(monkeypatch, seen("NVIDIA GeForce RTX 4060 Ti", 7_800 * MiB, (8, 9), 34))
    assert gpu().bandwidth is None


@pytest.mark.parametrize(
    "properties",
    [
        seen("NVIDIA GeForce RTX 3060", 8 * GiB, (8, 6), 28),
        seen("NVIDIA GeForce RTX 3060", 12 * GiB, (8, 6), 30),
        seen("NVIDIA GeForce RTX 3060", 12 * GiB, (8, 9), 28),
        seen("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10 * GiB, (8, 0), 14),
        seen("Some New Card", 96 * GiB, (13, 0), 200),
    ],
    ids=["other memory", "other SMs", "other capability", "a slice", "unknown"],
)
def test_a_card_that_the_table_has_not_keeps_only_what_was_seen(monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace) -> None:
    stub_torch(monkeypatch, properties)
    capability = (properties.major, properties.minor)
    sms = properties.multi_processor_count
    assert gpu() == GPU(name=properties.name, memory=properties.total_memory, capability=capability, sms=sms)
    assert set(gpu().sources) == {"memory", "capability", "sms"}


def test_the_drivers_card_is_taken_where_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_torch(monkeypatch)
    log = stub_driver(monkeypatch, name="NVIDIA GeForce RTX 4090", total=24_564 * MiB, capability=(8, 9))
    card = gpu()
    assert card.memory == 24_564 * MiB - DRIVER_SHARE
    assert card.fp16 == 165.2
    assert card.sources["memory"] == "NVML on this machine, memory less DRIVER_SHARE"
    assert log == ["shutdown"]


@pytest.mark.parametrize(
    "fails",
    ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability"],
)
def test_no_card_here_asks_for_a_name(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    stub_torch(monkeypatch)
    log = stub_driver(monkeypatch, fails, name="T4", total=GiB, capability=(7, 5))
    with pytest.raises(
        ValueError, match=r"^There is no CUDA card in this machine, so name the one to plan for, for example gpu\('RTX 4090'\)\.$"
    ):
        gpu()
    assert log == ([] if fails == "nvmlInit" else ["shutdown"])


def test_names_and_cards_need_no_torch_and_no_driver() -> None:
    source = """
import sys
sys.modules["torch"] = sys.modules["pynvml"] = None
from vramlab.gpus import cards, gpu
assert gpu("4090").with_(memory="8 GiB").cublas_workspace and cards()
"""
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr
