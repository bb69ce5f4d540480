"""from_cuda_snapshot(): PyTorch's own memory snapshots as traces, so that a real run lies beside a planned one. No torch.

The file is a pickle of ``{"segments": [...], "device_traces": [[...], ...], "allocator_settings": {...}, ...}``:

- a segment has ``device``, ``address``, ``total_size``, ``is_expandable`` and ``blocks``; a block ``address``, ``size``,
  ``requested_size`` (what the tensor asked for), ``state`` (``active_allocated`` is a tensor's) and ``frames``;
- an event of a device has ``action``, ``addr``, ``size`` (for ``alloc`` and ``free_requested`` as requested) and ``frames``;
  of ``oom`` the size did not succeed. Events are the last ``max_entries`` of a run, in order;
- a frame has ``filename``, ``line`` and ``name``, the innermost comes first.

Sources: ``_snapshot`` and ``_dump_snapshot`` in ``torch/cuda/memory.py``, ``THCPModule_memorySnapshot`` in
``torch/csrc/cuda/Module.cpp``, and ``_memory_snapshot_pickled`` in ``torch/csrc/cuda/memory_snapshot.cpp``, which writes the same
from C++; files of torch 2.14.1.
"""

from __future__ import annotations

import os
import pickle
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vramlab.memory.allocator import BLOCK, SMALL, SMALL_SEGMENT
from vramlab.memory.trace import Category, DeviceCounters, Events, MemoryTrace, Phase
from vramlab.units import format_bytes, round_up


def from_cuda_snapshot(path: str | os.PathLike[str], *, device: int | None = None) -> MemoryTrace:
    """Read what ``torch.cuda.memory._dump_snapshot(path)`` has written.

        torch.cuda.memory._record_memory_history()
        train_some_steps()
        torch.cuda.memory._dump_snapshot("real.pickle")

    Args:
        path: the file. Only plain data is read from it: no code in it runs, whoever wrote it.
        device: the number of the card. None: the one with most events.

    Returns:
        A trace in bytes as tensors asked for them (`MemoryTrace.rounded` gives the allocator's blocks). What was alive when
        the record begins stands before it. ``counters`` has the allocator's own peaks over the record, None where options
        (``roundup_power2_divisions``, ``max_split_size_mb``) or gaps in the file leave them open.

    Raises:
        ValueError: no snapshot, anything in it but plain data, events and segments that contradict each other, or no such card.
        OSError: the file cannot be read.

    A snapshot says where memory was asked for, and not what for: the category is input for what was there before, workspace
    for cuBLAS's, temporary for the rest. Phases are as the stacks tell: within an optimizer, autograd or a module; build
    where they tell nothing. The operator is the innermost of PyTorch's that is more than an ``empty``, else the innermost
    function in Python; lines are the innermost outside PyTorch.
    """
    try:
        snapshot = _Snapshot(_load(path))
        return snapshot.trace(snapshot.busiest() if device is None else device)
    except _FaultyError as error:
        raise ValueError(
            f"{os.fspath(path)} is no memory snapshot that can be read: {error} "
            "Write one with torch.cuda.memory._dump_snapshot(path) while torch.cuda.memory._record_memory_history() is on."
        ) from None


class _FaultyError(Exception):
    """What is wrong with the file."""


