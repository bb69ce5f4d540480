"""The recorder against PyTorch's own allocator events, byte by byte, for the same training step on the CPU."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from vramlab import tasks
from vramlab.memory.recorder import record
from vramlab.memory.trace import MemoryTrace, Phase
from vramlab.techniques import checkpoint_blocks

GENERATOR_STATE = torch.get_rng_state().nbytes
"""Checkpointing keeps one for each block; no operator makes it, so no recorder sees it."""

# Batches come from operators here: the profiler does not see NumPy's memory.
MODELS = {
    "gpt nano": (tasks.gpt("nano"), lambda: torch.randint(256, (8, 65))),
    "gpt nano, dropout": (tasks.gpt("nano", dropout=0.1), lambda: torch.randint(256, (8, 65))),
    "gpt mini": (tasks.gpt("mini"), lambda: torch.randint(256, (8, 129))),
    "llama nano": (tasks.gpt("llama-nano"), lambda: torch.randint(256, (8, 65))),
    "vit nano": (tasks.vit("nano"), lambda: (torch.rand(8, 1, 8, 8), torch.randint(10, (8,)))),
    "resnet nano": (tasks.resnet("nano"), lambda: (torch.rand(8, 1, 8, 8), torch.randint(10, (8,)))),
}


@dataclass
class Training:
    """One training step that can be repeated."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def training(
    name: str,
    optimizer: str = "foreach",
    *,
    accumulation: int = 1,
    checkpointing: bool = False,
    clip_norm: float | None = None,
    bf16: bool = False,
) -> Training:
    """A built-in model after two steps, so that gradients and optimizer state have found their places."""
    task, batch = MODELS[name]
    model = task.model().train()
    if checkpointing:
        checkpoint_blocks(model)
    if optimizer == "sgd":
        stepper: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        stepper = torch.optim.AdamW(model.parameters(), foreach=optimizer == "foreach", fused=optimizer == "fused")

    def step() -> None:
        for _ in range(accumulation):
            inputs = batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                total, count = task.loss(model, inputs)
            (total / (count * accumulation)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        stepper.step()
        stepper.zero_grad()

    step()
    step()
    return Training(model, stepper, step)


def allocator_events(step: Callable[[], object]) -> list[int]:
    """Signed bytes of everything that PyTorch's CPU allocator hands out and takes back during a step, in order."""
    return [nbytes for _, nbytes in _profile(step)[0]]


def _profile(step: Callable[[], object]) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]]]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0])
    ranges = sorted((e.start_ns(), e.end_ns(), e.name()) for e in events if e.name().startswith("operator "))
    return memory, ranges


def rise(events: list[int]) -> int:
    """The highest running total."""
    total = highest = 0
    for nbytes in events:
        total += nbytes
        highest = max(highest, total)
    return highest


def recorded(trained: Training) -> MemoryTrace:
    with record(trained.model, trained.optimizer) as trace:
        trained.step()
    return trace


class Marker(TorchDispatchMode):
    """Puts the name of each operator into the profile, as a range around it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with record_function(f"operator {func}"):
            return func(*args, **(kwargs or {}))


@dataclass
class Witnessed:
    """One step seen by both: the recorder's trace, the allocator's events and in which operator each happened."""

    trace: MemoryTrace
    events: list[tuple[int, int | None]]  # signed bytes, number of the operator or None between operators
    operators: list[str]

    def __post_init__(self) -> None:
        """Say of each event whether it is internal: allocated and released inside the same operator."""
        self.internal = [False] * len(self.events)
        for number, group in groupby(range(len(self.events)), key=lambda i: self.events[i][1]):
            allocated: dict[int, list[int]] = {}
            for i in group if number is not None else ():
                nbytes = self.events[i][0]
                if nbytes > 0:
                    allocated.setdefault(nbytes, []).append(i)
                elif allocated.get(-nbytes):
                    self.internal[i] = self.internal[allocated[-nbytes].pop()] = True

    def at_the_peak(self) -> tuple[int, int, str]:
        """The allocator's highest total, the internal bytes alive at that moment, and the operator around it."""
        totals = list(_running(n for n, _ in self.events))
        i = totals.index(max(totals))
        number = self.events[i][1]
        alive = sum(n for (n, k), internal in zip(self.events[: i + 1], self.internal, strict=False) if internal and k == number)
        return totals[i], alive, self.operators[number] if number is not None else ""

    def seen_from_outside(self) -> list[int]:
        return [n for (n, _), internal in zip(self.events, self.internal, strict=True) if not internal]


