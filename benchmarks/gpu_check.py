"""What is planned, against a real card: bytes, the allocator's rules, the context's size and speed, in at most 8 minutes.

    python benchmarks/gpu_check.py                      every pair of a model and a recipe; writes benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --pairs gpt2 vit     those whose name contains one of the words
    python benchmarks/gpu_check.py --budget-seconds 120 stops in time, with what it has by then
    python benchmarks/gpu_check.py --dry-run            without a card: plans two pairs, and the allocator's cases on the model of it

Nothing needs to be installed: from the repository's root, ``PYTHONPATH=. python benchmarks/gpu_check.py`` does it.

Plans come from `vramlab.plan` and its planner process, for the card of this machine. Each pair is measured in a process of its own:
PyTorch keeps cuBLAS's workspaces allocated as long as a process lives, cuDNN and the driver keep kernels and handles, and none of
them is given back by ``empty_cache()``; in a process that has run another pair the first peak would count them. The next process
imports what it needs while the one before it measures, and touches the card only when it is told its pair; plans are made
meanwhile too. On a machine of few cores this slows the steps that are timed: read throughput with that in mind.

The first two steps of a pair are those that are planned; PyTorch's own history of them is laid beside the planned events. The steps
after them are timed, without a history. The measured history is also replayed through `vramlab.memory.allocator`: where ``replayed``
equals what was measured and the plan does not, the plan asks for other memory; where it does not, the allocator took other blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import measure
import torch

import vramlab as vl
from vramlab import gpus
from vramlab.devices import memory_in_use
from vramlab.memory.allocator import CachingAllocator
from vramlab.memory.allocator import OutOfMemoryError as NoRoom
from vramlab.training import train
from vramlab.units import MiB, format_bytes
from vramlab.virtual import planner

OUTPUT = measure.RESULTS / "gpu_check.json"
BUDGET = 460.0  # s: with the start and the end of the program 8 minutes
DRY_CARD, DRY_PAIRS = "RTX 4090", 2  # without a card
TRACED = 2  # steps that are planned, and measured with a history
TIMED_STEPS, TIMED_SECONDS = (3, 30), (2.0, 8.0)  # at least and at most
WIDTH = 100  # columns of what is printed
Row = dict[str, Any]


# Pairs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A model and how it is trained."""

    task: Callable[[], vl.Task]
    recipe: Row


def _gpt(size: str, **options: Any) -> Callable[[], vl.Task]:
    return lambda: vl.tasks.gpt(size, **options)


def library_task(config: str, model: str, **options: Any) -> vl.Task:
    """A language model of transformers with its own loss, on sequences of 384 random tokens."""

    def made() -> Any:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(vocab_size=8000, **options))

    def batch(count: int, device: torch.device) -> torch.Tensor:
        return torch.randint(10, 8000, (count, 384)).to(device)

    def loss(network: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        return network(input_ids=tokens, labels=tokens).loss * tokens.numel(), tokens.numel()

    return vl.Task(made, batch, loss, "tokens", f"transformers {model}")


_WIDE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}