class _PlainData(pickle._Unpickler):
    """Makes nothing but dict, list, tuple, str, bytes, int, float, bool and None.

    The unpickler in Python: that in C fills memory for any number a damaged file names as the place of an object, and takes
    from ``copyreg``'s cache without asking. It reads about 4 MB/s.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise _FaultyError(f"it asks for {module}.{name}, and a snapshot is plain data.")

    def get_extension(self, code: int) -> Any:
        raise _FaultyError("it asks for a registered class, and a snapshot is plain data.")

    def persistent_load(self, pid: Any) -> Any:
        raise _FaultyError("it refers to objects outside the file.")


def _load(path: str | os.PathLike[str]) -> Any:
    with open(path, "rb") as file:
        try:
            return _PlainData(file).load()
        except _FaultyError:
            raise
        except Exception as error:  # a broken pickle can raise nearly anything
            raise _FaultyError(f"it is no whole pickle ({type(error).__name__}: {error}).") from None


class _Event(NamedTuple):
    action: str
    address: int
    size: int
    frames: list[Any]


class _Segment(NamedTuple):
    size: int
    expandable: bool
    blocks: list[Any]


class _Snapshot:
    """What stands in the file, checked."""

    def __init__(self, data: Any) -> None:
        self._traces = _part(data, "device_traces", list, "the file")
        self._segments: dict[int, dict[int, _Segment]] = {}  # by device and address
        for i, segment in enumerate(_part(data, "segments", list, "the file")):
            where = f"segment {i}"
            on_device = self._segments.setdefault(_part(segment, "device", int, where), {})
            blocks = _part(segment, "blocks", list, where)
            expandable = bool(segment.get("is_expandable", False))
            on_device[_size(segment, "address", where)] = _Segment(_size(segment, "total_size", where), expandable, blocks)
        settings = data.get("allocator_settings", {})
        self._default_blocks = isinstance(settings, dict) and _splits_by_default(settings)

    def busiest(self) -> int:
        """The number of the device with most events."""
        sizes = [(len(_list(trace)), sum(s.size for s in self._segments.get(i, {}).values())) for i, trace in enumerate(self._traces)]
        if not sizes:
            raise _FaultyError("it is of no device.")
        return sizes.index(max(sizes))

    def trace(self, device: int) -> MemoryTrace:
        if not 0 <= device < len(self._traces):
            raise ValueError(f"The snapshot is of {len(self._traces)} devices, numbered from 0; got device={device}.")
        events = [_event(e, f"event {i} of device {device}") for i, e in enumerate(_list(self._traces[device]))]
        segments = self._segments.get(device, {})
        history = _History(events, segments)
        counters = history.counters() if self._default_blocks else None
        return MemoryTrace(_Columns(history).events(), f"cuda:{device}", counters)


class _History:
    """The events, and what there was before them: found by going back from the segments at the end."""

    def __init__(self, events: list[_Event], segments: dict[int, _Segment]) -> None:
        self.happened, self._segments = events, segments
        self.live: dict[int, int] = {}  # of tensors: requested bytes by address
        self.frames: dict[int, list[Any]] = {}
        taken: dict[int, int] = {}  # live, or waiting for another stream
        allocated = 0
        for start, segment in segments.items():
            for i, block in enumerate(segment.blocks):
                where = f"block {i} of the segment at {start}"
                address, state = _size(block, "address", where), _part(block, "state", str, where)
                if state != "inactive":
                    taken[address] = _size(block, "requested_size" if "requested_size" in block else "size", where)
                if state == "active_allocated":
                    self.live[address] = taken[address]
                    self.frames[address] = _list(block.get("frames", []))
                    allocated += _size(block, "size", where)
        self._allocated_at_end = allocated
        self.places = {start: s.size for start, s in segments.items() if not s.expandable}
        self.reserved = sum(s.size for s in segments.values())
        self.taken = taken
        for i in reversed(range(len(events))):
            self._undo(i, events[i])

    def _undo(self, number: int, event: _Event) -> None:
        action, address, size, _ = event
        fault = _FaultyError(f"its events and segments contradict each other at event {number}, {action} at address {address}.")
        if action == "alloc":
            if address not in self.live:
                raise fault
            del self.live[address]
            self.frames.pop(address, None)
            self.taken.pop(address, None)
        elif action == "free_requested":
            if address in self.live:
                raise fault
            self.live[address] = size
            self.taken[address] = size
        elif action == "free_completed":
            self.taken[address] = size
        elif action in _TAKES:
            self.reserved -= size
            if action == "segment_alloc" and self.places.pop(address, None) is None:
                raise fault
        elif action in _GIVES:
            self.reserved += size
            if action == "segment_free":
                self.places[address] = size

    def counters(self) -> DeviceCounters | None:
        """The allocator's peaks over the record, counted anew with whole blocks; None if they do not come out as the segments say."""
        layout = _Layout(self.places, self.taken)
        sizes = {address: layout.block(address, size) for address, size in self.live.items()}
        allocated = highest_allocated = sum(sizes.values())
        reserved = highest_reserved = self.reserved
        for action, address, size, _ in self.happened:
            if action == "alloc":
                layout.take(address)
                sizes[address] = layout.block(address, size)
                allocated += sizes[address]
            elif action == "free_requested":
                allocated -= sizes.pop(address)
            elif action == "free_completed":
                layout.leave(address)
            elif action in _TAKES or action in _GIVES:
                reserved += size if action in _TAKES else -size
                layout.change(action, address, size)
            highest_allocated, highest_reserved = max(highest_allocated, allocated), max(highest_reserved, reserved)
        return DeviceCounters(highest_allocated, highest_reserved, None) if allocated == self._allocated_at_end else None


