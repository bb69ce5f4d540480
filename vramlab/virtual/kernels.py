"""What CUDA's kernels do to memory where the operators that a dispatch mode sees do not show it.

Three things: which attention kernel a card takes (``attention_kernel``), what kernels allocate and free again while they
run (``transients``), and the workspace that cuBLAS keeps (``uses_cublas``, ``cublas_workspace``).

All of it follows PyTorch's C++ sources, named at each rule by their path below ``aten/src/ATen``. The rules were compared
with torch 2.14.1's own machine code, run on a CUDA runtime that hands out addresses and starts no kernel.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend

from vramlab.gpus import GPU
from vramlab.tensors import tensors_in
from vramlab.units import KiB, round_up

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
Capability = tuple[int, int]
V = TypeVar("V")

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

_OPTIN_SHARED_MEMORY = {(5, 0): 48, (7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (12, 0): 99}
_THREADS_PER_SM = {(5, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (9, 0): 2048, (12, 0): 1536}
"""By compute capability, each up to the next: KiB of shared memory that one block may ask for, and resident threads.
Source: CUDA C++ Programming Guide, technical specifications per compute capability."""

_SMS = 128
"""Multiprocessors of a card for which the number is not known: those of an RTX 4090."""


def _from(table: dict[Capability, V], capability: Capability) -> V:
    return table[max((key for key in table if key <= capability), default=min(table))]


def _sms(card: GPU) -> int:
    return card.sms or _SMS


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


def kernel_outputs(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """An operator's outputs, where PyTorch's shape functions give one another place or size than the CUDA kernel does.

    Memory-efficient attention keeps seed and offset of its dropout on the CPU (``attention.cu``, Note [Seed and Offset
    Device]). They are real tensors of one element. And two losses allocate one number for each element, then shrink it to one:
    the memory stays as long as the loss (``BinaryOps.cpp``, ``mse_loss``).
    """
    if func in (aten.mse_loss.default, aten.smooth_l1_loss.default):
        a = _arguments(func, args, kwargs)
        if a["reduction"] == 0:  # none
            return out
        return out.new_empty(torch.broadcast_shapes(a["self"].shape, a["target"].shape)).resize_(out.shape)
    if func is aten._scaled_dot_product_efficient_attention.default and _arguments(func, args, kwargs)["dropout_p"] > 0:
        return (*out[:2], torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64))
    return out


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


# What kernels allocate and free again. -------------------------------------------------------------------------------


_Handler = Callable[[dict[str, Any], Any, GPU], list[int]]


def transients(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """What an operator's CUDA kernel allocates beside its outputs and frees before it returns, in order.

    Args:
        func: an operator as a dispatch mode sees it, with its arguments and its outputs.
        card: its compute capability and multiprocessors.

    Returns:
        Bytes: positive for an allocation, negative when one of that size is freed. What has no negative counterpart is freed
        at the end. 0 stands where the operator's next output is allocated; without it, the outputs come first.

    Not modelled, because the sizes are not in PyTorch's sources: what cuDNN's plans ask for (convolutions, its attention,
    RNNs). Nor is the scratch of sorting, scanning and selecting by the operators of these names (``sort``, ``cumsum``,
    ``nonzero``). ``transients`` is empty there, so what is planned is too small.
    """
    handler = _HANDLERS.get(func)
    return handler(_arguments(func, args, kwargs), out, card) if handler is not None else []


_CONVOLUTION = "cuDNN does not publish its workspaces for convolutions: they are planned as 0"
_RECURRENT = (
    "recurrent layers are planned with PyTorch's own kernels, as with torch.backends.cudnn.enabled=False: cuDNN does not publish how much "
    "it keeps for backward"
)
UNPUBLISHED = {
    **dict.fromkeys((aten.convolution.default, aten.convolution_backward.default), _CONVOLUTION),
    **dict.fromkeys((aten._thnn_fused_lstm_cell.default, aten._thnn_fused_gru_cell.default), _RECURRENT),
}
"""What is missing from the bytes of an operator, because nobody knows it."""


def workspace(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any, card: GPU) -> int:
    """The most bytes that an operator's kernel holds at one time beside its outputs: the peak of ``transients``."""
    held = peak = 0
    for nbytes in transients(func, args, kwargs, out, card):
        held += nbytes
        peak = max(peak, held)
    return peak