# The quick ones first: what the budget cuts off are the large.
PAIRS: dict[str, Pair] = {
    "gpt nano, fp32": Pair(_gpt("nano"), {}),
    "gpt mini, amp-bf16": Pair(_gpt("mini"), {"precision": "amp-bf16", "micro_batch": 64}),
    "gpt mini, tf32, adafactor loop": Pair(_gpt("mini"), {"precision": "tf32", "optimizer": "adafactor", "optimizer_impl": "loop"}),
    "gpt mini, amp-fp16, clip, 2 micro-batches": Pair(
        _gpt("mini"), {"precision": "amp-fp16", "clip_norm": 1.0, "accumulation": 2, "micro_batch": 32}
    ),
    "gpt mini, bf16, written-out attention": Pair(_gpt("mini"), {"precision": "bf16", "attention": "math", "micro_batch": 32}),
    "gpt mini, selective, chunks, in backward": Pair(
        _gpt("mini"),
        {"checkpointing": "selective", "loss_chunks": 4, "optimizer": "sgd", "optimizer_in_backward": True, "micro_batch": 32},
    ),
    "gpt mini, amp-bf16, offload activations": Pair(_gpt("mini"), {"precision": "amp-bf16", "offload": "activations", "micro_batch": 64}),
    "gpt mini, offload optimizer": Pair(_gpt("mini"), {"offload": "optimizer", "micro_batch": 32}),
    "gpt mini, dropout, fused adamw": Pair(_gpt("mini", dropout=0.1), {"optimizer_impl": "fused", "micro_batch": 32}),
    "llama-nano, bf16": Pair(_gpt("llama-nano"), {"precision": "bf16", "micro_batch": 16}),
    "resnet18, fp32": Pair(lambda: vl.tasks.resnet("resnet18"), {"micro_batch": 32}),
    "resnet18, amp-bf16": Pair(lambda: vl.tasks.resnet("resnet18"), {"precision": "amp-bf16", "micro_batch": 64}),
    "vit-b-16, amp-bf16": Pair(lambda: vl.tasks.vit("vit-b-16"), {"precision": "amp-bf16", "micro_batch": 32}),
    "transformers GPT-2, amp-bf16": Pair(
        lambda: library_task("GPT2Config", "GPT2LMHeadModel", n_embd=512, n_layer=4, n_head=8),
        {"precision": "amp-bf16", "micro_batch": 8},
    ),
    "transformers BERT, fp32": Pair(lambda: library_task("BertConfig", "BertForMaskedLM", **_WIDE), {}),
    "transformers Llama, amp-bf16": Pair(
        lambda: library_task("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2, **_WIDE), {"precision": "amp-bf16"}
    ),
    "gpt2, amp-bf16": Pair(_gpt("gpt2"), {"precision": "amp-bf16"}),
    "gpt2, fp32, checkpointed": Pair(_gpt("gpt2"), {"checkpointing": "blocks", "micro_batch": 4}),
    "llama-1b, amp-bf16, checkpointed": Pair(
        _gpt("llama-1b", sequence=1024), {"precision": "amp-bf16", "micro_batch": 1, "checkpointing": "blocks"}
    ),
    "gpt2-xl, amp-bf16, checkpointed, adafactor": Pair(
        _gpt("gpt2-xl"),
        {"precision": "amp-bf16", "micro_batch": 4, "checkpointing": "blocks", "optimizer": "adafactor", "loss_chunks": 8},
    ),
}


# The allocator's cases -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Requests to the allocator, and what is known of its state after the last.

    ``operations`` are pairs of a handle and bytes; 0 bytes give the handle's block back. ``facts`` were computed from the rules of
    ``c10/cuda/CUDACachingAllocator.cpp``: `round_size`, `get_allocation_size`, `get_free_block`, `should_split`, `alloc_block`,
    `release_cached_blocks`. Empty where none was computed: then only the card judges the model.
    """

    name: str
    operations: list[tuple[int, int]]
    facts: Row = field(default_factory=dict)
    capacity: int | None = None


# Bytes asked for; bytes of the block that is handed out, of the segment that is taken for it, and what is left free in it.
SINGLE: tuple[tuple[int, int, int, int], ...] = (
    (1, 512, 2_097_152, 2_096_640),
    (512, 512, 2_097_152, 2_096_640),
    (513, 1_024, 2_097_152, 2_096_128),
    (1_000, 1_024, 2_097_152, 2_096_128),
    (1_048_575, 1_048_576, 2_097_152, 1_048_576),
    (1_048_576, 1_048_576, 2_097_152, 1_048_576),
    (1_048_577, 1_049_088, 20_971_520, 19_922_432),
    (1_572_864, 1_572_864, 20_971_520, 19_398_656),
    (8_519_680, 8_519_680, 20_971_520, 12_451_840),
    (10_484_736, 10_484_736, 20_971_520, 10_486_784),
    (10_485_759, 10_485_760, 10_485_760, 0),
    (10_485_760, 10_485_760, 10_485_760, 0),
    (10_485_761, 10_486_272, 12_582_912, 2_096_640),
    (20_447_232, 20_971_520, 20_971_520, 0),  # half a MiB is left, too little to split: the whole segment is handed out
    (33_554_432, 33_554_432, 33_554_432, 0),
    (104_857_607, 104_858_112, 106_954_752, 2_096_640),
)
TEN = 10 * MiB
CAPACITY = 101 * MiB  # for ten segments of 10 MiB, with room for what a fraction of a card's memory loses in rounding


def cases() -> list[Case]:
    """Single requests, the tensors of a model, memory that runs out, and random sequences."""
    return [
        *(
            Case(f"one request of {n:,} bytes", [(0, n)], {"allocated": block, "reserved": segment, "hole": left})
            for n, block, segment, left in SINGLE
        ),
        *_transformer(),
        *_fragmented(),
        *(Case(f"random requests, seed {seed}", _random(seed)) for seed in range(3)),
    ]


def _transformer() -> Iterator[Case]:
    """`nn.Transformer(d_model=512)`: its parameters in order, their gradients in reverse, two moments for each."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # about nested tensors
        sizes = [4 * p.numel() for p in torch.nn.Transformer(d_model=512).parameters()]
    requests = list(enumerate([*sizes, *reversed(sizes), *(n for size in sizes for n in (size, size))]))
    for name, count, allocated, reserved in (
        ("parameters", 1, 178_659_328, 188_743_680),
        ("and gradients", 2, 356_270_080, 396_361_728),
        ("and Adam's moments", 4, 712_540_160, 769_654_784),
    ):
        yield Case(f"nn.Transformer: {name}", requests[: count * len(sizes)], {"allocated": allocated, "reserved": reserved})


def _fragmented() -> Iterator[Case]:
    """50 of 100 MiB are free in pieces of 10, and 20 are asked for: whole segments can go back, pieces of one cannot."""
    pieces = [(i, TEN) for i in range(10)]
    holes = [(i, 0) for i in range(0, 10, 2)]
    wanted = (10, 2 * TEN)
    freed = {"allocated": 7 * TEN, "reserved": 7 * TEN, "retries": 1, "out_of_memory": False}
    yield Case("holes that are segments, 20 MiB asked for", [*pieces, *holes, wanted], freed, CAPACITY)
    stuck = {"allocated": 5 * TEN, "reserved": 10 * TEN, "hole": TEN, "out_of_memory": True}
    yield Case("holes inside a segment, 20 MiB asked for", [(99, 10 * TEN), (99, 0), *pieces, *holes, wanted], stuck, CAPACITY)


def _random(seed: int, count: int = 2000, most: int = 1024 * MiB) -> list[tuple[int, int]]:
    """Requests from 1 byte to 64 MiB and their releases in random order; at most about ``most`` bytes are held at a time."""
    chance = random.Random(seed)
    held: dict[int, int] = {}
    operations: list[tuple[int, int]] = []
    for handle in range(count):
        while held and (sum(held.values()) > most or chance.random() < 0.45):
            given = chance.choice(list(held))
            del held[given]
            operations.append((given, 0))
        held[handle] = int(2 ** chance.uniform(0, 26))
        operations.append((handle, held[handle]))
    return operations


class Modelled:
    """`vramlab.memory.allocator`, asked as the real one is."""

    def __init__(self, capacity: int | None, expandable: bool) -> None:
        self._allocator = CachingAllocator(capacity, expandable)

    def do(self, handle: int, nbytes: int) -> bool:
        """Take or give back; whether there was room."""
        try:
            self._allocator.malloc(handle, nbytes) if nbytes else self._allocator.free(handle)
        except NoRoom:
            return False
        return True

    def state(self) -> tuple[int, int]:
        return self._allocator.allocated, self._allocator.reserved

    def more(self) -> Row:
        return {"hole": self._allocator.largest_hole, "retries": self._allocator.retries}

    def end(self) -> None:
        pass


class Real:
    """PyTorch's allocator on this machine's card, asked by making tensors."""

    def __init__(self, capacity: int | None, expandable: bool) -> None:
        torch.cuda.empty_cache()
        self._held: dict[int, torch.Tensor] = {}
        self._retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        if capacity is not None:
            torch.cuda.set_per_process_memory_fraction(capacity / torch.cuda.get_device_properties(0).total_memory)

    def do(self, handle: int, nbytes: int) -> bool:
        if not nbytes:
            del self._held[handle]
            return True
        try:
            self._held[handle] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return False
        return True

    def state(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def more(self) -> Row:
        free = [b["size"] for segment in torch.cuda.memory_snapshot() for b in segment["blocks"] if b["state"] == "inactive"]
        return {"hole": max(free, default=0), "retries": torch.cuda.memory_stats()["num_alloc_retries"] - self._retries}

    def end(self) -> None:
        self._held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def states(kind: type[Modelled] | type[Real], case: Case, expandable: bool) -> Row:
    """Allocated and reserved bytes after each request of a case, and what is known at its end."""
    allocator = kind(case.capacity, expandable)
    try:
        room = True
        after = []
        for handle, nbytes in case.operations:
            room = allocator.do(handle, nbytes) and room
            after.append(allocator.state())
        allocated, reserved = after[-1]
        return {"after": after, "end": {"allocated": allocated, "reserved": reserved, "out_of_memory": not room, **allocator.more()}}
    finally:
        allocator.end()


def case_result(case: Case, expandable: bool, modelled: Row, real: Row | None) -> Row:
    """A case with what the model of the allocator and the card made of it."""
    facts = {} if expandable else case.facts
    wrong = {name: modelled["end"][name] for name, value in facts.items() if modelled["end"][name] != value}
    result: Row = {"name": case.name, "expandable_segments": expandable, "modelled": modelled["end"], "not_as_computed": wrong}
    if real is not None:
        result |= {"measured": real["end"], "first_difference": None}
        pairs = enumerate(zip(modelled["after"], real["after"], strict=True))
        for i, (planned, measured) in pairs:
            if tuple(planned) != tuple(measured):
                result["first_difference"] = (
                    f"request {i} of {case.operations[i][1]:,} bytes: allocated {planned[0]:,} and reserved {planned[1]:,} modelled, "
                    f"{measured[0]:,} and {measured[1]:,} measured"
                )
                break
    return result


def allocator_results(measured: dict[bool, list[Row]]) -> list[Row]:
    """Every case with both kinds of segments; ``measured`` holds what the card's allocator did, as far as it was asked."""
    results = []
    for expandable in (False, True):
        for i, case in enumerate(cases()):
            real = measured[expandable][i] if expandable in measured else None
            results.append(case_result(case, expandable, states(Modelled, case, expandable), real))
    return results


# In a measuring process ----------------------------------------------------------------------------------------------


def measure_allocator(_: str) -> Row:
    """The context's size, then the cases on the card's allocator; the environment decides over expandable segments."""
    device = torch.device("cuda", 0)
    before = memory_in_use(device)  # reads the card's properties, which makes no context
    first = torch.empty(1, device=device)
    after = memory_in_use(device)
    context = None if before is None or after is None else after - before - torch.cuda.memory_reserved()
    del first
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    return {"context": context, "cases": [states(Real, case, expandable) for case in cases()]}


def measure_pair(name: str) -> Row:
    """Train a pair: its peaks and the history of the first steps, then the speed of some more."""
    device = torch.device("cuda", 0)
    others = memory_in_use(device)
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=1 << 24)
    pair, began = PAIRS[name], time.perf_counter()
    with contextlib.closing(train(pair.task(), vl.Recipe(**pair.recipe), device, record_every=None)) as steps:
        next(steps)
        seconds = time.perf_counter() - began
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        first = len(_history())
        for _ in range(TRACED - 1):
            next(steps)
            allocated, reserved = max(allocated, torch.cuda.max_memory_allocated()), max(reserved, torch.cuda.max_memory_reserved())
        used = memory_in_use(device)
        history = _history()
        torch.cuda.memory._record_memory_history(None)
        result: Row = {"allocated": allocated, "reserved": reserved, "first_step_seconds": seconds, "later": [0, 0]}
        result["device"] = None if used is None or others is None else used - others
        result["others"] = others
        result["context"] = None if result["device"] is None else result["device"] - torch.cuda.memory_reserved()
        speeds = []
        for report in _timed(steps):
            speeds.append(report.items_per_second)
            counters = report.counters
            result["later"] = [max(result["later"][0], counters.allocated), max(result["later"][1], counters.reserved)]
    return result | {"throughput": {**measure.spread(speeds), "steps": len(speeds)}, "history": _compact(history), "first_events": first}


def _timed(steps: Iterator[Any]) -> Iterator[Any]:
    """Two steps at least, and then as many as `TIMED_STEPS` and `TIMED_SECONDS` say."""
    began = time.perf_counter()
    for number in itertools.count(1):
        yield next(steps)
        spent = time.perf_counter() - began
        enough = number >= TIMED_STEPS[0] and spent > TIMED_SECONDS[0]
        if enough or number >= TIMED_STEPS[1] or (number >= 2 and spent > TIMED_SECONDS[1]):
            return


def _history() -> list[Row]:
    """PyTorch's own events so far: requests and releases, in order."""
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event for event in events if event["action"] in ("alloc", "free_requested")]


