"""run() and compare(): what they measure, in any order, and what is left when something fails."""

from __future__ import annotations

import gc
import html
import random
import re
import signal
import statistics
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rows import TASK, batch, loss, model
from torch import nn

import vramlab as vl
from vramlab import experiments
from vramlab.experiments import Comparison, Run, recipe_labels
from vramlab.memory.trace import Category, DeviceCounters, Events, MemoryBreakdown, MemoryTrace, Phase
from vramlab.training import StepReport

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("cheap_collections")


TINY = vl.Recipe(micro_batch=4)


def run(recipe: vl.Recipe = TINY, steps: int = 4, task: vl.Task = TASK, **options: Any) -> Run:
    return vl.run(task, recipe, steps=steps, device="cpu", progress=False, **options)


def compare(recipes: Any, steps: int = 4, task: vl.Task = TASK, **options: Any) -> Comparison:
    return vl.compare(task, recipes, steps=steps, device="cpu", progress=False, **options)


def trace(*rows: tuple[int, Category, Phase], counters: DeviceCounters | None = None) -> MemoryTrace:
    """A trace made by hand: each row allocates bytes of a category in a phase."""
    n = len(rows)
    zeros = np.zeros(n, np.int32)
    events = Events(
        storage=np.arange(n),
        nbytes=np.array([r[0] for r in rows], np.int64),
        category=np.array([r[1] for r in rows], np.int8),
        module=zeros,
        phase=np.array([r[2] for r in rows], np.int8),
        operator=zeros,
        modules=("",),
        operators=("aten::mm",),
    )
    return MemoryTrace(events, "cpu", counters)


def of_size(nbytes: int, counters: DeviceCounters | None = None) -> MemoryTrace:
    return trace((nbytes, Category.ACTIVATIONS, Phase.FORWARD), counters=counters)


def by_hand(*speeds: float | None, peaks: tuple[int | None, ...] = (), recipe: vl.Recipe = TINY, status: str = "finished") -> Run:
    peaks = peaks or (None,) * len(speeds)
    reports = [
        StepReport(i, 10.0 / i, 0.5, speed, None if peak is None else of_size(peak))
        for i, (speed, peak) in enumerate(zip(speeds, peaks, strict=True), 1)
    ]
    return Run(TASK, recipe, CPU, reports, status)


# A run.


def test_a_run_holds_what_was_asked_and_measured() -> None:
    result = run(steps=5)
    assert (result.task, result.recipe, result.device, result.status) == (TASK, TINY, CPU, "finished")
    assert [r.step for r in result.reports] == [1, 2, 3, 4, 5]
    assert result.losses == [r.loss for r in result.reports]
    assert type(result.peak) is int
    assert result.peak == max(r.memory.peak for r in result.reports if r.memory) == result.breakdown.total
    assert result.throughput == statistics.median(r.items_per_second for r in result.reports[2:] if r.items_per_second)
    assert result.failed_trace is None


def test_the_shortest_run_has_a_peak_and_a_speed() -> None:
    result = vl.run(vl.tasks.gpt("nano"), vl.Recipe(precision="amp-bf16", checkpointing="blocks"), steps=3, progress=False)
    assert result.peak is not None
    assert result.peak > 4 * sum(p.numel() for p in vl.tasks.gpt("nano").model().parameters())
    assert result.throughput is not None
    assert result.throughput > 0


def test_defaults_are_a_plain_recipe_and_20_steps() -> None:
    result = vl.run(TASK, progress=False)
    assert result.recipe == vl.Recipe()
    assert len(result.reports) == 20


def test_medians_and_quartiles() -> None:
    result = by_hand(None, None, 100.0, 300.0, 200.0, 1000.0, 400.0)
    assert result.throughput == 300.0
    assert result.throughput_range == (200.0, 400.0)
    assert by_hand(None, None, 100.0, 300.0).throughput == 200.0
    assert by_hand(None, None, 100.0, 300.0).throughput_range == (150.0, 250.0)


def test_one_timed_step_is_its_own_median_and_quartiles() -> None:
    result = by_hand(None, None, 70.0)
    assert (result.throughput, result.throughput_range) == (70.0, (70.0, 70.0))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_recorded_steps_alone_has_no_throughput(steps: int) -> None:
    result = run(steps=steps)
    assert (result.throughput, result.throughput_range) == (None, None)
    assert result.peak is not None
    assert "not measured" in repr(result)


