"""What the lab predicts, without widgets: at once by a law, exact by a trace, newest question first; and what it builds on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import TASK

import vramlab as vl
from vramlab.gpus import GPU, gpu
from vramlab.memory.law import MemoryLaw
from vramlab.memory.trace import Category, Events, MemoryTrace
from vramlab.notebook import predictor
from vramlab.notebook.predictor import Predictor, Question, Update, moved, replayed
from vramlab.planning import plan
from vramlab.recipe import Recipe, choices, conflicts
from vramlab.virtual import planner
from vramlab.virtual.planner import Scope

CARD = gpu("RTX 4090")
SMALL = CARD.with_(memory="600 MiB", name="small")  # 150 MiB beside the context
NANO = vl.tasks.gpt("nano")


def until(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


class Seen:
    """A predictor and everything it has shown."""

    def __init__(self, task: vl.Task = NANO) -> None:
        self.updates: list[Update] = []
        self.idle = threading.Event()
        self.idle.set()
        self.virtual_run = False
        self.predictor = Predictor(task, self.updates.append, self.idle, lambda: self.virtual_run)

    def ask(self, place: GPU | torch.device = CARD, in_use: int = 0, **options: Any) -> list[Update]:
        """What was shown before the call came back."""
        before = len(self.updates)
        self.predictor.ask(Question(Recipe(**{"micro_batch": 4, **options}), place, in_use))
        return self.updates[before:]

    def finish(self) -> None:
        """Wait for everything, the largest micro-batch and neighbours too."""
        end = time.monotonic() + 90
        while (worker := self.predictor._worker) is not None:
            worker.join(max(0.1, end - time.monotonic()))
            assert time.monotonic() < end

    def answers(self) -> list[Any]:
        return [u.answer for u in self.updates if u.answer is not None]


@pytest.fixture(scope="module")
def warm() -> Iterator[Seen]:
    """One whose law at micro-batch 4 on the card is known."""
    seen = Seen()
    seen.ask()
    seen.finish()
    yield seen
    seen.predictor.forget()


def test_the_first_question_is_busy_then_traced_and_is_what_plan_says(warm: Seen) -> None:
    first, answered, largest, *_ = warm.updates
    assert (first.busy, first.answer) == (True, None)
    right = vl.plan(NANO, Recipe(micro_batch=4), CARD)
    answer = answered.answer
    assert answer is not None
    assert (answer.how, answer.allocated, answer.reserved, answer.fits) == ("traced", right.allocated, right.reserved, True)
    assert (answer.device, answer.breakdown, answer.cause) == (right.device, right.breakdown, right.cause)
    assert largest.largest == right.max_micro_batch


@pytest.mark.parametrize("micro_batch", [1, 5, 8, 33, 100])
def test_another_micro_batch_is_answered_within_100_ms_and_the_law_is_right(warm: Seen, micro_batch: int) -> None:
    warm.ask()
    warm.finish()
    start = time.perf_counter()
    (first,) = warm.ask(micro_batch=micro_batch)
    assert time.perf_counter() - start < 0.1
    assert first.answer is not None
    assert warm.predictor.wait(60)
    final = warm.answers()[-1]
    right = vl.plan(NANO, Recipe(micro_batch=micro_batch), CARD)
    assert (final.exact, final.allocated, final.reserved) == (True, right.allocated, right.reserved)
    assert first.answer.allocated == pytest.approx(right.allocated, rel=0.02)
    if first.answer.how == "law" and warm.predictor._laws and micro_batch > 1:
        assert first.answer.breakdown.total == pytest.approx(right.breakdown.total, rel=0.02)


@pytest.mark.parametrize(("accumulation", "same_as"), [(2, 2), (3, 3), (7, 3)])
def test_accumulation_is_answered_at_once_once_neighbours_are_planned(warm: Seen, accumulation: int, same_as: int) -> None:
    warm.ask()
    warm.finish()
    (shown,) = warm.ask(accumulation=accumulation)
    assert shown.answer is not None
    assert (shown.busy, shown.answer.how) == (False, "traced")
    assert shown.answer.question.recipe.accumulation == accumulation
    assert shown.answer.allocated == vl.plan(NANO, Recipe(micro_batch=4, accumulation=same_as), CARD).allocated


@pytest.mark.parametrize(
    ("card", "micro_batch"),
    [("H100 SXM", 4), ("RTX 3060", 4), ("A100 80GB", 7), ("RTX 5090", 6)],
    ids=["H100 from a trace", "RTX 3060 from a trace", "A100 from a law", "RTX 5090 from a law"],
)
def test_another_card_is_an_estimate_with_reserved_soon_until_it_is_traced(warm: Seen, card: str, micro_batch: int) -> None:
    warm.ask()
    warm.finish()
    before = len(warm.updates)
    (first,) = warm.ask(gpu(card), micro_batch=micro_batch)
    assert first.answer is not None
    assert (first.answer.how, first.answer.of, first.busy, first.answer.reserved) == ("estimated", CARD, True, None)
    assert first.answer.question.capacity == gpu(card).left_for_pytorch()
    assert warm.predictor.wait(60)
    warm.predictor.forget()
    soon, exact = (u.answer for u in warm.updates[before + 1 : before + 3])
    right = vl.plan(NANO, Recipe(micro_batch=micro_batch), card)
    assert soon is not None
    assert exact is not None
    assert (soon.how, soon.of, soon.exact, soon.fits) == ("estimated", CARD, False, True)
    assert (exact.how, exact.borrowed, exact.allocated, exact.reserved) == ("traced", False, right.allocated, right.reserved)
    # cuBLAS takes 32 MiB a thread on Hopper and Blackwell and 8.1 on others, more than all else of this model.
    assert first.answer.allocated == soon.allocated == pytest.approx(right.allocated, rel=0.02)
    assert soon.reserved == pytest.approx(right.reserved, rel=0.06)


def test_only_the_workspaces_that_cublas_keeps_are_those_of_the_other_card() -> None:
    old, hopper = gpu("RTX 4090"), gpu("H100 SXM")
    mine, theirs = old.cublas_workspace, hopper.cublas_workspace
    sizes = [mine, mine, -mine, mine, 512, mine + 512]  # kept, a kernel's that comes and goes, an activation of that size, others
    kinds = [Category.WORKSPACE] * 3 + [Category.ACTIVATIONS, Category.WORKSPACE, Category.WORKSPACE]
    none = np.zeros(len(sizes), np.int32)
    storage = np.array([0, 1, 1, 2, 3, 4])
    events = Events(storage, np.array(sizes), np.array(kinds, np.int8), none, none.astype(np.int8), none, ("",), ("aten::mm",))
    there = moved(MemoryTrace(events), old, hopper)
    assert there.events.nbytes.tolist() == [theirs, *sizes[1:]]
    assert moved(there, hopper, old).events.nbytes.tolist() == sizes
    assert moved(MemoryTrace(events), old, gpu("T4")).events.nbytes.tolist() == sizes


def test_an_estimate_from_another_card_offers_no_way_out_and_does_not_say_what_is_too_close(warm: Seen) -> None:
    warm.ask()
    warm.finish()
    reserved = warm.answers()[-1].reserved
    other = gpu("RTX 3090")
    held = other.memory - other.context
    rooms = ((2, True), (1.4, None), (1, None), (0.6, None), (0.4, False))
    for share, fits in rooms:
        room = int(share * reserved)
        before = len(warm.updates)
        warm.ask(other, in_use=held - room)
        until(lambda before=before: [u for u in warm.updates[before:] if u.answer is not None and u.answer.exact])  # type: ignore[misc]
        shown = warm.updates[before:]
        exact = next(i for i, u in enumerate(shown) if u.answer is not None and u.answer.exact)
        estimates = [u for u in shown[:exact] if u.answer is not None]
        if share == 2:  # later ones are that card's own
            assert [u.answer.fits for u in estimates if u.answer is not None and u.answer.borrowed][-1] is fits
        assert all(u.changes is None and u.largest is None for u in shown[:exact])
        known = warm.answers()[-1]
        assert replayed(replace(known, how="estimated", of=CARD)).fits is fits
    warm.finish()


@pytest.mark.parametrize("precision", ["fp32", "amp-fp16"])
def test_cards_below_capability_8_and_from_there_on_say_nothing_of_each_other(precision: str) -> None:
    seen = Seen(TASK)
    seen.ask(precision=precision)
    seen.finish()
    assert seen.predictor._laws
    for micro_batch in (7, 4):  # of which there is a law, and of which there is a trace
        (first,) = seen.ask(gpu("T4"), precision=precision, micro_batch=micro_batch)
        assert first.answer is None
        assert seen.predictor.wait(60)
        seen.predictor.forget()
    (first,) = seen.ask(gpu("V100 SXM2 16GB"), precision=precision)
    assert first.answer is not None
    assert first.answer.of == gpu("T4")
    seen.predictor.forget()
    seen.finish()


class Heads(torch.nn.Module):
    """Attention with heads of 20, for which cards below 8.0 have no fused kernel in fp16: the scores are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = torch.nn.Linear(640, 3 * 640)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).view(len(x), -1, 3, 32, 20).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _rows_of_1024(n: int, device: torch.device) -> torch.Tensor:
    return torch.randn(n, 1024, 640, device=device)


