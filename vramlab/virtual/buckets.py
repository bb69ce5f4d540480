"""What DDP's C++ part does to memory: it refuses virtual tensors, so a small stand-in in Python allocates the same buckets."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.graph import get_gradient_edge

from vramlab.tensors import is_virtual

SHOWN_NAMES = 8
IN_FLIGHT = 2  # broadcasts that wait at the same time, as in c10d's comm.cpp


class Bucket:
    """Parameters whose gradients travel together, in one flat tensor; ``views`` has the shape of each parameter."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        with torch.no_grad():
            self.contents = torch.empty(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
            self.views, begin = [], 0
            for p in self.parameters:
                if is_non_overlapping_and_dense_or_false(p):
                    self.views.append(self.contents.as_strided(p.shape, p.stride(), begin))
                else:
                    self.views.append(self.contents[begin : begin + p.numel()].view(p.shape))
                begin += p.numel()
        self.pending = len(self.parameters)


class BucketReducer:
    """Stands for ``torch.distributed.Reducer``: the same buckets, copies and collectives, in the same order.

    The parameters lie in one bucket at first. The order in which their gradients arrive in the first synchronised
    backward is that of the buckets from the next forward on: one of 1 MiB, then such of 25 MiB. A gradient that
    arrives is copied into its bucket and, with ``gradient_as_bucket_view``, becomes a view of it; so it does also after
    backward passes under ``no_sync``, whose gradients lie outside of the buckets until then.

    Left out, because it is a few kilobytes at the start: the exchange of the parameters' shapes and of the buckets' order.

    Raises:
        NotImplementedError: options with which other things happen.
        RuntimeError: in the forward after a synchronised backward that reached some parameters and not all.

    Reference: ``torch/csrc/distributed/c10d/reducer.cpp``: ``initialize_buckets``, ``mark_variable_ready_dense``,
    ``finalize_backward``, ``rebuild_buckets``, ``ensure_prior_reduction_finished``. Checked against recorded ranks in
    ``tests/virtual/test_ranks.py``.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: dist.ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 * 1024 * 1024,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Any = None,
        first_bucket_bytes_cap: int = 1024 * 1024,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        bucket_bytes_cap_list: Sequence[int] = (),
        batched_grad_copy: bool = False,
    ) -> None:
        for name, value in (("find_unused_parameters", find_unused_parameters), ("batched_grad_copy", batched_grad_copy)):
            if value:
                raise _not_planned(f"{name}=True")
        self._parameters, self._group, self._as_view = list(params), process_group, gradient_as_bucket_view
        self._limits = list(bucket_bytes_cap_list) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._names: dict[int, str] = dict(param_to_name_mapping or {})
        self._arrived: list[int] = []
        self._awaited: set[int] = set()  # in the synchronised backward that runs
        self._rebuilt = self._expected = False
        self._buckets: list[Bucket] = []
        self._make([[self._parameters[i] for i in indices] for indices in bucket_indices])
        self._hooks = [_after_accumulation(p, _called(weakref.ref(self), i)) for i, p in enumerate(self._parameters)]

    def __del__(self) -> None:
        for remove in self.__dict__.get("_hooks", ()):
            remove()

    def set_logger(self, logger: Any) -> None: ...
    def prepare_for_forward(self) -> None: ...

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward is a synchronised one."""
        self._refuse_unfinished()
        self._expected, self._next = True, 0
        self._awaited = set(range(len(self._parameters)))
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)

    def _refuse_unfinished(self) -> None:
        """As ``ensure_prior_reduction_finished``: a backward that reached no parameter at all is nothing that has begun."""
        if self._expected and 0 < len(self._awaited) < len(self._parameters):
            names = [self._names.get(i, f"parameter {i}") for i in sorted(self._awaited)]
            raise RuntimeError(
                f"DDP sends gradients when backward has reached every parameter, and the last synchronised one did not reach {len(names)} "
                f"of {len(self._parameters)}: {', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''}. "
                "Freeze them with requires_grad_(False), or let the loss depend on them; real ranks refuse this forward too."
            )

    def _rebuild_buckets(self) -> bool:
        self._refuse_unfinished()
        if self._rebuilt or len(self._arrived) < len(self._parameters):
            return False
        self._rebuilt = True
        in_order = [self._parameters[i] for i in self._arrived]
        indices = _assignment(in_order, self._limits)
        self._buckets.clear()  # first, so that the new ones may lie where the old ones were
        self._where.clear()
        self._make([[in_order[i] for i in group] for group in indices])
        return True

    def _make(self, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        for group in groups:
            self._buckets.append(Bucket(group))
            self._adopt(self._buckets[-1])
        self._where = {id(p): (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)}

    def _adopt(self, bucket: Bucket) -> None:
        """Gradients that are there when buckets are made move into them."""
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if self._as_view and parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view

    def _arrives(self, index: int) -> None:
        """A gradient has been accumulated."""
        if not self._expected:
            return
        if not self._rebuilt:
            self._arrived.append(index)
        self._awaited.discard(index)
        parameter = self._parameters[index]
        bucket, place = self._where[id(parameter)]
        with torch.no_grad():
            self._copy_in(parameter, bucket.views[place])
            bucket.pending -= 1
            while self._next < len(self._buckets) and not self._buckets[self._next].pending:  # in their order
                self._group.allreduce([self._buckets[self._next].contents])
                self._next += 1
        if self._next == len(self._buckets):
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _copy_in(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        scale = 1 / self._group.size()
        if gradient.untyped_storage()._cdata == view.untyped_storage()._cdata:
            view.mul_(scale)
            return
        torch.mul(gradient, scale, out=view)
        if self._as_view:
            parameter.grad = view

    def _finish(self) -> None:
        self._expected = False
        if not self._as_view:
            with torch.no_grad():
                for bucket in self._buckets:
                    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                        if parameter.grad is not None:
                            parameter.grad.copy_(view)

    def __getattr__(self, name: str) -> Any:
        raise _not_planned(f"what calls the reducer's {name}()")


def _not_planned(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"On a virtual GPU DistributedDataParallel runs with its defaults, gradient_as_bucket_view and no_sync(); {what} is not carried "
        "out there. Leave it out to see the memory of the rest."
    )


def _called(reducer: weakref.ref[BucketReducer], index: int) -> Callable[..., None]:
    def hook(*unused: Any) -> None:
        if (alive := reducer()) is not None:
            alive._arrives(index)

    return hook


def _after_accumulation(parameter: torch.Tensor, hook: Callable[..., None]) -> Callable[[], None]:
    """Call the hook after the gradient has been added up and its own hooks have run; returns what ends that."""
    node = get_gradient_edge(parameter).node
    handle = node.register_hook(hook)

    def remove(node: Any = node) -> None:  # the parameter knows its node only weakly, and a new one would have no hook
        handle.remove()

    return remove


def _assignment(tensors: Sequence[torch.Tensor], limits: Sequence[int]) -> list[list[int]]:
    """Which tensors share a bucket, in their order: by type, a bucket is full when it reaches its limit in bytes.

    What is left when the tensors end comes last. Reference: ``compute_bucket_assignment_by_size`` with ``tensor_indices``.
    """
    full: list[list[int]] = []
    open_: dict[torch.dtype, list[int]] = {}
    begun: dict[torch.dtype, int] = {}
    for i, tensor in enumerate(tensors):
        bucket = open_.setdefault(tensor.dtype, [])
        bucket.append(i)
        if sum(tensors[j].nbytes for j in bucket) >= limits[min(begun.get(tensor.dtype, 0), len(limits) - 1)]:
            full.append(open_.pop(tensor.dtype))
            begun[tensor.dtype] = begun.get(tensor.dtype, 0) + 1
    return full + list(open_.values())


def broadcast_coalesced(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], buffer_size: int, rank: int = 0) -> None:
    """Send tensors from one rank to all in flat pieces of at least ``buffer_size`` bytes, two of which are there at a time.

    Reference: ``torch/csrc/distributed/c10d/comm.cpp``.
    """
    waiting: deque[tuple[list[torch.Tensor], torch.Tensor]] = deque()
    options = dist.BroadcastOptions()
    options.rootRank = rank

    def finish() -> None:
        pieces, flat = waiting.popleft()
        for piece, out in zip(pieces, torch._utils._unflatten_dense_tensors(flat, pieces), strict=True):
            piece.copy_(out)

    with torch.no_grad():
        for indices in _assignment(tensors, [buffer_size]):
            if len(waiting) == IN_FLIGHT:
                finish()
            pieces = [tensors[i] for i in indices]
            flat = torch._utils._flatten_dense_tensors(pieces)
            group.broadcast([flat], options)
            waiting.append((pieces, flat))
        while waiting:
            finish()


class _NoLogger:
    """DDP's logger writes down what it measures."""

    def __init__(self, reducer: Any) -> None: ...
    def set_construction_data_and_log(self, *args: Any) -> None: ...
    def set_runtime_stats_and_log(self) -> None: ...
    def _set_comm_hook_name(self, name: str) -> None: ...


@contextmanager
def patched() -> Iterator[None]:
    """While it is open, DDP on virtual tensors has these parts instead of the ones in C++."""
    if not dist.is_available():
        yield
        return
    with ExitStack() as undo:

        def put(name: str, stand_in: Any, asked: Callable[..., bool]) -> None:
            original = getattr(dist, name)
            setattr(dist, name, lambda *args, **kwargs: (stand_in if asked(*args) else original)(*args, **kwargs))
            undo.callback(setattr, dist, name, original)

        put("Reducer", BucketReducer, lambda parameters, *rest: any(map(is_virtual, parameters)))
        put("Logger", _NoLogger, lambda reducer: isinstance(reducer, BucketReducer))
        put("_broadcast_coalesced", broadcast_coalesced, lambda group, tensors, *rest: any(map(is_virtual, tensors)))
        put("_verify_params_across_processes", lambda *args: None, lambda group, tensors, *rest: any(map(is_virtual, tensors)))
        put("_compute_bucket_assignment_by_size", _first_assignment, lambda tensors, *rest: any(map(is_virtual, tensors)))
        for name in ("_register_comm_hook", "_register_builtin_comm_hook"):
            put(name, _refused_hook, lambda reducer, *rest: isinstance(reducer, BucketReducer))
        yield


def _first_assignment(
    tensors: Sequence[torch.Tensor], limits: Sequence[int], sparse: Sequence[bool] = ()
) -> tuple[list[list[int]], list[int]]:
    """As ``torch.distributed._compute_bucket_assignment_by_size``: buckets sorted by their first tensor, and the limit of each."""
    if any(sparse):
        raise _not_planned("a parameter with sparse gradients")
    buckets = sorted(_assignment(tensors, limits), key=min)
    return buckets, [max(limits)] * len(buckets)


def _refused_hook(*args: Any) -> None:
    raise _not_planned("a communication hook")