def test_a_run_without_steps_has_no_numbers_but_can_be_shown() -> None:
    result = Run(TASK, TINY, CPU)
    assert (result.losses, result.peak, result.trace, result.throughput) == ([], None, None, None)
    assert result.breakdown == MemoryBreakdown()
    assert "no step" in repr(result)
    assert "not measured" in result._repr_html_()
    assert result.to_frame().empty


def test_the_trace_is_the_highest_and_the_latest_of_equal_ones() -> None:
    result = by_hand(None, None, 1.0, None, None, peaks=(5, 9, None, 9, 7))
    assert result.trace is result.reports[3].memory
    assert result.peak == 9


def test_a_run_can_be_read_while_it_grows() -> None:
    result, seen = by_hand(), []
    for i, peak in enumerate((5, None, 9, 7, 9, 20), 1):
        result.reports.append(StepReport(i, 1.0, 1.0, None, None if peak is None else of_size(peak)))
        seen.append(result.peak)
    assert seen == [5, 5, 9, 9, 9, 20]
    assert result.trace is result.reports[-1].memory


def test_asking_for_the_peak_after_each_step_of_a_long_run_stays_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars and labs do; searching all traces each time would take longer than the steps."""
    computed: list[int] = []
    peak = MemoryTrace.peak.fget
    assert peak is not None
    monkeypatch.setattr(MemoryTrace, "peak", property(lambda self: (computed.append(1), peak(self))[1]))
    result = by_hand()
    for i in range(1, 101):
        result.reports.append(StepReport(i, 1.0, 1.0, None, of_size(i % 7 + 1)))
        assert result.peak == min(i + 1, 7)
    assert len(computed) <= 5 * 100


def test_the_trace_of_a_failed_step_counts() -> None:
    result = by_hand(None, peaks=(5,))
    result.failed_trace = of_size(100)
    assert (result.peak, result.trace) == (100, result.failed_trace)
    result.failed_trace = of_size(2)
    assert result.peak == 5


def test_the_devices_own_counter_is_the_peak_where_there_is_one() -> None:
    result = by_hand(None, None, peaks=(50, 60))
    counted = of_size(10, DeviceCounters(allocated=512, reserved=2048, device=None))
    result.reports.append(StepReport(3, 1.0, 1.0, None, counted))
    assert (result.peak, result.trace) == (512, counted)


def test_a_run_in_words() -> None:
    result = by_hand(None, None, 100.0, 300.0, peaks=(1024, 3 * 2**20, None, None))
    right = "peak 3.00 MiB allocated, throughput 200 rows/s (150 to 250), loss 10.000 to 2.500, steps 4, finished"
    assert repr(result) == f"Run(rows task, fp32, micro batch 4, adamw, measured on cpu: {right})"
    shown = result._repr_html_()
    assert shown.startswith("<p><b>rows task: fp32, micro batch 4, adamw, measured on cpu</b></p>")
    assert "<td>peak</td><td>3.00 MiB allocated</td>" in shown
    assert result.breakdown._repr_html_() in shown


def test_the_frame_has_a_row_a_step_and_keeps_bytes_whole() -> None:
    frame = by_hand(None, None, 100.0, 300.0, peaks=(7, 2**40 + 1, None, None)).to_frame()
    assert list(frame.columns) == ["loss", "seconds", "rows_per_second", "peak_bytes"]
    assert (frame.index.name, list(frame.index)) == ("step", [1, 2, 3, 4])
    assert [str(t) for t in frame.dtypes] == ["float64", "float64", "float64", "Int64"]
    assert frame["peak_bytes"].tolist() == [7, 2**40 + 1, pd.NA, pd.NA]
    assert frame["rows_per_second"].isna().tolist() == [True, True, False, False]
    assert [str(t) for t in run(steps=2).to_frame().dtypes] == ["float64", "float64", "float64", "Int64"]
    assert [str(t) for t in run(steps=3, record_every=1).to_frame().dtypes] == ["float64", "float64", "float64", "Int64"]


# Seeds.


def test_the_same_recipe_twice_is_the_same_run() -> None:
    task = vl.tasks.gpt("nano", sequence=16, dropout=0.1)
    first, second, other = (run(TINY, task=task, seed=seed) for seed in (0, 0, 1))
    assert first.losses == second.losses
    assert first.peak == second.peak
    assert first.losses != other.losses


def test_every_recipe_begins_with_the_same_parameters_and_data() -> None:
    runs = compare([TINY, TINY.with_(optimizer="sgd"), TINY.with_(checkpointing="none", optimizer_impl="loop")]).runs
    assert len({r.losses[0] for r in runs}) == 1
    assert runs[0].losses[1:] != runs[1].losses[1:]


def test_the_callers_random_numbers_are_untouched() -> None:
    torch.manual_seed(123)
    right = torch.rand(3)
    torch.manual_seed(123)
    run()
    assert torch.equal(torch.rand(3), right)
    torch.manual_seed(123)
    with pytest.raises(KeyError):
        run(task=vl.Task(model, batch, _raise(KeyError("now"))))
    assert torch.equal(torch.rand(3), right)
    torch.manual_seed(123)
    compare([TINY, TINY])
    assert torch.equal(torch.rand(3), right)


def _raise(error: BaseException) -> Callable[..., Any]:
    def raising(*args: Any) -> Any:
        raise error

    return raising


def test_a_run_on_the_cpu_seeds_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would: the random numbers of all cards, which a run on the CPU does not put back."""
    seeded: list[Any] = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, seeded.append)
    run()
    assert seeded == []


