"""The collectives that code calls on a virtual rank: which, over how many ranks, with how many bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vramlab.tensors import is_virtual, tensors_in
from vramlab.virtual.traffic import Call

_KINDS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
}
"""By how the operator's name begins; the first that fits."""


def is_collective(func: Any) -> bool:
    """Whether an operator talks to other ranks."""
    return getattr(func, "namespace", None) in ("c10d", "_c10d_functional")


def call_of(func: Any, args: tuple[Any, ...]) -> Call | None:
    """What a collective sends; None for those without tensors, such as a barrier."""
    name = func._opname.lstrip("_")
    kind = next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), None)
    if kind is None:
        return None
    if func.namespace == "c10d":
        # Outputs and inputs: the larger of both is the whole.
        group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        return Call(kind, dist.ProcessGroup.unbox(group).size(), max(_nbytes(part) for part in args[:2]))
    ranks = _group(args[-1]).size()
    nbytes = _nbytes(args[0])
    return Call(kind, ranks, nbytes * ranks if kind == "all-gather" else nbytes)


def _nbytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree))


def _group(named: Any) -> Any:
    resolve: Callable[[Any], Any] = dist.distributed_c10d._resolve_process_group
    return resolve(named) if isinstance(named, str) else named


class _Held(dist.Work):  # type: ignore[misc, unused-ignore]
    """What sending returns on a real group: as long as it lives it holds the tensors, also when someone has waited for it.

    Reference: ``ProcessGroupNCCL::pointToPoint``, which keeps them as the work's outputs; ``ProcessGroupGloo``'s ``SendWork``.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def _holding(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def sent(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        work = send(group, tensors, *args, **kwargs)
        return _Held(list(tensors)) if any(map(is_virtual, tensors)) else work

    return sent


@contextmanager
def patched() -> Iterator[None]:
    """While it is open, virtual tensors that are sent stay as long as on cards."""
    original = dist.ProcessGroup.send
    dist.ProcessGroup.send = _holding(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.ProcessGroup.send = original  # type: ignore[method-assign]
