"""``scaled_dot_product_attention`` as on a card: which kernel it takes (``attention_kernel``), and what surrounds it.

All of it follows PyTorch's C++ sources, named at each rule by their path below ``aten/src/ATen``. The rules were compared
with torch 2.14.1's own machine code, run on a CUDA runtime that hands out addresses and starts no kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from vramlab.virtual.scratch import HALF, Capability

aten = torch.ops.aten

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Version: 2.14 began to share key heads inside the fused attention kernels, and to take inputs without a batch."""


def _cudnn_version() -> int:
    try:
        return torch.backends.cudnn.version() or 92400
    except (RuntimeError, ValueError):  # a card in this machine for which this build's cuDNN is too new, or none after all
        return 92400


CUDNN = _cudnn_version()
"""Version of cuDNN: this build's, or for builds without it the one that torch 2.14.1's CUDA wheel depends on (9.24)."""

_BROKEN_DECODE = 91900 <= CUDNN <= 92500 and CUDNN != 92401
"""``native/cudnn/MHA.cpp``: single queries are disabled for cuDNN 9.19 to 9.25.0, except 9.24.1, on compute capability 10 and 11."""


# Which kernel attention takes. ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """A call of ``scaled_dot_product_attention`` on a card; inputs without a batch have been given one."""

    query: torch.Tensor  # (batch, heads, time, head)
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    gqa: bool
    capability: Capability

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    capability: Capability = (8, 9),
) -> SDPBackend:
    """The kernel that ``scaled_dot_product_attention`` takes on a card, by shapes, strides and types alone.

    Respects ``torch.nn.attention.sdpa_kernel`` with its priorities and the switches in ``torch.backends.cuda``. A user's
    order that equals PyTorch's own cannot be told from it: on Hopper and data centre Blackwell cuDNN then still goes first.

    Args:
        query: (batch, heads, time, head), on any device; ``key`` and ``value`` may have fewer heads with ``enable_gqa``.
        attn_mask: broadcast to (batch, heads, time, time).
        capability: the card's compute capability.

    Raises:
        RuntimeError: no kernel is allowed, or none of the allowed ones can; with each one's reason.

    Reference: ``native/transformers/cuda/sdp_utils.cpp``, ``select_sdp_backend``.
    """
    cuda = torch.backends.cuda
    refusals = {
        SDPBackend.FLASH_ATTENTION: (_flash_refuses, cuda.flash_sdp_enabled()),
        SDPBackend.EFFICIENT_ATTENTION: (_efficient_refuses, cuda.mem_efficient_sdp_enabled()),
        SDPBackend.CUDNN_ATTENTION: (_cudnn_refuses, cuda.cudnn_sdp_enabled()),
        SDPBackend.MATH: (lambda call: "", cuda.math_sdp_enabled()),
    }
    if not any(enabled for _, enabled in refusals.values()):
        raise RuntimeError(
            "No viable backend for scaled_dot_product_attention was found: all kernels are switched off. Allow one, for example "
            "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
    call = _Attention(*_batched(query, key, value, attn_mask), dropout_p, is_causal, enable_gqa, capability)
    reasons = []
    for backend in _priority(capability):
        refuses, enabled = refusals[backend]
        reason = refuses(call) if enabled else "switched off"
        if not reason:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise RuntimeError(f"No available kernel. Aborting execution. {'; '.join(reasons)}. Allow SDPBackend.MATH, which takes anything.")


def _priority(capability: Capability) -> list[SDPBackend]:
    """The order in which kernels are asked. cuDNN comes last, and first where it is the fastest.

    Reference: ``sdp_utils.cpp``, ``check_prefer_cudnn_attention``; the builds for CUDA 13, with cuDNN 9.15.1 or later.
    """
    default = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order() if SDPBackend(number) != SDPBackend.OVERRIDEABLE]
    deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    if order == default and capability[0] in (9, 10) and CUDNN > 91500 and not deprioritized:
        return [SDPBackend.CUDNN_ATTENTION, *default[:3]]
    return order