def test_a_run_depends_on_its_seed_alone() -> None:
    right = run().losses
    torch.manual_seed(99)
    torch.rand(17)
    assert run().losses == right


# Stopping.


def test_on_step_sees_the_run_after_each_step_and_stops_it() -> None:
    seen: list[tuple[int, str, int]] = []

    def on_step(result: Run) -> bool:
        assert result.peak is not None
        seen.append((len(result.reports), result.status, result.reports[-1].step))
        return len(result.reports) == 3

    result = run(steps=9, on_step=on_step)
    assert seen == [(i, "running", i) for i in (1, 2, 3)]
    assert (len(result.reports), result.status) == (3, "stopped")


def test_stopping_at_the_last_step_is_finishing() -> None:
    assert run(steps=3, on_step=lambda r: len(r.reports) == 3).status == "finished"


def test_on_step_may_return_nothing() -> None:
    assert run(steps=3, on_step=lambda r: None).status == "finished"


def test_an_error_in_on_step_is_a_runs_error() -> None:
    def fail(result: Run) -> None:
        if len(result.reports) == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        run(steps=9, on_step=fail)
    assert len(caught.value.run.reports) == 2  # type: ignore[attr-defined]
    assert caught.value.run.status == "KeyError: 'mine'"  # type: ignore[attr-defined]
    assert run().status == "finished"  # the next one is not refused


@pytest.mark.parametrize("steps", [0, -3, 2.5, None, "4", float("inf")])
def test_steps_are_a_whole_number_of_at_least_1(steps: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^steps is a whole number of at least 1, got {steps!r}; let on_step return True to stop earlier\.$"
    ):
        run(steps=steps)