def _sum_of_squares(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return module(x).float().square().sum(), len(x)


def test_what_needs_20_times_as_much_on_an_older_card_is_not_said_to_fit_there() -> None:
    task = vl.Task(Heads, _rows_of_1024, _sum_of_squares, "rows")
    seen = Seen(task)
    options: dict[str, Any] = {"precision": "amp-fp16", "micro_batch": 40, "optimizer": "sgd"}
    seen.ask(**options)
    assert seen.predictor.wait(60)
    newer = seen.answers()[-1]
    seen.predictor.forget()
    seen.finish()
    before = len(seen.updates)
    seen.ask(gpu("T4"), **options)
    assert seen.predictor.wait(60)
    seen.predictor.forget()
    answers = [u.answer for u in seen.updates[before:] if u.answer is not None]
    assert [(a.exact, a.fits) for a in answers] == [(True, False)]
    assert answers[0].allocated > 20 * newer.allocated
    seen.finish()


def test_an_estimate_comes_from_the_most_alike_of_the_known_cards_not_from_the_last() -> None:
    seen = Seen(TASK)
    for name in ("RTX 4090", "RTX 3090", "H100 SXM"):
        seen.ask(gpu(name))
        assert seen.predictor.wait(60)
        seen.predictor.forget()
    for name, of in {"RTX 4060": "RTX 4090", "RTX 3060": "RTX 3090", "A100 80GB": "RTX 4090", "H100 PCIe": "H100 SXM"}.items():
        (first,) = seen.ask(gpu(name))
        seen.predictor.forget()
        assert first.answer is not None
        assert first.answer.of == gpu(of), name
    seen.finish()


@pytest.mark.parametrize("name", ["traced", "law", "measured", "estimated"])
def test_a_card_may_be_called_like_a_way_of_knowing(name: str) -> None:
    seen = Seen(TASK)
    odd = gpu("H100 SXM").with_(name=name)
    seen.ask(odd)
    assert seen.predictor.wait(60)
    seen.predictor.forget()
    (first,) = seen.ask()
    assert first.answer is not None
    assert (first.answer.of, first.answer.borrowed, first.answer.exact, first.busy) == (odd, True, False, True)
    assert seen.predictor.wait(60)
    seen.predictor.forget()
    assert seen.answers()[-1].allocated == vl.plan(TASK, Recipe(micro_batch=4), CARD).allocated
    seen.finish()


def test_a_card_that_refuses_bf16_gets_no_estimate_from_one_that_has_it(warm: Seen) -> None:
    warm.ask(precision="bf16")
    warm.finish()
    (first,) = warm.ask(gpu("T4"), precision="bf16")
    assert first.answer is None
    warm.finish()
    assert "bf16 needs a card of compute capability 8.0" in str([u.error for u in warm.updates if u.error][-1])


def test_what_others_hold_needs_no_new_trace(warm: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    warm.ask()
    warm.finish()
    before, planned = len(warm.updates), []
    of_plan = predictor._of_plan
    monkeypatch.setattr(predictor, "_of_plan", lambda question, plan: planned.append(question) or of_plan(question, plan))
    warm.ask(in_use=3 * 2**30)
    warm.finish()
    answer = next(u.answer for u in warm.updates[before:] if u.answer is not None and u.answer.exact)
    assert answer.question not in planned
    right = vl.plan(NANO, Recipe(micro_batch=4), CARD, in_use=3 * 2**30)
    assert (answer.allocated, answer.reserved, answer.fits) == (right.allocated, right.reserved, right.fits)


def test_what_others_hold_moves_the_line_at_once_and_not_the_bytes(warm: Seen) -> None:
    warm.ask()
    warm.finish()
    allocated = warm.answers()[-1].allocated
    (first,) = warm.ask(in_use=2**30)
    assert first.answer is not None
    assert (first.answer.allocated, first.answer.question.capacity) == (allocated, CARD.left_for_pytorch(2**30))
    assert warm.predictor.wait(60)
    assert warm.answers()[-1].device == vl.plan(NANO, Recipe(micro_batch=4), CARD, in_use=2**30).device


def test_the_same_question_again_is_answered_from_memory(warm: Seen) -> None:
    warm.ask(precision="amp-bf16")
    assert warm.predictor.wait(60)
    warm.ask()
    (again,) = warm.ask(precision="amp-bf16")
    assert again.answer is not None
    assert again.answer.exact
    assert not again.busy


def test_what_does_not_fit_is_offered_changes() -> None:
    seen = Seen()
    seen.ask(SMALL, micro_batch=128)
    until(lambda: any(u.changes is not None for u in seen.updates))
    seen.predictor.forget()
    offered = [u.changes for u in seen.updates if u.changes is not None][-1]
    assert seen.answers()[-1].fits is False
    assert offered
    assert [c.fits for c in offered] == sorted((c.fits for c in offered), reverse=True)


def test_the_newest_question_wins_and_no_older_answer_is_shown_after_it() -> None:
    seen = Seen(TASK)
    for micro_batch in range(1, 9):
        seen.ask(micro_batch=micro_batch)
    assert seen.predictor.wait(60)
    seen.predictor.forget()
    seen.finish()
    asked = [u.question.recipe.micro_batch for u in seen.updates]
    assert asked == sorted(asked)
    assert seen.answers()[-1].question.recipe.micro_batch == 8
    assert seen.answers()[-1].exact


def test_an_error_is_shown_once_and_the_next_question_is_answered() -> None:
    seen = Seen(vl.Task(lambda: torch.nn.Linear(1, 1), lambda n, d: 1 / 0, lambda m, b: b, "rows"))
    seen.ask()
    seen.finish()
    assert [type(u.error) for u in seen.updates if u.error] == [ZeroDivisionError]
    full = Seen(TASK)
    full.ask(in_use=CARD.memory)
    full.finish()
    (error,) = [u.error for u in full.updates if u.error]
    assert "Nothing of RTX 4090" in str(error)
    full.ask()
    assert full.predictor.wait(60)
    assert full.answers()[-1].exact
    full.predictor.forget()


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "ranks": 2, "schedule": "gpipe", "accumulation": 6},
        {"stages": 4, "ranks": 4, "schedule": "1f1b", "accumulation": 5},
    ],
    ids=["gpipe keeps all micro-batches", "1f1b needs as many as stages"],
)
def test_a_pipeline_is_answered_as_plan_does(options: dict[str, Any]) -> None:
    seen = Seen()
    seen.ask(parallel="pipeline", **options)
    until(lambda: seen.answers() and seen.answers()[-1].exact)
    right = plan(NANO, Recipe(micro_batch=4, parallel="pipeline", **options), CARD)
    assert (seen.answers()[-1].allocated, seen.answers()[-1].reserved) == (right.allocated, right.reserved)
    seen.predictor.forget()


