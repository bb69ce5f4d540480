"""What is changed while a virtual GPU is open, so that libraries treat its tensors as those of a card; and changed back."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._subclasses
import torch.autograd.graph
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim.optimizer import _foreach_supported_types

from vramlab.memory.now import users_line
from vramlab.tensors import is_virtual
from vramlab.virtual import backend, buckets, collectives
from vramlab.virtual.values import Values

_aten = torch.ops.aten


@contextmanager
def patched(values: Values) -> Iterator[None]:
    """All of it: what libraries ask about tensors, how modules move, what Python reads, where errors of backward come out."""
    with ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            missing = name not in vars(owner)
            old = getattr(owner, name, None)
            setattr(owner, name, value)
            undo.callback(delattr, owner, name) if missing else undo.callback(setattr, owner, name, old)

        # Optimizers without flags take foreach on a card, and ask for the exact type of the parameters.
        for types in (_foreach_supported_types, torch.utils._foreach_utils._foreach_supported_types):  # clipping has a list of its own
            types.append(FakeTensor)
            undo.callback(types.remove, FakeTensor)
        # transformers asks whether tensors are traced before it looks at a mask.
        put(torch._subclasses, "FakeTensor", _OnlyOthers)
        put(nn.Module, "_apply", _apply(nn.Module._apply))
        put(torch.utils, "swap_tensors", _swap(torch.utils.swap_tensors))
        put(UninitializedTensorMixin, "materialize", _materialize(UninitializedTensorMixin.materialize))
        put(torch, "Generator", _generator(torch.Generator))
        # Code that names "cuda": these mean the card whatever it is called, and for tensors there is a message.
        put(torch.amp.autocast_mode.autocast, "__init__", _for_the_card(torch.amp.autocast_mode.autocast.__init__))
        put(torch.amp.GradScaler, "__init__", _for_the_card(torch.amp.GradScaler.__init__))
        put(torch.cuda, "_lazy_init", _no_cuda)
        put(torch.Tensor, "pin_memory", _pin(torch.Tensor.pin_memory))
        put(torch.autograd.graph, "save_on_cpu", _SaveOnHost)
        put(fake_tensor.log, "disabled", True)  # it prints an operator's error before that is raised
        put(torch.Tensor, "data", property(_data.__get__, _set_data))
        put(FakeTensor, "numpy", _numpy(values))
        put(FakeTensor, "tolist", _tolist(values, FakeTensor.tolist))
        put(FakeTensor, "data_ptr", _data_ptr(FakeTensor.data_ptr))
        put(FakeTensor, "__format__", _format(FakeTensor.__format__))
        put(FakeTensor, "__repr__", _repr(values, FakeTensor.__repr__))
        put(FakeTensor, "__deepcopy__", _deepcopy(FakeTensor.__deepcopy__))
        put(FakeTensor, "__reduce_ex__", _reduce(FakeTensor.__reduce_ex__))
        if (accelerate := sys.modules.get("accelerate.state")) is not None:
            put(accelerate.PartialState, "__init__", _no_accelerate)
        for module in (torch.autograd.graph, torch.autograd):
            put(module, "_engine_run_backward", _run_backward(torch.autograd.graph._engine_run_backward))
        undo.enter_context(buckets.patched())
        undo.enter_context(collectives.patched())
        yield


def _no_accelerate(state: Any, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "accelerate, and transformers.Trainer which builds on it, take the device that torch.cuda names, here the CPU: the model would be "
        "trained there and nothing counted on the virtual GPU. Write the step without it: model, optimizer, loss.backward() and "
        "optimizer.step() as a plain loop on gpu.device."
    )


class _Others(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FakeTensor) and not is_virtual(instance)


class _OnlyOthers(metaclass=_Others):
    """Stands for ``FakeTensor`` where libraries ask whether a tensor is traced: a virtual one is used as on a card."""


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    goals: dict[int, torch.device] = {}  # where a function moves to, while the outermost module moves: asking each takes long

    @functools.wraps(original)
    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """A parameter that moves to a card stays the same object, with its hooks and in its optimizer."""
        goal = goals.get(id(fn))
        if goal is not None:
            return move(self, fn, recurse, goal)
        goals[id(fn)] = goal = fn(torch.empty(0)).device
        try:
            return move(self, fn, recurse, goal)
        finally:
            goals.pop(id(fn), None)

    def move(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool, goal: torch.device) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        if goal.type != backend.NAME and not any(map(is_virtual, self.parameters(recurse=False))):
            return original(self, fn, recurse=False)
        everything: tuple[Any, Any] = self._parameters, self._buffers
        lazy = [t for named in everything for t in named.values() if t is not None and nn.parameter.is_lazy(t)]
        for tensor in lazy:
            tensor.__dict__[_LATER] = goal  # it has no memory yet
        rest = [{k: v for k, v in named.items() if all(v is not t for t in lazy)} for named in everything]
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            self._parameters, self._buffers = rest
            return original(self, fn, recurse=False)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
            for named, moved in zip(everything, rest, strict=True):
                named.update(moved)
            for buffer in everything[1].values():
                if buffer is not None and is_virtual(buffer):
                    backend.innermost().parameter_moved(buffer)
            self._parameters, self._buffers = everything

    return apply


def _swap(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        """Modules move by exchanging what their parameters consist of. torch's own function refuses where weak references exist.

        Those point to the parameter, and that stays what it is.
        """
        if not is_virtual(one) and not is_virtual(other):
            original(one, other)
            return
        if is_virtual(one) and is_virtual(other) and one.untyped_storage()._cdata == other.untyped_storage()._cdata:
            return  # it was there already
        one.__class__, other.__class__ = other.__class__, one.__class__
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        torch._C._swap_tensor_impl(one, other)
        if is_virtual(one):
            one.__dict__.update({k: v for k, v in other.__dict__.items() if k not in one.__dict__})  # what others have noted on it
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # the parameter has them, what it now consists of does not
            if getattr(one, hooks):
                setattr(one, hooks, getattr(one, hooks))
        if isinstance(one, nn.Parameter):  # a gradient moves like this too
            backend.innermost().parameter_moved(one)

    return swap


_data: Any = torch._C.TensorBase.data


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = tensor.to(device)`` moves a tensor to another device; torch itself refuses to where Python keeps the device."""
    if not is_virtual(value) or self.device == value.device:
        _data.__set__(self, value)
        return
    moved = value.detach().requires_grad_(self.requires_grad)
    torch.utils.swap_tensors(self, nn.Parameter(moved, self.requires_grad) if isinstance(self, nn.Parameter) else moved)


