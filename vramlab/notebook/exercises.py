"""Exercises that check themselves: a task, a target in bytes and in minutes, and a verdict that never stops *Run All*.

A notebook has a stub and one line, and imports nothing but `check` (and `beside`)::

    my_bytes = None  # your number

    check("02.1", my_bytes)

What ``"02.1"`` is stands in ``vramlab/notebook/course/n02.py``, in a tuple ``EXERCISES``. There are three kinds; all take
``hints`` (the first is given for a blank, the next for each new wrong answer) and ``minutes`` (what it should take).

*A number by hand*, compared with what a plan or a recording says. ``mistakes`` maps wrong answers that one can foresee to
what is wrong with them; the right number is never shown::

    Number(
        "02.1", "Bytes of AdamW's state for GPT-2, to the byte.", minutes=5,
        truth=lambda: plan(tasks.gpt("gpt2"), Recipe(), "RTX 4090").breakdown.optimizer_state,
        mistakes=lambda truth: {truth // 2: "AdamW keeps two averages for each parameter."},
        hints=("How many numbers does AdamW keep for each parameter?", "4 bytes each, and a counter for each tensor."),
    )

*A recipe to find*, that meets a target and keeps the rest. With ``gpu`` both recipes are planned for that card, without it
they train two steps on the CPU, and the loss must stay what it was::

    FindRecipe(
        "04.2", "GPT-2 with 32 sequences a step on a card of 12 GiB.", minutes=5,
        task=lambda: tasks.gpt("gpt2"), plain=Recipe(micro_batch=32, precision="amp-bf16"), gpu="RTX 3060",
        keep=("precision", "optimizer"), hints=("What is largest in vl.plan(...).breakdown?",),
    )

*A function to write*, compared with a plain one: same results, same gradients, and a peak of at most ``target`` bytes above
what it was given. ``cases`` makes the arguments anew for each call::

    Write(
        "05.3", "A cross entropy that never holds all logits.", minutes=15,
        plain=lambda hidden, weight, target: F.cross_entropy(hidden @ weight.T, target),
        cases=lambda: [(torch.randn(512, 64, requires_grad=True), torch.randn(8192, 64), torch.randint(8192, (512,)))],
        target="8 MiB", hints=("Which tensor is the largest?", "checkpoint() each piece."),
    )

Without ``target`` results alone count, and ``plain`` may as well measure: so functions are checked that compute bytes.

The solutions, and wrong answers with what is said to them, stand in ``tests/solutions.py``, which is no part of the package;
``tests/test_exercises.py`` goes through all of them.
"""

from __future__ import annotations

import html
import importlib
import math
import operator
import pkgutil
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vramlab.experiments import run
from vramlab.gpus import GPU, gpu
from vramlab.memory.recorder import record
from vramlab.memory.trace import MemoryBreakdown
from vramlab.planning import plan
from vramlab.recipe import Recipe
from vramlab.tasks import Task
from vramlab.tensors import tensors_in
from vramlab.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import pandas as pd


def check(id: str, answer: Any) -> Verdict:  # noqa: A002  # the word a reader expects
    """Judge an answer to an exercise of the course; the verdict shows itself.

    Args:
        id: ``"03.2"``: notebook 03, exercise 2.
        answer: a number, a Recipe or a function, as the exercise says; ``None`` and ``...`` are blanks.

    Returns:
        The `Verdict`; whatever is wrong with the answer, nothing is raised.

    Raises:
        ValueError: there is no such exercise.
    """
    exercise = find(id)
    if _blank(answer):
        verdict = exercise.unanswered()
    else:
        try:
            verdict = exercise.judge(answer)
        except Exception as error:
            verdict = Verdict(False, f"your answer ended with {_described(error)}")
    if verdict.solved or verdict.hint:
        return replace(verdict, id=id)
    wrong = _tried.setdefault(id, [])
    if not verdict.blank and (key := _key(answer)) not in wrong:
        wrong.append(key)
    return replace(verdict, id=id, hint=exercise.hints[min(len(wrong), len(exercise.hints) - 1)])


