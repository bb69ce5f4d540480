"""What a notebook shows of every result: well-formed, and readable on the light and the dark theme."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vramlab as vl
from vramlab.experiments import Comparison, Run
from vramlab.gpus import gpu
from vramlab.memory.alive import Alive, Living
from vramlab.memory.cell import CellMemory
from vramlab.memory.free import Freed, Holder
from vramlab.memory.report import Change, OutOfMemoryReport
from vramlab.memory.trace import Category, DeviceCounters, Events, MemoryBreakdown, MemoryTrace, Phase
from vramlab.notebook.exercises import Verdict
from vramlab.planning import LawCurve, LawPoint, Plan
from vramlab.training import StepReport
from vramlab.virtual.traffic import Call, Communication

TASK = vl.Task(lambda: nn.Linear(2, 2), lambda n, d: torch.randn(n, 2), lambda m, b: (m(b).sum(), len(b)), "rows", "a < b task")
CARD = gpu("RTX 3060")
N = len(Category)
COLUMNS = np.arange(N), np.full(N, 3 << 30), np.arange(N, dtype=np.int8), np.full(N, Phase.FORWARD), np.zeros(N, np.int32)
EVENTS = Events(
    COLUMNS[0], COLUMNS[1], COLUMNS[2], COLUMNS[4], COLUMNS[3], COLUMNS[4], ("m<0>",), ("aten::mm",), line=COLUMNS[4], lines=("a<b>.py:3",)
)
TRACE = MemoryTrace(EVENTS, "cuda:0", DeviceCounters(5, 6, 7))
PLAN = Plan(TASK, vl.Recipe(), CARD, 1 << 30, 5, 3, TRACE, {"a<b>.py:4": 2}, ["a < b"], 1.0)
RUN = Run(TASK, vl.Recipe(), CARD, [StepReport(1, 1.0, 0.5, 3.0, TRACE)], "ValueError: a < b")
REPORT = OutOfMemoryReport("a < b", 5, 6, 100, 50, 60, "aten::mm", TRACE, 3, lambda: [Change("a < b", {}, 1, 2, True)])

RESULTS = [
    TRACE,
    TRACE.breakdown(),
    MemoryBreakdown(),
    TRACE.breakdown() - MemoryBreakdown(inputs=9 << 30),
    PLAN,
    LawCurve(PLAN, [LawPoint(1, 5, 6, True, True), LawPoint(2, 50, 60, False, False)]),
    RUN,
    Run(TASK, vl.Recipe(), CARD, [], "ValueError: a < b"),
    Comparison([RUN, RUN]),
    REPORT,
    Freed("cpu", 9, 4, (Holder("a < b", "C", 3),), ("a < b",), (5, 6)),
    Alive("cpu", 9, 5, (Living("a < b", "float32 (3,)", 4, "a < b", ("c",)),)),
    CellMemory("cpu", TRACE, 1, 2, 3, 4, CARD, reads={"a<b>": 1}, notes=["a < b"], stayed={"x": "a < b"}, error="a < b"),
    CellMemory("cpu", MemoryTrace(lambda: TRACE.events), 1, 2, 3),
    Communication((Call("all-reduce", 2, 5),)),
    Verdict(True, "a < b"),
    Verdict(False, "a < b", "a < b", (("a < b", 3.0),), 4.0),
]


class Reader(HTMLParser):
    """The tags that are open, the text, and every style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.stack.append(tag)
        self.styles += [value for name, value in attrs if name == "style"]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def contrast(one: str, other: str) -> float:
    """Of two colours, 1 to 21: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""

    def luminance(color: str) -> float:
        digits = "".join(2 * c for c in color[1:]) if len(color) == 4 else color[1:]
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


THEMES = ["#ffffff", "#111111"]  # the backgrounds of JupyterLab's two


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_html_is_well_formed_escaped_and_readable_on_both_themes(result: Any) -> None:
    reader = Reader(result._repr_html_())
    assert reader.stack == []
    assert reader.text
    for style in reader.styles:
        for color in re.findall(r"(?<![-\w])color:\s*([^;]+)", style):
            assert re.fullmatch(r"#[0-9A-Fa-f]{6}", color), f"text of colour {color} may vanish"
            assert min(contrast(color, theme) for theme in THEMES) >= 3, color
        for line in re.findall(r"(?:border|outline)[-\w]*:\s*([^;]+)", style):
            assert "currentColor" in line or re.search(r"#009E73|#D55E00", line), line


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_every_bar_says_its_number_in_words(result: Any) -> None:
    """Colour and length alone tell nothing to who cannot see them."""
    reader = Reader(result._repr_html_())
    bars = [style for style in reader.styles if "background" in style and "width" in style]
    assert not bars or re.search(r"\d (B|KiB|MiB|GiB)", reader.text)


def test_every_result_that_shows_itself_is_tested_here() -> None:
    """A class with a ``_repr_html_`` of its own, anywhere in the package, stands in RESULTS."""
    names = [
        m.name for m in pkgutil.walk_packages(vl.__path__, "vramlab.") if not re.search(r"__main__|notebook\.course|virtual\.", m.name)
    ]
    classes = {
        thing
        for name in names
        for thing in vars(importlib.import_module(name)).values()
        if inspect.isclass(thing) and thing.__module__.startswith("vramlab") and "_repr_html_" in vars(thing)
    }
    assert len(classes) >= 11
    missing = sorted(c.__name__ for c in classes - {type(result) for result in RESULTS})
    assert missing == []
