"""The one training loop: what it reports, that its parts change no number, and how it ends."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import random
import re
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rows import batch, loss
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import vramlab as vl
from vramlab.memory.trace import MemoryTrace
from vramlab.techniques import Window
from vramlab.techniques.choose import build_optimizer
from vramlab.training import StepReport, checked_loss, deferred_interrupt, train

CPU = torch.device("cpu")
HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks, _global_forward_pre_hooks, _global_forward_hooks)


pytestmark = pytest.mark.usefixtures("cheap_collections")


def model() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


TASK = vl.Task(model, batch, loss, "rows", "rows task")


def reports(n: int, task: vl.Task = TASK, device: Any = "cpu", record_every: int = 50, **options: Any) -> list[StepReport]:
    torch.manual_seed(9)
    steps = train(task, vl.Recipe(**{"micro_batch": 4, **options}), device, record_every=record_every)
    return [next(steps) for _ in range(n)]


def losses(n: int = 4, **options: Any) -> list[float]:
    return [report.loss for report in reports(n, **options)]


# What it is and what it gives.


def test_it_can_be_read_in_a_notebook() -> None:
    source = inspect.getsource(train)
    assert len(source.splitlines()) < 60
    assert inspect.isgeneratorfunction(train)
    assert inspect.getdoc(train)


def test_a_report_has_the_agreed_fields() -> None:
    assert list(inspect.signature(StepReport).parameters)[:5] == ["step", "loss", "seconds", "items_per_second", "memory"]
    first = reports(1)[0]
    assert first.step == 1
    assert 0 < first.loss < 5
    assert first.seconds > 0
    assert isinstance(first.memory, MemoryTrace)
    assert (first.skipped, first.interrupted) == (False, False)


@pytest.mark.parametrize(
    ("every", "recorded"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 2, 4, 6]), (3, [1, 2, 3, 6]), (5, [1, 2, 5]), (50, [1, 2])]
)
def test_steps_1_and_2_and_every_kth_are_recorded_and_the_others_timed(every: int, recorded: list[int]) -> None:
    result = reports(7, record_every=every)
    assert [r.step for r in result] == [1, 2, 3, 4, 5, 6, 7]
    assert [r.step for r in result if r.memory is not None] == recorded
    assert [r.step for r in result if r.items_per_second is None] == recorded


def test_items_per_second_are_the_windows_items_by_its_seconds() -> None:
    report = reports(3, micro_batch=5, accumulation=3)[2]
    assert report.items_per_second is not None
    assert report.items_per_second * report.seconds == pytest.approx(15)


def test_the_optimizers_state_appears_in_the_first_step() -> None:
    first, second = (r.memory for r in reports(2))
    assert first is not None
    assert second is not None
    parameters = 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert first.breakdown("start").optimizer_state == 0
    assert first.breakdown("end").optimizer_state == second.breakdown("start").optimizer_state == 2 * parameters + 4 * 4
    assert first.breakdown("start").parameters == second.breakdown("end").parameters == parameters
    assert second.breakdown("end").gradients == 0
    assert second.breakdown("end").activations == 4  # the window's loss, which is about to be reported


def test_recording_changes_no_number() -> None:
    assert losses(6, record_every=1) == losses(6, record_every=50)


def test_the_same_seed_gives_the_same_losses_and_another_does_not() -> None:
    assert losses() == losses()
    torch.manual_seed(10)
    steps = train(vl.Task(lambda: nn.Sequential(nn.Linear(4, 2)), batch, loss), vl.Recipe(micro_batch=4), "cpu")
    other = [next(steps).loss for _ in range(4)]
    assert other != losses()


def test_it_is_the_plain_loop() -> None:
    """The losses of the shortest loop that does the same, bit for bit."""
    torch.manual_seed(9)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    right = []
    for _ in range(4):
        total, n = loss(net, batch(4, CPU))
        mean = total / n
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        right.append(mean.item())
    assert losses() == pytest.approx(right, rel=1e-6)


def test_the_learning_rate_is_used() -> None:
    steps = train(TASK, vl.Recipe(micro_batch=4, optimizer="sgd"), "cpu", learning_rate=0.0)
    models: list[nn.Module] = []
    kept = vl.Task(lambda: models.append(model()) or models[-1], batch, loss)  # type: ignore[func-returns-value]
    steps = train(kept, vl.Recipe(micro_batch=4, optimizer="sgd"), "cpu", learning_rate=0.0)
    for _ in range(3):
        next(steps)
    assert all(map(torch.equal, models[0].parameters(), model().parameters()))


# The same numbers, however they are computed.


class Fixed:
    """A task over the same 12 rows in every window, cut into micro-batches of any size."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.rows = batch(12, CPU)
        self.at = 0
        self.task = vl.Task(model, self.next, loss, "rows")

    def next(self, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        piece = tuple(t[self.at : self.at + size].to(device) for t in self.rows)
        self.at = (self.at + size) % 12
        return piece  # type: ignore[return-value]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_micro_batches_and_accumulation_of_one_effective_batch_give_one_curve(optimizer: str, clip_norm: float | None) -> None:
    curves = [
        losses(5, task=Fixed().task, micro_batch=size, accumulation=12 // size, optimizer=optimizer, clip_norm=clip_norm)
        for size in (12, 6, 4, 3, 2, 1)
    ]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-5)
    assert len(set(curves[0])) == 5


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16", "bf16"])
def test_the_optimizers_implementations_agree(optimizer: str, precision: str) -> None:
    curves = [
        losses(4, optimizer=optimizer, optimizer_impl=how, precision=precision, loss_scale=256.0) for how in ("loop", "foreach", "fused")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=2e-2 if precision == "bf16" else 1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=2e-2 if precision == "bf16" else 1e-5)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
@pytest.mark.parametrize(("how", "flags"), [("loop", (False, False)), ("foreach", (True, False)), ("fused", (False, True))])
def test_the_recipes_optimizer_is_built(name: Any, kind: type, how: Any, flags: tuple[bool, bool]) -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = build_optimizer(net, vl.Recipe(optimizer=name, optimizer_impl=how), 0.25)
    group = optimizer.param_groups[0]
    assert type(optimizer) is kind
    assert (group["foreach"], group["fused"], group["lr"]) == (*flags, 0.25)
    assert [id(p) for p in group["params"]] == [id(p) for p in net.parameters() if p.requires_grad]


def test_only_what_is_trained_has_gradients_and_state() -> None:
    def frozen() -> nn.Module:
        net = model()
        net[0].requires_grad_(False)
        return net

    memory = reports(1, task=vl.Task(frozen, batch, loss))[0].memory
    assert memory is not None
    trained = 4 * (8 * 2 + 2)
    assert memory.breakdown("end").optimizer_state == 2 * trained + 2 * 4
    assert max(memory.breakdown(i).gradients for i in range(len(memory))) == trained


def test_clipping_bounds_the_step() -> None:
    models: list[nn.Module] = []
    kept = vl.Task(lambda: models.append(model()) or models[-1], batch, loss)  # type: ignore[func-returns-value]
    next(train(kept, vl.Recipe(micro_batch=4, optimizer="sgd", clip_norm=0.01), "cpu", learning_rate=1.0))
    moved = torch.cat([(a - b).flatten() for a, b in zip(models[0].parameters(), model().parameters(), strict=True)])
    assert float(moved.norm().detach()) == pytest.approx(0.01, rel=1e-4)


# What is refused, before anything is built.


def test_a_recipe_or_task_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Training needs a Task, got str 'gpt'; take for example vl\.tasks\.gpt\('nano'\)\.$"):
        next(train("gpt", vl.Recipe(), "cpu"))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^Training needs a Recipe, got str 'bf16'; write for example vl\.Recipe\(precision='amp-bf16'\)\.$"
    ):
        next(train(TASK, "bf16", "cpu"))  # type: ignore[arg-type]


