"""plan(): what a Task and a Recipe will need on a card, found by running the training step on a virtual one."""

from __future__ import annotations

import copy
import hashlib
import html
import itertools
import math
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from vramlab import gpus
from vramlab.gpus import GPU
from vramlab.memory import steady
from vramlab.memory.allocator import CachingAllocator, OutOfMemoryError
from vramlab.memory.law import LawError, MemoryLaw
from vramlab.memory.recorder import refuse_compiled
from vramlab.memory.report import Change
from vramlab.memory.trace import Category, MemoryBreakdown, MemoryTrace, Phase
from vramlab.recipe import Recipe, conflicts
from vramlab.tasks import Task
from vramlab.training import check_arguments, checked_model, train
from vramlab.units import format_bytes, parse_bytes
from vramlab.virtual import planner
from vramlab.virtual.memo import Memo, watching
from vramlab.virtual.traffic import Communication
from vramlab.virtual.travel import pickled

if TYPE_CHECKING:
    import pandas as pd

    from vramlab.virtual import step_alone
    from vramlab.virtual.device import VirtualGPU

LARGEST = 1 << 30  # a micro-batch that no card holds
STEPS = 2  # the optimizer's state appears during the first, so the peak stands in the second
MICRO_BATCHES = 3  # of a window: the first has no gradients before it, the second and all later ones have


def plan(task: Task, recipe: Recipe | None = None, gpu: GPU | str | None = None, in_use: int | str = 0) -> Plan:
    """Predict the memory of a training step on a card, without the card: two steps run on a virtual one.

    It happens in a process of its own, so this one stays as it is. The code that runs is `train`, as in a real run.

    With ``Recipe(parallel=..., ranks=4)`` there are four such cards. Each rank's part is run, one after another in that process, in a
    group in which nothing is sent; ranks that hold the same share one run.

    Plans are kept: one is made again when the task, or a file that its code opens or lists, has changed. What the code only looks
    for (``os.path.exists``) or takes from ``os.environ`` is not noticed.

    Args:
        task: what is trained.
        recipe: how memory is saved; None: the defaults.
        gpu: the card or its name; None: this machine's.
        in_use: bytes of the card, of each if there are several, that others hold, the desktop for example: ``"0.8 GiB"``.

    Returns:
        The `Plan`, also if the step does not fit: of several ranks that of the fullest, with all of them in ``ranks``.

    Raises:
        ValueError: no such card; what `train` raises before it starts; a compiled model.
        UnknownValueError: the model, loss or batch reads whole numbers that were computed on the card.
        NotImplementedError: an operator without a shape function.
        PlannerError: the process died; the message says of what.
    """
    recipe = Recipe() if recipe is None else recipe
    check_arguments(task, recipe)
    card, held = gpus.gpu(gpu), parse_bytes(in_use)
    card.left_for_pytorch(held)  # refuses a full one before anything is traced
    if recipe.ranks > 1:
        return _together(_plan_ranks(task, recipe, card, held))
    return Plan(task=task, recipe=recipe, gpu=card, in_use=held, **planner.shared().call(known_steps, _digest(task), task, recipe, card))


def _plan_ranks(task: Task, recipe: Recipe, card: GPU, held: int, only: int | None = None) -> list[Plan]:
    """The plan of each rank, or of one that is traced."""
    stand_ins, traces = planner.shared().call(trace_ranks, _digest(task), task, recipe, card, only)
    plans = {traced: Plan(task=task, recipe=recipe, gpu=card, in_use=held, **fields) for traced, fields in traces.items()}
    return [plans[traced].for_rank(rank, traced) for rank, traced in stand_ins.items()]


def _together(ranks: list[Plan]) -> Plan:
    """The plan of all ranks: that of the fullest, and it fits if all do."""
    fullest = max(ranks, key=lambda plan: (not plan.fits, plan.reserved, -plan.rank))
    whole = copy.copy(fullest)
    for name, value in (("ranks", tuple(ranks)), ("fits", all(rank.fits for rank in ranks)), ("host", max(rank.host for rank in ranks))):
        object.__setattr__(whole, name, value)
    return whole


_traces = Memo()  # of this process: the planner's, which ends when a module of the user's changes