def _compact(events: list[Row]) -> list[Event]:
    """Bytes (negative: released), the address, and the Python lines that asked for them."""
    found = []
    for event in events:
        size = event["size"] if event["action"] == "alloc" else -event["size"]
        frames = [f"{Path(frame['filename']).name}:{frame['line']}" for frame in event.get("frames", [])[:4]] if size > 0 else []
        found.append((size, event["addr"], " < ".join(frames)))
    return found


def measure_run(_: str) -> Row:
    """`vramlab.run`, as a user calls it, and what it shows."""
    found = vl.run(vl.tasks.gpt("nano"), vl.Recipe(), steps=5, device="cuda", progress=False)
    planned = found.plan
    return {"peak": found.peak, "planned": None if planned is None else planned.allocated, "shown": repr(found)}


DUTIES: dict[str, Callable[[str], Row]] = {"pair": measure_pair, "allocator": measure_allocator, "run": measure_run}


def work() -> None:
    """What a measuring process does: one duty, which it reads from stdin; the result goes to stdout as a line of JSON."""
    line = sys.stdin.readline()
    if not line:
        return
    duty, name = json.loads(line)
    try:
        result = DUTIES[duty](name)
    except Exception as error:  # it belongs into the report
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        result = {"error": message, "out_of_memory": isinstance(error, torch.OutOfMemoryError), "traceback": traceback.format_exc()[-3000:]}
    print(json.dumps(result), flush=True)