def witnessed(trained: Training) -> Witnessed:
    recorder = record(trained.model, trained.optimizer)

    def step() -> None:
        with recorder, Marker():
            trained.step()

    memory, ranges = _profile(step)
    starts = [start for start, _, _ in ranges]

    def operator(moment: int) -> int | None:
        i = bisect_right(starts, moment) - 1
        return i if i >= 0 and moment <= ranges[i][1] else None

    names = [name.removeprefix("operator ") for _, _, name in ranges]
    return Witnessed(recorder.trace, [(nbytes, operator(moment)) for moment, nbytes in memory], names)


def _running(numbers: Iterable[int]) -> Iterator[int]:
    total = 0
    for number in numbers:
        total += number
        yield total


def series(events: list[int]) -> list[list[int]]:
    """Events without scalars and generator states; what is allocated (or released) in a row has no order of its own."""
    kept = [n for n in events if abs(n) > 8 and abs(n) != GENERATOR_STATE]
    return [sorted(group) for _, group in groupby(kept, key=lambda n: n > 0)]


def own_events(trace: MemoryTrace) -> list[int]:
    return trace.events.nbytes[trace.events.seeds :].tolist()


# The peak, against a step that nobody watches but the profiler

OPTIONS = {
    "AdamW foreach": {},
    "AdamW loop": {"optimizer": "loop"},
    "AdamW fused": {"optimizer": "fused"},
    "SGD": {"optimizer": "sgd"},
    "accumulation 2": {"accumulation": 2},
    "clip norm": {"clip_norm": 1.0},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["gpt nano", "gpt nano, dropout", "llama nano", "vit nano"])
def test_the_peak_in_fp32_is_the_allocators_to_the_byte(name: str, option: str) -> None:
    trained = training(name, **OPTIONS[option])
    trace = recorded(trained)
    assert trace.peak - trace.baseline == rise(allocator_events(trained.step))


def test_the_peak_of_the_standard_lab_task_is_the_allocators_to_the_byte() -> None:
    trained = training("gpt mini")
    trace = recorded(trained)
    assert trace.peak - trace.baseline == rise(allocator_events(trained.step))


@pytest.mark.parametrize("name", ["gpt nano", "gpt nano, dropout", "llama nano", "gpt mini"])
def test_with_checkpointing_only_a_state_of_the_generator_is_missing(name: str) -> None:
    trained = training(name, checkpointing=True)
    trace = recorded(trained)
    assert rise(allocator_events(trained.step)) - (trace.peak - trace.baseline) == GENERATOR_STATE


def test_with_checkpointing_and_the_peak_in_the_step_nothing_but_scalars_is_missing() -> None:
    """A foreach division by a list of numbers makes each number a tensor: 8 bytes, and 4 in the type of the result."""
    trained = training("vit nano", checkpointing=True)
    trace = recorded(trained)
    assert trace.peak_phase == "step"
    assert rise(allocator_events(trained.step)) - (trace.peak - trace.baseline) == 8 + 4


# The whole series, and what happens inside operators


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODELS),
        *((name, {"checkpointing": True}) for name in ("gpt nano, dropout", "llama nano", "vit nano", "resnet nano")),
        *((name, {"bf16": True}) for name in ("gpt nano", "llama nano", "vit nano", "resnet nano")),
        *(("gpt nano", options) for options in OPTIONS.values() if options),
        ("resnet nano", {"accumulation": 2, "optimizer": "sgd"}),
    ],
)
def test_the_whole_series_is_the_allocators_without_what_operators_keep_to_themselves(name: str, options: dict) -> None:
    seen = witnessed(training(name, **options))
    assert series(own_events(seen.trace)) == series(seen.seen_from_outside())


