"""Choosing a device, timing it, its peaks, and what the driver says. No card is needed: torch.cuda is stubbed."""

import re
from types import SimpleNamespace

import pynvml
import pytest
import torch

from vramlab import devices
from vramlab.devices import PeakCounters, Stopwatch, cards_seen_by_driver, choose_device, cuda_advice, describe, memory_in_use, synchronize
from vramlab.memory.trace import DeviceCounters

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_choice_made_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VRAMLAB_DEVICE", raising=False)


def stub_cuda(monkeypatch: pytest.MonkeyPatch, count: int, build: str | None = "13.0", cards: tuple[str, ...] = ()) -> None:
    """Let torch seem to have ``count`` CUDA devices, and the driver to see some cards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(devices, "cards_seen_by_driver", lambda: list(cards))


# choose_device


@pytest.mark.parametrize(("count", "chosen"), [(0, "cpu"), (1, "cuda")])
def test_auto_is_cuda_where_there_is_some_else_the_cpu(monkeypatch: pytest.MonkeyPatch, count: int, chosen: str) -> None:
    stub_cuda(monkeypatch, count)
    assert choose_device() == choose_device("auto") == torch.device(chosen)


@pytest.mark.parametrize("value", ["cpu", "cuda:1"])
def test_the_environment_decides_for_auto_only(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    stub_cuda(monkeypatch, 2)
    monkeypatch.setenv("VRAMLAB_DEVICE", value)
    assert choose_device() == torch.device(value)
    assert choose_device("cuda:0") == torch.device("cuda:0")


@pytest.mark.parametrize("value", ["", "auto"])
def test_an_environment_that_says_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    stub_cuda(monkeypatch, 0)
    monkeypatch.setenv("VRAMLAB_DEVICE", value)
    assert choose_device() == torch.device("cpu")


def test_the_cpu_is_not_taken_in_silence_where_the_driver_sees_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch, 0, build=None, cards=("NVIDIA GeForce RTX 4090",))
    with pytest.warns(UserWarning, match="sees NVIDIA GeForce RTX 4090, but this torch is a CPU build. .*pip install"):
        assert choose_device() == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")  # asked for: no warning
    monkeypatch.setenv("VRAMLAB_DEVICE", "cpu")
    assert choose_device() == torch.device("cpu")


def test_a_torch_device_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch, 2)
    for device in (torch.device("cpu"), torch.device("cuda"), torch.device("cuda:1")):
        assert choose_device(device) == device


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "CUDA", "RTX 4090"])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"A device is 'auto', 'cpu', 'cuda' or 'cuda:1', got {name!r}.")):
        choose_device(name)


@pytest.mark.parametrize("name", ["mps", "meta", "xpu"])
def test_other_devices_are_refused_before_anything_runs_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"^vramlab measures on 'cpu' and 'cuda', got '{name}'; on a Mac use 'cpu'"):
        choose_device(name)


def test_cuda_without_cuda_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch, 0, build=None)
    with pytest.raises(ValueError, match=re.escape(f"Device 'cuda' needs CUDA, and torch {torch.__version__} here has none. Use cpu.")):
        choose_device("cuda")
    stub_cuda(monkeypatch, 0, build=None, cards=("NVIDIA GeForce RTX 4090",))
    with pytest.raises(ValueError, match=r"here has none\. The driver sees NVIDIA GeForce RTX 4090, but this torch is a CPU build\."):
        choose_device("cuda")


def test_a_cuda_device_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch, 2)
    with pytest.raises(ValueError, match=re.escape("Device 'cuda:2' does not exist: there are 2 CUDA devices, numbered from 0.")):
        choose_device("cuda:2")


# cuda_advice and describe


@pytest.mark.parametrize(("count", "cards"), [(1, ("RTX",)), (0, ())], ids=["torch has CUDA", "no card"])
def test_no_advice_where_nothing_is_to_be_mended(monkeypatch: pytest.MonkeyPatch, count: int, cards: tuple[str, ...]) -> None:
    stub_cuda(monkeypatch, count, cards=cards)
    assert cuda_advice() == ""


def test_a_card_and_a_cpu_build_of_torch_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch, 0, build=None, cards=("RTX 4090", "RTX 3060"))
    assert cuda_advice() == (
        "The driver sees RTX 4090, RTX 3060, but this torch is a CPU build. Install a CUDA build into the same environment: "
        "pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cu130"
    )


def test_a_card_and_a_cuda_build_that_does_not_run_blames_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch, 0, build="13.0", cards=("RTX 4090",))
    assert cuda_advice() == (
        "The driver sees RTX 4090, but torch's CUDA 13.0 does not run on this driver: "
        "update the NVIDIA driver, or take an older CUDA build."
    )


def test_describe_says_what_is_here_and_what_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_cuda(monkeypatch, 0, build=None)
    assert describe() == {
        "torch": torch.__version__,
        "CUDA build": "none",
        "device": "cpu",
        "cards seen by the driver": "none",
        "advice": "nothing to mend",
    }
    stub_cuda(monkeypatch, 1, build="13.0", cards=("RTX 4090",))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    assert describe()["device"] == "NVIDIA GeForce RTX 4090"


# Stopwatch


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What happens, in order: waits for a device, and readings of a clock that goes on by 1 second each."""
    log: list[object] = []

    def module(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda which=None: log.append(("wait", device if which is None else which)))

    def clock() -> float:
        log.append("clock")
        return float(len(log))

    monkeypatch.setattr(torch, "get_device_module", module)
    monkeypatch.setattr(torch.cuda, "synchronize", module(CUDA).synchronize)
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=clock))
    return log