class Process:
    """A measuring process that has imported what it needs and waits for its duty."""

    def __init__(self, **environment: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        command = [sys.executable, __file__, "--worker"]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env={**os.environ, **environment})

    def ask(self, duty: str, name: str, seconds: float) -> Row:
        """Its answer; an error where it died or needs longer than this."""
        try:
            said, _ = self._child.communicate(json.dumps([duty, name]) + "\n", timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {seconds:.0f} s: the budget is used up"}
        finally:
            self.end()
        answers = [line for line in said.splitlines() if line.startswith("{")]
        return json.loads(answers[-1]) if answers else {"error": f"the process ended with {self._child.returncode}: {self._last_words}"}

    def end(self) -> None:
        if not self._errors.closed:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(BrokenPipeError):  # what it has not read
                    pipe.close()  # type: ignore[union-attr]
            self._errors.seek(0)
            self._last_words = " ".join(self._errors.read().strip().splitlines()[-1:])[:300]
            self._errors.close()


# Planned beside measured ---------------------------------------------------------------------------------------------


Event = tuple[int, int, str]
"""Bytes asked for, negative when they are given back; a number for the block, or its address; what asked for it."""


class Request(NamedTuple):
    """An allocation, and what was released since the one before: bytes, and of how many allocations ago (None: any)."""

    nbytes: int
    released: list[tuple[int, int | None]]
    where: str


NO_MORE = Request(0, [], "no more")


def planned_events(trace: Any) -> tuple[list[Event], int]:
    """The events of a plan, as `CachingAllocator.replay` takes them, and how many are those of the building and the first step."""
    events, cut, before = trace.events, _first_step(trace.events), 0
    found: list[Event] = []
    held: dict[int, tuple[int, int]] = {}  # by storage: its bytes and the number of its block
    waiting = (0, 0)
    for i, (storage, nbytes) in enumerate(zip(events.storage.tolist(), events.nbytes.tolist(), strict=True)):
        if i == cut:
            before = len(found)
        had, block = held.pop(storage, (0, i))
        if i in events.moves:
            held[storage] = waiting
        elif i + 1 in events.moves:
            waiting = (had, block)
        else:
            if had:
                found.append((-had, block, ""))
            if had + nbytes:
                held[storage] = (had + nbytes, i)
                line = events.lines[events.line[i]].rpartition("/")[2] if events.line is not None else ""
                found.append((had + nbytes, i, f"{events.operators[events.operator[i]]} {line}".strip()))
    return found, before


def _first_step(events: Any) -> int:
    """How many events had happened at the end of the first optimizer step."""
    seen: set[int] = set()
    cut = 0
    for ended, optimizer in events.steps:  # with a step in backward each parameter has an optimizer of its own
        if optimizer in seen:
            break
        seen.add(optimizer)
        cut = ended
    return cut


def requests(events: list[Event], which: bool) -> list[Request]:
    """The allocations, each with the releases before it, sorted: among releases that follow one another the order does not count."""
    found: list[Request] = []
    made: dict[int, int] = {}  # which allocation a block is
    released: list[tuple[int, int | None]] = []
    for nbytes, block, where in events:
        if nbytes > 0:
            made[block] = len(found)
            found.append(Request(nbytes, sorted(released, key=str), where))
            released = []
        else:
            number = made.pop(block, None) if which else None
            released.append((-nbytes, None if number is None else len(found) - number))
    return found


def first_difference(planned: list[Event], measured: list[Event], *, which: bool, slack: int = 0) -> str | None:
    """The first allocation that differs, in size or in what was released before it; None if there is none.

    Args:
        which: compare too which of several blocks of one size was released: it can change what is reserved later.
        slack: up to so many of the first planned allocations may belong to what was before; the fit that goes furthest counts.
    """
    starts = [0, *(i + 1 for i, event in enumerate(planned) if event[0] > 0)][: slack + 1]
    theirs = requests(measured, which)
    tries = [requests(planned[start:], which) for start in starts]
    ours = max(tries, key=lambda attempt: _equal(attempt, theirs))
    same = _equal(ours, theirs)
    if same == len(ours) == len(theirs):
        return None
    a, b = (side[same] if same < len(side) else NO_MORE for side in (ours, theirs))
    if a.nbytes != b.nbytes:
        return f"allocation {same}: planned {a.nbytes:,} ({a.where}), measured {b.nbytes:,} ({b.where})"
    only = (_without(a.released, b.released), _without(b.released, a.released))
    words = [f"{who} {_blocks(blocks)}" for who, blocks in zip(("planned", "measured"), only, strict=True) if blocks]
    return f"released before allocation {same} of {a.nbytes:,} ({b.where}): {'; '.join(words)}"


def _equal(ours: list[Request], theirs: list[Request]) -> int:
    """How many are equal from the start on; what was released before the first is not compared."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.nbytes != b.nbytes or (i and a.released != b.released):
            return i
    return min(len(ours), len(theirs))


def _without(blocks: list[tuple[int, int | None]], others: list[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    left = list(blocks)
    for block in others:
        if block in left:
            left.remove(block)
    return left


def _blocks(blocks: list[tuple[int, int | None]]) -> str:
    """``4,096 of 12 allocations ago, 512``, three at most."""
    words = [f"{nbytes:,}" + ("" if ago is None else f" of {ago} allocations ago") for nbytes, ago in blocks[:3]]
    return ", ".join(words) + (f" and {len(blocks) - 3} more" if len(blocks) > 3 else "")


def compared_events(trace: Any, history: list[Event], first_events: int, sizes_differ: bool) -> str | None:
    """The first difference in the second step, where the peak stands. If there is none, and only if the sizes differ, of all.

    What a process does once, such as asking how dropout behaves under checkpointing, stands in the first step and is not planned.
    """
    planned, cut = planned_events(trace)
    # Between an optimizer's step and the next batch lie the loss scaler's requests.
    later = first_difference(planned[cut:], history[first_events:], which=sizes_differ, slack=8)
    if later is not None:
        return f"step 2, {later}"
    anywhere = first_difference(planned, history, which=True) if sizes_differ else None
    return None if anywhere is None else f"from the building on, {anywhere}"


def replayed(history: list[Event]) -> Row:
    """What the model of the allocator makes of the measured history."""
    allocator = CachingAllocator()
    for size, address, _ in history:
        allocator.malloc(address, size) if size > 0 else allocator.free(address)
    return {"allocated": allocator.peak_allocated, "reserved": allocator.peak_reserved}


def planned_row(name: str, card: gpus.GPU) -> tuple[Row, Any]:
    """What is planned for a pair, and the trace."""
    pair = PAIRS[name]
    plan = vl.plan(pair.task(), vl.Recipe(**pair.recipe), card)
    return {key: getattr(plan, key) for key in ("allocated", "reserved", "device", "fits", "seconds")}, plan.trace


def pair_row(name: str, planning: Callable[[], tuple[Row, Any]], measured: Row | None) -> Row:
    """A pair's row of the report; what failed is in it as ``error``."""
    row: Row = {"name": name, "recipe": PAIRS[name].recipe}
    try:
        row["planned"], trace = planning()
    except Exception as error:  # the other pairs go on
        row["error"] = f"planning: {type(error).__name__}: {error}"[:300]
        trace = None
    if measured is None:
        return row
    history, first = measured.pop("history", None), measured.pop("first_events", 0)
    row["measured"] = measured
    if "error" in measured:
        row.setdefault("error", f"measuring: {measured['error']}")
    elif "planned" in row:
        sizes = [size for size in ("allocated", "reserved", "device") if measured[size] is not None]
        row["difference"] = {size: measured[size] - row["planned"][size] for size in sizes}
        row["ratio"] = {size: measured[size] / row["planned"][size] for size in sizes}
        row["replayed"] = replayed(history)
        sizes_differ = any(row["difference"][size] for size in ("allocated", "reserved"))
        row["first_difference"] = compared_events(trace, history, first, sizes_differ)
    return row


# The report ----------------------------------------------------------------------------------------------------------


def write(path: Path, report: Row) -> None:
    """Write it whole or not at all: whoever reads the file meanwhile finds the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(partial, path)


def machine(card: gpus.GPU, dry: bool) -> Row:
    """The card, the driver and what is installed."""
    found: Row = {
        "card": {"name": card.name, "memory": card.memory, "capability": list(card.capability), "sms": card.sms},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if not dry else None,
        "driver": None if dry else driver(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": measure.processor(),
        "cores": os.cpu_count(),
    }
    with contextlib.suppress(ImportError):
        from importlib.metadata import version

        found["transformers"] = version("transformers")
    return found


def driver() -> str | None:
    """The driver's version; None where NVML does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def summary(report: Row) -> Row:
    """How many of what was checked came out equal."""
    judged = [row for row in report["pairs"] if "difference" in row]
    return {
        "pairs": len(judged),
        "allocated equal": sum(row["difference"]["allocated"] == 0 for row in judged),
        "reserved equal": sum(row["difference"]["reserved"] == 0 for row in judged),
        "failed": sum("error" in row for row in report["pairs"]),
        "allocator cases": len(report["allocator"]),
        "as computed": sum(not row["not_as_computed"] for row in report["allocator"]),
        "as on the card": sum("measured" in row and row["first_difference"] is None for row in report["allocator"]),
    }


def table(report: Row) -> str:
    """The report in `WIDTH` columns."""
    card = report["card"]
    head = f"{card['name']}, {format_bytes(card['memory'])}; torch {report['torch']}, CUDA {report['cuda']}, driver {report['driver']}"
    lines = [head, "", f"{'pair':<42} {'planned':>11} {'difference, B':>16} {'reserved':>8} {'device':>7} {'per s':>9}"]
    for row in report["pairs"]:
        lines.append(_pair_line(row))
        lines += [f"    {row[note]}" for note in ("error", "first_difference") if row.get(note)]
    lines += ["", *_allocator_lines(report), _context_line(report["context"])]
    if report["run"] is not None:
        lines.append(f"vl.run: {report['run'].get('error') or report['run']['shown']}")
    counts, reached = report["summary"], "" if report["complete"] else ", not all were reached"
    lines.append(
        f"{counts['pairs']} pairs: {counts['allocated equal']} equal in allocated, {counts['reserved equal']} in reserved bytes, "
        f"{counts['failed']} failed; {report['seconds']:.0f} s{reached}"
    )
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines)