@pytest.mark.parametrize("name", ["gpt nano", "gpt mini", "llama nano", "vit nano"])
def test_in_bf16_the_recorder_and_the_temporaries_inside_operators_are_the_allocators_peak(name: str) -> None:
    trained = training(name, bf16=True)
    seen = witnessed(trained)
    highest, internal, operator = seen.at_the_peak()
    assert highest == rise(allocator_events(trained.step))
    if internal > 8:  # the CPU's bf16 products, attention and convolutions bring their operands into another order
        assert any(product in operator for product in ("mm", "attention", "convolution", "linear"))
    # What the recorder counts at that moment is the same series, by the test above.
    from_outside = max(total for total in _running(own_events(seen.trace)) if total <= highest - internal)
    assert 0 <= highest - internal - from_outside <= 8
    trace = recorded(trained)
    allocated = trace.baseline + highest
    assert allocated * 0.98 <= trace.peak <= allocated


@pytest.mark.parametrize("options", [{"optimizer": "sgd"}, {"accumulation": 2}, {}])
def test_what_is_missing_at_the_peak_of_convolutions_is_inside_them(options: dict) -> None:
    trained = training("resnet nano", **options)
    highest, internal, operator = witnessed(trained).at_the_peak()
    trace = recorded(trained)
    missing = highest - (trace.peak - trace.baseline)
    assert highest == rise(allocator_events(trained.step))
    assert 0 <= missing <= internal + 8
    assert missing <= 8 + 4 or "convolution" in operator


# Any program


def obey(tensors: list[torch.Tensor], command: str, a: int, b: int) -> None:
    """One command on a list of flat tensors of 16 to 128 numbers, which may share storages."""
    x, y, size = tensors[a % len(tensors)], tensors[b % len(tensors)], 16 * (1 + b % 8)
    if command == "new":
        tensors.append(torch.zeros(size))
    elif command == "view":
        tensors.append(x[: len(x) // 2] if b % 2 else x.view(-1, 1).expand(-1, 4)[:, 0])
    elif command == "copy":
        tensors.append(x.clone())
    elif command == "in place":
        x.add_(1)
    elif command == "out":
        torch.arange(size, dtype=torch.float32, out=y)
    elif command == "resize":
        x.resize_(size)
    elif command == "resize storage":
        x.untyped_storage().resize_(x.untyped_storage().nbytes() + 4 * size)
    elif command == "set":
        y.set_(x.untyped_storage(), 0, (len(x),))
    elif command == "data":
        y.data = x
    elif command == "replace":
        tensors[a % len(tensors)] = x + x
    elif len(tensors) > 1:
        del tensors[a % len(tensors)]


COMMANDS = ("new", "view", "copy", "in place", "out", "resize", "resize storage", "set", "data", "replace", "delete")


@pytest.mark.filterwarnings("ignore:The number of elements in the out tensor:UserWarning")
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(COMMANDS), st.integers(0, 9), st.integers(0, 9)), max_size=15))
def test_after_each_command_of_any_program_the_allocators_total_is_the_recorders(program: list[tuple[str, int, int]]) -> None:
    totals = []

    def run() -> None:
        with record() as trace:
            tensors = [torch.zeros(16)]
            for i, (command, a, b) in enumerate(program):
                with record_function(f"operator {i}"):
                    obey(tensors, command, a, b)
                totals.append(trace.breakdown("end").total)

    memory, ranges = _profile(run)
    ranges.sort(key=lambda r: r[0])
    ends = [end for _, end, _ in ranges]
    assert totals == [sum(n for moment, n in memory if moment <= end) for end in ends]


# What looking on changes