def test_wrong_arguments_are_refused_before_anything_waits_or_runs() -> None:
    with pytest.raises(TypeError, match="^Training needs a Task, got str 'gpt'"):
        vl.run("gpt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^Training needs a Recipe, got dict {}"):
        vl.run(TASK, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^record_every is a whole number of at least 1, got 0"):
        run(record_every=0)
    with pytest.raises(ValueError, match="^loss_chunks=2 needs a Task with a chunked loss"):
        run(vl.Recipe(loss_chunks=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(ValueError, match="^Device 'cuda' needs CUDA"):
        vl.run(TASK, TINY, device="cuda")
    assert run().status == "finished"


def test_the_bar_is_shown_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    vl.run(TASK, TINY, steps=3, device="cpu")
    shown = capsys.readouterr()
    assert "rows task" in shown.err
    assert shown.out == ""
    run()
    assert capsys.readouterr().err == ""


# One at a time.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "PATIENCE", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_second_run_at_the_same_time_is_refused() -> None:
    going, enough = threading.Event(), threading.Event()
    results: list[Run] = []

    def wait(result: Run) -> None:
        going.set()
        assert enough.wait(30)

    thread = threading.Thread(target=lambda: results.append(run(steps=2, on_step=wait)))
    thread.start()
    assert going.wait(30)
    with pytest.raises(
        RuntimeError, match=r"^One run at a time: another one is going on in this process \(in a Lab, say\)\. Stop it first\.$"
    ):
        run()
    enough.set()
    thread.join(30)
    assert results[0].status == "finished"
    assert run().status == "finished"


def test_a_second_run_waits_for_a_short_one() -> None:
    going, results = threading.Event(), []

    def slow(result: Run) -> None:
        going.set()
        threading.Event().wait(0.05)

    thread = threading.Thread(target=lambda: results.append(run(steps=3, on_step=slow)))
    thread.start()
    assert going.wait(30)
    assert run().losses == run().losses
    thread.join(30)
    assert results[0].status == "finished"


def test_a_run_inside_a_run_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for itself, for 20 seconds."""
    errors: list[BaseException] = []
    waited: list[float] = []

    class Watched:
        lock = threading.Lock()

        def acquire(self, timeout: float) -> bool:
            waited.append(timeout)
            return self.lock.acquire(timeout=min(timeout, 0.01))

        def release(self) -> None:
            self.lock.release()

    monkeypatch.setattr(experiments, "_alone", Watched())

    def nested(result: Run) -> bool:
        try:
            run()
        except RuntimeError as error:
            errors.append(error)
        return True

    run(on_step=nested)
    assert [str(e)[:18] for e in errors] == ["One run at a time:"]
    assert waited == [experiments.PATIENCE, 0]
    assert run().status == "finished"


def test_runs_in_many_threads_take_turns() -> None:
    right, results = run().losses, []
    threads = [threading.Thread(target=lambda: results.append(run().losses)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [right] * 4


# Comparisons.


RECIPES = [TINY, TINY.with_(micro_batch=8), TINY.with_(optimizer="sgd"), TINY.with_(precision="bf16")]


def test_peaks_do_not_depend_on_the_order() -> None:
    peaks = {r.recipe: r.peak for r in compare(RECIPES, steps=2).runs}
    for order in (RECIPES[::-1], [RECIPES[i] for i in (2, 0, 3, 1)], [RECIPES[1], RECIPES[1]]):
        assert all(r.peak == peaks[r.recipe] for r in compare(order, steps=2).runs)


def test_a_comparison_lays_runs_side_by_side() -> None:
    frame = compare(RECIPES).to_frame()
    assert list(frame.index) == ["fp32, micro batch 4, adamw", "+ micro batch 8", "+ sgd", "+ bf16"]
    assert frame.index.name == "recipe"
    assert frame["peak_ratio"].iloc[0] == frame["speed_ratio"].iloc[0] == 1.0
    assert frame["peak_ratio"].tolist() == [n / frame["peak_bytes"].iloc[0] for n in frame["peak_bytes"]]
    assert frame["optimizer state_bytes"].tolist()[2] == 0
    assert (frame["status"] == "finished").all()
    columns = [c for c in frame.columns if c.endswith("_bytes") and c != "peak_bytes"]
    assert (frame[columns].sum(axis=1) == frame["peak_bytes"]).all()
    assert "workspace_bytes" not in columns
    assert {str(t) for c, t in frame.dtypes.items() if str(c).endswith("_bytes")} == {"Int64"}
    assert {str(t) for c, t in frame.dtypes.items() if str(c).endswith(("_ratio", "_second", "_loss"))} == {"float64"}


def test_recipes_may_come_from_a_generator() -> None:
    assert len(compare(r for r in RECIPES[:2]).runs) == 2


def out_of_memory_at(size: int, error: BaseException) -> vl.Task:
    def failing(model: nn.Module, rows: Any) -> Any:
        if len(rows[0]) == size:
            raise error
        return loss(model, rows)

    return vl.Task(model, batch, failing, "rows", "rows task")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."
        ),
        MemoryError("Unable to allocate 484. GiB"),
    ],
    ids=["CUDA", "torch on the CPU", "NumPy"],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_recipe_that_runs_out_of_memory_gets_a_row_and_the_others_run(error: BaseException, at: int) -> None:
    recipes = [TINY.with_(micro_batch=n) for n in (2, 3, 5)]
    comparison = compare(recipes, task=out_of_memory_at((2, 3, 5)[at], error))
    frame = comparison.to_frame()
    assert [r.status == "finished" for r in comparison.runs] == [i != at for i in range(3)]
    assert frame["status"].iloc[at] == f"{type(error).__name__}: {error}"
    assert pd.isna(frame["last_loss"].iloc[at])
    assert pd.isna(frame["rows_per_second"].iloc[at])
    assert {str(t) for c, t in frame.dtypes.items() if str(c).endswith("_bytes")} == {"Int64"}
    assert html.escape(str(error)) in comparison._repr_html_()
    assert comparison.runs[at].peak is not None  # what it held when it failed
    assert repr(comparison).startswith("Comparison(rows task: peaks ")


def test_a_real_out_of_memory_on_the_cpu_gets_a_row() -> None:
    def huge(size: int, device: torch.device) -> Any:
        return batch(size, device) if size < 100 else torch.empty(2**60, dtype=torch.uint8, device=device)

    comparison = compare([TINY, TINY.with_(micro_batch=100)], task=vl.Task(model, huge, loss, "rows"))
    assert "allocate" in comparison.runs[1].status
    assert comparison.runs[0].status == "finished"


def test_any_other_error_ends_the_comparison() -> None:
    with pytest.raises(RuntimeError, match="mine") as caught:
        compare([TINY, TINY.with_(micro_batch=3)], task=out_of_memory_at(3, RuntimeError("mine")))
    assert caught.value.run.recipe.micro_batch == 3  # type: ignore[attr-defined]


def test_what_the_task_cannot_do_is_refused_before_the_first_recipe_runs() -> None:
    ran: list[int] = []
    task = vl.Task(lambda: ran.append(1) or model(), batch, loss)  # type: ignore[func-returns-value]
    with pytest.raises(ValueError, match="^loss_chunks=2 needs"):
        compare([TINY, vl.Recipe(loss_chunks=2)], task=task)
    assert ran == []


@pytest.mark.parametrize("when", [1, 4], ids=["in the middle", "in the last step"])
def test_ctrl_c_ends_the_whole_comparison_and_keeps_its_rows(when: int) -> None:
    steps: list[int] = []

    def interrupted(net: nn.Module, rows: Any) -> Any:
        steps.append(len(rows[0]))
        if steps.count(3) == when and len(rows[0]) == 3:
            signal.raise_signal(signal.SIGINT)
        return loss(net, rows)

    comparison = compare([TINY.with_(micro_batch=n) for n in (2, 3, 5)], task=vl.Task(model, batch, interrupted))
    assert [(r.status, len(r.reports)) for r in comparison.runs] == [("finished", 4), ("interrupted", when)]
    assert 5 not in steps


def test_no_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^compare\(\) needs at least one recipe, got none; write compare\(task, \[recipe, recipe\.with_"):
        compare([])


def test_one_recipe_alone_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^compare\(\) takes several recipes, got one alone; write compare\(task, \[recipe, recipe\.with_"):
        compare(TINY)


def test_labels_tell_recipes_apart() -> None:
    first = vl.Recipe(precision="amp-bf16", micro_batch=4)
    others = [first.with_(checkpointing="blocks", accumulation=2), first, first.with_(clip_norm=1.0, optimizer="sgd")]
    assert recipe_labels([first, *others]) == [
        "amp-bf16, micro batch 4, adamw",
        "+ accumulation 2, checkpointing blocks",
        "the same",
        "+ sgd, clip norm 1.0",
    ]
    assert recipe_labels([first]) == [str(first)]


def test_a_comparison_in_words() -> None:
    runs = [
        by_hand(None, None, 100.0, peaks=(2**20, 2**20, None)),
        by_hand(None, None, 50.0, peaks=(2**19, 2**19, None), recipe=TINY.with_(checkpointing="blocks")),
        by_hand(recipe=TINY.with_(micro_batch=64), status="OutOfMemoryError: no"),
    ]
    comparison = Comparison(runs)
    assert repr(comparison) == "Comparison(rows task: peaks 1.00 MiB, 512.00 KiB, OutOfMemoryError: no)"
    shown = comparison._repr_html_()
    assert shown.startswith("<p><b>rows task, measured on cpu</b></p>")
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    assert cells == [
        ["", "peak", "peak ratio", "activations", "rows per second", "speed ratio", "last loss", "status"],
        ["fp32, micro batch 4, adamw", "1.00 MiB", "1.000", "1.00 MiB", "100", "1.000", "3.333", "finished"],
        ["+ checkpointing blocks", "512.00 KiB", "0.500", "512.00 KiB", "50", "0.500", "3.333", "finished"],
        ["+ micro batch 64", "", "", "", "", "", "", "OutOfMemoryError: no"],
    ]


def test_a_comparison_of_failures_alone_can_be_shown() -> None:
    comparison = Comparison([by_hand(status="failed"), by_hand(status="failed")])
    assert comparison.to_frame()["peak_bytes"].isna().all()
    assert "failed" in comparison._repr_html_()
    assert repr(comparison) == "Comparison(rows task: peaks failed, failed)"


def test_a_first_run_that_failed_leaves_ratios_empty() -> None:
    frame = Comparison([by_hand(status="failed"), by_hand(None, None, 5.0, peaks=(8, 8, None))]).to_frame()
    assert frame["peak_ratio"].isna().all()
    assert frame["peak_bytes"].tolist() == [pd.NA, 8]


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "a & b", "'\"<b>"])
def test_names_units_and_errors_are_escaped(text: str) -> None:
    task = vl.Task(model, batch, loss, unit=text, name=text)
    result = Run(task, TINY, CPU, [StepReport(1, 1.0, 1.0, 5.0, of_size(8))], f"ValueError: {text}")
    for shown in (result._repr_html_(), Comparison([result, result])._repr_html_()):
        assert text not in re.sub(r"style='[^']*'", "", shown)
        assert html.escape(text).split("&")[1].split(";")[0] in shown


def test_a_comparison_holds_no_model() -> None:
    alive: list[weakref.ref[Any]] = []

    def kept() -> nn.Module:
        net = model()
        alive.extend([weakref.ref(net), *map(weakref.ref, net.parameters())])
        return net

    comparison = compare(RECIPES[:2], task=vl.Task(kept, batch, loss))
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []
    assert len(comparison.runs) == 2


def test_a_cards_own_counter_of_steps_that_nobody_recorded_is_the_peak() -> None:
    """A recorder keeps autograd from working in place here and there, so what the card counted beside it may be too much."""
    trace = MemoryTrace(of_size(120).events, "cuda:0", DeviceCounters(allocated=130, reserved=200, device=None))
    recorded = [StepReport(step, 1.0, 1.0, None, trace) for step in (1, 2)]
    result = Run(TASK, vl.Recipe(), torch.device("cuda", 0), reports=list(recorded))
    assert result.peak == 130
    result.reports += [StepReport(3 + i, 1.0, 1.0, 8.0, None, DeviceCounters(n, 200, None)) for i, n in enumerate((100, 90))]
    assert result.peak == 100


def test_batches_drawn_by_numpy_and_python_are_the_same_for_every_recipe() -> None:
    def drawn(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(np.random.randn(size, 4).astype(np.float32)) * random.random()
        return x.to(device), (x.sum(1) > 0).long()

    random.seed(5)
    np.random.seed(5)
    untouched = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    task = vl.Task(model, drawn, loss)
    first, second = compare([TINY, TINY], task=task).runs
    assert first.losses == second.losses
    assert (random.random(), np.random.rand()) == untouched


def test_an_error_in_a_comparison_carries_the_runs_so_far() -> None:
    def failing(net: nn.Module, rows: Any) -> Any:
        if len(rows[0]) == 2:
            raise KeyError("two")
        return loss(net, rows)

    with pytest.raises(KeyError) as error:
        compare([TINY, vl.Recipe(micro_batch=2), TINY], task=vl.Task(model, batch, failing))
    assert [run.status for run in error.value.runs] == ["finished", "KeyError: 'two'"]  # type: ignore[attr-defined]