def test_a_stopwatch_waits_for_the_device_before_start_and_before_stop(happened: list[object]) -> None:
    """Kernels run on after the call returns, so an unsynchronised clock reads launches: pytorch issues 80129 and 18012."""
    with Stopwatch(CUDA) as watch:
        happened.append("work")
    assert happened == [("wait", CUDA), "clock", "work", ("wait", CUDA), "clock"]
    assert watch.seconds == 3.0


def test_a_stopwatch_on_the_cpu_calls_no_device(happened: list[object]) -> None:
    with Stopwatch(torch.device("cpu")):
        happened.append("work")
    assert happened == ["clock", "work", "clock"]


def test_a_stopwatch_does_not_wait_for_a_device_after_an_error(happened: list[object]) -> None:
    with pytest.raises(RuntimeError, match="lost"), Stopwatch(CUDA) as watch:
        raise RuntimeError("lost")
    assert happened == [("wait", CUDA), "clock", "clock"]
    assert watch.seconds == 1.0


def test_the_device_named_is_waited_for_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.synchronize()`` without an argument waits for the current device, whichever was asked for."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    synchronize(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]


# PeakCounters


class Allocator:
    """CUDA's caching allocator as far as its peaks go, one a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[torch.device, int] = {}
        self.peaks: dict[torch.device, int] = {}
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: self.peaks.update({d: self.held.get(d, 0)}))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: self.peaks.get(d, 0))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda d: 2 * self.peaks.get(d, 0))
        monkeypatch.setattr(devices, "memory_in_use", lambda d: 1000)

    def touch(self, nbytes: int, device: torch.device = CUDA) -> None:
        """Hold some more bytes for a moment."""
        self.peaks[device] = max(self.peaks.get(device, 0), self.held.get(device, 0) + nbytes)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_peaks_are_of_the_block_only(allocator: Allocator) -> None:
    allocator.touch(900)
    allocator.held[CUDA] = 10
    with PeakCounters(CUDA) as peaks:
        assert peaks.result is None
        allocator.touch(50)
    allocator.touch(800)
    assert peaks.result == DeviceCounters(60, 120, 1000)


def test_the_driver_is_not_asked_in_a_loop_that_does_not_need_it(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "memory_in_use", lambda device: pytest.fail("asked"))
    with PeakCounters(CUDA, ask_driver=False) as peaks:
        allocator.touch(50)
    assert peaks.result == DeviceCounters(50, 100, None)


@pytest.mark.parametrize("touched", [(100, 10, 10), (10, 100, 10), (10, 10, 100)], ids=["before", "inside", "after"])
def test_an_inner_block_does_not_lose_the_outer_ones_peak(allocator: Allocator, touched: tuple[int, int, int]) -> None:
    before, inside, after = touched
    with PeakCounters(CUDA) as outer:
        allocator.touch(before)
        with PeakCounters(CUDA) as inner:
            allocator.touch(inside)
        allocator.touch(after)
    assert inner.result == DeviceCounters(inside, 2 * inside, 1000)
    assert outer.result == DeviceCounters(100, 200, 1000)


def test_two_inner_blocks_in_a_row_keep_the_outer_ones_peak(allocator: Allocator) -> None:
    with PeakCounters(CUDA) as outer:
        for nbytes in (30, 70, 20):
            with PeakCounters(CUDA) as inner:
                allocator.touch(nbytes)
            assert inner.result == DeviceCounters(nbytes, 2 * nbytes, 1000)
    assert outer.result == DeviceCounters(70, 140, 1000)


def test_blocks_on_different_devices_do_not_mix(allocator: Allocator) -> None:
    other = torch.device("cuda", 1)
    with PeakCounters(CUDA) as first, PeakCounters(other) as second:
        allocator.touch(5, CUDA)
        allocator.touch(7, other)
    assert first.result == DeviceCounters(5, 10, 1000)
    assert second.result == DeviceCounters(7, 14, 1000)


def test_peaks_are_kept_and_counting_ends_when_the_block_fails(allocator: Allocator) -> None:
    peaks = PeakCounters(CUDA)

    def fail() -> None:
        with peaks:
            allocator.touch(5)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert peaks.result == DeviceCounters(5, 10, 1000)
    assert PeakCounters._active == []


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_other_devices_have_no_counters(device: torch.device | None) -> None:
    with PeakCounters(device) as peaks:
        pass
    assert peaks.result is None
    assert PeakCounters._active == []


# NVML


class Nvml:
    """A driver with some cards; with ``fails``, that call has no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "", cards: tuple[str, ...] = ("RTX 4090", "RTX 3060")) -> None:
        self.open = 0

        def answer(name: str, value: object) -> None:
            def call(*args: object) -> object:
                if name == fails:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
                return value(*args) if callable(value) else value

            monkeypatch.setattr(pynvml, name, call)

        def count(change: int) -> None:
            self.open += change

        answer("nvmlInit", lambda: count(1))
        answer("nvmlShutdown", lambda: count(-1))
        answer("nvmlDeviceGetCount", len(cards))
        answer("nvmlDeviceGetHandleByIndex", lambda index: index)
        answer("nvmlDeviceGetName", lambda handle: cards[handle])
        answer("nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
        answer("nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used={"GPU-1234": 777}[handle]))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))


def test_the_driver_is_asked_for_names_and_for_memory_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID, because CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's."""
    nvml = Nvml(monkeypatch)
    assert cards_seen_by_driver() == ["RTX 4090", "RTX 3060"]
    assert memory_in_use(CUDA) == 777
    assert nvml.open == 0


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"])
def test_no_answer_about_memory_is_none(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    nvml = Nvml(monkeypatch, fails)
    assert memory_in_use(CUDA) is None
    assert nvml.open == 0


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_no_answer_about_cards_is_an_empty_list(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    nvml = Nvml(monkeypatch, fails)
    assert cards_seen_by_driver() == []
    assert nvml.open == 0


def test_no_driver_at_all_is_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert cards_seen_by_driver() == []