def test_a_recorder_changes_nothing_but_where_autograd_adds_up() -> None:
    """Autograd adds a gradient to one that waits for it in place, but out of place while any dispatch mode is there."""
    trained = training("gpt nano")
    alone = allocator_events(trained.step)
    watched = allocator_events(lambda: recorded(trained))
    activation = 8 * 64 * 128 * 4
    more, fewer = Counter(watched) - Counter(alone), Counter(alone) - Counter(watched)
    assert {n: k for n, k in more.items() if abs(n) > 8} == {activation: 4, -activation: 4}  # two residual sums a block
    assert not fewer
    assert rise(watched) == rise(alone)
    assert sum(watched) == sum(alone) == 0


class Shifted(torch.autograd.Function):
    """The identity; its backward, in Python, adds a constant to the gradient out of place."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + OTHER


def hooked(x: torch.Tensor) -> torch.Tensor:
    """A hook adds a constant to the gradient out of place."""
    x = x * 1
    x.register_hook(lambda gradient: gradient + OTHER)
    return (x * OTHER).sum()


WORKS_IN_PLACE = {"aten::" + name for name in ("add.Tensor", "scatter.src", "scatter_add", "index_put", "masked_scatter", "put")}


def agree(trace: MemoryTrace, alone: list[int]) -> bool:
    """Whether a trace is the allocator's series, above 64 bytes, if a sum in place is a release and then an allocation."""
    events, alone = trace.events, above_64(alone)
    columns = zip(*(column[events.seeds :].tolist() for column in (events.nbytes, events.operator, events.phase)), strict=True)
    rows = [
        (nbytes, events.operators[operator] if phase == Phase.BACKWARD else "") for nbytes, operator, phase in columns if abs(nbytes) > 64
    ]
    reached: list[set[int]] = [{0}] + [set() for _ in rows]  # after so many rows: how many of the allocator's events may have been
    for i, (nbytes, operator) in enumerate(rows):
        reached[i + 1] |= {j + 1 for j in reached[i] if alone[j : j + 1] == [nbytes]}
        if operator in WORKS_IN_PLACE and nbytes < 0 and rows[i + 1 : i + 2] == [(-nbytes, operator)]:
            reached[i + 2] |= reached[i]
    return len(alone) in reached[-1]


def above_64(events: list[int]) -> list[int]:
    return [nbytes for nbytes in events if abs(nbytes) > 64]


INDEX, OTHER = torch.arange(64).remainder(7)[:, None], torch.ones(64, 64)
ATTENTION = nn.MultiheadAttention(64, 4, batch_first=True)
Formulas = dict[str, Callable[[torch.Tensor], torch.Tensor]]
IN_PLACE: Formulas = {
    "self-attention": lambda x: ATTENTION(x[None], x[None], x[None])[0].square().sum(),
    "a square": lambda x: (x.exp() * x.exp()).sum() + (lambda y: (y * y * OTHER).sum())(x.tanh()),
    "a fork": lambda x: (x.sin() + x.cos() + x.tanh()).sum(),
    "log-probabilities of labels": lambda x: -x.log_softmax(1).gather(1, INDEX).sum(),
    "cross-entropy and its square": lambda x: F.cross_entropy(x, INDEX[:, 0]) + 1e-4 * F.cross_entropy(x, INDEX[:, 0]).square(),
    "rows by index": lambda x: x[INDEX[:, 0]].sum(),
    "take": lambda x: x.take(INDEX).sum(),
    "take along": lambda x: x.take_along_dim(INDEX, 1).sum(),
    "largest": lambda x: x.max(1).values.sum(),
    "largest five": lambda x: x.topk(5).values.sum(),
    "median": lambda x: x.median(1).values.sum(),
    "slices": lambda x: (x[:, :32] * x[:, 32:]).sum() + x[3].sum(),
}
COPYING: Formulas = {
    "a backward in Python": lambda x: (Shifted.apply(x * 1) * OTHER).sum(),
    "a hook": hooked,
    "a sum with a graph": lambda x: (torch.autograd.grad((x.sin() + x.exp()).sum(), x, create_graph=True)[0].detach() * x).sum(),
    "rows replaced": lambda x: (x.index_put((INDEX[:, 0],), OTHER) * OTHER).sum(),
    "columns replaced": lambda x: (x.scatter(1, INDEX, OTHER) * OTHER).sum(),
    "a sum by index": lambda x: (OTHER.index_add(0, INDEX[:, 0], x) * OTHER).sum(),
    "twice the same": lambda x: (lambda y: ((y + y) * OTHER).sum())(x.tanh()),
    "variance and mean": lambda x: sum(part.square().sum() for part in torch.var_mean(x, 1)),
}


