"""Tensors inside nested containers, and the memory behind a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same nested lists, tuples (named ones too) and mappings with ``function`` applied to each tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, Mapping):
        return type(tree)({key: map_tensors(function, item) for key, item in tree.items()})  # type: ignore[call-arg]
    return tree


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory behind a plain tensor; None where it has none of its own (sparse, meta, opaque layouts)."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.untyped_storage()


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind any tensor: wrappers (DTensor, quantised) and sparse tensors consist of plain ones."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    else:
        parts = []
        storage = storage_of(tensor)
        if storage is not None:
            yield storage
    for part in parts:
        yield from storages_of(part)