_TAKES = {"segment_alloc", "segment_map"}
_GIVES = {"segment_free", "segment_unmap"}


class _Layout:
    """Where blocks begin in which segments: how much the allocator handed out for a request follows from what comes next.

    In the large pool a rest of up to 1 MiB is not split off (``should_split`` in ``CUDACachingAllocator.cpp``), so no free
    block there is that small, and such a gap belongs to the block before it. Elsewhere blocks are split exactly.
    """

    def __init__(self, places: dict[int, int], taken: dict[int, int]) -> None:
        self._sizes = dict(places)
        self._starts = sorted(places)
        self._taken = sorted(taken)

    def block(self, address: int, requested: int) -> int:
        size = round_up(requested, BLOCK)
        i = bisect_right(self._starts, address) - 1
        if i < 0 or self._sizes[self._starts[i]] <= SMALL_SEGMENT:
            return size
        end = self._starts[i] + self._sizes[self._starts[i]]
        if address >= end:  # in an expandable segment
            return size
        following = bisect_right(self._taken, address)
        until = min(end, self._taken[following]) if following < len(self._taken) else end
        gap = until - address - size
        return size + gap if 0 < gap <= SMALL else size

    def take(self, address: int) -> None:
        insort(self._taken, address)

    def leave(self, address: int) -> None:
        i = bisect_left(self._taken, address)
        if i < len(self._taken) and self._taken[i] == address:
            del self._taken[i]

    def change(self, action: str, address: int, size: int) -> None:
        if action == "segment_alloc":
            insort(self._starts, address)
            self._sizes[address] = size
        elif action == "segment_free" and self._sizes.pop(address, None) is not None:
            self._starts.remove(address)


class _Columns:
    """The rows of a trace."""

    def __init__(self, history: _History) -> None:
        self._rows: list[tuple[int, int, int, int, int, int]] = []  # storage, bytes, category, phase, operator, line
        self._operators, self._lines = {"(before)": 0}, {"": 0}
        numbers: dict[int, tuple[int, int, int]] = {}  # storage, bytes and category by address
        count = 0
        for address, size in sorted(history.live.items()):
            numbers[address] = (count, size, Category.INPUTS)
            self._rows.append((count, size, Category.INPUTS, Phase.BUILD, 0, self._line(history.frames.get(address, []))))
            count += 1
        self._seeds = count
        for action, address, size, frames in history.happened:
            if action == "alloc":
                numbers[address] = (count, size, Category.WORKSPACE if _is_workspace(frames) else Category.TEMPORARY)
                self._add(*numbers[address], frames)
                count += 1
            elif action == "free_requested":
                storage, held, category = numbers.pop(address)
                self._add(storage, -held, category, frames)
            elif action == "oom":
                self._add(count, 0, Category.TEMPORARY, frames, f"(out of memory: {format_bytes(size)} asked)")
                count += 1

    def _add(self, storage: int, nbytes: int, category: int, frames: list[Any], operator: str = "") -> None:
        name = operator or _operator(frames)
        self._rows.append(
            (storage, nbytes, category, _phase(frames), self._operators.setdefault(name, len(self._operators)), self._line(frames))
        )

    def _line(self, frames: list[Any]) -> int:
        return self._lines.setdefault(_users_line(frames), len(self._lines))

    def events(self) -> Events:
        columns = np.array(self._rows, np.int64).reshape(-1, 6)
        return Events(
            storage=columns[:, 0],
            nbytes=columns[:, 1],
            category=columns[:, 2].astype(np.int8),
            module=np.zeros(len(columns), np.int32),
            phase=columns[:, 3].astype(np.int8),
            operator=columns[:, 4].astype(np.int32),
            modules=("",),
            operators=tuple(self._operators),
            seeds=self._seeds,
            line=columns[:, 5].astype(np.int32),
            lines=tuple(self._lines),
        )


