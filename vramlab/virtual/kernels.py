"""What CUDA's kernels do to memory where the operators that a dispatch mode sees do not show it.

What they allocate and free again while they run (``transients``), their outputs' order (``in_order``), and outputs that are not as
PyTorch's shape functions say (``kernel_outputs``). Subjects of their own are in the modules whose ``HANDLERS`` are put together here.

All of it follows PyTorch's C++ sources, named at each rule by their path below ``aten/src/ATen``. The rules were compared
with torch 2.14.1's own machine code, run on a CUDA runtime that hands out addresses and starts no kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import torch

from vramlab.gpus import GPU
from vramlab.tensors import tensors_in
from vramlab.virtual import attention_scratch, lookups, reductions, tables
from vramlab.virtual.reductions import partial_sums
from vramlab.virtual.scratch import Handler, bytes_of, copied, freed, named_arguments, sms

aten = torch.ops.aten


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
    handler = _handler(func)
    return handler(named_arguments(func, args, kwargs), out, card) if handler is not None else []


@functools.cache
def _handler(func: torch._ops.OpOverload) -> Handler | None:
    name = getattr(func, "_name", "")
    return tables.FSDP_HANDLERS.get(name) if name.startswith("fsdp::") else _HANDLERS.get(func)


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


_ORDER = {
    aten._scaled_dot_product_efficient_attention.default: (2, 3, 0, 1),
    aten.native_dropout.default: (1, 0),
}
"""Outputs that are not allocated in the order in which they are returned, by what comes first."""


def in_order(func: torch._ops.OpOverload, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """An operator's outputs in the order in which its CUDA kernel allocates them."""
    order = _ORDER.get(func)
    return outputs if order is None or len(order) != len(outputs) else [outputs[i] for i in order]


def kernel_outputs(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """An operator's outputs, where PyTorch's shape functions give one another place or size than the CUDA kernel does.

    Memory-efficient attention keeps seed and offset of its dropout on the CPU (``attention.cu``, Note [Seed and Offset
    Device]). They are real tensors of one element. And two losses allocate one number for each element, then shrink it to one:
    the memory stays as long as the loss (``BinaryOps.cpp``, ``mse_loss``).
    """
    if func in (aten.mse_loss.default, aten.smooth_l1_loss.default):
        a = named_arguments(func, args, kwargs)
        if a["reduction"] == 0:  # none
            return out
        return out.new_empty(torch.broadcast_shapes(a["self"].shape, a["target"].shape)).resize_(out.shape)
    if func is aten._scaled_dot_product_efficient_attention.default and named_arguments(func, args, kwargs)["dropout_p"] > 0:
        return (*out[:2], torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64))
    return out


# Operators without a module of their own. ------------------------------------------------------------------------------


def _layer_norm_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """Copies of what is not contiguous, and for very many short rows the weights' gradients in blocks of rows.

    Reference: ``native/cuda/layer_norm_kernel.cu``, ``LaunchGammaBetaBackwardCUDAKernel``.
    """
    columns = prod(a["normalized_shape"])
    rows = a["input"].numel() // max(1, columns)
    copies = copied(a["grad_out"], a["input"])
    if not (rows > 64 * 1024 and columns // 32 < sms(card) // 2):
        return freed(copies)
    blocks = min(32 * 1024 // ceil(columns / 32), ceil(rows / 32))
    unused = [bytes_of(gradient) for gradient in out[1:] if gradient is not None]  # made first, replaced by the sums of the blocks
    partial = [torch.empty(blocks, columns, dtype=a["input"].dtype, device="meta") for _ in unused]
    events = [*unused, *copies, *map(bytes_of, partial)]
    for block, nbytes in zip(partial, unused, strict=True):
        events += [*freed(partial_sums(block, (0,), card)), -nbytes]
    return events


def _product_copies(*names: str) -> Handler:
    """Matrices that cuBLAS cannot read are copied: rows or columns must follow one another.

    Reference: ``native/cuda/cuBlasCommonArgs.h``, ``prepare_matrix_for_cublas``; ``native/cuda/Blas.cpp``,
    ``prepare_batch_matrix_for_cublas``.
    """

    def handler(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
        return freed([bytes_of(a[name]) for name in names if not _readable(a[name])])

    return handler


def _readable(matrix: torch.Tensor) -> bool:
    if matrix.dim() == 2 and (matrix.is_contiguous() or matrix.t().is_contiguous()):
        return True
    (rows, columns), (down, along) = matrix.shape[-2:], matrix.stride()[-2:]
    return (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))


def _copies(*names: str) -> Handler:
    """A handler for kernels that read contiguous inputs alone (``native/cuda/SoftMax.cu``)."""
    return lambda a, out, card: freed(copied(*(a[name] for name in names)))


def _softmax_backward(a: dict[str, Any], out: torch.Tensor, card: GPU) -> list[int]:
    """The product of gradient and output (``native/cuda/SoftMax.cu``, ``softmax_backward_cuda_out``)."""
    product = torch.empty_like(a["grad_output"], device="meta")
    return freed([bytes_of(product), *copied(product, a["output"])])


def _convolution_backward(a: dict[str, Any], out: Any, card: GPU) -> list[int]:
    """The bias's gradient is a sum outside cuDNN (``native/Convolution.cpp``). What cuDNN takes is not modelled."""
    if not a["output_mask"][2]:
        return []
    grad = a["grad_output"]
    return freed(partial_sums(grad, [dim for dim in range(grad.dim()) if dim != 1], card))


def convolution_workspace_range(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    """The least and the most bytes that cuDNN plausibly takes for a convolution while it runs.

    Which algorithm runs, and with what workspace, is decided by heuristics inside cuDNN that are not published. An implicit
    GEMM needs nothing; an explicit one writes out every window of the input once. Winograd and FFT lie between for usual
    shapes, yet nothing bounds them: requests far above have been reported (pytorch issues 31500, 49207).
    """
    a = named_arguments(func, args, kwargs)
    weight, spatial = a["weight"], a.get("grad_output", out)
    if not isinstance(spatial, torch.Tensor):
        spatial = tensors_in(out)[0]
    positions = spatial.size(0) * prod(spatial.shape[2:])
    return 0, positions * weight.size(1) * a["groups"] * prod(weight.shape[2:]) * weight.element_size()


_HANDLERS: dict[torch._ops.OpOverload, Handler] = {
    **attention_scratch.HANDLERS,
    **lookups.HANDLERS,
    **reductions.HANDLERS,
    **tables.HANDLERS,
    **dict.fromkeys((aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default), _layer_norm_backward),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _copies("self")),
    aten._log_softmax_backward_data.default: _copies("grad_output", "output"),
    aten._softmax_backward_data.default: _softmax_backward,
    aten.convolution_backward.default: _convolution_backward,
    aten.mm.default: _product_copies("self", "mat2"),
    aten.addmm.default: _product_copies("mat1", "mat2"),
    aten.bmm.default: _product_copies("self", "mat2"),
    aten.baddbmm.default: _product_copies("batch1", "batch2"),
}
