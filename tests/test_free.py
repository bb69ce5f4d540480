"""free(): memory comes back after an error without a restart, and what is left has a name."""

from __future__ import annotations

import gc
import json
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vramlab as vl
from vramlab.memory import free as module
from vramlab.memory.free import Freed, Holder, free, release
from vramlab.units import KiB, MiB

KEPT: list[torch.Tensor] = []


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The user's variables, without those of the test runner."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    yield vars(main)
    vars(main).clear()
    KEPT.clear()


def taken(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def by_name(report: Freed) -> dict[str, int]:
    return {holder.name: holder.nbytes for holder in report.holders if holder.name != "others"}


# What it lets go of


def fail() -> None:
    activations = taken(9 * MiB)
    raise ValueError(f"{activations.nbytes} bytes")


@pytest.fixture
def last_error(space: dict[str, Any]) -> Iterator[None]:
    """As after an error that nobody caught, at a prompt."""
    try:
        fail()
    except ValueError as error:
        sys.last_exc = sys.last_value = error  # type: ignore[attr-defined]
        sys.last_type, sys.last_traceback = type(error), error.__traceback__
    yield
    for name in ("last_exc", "last_value", "last_type", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)


@pytest.mark.usefixtures("last_error")
def test_the_last_error_and_the_variables_of_its_functions_go() -> None:
    report = free()
    assert report.freed >= 9 * MiB
    assert report.dropped == ("the last error (ValueError)",)
    assert not any(hasattr(sys, name) for name in ("last_exc", "last_value", "last_type", "last_traceback"))


def test_without_an_error_nothing_is_let_go_of(space: dict[str, Any]) -> None:
    report = free()
    assert report.dropped == ()
    assert "Let go" not in repr(report)


def test_an_error_that_is_being_handled_is_the_users(space: dict[str, Any]) -> None:
    seen: list[set[str]] = []
    try:
        fail()
    except ValueError as error:
        sys.last_exc, sys.last_traceback = error, error.__traceback__  # type: ignore[attr-defined]
        free()
        seen.append(set(error.__traceback__.tb_next.tb_frame.f_locals))  # type: ignore[union-attr]
    assert seen == [{"activations"}]


def test_causes_and_contexts_are_released_too_even_in_a_circle() -> None:
    def chain() -> BaseException:
        try:
            try:
                fail()
            except ValueError as inner:
                raise KeyError("outer") from inner
        except KeyError as outer:
            return outer

    error = chain()
    assert error.__cause__ is not None
    error.__cause__.__context__ = error  # Python itself never builds a circle, libraries do
    frame = error.__cause__.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
    assert "activations" in frame.f_locals
    release(error)
    assert frame.f_locals == {}


def test_what_a_failed_backward_left_in_autograds_queue_goes(space: dict[str, Any]) -> None:
    seen: list[Any] = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            raise ValueError("no")

    def step() -> None:
        x = torch.zeros(1000, requires_grad=True)
        y = x.exp()
        seen.append(weakref.ref(y.untyped_storage()))
        (Fails.apply(x * 2).sum() + y.sum()).backward()

    with pytest.raises(ValueError, match="no") as caught:
        step()
    del caught
    free()
    assert seen[0]() is None


def test_garbage_in_cycles_goes(space: dict[str, Any]) -> None:
    cycle: list[Any] = [taken(3 * MiB)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert free().freed >= 3 * MiB
    finally:
        gc.enable()


# Who holds the rest


def test_variables_are_named_largest_first_and_a_models_parameters_are_the_models(space: dict[str, Any]) -> None:
    model = nn.Linear(1024, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(4, 1024)).sum().backward()
    optimizer.step()
    space |= {"aaa_optimizer": optimizer, "model": model, "batch": taken(KiB), "view": model.weight[0], "number": 5}
    del model, optimizer
    report = free()
    assert by_name(report) == {"model": 2 * MiB, "aaa_optimizer": 2 * MiB + 4, "batch": KiB}
    assert [h.name for h in report.holders if h.name != "others"] == ["aaa_optimizer", "model", "batch"]
    assert {h.name: h.kind for h in report.holders}["model"] == "Linear"
    assert sum(h.nbytes for h in report.holders) == report.after
    assert report.named == 4 * MiB + 4 + KiB


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(16, 16, bias=False)
        self.history = [taken(KiB), {"last": taken(KiB)}]
        self.callback = lambda: self.model


def test_attributes_and_items_are_named_one_level_down(space: dict[str, Any]) -> None:
    space["trainer"] = Trainer()
    space["results"] = {"first": taken(100), 2: (taken(10), taken(10))}
    space["plain"] = [taken(7)]
    assert by_name(free()) == {
        "trainer.model": 1024,
        "trainer.history": 2 * KiB,
        "results['first']": 100,
        "results[2]": 20,
        "plain": 7,
    }


def test_closures_generators_and_bound_methods_hold_too(space: dict[str, Any]) -> None:
    def closure() -> Any:
        inner = taken(11)
        return lambda: inner

    def generator() -> Iterator[int]:
        inner = taken(12)
        yield 1
        yield inner.nbytes

    space |= {"closure": closure(), "generator": generator(), "method": Trainer().history[0].sum}
    next(space["generator"])
    assert by_name(free()) == {"closure": 11, "generator": 12, "method": KiB}


def test_a_loss_holds_its_graph(space: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid(), nn.Sigmoid())
    space |= {"model": model, "loss": model(torch.zeros(16, 64)).sum()}
    del model
    assert by_name(free()) == {"model": 64 * 64 * 4, "loss": 4 + 3 * 16 * 64 * 4}  # the input, and what both sigmoids return


def test_nothing_is_recomputed_or_unpacked_to_be_counted(space: dict[str, Any]) -> None:
    ran: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.sigmoid()

    x = torch.zeros(16, requires_grad=True)
    space["out"] = checkpoint(block, x, use_reentrant=False)
    free()
    assert ran == [1]


def test_what_no_variable_leads_to_is_called_others_with_what_holds_it(space: dict[str, Any]) -> None:
    before = sum(h.nbytes for h in free().holders if h.name == "others")
    KEPT.append(taken(64 * MiB))
    (others,) = [h for h in free().holders if h.name == "others"]
    assert others.nbytes - before == 64 * MiB
    assert others.kind.startswith("held by a list")


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (lambda: setattr(sys.modules[__name__], "HIDDEN", taken(80 * MiB)), f"module {__name__}"),
        (lambda: KEPT.append({"x": taken(80 * MiB)}), "a dict"),  # type: ignore[arg-type]
    ],
)
def test_a_module_or_a_dict_is_named_as_what_holds_it(space: dict[str, Any], hold: Any, words: str) -> None:
    hold()
    (others,) = [h for h in free().holders if h.name == "others"]
    vars(sys.modules[__name__]).pop("HIDDEN", None)
    assert words in others.kind


