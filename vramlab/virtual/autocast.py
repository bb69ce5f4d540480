"""CUDA's autocast on a device type of our own: which operators run in which precision, and the cache of weight copies.

PyTorch keeps these rules in C++, compiled for the device types it knows. What is saved for backward, and so most of the memory
of a mixed precision step, follows from them: here they are written down again, for PyTorch's spare device type PrivateUse1.

Reference: ``aten/src/ATen/autocast_mode.h`` and ``autocast_mode.cpp``; ``torchvision/csrc/ops/autocast``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

LOWER_PRECISION = (
    "_convolution",
    "_convolution.deprecated",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "einsum",
    "gru_cell",
    "linalg_multi_dot",
    "linalg_vecdot",
    "linear",
    "lstm_cell",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "rnn_relu_cell",
    "rnn_tanh_cell",
    "scaled_dot_product_attention",
)
"""Arguments are cast to autocast's type: the operators that tensor cores compute."""

FP32 = (
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "frobenius_norm.dim",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linalg_matrix_sqrth",  # torch 2.14
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "nuclear_norm",
    "nuclear_norm.dim",
    "pdist",
    "poisson_nll_loss",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "reciprocal",
    "renorm",
    "rms_norm",  # not in torch 2.11
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softplus",
    "tan",
    "triplet_margin_loss",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
)
"""Arguments are cast to fp32: large sums and functions with steep slopes."""

FP32_RESULT = (
    "cumprod",
    "cumprod.dimname",  # named dimensions: torch 2.11
    "cumsum",
    "cumsum.dimname",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "linalg_vector_norm",
    "log_softmax.Dimname",
    "log_softmax.int",
    "prod",
    "prod.dim_Dimname",
    "prod.dim_int",
    "softmax.Dimname",
    "softmax.int",
    "sum",
    "sum.dim_DimnameList",
    "sum.dim_IntList",
)
"""Nothing is cast: the operator reads its input as it is, and is told to return fp32 unless the caller names a type."""

FP32_NORM = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",  # torch 2.11
}
"""As `FP32_RESULT`, by the overload that takes a type."""

WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
)
"""Arguments are cast to fp32 if one of them is fp32, else to autocast's type."""

FUSED_SOFTMAX = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}
"""Beneath autocast: CUDA alone computes these from fp16 to fp32 without a copy of the input in fp32."""

FUSED = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""CUDA has a kernel for each, where a device type without one composes it of operators that keep more for backward."""

BANNED = ("binary_cross_entropy",)
"""Raises."""

TORCHVISION_FP32 = ("nms",)
TORCHVISION_FP32_AND_BACK = ("deform_conv2d", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
"""torchvision's: arguments are cast to fp32, and all results (indices too) to the type of the first argument."""

UNREACHED = ("_cudnn_rnn",)
"""AutocastCUDA has a rule, and none is needed here: PyTorch calls this one only on tensors of type cuda."""