def test_none_records_no_step() -> None:
    reports = list(itertools.islice(train(TASK, vl.Recipe(), "cpu", record_every=None), 2))
    assert [report.memory for report in reports] == [None, None]
    assert all(report.items_per_second for report in reports)


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_record_every_is_at_least_1(every: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^record_every is a whole number of at least 1, got {every!r}; a large one records steps 1 and 2"
    ):
        next(train(TASK, vl.Recipe(), "cpu", record_every=every))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Device 'cuda' needs CUDA, and torch .* here has none\. "):
        next(train(TASK, vl.Recipe(), "cuda"))


def test_a_model_without_parameters_is_refused() -> None:
    task = vl.Task(nn.Tanh, batch, loss)
    with pytest.raises(ValueError, match=r"^Training needs parameters with requires_grad, and Tanh has none"):
        next(train(task, vl.Recipe(), "cpu"))
    with pytest.raises(ValueError, match=r"^Training needs parameters with requires_grad, and Sequential has none"):
        next(train(vl.Task(lambda: model().requires_grad_(False), batch, loss), vl.Recipe(), "cpu"))


class NoModule:
    pass


def test_a_model_function_that_gives_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Task\.model returns a torch\.nn\.Module, got NoModule <"):
        next(train(vl.Task(NoModule, batch, loss), vl.Recipe(), "cpu"))  # type: ignore[arg-type]


