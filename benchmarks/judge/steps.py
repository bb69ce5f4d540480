"""Run rows of the judge in this process: on the judge's card ("real"), or on a virtual one ("virtual").

Reads rows as JSON from stdin, one a line, and writes what each allocated, one JSON object a line. Each row runs in a process of
its own, forked after the imports, so that none finds memory or settings of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import vramlab as vl
from vramlab import gpus
from vramlab.training import train

CARDS = {  # resident threads of a multiprocessor, bytes of shared memory that a block may ask for
    "H100 SXM": (2048, 232448),
    "A100 80GB": (2048, 166912),
    "RTX 4090": (1536, 101376),
    "RTX 3090": (1536, 101376),
    "RTX 5090": (1536, 101376),
    "T4": (1024, 65536),
}
"""Beside what `vramlab.gpus` knows. Source: CUDA C++ Programming Guide, technical specifications per compute capability."""

STEPS = 2
Row = dict[str, Any]
Event = tuple[int, str]
"""Bytes asked for, negative when they are given back; and what did it."""


# What runs, on either side -------------------------------------------------------------------------------------------


def run(row: Row, device: torch.device) -> Iterator[list[int]]:
    """After each step: peak allocated, peak reserved, and allocated between steps."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # the judge has no cuDNN, which a Hopper card would ask first
    try:
        if "task" in row:
            yield from _train(row, device)
        elif "types" in row:
            import exchange

            yield from exchange.run(row, device)
        else:
            import library

            yield from library.run(row, device)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _train(row: Row, device: torch.device) -> Iterator[list[int]]:
    family, size, options = row["task"]
    task, recipe = getattr(vl.tasks, family)(size, **options), vl.Recipe(**row["recipe"])
    with in_group(row.get("rank", 0), recipe.ranks, device), contextlib.closing(train(task, recipe, device, record_every=None)) as steps:
        for report in itertools.islice(steps, STEPS):
            assert report.counters is not None
            yield [report.counters.allocated, report.counters.reserved, torch.get_device_module(device).memory_allocated(device)]


@contextlib.contextmanager
def in_group(rank: int, ranks: int, device: torch.device) -> Iterator[None]:
    """This process as one of several ranks in a group in which nothing is sent, on either side."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group(f"cpu:fake,{device.type}:fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# The judge's card ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_initialisation() -> Iterator[None]:
    """Nothing is computed, so host memory of models need not be touched: those of any size are built at once."""

    def leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    functions = {n: f for n, f in vars(nn.init).items() if n.endswith("_") and callable(f)}
    for name in functions:
        setattr(nn.init, name, leave)
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(nn.init, name, function)


def real(row: Row, trace: bool) -> dict[str, Any]:
    trace = trace or "types" in row
    card = gpus.gpu(row["card"])
    ctypes.CDLL("shim.so").judge_card(*card.capability, card.sms, *CARDS[row["card"]])
    if trace:
        torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=1 << 24)
    with no_initialisation():
        steps = list(run(row, torch.device("cuda")))
    result: dict[str, Any] = {"steps": steps}
    if trace:
        result["events"] = list(_events_of(torch.cuda.memory._snapshot()["device_traces"][0]))
    return result


def _events_of(history: list[dict[str, Any]]) -> Iterator[Event]:
    for event in history:
        if event["action"] in ("alloc", "free_requested"):
            frames = [f"{f['filename'].rpartition('/')[2]}:{f['line']}" for f in event.get("frames", [])]
            yield event["size"] * (1 if event["action"] == "alloc" else -1), " < ".join(frames[:4])


# The virtual card ----------------------------------------------------------------------------------------------------


def virtual(row: Row, trace: bool) -> dict[str, Any]:
    from vramlab.virtual.device import virtual_gpu

    with virtual_gpu(row["card"], limited=False) as gpu:
        result: dict[str, Any] = {"steps": list(run(row, gpu.device))}
    if trace or "types" in row:
        result["events"] = list(_planned_events(gpu.trace.events))
    return result


def _planned_events(events: Any) -> Iterator[Event]:
    assert events.line is not None
    for i, nbytes in enumerate(events.nbytes.tolist()):
        if nbytes and i not in events.moves and i + 1 not in events.moves:
            line = events.lines[events.line[i]].rpartition("/")[2]
            yield nbytes, f"{events.operators[events.operator[i]]} {line}"


# Rows ----------------------------------------------------------------------------------------------------------------


def answer(side: Callable[[Row, bool], dict[str, Any]], row: Row, trace: bool) -> dict[str, Any]:
    try:
        result = side(row, trace)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {"id": row["id"], **result}


def main() -> None:
    side, trace = {"real": real, "virtual": virtual}[sys.argv[1]], "--events" in sys.argv
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if side is virtual:
        importlib.import_module("vramlab.virtual.device")  # once, before the forks
    for line in sys.stdin:
        row = json.loads(line)
        for key, module in (("model", "library"), ("types", "exchange")):
            if key in row:
                importlib.import_module(module)
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                print(json.dumps({"id": row["id"], "error": f"the process ended with {code}"}), flush=True)
            continue
        print(json.dumps(answer(side, row, trace)), flush=True)
        os._exit(0)  # at exit torch would unload a driver that it never had


if __name__ == "__main__":
    main()
