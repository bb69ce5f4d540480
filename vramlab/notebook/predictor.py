"""What a recipe will hold on a card: at once from what is known already, exact a moment later. Works in the background, without widgets."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from vramlab.experiments import run
from vramlab.gpus import GPU, gpu
from vramlab.memory import steady
from vramlab.memory.law import MemoryLaw
from vramlab.memory.report import Change
from vramlab.memory.trace import Category, MemoryBreakdown, MemoryTrace, Phase
from vramlab.planning import MICRO_BATCHES, Plan, plan, single_changes
from vramlab.recipe import Recipe, conflicts
from vramlab.tasks import Task
from vramlab.virtual.cublas import cublas_workspace
from vramlab.virtual.planner import Scope
from vramlab.virtual.ranks import enough_micro_batches
from vramlab.virtual.scratch import sms

V = TypeVar("V")

KEPT = 64  # answers with their traces, of up to some MB each
LAWS = 8  # each with some traces
CLOSE = 0.5
"""Share of the bytes within which an estimate from another card does not say whether it fits.

The errors that `moved` tells of are of the built-in models that were measured. Other models can be further off: cards differ in
scratch of sums, which goes by multiprocessors, and in the kernel that attention takes, which goes by generation and shapes. Attention
alone, between two linear layers 512 to 1024 wide, was off by up to 26 % of reserved (V100 for T4), so this is about twice that.
"""


@dataclass(frozen=True)
class Question:
    """A recipe, where it shall run, and what others hold of that card."""

    recipe: Recipe
    place: torch.device | GPU
    in_use: int = 0

    @property
    def card(self) -> GPU | None:
        """The card whose rules count: a virtual one, or this machine's; None for the CPU."""
        return self.place if isinstance(self.place, GPU) else gpu() if self.place.type == "cuda" else None

    @property
    def capacity(self) -> int | None:
        """Bytes that PyTorch can reserve there; None for the CPU, 0 where others hold it all."""
        card = self.card
        return None if card is None else max(0, card.memory - card.context - self.in_use)


@dataclass(frozen=True)
class Answer:
    """What the step needs, in bytes, and how that is known."""

    question: Question
    allocated: int
    trace: MemoryTrace
    """The step, or both first steps."""
    how: Literal["traced", "law", "measured", "estimated"]
    """``estimated``: from what is known of another card, see ``of``."""
    reserved: int | None = None
    """None: not known yet, or there is no allocator (on the CPU)."""
    fits: bool | None = None
    """None: not known yet, or too close to say from another card."""
    of: GPU | None = None
    """The other card that an estimate comes from; None: it is of the question's own."""

    @property
    def borrowed(self) -> bool:
        """Whether it is an estimate from another card, ``of``."""
        return self.of is not None

    @property
    def exact(self) -> bool:
        """Whether it is what a trace or a measurement says, and not an estimate on the way there."""
        return self.how in ("traced", "measured") and not self.borrowed

    @property
    def will_fit(self) -> bool | None:
        """Whether it fits as far as that can be said: what is allocated alone may be too much, before what is reserved is known."""
        capacity = self.question.capacity
        if self.fits is not None or self.reserved is not None or capacity is None:
            return self.fits
        return False if self.allocated * (1 - CLOSE if self.borrowed else 1) > capacity else None

    @property
    def breakdown(self) -> MemoryBreakdown:
        """Bytes in storages by category at the peak."""
        found: MemoryBreakdown = self.__dict__.get("_breakdown") or self.trace.breakdown()
        self.__dict__["_breakdown"] = found
        return found

    @property
    def device(self) -> int | None:
        """What everything on the card takes, as nvidia-smi shows it."""
        card = self.question.card
        return None if card is None or self.reserved is None else self.reserved + card.context + self.question.in_use

    @property
    def cause(self) -> dict[str, str]:
        """What was running when the peak was reached: phase, operator, module, line; empty texts where unknown."""
        events, i = self.trace.events, self.trace.peak_event
        if i < 0:
            return dict.fromkeys(("phase", "operator", "module", "line"), "")
        return {
            "phase": Phase(events.phase[i]).label,
            "operator": events.operators[events.operator[i]],
            "module": events.modules[events.module[i]],
            "line": events.lines[events.line[i]] if events.line is not None else "",
        }


@dataclass(frozen=True)
class Update:
    """Something new about a question. What is None has not changed."""

    question: Question
    answer: Answer | None = None
    largest: int | None = None
    """The largest micro-batch that fits, confirmed by traces; 0 if not even 1 does."""
    changes: list[Change] | None = None
    """For what does not fit: single changes to the recipe, the best first."""
    error: Exception | None = None
    busy: bool = False
    """Whether an exact answer is still to come."""
    waits: bool = False
    """Whether it comes only when a training run has ended, which goes first."""