def trace_ranks(
    digest: str, task: Task, recipe: Recipe, card: GPU, only: int | None = None
) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
    """Run the first steps of each rank that differs from the others; in the planner process.

    Args:
        only: this one alone.

    Returns:
        For each rank the number of the one that was traced in its place, and what `trace_steps` gave for those.
    """
    from vramlab.virtual.ranks import stand_ins

    if only is not None:
        return {only: only}, {only: known_steps(digest, task, recipe, card, only)}
    instead = dict(enumerate(stand_ins(recipe, lambda: _parameters(digest, task, card))))
    return instead, {rank: known_steps(digest, task, recipe, card, rank) for rank in sorted(set(instead.values()))}


def _parameters(digest: str, task: Task, card: GPU) -> list[tuple[tuple[int, ...], bool]]:
    """Shape of each parameter, and whether it is trained; the model is built on a virtual card."""
    from vramlab.virtual.device import virtual_gpu

    def built(asked: dict[str, Any]) -> list[tuple[tuple[int, ...], bool]]:
        with virtual_gpu(card, limited=False) as virtual, watching(virtual, "card", asked), virtual.building():
            model = checked_model(task.model())
            return [(tuple(p.shape), p.requires_grad) for p in model.parameters() if not is_lazy(p)]

    known: list[tuple[tuple[int, ...], bool]] = _traces.get((digest, "parameters"), card, built) if digest else built({})
    return known


def known_steps(digest: str, task: Task, recipe: Recipe, card: GPU, rank: int = 0) -> dict[str, Any]:
    """`trace_steps`, or what it gave before, for a recipe with the same bytes and a card that is the same in all that mattered.

    A recipe that differs from a known one in its optimizer needs its step alone, where `vramlab.virtual.step_alone` can say so.

    Args:
        digest: of the task as it was sent, with all that its functions hold; empty: not known.
    """
    if not digest:
        return trace_steps(task, recipe, card, rank=rank)
    from vramlab.virtual import step_alone

    same = with_same_bytes(recipe)
    mattered = card if recipe.ranks > 1 else (card.capability, card.sms)  # how cards are connected is noted
    if step_alone.separable(same):
        key: Any = (digest, same.with_(optimizer=Recipe.optimizer, optimizer_impl=Recipe.optimizer_impl), mattered)
        known: step_alone.Known = _traces.get(key, card, lambda asked: _trace_noted(task, same, card, asked))
        fields = known.fields
        if known.recipe != same:  # made with this known trace, so good as long as that is
            fields = _traces.get((known, same), card, lambda asked: _trace_other(known, task, same, card, asked))
    else:
        key = (digest, same, mattered, rank)
        fields = _traces.get(key, card, lambda asked: trace_steps(task, recipe, card, asked, rank))
    return fields | {"trace": MemoryTrace(fields["trace"].events, str(card))}


def _trace_noted(task: Task, recipe: Recipe, card: GPU, asked: dict[str, Any]) -> step_alone.Known:
    from vramlab.virtual import step_alone

    noted: list[step_alone.Noted] = []
    return step_alone.Known(recipe, trace_steps(task, recipe, card, asked, noted=noted), noted)


def _trace_other(known: step_alone.Known, task: Task, recipe: Recipe, card: GPU, asked: dict[str, Any]) -> dict[str, Any]:
    """`trace_steps` of a recipe with another optimizer than the known one, of which only the step is run if that is enough."""
    from vramlab.virtual import step_alone

    fields = step_alone.with_other_optimizer(known, task, recipe, card, asked)
    return trace_steps(task, recipe, card, asked) if fields is None else fields


def _digest(task: Task) -> str:
    with suppress(Exception):  # the call says what cannot travel
        return hashlib.sha256(pickled(task)).hexdigest()
    return ""


def with_same_bytes(recipe: Recipe) -> Recipe:
    """One recipe for all whose steps do the same to memory: what is unused, or is a number only, has its default."""
    return recipe.with_(
        precision="fp32" if recipe.precision == "tf32" else recipe.precision,  # TF32 is a way to multiply
        loss_scale=Recipe.loss_scale,
        clip_norm=None if recipe.clip_norm is None else 1.0,
        checkpoint_every=recipe.checkpoint_every if recipe.checkpointing != "none" else 1,
        accumulation=min(recipe.accumulation, MICRO_BATCHES) if recipe.parallel == "none" else recipe.accumulation,
    )