def test_several_ranks_are_planned_and_not_measured() -> None:
    seen = Seen()
    seen.ask(torch.device("cpu"), parallel="ddp", ranks=2)
    seen.finish()
    assert [str(u.error) for u in seen.updates if u.error] == [
        "A lab trains in this process, and this recipe has 2 ranks; choose a virtual card to plan it, or call vl.run(task, recipe)."
    ]


def test_forgetting_cancels_and_nothing_more_is_shown() -> None:
    seen = Seen(TASK)
    seen.ask(micro_batch=7)
    seen.predictor.forget()
    shown = len(seen.updates)
    seen.finish()
    assert len(seen.updates) == shown
    assert seen.predictor.wait(0)


@pytest.mark.parametrize("place", [torch.device("cpu"), CARD], ids=str)
def test_a_run_goes_first_and_what_waits_for_it_says_so(place: Any) -> None:
    seen = Seen(TASK)
    seen.idle.clear()
    seen.virtual_run = True
    (first,) = seen.ask(place)
    assert (first.busy, first.waits) == (True, True)
    time.sleep(0.3)
    assert not seen.answers()
    seen.idle.set()
    assert seen.predictor.wait(60)
    assert seen.answers()[-1].exact
    # It says that it waits no more as soon as that is so.
    assert [(u.busy, u.waits) for u in seen.updates if not (u.answer and u.answer.exact)][:2] == [(True, True), (True, False)]
    seen.predictor.forget()
    seen.finish()


