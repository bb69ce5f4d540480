"""Notebook 12: each of the article's 42 claims has the verdict it was given, in every place, and evidence in a cell."""

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "notebooks" / "12_claims_checked.ipynb"
CELLS: list[dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))["cells"]

VERDICTS = {
    "right": {1, 2, 3, 8, 10, 13, 18, 19, 23, 25, 28, 29, 33, 36, 37, 42},
    "imprecise": {5, 6, 11, 15, 17, 21, 24, 31, 35, 38, 41},
    "depends": {4, 16, 30},
    "wrong": {7, 9, 12, 14, 20, 22, 26, 27, 32, 34, 39, 40},
}
VERDICT = {number: verdict for verdict, numbers in VERDICTS.items() for number in numbers}
NUMBERS = range(1, 43)
SAMPLES = {14, 22, 32}
SECTIONS = {"The introduction": 1, "Section 1": 5, "Section 2": 15, "Section 3": 23, "Section 4": 33, "The conclusion": 39}
"""The first claim of each of the article's sections."""


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


PROSE, CODE = "\n\n".join(sources("markdown")), sources("code")
PARTS = re.split(r"^(?=##)", PROSE, flags=re.MULTILINE)
CLAIMS = {int(match[1]): (match[2], part) for part in PARTS if (match := re.match(r"### C(\d+) · (\w+)\n", part))}
ROWS = [[column.strip() for column in line.strip("|").split("|")] for line in PROSE.splitlines() if re.match(r"\| C\d", line)]


def marked(cell: dict[str, Any]) -> set[int]:
    """The claims that a cell's first line names: ``# C7`` or ``# C16, C18: the rest``."""
    first = re.match(r"# (C\d+(?:, C\d+)*)(?=:|\n)", "".join(cell["source"]))
    return {int(number) for number in re.findall(r"\d+", first[1])} if first else set()


def with_evidence() -> set[int]:
    """The claims with a cell whose output is compared."""
    ignored = {"nbval-ignore-output", "nbval-skip"}
    compared = [cell for cell in CELLS if cell.get("outputs") and not ignored & set(cell["metadata"].get("tags", []))]
    return set[int]().union(*map(marked, compared))


def test_the_table_of_verdicts_covers_each_claim_once() -> None:
    assert sorted(VERDICT) == list(NUMBERS)
    assert Counter(VERDICT.values()) == {"right": 16, "imprecise": 11, "depends": 3, "wrong": 12}
    assert {VERDICT[number] for number in SAMPLES} == {"wrong"}


@pytest.mark.parametrize("number", NUMBERS)
def test_each_claim_is_said_judged_and_corrected(number: int) -> None:
    verdict, part = CLAIMS[number]
    assert verdict == VERDICT[number]
    said = re.match(r"### .*\n\n\*(?:Said: |The \w+ code sample: )[^*]+\*", part)
    assert said
    assert len(part[said.end() :].split()) >= 8  # what holds


def test_no_claim_has_two_verdicts() -> None:
    headings = re.findall(r"^### C(\d+)", PROSE, flags=re.MULTILINE)
    assert sorted(map(int, headings)) == list(NUMBERS)


def test_claims_stand_in_the_sections_of_the_article() -> None:
    found = re.findall(r"^## (The introduction|Section \d|The conclusion)|^### C(\d+)", PROSE, flags=re.MULTILINE)
    section, sections = "", {}
    for heading, number in found:
        section = heading or section
        if number:
            sections[int(number)] = section
    assert sections == {number: max((s for s in SECTIONS if SECTIONS[s] <= number), key=SECTIONS.__getitem__) for number in NUMBERS}


def test_the_table_at_the_end_has_all_of_them_in_order() -> None:
    assert [row[0] for row in ROWS] == [f"C{number}" for number in NUMBERS]
    assert [row[2] for row in ROWS] == [VERDICT[number] for number in NUMBERS]
    assert all(len(row) == 4 and all(row) for row in ROWS)


def test_the_table_names_cells_that_there_are() -> None:
    named = {int(number) for row in ROWS for number in re.findall(r"cell C(\d+)", row[3])}
    assert named == set(NUMBERS) == set[int]().union(*map(marked, CELLS))


def test_the_verdicts_that_the_notebook_counts_are_the_same() -> None:
    (cell,) = [code for code in CODE if code.startswith("verdicts = {")]
    first = ast.parse(cell).body[0]
    assert isinstance(first, ast.Assign)
    assert {verdict: set(numbers) for verdict, numbers in ast.literal_eval(first.value).items()} == VERDICTS


def test_at_least_thirty_claims_have_a_cell_whose_output_is_compared() -> None:
    assert len(with_evidence()) >= 30


def test_each_wrong_claim_and_each_sample_has_one() -> None:
    assert VERDICTS["wrong"] | SAMPLES <= with_evidence()


@pytest.mark.parametrize("number", sorted(SAMPLES))
def test_a_sample_is_shown_failing_and_right(number: int) -> None:
    said = [name for name in ("first", "second", "third") if f"The {name} code sample" in CLAIMS[number][1]]
    assert said == [["first", "second", "third"][sorted(SAMPLES).index(number)]]
    assert sum(number in marked(cell) for cell in CELLS) >= 3
    assert "hat is right" in "\n".join([CLAIMS[number][1], *(code for code in CODE if code.startswith(f"# C{number}:"))])


def test_the_article_is_introduced() -> None:
    title = "VRAM optimisation: how an RTX 4090 supports the training of larger deep-learning models"
    assert f'The article is Chinese; its title says in English "{title}".' in PROSE