def _allocator_lines(report: Row) -> Iterator[str]:
    """The cases that are not as they should be, and how many are."""
    for row in report["allocator"]:
        notes = [row.get("first_difference"), row["not_as_computed"] and f"modelled {row['not_as_computed']}, computed otherwise"]
        if any(notes):
            yield f"{row['name']}{', expandable' if row['expandable_segments'] else ''}"
            yield from (f"    {note}" for note in notes if note)
    counts = report["summary"]
    on_card = f"{counts['as on the card']} as on the card" if any("measured" in row for row in report["allocator"]) else "not measured"
    yield f"allocator: {counts['allocator cases']} cases, {counts['as computed']} as computed, {on_card}"
    yield from (f"    {error}" for error in report.get("allocator_errors", []))


def _context_line(context: Row) -> str:
    found = "not measured" if context["measured"] is None else format_bytes(context["measured"])
    low, high = (format_bytes(n) for n in context["range"])
    return f"context: {found}; planned with {format_bytes(context['planned'])}, known from {low} to {high}"


def _pair_line(row: Row) -> str:
    planned, measured, ratio = row.get("planned"), row.get("measured", {}), row.get("ratio", {})
    allocated = format_bytes(planned["allocated"]) if planned else "-"
    difference = f"{row['difference']['allocated']:+,}" if "difference" in row else "-"
    ratios = [f"{ratio[size]:.4f}" if size in ratio else "-" for size in ("reserved", "device")]
    speed = f"{measured['throughput']['median']:,.0f}" if "throughput" in measured else "-"
    return f"{row['name']:<42} {allocated:>11} {difference:>16} {ratios[0]:>8} {ratios[1]:>7} {speed:>9}"