def test_what_a_run_interrupts_keeps_the_newest_estimate_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(TASK)
    seen.ask()
    assert seen.predictor.wait(60)
    seen.predictor.forget()
    seen.finish()
    quick, go_on = predictor.replayed, threading.Event()
    monkeypatch.setattr(Predictor, "_plan", lambda self, question: go_on.wait(30) and plan(TASK, question.recipe, question.card))
    (first,) = seen.ask(gpu("RTX 3090"))
    until(lambda: len(seen.answers()) and seen.answers()[-1].of == CARD and seen.answers()[-1].reserved is not None)
    soon = seen.answers()[-1]
    assert first.answer is not None
    assert (first.answer.reserved, soon.reserved) == (None, quick(first.answer).reserved)
    seen.virtual_run = True
    seen.idle.clear()
    seen.predictor.give_way()
    last = seen.updates[-1]
    assert (last.answer, last.busy, last.waits) == (soon, True, True)
    go_on.set()
    seen.idle.set()
    assert seen.predictor.wait(60)
    assert seen.answers()[-1].exact
    seen.predictor.forget()
    seen.finish()


def test_a_question_that_a_run_interrupts_is_answered_afterwards() -> None:
    seen = Seen(TASK)
    seen.ask(micro_batch=6)
    seen.virtual_run = True
    seen.idle.clear()
    seen.predictor.give_way()
    time.sleep(0.3)
    seen.idle.set()
    assert seen.predictor.wait(60)
    assert seen.answers()[-1].exact
    seen.predictor.forget()