def _batched(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inputs of three dimensions with a batch of one before them, from torch 2.14 on (``sdp_utils_cpp.h``)."""
    if TORCH < (2, 14) or not query.dim() == key.dim() == value.dim() == 3:
        return query, key, value, mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask


def _first(*rules: tuple[bool, str]) -> str:
    return next((reason for broken, reason in rules if broken), "")


def _flash_refuses(call: _Attention) -> str:
    """Why not flash attention; empty when it can. Reference: ``can_use_flash_attention``."""
    if call.query.dim() != 4 or call.key.dim() != 4 or call.value.dim() != 4:
        return "inputs are not four-dimensional"
    sizes, capability = {tensor.size(-1) for tensor in call.inputs}, call.capability
    head = call.query.size(-1)
    small_registers = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    return _first(
        (call.mask is not None, "there is a mask"),
        (len(sizes) > 1 or head > 256, f"head sizes {sorted(sizes)} are not one size up to 256"),
        (not (8, 0) <= capability <= (12, 1), f"compute capability {capability} is not 8.0 to 12.1"),
        (
            small_registers and call.trains and head > 192 and (head <= 224 or call.dropout > 0),
            f"no backward for head size {head} on compute capability {capability}",
        ),
        (call.causal and call.query.size(-2) != call.key.size(-2), "causal with query and key of different length"),
        (_bad_types(call, HALF), "types are not one of float16 and bfloat16"),
        *_dense_rules(call, same_kv_heads=True, shares_heads=True, any_stride_for_one=True),
    )


def _efficient_refuses(call: _Attention) -> str:
    """Why not memory-efficient attention; empty when it can. Reference: ``can_use_mem_efficient_attention``."""
    if call.query.dim() != 4 or call.key.dim() != 4 or call.value.dim() != 4:
        return "inputs are not four-dimensional"
    major, new = call.capability[0], TORCH >= (2, 14)
    alignment = _gemm_alignment(call.query.dtype, major)
    heads = (call.query.size(-1), call.value.size(-1))
    nbytes = alignment * call.query.element_size()
    unaligned = major >= 8 and any(t.numel() and t.storage_offset() * t.element_size() % nbytes for t in call.inputs)
    return _first(
        (not (5, 0) <= call.capability <= (12, 1), f"compute capability {call.capability} is not 5.0 to 12.1"),
        (
            heads[0] != call.key.size(-1) or any(head % alignment or not head for head in heads),
            f"head sizes {heads} are not multiples of {alignment}",
        ),
        (new and unaligned, f"inputs do not begin at a multiple of {nbytes} bytes"),
        *_dense_rules(call, same_kv_heads=True, shares_heads=new, any_stride_for_one=False),
        (_bad_types(call, (*HALF, torch.float32) if major >= 8 else (torch.float16, torch.float32)), "types this card's kernels lack"),
    )


def _gemm_alignment(dtype: torch.dtype, major: int) -> int:
    """Elements to which a row must be aligned. Reference: ``sdp_utils.cpp``, ``minimum_gemm_alignment``."""
    tensor_cores = major >= 8 or (major == 7 and dtype in HALF)
    return max(4 if major >= 8 else 1, (8 if dtype in HALF else 4) if tensor_cores else 1)


def _cudnn_refuses(call: _Attention) -> str:
    """Why not cuDNN's attention; empty when it can. Reference: ``can_use_cudnn_attention``."""
    if call.query.dim() != 4 or call.key.dim() != 4 or call.value.dim() != 4:
        return "inputs are not four-dimensional"
    capability, heads = call.capability, (call.query.size(-1), call.value.size(-1))
    long_heads = capability == (9, 0) or (capability[0] == 10 and not (capability[1] == 7 and CUDNN <= 92500))
    wide = long_heads and CUDNN > 92200
    limit = 256 if wide else 192 if long_heads and CUDNN >= 91100 and heads == (192, 128) else 128
    trainable = max(heads) <= 128 or heads in ((192, 128), (256, 256))
    deterministic = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return _first(
        (call.dropout > 0 and 91100 < CUDNN < 91400, "this cuDNN has no dropout"),
        (deterministic, "it is not deterministic"),
        (_bad_types(call, HALF if capability[0] >= 8 else HALF[:1]), "types are not one of float16 and bfloat16"),
        (not _mask_fits_cudnn(call), "the mask needs a gradient or has another shape"),
        (not (8, 0) <= capability <= (12, 1), f"compute capability {capability} is not 8.0 to 12.1"),
        (call.dropout * 16 != math.floor(call.dropout * 16), "dropout is not a multiple of 1/16"),
        *_dense_rules(call, same_kv_heads=False, shares_heads=True, any_stride_for_one=True),
        (max(call.query.shape[:2]) > 65535, "batch or heads above 65,535"),
        (max(heads) > limit or any(head % 8 for head in heads), f"head sizes {heads} are not multiples of 8 up to {limit}"),
        (call.key.size(2) == 1, "key and value of length 1"),
        (call.query.size(2) == 1 and capability[0] in (10, 11) and _BROKEN_DECODE, "a query of length 1 on this card and cuDNN"),
        (call.dropout > 0 and call.query.size(2) == 1, "dropout with a query of length 1"),
        (wide and call.trains and not trainable, f"no backward for head sizes {heads}"),
    )


def _mask_fits_cudnn(call: _Attention) -> bool:
    """Reference: ``sdp_utils_cpp.h``, ``check_attn_mask_shape``."""
    mask = call.mask
    if mask is None:
        return True
    wanted = (call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))
    return (
        not mask.requires_grad
        and mask.dim() in (2, 4)
        and all(size in (1, want) for size, want in zip(mask.shape, wanted[-mask.dim() :], strict=True))
    )