def trace_steps(
    task: Task,
    recipe: Recipe,
    card: GPU,
    asked: dict[str, Any] | None = None,
    rank: int = 0,
    noted: list[step_alone.Noted] | None = None,
) -> dict[str, Any]:
    """Run the first steps on a virtual card as large as need be; in the planner process.

    Args:
        asked: gets what the code asked the card for, its memory say.
        rank: of the recipe's ranks the one that this process is.
        noted: gets what each optimizer step found and left.

    Returns:
        The fields of a `Plan` that come from the run.
    """
    from vramlab.virtual import ranks, step_alone
    from vramlab.virtual.device import virtual_gpu

    began = time.perf_counter()
    shorter = recipe.with_(accumulation=min(recipe.accumulation, ranks.enough_micro_batches(recipe, MICRO_BATCHES)))
    with (
        ranks.virtual_rank(rank, recipe.ranks) if recipe.ranks > 1 else nullcontext(),
        virtual_gpu(card, limited=False) as virtual,
        watching(virtual, "card", {} if asked is None else asked),
        nullcontext() if noted is None else step_alone.noting_steps(virtual, noted),
    ):
        with closing(train(named(task, virtual), shorter, virtual.device, record_every=None)) as steps:
            next(steps)
            virtual.reset_host_peak()  # the model was built there
            for _ in itertools.islice(steps, STEPS - 1):
                pass
            trace = MemoryTrace(virtual.trace.events, str(card))  # now, before the model goes
        allocated = virtual.peak_allocated
    return {
        "allocated": allocated,
        "host": virtual.peak_host,
        "trace": trace,
        "reads": virtual.reads,
        "notes": virtual.notes + ranks.notes(recipe, card),
        "seconds": time.perf_counter() - began,
        "communication": ranks.in_window(virtual, STEPS, recipe, shorter.accumulation),
    }


def single_changes(task: Task, recipe: Recipe, card: GPU, in_use: int = 0, n: int = 5) -> list[Change]:
    """The ``n`` best single changes to a recipe on a card, each planned: those that fit first, then by reserved bytes.

    A change that cannot be planned (adamw-8bit without torchao, say) is left out.
    """
    found = []
    for options in _candidates(task, recipe, card):
        with suppress(ValueError, ImportError, NotImplementedError):
            changed = plan(task, recipe.with_(**options), card, in_use)
            words = changed.recipe.words(options)
            found.append(Change(words, options, changed.allocated, changed.reserved, changed.fits))
    return sorted(found, key=lambda change: (not change.fits, change.reserved))[:n]


