"""Tensors inside nested containers, and the memory behind a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for item in tree:
            _collect(item, found)
    elif not isinstance(tree, _NO_CONTAINERS) and isinstance(tree, Mapping):
        for item in tree.values():
            _collect(item, found)


_NO_CONTAINERS = (int, float, str, type(None), torch.dtype, torch.device)  # asked first: whether it is a Mapping takes longer


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


def consists_of_tensors(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this class are wrappers (DTensor, quantised), which call operators on the tensors inside them."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def is_virtual(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a virtual GPU or offloaded from one: it has bytes, and no data."""
    return isinstance(tensor, FakeTensor) and getattr(tensor.fake_mode, "has_memory", False)


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The memory behind any tensor: wrappers and sparse tensors consist of plain ones, meta and fake tensors have none."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:  # nearly all of them, so it is asked first
        return [] if tensor.is_meta else [tensor.untyped_storage()]
    if consists_of_tensors(type(tensor)):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if is_traceable_wrapper_subclass(tensor) else []
    elif tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return [storage] if storage.device.type != "meta" or is_virtual(tensor) else []
    else:
        with torch._C._DisableTorchDispatch():  # looking is no operator of the code that is looked at
            parts = [getattr(tensor.detach(), name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]
    return [storage for part in parts if isinstance(part, torch.Tensor) for storage in storages_of(part)]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
