"""alive(): who holds memory now, by variable and by tensor; `free` says what it gave back, this lets go of nothing."""

from __future__ import annotations

import html
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vramlab.memory import free as search
from vramlab.tensors import storages_of, tensors_in
from vramlab.units import format_bytes

SHOWN = 12


@dataclass(frozen=True)
class Living:
    """A tensor, or what a variable leads to. ``nbytes`` are bytes that nothing listed before it holds."""

    name: str
    kind: str
    """``float32 (256, 1024)`` of a tensor, a class else."""
    nbytes: int
    owner: str
    """The variable it is found by: ``model``, ``Out[3]``, ``the last error``, or ``others``."""
    also: tuple[str, ...] = ()
    """Other names of the same memory: tied weights and views."""


@dataclass(frozen=True)
class Alive:
    """What lives on a device; each storage once, under the first name it was found by. Sizes are bytes."""

    device: str
    total: int
    """Of all tensors."""
    reserved: int | None
    """What CUDA's caching allocator holds; None on the CPU."""
    tensors: tuple[Living, ...]
    """In the order in which they were found: variables, a notebook's outputs, the last error, the rest."""
    by_tensor: bool = False
    shown: int = SHOWN

    @property
    def owners(self) -> dict[str, int]:
        """Bytes by the variable that holds them, largest first; ``others`` are held by none."""
        sums: dict[str, int] = {}
        for living in self.tensors:
            sums[living.owner] = sums.get(living.owner, 0) + living.nbytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def _rows(self) -> list[tuple[str, str, str]]:
        """Size, name, and what it is, largest first."""
        if self.by_tensor:
            found = [(t.nbytes, t.name, t.kind + (f", also {', '.join(t.also)}" if t.also else "")) for t in self.tensors]
        else:
            found = [(nbytes, owner, self._described(owner)) for owner, nbytes in self.owners.items()]
        found.sort(key=lambda row: -row[0])
        rows = [(format_bytes(n), name, what) for n, name, what in found[: self.shown]]
        if rest := found[self.shown :]:
            rows.append((format_bytes(sum(n for n, *_ in rest)), f"{len(rest)} smaller ones", ""))
        return rows

    def _described(self, owner: str) -> str:
        parts = [t for t in self.tensors if t.owner == owner]
        if len(parts) == 1:
            same = f", also {', '.join(parts[0].also)}" if parts[0].also else ""
            return (parts[0].kind if parts[0].name == owner else f"{parts[0].name}: {parts[0].kind}") + same
        largest = max(parts, key=lambda t: t.nbytes)
        return f"{len(parts)} tensors, the largest {largest.name} {format_bytes(largest.nbytes)}"

    def _title(self) -> str:
        reserved = f", {format_bytes(self.reserved)} reserved by PyTorch" if self.reserved is not None else ""
        return f"{format_bytes(self.total)} live on {self.device}{reserved}"

    def __repr__(self) -> str:
        return "\n".join(
            [self._title(), *(f"  {size:>11}  {name}  ({what})" if what else f"  {size:>11}  {name}" for size, name, what in self._rows())]
        )

    def _repr_html_(self) -> str:
        left = "<td style='text-align:left'>{}</td>"
        cells = "".join(
            f"<tr><td style='text-align:right'>{size}</td>{left.format(html.escape(name))}{left.format(html.escape(what))}</tr>"
            for size, name, what in self._rows()
        )
        return f"<p><b>{html.escape(self._title())}</b></p>" + (f"<table>{cells}</table>" if cells else "")