class Predictor:
    """Answers the newest question: at once by a law if there is one, then by a trace in the planner process, or by measuring.

    Args:
        task: what is trained.
        show: called with every `Update`, from whatever thread, one at a time, and never with one of an older question.
        idle: measuring waits for it: a training run goes first.
        virtual_run: whether the run that goes on is one on a virtual card.
    """

    def __init__(self, task: Task, show: Callable[[Update], None], idle: threading.Event, virtual_run: Callable[[], bool]) -> None:
        self._task, self._show, self._idle, self._virtual_run = task, show, idle, virtual_run
        self._lock = threading.RLock()  # guards all below
        self._question: Question | None = None
        self._exact: OrderedDict[Question, Answer] = OrderedDict()
        self._laws: dict[tuple[Recipe, GPU, int], tuple[Plan, MemoryLaw | None]] = {}
        self._worker: threading.Thread | None = None
        self._todo: Question | None = None
        self._said: Answer | None = None  # the newest that was shown of the question
        self._scope = Scope()
        self._answered = threading.Event()
        self._answered.set()

    def ask(self, question: Question) -> None:
        """The newest question: what was asked before is dropped. An answer may be shown before this returns."""
        with self._lock:
            if question == self._question and self._todo is not None:
                return  # it is being answered
            self._scope.cancel()
            self._question = self._todo = question
            self._said = known = self._at_once(question)
            exact = known is not None and known.exact
            (self._answered.set if exact else self._answered.clear)()
            self._show(Update(question, known, busy=not exact, waits=self._must_wait(question)))
            if self._worker is None or not self._worker.is_alive():
                self._worker = threading.Thread(target=self._work, name="vramlab-predict", daemon=True)
                self._worker.start()

    def forget(self) -> None:
        """Ask nothing any more; what is going on is cancelled."""
        with self._lock:
            self._scope.cancel()
            self._question = self._todo = None
            self._answered.set()

    def give_way(self) -> None:
        """A run starts: what is going on is cancelled, and done again when the run has ended if it has to wait for that."""
        with self._lock:
            self._scope.cancel()
            question = self._todo
            if question is not None and not self._answered.is_set() and self._must_wait(question):
                self._show(Update(question, self._said, busy=True, waits=True))

    def wait(self, timeout: float) -> bool:
        """Block until the newest question has its exact answer, or an error for one."""
        return self._answered.wait(timeout)

    def _must_wait(self, question: Question) -> bool:
        """Steps cannot be measured beside a run, and a run on a virtual card has the planner process to itself."""
        return not self._idle.is_set() and (question.card is None or self._virtual_run())

    # At once

    def _at_once(self, question: Question) -> Answer | None:
        if known := self._known(question):
            return known
        card = question.card
        if card is None:
            return None
        by_law = self._by_law(question, card)
        if by_law is not None:
            return by_law
        if beside := self._beside(question):
            return replace(beside, reserved=None, fits=None, how="law")
        return self._by_another_card(question, card)

    def _beside(self, question: Question) -> Answer | None:
        """The same step on the same card, of which others held more or less: what is allocated stays."""
        with self._lock:
            found = [a for q, a in self._exact.items() if q.recipe == _shorter(question.recipe) and q.place == question.place]
        return replace(found[-1], question=question) if found else None

    def _known(self, question: Question) -> Answer | None:
        """The exact answer, if it was given before: windows of more micro-batches have that of `MICRO_BATCHES`."""
        key = _key(question)
        with self._lock:
            if key not in self._exact:
                return None
            self._exact.move_to_end(key)
            return replace(self._exact[key], question=question)

    def _keep(self, answer: Answer) -> None:
        with self._lock:
            self._exact[_key(answer.question)] = answer
            while len(self._exact) > KEPT:
                self._exact.popitem(last=False)

    def _by_law(self, question: Question, card: GPU) -> Answer | None:
        n = question.recipe.micro_batch
        for (family, of, _), (_, law) in reversed(self._laws.items()):
            if family == family_of(question.recipe) and of == card and law is not None:
                return Answer(question, law.peak(n), law.trace(n), "law")
        return None

    def _by_another_card(self, question: Question, card: GPU) -> Answer | None:
        """By the trace, or else the law, of the nearest card, with this card's workspaces, see `moved`; reserved is not known yet."""
        n = question.recipe.micro_batch
        with self._lock:
            traced = [(q.card, a) for q, a in reversed(self._exact.items()) if q.recipe == _shorter(question.recipe) and q.card is not None]
            if found := _nearest(card, traced):
                return estimated(question, found[1].allocated, found[1].trace, found[0], card)
            family = family_of(question.recipe)
            laws = [(of, law) for (recipe, of, _), (_, law) in reversed(self._laws.items()) if recipe == family and law is not None]
        if known := _nearest(card, laws):
            return estimated(question, known[1].peak(n), known[1].trace(n), known[0], card)
        return None

    # In the background

    def _work(self) -> None:
        waited: Question | None = None
        while True:
            with self._lock:
                question = self._todo
                if question is None:
                    self._worker = None
                    return
                scope = self._scope = Scope()
            if self._must_wait(question):
                waited = question
                self._idle.wait(0.1)
                continue
            if waited == question:
                self._no_longer_waits(question)
            waited = None
            try:
                with scope:
                    for update in self._improve(question, scope):
                        if not self._tell(update):
                            break
            except CancelledError:
                pass
            except Exception as error:
                self._tell(Update(question, error=error))
            with self._lock:
                if self._todo == question and not scope.cancelled:
                    self._todo = None
                    self._answered.set()

    def _no_longer_waits(self, question: Question) -> None:
        """What is shown says that it waits for the run, which has ended."""
        with self._lock:
            if not self._answered.is_set():
                self._tell(Update(question, self._said, busy=True))

    def _tell(self, update: Update) -> bool:
        """Show it, unless something else is asked by now."""
        with self._lock:
            if self._question != update.question:
                return False
            answer = update.answer
            if answer is not None and answer.exact:
                self._keep(answer)
            self._said = answer or self._said
            self._show(update)
            if not update.busy:
                self._answered.set()
            return True

    def _improve(self, question: Question, scope: Scope) -> Iterator[Update]:
        card = question.card
        if card is None:
            yield from self._measured(question, scope)
            return
        card.left_for_pytorch(question.in_use)  # refuses a card that is full already
        answer = self._known(question)
        if answer is None:
            if quick := self._quick_reserved(question, card):
                yield Update(question, quick, busy=not quick.exact)
                answer = quick
            if answer is None or not answer.exact:
                answer = _of_plan(question, self._plan(question))
                yield Update(question, answer)
        if not answer.fits:
            yield Update(question, changes=single_changes(self._task, question.recipe, card, question.in_use, n=4))
        base, _ = self._law_of(question, card)
        with suppress(ValueError):  # a step that needs the same at any micro-batch has no largest
            yield Update(question, largest=base.max_micro_batch)
        for neighbour in _other_windows(question.recipe):  # accumulation answers at once then
            beside = replace(question, recipe=neighbour)
            if self._idle.is_set() and self._known(beside) is None:
                self._keep(_of_plan(beside, self._plan(beside)))

    def _quick_reserved(self, question: Question, card: GPU) -> Answer | None:
        """With what is reserved, without a new trace.

        Exact where this card's step is known, or the law is; else an estimate, by this card's law or from another card.
        """
        base, law = self._laws.get((family_of(question.recipe), card, question.in_use), (None, None))
        if base is None or law is None:
            alone = question.recipe.ranks == 1  # of several ranks another may be the fullest there
            known = (self._beside(question) if alone else None) or self._at_once(question)
            return None if known is None else replayed(known)
        n = question.recipe.micro_batch
        point = base.law(n, quick=True)
        return Answer(question, point.allocated, law.trace(n), "traced" if point.exact else "law", point.reserved, point.fits)

    def _plan(self, question: Question) -> Plan:
        """Windows of more micro-batches need what those of `MICRO_BATCHES` need, and share their traces."""
        return plan(self._task, _shorter(question.recipe), question.card, question.in_use)

    def _law_of(self, question: Question, card: GPU) -> tuple[Plan, MemoryLaw | None]:
        key = family_of(question.recipe), card, question.in_use
        if key not in self._laws:
            base = self._plan(question)
            found = base, base.memory_law
            with self._lock:  # others look through them
                self._laws[key] = found
                while len(self._laws) > LAWS:
                    del self._laws[next(iter(self._laws))]
            return found
        return self._laws[key]

    def _measured(self, question: Question, scope: Scope) -> Iterator[Update]:
        """Two recorded steps on this machine."""
        if answer := self._known(question):
            yield Update(question, answer)
            return
        refuse_ranks(question.recipe)
        options: dict[str, Any] = {"steps": 2, "device": question.place, "progress": False}
        result = run(self._task, question.recipe, on_step=lambda _: scope.cancelled or not self._idle.is_set(), **options)
        if result.status == "finished" and result.trace is not None:
            yield Update(question, Answer(question, result.peak or 0, result.trace, "measured"))
        else:  # something newer, or a run that goes first
            scope.cancel()


def refuse_ranks(recipe: Recipe) -> None:
    """A lab trains in this process.

    Raises:
        ValueError: the recipe has several ranks.
    """
    if recipe.ranks > 1:
        raise ValueError(
            f"A lab trains in this process, and this recipe has {recipe.ranks} ranks; choose a virtual card to plan it, or call "
            "vl.run(task, recipe)."
        )


def _key(question: Question) -> Question:
    """What questions with the same answer have in common."""
    if question.card is None:
        return question
    return replace(question, recipe=_shorter(question.recipe))


def family_of(recipe: Recipe) -> Recipe:
    """Recipes that share a law: any micro-batch, and any window of `MICRO_BATCHES` or more."""
    return _shorter(recipe.with_(micro_batch=1))


def _shorter(recipe: Recipe) -> Recipe:
    return recipe.with_(accumulation=min(recipe.accumulation, enough_micro_batches(recipe, MICRO_BATCHES)))


def _other_windows(recipe: Recipe) -> list[Recipe]:
    """The recipe with the accumulations that have other laws, where they exclude nothing."""
    if recipe.parallel in ("pipeline", "hybrid"):  # each has a law of its own
        return []
    mine = min(recipe.accumulation, MICRO_BATCHES)
    others = [n for n in range(1, MICRO_BATCHES + 1) if n != mine]
    return [recipe.with_(accumulation=n) for n in others if not conflicts(**asdict(recipe) | {"accumulation": n})]