_tried: dict[str, list[Any]] = {}  # different wrong answers, by exercise


def _key(answer: Any) -> Any:
    """Equal for the same answer: a cell that is run again defines its function again."""
    code = getattr(answer, "__code__", None)
    return _of_code(code) if code is not None else repr(answer)


def _of_code(code: CodeType) -> Any:
    """What a function does, without where it lies; functions inside it are code among its constants."""
    return code.co_code, code.co_names, tuple(_of_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)


def find(id: str) -> Exercise:  # noqa: A002
    """The exercise of this number.

    Raises:
        ValueError: there is none.
    """
    for exercise in exercises(id.partition(".")[0]):
        if exercise.id == id:
            return exercise
    raise ValueError(f"There is no exercise {id!r}; there are {', '.join(exercise.id for exercise in exercises())}.")


def exercises(notebook: str = "") -> list[Exercise]:
    """The exercises of the course, in order.

    Args:
        notebook: ``"03"``: of this one alone.
    """
    course = importlib.import_module("vramlab.notebook.course")  # its modules import this one
    names = sorted(module.name for module in pkgutil.iter_modules(course.__path__, f"{course.__name__}."))
    names = [name for name in names if not notebook or name == f"{course.__name__}.n{notebook}"]
    return [exercise for name in names for exercise in importlib.import_module(name).EXERCISES]


def beside(by_hand: Mapping[str, int], measured: MemoryBreakdown) -> pd.DataFrame:
    """Bytes by hand, bytes measured and their ratio, one row a category that was worked out.

    Args:
        by_hand: bytes by category label: ``{"parameters": 1024, "optimizer state": 2048}``.
        measured: what a trace says.

    Raises:
        ValueError: no such category.
    """
    import pandas as pd

    found = dict(measured.items())
    for label in by_hand:
        if label not in found:
            raise ValueError(f"A category is one of {', '.join(found)}, got {label!r}.")
    table = pd.DataFrame({"by hand": dict(by_hand), "measured": {label: found[label] for label in by_hand}})
    return table.assign(ratio=(table["measured"] / table["by hand"]).round(4))


# What a check says


@dataclass(frozen=True)
class Verdict:
    """What a check says, in words and as a picture."""

    solved: bool
    message: str
    hint: str = ""
    """What to think about next; empty if it is solved."""
    bars: tuple[tuple[str, float], ...] = ()
    """What the picture compares, in bytes or in the exercise's unit: yours, and what it stands beside."""
    target: float | None = None
    """A line in the picture."""
    unit: str = "bytes"
    id: str = ""
    blank: bool = field(default=False, repr=False)
    hidden: tuple[str, ...] = field(default=(), repr=False)
    """Bars that are drawn without their number."""

    def __repr__(self) -> str:
        hint = f"\nHint: {self.hint}" if self.hint and not self.solved else ""
        return f"{'solved' if self.solved else 'not yet'}: {self.message}{hint}"

    def _repr_html_(self) -> str:
        mark, color = ("&#10003; solved", "#009E73") if self.solved else ("&#8230; not yet", "#D55E00")
        badge = f"<b style='border-left:0.4em solid {color};padding-left:0.5em'>{mark}</b>"
        hint = f"<br><i>Hint: {html.escape(self.hint)}</i>" if self.hint and not self.solved else ""
        return f"<div style='max-width:46em'><p>{badge} {html.escape(self.message)}{hint}</p>{self._picture()}</div>"

    def _picture(self) -> str:
        full = max([value for _, value in self.bars] + [self.target or 0], default=0) * 1.05
        if not self.bars or full <= 0:
            return ""
        line = "" if self.target is None else f"border-left:2px dashed currentColor;left:{100 * self.target / full:.2f}%"
        rows = []
        for i, (label, value) in enumerate(self.bars):
            color = "#999999" if i else "#009E73" if self.solved else "#D55E00"
            mark = f"<div style='position:absolute;top:-0.15em;height:1.3em;{line}'></div>" if line else ""
            rows.append(
                f"<div style='display:flex;align-items:center;margin:0.2em 0'><div style='width:9em'>{html.escape(label)}</div>"
                f"<div style='position:relative;flex:1;height:1em;border-bottom:1px solid currentColor'>"
                f"<div style='background:{color};height:1em;width:{100 * max(value, 0) / full:.2f}%'></div>{mark}</div>"
                f"<div style='width:7em;text-align:right'>{'?' if label in self.hidden else _shown(value, self.unit)}</div></div>"
            )
        note = "" if self.target is None else f"<div style='padding-left:9em'>dashed: target {_shown(self.target, self.unit)}</div>"
        return f"<div style='font-size:smaller'>{''.join(rows)}{note}</div>"