def _candidates(task: Task, recipe: Recipe, card: GPU) -> list[dict[str, Any]]:
    """What people would try, one thing at a time; halving the micro-batch keeps the effective batch."""
    halved = {"micro_batch": recipe.micro_batch // 2, "accumulation": 2 * recipe.accumulation}
    tried: list[tuple[bool, dict[str, Any]]] = [
        (recipe.precision in ("fp32", "tf32"), {"precision": "amp-bf16" if card.supports_bf16 else "amp-fp16"}),
        (card.supports_bf16 and recipe.precision != "bf16", {"precision": "bf16"}),
        (recipe.micro_batch % 2 == 0 and not recipe.optimizer_in_backward, halved),
        (recipe.checkpointing != "blocks", {"checkpointing": "blocks"}),
        (recipe.checkpointing == "none", {"checkpointing": "selective"}),
        (recipe.optimizer == "adamw", {"optimizer": "adafactor", "optimizer_impl": "loop"}),
        (recipe.optimizer_impl == "foreach" and recipe.optimizer in ("adamw", "sgd"), {"optimizer_impl": "fused"}),
        (not recipe.optimizer_in_backward, {"optimizer_in_backward": True}),
        (task.chunked and recipe.loss_chunks == 1, {"loss_chunks": 8}),
        (recipe.offload == "none", {"offload": "activations"}),
        (recipe.offload == "none", {"offload": "optimizer"}),
        (recipe.attention == "math", {"attention": "sdpa"}),
        (recipe.parallel in ("ddp", "zero1", "zero2"), {"parallel": "fsdp"}),
        (recipe.parallel == "ddp", {"parallel": "zero1"}),
    ]
    return [options for sensible, options in tried if sensible and not conflicts(**asdict(recipe) | options)]


def named(task: Task, virtual: VirtualGPU) -> Task:
    """The task with a model that is refused if it is compiled, and whose modules go by their names in the virtual card's trace."""

    def model() -> Any:
        made = task.model()
        if isinstance(made, nn.Module):
            refuse_compiled(made)
            virtual.name_modules(made)
        return made

    def batch(count: int, device: Any) -> Any:
        virtual.micro_batch_begins()
        return task.batch(count, device)

    return replace(task, model=model, batch=batch)


@dataclass(frozen=True)
class LawPoint:
    """What the step needs at another micro-batch: peaks in bytes, and whether they are those of a trace to the byte."""

    micro_batch: int
    allocated: int
    reserved: int
    fits: bool
    exact: bool


def _fullest(points: list[LawPoint]) -> LawPoint:
    """Of several ranks' points the most of each figure; it fits if all do."""
    allocated, reserved = max(point.allocated for point in points), max(point.reserved for point in points)
    return LawPoint(points[0].micro_batch, allocated, reserved, all(p.fits for p in points), all(p.exact for p in points))


@dataclass(frozen=True)
class LawCurve:
    """A plan's step at several micro-batches."""

    plan: Plan
    points: list[LawPoint]

    def __repr__(self) -> str:
        fitting = max((point.micro_batch for point in self.points if point.fits), default=0)
        most = self.points[-1].micro_batch
        return f"LawCurve({self.plan.task.name} on {self.plan.gpu.name}: micro-batch 1 to {most}, of these {fitting} fits)"

    def _repr_html_(self) -> str:
        cell = "<td style='text-align:right'>{}</td>"
        rows = "".join(
            f"<tr>{cell.format(p.micro_batch)}{cell.format(format_bytes(p.allocated))}{cell.format(format_bytes(p.reserved))}"
            f"<td style='text-align:left'>{'fits' if p.fits else 'does not fit'}{'' if p.exact else ', about'}</td></tr>"
            for p in self.points
        )
        title = html.escape(f"{self.plan.task.name}, planned for {self.plan.gpu}")
        return f"<p><b>{title}</b></p><table><tr><th>micro-batch</th><th>allocated</th><th>reserved</th><th></th></tr>{rows}</table>"


@dataclass(frozen=True)
class Plan:
    """What a training step needs on a card. All sizes are bytes.

    The numbers are planned, nothing is measured: ``allocated`` and ``reserved`` are the peaks that
    ``torch.cuda.max_memory_allocated()`` and ``max_memory_reserved()`` would show.
    """

    task: Task
    recipe: Recipe
    gpu: GPU
    in_use: int
    """What others hold of the card."""
    allocated: int
    """Peak of the blocks that PyTorch's allocator hands out in both steps, workspaces of libraries included. In later steps it can be
    more by what is not split from large blocks, up to 1 MiB each."""
    host: int
    """Peak in host memory of what was offloaded there."""
    trace: MemoryTrace
    """Both steps, with the building of the model."""
    reads: dict[str, int] = field(repr=False)
    """Where the code read floating-point numbers, which gave 0.0: ``file:line`` and how often."""
    notes: list[str] = field(repr=False)
    """What is missing, because its size is not published (cuDNN's workspaces); empty for most transformers."""
    seconds: float = field(repr=False)
    """What tracing took, without the start of its process; a plan that was made before is not traced again."""
    communication: Communication = field(default=Communication(()), repr=False)
    """What this rank sends and receives in a step: bytes as called, times estimated."""
    rank: int = field(default=0, init=False, repr=False)
    """Of several ranks the one that this plan is of."""
    traced: int = field(default=0, init=False, repr=False)
    """The rank that was run in its place, which holds the same, or a little more where that is how a model divides."""
    ranks: tuple[Plan, ...] = field(default=(), init=False, repr=False)
    """One plan a rank, where this one stands for all of them; empty for a single card and in a rank's own plan."""
    reserved: int = field(init=False)
    """Peak taken from the driver, after as many steps as it takes to grow no more. On a card that is nearly full the allocator
    gives cached memory back before it takes more."""
    fits: bool = field(init=False)
    retries: int = field(init=False, repr=False)
    """How often the allocator had to empty its cache to fit, which costs time."""

    def __post_init__(self) -> None:
        allocator, fits = steady.on_card(steady.rows_of(self.trace.events), self.capacity)
        for name, value in (("fits", fits), ("reserved", allocator.peak_reserved), ("retries", allocator.retries)):
            object.__setattr__(self, name, value)

    def for_rank(self, rank: int, traced: int) -> Plan:
        """This plan as that of a rank that holds the same."""
        other = copy.copy(self)
        object.__setattr__(other, "rank", rank)
        object.__setattr__(other, "traced", traced)
        return other

    @property
    def _distinct(self) -> list[Plan]:
        """The plans of the ranks that were run."""
        return [plan for plan in self.ranks if plan.rank == plan.traced]

    def law(self, micro_batch: int, *, quick: bool = False) -> LawPoint:
        """The same step at another micro-batch, from the law of its sizes. The first call traces four micro-batches to find it.

        Sizes of tensors follow the law to the byte. What kernels take for themselves may not: then this micro-batch is traced
        (seconds), or with ``quick`` it is taken as between its neighbours, in 0.1 s, and the result says ``exact=False``.
        Where the step does other things at other micro-batches (``law_error`` says what), each is traced.

        Raises:
            ValueError: ``micro_batch`` below 1.
        """
        if not isinstance(micro_batch, int) or micro_batch < 1:
            raise ValueError(f"A micro-batch is a whole number of at least 1, got {micro_batch!r}.")
        if self.ranks:
            return _fullest([rank.law(micro_batch, quick=quick) for rank in self._distinct])
        law = self._law
        if law is None or micro_batch in self._plans or (not quick and not law.is_exact(micro_batch)):
            traced = self._at(micro_batch)
            return LawPoint(micro_batch, traced.allocated, traced.reserved, traced.fits, True)
        roomy = law.replayed(micro_batch)
        fits, reserved = roomy.peak_reserved <= self.capacity, roomy.peak_reserved
        if not fits:
            with suppress(OutOfMemoryError):
                reserved, fits = law.replayed(micro_batch, self.capacity).peak_reserved, True
        return LawPoint(micro_batch, law.peak(micro_batch), reserved, fits, law.is_exact(micro_batch))

    def curve(self, points: int = 12) -> LawCurve:
        """What the step needs over the micro-batch, up to a quarter more than fits, by the quick law: ``vl.plot(plan.curve())``.

        Raises:
            ValueError: fewer than 2 points.
        """
        if points < 2:
            raise ValueError(f"A curve has at least 2 points, got {points}.")
        largest = self._largest_by_law()
        top = max(2, math.ceil(1.25 * largest))
        sizes = sorted({1 + round(i * (top - 1) / (points - 1)) for i in range(points)} | {max(largest, 1), largest + 1})
        return LawCurve(self, [self.law(n, quick=True) for n in sizes])

    @property
    def law_error(self) -> str:
        """Why each micro-batch has to be traced; empty where there is a law."""
        if self.ranks:
            return " ".join(f"Rank {rank.rank}: {rank.law_error}" for rank in self._distinct if rank.law_error)
        return "" if self._law is not None else self.__dict__["_no_law"]

    @cached_property
    def max_micro_batch(self) -> int:
        """The largest micro-batch that fits, found by the law and confirmed by traces of it and the next; 0 if not even 1 does."""
        n = self._largest_by_law()
        while n > 0 and not self._at(n).fits:
            n -= 1
        while self._at(n + 1).fits:
            n += 1
        return n

    def _largest_by_law(self) -> int:
        low, high = 0, 1
        while self.law(high, quick=True).fits:
            low, high = high, 2 * high
            if high > LARGEST:
                raise ValueError(
                    "The step needs the same at any micro-batch, so none is the largest: let Task.batch(size, device) use size."
                )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.law(middle, quick=True).fits else (low, middle)
        return low

    @cached_property
    def _law(self) -> MemoryLaw | None:
        """From traces at 2 and 3, one where the card is full, for there it has to be right, one on the way, and this plan's own."""
        one, two = self._at(2), self._at(3)
        step = max(two.trace.peak - one.trace.peak, 1)
        full = min(3 + max(1, (self.capacity - two.trace.peak) // step), 4096)
        try:
            sizes = {2, 3, max(4, math.isqrt(3 * full)), full, max(2, self.recipe.micro_batch)}
            return MemoryLaw({n: self._at(n).trace for n in sizes})
        except LawError as error:
            self.__dict__["_no_law"] = str(error)
            return None

    @property
    def memory_law(self) -> MemoryLaw | None:
        """The law itself, for whoever asks it many times; None where each micro-batch has to be traced, see `law_error`.

        Of several ranks that of the fullest.
        """
        return self.ranks[self.rank].memory_law if self.ranks else self._law

    def _at(self, micro_batch: int) -> Plan:
        """The plan of another micro-batch."""
        if micro_batch not in self._plans:
            recipe = self.recipe.with_(micro_batch=micro_batch)
            if recipe.ranks > 1 and not self.ranks:
                (found,) = _plan_ranks(self.task, recipe, self.gpu, self.in_use, self.traced)
            else:
                found = plan(self.task, recipe, self.gpu, self.in_use)
            self._plans[micro_batch] = found
        return self._plans[micro_batch]

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        """What is traced, by micro-batch."""
        return {self.recipe.micro_batch: self}

    @cached_property
    def changes(self) -> list[Change]:
        """The five best single changes to the recipe, each planned again: some seconds the first time."""
        return single_changes(self.task, self.recipe, self.gpu, self.in_use)

    @cached_property
    def fits_with_expandable_segments(self) -> bool:
        """Whether it fits with ``PYTORCH_ALLOC_CONF=expandable_segments:True``, which leaves fewer holes between blocks."""
        if self.ranks:
            return all(rank.fits_with_expandable_segments for rank in self._distinct)
        try:
            steady.replay(steady.rows_of(self.trace.events), CachingAllocator(self.capacity, expandable_segments=True))
        except OutOfMemoryError:
            return False
        return True

    @property
    def capacity(self) -> int:
        """What PyTorch can reserve: the card's memory without the CUDA context and what others hold."""
        return self.gpu.left_for_pytorch(self.in_use)

    @property
    def device(self) -> int:
        """Peak in use on the card by everything, as nvidia-smi shows it: reserved, CUDA context, others."""
        return self.reserved + self.gpu.context + self.in_use

    @property
    def margin(self) -> int:
        """What is left of the card at the peak; negative: by how much it is too small."""
        return self.capacity - self.reserved

    @property
    def breakdown(self) -> MemoryBreakdown:
        """Bytes in storages by category at the peak."""
        return self.trace.breakdown()

    @property
    def items(self) -> dict[str, int]:
        """What ``device`` consists of: each category at the peak, blocks' unused ends and cache, context, others."""
        parts = {label: nbytes for label, nbytes in self.breakdown.items() if nbytes}
        return parts | {"cached by the allocator": self.reserved - self.trace.peak, "CUDA context": self.gpu.context, "others": self.in_use}

    @property
    def cause(self) -> dict[str, str]:
        """What was running when the peak was reached: phase, operator, module (empty outside of all), and line (of its forward)."""
        events = self.trace.events
        i = self.trace.peak_event
        assert events.line is not None
        return {
            "phase": Phase(events.phase[i]).label,
            "operator": events.operators[events.operator[i]],
            "module": events.modules[events.module[i]],
            "line": events.lines[events.line[i]],
        }

    def holders(self, n: int = 10, by: str = "line") -> pd.DataFrame:
        """Who holds the memory at the peak: bytes by ``"line"``, ``"module"``, ``"operator"`` or ``"category"``, largest first.

        Raises:
            ValueError: no such column, ``n`` below 1.
        """
        return self.trace.holders_by(by, n)

    def __repr__(self) -> str:
        return f"Plan({self.task.name}, {self.recipe}, planned for {self._cards(self.gpu.name)}: {self._verdict()})"

    def _cards(self, name: str) -> str:
        if self.ranks:
            return f"{len(self.ranks)} x {name}, rank {self.rank} the fullest"
        return f"rank {self.rank} of {self.recipe.ranks} on {name}" if self.recipe.ranks > 1 else name

    def _verdict(self) -> str:
        sizes = f"allocated {format_bytes(self.allocated)}, reserved {format_bytes(self.reserved)}, device {format_bytes(self.device)}"
        if not self.fits:
            way_out = ", but fits with PYTORCH_ALLOC_CONF=expandable_segments:True" if self.fits_with_expandable_segments else ""
            return f"does not fit, {format_bytes(-self.margin)} too much{way_out}; {sizes}"
        tight = f" after emptying the cache {self.retries} times" if self.retries else ""
        return f"fits{tight}, {format_bytes(self.margin)} left; {sizes}"

    def _repr_html_(self) -> str:
        cause = self.cause
        title = html.escape(f"{self.task.name}: {self.recipe}, planned for {self._cards(str(self.gpu))}")
        color = "#009E73" if self.fits else "#D55E00"
        module = f"in {cause['module']}" if cause["module"] else "outside modules"
        where = html.escape(f"Peak in {cause['phase']}: {cause['operator']} {module}, {cause['line']}")
        host = f"<br>offloaded to host memory: {format_bytes(self.host)}" if self.host else ""
        notes = "".join(f"<br>Note: {html.escape(note)}." for note in self.notes)
        return (
            f"<div style='max-width:46em'><p><b>{title}</b><br><b style='color:{color}'>{html.escape(self._verdict())}</b></p>"
            f"{self._bar()}<p>{where}{host}{notes}</p>{self._table()}</div>"
        )

    def _table(self) -> str:
        """One row a rank, and what it sends."""
        if self.recipe.ranks == 1:
            return ""
        sent = html.escape(f"Rank {self.rank}: {self.communication.words(self.gpu)}.")
        rows = "".join(
            f"<tr><td>{plan.rank}</td><td>{format_bytes(plan.allocated)}</td><td>{format_bytes(plan.reserved)}</td>"
            f"<td>{'fits' if plan.fits else 'does not fit'}</td><td>{plan.cause['phase']}</td>"
            f"<td>{format_bytes(plan.communication.wire)}</td></tr>"
            for plan in self.ranks
        )
        head = "<tr><th>rank</th><th>allocated</th><th>reserved</th><th></th><th>peak in</th><th>sent a step</th></tr>"
        return f"<p>{sent}</p>" + (f"<table>{head}{rows}</table>" if rows else "")

    def _bar(self) -> str:
        """One bar of what is in use, with a line where the card ends, and its legend."""
        colors = {c.label: c.color for c in Category} | {
            "cached by the allocator": "#DDDDDD",
            "CUDA context": "#555555",
            "others": "#333333",
        }
        full = max(self.device, self.gpu.memory)
        pieces = "".join(
            f"<div title='{label}: {format_bytes(n)}' style='background:{colors[label]};width:{100 * n / full:.3f}%'></div>"
            for label, n in self.items.items()
        )
        legend = "".join(
            f"<span style='white-space:nowrap;margin-right:1em'><span style='background:{colors[label]};display:inline-block;"
            f"outline:1px solid currentColor;width:0.8em;height:0.8em'></span> {label} {format_bytes(n)}</span> "
            for label, n in self.items.items()
            if n
        )
        end = 100 * self.gpu.memory / full
        return (
            f"<div style='position:relative;padding-bottom:1.3em'>"
            f"<div style='display:flex;height:1.6em;outline:1px solid currentColor'>{pieces}</div>"
            f"<div style='position:absolute;top:-0.2em;left:calc({end:.3f}% - 2px);height:2em;border-left:2px solid currentColor'></div>"
            f"<div style='position:absolute;top:1.8em;right:{100 - end:.3f}%;font-size:smaller'>{format_bytes(self.gpu.memory)}</div></div>"
            f"<div style='font-size:smaller'>{legend}</div>"
        )