def scalar() -> torch.Tensor:
    return torch.ones((), requires_grad=True) * 1


@pytest.mark.parametrize(
    "result",
    [
        lambda: None,
        scalar,
        lambda: [scalar(), 1],
        lambda: (scalar(),),
        lambda: (scalar(), 1, 2),
        lambda: (1.0, 1),
        lambda: "ab",
        lambda: {1: 2},
    ],
    ids=["None", "a tensor", "a list", "one", "three", "a float", "text", "a dict"],
)
def test_a_loss_that_is_no_pair_is_refused(result: Callable[[], Any]) -> None:
    value = result()
    remedy = r"return for example \(loss\.sum\(\), len\(loss\)\)\.$"
    text = rf"^Task\.loss returns \(sum of losses, number of items\), got {type(value).__name__} .*; {remedy}"
    with pytest.raises(TypeError, match=text):
        checked_loss(value)
    with pytest.raises(TypeError, match=text):
        next(train(vl.Task(model, batch, lambda m, b: value), vl.Recipe(), "cpu"))


@pytest.mark.parametrize(
    "count",
    [1.0, 8.5, None, "8", True, torch.tensor(8.0), torch.tensor(True), torch.tensor([1, 2]), np.float64(8), np.bool_(True), 1 + 0j],
    ids=repr,
)
def test_a_count_that_is_no_whole_number_is_refused(count: Any) -> None:
    text = (
        rf"^Task\.loss returns a whole number of items as its second value, got {type(count).__name__} .*; return for example labels\.numel"
    )
    with pytest.raises(TypeError, match=text):
        checked_loss((scalar(), count))


@pytest.mark.parametrize(
    "count", [8, torch.tensor(8), torch.tensor([8]), torch.tensor(8, dtype=torch.uint8), np.int64(8), np.int32(8)], ids=repr
)
def test_every_kind_of_whole_number_is_a_count(count: Any) -> None:
    n = checked_loss((scalar(), count))[1]
    assert n == 8
    assert type(n) is int


@pytest.mark.parametrize("count", [-1, torch.tensor(-3)])
def test_a_negative_count_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=rf"^Task\.loss returns a number of items of at least 0, got {int(count)}; count those"):
        checked_loss((scalar(), count))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_a_loss_that_is_not_summed_is_refused(shape: tuple[int, ...]) -> None:
    total = torch.ones(shape, requires_grad=True) * 1
    with pytest.raises(
        ValueError, match=rf"^Task\.loss returns one number, the sum of the losses, got shape {re.escape(str(shape))}; add \.sum\(\)\.$"
    ):
        checked_loss((total, 1))