def _shown(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "bytes" else f"{value:,.10g} {unit}".rstrip()


def _described(error: BaseException) -> str:
    lines = [f"line {frame.lineno} of {frame.name}" for frame in traceback.extract_tb(error.__traceback__) if not _ours(frame.filename)]
    return f"{type(error).__name__}{f' in {lines[-1]}' if lines else ''}: {error}"


def _ours(file: str) -> bool:
    return file == __file__ or f"{torch.__name__}/" in file


def _blank(answer: Any) -> bool:
    return answer is None or answer is ...


# The kinds


@dataclass(frozen=True)
class Exercise(ABC):
    """A task that is checked. ``id`` is ``"03.2"``, ``question`` one sentence with the target."""

    id: str
    question: str
    minutes: int = field(kw_only=True)
    """What it should take."""
    hints: tuple[str, ...] = field(kw_only=True)
    """Each says more than the one before."""

    def __post_init__(self) -> None:
        if not self.hints or self.minutes < 1:
            raise ValueError(
                f"Exercise {self.id} has at least one hint and takes at least a minute, got {self.hints!r} and {self.minutes}."
            )

    def unanswered(self) -> Verdict:
        """The verdict on a blank."""
        return Verdict(False, self.question, blank=True)

    @abstractmethod
    def judge(self, answer: Any) -> Verdict:
        """The verdict on an answer; what it raises is said to be the answer's fault."""


@dataclass(frozen=True)
class Number(Exercise):
    """A number worked out by hand."""

    truth: Callable[[], float] = field(kw_only=True)
    """What a plan or a recording says; asked for once."""
    unit: str = field(default="bytes", kw_only=True)
    """``"bytes"``, which may be given as ``"1.5 GiB"`` too, or any other word."""
    within: float = field(default=0.0, kw_only=True)
    """How far off it may be, as a share of the truth; 0: equal."""
    mistakes: Callable[[Any], Mapping[float, str]] = field(default=lambda truth: {}, kw_only=True)
    """From the truth to wrong numbers one can foresee, and what is wrong with each."""

    def judge(self, answer: Any) -> Verdict:
        number = parse_bytes(answer) if isinstance(answer, str) and self.unit == "bytes" else answer
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            return Verdict(False, f"the answer is a number of {self.unit}, got {answer!r}.")
        number = operator.index(number) if isinstance(number, Integral) else float(number)  # NumPy's and pandas' too
        truth = self._truth()
        bars, given = (("yours", number), ("as it is", truth)), _shown(number, self.unit)
        if abs(number - truth) <= self.within * abs(truth):
            exact = "equal" if number == truth else f"within {self.within:.0%}"
            return Verdict(True, f"{given}, {exact}.", bars=bars, unit=self.unit)
        how = f"{number / truth:.3g} times what it is" if truth else "and it is none"
        close = " (close, and not equal)" if truth and 0.995 < number / truth < 1.005 else ""
        known = next((text for wrong, text in self.mistakes(truth).items() if abs(number - wrong) <= self.within * abs(wrong)), "")
        return Verdict(False, f"{given} is {how}{close}.", known, bars, unit=self.unit, hidden=("as it is",))

    def _truth(self) -> float:
        return _once(self.id, self.truth)


@dataclass(frozen=True)
class FindRecipe(Exercise):
    """A recipe that meets a target and keeps what must stay."""

    task: Callable[[], Task] = field(kw_only=True)
    """What is trained."""
    plain: Recipe = field(kw_only=True)
    """The recipe to start from: its effective batch and its fields in ``keep`` stay."""
    keep: tuple[str, ...] = field(default=("precision", "optimizer"), kw_only=True)
    gpu: str | None = field(default=None, kw_only=True)
    """Planned for this card; None: trained here on the CPU for two steps, and the loss must stay the same."""
    target: int | str | None = field(default=None, kw_only=True)
    """Peak bytes at the most, reserved on a card and allocated on the CPU; None: what the card leaves for PyTorch."""
    in_use: str = field(default="0", kw_only=True)
    """What others hold of the card."""

    def judge(self, answer: Any) -> Verdict:
        if not isinstance(answer, Recipe):
            return Verdict(False, f"write a vl.Recipe(...), got {type(answer).__name__}.")
        for name in self.keep:
            if getattr(answer, name) != getattr(self.plain, name):
                return Verdict(False, f"{name} stays {getattr(self.plain, name)!r}, yours has {getattr(answer, name)!r}; change the rest.")
        batch, wanted = _effective_batch(answer), _effective_batch(self.plain)
        if batch != wanted:
            several = " * data-parallel ranks" if max(answer.ranks, self.plain.ranks) > 1 else ""
            return Verdict(False, f"micro_batch * accumulation{several} stays {wanted}, yours has {batch}; change the rest.")
        target = parse_bytes(self.target) if self.target is not None else self._card().left_for_pytorch(parse_bytes(self.in_use))
        plain, loss = _once(self.id, lambda: self._needs(self.plain))
        peak, yours = self._needs(answer) if answer != self.plain else (plain, loss)
        bars = (("yours", peak), ("without changes", plain))
        if abs(yours - loss) > 1e-3:
            return Verdict(False, f"the loss is {yours:.4f} after a step, without your changes {loss:.4f}.", bars=bars, target=target)
        what = "reserved" if self.gpu else "allocated"
        found = f"peak {format_bytes(peak)} {what}, target {format_bytes(target)}, without your changes {format_bytes(plain)}"
        found = f"{found}." if self.gpu else f"{found}; same loss."
        return Verdict(peak <= target, found, bars=bars, target=target, blank=answer == self.plain)

    def _card(self) -> GPU:
        return gpu(self.gpu)

    def _needs(self, recipe: Recipe) -> tuple[int, float]:
        """Peak bytes, and the loss after a step, which a plan does not have."""
        if self.gpu is not None:
            return plan(self.task(), recipe, self._card(), self.in_use).reserved, 0.0
        trained = run(self.task(), recipe, steps=2, device="cpu", progress=False)  # a card would add its workspaces
        return trained.peak or 0, trained.losses[1]


def _effective_batch(recipe: Recipe) -> int:
    return recipe.micro_batch * recipe.accumulation * (recipe.ranks // recipe.stages)


@dataclass(frozen=True)
class Write(Exercise):
    """A function to write, compared with a plain one."""

    plain: Callable[..., Any] = field(kw_only=True)
    """The same results, in the obvious way."""
    cases: Callable[[], Sequence[tuple[Any, ...]]] = field(kw_only=True)
    """Makes the arguments of each call anew, with torch's random numbers from the same seed. A model among them is trained in
    the call: its gradients and parameters are compared as well."""
    target: int | str | None = field(default=None, kw_only=True)
    """Bytes above what it was given that a call and its backward may hold at the peak, on the CPU; None: any number."""
    tolerance: float = field(default=1e-4, kw_only=True)
    """How far floating-point results may be apart, relative and absolute; whole numbers are equal."""

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"write a function, got {type(answer).__name__}.")
        yours, plain = _Calls(answer, self.cases), _once(self.id, lambda: _Calls(self.plain, self.cases))
        for given, right, case in zip(yours.results, plain.results, plain.given, strict=True):
            if _blank(given) and not _blank(right):
                return Verdict(False, "fill in the missing lines.", blank=True)
            if difference := _difference(given, right, self.tolerance):
                bars = _two(given, right) if self.target is None else (("yours", yours.peak), ("the plain way", plain.peak))
                return Verdict(False, f"for {case} {difference}.", bars=bars)
        for what in ("gradients", "parameters"):
            if difference := _difference(getattr(yours, what), getattr(plain, what), self.tolerance):
                return Verdict(False, f"the results are right; of the {what} {difference}.")
        if self.target is None:
            return Verdict(True, f"right in {len(yours.results)} cases.")
        target = parse_bytes(self.target)
        found = f"right, peak {format_bytes(yours.peak)}, target {format_bytes(target)}, the plain way {format_bytes(plain.peak)}"
        return Verdict(yours.peak <= target, f"{found}.", bars=(("yours", yours.peak), ("the plain way", plain.peak)), target=target)


class _Calls:
    """A function called with each case: results, gradients and parameters afterwards, and the highest peak above what it was given."""

    def __init__(self, function: Callable[..., Any], cases: Callable[[], Sequence[tuple[Any, ...]]]) -> None:
        self.given: list[str] = []
        self.results: list[Any] = []
        self.gradients: list[Any] = []
        self.parameters: list[Any] = []
        self.peak = 0
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for arguments in cases():
                self.given.append(", ".join(map(_argument, arguments)))
                model = next((a for a in arguments if isinstance(a, nn.Module)), None)
                leaves = [t for t in tensors_in(arguments) if t.requires_grad and t.is_leaf] + list(model.parameters() if model else ())
                with record(model, device="cpu") as trace:
                    result = function(*arguments)
                    if isinstance(result, torch.Tensor) and result.requires_grad:
                        result.sum().backward()
                self.results.append(result.detach() if isinstance(result, torch.Tensor) else result)
                self.gradients += [t.grad for t in leaves]
                self.parameters += [t.detach() for t in leaves]
                self.peak = max(self.peak, trace.peak - trace.baseline)


def _difference(given: Any, right: Any, tolerance: float) -> str:
    """What differs, in words; empty if nothing does."""
    if isinstance(right, torch.Tensor):
        if not isinstance(given, torch.Tensor):
            return f"yours is {given!r}, and it is a tensor"
        if given.shape != right.shape:
            return f"yours has shape {tuple(given.shape)}, right is {tuple(right.shape)}"
        if not torch.allclose(given.double(), right.double(), tolerance, tolerance, equal_nan=True):
            return f"yours is off by {(given.double() - right.double()).abs().max().item():.3g} at the most"
        return ""
    if isinstance(right, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(right):
            return f"yours is {given!r}, and there are {len(right)} values"
        return next(filter(None, (_difference(a, b, tolerance) for a, b in zip(given, right, strict=True))), "")
    if isinstance(right, float) and isinstance(given, int | float):
        return "" if math.isclose(given, right, rel_tol=tolerance, abs_tol=tolerance) else f"yours is {given:,}, right is {right:,}"
    if right is None and isinstance(given, torch.Tensor):  # a gradient, and the plain way has none
        return "yours is a tensor, and there is none"
    if given != right:
        shown = [f"{value:,}" if isinstance(value, int) else repr(value) for value in (given, right)]
        return f"yours is {shown[0]}, right is {shown[1]}"
    return ""


def _two(given: Any, right: Any) -> tuple[tuple[str, float], ...]:
    numbers = isinstance(given, int | float) and isinstance(right, int | float)
    return (("yours", given), ("right", right)) if numbers else ()


def _argument(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)


def _once(id: str, ask: Callable[[], Any]) -> Any:  # noqa: A002
    if id not in _known:
        _known[id] = ask()
    return _known[id]


_known: dict[str, Any] = {}  # what exercises compare with, by exercise