def _bad_types(call: _Attention, allowed: Sequence[torch.dtype]) -> bool:
    return call.query.dtype not in allowed or any(tensor.dtype != call.query.dtype for tensor in call.inputs)


def _dense_rules(call: _Attention, *, same_kv_heads: bool, shares_heads: bool, any_stride_for_one: bool) -> Iterator[tuple[bool, str]]:
    """What all fused kernels ask of sizes and strides. Reference: ``sdp_utils_cpp.h``, the ``check_*_dense`` functions."""
    yield call.query.size(-2) == 0 or call.key.size(-2) == 0, "an empty sequence"
    strided = any(tensor.stride(-1) != 1 for tensor in call.inputs) and not (any_stride_for_one and call.query.size(-1) == 1)
    yield strided or (call.mask is not None and call.mask.stride(-1) != 1), "a last dimension that is not contiguous"
    yield len({tensor.size(0) for tensor in call.inputs}) > 1, "batches of different size"
    heads, key_heads, value_heads = (tensor.size(-3) for tensor in call.inputs)
    if call.gqa and shares_heads:
        broken = (same_kv_heads and key_heads != value_heads) or heads % key_heads != 0 or heads % value_heads != 0
    else:
        one_for_all = TORCH >= (2, 14) and heads > 0 and key_heads == value_heads == 1
        broken = not heads == key_heads == value_heads and not one_for_all
    yield broken, f"{heads} query heads, {key_heads} key heads and {value_heads} value heads"


# What attention does around its kernel. ------------------------------------------------------------------------------


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: Capability = (8, 9),
) -> torch.Tensor:
    """``scaled_dot_product_attention`` as on a card of this capability: the same operators around the same kernel.

    Raises:
        RuntimeError: types, devices or dimensions that do not go together, a mask beside ``is_causal``, or no kernel.

    Reference: ``native/transformers/attention.cpp``, ``scaled_dot_product_attention``.
    """
    _validate(query, key, value, attn_mask, is_causal)
    backend = attention_kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)
    if backend == SDPBackend.MATH:
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    unbatched = query.dim() == 3
    query, key, value, attn_mask = _batched(query, key, value, attn_mask)
    mask = _additive(attn_mask, query.dtype)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if backend == SDPBackend.FLASH_ATTENTION:
        out = _flash(query, key, value, dropout_p, is_causal, scale)
    elif backend == SDPBackend.CUDNN_ATTENTION:
        arguments = (query, key, value, mask, trains, dropout_p, is_causal, False)
        out = aten._scaled_dot_product_cudnn_attention(*arguments, scale=scale)[0]
    else:
        mask = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.size(2))
        out = aten._scaled_dot_product_efficient_attention(query, key, value, mask, trains, dropout_p, is_causal, scale=scale)[0]
    return out.squeeze(0) if unbatched else out