# All of it -----------------------------------------------------------------------------------------------------------


class Check:
    """One run of this program: a report that grows, written after every part."""

    def __init__(self, card: gpus.GPU, dry: bool, path: Path, budget: float) -> None:
        self.path, self.dry, self._began, self._budget = path, dry, time.monotonic(), budget
        context = {"planned": card.context, "measured": None, "range": list(gpus.CONTEXT_RANGE)}
        self.card = card
        self.report: Row = {**machine(card, dry), "measured": not dry, "context": context, "allocator": [], "run": None, "pairs": []}
        self.save(False)

    @property
    def left(self) -> float:
        return self._budget - (time.monotonic() - self._began)

    def save(self, complete: bool) -> None:
        self.report |= {"budget_seconds": self._budget, "seconds": round(time.monotonic() - self._began, 1), "complete": complete}
        self.report["summary"] = summary(self.report)
        write(self.path, self.report)

    def allocator(self) -> None:
        """The cases on the model, and on the card with both kinds of segments."""
        measured = {}
        if not self.dry:
            processes = {expandable: Process(PYTORCH_ALLOC_CONF=f"expandable_segments:{expandable}") for expandable in (False, True)}
            for expandable, process in processes.items():
                found = process.ask("allocator", "", self.left)
                if "error" in found:
                    self.report.setdefault("allocator_errors", []).append(found["error"])
                    continue
                measured[expandable] = found["cases"]
                if not expandable:
                    self.report["context"]["measured"] = found["context"]
        self.report["allocator"] = allocator_results(measured)
        self.save(False)

    def pairs(self, names: list[str]) -> bool:
        """Plan and measure them one after the other; False if the budget did not last."""
        with _planning() as pool:
            plans: dict[str, Future[tuple[Row, Any]]] = {name: pool.submit(planned_row, name, self.card) for name in names}
            waiting = None if self.dry else Process()
            try:
                for number, name in enumerate(names):
                    if self.left <= 0:
                        return False
                    measured = None
                    if waiting is not None:
                        process, waiting = waiting, Process() if number + 1 < len(names) else None
                        measured = process.ask("pair", name, self.left)
                    planning = functools.partial(plans[name].result, max(self.left, 0.1))
                    self.report["pairs"].append(pair_row(name, planning, measured))
                    self.save(False)
            finally:
                if waiting is not None:
                    waiting.end()
        return self.left > 0

    def run(self) -> None:
        """`vramlab.run` once, on the card."""
        if not self.dry and self.left > 0:
            self.report["run"] = Process().ask("run", "", self.left)
            self.save(False)