def test_a_search_without_time_calls_all_of_it_others(space: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", -1)
    space["batch"] = taken(MiB)
    report = free()
    assert by_name(report) == {}
    (others,) = report.holders
    assert others == Holder("others", "held below Python, or not found in time", report.after)


def test_storages_count_once_and_other_devices_do_not(space: dict[str, Any]) -> None:
    base = taken(MiB)
    space |= {"base": base, "half": base[: MiB // 2], "meta": torch.empty(MiB, device="meta")}
    del base
    assert by_name(free()) == {"base": MiB}


def test_variables_stay(space: dict[str, Any]) -> None:
    space |= {"batch": taken(10), "_private": taken(20), "__dunder__": taken(30)}
    names = set(space)
    assert by_name(free()) == {"batch": 10, "_private": 20}
    assert set(space) == names


# How it says so


def test_the_report_in_words() -> None:
    report = Freed("CUDA", 5 * MiB, 2 * MiB, tuple(Holder(f"<v{i}>", "Tensor", KiB) for i in range(12)), ("a", "b"), (8 * MiB, 4 * MiB))
    lines = repr(report).splitlines()
    assert lines[:4] == [
        "3.00 MiB freed on CUDA: 5.00 MiB were held, 2.00 MiB are.",
        "Reserved by PyTorch: 8.00 MiB before, 4.00 MiB now.",
        "Let go of: a, b.",
        "Still held, until you del it or let it go:",
    ]
    assert lines[4:] == [*(f"     1.00 KiB  <v{i}> (Tensor)" for i in range(10)), "     2.00 KiB  2 smaller ones"]
    shown = report._repr_html_()
    assert "3.00 MiB freed on CUDA" in shown
    assert "&lt;v0&gt; (Tensor)" in shown
    assert "2 smaller ones" in shown
    assert "table" not in Freed("cpu", 1, 0, (), ())._repr_html_()


# On CUDA


def test_on_cuda_the_allocators_own_bytes_are_reported(space: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    held, log = {0: 50, 1: 7}, []
    stubs = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "memory_allocated": lambda index: held[index],
        "memory_reserved": lambda index: 100 * held[index],
        "empty_cache": lambda: log.append("cache"),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)

    def clear() -> None:
        log.append("workspaces")
        held[0] = 20

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    space["on_the_cpu"] = taken(10)
    report = free()
    assert (report.device, report.before, report.after, report.reserved) == ("CUDA", 57, 27, (5700, 2700))
    assert report.holders == (Holder("others", "held below Python, or not found in time", 27),)
    assert log == ["workspaces", "cache"]  # workspaces are blocks that are cached then


# In a notebook

CELLS = [
    "import torch, vramlab as vl\ntorch.set_num_threads(1)\nmodel = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])",
    "def step(batch):\n    x = torch.randn(batch, 1024)\n    return model(x).relu().sum()",
    "torch.zeros(1000, 1000)",
    "x = torch.zeros(10)\n[x]",
    "with vl.budget('64 MiB', model):\n    loss = step(64)\n    loss.backward()\n    step(5000)",
    "report = vl.free()\nreport",
    "import json\nprint(json.dumps([report.before, report.after, report.named, report.dropped, [h.name for h in report.holders]]))",
    "print(repr(_), len(Out), 'x' in globals())",
    "5",
    "print(_)",
]


def test_in_a_notebook_all_but_named_bytes_come_back_after_an_out_of_memory_error() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
    failed = [cell.outputs[-1].ename for cell in notebook.cells if cell.outputs and cell.outputs[-1].output_type == "error"]
    assert failed == ["OutOfBudgetError"]
    assert "html" in str(notebook.cells[5].outputs[0].data.keys())
    before, after, named, dropped, names = json.loads(notebook.cells[6].outputs[0].text)
    parameters = 4 * (1024 * 1024 + 1024) * 4
    assert names == ["model", "x", "loss"]  # and no others
    assert after == named
    assert parameters * 2 <= after <= parameters * 2 + MiB  # with gradients; the graph of the loss was released by backward
    assert before - after >= 4 * (5000 * 1024 + 1000 * 1000)  # the batch that the function of the last error held, and an output
    assert dropped == ["2 outputs (Out[3], Out[4])", "the last error (OutOfBudgetError)"]
    assert notebook.cells[7].outputs[0].text.split()[-1] == "True"  # a variable stays
    assert notebook.cells[9].outputs[0].text == "5\n"  # the history goes on


def test_the_name_is_public() -> None:
    assert vl.free is free