def _arguments(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in func._schema.arguments}


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copied(*tensors: torch.Tensor | None) -> list[int]:
    """``contiguous()`` copies what is not."""
    return [_nbytes(tensor) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]


def _freed(sizes: Sequence[int]) -> list[int]:
    return [*sizes, *(-size for size in sizes)]


def _around(sizes: Sequence[int]) -> list[int]:
    """Allocated before the output, freed after it."""
    return [*sizes, 0, *(-size for size in sizes)]


def in_order(func: torch._ops.OpOverload, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """An operator's outputs in the order in which its CUDA kernel allocates them."""
    order = _ORDER.get(func)
    return outputs if order is None or len(order) != len(outputs) else [outputs[i] for i in order]


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _flash_forward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Keys in splits, when there are too few queries for the card: each split's sums and outputs, in float32.

    Reference: ``native/transformers/cuda/flash_attn/flash_api.cpp``, ``set_params_splitkv``, ``num_splits_heuristic``.
    """
    batch, heads, queries, head = a["query"].shape
    key_heads, keys = a["key"].size(1), a["key"].size(2)
    if a["dropout_p"] > 0:  # the state of the random numbers is allocated twice, keys are not split
        return [16] if batch else []
    if batch == 0:
        return []
    if queries == 1 and heads > key_heads:  # one query: its heads that share a key stand in for queries
        heads, queries = key_heads, heads // key_heads
    splits = _flash_splits(
        batch * heads * ceil(queries / 64), 2 * _sms(card), ceil(keys / (256 if head <= 64 else 128 if head <= 128 else 64))
    )
    rows = splits * batch * heads * queries * 4
    return [rows, rows * round_up(head, 32 if head <= 128 else 64)] if splits > 1 else []


def _flash_splits(blocks: int, processors: int, key_blocks: int) -> int:
    if blocks >= 0.8 * processors:
        return 1
    efficiency: dict[int, float] = {}
    for splits in range(1, min(128, processors, key_blocks) + 1):
        if splits == 1 or ceil(key_blocks / splits) != ceil(key_blocks / (splits - 1)):
            waves = blocks * splits / processors
            efficiency[splits] = waves / ceil(waves)
    best = max(efficiency.values(), default=0.0)
    return next((splits for splits, value in efficiency.items() if value >= 0.85 * best), 1)


def _flash_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """The query's gradient in float32 with rows and heads rounded up; the keys' for every query head, when heads are shared.

    Reference: ``flash_api.cpp``, ``mha_bwd``; ``native/transformers/cuda/attention_backward.cu``.
    """
    batch, heads, queries, head = a["query"].shape
    key_heads, keys = a["key"].size(1), a["key"].size(2)
    copies = _copied(a["grad_out"].transpose(1, 2), a["out"].transpose(1, 2))
    if batch == 0:
        return _freed(copies)
    rows = batch * heads * round_up(queries, 128) * 4
    splits = ceil(_sms(card) / (batch * heads)) if _deterministic() else 1
    shared = [batch * keys * heads * head * a["key"].element_size()] * 2 if heads != key_heads else []
    return _freed([*copies, rows, splits * rows * round_up(head, 32 if head <= 128 else 64), *shared])


def _efficient_forward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Outputs in float32, where a half precision head is too long for registers (``mem_eff_attention/kernel_forward.h``)."""
    long_head = max(a["key"].size(3), a["value"].size(3)) > 128
    return _freed([2 * _nbytes(out[0])]) if long_head and a["query"].dtype in HALF else []


@dataclass(frozen=True)
class _EfficientBackward:
    """One of the compiled kernels of ``mem_eff_attention/kernels/cutlassB.h``."""

    rows: int  # kBlockSizeI
    columns: int  # kBlockSizeJ
    longest_head: int  # kMaxK

    @property
    def in_registers(self) -> bool:
        """Whether half precision keeps the gradients of key and value in registers (``kOutputInRF``)."""
        return self.longest_head <= self.rows


def _efficient_kernel(capability: Capability, dtype: torch.dtype, head: int, dropout: bool) -> _EfficientBackward:
    """The first kernel in the list that takes this head and fits into shared memory; what fits was seen in machine code."""
    shared, half = _from(_OPTIN_SHARED_MEMORY, capability), dtype in HALF
    if head <= 64:
        return _EfficientBackward(64, 64, 32 if head <= 32 else 64)
    if not half:
        wide = capability >= (8, 0) and shared > 99
        return _EfficientBackward(128 if wide else 64, 64, 128 if head <= 128 else 1 << 16)
    if capability in ((8, 6), (8, 9)) and head <= 96 and not dropout:
        return _EfficientBackward(128, 64, 96)
    if head <= 128:
        if capability >= (8, 0):
            return _EfficientBackward(128, 128, 128) if shared > 99 else _EfficientBackward(64, 64, 128)
        return _EfficientBackward(128 if capability >= (7, 0) else 64, 64, 128)
    return _EfficientBackward(128 if capability >= (7, 0) else 64, 64, 1 << 16)


def _efficient_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Sums over key blocks, in float32, and the products of outputs and their gradients.

    Reference: ``attention_backward.cu``, ``_efficient_attention_backward``; ``mem_eff_attention/kernel_backward.h``,
    ``workspace_size``.
    """
    batch, heads, queries, head = a["query"].shape
    keys, value_head, half = a["key"].size(2), a["value"].size(3), a["query"].dtype in HALF
    capability = card.capability
    kernel = _efficient_kernel(capability, a["query"].dtype, max(head, value_head), a["dropout_p"] > 0)
    shared = []
    if a["key"].size(1) != heads:
        shared = [batch * keys * heads * size * a["key"].element_size() for size in (head, value_head)]
    before = [*shared, *_copied(a["grad_out_"].transpose(1, 2))]
    row_sums = batch * heads * queries * 4
    in_kernel = half and (kernel.in_registers or not (7, 0) <= capability < (7, 5))
    product = [] if in_kernel else _delta_in_operators(a, batch * heads * queries * value_head * 4)
    sums = _efficient_sums(kernel, half, batch, heads, queries, keys, head, value_head, capability)
    return [*before, *(product or [row_sums]), sums, -row_sums, -sums, *(-size for size in before)]


def _delta_in_operators(a: dict[str, Any], products: int) -> list[int]:
    """``(grad_out.float() * out.float()).sum(-1).transpose(-2, -1).contiguous()``; ends with what stays."""
    batch, heads, queries, _ = a["query"].shape
    rows = batch * heads * queries * 4
    casts = [products, products] if a["query"].dtype in HALF else []
    again = [rows] if heads > 1 and queries > 1 else []  # transposing a dimension of one leaves it contiguous
    return [*casts, products, *(-size for size in casts), rows, *again, -products, *(-size for size in again)]


def _efficient_sums(
    kernel: _EfficientBackward,
    half: bool,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head: int,
    value_head: int,
    capability: Capability,
) -> int:
    splits = ceil(keys / kernel.columns)
    spilled = half and not kernel.in_registers
    if batch * heads >= 256 and keys <= 2 * kernel.columns:
        splits = 1
    if spilled:
        splits = min(splits, 200 // max(1, batch * heads))
    if capability < (7, 0) or splits < 1 or _deterministic():
        splits = 1
    floats = 0
    if spilled:
        floats += splits * kernel.columns * (round_up(head, kernel.rows) + round_up(value_head, kernel.rows))
    if half or capability >= (7, 0):
        tile = 4 + kernel.rows * kernel.columns  # a lock, a counter and two fillers before it
        floats += ceil(queries / kernel.rows) * ceil(head / kernel.columns) * tile
    return batch * heads * round_up(floats, 4) * 4


def _embedding_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Above 3,072 indices: they are sorted, and rows of one index are summed ten at a time, in float32.

    Reference: ``native/cuda/Embedding.cu``, ``embedding_dense_backward_cuda``; ``native/cuda/EmbeddingBackwardKernel.cu``.
    """
    indices, rows, size = a["indices"], a["indices"].numel(), a["indices"].element_size()
    copies = _copied(indices, a["grad_output"])
    if rows <= 3072 and not a["scale_grad_by_freq"]:
        return _around(copies)
    list_ = rows * size
    distinct = min(rows, a["num_weights"])
    pieces = rows // 10 + distinct
    width, itemsize = a["grad_output"].size(-1), a["grad_output"].element_size()
    sums = [pieces * width * max(4, itemsize)]
    threads = round_up(width, 32)
    blocks = ceil(distinct * threads / min(threads, 1024))
    if blocks < 4 * _sms(card) and pieces > 4 * blocks and not torch.are_deterministic_algorithms_enabled():  # few rows: added up in place
        sums = [pieces * size, *([a["num_weights"] * width * 4] if itemsize == 2 else [])]
    sorting = [list_, _radix_sort(rows, size, int(a["num_weights"]).bit_length(), card)]  # of the indices and the numbers 0, 1, ...
    counts = [list_] if a["scale_grad_by_freq"] else []
    picking = [list_, _scan(rows, _from(_UNIQUE_TILES, card.capability)[size], True)]  # where each index begins
    adding_up = [_scan(distinct, _SCAN_TILES[size], size == 8)]  # how many pieces come before
    before = [*copies, list_, list_, *_freed(sorting), *counts]
    return [*before, 0, list_, 8, *_freed(picking), distinct * size, distinct * size, *_freed(adding_up), 8, pieces * size, *sums]


# Scratch of cub: tiles, the items of one block, by compute capability and by bytes of a key.
_SORT_TILES = {(7, 5): {4: 11776, 8: 2816}, (8, 0): {4: 6528, 8: 3840}, (9, 0): {4: 6528, 8: 4608}}
_UNIQUE_TILES = {(7, 5): {4: 704, 8: 320}, (8, 0): {4: 2816, 8: 1344}, (8, 6): {4: 704, 8: 320}, (9, 0): {4: 7168, 8: 4928}}
_SCAN_TILES = {4: 3840, 8: 896}
"""Found by bisection in torch 2.14.1's machine code; cub has them in ``cub/device/dispatch/tuning``."""


def _radix_sort(items: int, size: int, bits: int, card: GPU) -> int:
    """Scratch for sorting pairs of two integers of this size: counts, a state for each tile, and a second place for the pairs.

    Reference: ``cub/device/dispatch/dispatch_radix_sort.cuh``, ``InvokeOnesweep``, and ``InvokeSingleTile`` for few items.
    """
    if items <= (4864 if size == 4 else 2304):
        return 1
    passes = ceil(bits / 8)
    states = ceil(items / _from(_SORT_TILES, card.capability)[size]) * 256 * 4
    places = [items * size, items * size] if passes > 1 else []
    return sum(round_up(part, 256) for part in (passes * 256 * 8, states, *places, passes * 4)) + 255


def _scan(items: int, tile: int, more: bool) -> int:
    """Scratch of one pass over all items: 16 bytes a tile. Reference: ``cub/agent/single_pass_scan_operators.cuh``."""
    return round_up((ceil(items / tile) + 32) * 16, 256) + (256 if more else 0) + 255


def _layer_norm_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Copies of what is not contiguous, and for very many short rows the weights' gradients in blocks of rows.

    Reference: ``native/cuda/layer_norm_kernel.cu``, ``LaunchGammaBetaBackwardCUDAKernel``.
    """
    columns = prod(a["normalized_shape"])
    rows = a["input"].numel() // max(1, columns)
    copies = _copied(a["grad_out"], a["input"])
    if not (rows > 64 * 1024 and columns // 32 < _sms(card) // 2):
        return _freed(copies)
    blocks = min(32 * 1024 // ceil(columns / 32), ceil(rows / 32))
    unused = [_nbytes(gradient) for gradient in out[1:] if gradient is not None]  # made first, replaced by the sums of the blocks
    partial = [torch.empty(blocks, columns, dtype=a["input"].dtype, device="meta") for _ in unused]
    events = [*unused, *copies, *map(_nbytes, partial)]
    for block, nbytes in zip(partial, unused, strict=True):
        events += [*_freed(_partial_sums(block, (0,), card)), -nbytes]
    return events


def _product_copies(*names: str) -> _Handler:
    """Matrices that cuBLAS cannot read are copied: rows or columns must follow one another.

    Reference: ``native/cuda/cuBlasCommonArgs.h``, ``prepare_matrix_for_cublas``; ``native/cuda/Blas.cpp``,
    ``prepare_batch_matrix_for_cublas``.
    """

    def handler(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
        return _freed([_nbytes(a[name]) for name in names if not _readable(a[name])])

    return handler


def _readable(matrix: torch.Tensor) -> bool:
    if matrix.dim() == 2 and (matrix.is_contiguous() or matrix.t().is_contiguous()):
        return True
    (rows, columns), (down, along) = matrix.shape[-2:], matrix.stride()[-2:]
    return (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))


def _copies(*names: str, before: bool = False) -> _Handler:
    """A handler for kernels that read contiguous inputs alone (``native/cuda/SoftMax.cu``, ``native/Embedding.cpp``)."""
    freed = _around if before else _freed
    return lambda a, out, card: freed(_copied(*(a[name] for name in names)))


def _softmax_backward(a: dict[str, Any], out: torch.Tensor, card: GPU) -> list[int]:
    """The product of gradient and output (``native/cuda/SoftMax.cu``, ``softmax_backward_cuda_out``)."""
    product = torch.empty_like(a["grad_output"], device="meta")
    return _freed([_nbytes(product), *_copied(product, a["output"])])


def _loss(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Losses are computed for every element, then reduced; from logits through one more tensor.

    Reference: ``native/Loss.cpp``, ``native/cuda/Loss.cu``. Weights of ``binary_cross_entropy_with_logits`` are not modelled.
    """
    each = torch.empty(torch.broadcast_shapes(a["self"].shape, a["target"].shape), dtype=out.dtype, device="meta")
    whole = [_nbytes(each)] * (2 if "pos_weight" in a else 1)
    if a["reduction"] == 0:
        return _freed(whole[1:])
    if "delta" in a:  # huber_loss makes its output last
        whole.append(0)
    return [*whole, *_freed(_partial_sums(each, None, card))]


def _log_sum_exp(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Maxima, then exponentials of all elements (``native/ReduceOps.cpp``, ``logsumexp_out_impl``)."""
    exponentials = torch.empty_like(a["self"], device="meta")
    maxima, elements = _nbytes(out), _nbytes(exponentials)
    largest = _freed(_partial_sums(a["self"], a["dim"], card, element=a["self"].element_size()))
    sums = _freed(_partial_sums(exponentials, a["dim"], card))
    return [maxima, *largest, maxima, out.numel(), -out.numel(), -maxima, elements, *sums, -elements, -maxima]


def _safe_softmax(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Which elements are minus infinity, and which rows are nothing else, as booleans (``attention.cpp``, ``_safe_softmax``)."""
    elements, rows = out.numel(), out.numel() // max(1, out.size(a["dim"]))
    return _freed([elements, rows, out.element_size()])


def _index(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Several indices are made alike: contiguous, if their strides differ once they are of one shape.

    Reference: ``native/TensorAdvancedIndexing.cpp``, ``AdvancedIndex``.
    """
    indices = [index for index in a["indices"] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    expanded = [torch.empty_strided(index.shape, index.stride(), dtype=index.dtype, device="meta").expand(shape) for index in indices]
    return _around(_copied(*expanded)) if len({index.stride() for index in expanded}) > 1 else []


def _added_by_index(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Values that are added at indices are sorted by them. Of one index for the first dimension alone.

    Reference: ``native/cuda/Indexing.cu``, ``index_put_with_sort_kernel``.
    """
    index = a["indices"][0] if len(a["indices"]) == 1 else None
    if not a["accumulate"] or index is None or index.dtype != torch.int64 or not index.numel():
        return []
    list_, bits = _nbytes(index), int(a["self"].size(0)).bit_length()
    sorting = [list_, _radix_sort(index.numel(), 8, bits, card)]
    values = a["values"]
    values = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
    copy = _copied(values.expand(*index.shape, *a["self"].shape[1:]))
    # 0 comes last: what autograd adds to is zeros that this operator takes over.
    return [list_, *_freed([list_]), *copy, list_, list_, *_freed(sorting), -list_, -list_, -list_, *(-size for size in copy), 0]


def _norms(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """One float32 for each 65,536 elements of the longest tensor, for every tensor (``native/cuda/ForeachReduceOp.cu``)."""
    tensors = a["self"]
    chunks = max((ceil(tensor.numel() / 65536) for tensor in tensors), default=0)
    return _around([len(tensors) * chunks * 4])


def _convolution_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """The bias's gradient is a sum outside cuDNN (``native/Convolution.cpp``). What cuDNN takes is not modelled."""
    if not a["output_mask"][2]:
        return []
    grad = a["grad_output"]
    return _freed(_partial_sums(grad, [dim for dim in range(grad.dim()) if dim != 1], card))


def convolution_workspace_range(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    """The least and the most bytes that cuDNN plausibly takes for a convolution while it runs.

    Which algorithm runs, and with what workspace, is decided by heuristics inside cuDNN that are not published. An implicit
    GEMM needs nothing; an explicit one writes out every window of the input once. Winograd and FFT lie between for usual
    shapes, yet nothing bounds them: requests far above have been reported (pytorch issues 31500, 49207).
    """
    a = _arguments(func, args, kwargs)
    weight, spatial = a["weight"], a.get("grad_output", out)
    if not isinstance(spatial, torch.Tensor):
        spatial = tensors_in(out)[0]
    positions = spatial.size(0) * prod(spatial.shape[2:])
    return 0, positions * weight.size(1) * a["groups"] * prod(weight.shape[2:]) * weight.element_size()


# Reductions: partial sums of many blocks. ----------------------------------------------------------------------------


@dataclass
class _Dim:
    size: int
    stride: int  # of the input, in elements
    out: int  # of the output; 0 for a dimension that is summed


def _partial_sums(
    tensor: torch.Tensor, dims: Sequence[int] | range | None, card: GPU, *, element: int | None = None, vector: int | None = None
) -> list[int]:
    """Bytes of the buffers through which blocks of a reduction hand on partial results: results and counters; or none.

    They appear where few outputs are made of many inputs, as for the gradient of a bias. Between blocks every thread's
    result has a place, so that they can be much larger than the output: 32 rows and 4 columns for each.

    Args:
        tensor: what is reduced.
        dims: the dimensions that vanish; None or none for all.
        element: bytes of one partial result; without, those of the accumulation type.
        vector: how many inputs a thread reads at once.

    Reference: ``native/cuda/Reduce.cuh``, ``setReduceConfig`` and ``global_memory_size``; ``TensorIterator.cpp``,
    ``reorder_dimensions``, ``coalesce_dimensions``, ``with_32bit_indexing``.
    """
    if tensor.numel() == 0:
        return []
    itemsize = tensor.element_size()
    element = element or (8 if itemsize == 8 or not tensor.dtype.is_floating_point else 4)
    gone = {dim % tensor.dim() for dim in dims} if dims is not None and tensor.dim() else set()
    gone = gone or set(range(tensor.dim()))
    layout: list[_Dim] = []
    length = 1
    for dim in reversed(range(tensor.dim())):
        layout.append(_Dim(tensor.size(dim), tensor.stride(dim), 0 if dim in gone else length))
        length *= 1 if dim in gone else tensor.size(dim)
    layout = _coalesced(_sorted_dims(layout))
    vector = vector or (8 if itemsize == 2 else 4)
    sizes: list[int] = []
    for part in _indexable(layout, itemsize):
        buffers = _partial_results(part, int(tensor.storage_offset()), element, vector, card)
        sizes = max(sizes, buffers, key=sum)
    return sizes


def _sorted_dims(dims: list[_Dim]) -> list[_Dim]:
    """Summed dimensions first, then by stride: an insertion sort, because undecided pairs stay where they are."""
    dims = list(dims)
    for start in range(1, len(dims)):
        at = start
        for before in range(start - 1, -1, -1):
            order = _compare(dims[before], dims[at])
            if order > 0:
                dims[before], dims[at] = dims[at], dims[before]
                at = before
            elif order < 0:
                break
    return dims


def _compare(one: _Dim, other: _Dim) -> int:
    if (one.out == 0) != (other.out == 0):
        return 1 if other.out == 0 else -1
    for a, b in ((one.out, other.out), (one.stride, other.stride)):
        if a and b:
            if a != b:
                return -1 if a < b else 1
            if one.size > other.size:
                return 1
    return 0


def _coalesced(dims: list[_Dim]) -> list[_Dim]:
    merged = [_Dim(dim.size, dim.stride, dim.out) for dim in dims[:1]]
    for dim in dims[1:]:
        last = merged[-1]
        if last.size == 1:
            merged[-1] = _Dim(dim.size, dim.stride, dim.out)
        elif dim.size != 1 and not (last.size * last.stride == dim.stride and last.size * last.out == dim.out):
            merged.append(_Dim(dim.size, dim.stride, dim.out))
        elif dim.size != 1:
            last.size *= dim.size
    return merged


def _indexable(dims: list[_Dim], itemsize: int) -> Iterator[list[_Dim]]:
    """Halves, until 32-bit numbers count every element and every byte."""
    most = 2**31 - 1
    elements = prod(dim.size for dim in dims)
    offsets = [1 + sum((dim.size - 1) * stride * itemsize for dim, stride in pairs) for pairs in _strides(dims)]
    if elements <= most and max(offsets) <= most:
        yield dims
        return
    extents = [max((dim.size - 1) * dim.stride, (dim.size - 1) * dim.out) for dim in dims]
    split = len(dims) - 1 - max(range(len(dims)), key=lambda i: extents[len(dims) - 1 - i])
    for size in (dims[split].size // 2, dims[split].size - dims[split].size // 2):
        part = [_Dim(dim.size, dim.stride, dim.out) for dim in dims]
        part[split].size = size
        yield from _indexable(part, itemsize)


def _strides(dims: list[_Dim]) -> tuple[list[tuple[_Dim, int]], list[tuple[_Dim, int]]]:
    return [(dim, dim.stride) for dim in dims], [(dim, dim.out) for dim in dims]


def _partial_results(dims: list[_Dim], offset: int, element: int, vector: int, card: GPU) -> list[int]:
    outputs = prod(dim.size for dim in dims if dim.out)
    inputs = prod(dim.size for dim in dims) // outputs
    summed = sum(dim.out == 0 for dim in dims)
    along = summed == len(dims) or (summed > 0 and dims[0].stride < dims[summed].stride)  # summed where memory is contiguous
    width0, width1 = (inputs, outputs) if along else (outputs, inputs)
    out_vector = 1
    if (dims[0] if along else dims[summed]).stride == 1:
        if along and width0 >= 128 and summed == 1:
            width0 //= vector
        elif not along:
            out_vector = _output_vector(dims, summed, offset)
            width0 //= out_vector
    threads_limit = 512 // out_vector
    power0, power1 = min(_power(width0), threads_limit), min(_power(width1), threads_limit)
    height = min(power1, threads_limit // min(power0, 32))
    width = min(power0, threads_limit // height)
    per_row = width if along else 1
    across_warps = ceil(inputs / per_row) >= min(height * 16, 256)
    values = ceil(inputs / (per_row * (height if across_warps else 1)))
    columns = (1 if along else width) * (1 if across_warps else height)
    grid = ceil(outputs // out_vector / columns)
    target = _sms(card) * (_from(_THREADS_PER_SM, card.capability) // (width * height))
    if not across_warps or values < 256 or grid > target:
        return []
    blocks = max(min(ceil(target / grid), ceil(values / 16)), ceil(values / 256))
    places = 1 if along else width * out_vector
    return [element * outputs * blocks * places, 4 * grid] if blocks > 1 else []


def _output_vector(dims: list[_Dim], summed: int, offset: int) -> int:
    size = 4
    others = [dim.stride for at, dim in enumerate(dims) if at != summed]
    for number in (offset, dims[summed].size, *others):
        while number % size:
            size //= 2
    return size


def _power(number: int) -> int:
    """The largest power of two up to a number; 1 for less."""
    return 1 << max(0, number.bit_length() - 1)


def _sum(a: dict[str, Any], out: torch.Tensor, card: GPU) -> list[int]:
    """Sums, means, products and norms; the input is cast to the output's type first."""
    return _reduction()(a | {"dtype": out.dtype}, out, card)


def _reduction(element: Callable[[int], int | None] = lambda itemsize: None) -> _Handler:
    """A handler for a reduction whose partial results take so many bytes for an input of so many; None for a sum's."""

    def handler(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
        tensor, dims, dtype = a["self"], a.get("dim"), a.get("dtype")
        cast: list[int] = []
        if dtype not in (None, tensor.dtype) and not (tensor.dtype in HALF and dtype == torch.float32):  # those the kernel reads itself
            tensor = torch.empty_like(tensor, dtype=dtype, device="meta")
            cast = [_nbytes(tensor)]
        sizes = _partial_sums(tensor, [dims] if isinstance(dims, int) else dims, card, element=element(tensor.element_size()))
        return _freed([*cast, *sizes])

    return handler


def _extreme(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """The largest or smallest of all (``native/ReduceAllOps.cpp``): of a contiguous copy."""
    tensor = torch.empty(a["self"].shape, dtype=a["self"].dtype, device="meta")
    return _freed([*_copied(a["self"]), *_partial_sums(tensor, None, card, element=tensor.element_size())])


def _same(itemsize: int) -> int:
    return itemsize


def _with_index(itemsize: int) -> int:
    return 16  # the value and a 64-bit place


def _welford(itemsize: int) -> int:
    return 32 if itemsize == 8 else 16  # mean, squares and two counts: ``native/SharedReduceOps.h``, ``WelfordData``


def _one(itemsize: int) -> int:
    return 1


_ORDER = {
    aten._scaled_dot_product_efficient_attention.default: (2, 3, 0, 1),
    aten.native_dropout.default: (1, 0),
}
"""Outputs that are not allocated in the order in which they are returned, by what comes first."""

_HANDLERS: dict[torch._ops.OpOverload, _Handler] = {
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten.embedding_dense_backward.default: _embedding_backward,
    **dict.fromkeys((aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default), _layer_norm_backward),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _copies("self")),
    aten._log_softmax_backward_data.default: _copies("grad_output", "output"),
    aten._softmax_backward_data.default: _softmax_backward,
    aten.embedding.default: _copies("indices", before=True),
    aten.index.Tensor: _index,
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default), _added_by_index),
    aten.convolution_backward.default: _convolution_backward,
    aten.logsumexp.default: _log_sum_exp,
    aten._foreach_norm.Scalar: _norms,
    aten.mm.default: _product_copies("self", "mat2"),
    aten.addmm.default: _product_copies("mat1", "mat2"),
    aten.bmm.default: _product_copies("self", "mat2"),
    aten.baddbmm.default: _product_copies("batch1", "batch2"),
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _loss),
    **dict.fromkeys((aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default), _loss),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.prod.default), _sum),
    **dict.fromkeys((aten.prod.dim_int, aten.linalg_vector_norm.default), _sum),
    **dict.fromkeys((aten.amax.default, aten.amin.default), _reduction(_same)),
    **dict.fromkeys((aten.max.default, aten.min.default), _extreme),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), _reduction(_with_index)),
    **dict.fromkeys((aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction), _reduction(_welford)),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.all.default, aten.all.dim), _reduction(_one)),
}


# The workspace of cuBLAS. --------------------------------------------------------------------------------------------

_CUBLAS = {
    aten.mm.default: ("self", "mat2"),
    aten.addmm.default: ("mat1", "mat2"),
    aten.addmm_.default: ("mat1", "mat2"),
    aten._addmm_activation.default: ("mat1", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
    aten.baddbmm_.default: ("batch1", "batch2"),
    aten.addbmm.default: ("batch1", "batch2"),
    aten.mv.default: ("self", "vec"),
    aten.addmv.default: ("mat", "vec"),
    aten.addmv_.default: ("mat", "vec"),
    aten.dot.default: ("self", "tensor"),
    aten.vdot.default: ("self", "other"),
    aten._scaled_mm.default: ("self", "mat2"),
    aten._trilinear.default: ("i1", "i2"),
}


def uses_cublas(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> bool:
    """Whether an operator calls cuBLAS, whose workspace is then allocated if this thread and stream have none yet.

    With nothing to multiply PyTorch fills the output without it (``native/cuda/Blas.cpp``). Outer products are elementwise,
    convolutions and RNNs go to cuDNN, ``_int_mm`` brings no workspace. Complex and integer types are treated like others.
    """
    names = _CUBLAS.get(func)
    if names is None:
        return False
    a = _arguments(func, args, kwargs or {})
    return all(a[name].numel() > 0 for name in names)


def cublas_workspace(card: GPU) -> int:
    """Bytes that PyTorch allocates for cuBLAS once for every handle, so thread, and stream; it keeps them.

    A training step has two threads: forward runs on the caller's, backward on one of autograd's for each device, where the
    forward of a checkpoint is computed again too. The workspace comes after the first product's output. It is also that of
    cuBLASLt, which adds biases and activations to products: both share it unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``,
    which is not modelled (one further buffer for products with a bias, by default of 1 MiB).

    ``CUBLAS_WORKSPACE_CONFIG`` is honoured: the sum of the sizes, in KiB, times the counts in ``:4096:2:16:8``. A text
    without such pairs counts as none.

    Reference: ``cuda/CublasHandlePool.cpp``, ``parseChosenWorkspaceSize``, ``setCublasWorkspace``.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * KiB * int(count) for size, count in pairs) if pairs else card.cublas_workspace