@contextlib.contextmanager
def _planning() -> Iterator[ThreadPoolExecutor]:
    """A thread that waits for plans; what is not planned at the end is not waited for."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        planner.shared().close()


def chosen(words: list[str], dry: bool) -> list[str]:
    """The pairs whose name contains one of the words; without words all, in a dry run two.

    Raises:
        ValueError: a word that is in no name.
    """
    if not words:
        return list(PAIRS)[: DRY_PAIRS if dry else None]
    for word in words:
        if not any(word in name for name in PAIRS):
            raise ValueError(f"No pair's name contains {word!r}; they are {'; '.join(PAIRS)}.")
    return [name for name in PAIRS if any(word in name for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="measure nothing; needs no card")
    parser.add_argument("--pairs", nargs="+", default=[], metavar="WORD", help="only those whose name contains one of these words")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET, help=f"stop after this time, {BUDGET:.0f} if not given")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    try:
        names = chosen(options.pairs, options.dry_run)
    except ValueError as error:
        parser.error(str(error))
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("this measures on a CUDA card, and torch sees none here; --dry-run does what can be done without one.")
    path = options.output or (Path(tempfile.mkdtemp(prefix="gpu_check")) / OUTPUT.name if options.dry_run else OUTPUT)
    check = Check(gpus.gpu(DRY_CARD if options.dry_run else None), options.dry_run, path, options.budget_seconds)
    complete = False
    try:
        check.allocator()
        complete = check.pairs(names)
        check.run()
    except KeyboardInterrupt:
        print("Stopped; what was found until then:", file=sys.stderr)
    check.save(complete)
    print(table(check.report))
    print(f"Written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