@pytest.mark.parametrize(
    "total", [torch.ones(()), torch.ones((), dtype=torch.int64), scalar().detach()], ids=["fresh", "integer", "detached"]
)
def test_a_loss_without_a_graph_is_refused(total: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"has no grad; drop \.detach\(\), \.item\(\) or no_grad\.$"):
        checked_loss((total, 1))


def test_a_long_wrong_value_is_shortened() -> None:
    with pytest.raises(TypeError) as caught:
        checked_loss(list(range(1000)))
    assert len(str(caught.value)) < 250


# How it ends.


def switched() -> list[Any]:
    """Everything process-wide that a step switches."""
    torch.rand(1)
    return [
        *(dict(hooks) for hooks in HOOKS),
        signal.getsignal(signal.SIGINT),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        vars(torch.UntypedStorage).get("resize_"),
        torch.utils._python_dispatch._get_current_dispatch_mode(),
    ]


class TaskError(Exception):
    pass


class Failing:
    """A task that raises at one place in one step, and remembers the models it made."""

    def __init__(self, where: str, step: int = 1, error: type[BaseException] = TaskError, checkpointable: bool = False) -> None:
        self.where, self.step, self.error, self.calls = where, step, error, 0
        self.alive: list[weakref.ref[Any]] = []
        self.layers = 2 if checkpointable else 0
        self.task = vl.Task(self.model, self.batch, self.loss, "rows", "failing")

    def check(self, where: str) -> None:
        if where == self.where and self.calls == self.step:
            raise self.error(f"in {where}")

    def model(self) -> nn.Module:
        net = model()
        if self.layers:
            net.append(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))))
        self.alive.append(weakref.ref(net))
        self.alive += [weakref.ref(p) for p in net.parameters()]
        for parameter in net.parameters():
            parameter.register_hook(lambda g: self.check("backward"))
        return net

    def batch(self, size: int, device: torch.device) -> Any:
        self.calls += 1
        self.check("batch")
        return batch(size, device)

    def loss(self, net: nn.Module, rows: Any) -> Any:
        activations = net[0](rows[0])
        self.alive.append(weakref.ref(activations))
        self.check("forward")
        return loss(net, rows)


WHERE = ["batch", "forward", "backward", "step"]


def failing_step(monkeypatch: pytest.MonkeyPatch, failing: Failing) -> None:
    if failing.where == "step":
        step = torch.optim.AdamW.step

        def checked(self: torch.optim.Optimizer, closure: Any = None) -> Any:
            failing.check("step")
            return step(self, closure)

        monkeypatch.setattr(torch.optim.AdamW, "step", checked)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("step", [1, 3])