_LATER = "_vramlab_device"


def _materialize(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """A lazy parameter gets its shape, and its memory where its module has been moved."""
        where = torch.device(device or self.__dict__.get(_LATER, "cpu"))
        if where.type != backend.NAME:
            original(self, shape, device, dtype)
            return
        made = torch.empty(shape, dtype=dtype or self.data.dtype, device=where)
        self.__class__ = self.cls_to_become
        torch.utils.swap_tensors(self, nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made)

    return materialize


def _for_the_card(original: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast("cuda")`` and ``GradScaler("cuda")`` would do nothing here, and the plan would be another program's."""

    @functools.wraps(original)
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        named = next((name for name in ("device_type", "device") if name in kwargs), None)
        device = kwargs.pop(named) if named is not None else device
        original(self, backend.NAME if device == "cuda" else device, *args, **kwargs)

    return init


def _no_cuda() -> None:
    raise RuntimeError(
        f"This code names the device 'cuda', and the card is a virtual one: at {users_line() or 'an unknown line'}. "
        "Take the device of the inputs (x.device), or the one that Task.batch is given."
    )


def _generator(original: type[torch.Generator]) -> type:
    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(metaclass=Meta):
        """A generator for a virtual card is the CPU's: nothing is drawn with it there."""

        def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
            return original("cpu" if torch.device(device).type == backend.NAME else device)

    return Generator


class _SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
    """torch's `save_on_cpu` copies into a new CPU tensor, and that would be a real one; here it stays virtual."""

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        super().__init__(lambda t: (t.device, t.cpu()), lambda packed: packed[1].to(packed[0]))


def _pin(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self  # also in a DataLoader's thread; no transfer happens that it would speed up

    return pin_memory


def _numpy(values: Values) -> Callable[..., Any]:
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if not is_virtual(self):
            return torch.Tensor.numpy(self, force=force)
        if self.device.type != "cpu" and not force:  # CUDA's words
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return values.real("aten.numpy", self).numpy(force=force)

    return numpy


def _tolist(values: Values, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tolist(self: torch.Tensor) -> Any:
        return values.real("aten.tolist", self).tolist() if is_virtual(self) else original(self)

    return tolist


def _data_ptr(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def data_ptr(self: torch.Tensor) -> int:
        """An address that is the same as long as the tensor has the same memory, and no other tensor has."""
        if not is_virtual(self):
            return original(self)
        return self.untyped_storage()._cdata + self.storage_offset() * self.element_size() if self.numel() else 0

    return data_ptr


def _format(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def format_tensor(self: torch.Tensor, spec: str) -> str:
        """As that of a real tensor: one without dimensions is written as the number that it is."""
        return format(self.item(), spec) if is_virtual(self) and self.dim() == 0 else original(self, spec)

    return format_tensor


def _repr(values: Values, original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def represent(self: torch.Tensor, **kwargs: Any) -> str:
        """What is known is printed as on a card. Of the others the text shows that there is nothing to see, so it is no read."""
        if not is_virtual(self) or not values.known(self):
            return original(self, **kwargs)
        text = repr(values.twin(self).clone())
        return text if self.device.type == "cpu" else f"{text[:-1]}, device='{self.device}')"

    return represent


def _deepcopy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        """As `torch.nn.Parameter.__deepcopy__` and `torch.Tensor.__deepcopy__`, which would copy the virtual GPU as well."""
        if not is_virtual(self) or not self.is_leaf:
            return original(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        if isinstance(self, nn.Parameter):
            memo[id(self)] = result = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            backend.innermost().parameter_moved(result)
            return result
        storage = self.untyped_storage()
        copies = memo.setdefault(_STORAGES, {})  # a storage that several tensors share is copied once
        if storage._cdata not in copies:
            whole = self.detach().as_strided((storage.nbytes() // self.element_size(),), (1,), 0)
            copies[storage._cdata] = whole.view(torch.uint8).clone()
        memo[id(self)] = result = copies[storage._cdata].view(self.dtype).as_strided(self.shape, self.stride(), self.storage_offset())
        result.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in result.__dict__})
        result.requires_grad_(self.requires_grad)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    return deepcopy


_STORAGES = id(_deepcopy)


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
        if is_virtual(self):
            raise TypeError(
                f"A tensor on a virtual GPU has no data that could be saved or sent, here one of shape {tuple(self.shape)}; "
                "leave out saving while planning."
            )
        return original(self, protocol)

    return reduce_ex


def _run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        return backend.caught(original, *args, **kwargs)

    return run_backward


@contextmanager
def building(device: torch.device, values: Values, made: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Parameters are made on a device as they are registered, and initialisers do nothing, so a model of any size costs no memory.

    Everything else of the construction stays real: models compute their own widths with tensors. ``made`` is called with each.
    """
    register_parameter, register_buffer = nn.Module.register_parameter, nn.Module.register_buffer

    @functools.wraps(register_parameter)
    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not is_virtual(param) and not nn.parameter.is_lazy(param):
            pinned = device.type == "cpu"  # host memory is virtual if it is pinned
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device, pin_memory=pinned)
            virtual = nn.Parameter(empty, param.requires_grad)
            virtual.__dict__.update({k: v for k, v in param.__dict__.items() if k not in virtual.__dict__})
            param = virtual
            made(param)
        elif param is not None and nn.parameter.is_lazy(param):
            param.__dict__[_LATER] = device
        register_parameter(module, name, param)

    @functools.wraps(register_buffer)
    def buffered(module: nn.Module, name: str, tensor: torch.Tensor | None, *args: Any, **kwargs: Any) -> None:
        if tensor is not None and not is_virtual(tensor) and device.type != "cpu":
            tensor = tensor.to(device)
        register_buffer(module, name, tensor, *args, **kwargs)

    initialisers = {n: f for n, f in vars(nn.init).items() if (n.endswith("_") and callable(f)) or n.startswith("_no_grad_")}
    before, values.building = values.building, True
    nn.Module.register_parameter, nn.Module.register_buffer = registered, buffered  # type: ignore[method-assign, assignment]
    for name in initialisers:
        setattr(nn.init, name, _leave)
    try:
        yield
    finally:
        values.building = before
        nn.Module.register_parameter, nn.Module.register_buffer = register_parameter, register_buffer  # type: ignore[method-assign]
        for name, function in initialisers.items():
            setattr(nn.init, name, function)


def _leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor
