"""from_cuda_snapshot(): PyTorch's own memory snapshots as traces, and files that are none.

``data/snapshot_small.pickle`` was written by torch 2.14.1's ``_dump_snapshot`` with PyTorch's own caching allocator, over a CUDA
runtime that hands out addresses and starts no kernels. It holds: three tensors made before the record, of which one was
released before it too; a training step; a tensor used on a second stream; one of the first tensors released; ``empty_cache``; a
request that failed; a second step. Of its stacks only frames of Python, operators and autograd were kept, and paths were cut.
What the allocator said of it (``max_memory_allocated``, ``max_memory_reserved``, ``memory_allocated`` and ``requested_bytes``) is
in `ALLOCATOR`.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramlab.memory.snapshot import from_cuda_snapshot
from vramlab.memory.trace import DeviceCounters, MemoryTrace
from vramlab.units import MiB

FILE = Path(__file__).parent / "data" / "snapshot_small.pickle"
ALLOCATOR = {"allocated": 83_005_952, "reserved": 92_274_688, "requested": 83_000_072, "requested at the end": 78_960_064}


def data() -> dict[str, Any]:
    loaded: dict[str, Any] = pickle.loads(FILE.read_bytes())
    return loaded


def read(content: object, path: Path, **options: Any) -> MemoryTrace:
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return from_cuda_snapshot(path, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


# A real one


def test_the_trace_says_what_the_allocator_says() -> None:
    trace = MemoryTrace.from_cuda_snapshot(FILE)
    assert trace.counters == DeviceCounters(ALLOCATOR["allocated"], ALLOCATOR["reserved"], None)
    assert trace.peak == ALLOCATOR["requested"]
    assert trace.breakdown("end").total == ALLOCATOR["requested at the end"]
    assert trace.device == "cuda:0"
    assert trace.baseline == 2_800_000 + 4_000  # two of three tensors made before were alive


def test_every_storage_is_released_at_most_once_and_with_what_it_got() -> None:
    events = from_cuda_snapshot(FILE).events
    held = np.zeros(events.storage.max() + 1, np.int64)
    for storage, nbytes in zip(events.storage, events.nbytes, strict=True):
        held[storage] += nbytes
        assert held[storage] in (0, max(nbytes, held[storage]))
    assert (held >= 0).all()


def test_operators_lines_and_phases_come_from_the_stacks() -> None:
    trace = from_cuda_snapshot(FILE)
    live = trace.holders(50, at="peak")
    assert {"aten::addmm", "aten::mm", "(before)"} <= set(live["operator"])
    assert "train.py:11" in set(live["line"])
    assert {"forward", "backward", "build"} <= set(live["phase"])
    assert "step" in set(trace.timeline()["phase"])
    workspaces = trace.breakdown("end").workspace
    assert workspaces == 2 * 32 * MiB  # cuBLAS's and cuBLASLt's
    assert trace.breakdown("start").inputs == trace.baseline


def test_a_request_that_failed_is_an_event_of_no_bytes() -> None:
    events = from_cuda_snapshot(FILE).events
    (row,) = [i for i, operator in enumerate(events.operator) if events.operators[operator].startswith("(out of memory")]
    assert events.operators[events.operator[row]] == "(out of memory: 4.00 GiB asked)"
    assert events.nbytes[row] == 0
    assert events.lines[events.line[row]] == "train.py:22"


@pytest.mark.parametrize("dropped", range(0, 180, 7))
def test_a_record_that_begins_later_tells_the_same_from_there_on(path: Path, dropped: int) -> None:
    """The record is a ring: of long runs only the last events are there."""
    whole = from_cuda_snapshot(FILE).events
    content = data()
    events = content["device_traces"][0]
    rows = sum(e["action"] in ("alloc", "free_requested", "oom") for e in events[:dropped])
    content["device_traces"][0] = events[dropped:]
    trace = read(content, path)
    alive = np.cumsum(whole.nbytes)
    before = int(alive[whole.seeds + rows - 1])
    assert trace.baseline == before
    assert trace.peak == max(before, *alive[whole.seeds + rows :].tolist(), before)
    assert trace.counters is not None
    assert trace.counters.allocated <= ALLOCATOR["allocated"]


def test_a_snapshot_without_a_record_is_what_is_alive(path: Path) -> None:
    content = data()
    content["device_traces"] = [[]]
    trace = read(content, path)
    assert trace.peak == trace.baseline == ALLOCATOR["requested at the end"]
    assert trace.counters is not None
    assert trace.counters.reserved == sum(s["total_size"] for s in content["segments"])
    assert set(trace.holders(99, "start")["line"]) >= {"", "train.py:19"}  # blocks have stacks of their own


# Small ones, made here


def block(address: int, requested: int, size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"address": address, "requested_size": requested, "size": size, "state": state, "frames": [], **more}


def segment(address: int, total: int, *blocks: dict[str, Any], device: int = 0, expandable: bool = False) -> dict[str, Any]:
    return {"device": device, "address": address, "total_size": total, "is_expandable": expandable, "blocks": list(blocks)}


def event(action: str, address: int, size: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    named = [dict(zip(("filename", "line", "name"), frame, strict=True)) for frame in frames]
    return {"action": action, "addr": address, "size": size, "frames": named}


def snapshot(*traces: list[dict[str, Any]], segments: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {"segments": segments or [], "device_traces": list(traces), **more}


TAIL = segment(0, 20 * MiB, block(0, 19 * MiB + 5, 20 * MiB))  # the rest of 1 MiB is not split off
ALLOCATED = [event("segment_alloc", 0, 20 * MiB), event("alloc", 0, 19 * MiB + 5)]


def test_counters_count_whole_blocks(path: Path) -> None:
    assert read(snapshot(ALLOCATED, segments=[TAIL]), path).counters == DeviceCounters(20 * MiB, 20 * MiB, None)


@pytest.mark.parametrize(
    "options", [{"max_split_size": 20 * MiB}, {"roundup_power2_divisions": {"1": 0, "2": 4}}, {"roundup_power2_divisions": None}]
)
def test_with_options_that_change_blocks_there_are_no_counters(path: Path, options: dict[str, Any]) -> None:
    assert read(snapshot(ALLOCATED, segments=[TAIL], allocator_settings=options), path).counters is None


def test_counters_that_do_not_come_out_are_left_out(path: Path) -> None:
    odd = segment(0, 20 * MiB, block(0, 19 * MiB + 5, 20 * MiB - 512))
    assert read(snapshot(ALLOCATED, segments=[odd]), path).counters is None


def test_expandable_segments_grow_and_shrink_in_pages(path: Path) -> None:
    grown = segment(0, 40 * MiB, block(0, 19 * MiB + 5, 19 * MiB + 512), block(19 * MiB + 512, 5, 512), expandable=True)
    events = [
        event("segment_map", 0, 20 * MiB),
        event("alloc", 0, 19 * MiB + 5),
        event("segment_map", 20 * MiB, 40 * MiB),
        event("segment_unmap", 40 * MiB, 20 * MiB),
        event("alloc", 19 * MiB + 512, 5),
    ]
    assert read(snapshot(events, segments=[grown]), path).counters == DeviceCounters(19 * MiB + 1024, 60 * MiB, None)


def test_a_block_that_waits_for_another_stream_is_released_and_not_yet_free(path: Path) -> None:
    waiting = segment(0, 2 * MiB, block(0, 5, 512, "active_awaiting_free"), block(512, 7, 512))
    events = [event("alloc", 0, 5), event("free_requested", 0, 5), event("alloc", 512, 7)]
    trace = read(snapshot(events, segments=[waiting]), path)
    assert trace.breakdown("end").total == 7
    assert trace.counters == DeviceCounters(512, 2 * MiB, None)


def test_old_snapshots_know_no_requested_sizes(path: Path) -> None:
    old = segment(0, 2 * MiB, {"address": 0, "size": 512, "state": "active_allocated"})
    assert read(snapshot([], segments=[old]), path).baseline == 512


PLACES = ("site-packages/torch/nn/modules/linear.py", 134, "forward")
CALL = ("/x/torch/nn/modules/module.py", 1794, "_call_impl")
MINE = ("/srv/me/train.py", 7, "step")
EMPTY = ("??", 0, "at::_ops::empty_memory_format::call(c10::SymInt)")


@pytest.mark.parametrize(
    ("frames", "operator", "phase", "line"),
    [
        ((), "(unknown)", "build", ""),
        ((MINE,), "step in train.py", "build", "/srv/me/train.py:7"),
        ((EMPTY, MINE), "aten::empty_memory_format", "build", "/srv/me/train.py:7"),
        ((EMPTY, ("??", 0, "at::_ops::relu::redispatch(x)"), PLACES, CALL, MINE), "aten::relu", "forward", "/srv/me/train.py:7"),
        ((("C:\\lib\\torch\\optim\\sgd.py", 3, "step"), ("C:\\me\\a.py", 9, "f")), "step in sgd.py", "step", "C:/me/a.py:9"),
        ((("engine.cpp", 0, "torch::autograd::Engine::thread_main(x)"),), "(unknown)", "backward", ""),
        (
            (("/x/torch/autograd/graph.py", 1, "_engine_run_backward"), MINE),
            "_engine_run_backward in graph.py",
            "backward",
            "/srv/me/train.py:7",
        ),
        ((("/var/ipykernel_5/77.py", 3, "<module>"),), "<module> in 77.py", "build", "notebook cell:3"),
        ((("/env/site-packages/peft/tuners.py", 3, "f"),), "f in tuners.py", "build", "peft/tuners.py:3"),
        ((("/x/vramlab/memory/recorder.py", 3, "f"), MINE), "f in recorder.py", "build", "/srv/me/train.py:7"),
        ((("object.h", 538, "Py_DECREF"),), "(unknown)", "build", ""),
    ],
)
def test_what_a_stack_tells(path: Path, frames: tuple[tuple[str, int, str], ...], operator: str, phase: str, line: str) -> None:
    one = segment(0, 2 * MiB, block(0, 5, 512))
    row = read(snapshot([event("alloc", 0, 5, *frames)], segments=[one]), path).holders(1).iloc[0]
    assert (row["operator"], row["phase"], row["line"]) == (operator, phase, line)


def test_of_several_devices_one_is_read(path: Path) -> None:
    content = snapshot(
        [event("alloc", 0, 5)],
        [event("alloc", 512, 7), event("free_requested", 512, 7)],
        segments=[segment(0, 2 * MiB, block(0, 5, 512)), segment(0, 2 * MiB, block(0, 3, 512), device=1)],
    )
    assert [read(content, path, device=i).peak for i in (0, 1)] == [5, 10]
    assert (read(content, path).device, read(content, path).peak) == ("cuda:1", 10)  # most events
    for device in (-1, 2):
        with pytest.raises(ValueError, match=f"^The snapshot is of 2 devices, numbered from 0; got device={device}\\.$"):
            read(content, path, device=device)


# What is refused


class Malicious:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch {}",), r"(posix|nt)\.system"),
        (eval, ("open('{}', 'w')",), r"(builtins|__builtin__)\.eval"),
        (Path, ("{}",), r"pathlib.*Path"),
    ],
)
def test_code_in_a_file_does_not_run(path: Path, protocol: int, function: Any, arguments: tuple[str, ...], name: str) -> None:
    trap = path.with_name("ran")
    content = data()
    content["device_traces"].append(Malicious(function, *(a.format(trap) for a in arguments)))
    with pytest.raises(ValueError, match=rf"it asks for {name}, and a snapshot is plain data\. Write one with torch\.cuda\.memory\._dump"):
        read(pickle.dumps(content, protocol), path)
    assert not trap.exists()


def test_registered_classes_are_refused_even_if_they_were_asked_for_before(path: Path) -> None:
    copyreg.add_extension("pathlib", "PurePath", 240)
    try:
        content = pickle.dumps(PurePath, 2)
        assert pickle.loads(content) is PurePath  # and now it is in the cache
        with pytest.raises(ValueError, match="it asks for a registered class, and a snapshot is plain data"):
            read(content, path)
    finally:
        copyreg.remove_extension("pathlib", "PurePath", 240)


def test_objects_outside_the_file_are_refused(path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> Any:
            return "storage" if obj == "outside" else None

    file = io.BytesIO()
    Pickler(file).dump(snapshot(["outside"]))  # type: ignore[list-item]
    with pytest.raises(ValueError, match="it refers to objects outside the file"):
        read(file.getvalue(), path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is no whole pickle (EOFError"),
        (b"{}", "it is no whole pickle"),
        (b"text", "it is no whole pickle"),
        (b"PK\x03\x04zip", "it refers to objects outside the file."),  # what torch.save writes
        ([], "the file is no dict but list."),
        ({}, "the file has no 'device_traces' that is list."),
        ({"device_traces": []}, "the file has no 'segments' that is list."),
        ({"device_traces": [], "segments": []}, "it is of no device."),
        (snapshot({}), "a list is expected where dict stands."),  # type: ignore[arg-type]
        (snapshot([5]), "event 0 of device 0 is no dict but int."),  # type: ignore[list-item]
        (snapshot([{"action": "alloc"}]), "event 0 of device 0 has no 'addr' that is int."),
        (snapshot([event("moved", 0, 5)]), "event 0 of device 0 is 'moved', and the known ones are alloc, annotate, free_completed,"),
        (snapshot([event("alloc", -1, 5)]), "event 0 of device 0 has 'addr' -1, which is neither a size nor an address."),
        (snapshot([event("alloc", 0, 1 << 63)]), "has 'size' 9223372036854775808, which is neither"),
        (snapshot([event("alloc", 0, 5)]), "its events and segments contradict each other at event 0, alloc at address 0."),
        (snapshot([event("segment_alloc", 0, 5)]), "contradict each other at event 0, segment_alloc at address 0."),
        (
            snapshot([event("free_requested", 0, 5)], segments=[segment(0, 2 * MiB, block(0, 5, 512))]),
            "contradict each other at event 0, free_requested at address 0.",
        ),
        (snapshot([], segments=[segment(0, 5, {"address": 0})]), "block 0 of the segment at 0 has no 'state' that is str."),
        (snapshot([], segments=[{"device": 0}]), "segment 0 has no 'blocks' that is list."),
        (snapshot([], segments=[segment(0, 5, block(0, 5, 512, frames=5))]), "a list is expected where int stands."),
    ],
)
def test_what_is_no_snapshot_is_refused_with_the_reason(path: Path, content: object, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} is no memory snapshot that can be read: .*{re.escape(why)}"):
        read(content, path)


def test_a_file_that_is_not_there_is_said_to_be_missing(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        from_cuda_snapshot(path)


ANY_PART = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY_PART
@given(length=st.integers(0, FILE.stat().st_size - 1))
def test_a_file_that_ends_early_is_refused(path: Path, length: int) -> None:
    with pytest.raises(ValueError, match="it is no whole pickle"):
        read(FILE.read_bytes()[:length], path)


@ANY_PART
@given(changes=st.lists(st.tuples(st.integers(0, FILE.stat().st_size - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_file_is_read_or_refused(path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(FILE.read_bytes())
    for place, value in changes:
        content[place] = value
    assert outcome(bytes(content), path) in ("read", "refused")


def outcome(content: bytes, path: Path) -> str:
    try:
        read(content, path)
    except ValueError as error:
        return "refused" if str(error).startswith(str(path)) else str(error)
    return "read"
