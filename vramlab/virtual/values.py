"""What is known of the values of tensors that have none: whole numbers and flags that came from the CPU keep a twin there."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from vramlab.memory.now import users_line
from vramlab.tensors import is_virtual, map_tensors, tensors_in

MOST_INTEGERS = 1 << 24  # elements; computing with more of them costs more time than it is worth
MOST_FLOATS = 1 << 18  # masks, positions
MOST_DATA = 1 << 12  # floats that were copied here or drawn: counters and scales; batches and weights are more

_aten = torch.ops.aten


class UnknownValueError(RuntimeError):
    """Python code reads a whole number or a flag that was computed on a virtual GPU, where nothing is computed."""


class Values:
    """CPU twins of virtual tensors, followed through every operator whose inputs are all known.

    A twin belongs to a storage, so views know their values too. What is written from unknown values becomes unknown.
    ``reads`` counts by ``file:line`` where an unknown floating-point number was read, and answered with 0.0.
    """

    def __init__(self) -> None:
        self._twins: dict[int, torch.Tensor] = {}  # by storage: all its elements, one-dimensional, on the CPU
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._random_state = torch.Generator().get_state()
        self.reads: Counter[str] = Counter()
        self.known_reads = 0  # how often a known value was read
        self.building = False
        """While a model is built a read decides over its shape, so 0.0 is no answer."""

    def known(self, tensor: torch.Tensor) -> bool:
        return not is_virtual(tensor) or _key(tensor) in self._twins

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor with the values of a known one; a view of the twin, so it can be written through."""
        if not is_virtual(tensor):
            return tensor
        flat = self._twins[_key(tensor)]
        if flat.dtype != tensor.dtype:  # a view of the bytes as another type
            flat = flat.view(tensor.dtype)
        return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: list[torch.Tensor]) -> None:
        """An operator has run on virtual tensors: compute with the twins what it has written and returned, or forget."""
        written = func._schema.is_mutable if isinstance(func, torch._ops.OpOverload) else False
        results = [t for t in tensors_in(out) if is_virtual(t)]
        if func in _WITHOUT_VALUES:
            return
        if func in _OF_SHAPE:  # the first one's values do not matter
            args, tensors = (torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:]), tensors[1:]
        if func in _OVERWRITES and not self.known(args[0]) and _is_whole(args[0]) and all(map(self.known, tensors[1:])):
            if not _worth_knowing(args[0], _most_floats(func, tensors[1:])):
                return
            self.learn(args[0], self.on_twins(func, (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:]), kwargs))
            return
        if all(map(self.known, tensors)):
            new = [t for t in results if _key(t) not in self._twins]
            most = _most_floats(func, tensors)
            if (written or new) and all(_worth_knowing(t, most) for t in results) and self._compute(func, args, kwargs, out):
                return
        elif func in _FINITE:
            self._finite(func, args, results)
            return
        if written:
            for tensor in _written(func, args, kwargs):
                self._forget(tensor)

    def _compute(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        try:
            real = self.on_twins(func, args, kwargs)
        except (NotImplementedError, RuntimeError):  # the CPU has no such kernel: then the result is unknown
            return False
        for tensor, value in zip(tensors_in(out), tensors_in(real), strict=True):
            self.learn(tensor, value)
        return True

    def on_twins(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns for the twins of its arguments."""
        real_args, real_kwargs = map_tensors(self.twin, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        real_kwargs.pop("pin_memory", None)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*real_args, **real_kwargs)
        cpu = torch.get_rng_state()  # the numbers that are drawn on a card are not missing on the CPU
        torch.set_rng_state(self._random_state)
        try:
            return func(*real_args, **real_kwargs)
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(cpu)

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A virtual tensor, if nothing is known of its storage yet, has these values.

        A view of a larger new storage (which no operator returns) would leave gaps: it stays unknown.
        """
        if not is_virtual(tensor) or not _worth_knowing(tensor) or _key(tensor) in self._twins:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.element_size()
        if size < tensor.numel() or tensor.storage_offset() or value.shape != tensor.shape:  # helper outputs differ by device
            return
        flat = torch.empty(size, dtype=tensor.dtype)
        torch.as_strided(flat, tensor.shape, tensor.stride()).copy_(value)
        key = storage._cdata
        self._twins[key] = flat
        self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))

    def _forget(self, tensor: torch.Tensor) -> None:
        if is_virtual(tensor):
            self._drop(_key(tensor))

    def _drop(self, key: int) -> None:
        self._twins.pop(key, None)
        self._alive.pop(key, None)

    def _finite(self, func: Any, args: Any, results: list[torch.Tensor]) -> None:
        """Nothing is computed, so nothing overflows: a virtual number is finite, and equal to itself."""
        answer = _FINITE[func]
        if func in _OF_INFINITY:
            if not isinstance(args[1], float) or not math.isinf(args[1]):
                return
        elif func in _OF_ITSELF and args[0] is not args[1]:
            return
        for result in results:
            self.learn(result, torch.full(result.shape, answer))

    # Reading

    def read(self, func: Any, tensor: torch.Tensor) -> float | int | bool | complex:
        """The value of a tensor with one element: true if known, 0.0 for an unknown floating-point number.

        Raises:
            UnknownValueError: an unknown whole number or flag.
        """
        if self.known(tensor):
            self.known_reads += 1
            return self.twin(tensor).item()
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            raise self.unknown(func)
        self.note_read(func)
        return 0j if tensor.dtype.is_complex else 0.0

    def real(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A real CPU tensor with the values of a virtual one: true if known, zeros for unknown floating-point numbers."""
        if self.known(tensor):
            self.known_reads += 1
            return self.twin(tensor).clone()
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            raise self.unknown(func)
        self.note_read(func)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def note_read(self, func: Any) -> None:
        if self.building:
            raise self.unknown(func)
        self.reads[users_line() or "an unknown line"] += 1

    def unknown(self, func: Any) -> UnknownValueError:
        name = str(func).replace("aten.", "aten::").removesuffix(".default")
        return UnknownValueError(
            "Nothing is computed on a virtual GPU, so what Python reads from it must have come from the CPU: "
            f"{name} at {users_line() or 'an unknown line'} needs values that were computed on the card. "
            "Compute them on the CPU and move them there, or leave out the check or the branch that reads them while planning; "
            "where a shape depends on values, use the largest that can occur."
        )


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0  # of no storage


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that is in its storage."""
    elements = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != elements:
            return False
        elements *= size
    return elements * tensor.element_size() == tensor.untyped_storage().nbytes()


def _worth_knowing(tensor: torch.Tensor, most_floats: int = MOST_FLOATS) -> bool:
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.layout is torch.strided and tensor.numel() <= (most_floats if floating else MOST_INTEGERS)


def _most_floats(func: Any, tensors: list[torch.Tensor]) -> int:
    """How many floats of an operator's result are followed: few of those that come from real ones or are drawn."""
    real = any(not is_virtual(t) and t.is_floating_point() and t.dim() for t in tensors)
    drawn = isinstance(func, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in func.tags
    return MOST_DATA if real or drawn else MOST_FLOATS


def _written(func: Any, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to, by its schema."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
            yield from tensors_in(value)


_WITHOUT_VALUES = {
    *(op.default for op in (_aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided)),
    _aten.empty.memory_format,
}
_OF_SHAPE = {
    *(op.default for op in (_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full)),
}
_OVERWRITES = {_aten.zero_.default, _aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}
_OF_ITSELF = {_aten.eq.Tensor, _aten.ne.Tensor}
_OF_INFINITY = {_aten.eq.Scalar, _aten.ne.Scalar}
_FINITE = {
    _aten.eq.Tensor: True,
    _aten.ne.Tensor: False,
    _aten.eq.Scalar: False,
    _aten.ne.Scalar: True,
    _aten.isnan.default: False,
    _aten.isinf.default: False,
    _aten.isposinf.default: False,
    _aten.isneginf.default: False,
}
"""What questions about unknown numbers are answered with: isfinite is composed of the first four."""
