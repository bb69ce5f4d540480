"""The workspace that PyTorch allocates for cuBLAS, and which operators ask for it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from vramlab.gpus import GPU
from vramlab.units import KiB
from vramlab.virtual.scratch import named_arguments

aten = torch.ops.aten

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
    a = named_arguments(func, args, kwargs or {})
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