def one_backward(formula: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    weight = nn.Parameter(torch.randn(64, 64))

    def step() -> None:
        formula(weight * 1).backward()
        weight.grad = None

    step()
    return step


def watched(step: Callable[[], None]) -> MemoryTrace:
    with record() as trace:
        step()
    with record() as outer, record() as inner:
        step()
    assert own_events(outer) == own_events(inner) == own_events(trace)
    return trace


SCALARS = 256  # what operators make of numbers; some are saved for backward


@pytest.mark.parametrize("formula", IN_PLACE)
def test_what_autograd_computes_in_place_is_no_copy_in_the_trace(formula: str) -> None:
    """Under a dispatch mode it copies, and the trace leaves those copies out."""
    step = one_backward(IN_PLACE[formula])
    trace, alone = watched(step), allocator_events(step)
    assert agree(trace, alone)
    assert abs(rise(own_events(trace)) - rise(alone)) <= SCALARS
    assert rise(allocator_events(lambda: _under_a_mode(step))) >= rise(alone)


@pytest.mark.parametrize("formula", COPYING)
def test_what_copies_without_a_recorder_too_is_a_copy_in_the_trace(formula: str) -> None:
    step = one_backward(COPYING[formula])
    assert above_64(own_events(watched(step))) == above_64(allocator_events(step))


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "exp": torch.exp,
    "relu": torch.relu,
    "double": lambda x: x * 2,
    "softmax": lambda x: x.softmax(1),
    "view": lambda x: x.view(32, 128).view(64, 64),
    "rows": lambda x: x[INDEX[:, 0]],
    "gather": lambda x: x.gather(1, INDEX.expand(64, 64)),
    "in place": lambda x: (x * 1).add_(1),
    "less the largest": lambda x: x - x.max(1, keepdim=True).values,
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "where": lambda x, y: torch.where(INDEX > 3, x, y),
}
STEP = st.tuples(st.sampled_from(sorted(UNARY) + sorted(BINARY)), st.integers(0, 99), st.integers(0, 99))


@settings(deadline=None, max_examples=150)
@given(st.lists(STEP, min_size=1, max_size=10), st.booleans())
def test_the_series_of_any_graph_is_that_of_a_step_without_a_recorder(graph: list[tuple[str, int, int]], keep: bool) -> None:
    weight, factor = nn.Parameter(torch.full((64, 64), 0.01)), torch.ones(64, 64)

    def step() -> None:
        values = [weight]
        for name, a, b in graph:
            x, y = values[a % len(values)], values[b % len(values)]
            values.append(UNARY[name](x) if name in UNARY else BINARY[name](x, y))
        loss = (values[-1] * factor).sum()
        if not keep:
            del values, x, y
        loss.backward()
        weight.grad = None

    step()
    trace, alone = watched(step), allocator_events(step)
    assert agree(trace, alone)
    assert abs(rise(own_events(trace)) - rise(alone)) <= SCALARS


def test_what_a_mode_changes_in_a_cumulative_product_is_not_left_out() -> None:
    """A named limit: this backward is another algorithm under a mode. The trace is then true for the recorded run."""
    weight = nn.Parameter(torch.randn(64, 64))

    def step() -> None:
        (weight * 1).cumprod(0).sum().backward()
        weight.grad = None

    step()
    with record() as trace:
        step()
    under_a_mode = rise(allocator_events(lambda: _under_a_mode(step)))
    assert abs(under_a_mode - (trace.peak - trace.baseline)) <= SCALARS
    assert rise(allocator_events(step)) < 0.7 * under_a_mode


def _under_a_mode(step: Callable[[], None]) -> None:
    with Marker():
        step()