class WeightCache:
    """Low-precision copies of weights, each made once in an autocast region, with the source known only weakly.

    As in C++ a copy stays until `clear`, even if its source is gone: it is memory that the card holds.

    Reference: ``cached_cast`` in ``autocast_mode.cpp``.
    """

    def __init__(self) -> None:
        self._copies: dict[WeakIdRef, torch.Tensor] = {}  # a key whose tensor is gone equals no other

    def __len__(self) -> int:
        return len(self._copies)

    def copy_of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The copy of this weight; its type is that of the first request."""
        key = WeakIdRef(weight)
        copy = self._copies.get(key)
        if copy is None:
            # Also under no_grad, as in checkpointed blocks: who uses the copy later may want the gradient.
            with torch.enable_grad():
                copy = self._copies[key] = _to(weight, dtype)
        return copy

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()


weight_cache = WeightCache()
"""The one of this process, as PyTorch has one."""

_device_type = ""  # where the rules are in force
_libraries: list[torch.library.Library] = []  # rules last as long as these
_KEY = "AutocastPrivateUse1"
_KEYS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

Rule = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
"""From an operator with its arguments, positional and by keyword, to its result."""


def install(device_type: str) -> None:
    """Put CUDA's autocast rules in force on PrivateUse1 tensors, for as long as the process lives; again is nothing.

    Args:
        device_type: the name that PrivateUse1 goes by.

    Raises:
        ValueError: PrivateUse1 has another name.
    """
    global _device_type
    if device_type != (name := torch._C._get_privateuse1_backend_name()):
        raise ValueError(f"Autocast rules go to PrivateUse1, which is called {name!r} in this process; got {device_type!r}.")
    if _device_type:
        return
    _device_type = device_type
    everything_else = torch.library.Library("_", "IMPL", _KEY)
    everything_else.fallback(torch.library.fallthrough_kernel)
    # Not every version of torch has all of the rules: it says itself for which operators, here also where CUDA is not built in.
    on_cuda = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    aten, torchvision = torch.library.Library("aten", "IMPL"), torch.library.Library("torchvision", "IMPL")
    _libraries.extend((everything_else, aten, torchvision))
    for names, rule in (
        (LOWER_PRECISION, _lower_precision),
        (FP32, _fp32),
        (FP32_RESULT, _fp32_result),
        (FP32_NORM, _fp32_norm),
        (WIDEST, _widest),
        (BANNED, _banned),
    ):
        for name in names:
            if f"aten::{name}" in on_cuda:
                _register(aten, name, rule)
    for name, op in FUSED_SOFTMAX.items():
        aten.impl(name, functools.partial(_softmax, _operator("aten", op)), "AutogradPrivateUse1")
    for name in FUSED:
        aten.impl(name, functools.partial(_no_data, name), "PrivateUse1")
    for name in TORCHVISION_FP32:
        _register(torchvision, name, _fp32)
    for name in TORCHVISION_FP32_AND_BACK:
        _register(torchvision, name, _fp32_and_back)


@contextmanager
def hooked() -> Iterator[None]:
    """Within, autocast clears `weight_cache` when its outermost region ends, and others' operators keep their rules for CUDA.

    Such a rule, made by ``torch.library.register_autocast(operator, "cuda", dtype)`` before, is taken over; an operator whose
    rule cannot be read, as of C++ extensions, raises RuntimeError when autocast meets it.
    """
    libraries = _take_over() if _device_type else []
    original = torch.clear_autocast_cache

    @functools.wraps(original)
    def clear_autocast_cache() -> None:
        original()
        weight_cache.clear()

    torch.clear_autocast_cache = clear_autocast_cache
    try:
        yield
    finally:
        torch.clear_autocast_cache = original
        weight_cache.clear()
        for library in libraries:
            library._destroy()


def _take_over() -> list[torch.library.Library]:
    """Rules for operators that are neither PyTorch's nor torchvision's; they last until their libraries are destroyed."""
    listed = torch._C._dispatch_get_registrations_for_dispatch_key
    libraries: dict[str, torch.library.Library] = {}
    for name in sorted(set(listed("AutocastCUDA")) - set(listed(_KEY))):
        namespace, _, operator = name.partition("::")
        if namespace in ("aten", "torchvision") or not _exists(namespace, operator):
            continue
        library = libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        _register(library, operator, functools.partial(_own_rule, _cast_inputs(name)))
    return list(libraries.values())


def _cast_inputs(name: str) -> torch.dtype | None:
    """The type that ``register_autocast`` was given for CUDA; None if the rule was made in another way."""
    definition = torch._library.custom_ops.OPDEFS.get(name)
    if definition is None:
        rule = torch._library.utils.lookup_op(name).py_kernels.get(torch._C.DispatchKey.AutocastCUDA)
        return inspect.getclosurevars(rule).nonlocals.get("cast_inputs") if rule else None
    by_type = getattr(definition, "_autocast_dtype", None)  # torch 2.11 has one attribute for each of CPU and CUDA
    return getattr(definition, "_autocast_cuda_dtype", None) if by_type is None else by_type.get("cuda")


def _exists(namespace: str, name: str) -> bool:
    """Whether it is defined: kernels may be left of an operator that is gone."""
    try:
        return _operator(namespace, name) is not None
    except AttributeError:
        return False


def _operator(namespace: str, name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _register(library: torch.library.Library, name: str, rule: Rule) -> None:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):  # as in C++, what is called from here sees no autocast
            return rule(_operator(library.ns, name), args, kwargs)

    library.impl(name, kernel, _KEY)


# The rules


def _lower_precision(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _in(torch.get_autocast_dtype(_device_type), op, args, kwargs)


def _fp32(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _in(torch.float32, op, args, kwargs)


def _fp32_result(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if _eligible(args[0]):
        position = [argument.name for argument in op._schema.arguments].index("dtype")
        named = args[position] if position < len(args) else kwargs.get("dtype")
        if named is None:
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _fp32_norm(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    defaults = [argument.default_value for argument in op._schema.arguments]
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    typed = _operator("aten", FP32_NORM[f"norm.{op._overloadname}"])
    return typed(*args, *defaults[len(args) :], **kwargs, dtype=dtype)


def _widest(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dtype = low = torch.get_autocast_dtype(_device_type)
    for tensor in _tensors((*args, *kwargs.values())):
        if not _eligible(tensor):
            continue
        if torch.float32 in (dtype, tensor.dtype):
            dtype = torch.float32
        elif tensor.dtype != low:
            raise RuntimeError(f"Under autocast to {low}, {op} takes {low} or torch.float32 as on CUDA, got {tensor.dtype}: cast it first.")
    return _in(dtype, op, args, kwargs)


def _banned(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        "binary_cross_entropy (BCELoss) is unsafe to autocast and refused, as on CUDA. Give the logits to "
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss) instead, or compute it in fp32 within "
        f"torch.autocast({_device_type!r}, enabled=False)."
    )


def _fp32_and_back(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    result, dtype = _in(torch.float32, op, args, kwargs), args[0].dtype
    return tuple(_to(tensor, dtype) for tensor in result) if isinstance(result, tuple) else _to(result, dtype)


def _softmax(op: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """``softmax`` and ``log_softmax`` of ``SoftMax.cpp`` on a CUDA tensor."""
    fused = tensor.dtype == torch.float16 and dtype == torch.float32
    return op(tensor if dtype is None or fused else _to(tensor, dtype), dim, fused)


def _no_data(name: str, *args: Any, **kwargs: Any) -> Any:
    """In place of a kernel: that there is one decides what autograd sees, and a dispatch mode answers before it is called."""
    raise NotImplementedError(f"{name} was called on tensors without data and outside the context of a virtual GPU.")


def _own_rule(dtype: torch.dtype | None, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if dtype is None:
        raise RuntimeError(
            f"{op} has a rule for CUDA's autocast that was not made by torch.library.register_autocast, and cannot be read. Make one "
            f"for the virtual device: torch.library.impl({op.name()!r}, 'AutocastPrivateUse1'), before its context is entered."
        )
    return op(*(_to(value, dtype) if _eligible(value) else value for value in args), **kwargs)


# Casting


def _in(dtype: torch.dtype, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator with its tensors, also those in lists, cast to this type: the last first, as GCC evaluates arguments."""
    named = {name: _cast(kwargs[name], dtype) for name in sorted(kwargs, key=_position(op), reverse=True)}
    positional = [_cast(value, dtype) for value in reversed(args)]
    return op(*reversed(positional), **named)


def _position(op: Any) -> Callable[[str], int]:
    return [argument.name for argument in op._schema.arguments].index


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not _eligible(value) or value.dtype == dtype:
        return value
    if _is_weight(value) and dtype == torch.get_autocast_dtype(_device_type) and torch.is_autocast_cache_enabled():
        return weight_cache.copy_of(value, dtype)
    return _to(value, dtype)


def _eligible(value: Any) -> bool:
    """Whether autocast may cast it: a floating-point tensor on the device, not of type float64."""
    return (
        isinstance(value, torch.Tensor) and value.device.type == _device_type and value.is_floating_point() and value.dtype != torch.float64
    )


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether its copy is worth keeping: an fp32 leaf that wants a gradient. None is kept of views, nor in inference mode."""
    trained = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf
    return trained and not tensor._is_view() and not torch.is_inference_mode_enabled()


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this type, itself if it has it, by the operator that C++ calls."""
    result: torch.Tensor = torch.ops.aten.to.dtype(tensor, dtype)
    return result


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