def test_on_the_cpu_two_steps_are_measured() -> None:
    seen = Seen(TASK)
    seen.ask(torch.device("cpu"))
    assert seen.predictor.wait(60)
    answer = seen.answers()[-1]
    right = vl.run(TASK, Recipe(micro_batch=4), steps=2, device="cpu", progress=False)
    assert (answer.how, answer.allocated, answer.breakdown) == ("measured", right.peak, right.breakdown)
    assert (answer.reserved, answer.device, answer.question.capacity) == (None, None, None)


# What it builds on.


@pytest.fixture(scope="module")
def traces() -> dict[int, MemoryTrace]:
    recipe = Recipe(precision="amp-bf16")
    return {n: vl.plan(NANO, recipe.with_(micro_batch=n), CARD).trace for n in (2, 3, 5, 9, 24, 40)}


def test_a_laws_trace_is_the_trace_event_by_event(traces: dict[int, MemoryTrace]) -> None:
    law = MemoryLaw({n: traces[n] for n in (2, 3, 5, 9, 40)})
    for n in (2, 9, 40):
        made, real = law.trace(n), traces[n]
        assert made.peak == real.peak
        assert made.breakdown() == real.breakdown()
        assert made.last_step().peak == real.last_step().peak
        assert made.last_step().peak_phase == real.last_step().peak_phase
        assert int(made.events.nbytes.sum()) == int(real.events.nbytes.sum())
    for n in (24,):  # between traces only what kernels take can differ
        made_events, real_events = law.trace(n).events, traces[n].events
        kept = [(e.category != Category.WORKSPACE) & (e.nbytes != 0) for e in (made_events, real_events)]
        made_sizes, real_sizes = made_events.nbytes[kept[0]].tolist(), real_events.nbytes[kept[1]].tolist()
        assert made_sizes == real_sizes


def test_the_last_step_of_an_optimizer_in_backward_is_a_whole_one() -> None:
    trace = vl.plan(NANO, Recipe(micro_batch=4, optimizer_in_backward=True), CARD).trace
    assert trace.last_step().peak == trace.peak
    assert set(trace.last_step().timeline()["phase"]) >= {"forward", "backward"}


def test_a_scope_ends_a_call_from_another_thread_and_what_follows_it() -> None:
    scope, ended, began = Scope(), [], threading.Event()

    def work() -> None:
        try:
            with scope:
                began.set()
                planner.shared().call(time.sleep, 30)
        except CancelledError:
            ended.append(time.monotonic())
        with scope, pytest.raises(CancelledError):
            planner.shared().call(int)
        assert planner.shared().call(int) == 0  # outside of it all is as before

    planner.shared().call(int)
    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(10)
    time.sleep(0.2)
    start = time.monotonic()
    scope.cancel()
    thread.join(20)
    assert ended
    assert ended[0] - start < 5


OPTIONS = {
    "precision": st.sampled_from(choices("precision")),
    "accumulation": st.integers(1, 3),
    "checkpointing": st.sampled_from(choices("checkpointing")),
    "offload": st.sampled_from(choices("offload")),
    "optimizer": st.sampled_from(choices("optimizer")),
    "optimizer_impl": st.sampled_from(choices("optimizer_impl")),
    "optimizer_in_backward": st.booleans(),
    "clip_norm": st.sampled_from([None, 1.0]),
}


@settings(max_examples=300)
@given(st.fixed_dictionaries(OPTIONS))
def test_each_change_of_a_conflict_alone_ends_it(options: dict[str, Any]) -> None:
    for conflict in conflicts(**options):
        assert conflict.changes
        for name, value in conflict.changes:
            assert name in conflict.options
            rules = [c.rule for c in conflicts(**options | {name: value}) if c.options == conflict.options]
            assert conflict.rule not in rules