def _of_plan(question: Question, planned: Plan) -> Answer:
    return Answer(question, planned.allocated, planned.trace, "traced", planned.reserved, planned.fits)


def _alike(one: GPU, other: GPU) -> bool:
    """Whether the step of one says something of the other's.

    From compute capability 8.0 on there is bf16, and attention takes kernels that others have not, for heads of 20 in fp16 say: what
    those write out instead can be 20 times as much.
    """
    return (one.capability >= (8, 0)) == (other.capability >= (8, 0))


def _nearest(card: GPU, known: Iterable[tuple[GPU, V]]) -> tuple[GPU, V] | None:
    """Of what is known of cards, that of the one most like this, the first of several; None if none is alike."""

    def apart(item: tuple[GPU, V]) -> tuple[bool, bool, int]:
        """By kernels first, then by what goes by multiprocessors."""
        of = item[0]
        return of.capability != card.capability, of.capability[0] != card.capability[0], abs(sms(of) - sms(card))

    return min((item for item in known if _alike(item[0], card)), key=apart, default=None)


def estimated(question: Question, allocated: int, trace: MemoryTrace, of: GPU, card: GPU) -> Answer:
    """An answer from another card's bytes and trace, see `moved`; without what is reserved, which takes longer, see `replayed`."""
    here = moved(trace, of, card)
    return Answer(question, allocated + here.peak - trace.peak, here, "estimated", of=of)


def moved(trace: MemoryTrace, of: GPU, card: GPU) -> MemoryTrace:
    """The trace of one card as an estimate for another: the same, but for the workspaces that cuBLAS keeps, which Hopper made larger.

    What else kernels take stays as on the other card. How far off that is was measured against traces, in 906 cases: each pair of
    RTX 4090, A100, H100, RTX 5090, T4 and V100, with 8 recipes (all precisions, math attention, checkpointing, accumulation,
    chunked loss) of GPT-2 small and nano, Llama 1B, ViT-B/16 and ResNet-18; see `CLOSE` for other models. A lab takes only the pairs
    that are `_alike`. Reserved is off by 2.2 % at most, allocated by 1.1 %, both of the ViT, whose sums take less scratch on T4 with
    its 40 multiprocessors; elsewhere by 0.02 % and 0.3 %. With the other card's workspaces it would be 20 % for GPT-2 small in bf16,
    whose blocks then fit otherwise, and 147 % for nano. Most of the alike pairs are measured anew by ``benchmarks/lab.py``.
    """
    before, after = cublas_workspace(of), cublas_workspace(card)
    events = trace.events
    kept = (events.category == Category.WORKSPACE) & (events.nbytes == before) & ~np.isin(events.storage, events.storage[events.nbytes < 0])
    return MemoryTrace(replace(events, nbytes=np.where(kept, after, events.nbytes)), str(card))


def replayed(answer: Answer) -> Answer:
    """The answer with what the allocator reserves for its trace on the question's card, and whether that fits, as a `Plan` finds it."""
    capacity = answer.question.capacity or 0
    allocator, fits = steady.on_card(steady.rows_of(answer.trace.events), capacity)
    unsure = answer.borrowed and abs(capacity - allocator.peak_reserved) <= CLOSE * allocator.peak_reserved
    return replace(answer, reserved=allocator.peak_reserved, fits=None if unsure else fits)


def settled(since: float, seconds: float = 0.7) -> bool:
    """Whether something has stood long enough for a person to have looked at it."""
    return time.monotonic() - since >= seconds
