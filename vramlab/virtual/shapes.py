"""What an operator returns for arguments of certain shapes: torch's fake mode computes it the first time, then it is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from vramlab.tensors import tensors_in

MOST = 200_000  # remembered calls; a plan of a large model makes some thousand different ones

_known: dict[Any, Callable[[FakeTensorMode, list[torch.Tensor]], Any] | None] = {}
"""By operator and arguments: how to make the result of another call. None: each call has to be computed."""


class _NoKeyError(Exception):
    """The arguments have something whose influence on the result is not known here."""


def compute(fake: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors. torch's own memory of results needs five times as long to look up as this one."""
    try:
        key = _key(func, args, kwargs)
    except _NoKeyError:
        key = None
    make = _known.get(key) if key is not None else None
    if make is not None:
        return make(fake, tensors_in((args, kwargs)))
    with fake:
        out = func(*args, **kwargs)
    if key is not None and key not in _known:
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = _maker(out, tensors_in((args, kwargs)))
    return out


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func not in _repeatable:
        _repeatable[func] = _is_repeatable(func)
    if not _repeatable[func] or torch.is_inference_mode_enabled():  # its tensors have no version, so no view is made of them
        raise _NoKeyError
    return func, _part(args), tuple((name, _part(value)) for name, value in kwargs.items()), torch.get_default_dtype()


_repeatable: dict[Any, bool] = {}


def _is_repeatable(func: Any) -> bool:
    """Whether an operator's result follows from its arguments' shapes alone, and it leaves those as they are."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or "out" in func._overloadname:
        return False
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view)
    return not any(tag in func.tags for tag in tags) and not func._schema.name.startswith(
        ("aten::set_", "aten::resize", "aten::_resize", "aten::lift")
    )


def _part(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.layout is not torch.strided or value.dtype.is_complex:
            raise _NoKeyError
        return value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset()
    if isinstance(value, list | tuple):
        return tuple([_part(item) for item in value])
    if value is None or type(value) in _PLAIN:
        return type(value), value  # True, 1 and 1.0 are equal, and not the same
    raise _NoKeyError


_PLAIN = {bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


def _maker(out: Any, arguments: list[torch.Tensor]) -> Callable[[FakeTensorMode, list[torch.Tensor]], Any] | None:
    """A function that makes results like ``out`` for other arguments of the same shapes."""
    seen = [t.untyped_storage()._cdata for t in arguments]
    try:
        return _made_like(out, arguments, seen)
    except _NoKeyError:
        return None


def _made_like(out: Any, arguments: list[torch.Tensor], seen: list[int]) -> Callable[[FakeTensorMode, list[torch.Tensor]], Any]:
    if isinstance(out, FakeTensor):
        return _tensor_like(out, arguments, seen)
    if isinstance(out, list | tuple):
        kind, makers = type(out), [_made_like(item, arguments, seen) for item in out]
        if kind not in (list, tuple):
            raise _NoKeyError
        return lambda fake, given: kind([make(fake, given) for make in makers])
    if out is None or type(out) in (bool, int, float):
        return lambda fake, given: out
    raise _NoKeyError


def _tensor_like(out: FakeTensor, arguments: list[torch.Tensor], seen: list[int]) -> Callable[[FakeTensorMode, list[torch.Tensor]], Any]:
    for i, argument in enumerate(arguments):
        if out is argument:
            return lambda fake, given: given[i]
    shape, stride, offset, dtype, device = out.shape, out.stride(), out.storage_offset(), out.dtype, out.fake_device
    if out.layout is not torch.strided:
        raise _NoKeyError
    storage = out.untyped_storage()
    if storage._cdata in seen:
        base = seen.index(storage._cdata)

        def view(fake: FakeTensorMode, given: list[torch.Tensor]) -> torch.Tensor:
            with in_kernel_invocation_manager(fake):
                meta = torch.empty(0, dtype=dtype, device="meta").set_(given[base].untyped_storage(), offset, shape, stride)
            return FakeTensor(fake, meta, device)

        return view
    seen.append(storage._cdata)  # a second output of the same storage is a view of none of the arguments
    arguments.append(out)

    def new(fake: FakeTensorMode, given: list[torch.Tensor]) -> torch.Tensor:
        with in_kernel_invocation_manager(fake):
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        made = FakeTensor(fake, meta, device)
        given.append(made)
        return made

    if offset or out.layout is not torch.strided or _nbytes(shape, stride, dtype) != storage.nbytes():
        raise _NoKeyError
    return new


def _nbytes(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
