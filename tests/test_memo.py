"""Results that are used again only while nothing has changed that they depend on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vramlab as vl
from vramlab.gpus import gpu
from vramlab.planning import Plan
from vramlab.virtual.memo import KEPT, Memo, files_read, watching

CARD = gpu("RTX 4090")


@dataclass
class Holder:
    card: Any


def counted(read: Callable[[Any], Any] = lambda card: None) -> tuple[Callable[[dict[str, Any]], int], list[int]]:
    """A function that counts its calls and reads something of a card."""
    calls: list[int] = []

    def compute(asked: dict[str, Any], card: Any = CARD) -> int:
        calls.append(len(calls))
        holder = Holder(card)
        with watching(holder, "card", asked):
            read(holder.card)
        assert holder.card is card
        return len(calls)

    return compute, calls


def test_a_result_is_computed_once_for_a_key() -> None:
    memo, (compute, calls) = Memo(), counted()
    assert [memo.get(key, CARD, compute) for key in ("a", "a", "b", "a")] == [1, 1, 2, 1]
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("read", "change", "same"),
    [
        (lambda card: card.capability, {"memory": "1 GiB", "name": "other"}, True),
        (lambda card: card.capability, {"capability": (9, 0)}, False),
        (lambda card: card.supports_bf16, {"capability": (9, 0)}, False),
        (lambda card: card.left_for_pytorch(0), {"memory": "20 GiB"}, False),
        (lambda card: card.left_for_pytorch(0), {"sms": 1}, True),
        (str, {"name": "other"}, False),
        (lambda card: None, {"name": "other", "memory": "1 GiB", "sms": 3}, True),
    ],
)
def test_another_card_is_as_good_if_it_is_the_same_in_what_was_asked(read: Any, change: dict[str, Any], same: bool) -> None:
    memo, (compute, calls) = Memo(), counted(read)
    memo.get("k", CARD, compute)
    memo.get("k", CARD.with_(**change), compute)
    memo.get("k", CARD, compute)  # the first is still there
    assert len(calls) == (1 if same else 2)


def test_the_last_used_results_are_kept() -> None:
    memo, (compute, calls) = Memo(kept=2), counted()
    for key in ("a", "b", "a", "c", "a", "b"):
        memo.get(key, CARD, compute)
    assert len(memo) == 2
    assert len(calls) == 4  # a, b, c, and b again
    many = Memo()
    for key in range(3 * KEPT):
        many.get(key, CARD, compute)
    assert len(many) == KEPT


READERS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: path.read_text(),
    "bytes": lambda path: open(os.fsencode(path), "rb").close(),
    "os.open": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "listdir": lambda path: os.listdir(path.parent),
    "scandir": lambda path: list(os.scandir(path.parent)),
}


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("what", ["written", "replaced", "left alone"])
def test_a_result_made_of_files_ends_when_they_change(how: str, what: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text("{}")
    memo, calls = Memo(), []

    def compute(asked: dict[str, Any]) -> None:
        calls.append(1)
        READERS[how](path)

    memo.get("k", CARD, compute)
    if what == "written":
        path.write_text("{'layers': 3}")
        (folder / "another").write_text("")
    elif what == "replaced":
        path.rename(tmp_path / "elsewhere")
        path.write_text("{}, again")
    memo.get("k", CARD, compute)
    assert len(calls) == (1 if what == "left alone" else 2)


def test_a_file_that_was_missed_counts(tmp_path: Path) -> None:
    memo, found = Memo(), []

    def compute(asked: dict[str, Any]) -> None:
        try:
            found.append((tmp_path / "config.json").read_text())
        except FileNotFoundError:
            found.append("none")

    memo.get("k", CARD, compute)
    (tmp_path / "config.json").write_text("new")
    memo.get("k", CARD, compute)
    assert found == ["none", "new"]


def test_what_changes_its_own_files_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_text("0")
    memo = Memo()

    def compute(asked: dict[str, Any]) -> int:
        count = int(path.read_text()) + 1
        path.write_text(str(count) * count)
        return count

    assert memo.get("k", CARD, compute) == 1
    assert len(memo) == 0


def test_files_that_are_written_are_not_read(tmp_path: Path) -> None:
    with files_read() as files:
        (tmp_path / "log").write_text("x")
        os.close(os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT))
        with files_read() as inner:
            READERS["listdir"](tmp_path / "x")
        READERS["open"](Path(os.devnull))
    assert list(files) == []
    assert list(inner) == [str(tmp_path)]
    READERS["listdir"](tmp_path / "x")
    assert list(files) == []


def test_a_failure_is_not_kept_and_ends_the_watching(tmp_path: Path) -> None:
    memo, holder = Memo(), Holder(CARD)

    def compute(asked: dict[str, Any]) -> None:
        with watching(holder, "card", asked):
            raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            memo.get("k", CARD, compute)
    assert holder.card is CARD
    assert len(memo) == 0
    assert memo.get("k", CARD, lambda asked: 5) == 5


# Plans


def task(width: int = 64, asks: bool = False, config: Path | None = None) -> vl.Task:
    def model() -> nn.Module:
        return nn.Linear(width if config is None else int(config.read_text()), 8)

    def batch(size: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, width if config is None else int(config.read_text())).to(device)

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if asks:  # a thousandth of the card
            x = x + torch.empty(torch.get_device_module(x.device).mem_get_info()[1] // 1000, dtype=torch.uint8, device=x.device)[0]
        return model(x).sum(), len(x)

    return vl.Task(model, batch, loss)


def planned(made: vl.Task, card: Any = CARD, **options: Any) -> Plan:
    return vl.plan(made, vl.Recipe(**options), card)


def test_a_plan_that_was_made_before_is_not_traced_again() -> None:
    first = planned(task())
    smaller = CARD.with_(name="mine", memory="2 GiB")
    for again in (planned(task()), planned(task(), precision="tf32"), planned(task(), smaller), planned(task(), loss_scale=2.0)):
        assert again.seconds == first.seconds
        assert (again.allocated, again.reserved) == (first.allocated, first.reserved)
    assert planned(task(), smaller).trace.device == str(smaller)
    assert planned(task(), precision="tf32").recipe.precision == "tf32"
    for other in (planned(task(), micro_batch=3), planned(task(), "H100 80GB SXM"), planned(task(65))):
        assert other.seconds != first.seconds


def test_what_a_task_holds_is_part_of_it() -> None:
    wide = [64]
    made = vl.Task(lambda: nn.Linear(wide[0], 8), lambda n, device: torch.zeros(n, wide[0]).to(device), lambda m, x: (m(x).sum(), len(x)))
    first = planned(made)
    wide[0] = 640
    assert planned(made).trace.breakdown("step").parameters == 10 * first.trace.breakdown("step").parameters - 9 * 8 * 4


def test_code_that_asks_for_the_cards_memory_is_planned_for_each_card() -> None:
    small, large = (planned(task(asks=True), CARD.with_(memory=f"{n} GiB")).trace.peak for n in (4, 16))
    assert large - small == pytest.approx(12 * 2**30 / 1000, rel=0.01)


def test_a_file_that_a_model_is_made_from_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    config = tmp_path / "width"
    config.write_text("100")
    first, again = (planned(task(config=config)) for _ in range(2))
    assert again.seconds == first.seconds
    config.write_text("1000")
    parameters = [plan.trace.breakdown("step").parameters for plan in (first, planned(task(config=config)))]
    assert parameters == [4 * 8 * 101, 4 * 8 * 1001]
