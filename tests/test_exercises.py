"""Exercises accept the solution, and answer a blank or a wrong attempt with a hint and a picture, without raising."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solutions import SOLUTIONS, WRONG
from torch import nn

from vramlab import Recipe, tasks
from vramlab.memory.trace import MemoryBreakdown
from vramlab.notebook import exercises as module
from vramlab.notebook.exercises import Exercise, FindRecipe, Number, Verdict, Write, beside, check, exercises, find

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
COURSE = exercises()


@pytest.fixture(autouse=True)
def _as_in_a_new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tried", {})


# The course


def test_a_number_from_numpy_is_a_number_and_the_same_function_again_the_same_answer() -> None:
    number = Number("99.1", "five", minutes=1, truth=lambda: 5, hints=("count",))
    assert number.judge(np.int64(5)).solved
    assert number.judge(np.float64(5.0)).solved
    source = "def answer(x):\n    return sorted(x, key=lambda y: -y)"
    made = []
    for _ in range(2):
        space: dict[str, Any] = {}
        exec(source, space)
        made.append(module._key(space["answer"]))
    assert made[0] == made[1]


def test_the_course_has_exercises_each_with_a_solution_and_a_wrong_answer() -> None:
    ids = [exercise.id for exercise in COURSE]
    assert len(ids) >= 3
    assert ids == sorted(set(ids))
    assert sorted(SOLUTIONS) == ids == sorted(WRONG)
    assert all(WRONG.values())


@pytest.mark.parametrize("id", SOLUTIONS)
def test_the_solution_is_accepted(id: str) -> None:  # noqa: A002
    verdict = check(id, SOLUTIONS[id])
    assert verdict.solved, verdict
    assert "Hint" not in repr(verdict)
    assert "solved" in verdict._repr_html_()


@pytest.mark.parametrize("id", SOLUTIONS)
@pytest.mark.parametrize("blank", [None, ...])
def test_a_blank_says_the_task_and_the_first_hint(id: str, blank: Any) -> None:  # noqa: A002
    exercise, verdict = find(id), check(id, blank)
    assert repr(verdict) == f"not yet: {exercise.question}\nHint: {exercise.hints[0]}"


@pytest.mark.parametrize(("id", "answer", "said"), [(name, *pair) for name, pairs in WRONG.items() for pair in pairs])
def test_a_wrong_answer_is_told_what_is_wrong_and_gets_a_hint(id: str, answer: Any, said: str) -> None:  # noqa: A002
    verdict = check(id, answer)
    assert not verdict.solved
    assert re.search(said, verdict.message), verdict
    assert verdict.hint in find(id).hints or verdict.hint


@pytest.mark.parametrize("id", SOLUTIONS)
@pytest.mark.parametrize("answer", [3, "three", lambda *args: "three", lambda: None, object(), float("nan"), True, [], nn.Linear(1, 1)])
def test_no_answer_raises(id: str, answer: Any) -> None:  # noqa: A002
    verdict = check(id, answer)
    assert not verdict.solved
    assert verdict.hint
    assert repr(verdict).startswith("not yet: ")
    assert verdict._repr_html_().startswith("<div")


def test_notebooks_check_the_exercises_there_are() -> None:
    asked = [
        number
        for path in NOTEBOOKS
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
        for number in re.findall(r"\bcheck\(\"(\d\d\.\d)\"", "".join(cell["source"]))
    ]
    assert asked == [exercise.id for exercise in COURSE]


def test_an_exercise_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^There is no exercise '99\.1'; there are 01\.1, 01\.2, 01\.3"):
        check("99.1", 3)


def test_an_exercise_without_a_hint_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Exercise 1 has at least one hint and takes at least a minute, got \(\) and 1\.$"):
        Number("1", "?", truth=lambda: 1, minutes=1, hints=())


# Each kind


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Exercise], Callable[[Any], Verdict]]]:
    """Makes an exercise the only one, and returns how to check it."""
    monkeypatch.setattr(module, "_known", {})

    def only(exercise: Exercise) -> Callable[[Any], Verdict]:
        monkeypatch.setattr(module, "exercises", lambda notebook="": [exercise])
        return lambda answer: check(exercise.id, answer)

    return only


def number(**changes: Any) -> Number:
    options: dict[str, Any] = {
        "truth": lambda: 3 << 20,
        "mistakes": lambda truth: {truth // 3: "There are three of them."},
        "minutes": 1,
        "hints": ("one", "two", "three"),
    }
    return Number("77.1", "How many bytes?", **options | changes)


@pytest.mark.parametrize("answer", [3 << 20, 3.0 * 2**20, "3 MiB", "3,145,728"])
def test_a_number_may_be_given_in_any_form(course: Any, answer: Any) -> None:
    assert repr(course(number())(answer)) == "solved: 3.00 MiB, equal."


@given(st.integers(0, 10**13), st.integers(0, 10**13))
def test_a_number_is_right_only_if_it_is_equal_and_is_never_shown_before(truth: int, answer: int) -> None:
    verdict = _judged(truth, answer)
    assert verdict.solved == (truth == answer)
    if not verdict.solved and truth > 10**6 and abs(truth - answer) > truth / 50:
        assert f"{truth:,}" not in repr(verdict) + verdict._repr_html_()
        assert module.format_bytes(truth) not in repr(verdict) + verdict._repr_html_()


def _judged(truth: int, answer: int) -> Verdict:
    module._known.pop("77.1", None)
    return number(truth=lambda: truth, mistakes=lambda t: {}).judge(answer)


def test_a_number_within_its_tolerance_is_right(course: Any) -> None:
    ask = course(number(within=0.02, unit="times", truth=lambda: 100.0, mistakes=lambda truth: {}))
    assert repr(ask(101)) == "solved: 101 times, within 2%."
    assert repr(ask(103)) == "not yet: 103 times is 1.03 times what it is.\nHint: two"


def test_a_mistake_one_can_foresee_is_called_by_name(course: Any) -> None:
    ask = course(number())
    assert repr(ask(1 << 20)) == "not yet: 1.00 MiB is 0.333 times what it is.\nHint: There are three of them."
    assert "(close, and not equal)" in repr(ask((3 << 20) + 1))


@pytest.mark.parametrize(("answer", "said"), [("many", "A size is a number"), ([3], r"a number of bytes, got \[3\]"), (True, "got True")])
def test_what_is_no_number_is_said_to_be_none(course: Any, answer: Any, said: str) -> None:
    assert re.search(said, course(number())(answer).message)


def test_each_new_wrong_answer_gets_the_next_hint_and_the_same_one_the_same(course: Any) -> None:
    ask = course(number())
    assert [ask(answer).hint for answer in (None, 5, 5, None, 6, 7, 8)] == ["one", "two", "two", "two", "three", "three", "three"]


def test_a_function_that_is_defined_again_is_the_same_answer(course: Any) -> None:
    ask = course(write())
    hints = [ask(eval(f"lambda x: {body}", {})).hint for body in ("x + 1", "x + 1", "x + 2")]
    assert hints == ["second", "second", "third"]


def test_the_truth_is_asked_for_once(course: Any) -> None:
    asked: list[int] = []
    ask = course(number(truth=lambda: asked.append(1) or 7, mistakes=lambda truth: {}))
    assert [ask(n).solved for n in (6, 7, 8)] == [False, True, False]
    assert asked == [1]


def write(**changes: Any) -> Write:
    options: dict[str, Any] = {
        "plain": lambda x: x.exp().sum(),
        "cases": lambda: [(torch.linspace(0, 1, 1024, requires_grad=True),)],
        "minutes": 1,
        "hints": ("first", "second", "third"),
    }
    return Write("77.2", "Write it.", **options | changes)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: x.exp().sum(), "^right in 1 cases"),
        (lambda x: torch.logsumexp(x, 0).exp(), "^right in 1 cases"),
        (lambda x: None, "fill in the missing lines"),
        (lambda x: x.exp(), r"for a tensor of shape \(1024,\) yours has shape \(1024,\), right is \(\)"),
        (lambda x: 2 * x.exp().sum(), "yours is off by"),
        (lambda x: 3.0, "yours is 3.0, and it is a tensor"),
        (lambda x: x.exp().sum().detach() + 0 * x.sum(), "the results are right; of the gradients yours is off by"),
        (lambda x: x.exp().sum().detach(), "of the gradients yours is None, and it is a tensor|of the gradients"),
        (lambda: 3, "your answer ended with TypeError"),
        (lambda x: 1 / 0, r"your answer ended with ZeroDivisionError in line \d+ of <lambda>: division by zero"),
        (17, "write a function, got int"),
    ],
)
def test_a_function_is_compared_with_the_plain_one(course: Any, answer: Any, said: str) -> None:
    verdict = course(write())(answer)
    assert re.search(said, verdict.message), verdict
    assert verdict.solved == said.startswith("^right")


def test_a_function_has_to_stay_below_its_target(course: Any) -> None:
    def in_place(x: torch.Tensor) -> torch.Tensor:
        return sum(part.exp().sum() for part in x.split(128))  # type: ignore[return-value]

    x = lambda: [(torch.zeros(1024),)]  # noqa: E731
    ask = course(write(target=1000, cases=x))
    assert ask(in_place).solved
    wasteful = ask(lambda x: x.exp().sum())
    assert re.search(r"^right, peak 4\.0\d KiB, target 1000 B, the plain way 4\.0\d KiB\.$", wasteful.message)
    assert wasteful.bars[0][0] == "yours"
    assert wasteful.target == 1000


def test_a_function_that_trains_a_model_is_compared_by_its_parameters(course: Any) -> None:
    def step(model: nn.Module, lr: float) -> None:
        model(torch.ones(1, 3)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad

    ask = course(write(plain=lambda model: step(model, 0.1), cases=lambda: [(nn.Linear(3, 2),)]))
    assert ask(lambda model: step(model, 0.1)).solved
    assert "of the parameters yours is off by" in ask(lambda model: step(model, 0.2)).message
    assert "of the gradients" in ask(lambda model: None).message


def test_random_numbers_are_left_as_they_were(course: Any) -> None:
    before = torch.get_rng_state()
    course(write(cases=lambda: [(torch.randn(3),)]))(lambda x: torch.randn(3).sum())
    assert torch.equal(torch.get_rng_state(), before)


def recipe(**changes: Any) -> FindRecipe:
    options: dict[str, Any] = {
        "task": lambda: tasks.gpt("nano"),
        "plain": Recipe(micro_batch=8),
        "minutes": 1,
        "hints": ("first", "second"),
    }
    return FindRecipe("77.3", "Find it.", **options | changes)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (17, r"write a vl\.Recipe\(\.\.\.\), got int"),
        (Recipe(micro_batch=4), r"micro_batch \* accumulation stays 8, yours has 4"),
        (Recipe(parallel="ddp", ranks=2), r"accumulation \* data-parallel ranks stays 8, yours has 16"),
        (Recipe(precision="bf16"), "precision stays 'fp32', yours has 'bf16'"),
        (Recipe(optimizer="sgd"), "optimizer stays 'adamw', yours has 'sgd'"),
        (Recipe(), r"target 1\.00 MiB, without your changes 15\.05 MiB; same loss"),
        (Recipe(clip_norm=1e-6), "the loss is"),
    ],
)
def test_a_recipe_that_does_not_qualify_is_told_why(course: Any, answer: Any, said: str) -> None:
    verdict = course(recipe(target="1 MiB"))(answer)
    assert not verdict.solved
    assert re.search(said, verdict.message), verdict


def test_a_recipe_for_a_card_is_planned(course: Any) -> None:
    ask = course(recipe(gpu="RTX 3060", target="1 MiB", keep=()))
    plain = ask(Recipe(micro_batch=8))
    assert re.search(r"^peak .* MiB reserved, target 1\.00 MiB, without your changes .* MiB\.$", plain.message)
    assert dict(plain.bars)["yours"] == dict(plain.bars)["without changes"]
    assert plain.hint == "first"  # nothing was tried yet
    whole = course(recipe(gpu="RTX 3060"))(Recipe(micro_batch=8))
    assert whole.solved
    assert whole.target == pytest.approx(11.6 * 2**30, rel=0.05)


# What is shown


def test_a_verdict_shows_itself_with_escaped_text() -> None:
    verdict = Verdict(False, "3 < 4", "a & b", (("yours <", 3.0), ("right", 6.0)), target=4.0)
    text = verdict._repr_html_()
    assert "not yet</b> 3 &lt; 4<br><i>Hint: a &amp; b</i>" in text
    assert "yours &lt;" in text
    assert [float(width) for width in re.findall(r"width:([\d.]+)%", text)] == pytest.approx([100 * 3 / 6.3, 100 * 6 / 6.3], abs=0.01)
    assert text.count("dashed currentColor") == 2
    assert "dashed: target 4 B" in text
    assert repr(verdict) == "not yet: 3 < 4\nHint: a & b"
    assert "solved" in Verdict(True, "")._repr_html_()


def test_beside_lays_hand_and_measurement_next_to_each_other() -> None:
    table = beside({"parameters": 100, "optimizer state": 200}, MemoryBreakdown(parameters=100, optimizer_state=210))
    assert table.loc["optimizer state"].tolist() == [200, 210, 1.05]
    with pytest.raises(ValueError, match="A category is one of parameters, .* got 'weights'"):
        beside({"weights": 1}, MemoryBreakdown())