def alive(*, by_tensor: bool = False, shown: int = SHOWN) -> Alive:
    """What holds memory now: the user's variables first, then a notebook's outputs, then the last error.

    Args:
        by_tensor: show a line a tensor instead of a line a variable; ``tensors`` has all of them either way.
        shown: lines.

    Returns:
        An `Alive`. On CUDA, if it is in use, of all cards; else of the CPU.

    Raises:
        ValueError: ``shown`` below 1.

    Takes about a second at most: what is not found by then is called others.
    """
    if shown < 1:
        raise ValueError(f"At least 1 line is shown, got {shown}.")
    cuda = torch.cuda.is_initialized()
    finder = _Finder("cuda" if cuda else "cpu")
    for name, value in sorted(search._variables(), key=lambda pair: search._rank(pair[1])):
        finder.variable(name, value)
    for name, value in _kept_by_ipython():
        finder.variable(name, value)
    total = search._held(cuda)
    rest = total - sum(living.nbytes for living in finder.found)
    if rest > 0:
        finder.found.append(Living("others", search._describe(finder.search, finder.device), rest, "others"))
    return Alive("CUDA" if cuda else "cpu", total, search._reserved(cuda) if cuda else None, tuple(finder.found), by_tensor, shown)


def _kept_by_ipython() -> Iterator[tuple[str, Any]]:
    """What a notebook keeps though no variable names it: outputs, and the variables of functions that ended with the last error."""
    shell = search._shell()
    if shell is not None:
        outputs = shell.user_ns.get("_oh", {})
        yield from ((f"Out[{number}]", value) for number, value in list(outputs.items()))
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    trace = error.__traceback__ if error is not None else getattr(sys, "last_traceback", None)
    own = [shell.user_ns] if shell is not None else []
    while trace is not None:
        frame = trace.tb_frame
        if not any(frame.f_locals is space for space in (*own, frame.f_globals)):
            for name, value in list(frame.f_locals.items()):
                yield f"the last error ({type(error).__name__}): {name} in {frame.f_code.co_name}()", value
        trace = trace.tb_next


class _Finder:
    """Lists the tensors that variables lead to, each storage once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.search = search._Search(device, time.monotonic() + search.PATIENCE)
        self.found: list[Living] = []
        self._first: dict[int, int] = {}  # storage to its place in the list

    def variable(self, name: str, value: Any) -> None:
        for part, tensor in _tensors(name, value):
            self._tensor(part, tensor, name)
        kind = type(value).__name__
        if not isinstance(value, types.ModuleType | type) and (nbytes := self.search.behind(value)):
            graph = isinstance(value, torch.Tensor) and value.grad_fn is not None
            what = "kept for the backward of it" if graph else kind
            self.found.append(Living(f"behind {name}" if graph else name, what, nbytes, name))

    def _tensor(self, name: str, tensor: torch.Tensor, owner: str) -> None:
        if tensor.device.type != self.device:
            return
        storages = {s._cdata: s.nbytes() for s in storages_of(tensor)}
        new = {key: n for key, n in storages.items() if key not in self.search.found}
        if new:
            self.search.found.update(new)
            self._first.update(dict.fromkeys(new, len(self.found)))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.found.append(Living(name, f"{dtype} {tuple(tensor.shape)}", sum(new.values()), owner))
        else:
            for place in {self._first[key] for key in storages if key in self._first}:
                one = self.found[place]
                if name != one.name and name not in one.also:
                    self.found[place] = replace(one, also=(*one.also, name))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a variable, by the names that its code has for them."""
    if isinstance(value, torch.Tensor):
        yield name, value
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad", value.grad
    elif isinstance(value, nn.Module):
        named = [*value.named_parameters(remove_duplicate=False), *value.named_buffers(remove_duplicate=False)]
        yield from ((f"{name}.{part}", tensor) for part, tensor in named)
        yield from ((f"{name}.{part}.grad", t.grad) for part, t in named if t.is_leaf and t.grad is not None)
    elif isinstance(value, torch.optim.Optimizer):
        for i, state in enumerate(value.state.values()):
            if isinstance(state, dict):
                yield from ((f"{name}.state[{i}][{key!r}]", tensor) for key, tensor in state.items() if isinstance(tensor, torch.Tensor))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", t) for key, item in list(value.items()) for t in tensors_in(item))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{i}]", t) for i, item in enumerate(value) for t in tensors_in(item))