def test_an_exception_keeps_the_trace_and_leaves_nothing_switched(where: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(where, step)
    failing_step(monkeypatch, failing)
    before = switched()
    steps = train(failing.task, vl.Recipe(micro_batch=4, precision="amp-bf16"), "cpu")
    done = [next(steps) for _ in range(step - 1)]
    with pytest.raises(TaskError, match=f"in {where}") as caught:
        next(steps)
    assert switched() == before
    assert len(done) == step - 1
    if step == 1:  # recorded
        trace = caught.value.trace  # type: ignore[attr-defined]
        assert trace.breakdown("start").parameters == trace.breakdown("peak").parameters > 0
        assert (trace.breakdown("peak").activations > 0) == (where != "batch")
        assert trace.peak > 0
    else:
        assert not hasattr(caught.value, "trace")
    with pytest.raises(StopIteration):
        next(steps)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_after_an_exception_a_run_has_its_steps_and_no_memory(
    where: str, step: int, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception is still held, as a notebook holds the last one."""
    failing = Failing(where, step, checkpointable=checkpointing == "blocks")
    failing_step(monkeypatch, failing)
    before = switched()
    with pytest.raises(TaskError) as caught:
        vl.run(failing.task, vl.Recipe(micro_batch=4, checkpointing=checkpointing), steps=9, device="cpu", progress=False)
    assert [ref() for ref in failing.alive if ref() is not None] == []
    assert switched() == before
    run = caught.value.run  # type: ignore[attr-defined]
    assert [r.step for r in run.reports] == list(range(1, step))
    assert run.status == f"TaskError: in {where}"
    assert (run.failed_trace is not None) == (step == 1)
    assert run.peak > 0
    assert caught.value.__notes__ == [f"{step - 1} finished steps are kept in error.run."]


def test_the_memory_is_free_even_if_the_error_came_from_another() -> None:
    """A library that catches and raises its own: the first exception is its context and holds the variables too."""
    alive: list[weakref.ref[Any]] = []

    def inner(net: nn.Module, rows: Any) -> None:
        hidden = net[0](rows[0])
        alive.extend([weakref.ref(hidden), weakref.ref(net)])
        raise ValueError(hidden.shape)

    def chained(net: nn.Module, rows: Any) -> Any:
        try:
            inner(net, rows)
        except ValueError as error:
            raise TaskError("outer") from error

    with pytest.raises(TaskError) as caught:
        vl.run(vl.Task(model, batch, chained), vl.Recipe(micro_batch=4), steps=1, device="cpu", progress=False)
    assert isinstance(caught.value.__cause__, ValueError)
    assert [ref() for ref in alive if ref() is not None] == []


def test_a_loop_that_is_left_early_leaves_nothing_behind() -> None:
    before = switched()
    alive: list[weakref.ref[Any]] = []

    def watched() -> nn.Module:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 2))
        net = nn.Sequential(net[:3], net[3])
        alive.extend(map(weakref.ref, [net, *net.parameters()]))
        return net

    gc.collect()
    gc.disable()
    try:
        for report in train(vl.Task(watched, batch, loss), vl.Recipe(micro_batch=4, checkpointing="blocks", precision="amp-fp16"), "cpu"):
            assert switched() == before  # between two steps as well
            if report.step == 3:
                break
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()
    assert switched() == before


def test_a_model_that_is_kept_has_no_trace_of_the_loop() -> None:
    task = vl.tasks.gpt("nano", sequence=4)
    models: list[nn.Module] = []
    kept = vl.Task(lambda: models.append(task.model()) or models[-1], task.batch, task.loss)  # type: ignore[func-returns-value]
    steps = train(kept, vl.Recipe(micro_batch=1, checkpointing="blocks"), "cpu")
    next(steps)
    assert "forward" in vars(models[0].blocks[0])
    steps.close()
    assert all("forward" not in vars(m) and not m._forward_hooks and not m._forward_pre_hooks for m in models[0].modules())
    assert not any(p._post_accumulate_grad_hooks for p in models[0].parameters())
    assert all(p.grad is None for p in models[0].parameters())
    copy.deepcopy(models[0])


def test_no_random_numbers_but_torchs_are_used() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    reports(3, task=vl.tasks.gpt("nano", sequence=4))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


# Interrupts.


class Interrupting(Failing):
    """Ctrl-C comes in the middle of a step, once or twice."""

    def __init__(self, where: str, step: int, times: int = 1) -> None:
        super().__init__(where, step)
        self.times, self.finished = times, 0

    def check(self, where: str) -> None:
        if where == self.where and self.calls == self.step and not self.finished:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
            self.finished = 1


@pytest.mark.parametrize("where", ["batch", "forward", "backward"])
@pytest.mark.parametrize("step", [1, 3])
def test_ctrl_c_waits_for_the_end_of_the_step(where: str, step: int) -> None:
    before = switched()
    interrupting = Interrupting(where, step)
    steps = train(interrupting.task, vl.Recipe(micro_batch=4), "cpu")
    result = [next(steps) for _ in range(step)]
    assert interrupting.finished
    assert [r.interrupted for r in result] == [False] * (step - 1) + [True]
    assert result[-1].loss > 0
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert switched() == before


@pytest.mark.parametrize("step", [1, 3, 5])
def test_an_interrupted_run_is_returned_with_its_steps(step: int) -> None:
    before = switched()
    interrupting = Interrupting("forward", step)
    run = vl.run(interrupting.task, vl.Recipe(micro_batch=4), steps=5, device="cpu", progress=False)
    assert [r.step for r in run.reports] == list(range(1, step + 1))
    assert run.status == "interrupted"
    assert run.peak is not None
    assert switched() == before


def test_a_second_ctrl_c_acts_at_once() -> None:
    before = switched()
    interrupting = Interrupting("forward", 2, times=2)
    run = vl.run(interrupting.task, vl.Recipe(micro_batch=4), steps=5, device="cpu", progress=False)
    assert interrupting.finished == 0
    assert [r.step for r in run.reports] == [1]
    assert run.status == "interrupted"
    assert run.failed_trace is not None
    assert [ref() for ref in interrupting.alive if ref() is not None] == []
    assert switched() == before


def test_ctrl_c_between_steps_is_the_callers() -> None:
    def stop(run: Any) -> None:
        if len(run.reports) == 2:
            signal.raise_signal(signal.SIGINT)

    run = vl.run(TASK, vl.Recipe(micro_batch=4), steps=5, device="cpu", progress=False, on_step=stop)
    assert (len(run.reports), run.status) == (2, "interrupted")


def test_another_handler_is_put_back_and_gets_the_second_signal() -> None:
    heard: list[int] = []
    own = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        with deferred_interrupt() as waiting:
            signal.raise_signal(signal.SIGINT)
            assert (waiting, heard) == ([signal.SIGINT], [])
            signal.raise_signal(signal.SIGINT)
            assert heard == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, own)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_not_pythons_is_left_alone(handler: Any) -> None:
    own = signal.signal(signal.SIGINT, handler)
    try:
        with deferred_interrupt() as waiting:
            assert signal.getsignal(signal.SIGINT) is handler
        assert waiting == []
    finally:
        signal.signal(signal.SIGINT, own)


def test_a_second_thread_trains_without_touching_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def watched(net: nn.Module, rows: Any) -> Any:
        seen.append(signal.getsignal(signal.SIGINT))
        return loss(net, rows)

    results: list[StepReport] = []
    thread = threading.Thread(target=lambda: results.extend(reports(3, task=vl.Task(model, batch, watched))))
    thread.start()
    thread.join(60)
    assert [r.step for r in results] == [1, 2, 3]
    assert seen == [before] * 3


def test_an_error_in_a_second_thread_reaches_its_caller() -> None:
    failing, errors = Failing("forward", 2), []

    def body() -> None:
        try:
            vl.run(failing.task, vl.Recipe(micro_batch=4), steps=3, device="cpu", progress=False)
        except TaskError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert len(errors[0].run.reports) == 1  # type: ignore[attr-defined]


def test_a_window_of_the_loop_is_the_technique() -> None:
    """What a user calls by hand is what train() calls."""
    assert inspect.getsource(train).count("train_window") == 1
    assert inspect.getsource(vl.training.train_window).count("way.window(") == 1
    assert vl.techniques.Window is Window


def test_a_model_that_a_run_had_before_is_refused() -> None:
    """Its parameters would be trained on, in the dtype of the run before: a silently wrong row of a comparison."""
    kept = model()
    task = vl.Task(lambda: kept, batch, loss)
    next(train(task, vl.Recipe(micro_batch=2), "cpu"))
    with pytest.raises(TypeError, match=r"^Task\.model makes a new model for every run, and this Sequential was given"):
        next(train(task, vl.Recipe(micro_batch=2), "cpu"))


def test_norms_frozen_by_the_model_stay_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4).eval(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.training, self.norm.training))
            return self.head(self.norm(x))

    seen: list[tuple[bool, bool]] = []
    next(train(vl.Task(Frozen, batch, loss), vl.Recipe(micro_batch=2), "cpu"))
    assert seen == [(True, False)]
    seen.clear()
    next(train(vl.Task(lambda: Frozen().eval(), batch, loss), vl.Recipe(micro_batch=2), "cpu"))
    assert seen == [(True, True)]  # a model in eval mode as a whole was only forgotten there
