"""Where recorded code is at a moment: its phase, its module, its operator."""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_right
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from vramlab.memory.trace import Phase


def users_line() -> str:
    """``file:line`` of the innermost code that runs and is neither torch's nor this package's machinery; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = _names.get(code)
        if name is None:
            name = _names[code] = _short_name(code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short_name(file: str) -> str:
    """A file as its reader knows it: relative to where it is imported from; empty for machinery."""
    if file.startswith(_MACHINERY):
        return ""
    path = Path(file)
    if path.parent.name.startswith("ipykernel_") or file.startswith("<ipython-input-"):
        return "notebook cell"
    homes = [home for home in (Path.cwd(), *map(Path, filter(None, sys.path))) if path.is_relative_to(home)]
    return str(path.relative_to(max(homes, key=lambda home: len(home.parts)))) if homes else file


_PACKAGE = Path(__file__).parents[1]
_MACHINERY = (
    f"{Path(torch.__file__).parent}{os.sep}",
    "<frozen",
    "<string>",
    *(str(_PACKAGE / part) for part in ("memory", "virtual", "training.py", "planning.py", "experiments.py")),
)
_names: dict[CodeType, str] = {}


def shown_operator(operator: object) -> str:
    """``aten::mm`` for ``aten.mm.default``."""
    return str(operator).replace("aten.", "aten::").removesuffix(".default")


class Now:
    """Where the recorded code is: phase, module, operator, and the epoch, a stretch of one phase.

    A recomputed forward is an epoch of its own inside backward: autograd switches gradients off there, and
    checkpointing switches them on again.
    """

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.epoch = 0
        self.forward_epochs = {0}
        self.module = 0
        self.operator = 0
        self.modules, self.operators = {"": 0}, {"(before)": 0}
        self.line = 0
        self.lines = {"": 0}
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._stack: list[tuple[int, int]] = []  # id and number of the modules that run
        self._recomputing = False
        self.between = True  # outside the model, not in backward or step: what is made now may be the next input
        self._step: int | None = None  # while an optimizer steps: the backward pass it steps in, -1 for none
        self._nested = 0  # how many steps run inside one another
        self.node = 0  # counts the nodes of the graph that backward has run
        self._node_number = -1
        # Nodes of the graph are numbered as they are made: from each number on, the module that made them.
        self._sequence: list[int] = []
        self._made_by: list[int] = []
        self._lines_from: list[int] = []  # and the line
        self._made_at: list[int] = []
        self._numbered = 0

    @property
    def outside_modules(self) -> bool:
        return not self._stack

    @staticmethod
    def in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    def names(self, module: nn.Module) -> bool:
        return module in self._numbers

    def name_module(self, module: nn.Module, name: str) -> int:
        number = self._numbers.get(module)
        if number is None:
            number = self._numbers[module] = self.modules.setdefault(name, len(self.modules))
        return number

    def enter(self, module: nn.Module) -> None:
        # A module that was made on the way (a loss, say) goes by its class.
        self._stack.append((id(module), self.name_module(module, type(module).__name__)))
        self._moved()

    def leave(self, module: nn.Module) -> None:
        for i in reversed(range(len(self._stack))):
            if self._stack[i][0] == id(module):
                del self._stack[i:]  # a KeyboardInterrupt lets modules end without a word
                self._moved()
                break

    def _moved(self) -> None:
        self.module = self._stack[-1][1] if self._stack else 0
        if not self.in_backward():
            self._sequence.append(torch.autograd._get_sequence_nr())
            self._made_by.append(self.module)

    def begin_step(self) -> None:
        nested = self._step is not None and self.phase is Phase.STEP  # an optimizer that calls super().step(), or another's
        self._nested = self._nested + 1 if nested else 1
        self._step = torch._C._current_graph_task_id()
        if self._step == -1:
            self._stack.clear()
        self.phase_is(Phase.STEP)

    def end_step(self) -> bool:
        """True if this was the outermost of nested steps."""
        self._nested -= 1
        if self._nested == 0:
            self._step = None
        return self._nested == 0

    def phase_is(self, phase: Phase, recomputing: bool = False) -> None:
        if (phase, recomputing) != (self.phase, self._recomputing):
            self.phase, self._recomputing = phase, recomputing
            self.epoch += 1
            if phase in (Phase.BUILD, Phase.FORWARD) or recomputing:
                self.forward_epochs.add(self.epoch)

    def operator_runs(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Note the operator, bring phase and module up to date; True if a forward begins that calls no module."""
        self.operator = self.operators.setdefault(func, len(self.operators))
        grad, backward = torch.is_grad_enabled(), torch._C._current_graph_task_id()
        self.between = False
        if backward == self._step:  # the step itself; its closure has gradients on, or a backward pass of its own
            if not grad:
                self.phase_is(Phase.STEP)
        elif backward != -1:
            self.phase_is(Phase.BACKWARD, recomputing=grad)
        elif self.outside_modules:
            from_parameters = any(t.requires_grad for t in tensors)
            self.between = not from_parameters
            if from_parameters and grad and self.phase is not Phase.FORWARD:
                self.phase_is(Phase.FORWARD)
                return True
            if not grad and self.phase is Phase.BACKWARD:
                self.phase_is(Phase.STEP)  # unscaling, clipping
        if backward != -1:
            self._see_node()
        return False

    def where(self) -> str:
        """``aten::mm in backward, module blocks.0.mlp, model.py:12``: what runs now."""
        operator = shown_operator(list(self.operators)[self.operator])
        module, line = list(self.modules)[self.module], list(self.lines)[self.line]
        return ", ".join([f"{operator} in {self.phase.label}", *([f"module {module}"] if module else []), *([line] if line else [])])

    def see_line(self) -> None:
        """Note the user's line that runs; in backward that which made the node of the graph."""
        if not self.in_backward():
            self.line = self.lines.setdefault(users_line(), len(self.lines))
            if not self._made_at or self._made_at[-1] != self.line:
                # A node is made before its operator runs: those made since the last operator are this one's.
                self._lines_from.append(self._numbered)
                self._made_at.append(self.line)
            self._numbered = torch.autograd._get_sequence_nr()
        elif (node := torch._C._current_autograd_node()) is not None and (number := node._sequence_nr()) < self._numbered:
            self.line = self._made_at[max(bisect_right(self._lines_from, number) - 1, 0)]

    def _see_node(self) -> None:
        node = torch._C._current_autograd_node()
        if node is None:
            return
        number = node._sequence_nr()
        if number != self._node_number:
            self._node_number = number
            self.node += 1
        if self.outside_modules:
            i = bisect_right(self._sequence, number) - 1
            if 0 <= i < len(self._made_by) - 1:  # accumulating a gradient has the highest number: still the module before
                self.module = self._made_by[i]