# Stacks


def _python_frames(frames: list[Any]) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames in Python, the innermost first."""
    for file, line, name in _frames(frames):
        if file.endswith(".py") or "ipykernel_" in file or file.startswith("<ipython"):
            yield file.replace("\\", "/"), line, name


def _frames(frames: list[Any]) -> Iterator[tuple[str, int, str]]:
    for frame in frames:
        if isinstance(frame, dict):
            yield str(frame.get("filename", "")), frame.get("line", 0), str(frame.get("name", ""))


def _operator(frames: list[Any]) -> str:
    names = [match[1] for _, _, name in _frames(frames) if (match := _OPERATOR.match(name))]
    if names:
        return "aten::" + next((name for name in names if not name.startswith("empty")), names[0])
    return next((f"{name} in {Path(file).name}" for file, _, name in _python_frames(frames)), "(unknown)")


_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)\b")


def _phase(frames: list[Any]) -> Phase:
    phase = Phase.BUILD
    for file, _, name in _frames(frames):
        if "/torch/optim/" in (path := file.replace("\\", "/")):
            return Phase.STEP
        if name.startswith(("torch::autograd::Engine::", "torch::autograd::python::PythonEngine")) or name == "_engine_run_backward":
            return Phase.BACKWARD
        if name == "_call_impl" and path.endswith("/torch/nn/modules/module.py"):
            phase = Phase.FORWARD
    return phase


def _is_workspace(frames: list[Any]) -> bool:
    """cuBLAS's and cuBLASLt's. Reference: ``ATen/cuda/CublasHandlePool.cpp``."""
    return any(name.startswith(("at::cuda::getNewWorkspace", "at::cuda::setWorkspaceForHandle")) for _, _, name in _frames(frames))


def _users_line(frames: list[Any]) -> str:
    """``file:line`` of the innermost Python that is neither PyTorch's nor the recorder's; empty where there is none."""
    for file, line, _ in _python_frames(frames):
        if not _MACHINERY.search(file):
            return f"{_short(file)}:{line}"
    return ""


_MACHINERY = re.compile(r"(^|/)(torch/|vramlab/(memory|virtual)/)|^<frozen")


def _short(file: str) -> str:
    if "ipykernel_" in file or file.startswith("<ipython"):
        return "notebook cell"
    here = Path.cwd().as_posix() + "/"
    return file.removeprefix(here).rpartition("site-packages/")[2]


# Reading with care


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _FaultyError(f"a list is expected where {type(value).__name__} stands.")
    return list(value)


def _part(holder: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(holder, dict):
        raise _FaultyError(f"{where} is no dict but {type(holder).__name__}.")
    if not isinstance(holder.get(key), kind):
        raise _FaultyError(f"{where} has no {key!r} that is {kind.__name__}.")
    return holder[key]


def _size(holder: Any, key: str, where: str) -> int:
    """A number of bytes or an address."""
    value = _part(holder, key, int, where)
    if not 0 <= value < 1 << 63:
        raise _FaultyError(f"{where} has {key!r} {value}, which is neither a size nor an address.")
    return int(value)


def _event(entry: Any, where: str) -> _Event:
    action = _part(entry, "action", str, where)
    if action not in _ACTIONS:
        raise _FaultyError(f"{where} is {action!r}, and the known ones are {', '.join(sorted(_ACTIONS))}.")
    address = 0 if action == "oom" else _size(entry, "addr", where)
    return _Event(action, address, _size(entry, "size", where), _list(entry.get("frames", [])))


_ACTIONS = {"alloc", "free_requested", "free_completed", "oom", "snapshot", "annotate", *_TAKES, *_GIVES}


def _splits_by_default(settings: dict[Any, Any]) -> bool:
    """Whether the allocator's options leave sizes of blocks as they are by default."""
    rounding = settings.get("roundup_power2_divisions", {})
    unlimited = settings.get("max_split_size", -1) == -1
    return unlimited and isinstance(rounding, dict) and not any(rounding.values())