def _validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> None:
    inputs = (query, key, value)
    if len({tensor.dtype for tensor in inputs}) > 1:
        found = ", ".join(str(tensor.dtype) for tensor in inputs)
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {found}. Cast them to one.")
    if len({tensor.device for tensor in inputs}) > 1:
        found = ", ".join(str(tensor.device) for tensor in inputs)
        raise RuntimeError(f"Expected query, key, and value to have the same device type, but got {found}. Move them to one.")
    if min(tensor.dim() for tensor in inputs) < 2:
        found = ", ".join(str(tensor.dim()) for tensor in inputs)
        raise RuntimeError(f"Expected query, key, and value to all be at least 2 dimensional, but got {found}. Use (..., time, head).")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got {mask.dtype} and {query.dtype}. Cast the mask."
        )
    if mask is not None and causal:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True. "
            "Put the causal part into the mask, or leave the mask out."
        )


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, scale: float | None) -> torch.Tensor:
    """Heads padded to a multiple of 8, with the scale of the true size."""
    head = query.size(-1)
    scale = 1 / math.sqrt(head) if scale is None else scale
    if head % 8:
        query, key, value = (aten.constant_pad_nd(tensor, [0, 8 - head % 8]) for tensor in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return out[..., :head] if head % 8 else out


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of booleans as numbers to add: 0 where it is true, minus infinity elsewhere."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    blocked = torch.scalar_tensor(-inf, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), blocked)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The memory-efficient kernel wants every row to begin at a multiple of 8 elements: padded, then cut, where it does not."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    columns = mask.size(-1)
    return aten.constant_pad_nd(mask, [0, 8 - columns % 8])[..., :columns]


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """Attention from plain operators, in float32 for half precision.

    PyTorch's own would not do: it sees tensors without data and then adds the mask to a copy of the scores, not in place.

    Reference: ``attention.cpp``, ``_scaled_dot_product_attention_math``.
    """
    dtype = query.dtype
    if dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else abs(scale))
    scaled = query * (-factor if scale is not None and scale < 0 else factor)
    if causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    mask = _additive(mask, scaled.dtype)
    if gqa:
        key, value = (_repeat_heads(tensor, query.size(-3)) for tensor in (key, value))
    weights = torch.matmul(scaled, key.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = aten._safe_softmax(weights, -1)
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    returned = weights.to(dtype)  # C++ returns the weights too: they live while the product is computed
    out = torch.matmul(weights, value).to(dtype)
    del returned
    return out


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    if tensor.size(-3) == 0 or heads % tensor.size(-3):
        raise RuntimeError(
            f"Number of heads in key and value must divide the number of heads in query: {tensor.size(-3)} do not divide {heads}. "
            "Choose a divisor."
        )
    return tensor if tensor.size(-3) == heads else tensor.repeat_interleave(heads // tensor.size(-3), -3)


# On the virtual device. ------------------------------------------------------------------------------------------------


_libraries: list[torch.library.Library] = []


def install(device_type: str, capability: Callable[[torch.device], Capability]) -> None:
    """Let attention on the virtual device take the kernels that CUDA would, for good in this process; once is enough.

    PyTorch's choice is a C++ table by device type with no entry for the spare one, PrivateUse1, and so falls back to math.

    Args:
        device_type: the name given to PrivateUse1.
        capability: the compute capability of a device of that type, asked at each call.

    Raises:
        ValueError: ``device_type`` is not what PrivateUse1 is called in this process.
    """
    spare = torch._C._get_privateuse1_backend_name()
    if device_type != spare:
        raise ValueError(
            f"Kernels are installed for PyTorch's spare device type, called {spare!r} here, not {device_type!r}. Register it first."
        )
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # it takes its entries back when it is collected

    def run(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(query, *args, **kwargs, capability=capability(query.device))

    def choose(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> int:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability(query.device))
        return int(attention_kernel(*arguments).value)

    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", run, key)
        library.impl("_fused_sdp_choice", choose, key)
