"""CUDA's autocast rules on the virtual device: the lists against the installed torch, the casts against its C++.

Registering a device is for good, so this file is also a program: what needs the device runs in a process of its own, and so
does the judge, PyTorch's own AutocastCUDA on fake tensors of type cuda, which a CUDA build has even without a driver.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from vramlab.virtual import autocast
from vramlab.virtual.autocast import WeightCache, hooked, install, weight_cache

LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": autocast.LOWER_PRECISION,
    "AT_FORALL_FP32": autocast.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": autocast.FP32_RESULT,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": tuple(autocast.FP32_NORM),
    "AT_FORALL_PROMOTE": autocast.WIDEST,
}
ONLY_IN_CPP = {"cudnn_convolution", "cudnn_convolution_transpose", "linalg_matrix_sqrth"}
"""In autocast_mode.cpp beside the header's lists, for CUDA alone or for some of the devices."""

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def with_cuda_kernel(namespace: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return {name.removeprefix(f"{namespace}::") for name in names if name.startswith(f"{namespace}::")}


@pytest.mark.parametrize("macro", LISTS)
def test_a_list_is_that_of_the_installed_header(macro: str) -> None:
    text = HEADER.read_text()
    body = text[text.index(f"#define {macro}(_)") :].split("\n\n", 1)[0].split("\n", 1)[1]
    names = {".".join(filter(None, match)) for match in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)}
    names |= set(re.findall(r'"([\w.]+)"', body))  # how the norms are written
    assert len(names) >= 2
    assert names == set(LISTS[macro]) & with_cuda_kernel("aten") - ONLY_IN_CPP


def test_every_operator_with_an_autocast_kernel_for_cuda_has_one_rule() -> None:
    named = [name for names in LISTS.values() for name in names]
    named += [*autocast.BANNED, *autocast.UNREACHED]
    assert len(named) == len(set(named))
    assert with_cuda_kernel("aten") - set(named) == set()
    assert len(with_cuda_kernel("aten") & set(named)) >= 115


def test_operators_of_torchvision_with_an_autocast_kernel_for_cuda_have_one_rule() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    named = [*autocast.TORCHVISION_FP32, *autocast.TORCHVISION_FP32_AND_BACK]
    assert sorted(named) == sorted(with_cuda_kernel("torchvision"))


def test_the_norms_have_an_overload_that_takes_a_type() -> None:
    for name, typed in autocast.FP32_NORM.items():
        if name in with_cuda_kernel("aten"):
            plain, with_type = (autocast._operator("aten", n)._schema.arguments for n in (name, typed))
            assert [a.name for a in with_type] == [*(a.name for a in plain), "dtype"]


def test_rules_go_to_privateuse1_alone() -> None:
    with pytest.raises(ValueError, match=r"go to PrivateUse1, which is called 'privateuseone' in this process; got 'cuda'\."):
        install("cuda")
    assert not autocast._libraries


# The weight cache, which works on any tensor


def weight(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2,), requires_grad=True)


def test_a_copy_is_made_once_until_the_cache_is_cleared() -> None:
    cache, w = WeightCache(), weight()
    copy = cache.copy_of(w, torch.bfloat16)
    assert copy.dtype == torch.bfloat16
    assert cache.copy_of(w, torch.bfloat16) is copy
    assert cache.copy_of(weight(), torch.bfloat16) is not copy
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0
    assert cache.copy_of(w, torch.bfloat16) is not copy


def test_a_copy_made_without_gradients_still_leads_to_the_weight() -> None:
    """As in checkpointed blocks, whose forward pass runs under no_grad."""
    cache, w = WeightCache(), weight()
    with torch.no_grad():
        cache.copy_of(w, torch.bfloat16)
    cache.copy_of(w, torch.bfloat16).sum().backward()
    assert w.grad is not None


def test_a_weight_that_only_the_graph_knows_finds_its_copy() -> None:
    cache, w = WeightCache(), weight()
    copy = cache.copy_of(w, torch.bfloat16)
    del w
    assert copy.grad_fn is not None
    assert cache.copy_of(copy.grad_fn.next_functions[0][0].variable, torch.bfloat16) is copy  # type: ignore[union-attr]


def test_no_weight_gets_the_copy_of_another_that_lived_at_its_address() -> None:
    cache, addresses = WeightCache(), set()
    for size in range(1, 200):
        frozen = torch.ones(size)  # without a graph nothing but its name keeps it alive
        addresses.add(id(frozen))
        assert cache.copy_of(frozen, torch.bfloat16).shape == (size,)
        del frozen
    assert len(addresses) < 199  # some did live at the same one
    assert len(cache) == 199  # C++ keeps them too, until the region ends


def test_autocast_empties_the_cache_when_its_outermost_region_ends() -> None:
    with hooked():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weight_cache.copy_of(weight(), torch.bfloat16)
            with torch.autocast("cpu", enabled=False):
                pass
            assert len(weight_cache) == 1
        assert len(weight_cache) == 0


@pytest.mark.parametrize("failing", [False, True], ids=["leaving", "failing"])
def test_what_clears_the_cache_is_put_back_exactly(failing: bool) -> None:
    original = torch.clear_autocast_cache
    with pytest.raises(KeyError) if failing else nullcontext(), hooked():
        outer = torch.clear_autocast_cache
        assert outer is not original
        with hooked():
            weight_cache.copy_of(weight(), torch.bfloat16)
        assert torch.clear_autocast_cache is outer
        assert len(weight_cache) == 0
        weight_cache.copy_of(weight(), torch.bfloat16)
        if failing:
            raise KeyError
    assert torch.clear_autocast_cache is original
    assert len(weight_cache) == 0


def test_pytorchs_own_cache_is_still_cleared() -> None:
    w = weight(2, 2)
    with hooked(), torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(torch.ones(2, 2), w).sum()
            w.fill_(3)
        assert torch.mm(torch.ones(2, 2), w).sum() == 8  # the copy of before
        torch.clear_autocast_cache()
        assert torch.mm(torch.ones(2, 2), w).sum() == 24


# Checks that need the device: each gets one and raises if it is not as it says

CHECKS: dict[str, Callable[[torch.device], None]] = {}


def check(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    CHECKS[function.__name__] = function
    return function


class Log(TorchDispatchMode):
    """Every operator with the types of the floats that it returns on a device."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.paused = device_type, False
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(str(func), result)
        return result

    def note(self, name: str, result: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device_type]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()]
        if dtypes and not self.paused:
            self.lines.append(f"{name} {' '.join(dtypes)}")

    @property
    def casts(self) -> int:
        return sum(line.startswith(("aten._to_copy", "aten.to.dtype")) for line in self.lines)


def amp(device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, **options)


def parameter(device: torch.device, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape or (4, 4), device=device))


@check
def a_second_install_is_nothing_and_another_name_is_refused(device: torch.device) -> None:
    before = list(autocast._libraries)
    install(device.type)
    assert autocast._libraries == before
    with pytest.raises(ValueError, match=f"called '{device.type}' in this process; got 'other'"):
        install("other")


@check
def a_weight_is_copied_once_in_a_region_and_the_copy_dropped_at_its_end(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, dtype=torch.bfloat16, device=device)
    with Log(device.type) as log:
        for regions in (1, 2):
            with amp(device):
                assert F.linear(F.linear(x, w), w).dtype == torch.bfloat16
                assert len(weight_cache) == 1
            assert (log.casts, len(weight_cache)) == (regions, 0)


@check
def without_the_cache_each_use_makes_a_copy(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, dtype=torch.bfloat16, device=device)
    with Log(device.type) as log, amp(device, cache_enabled=False):
        F.linear(F.linear(x, w), w)
    assert (log.casts, len(weight_cache)) == (2, 0)


@check
def a_region_that_is_off_casts_nothing_and_keeps_the_copies_of_the_outer_one(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    with amp(device):
        F.linear(x, w)
        with amp(device, enabled=False):
            assert F.linear(x, w).dtype == torch.float32
            assert F.binary_cross_entropy(x, x).dtype == torch.float32
            with amp(device, torch.float16):
                assert F.linear(x, parameter(device)).dtype == torch.float16
        assert len(weight_cache) == 2


@check
def gradients_reach_the_weight_in_its_own_type(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    with amp(device):
        with torch.no_grad():
            F.linear(x, w)
        y = F.linear(x, w)
    y.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


@check
def only_trained_fp32_leaves_are_kept(device: torch.device) -> None:
    x, w = torch.zeros(4, 4, device=device), parameter(device)
    double, half = (torch.zeros(4, 4, dtype=t, device=device, requires_grad=True) for t in (torch.float64, torch.float16))
    view = w.detach()[:, :].requires_grad_()
    others = [x, w.detach(), w * 1, view, half]
    with amp(device):
        for other in others:
            assert torch.mm(other, other).dtype == torch.bfloat16
            assert len(weight_cache) == 0, other
        assert torch.mm(double, double).dtype == torch.float64
        with torch.inference_mode():
            torch.mm(x, w)
        assert F.softplus(w).dtype == torch.float32
        assert len(weight_cache) == 0
        torch.mm(x, w)
        assert len(weight_cache) == 1


@check
def a_checkpointed_block_makes_its_copies_again_in_backward(device: torch.device) -> None:
    for reentrant in (False, True):
        w, x = parameter(device), torch.zeros(4, 4, device=device, requires_grad=True)
        with Log(device.type) as log:
            with amp(device):
                y = checkpoint(F.linear, x, w, use_reentrant=reentrant)
                forward = log.casts
            y.sum().backward()
        assert (forward, len(weight_cache)) == (2, 0)
        assert log.lines.count("aten._to_copy.default bfloat16") == 4  # of both, forward and again
        assert log.lines.count("aten._to_copy.default float32") == 2  # the gradients
        assert w.grad is not None


@check
def binary_cross_entropy_is_refused(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    with (
        amp(device),
        pytest.raises(
            RuntimeError,
            match=r"unsafe to autocast and refused, as on CUDA.*binary_cross_entropy_with_logits.*"
            rf"torch\.autocast\('{device.type}', enabled=False\)",
        ),
    ):
        nn.BCELoss()(x, x)


@check
def two_16_bit_types_are_not_promoted(device: torch.device) -> None:
    x, y = torch.zeros(4, device=device), torch.zeros(4, dtype=torch.float16, device=device)
    text = r"Under autocast to torch\.bfloat16, aten\.atan2\.default takes .* or torch\.float32 as on CUDA, got torch\.float16: cast it"
    with amp(device):
        with pytest.raises(RuntimeError, match=text):
            torch.atan2(y, y)
        assert torch.atan2(x, y).dtype == torch.float32  # the widest is known already


@check
def the_cpu_is_left_alone(device: torch.device) -> None:
    x, y = torch.ones(4, 4), torch.zeros(4, 4, device=device)
    with amp(device):
        assert torch.mm(x, x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(x, x).dtype == torch.bfloat16
        assert torch.mm(y, y).dtype == torch.float32


@check
def custom_operators_keep_their_own_rule(device: torch.device) -> None:
    @torch.library.custom_op("autocast_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    x = torch.zeros(4, device=device)
    with amp(device):
        assert double(x).dtype == torch.float32
        if torch.__version__.startswith("2.11."):  # takes such rules for CPU and CUDA alone
            return
        torch.library.register_autocast("autocast_test::double", device.type, torch.float16)
        assert double(x).dtype == torch.float16
        assert double(torch.ones(4)).dtype == torch.float32
    assert double(x).dtype == torch.float32


@check
def rules_of_others_for_cuda_are_taken_over(device: torch.device) -> None:
    @torch.library.custom_op("autocast_test::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    library = torch.library.Library("autocast_test", "FRAGMENT")
    library.define("plain(Tensor x) -> Tensor")
    library.define("opaque(Tensor x) -> Tensor")
    for name in ("plain", "opaque"):
        library.impl(name, torch.empty_like, "CompositeExplicitAutograd")
    triple.register_fake(torch.empty_like)
    x, ops = torch.zeros(4, device=device), torch.ops.autocast_test
    names = ("triple", "plain", "opaque")
    with amp(device):
        assert [getattr(ops, name)(x).dtype for name in names] == [torch.float32] * 3
    torch.library.register_autocast("autocast_test::triple", "cuda", torch.float16)
    torch.library.register_autocast("autocast_test::plain", "cuda", torch.bfloat16)
    library.impl("opaque", torch.empty_like, "AutocastCUDA")
    with hooked(), amp(device):
        assert [ops.triple(x).dtype, ops.plain(x).dtype] == [torch.float16, torch.bfloat16]
        assert ops.triple(torch.ones(4)).dtype == torch.float32
        with pytest.raises(RuntimeError, match=r"opaque.* cannot be read.*torch\.library\.impl\('autocast_test::opaque', 'AutocastPriv"):
            ops.opaque(x)
    with amp(device):
        assert [getattr(ops, name)(x).dtype for name in names] == [torch.float32] * 3
    library._destroy()


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@check
def operators_with_a_kernel_of_cudas_stay_whole(device: torch.device) -> None:
    x = torch.zeros(4, 4, device=device, requires_grad=True)
    with Log(device.type) as log:
        for operator in (F.silu, F.mish, partial(F.rms_norm, normalized_shape=(4,))):
            operator(x).sum().backward()
    ran = {line.split()[0] for line in log.lines}
    assert {"aten.silu_backward.default", "aten.mish_backward.default", "aten._fused_rms_norm.default"} <= ran
    assert not {"aten.sigmoid.default", "aten.rsqrt.default", "aten.pow.Tensor_Scalar"} & ran
    operator, x = torch.ops.aten.silu_backward.default, torch.ones(2)
    with pytest.raises(NotImplementedError, match="silu_backward was called on tensors without data and outside the context"):
        operator._op_dk(torch._C.DispatchKey.PrivateUse1, x, x)


@check
def function_modes_see_each_call_once(device: torch.device) -> None:
    x = torch.zeros(4, 4, device=device)
    with amp(device), Calls() as calls:
        torch.mm(x, x)
        torch.softmax(x, 0)
        torch.norm(x)
    assert calls.names.count("mm") == calls.names.count("softmax") == calls.names.count("norm") == 1
    assert not {"to", "_to_copy", "mm.default", "to.dtype"} & set(calls.names)


# Programs that run on the judge's device too, and must make the same operators return the same types


@dataclass(frozen=True)
class Tensor:
    """An argument of an operator to be made: float, its type varied, or indices of type int64, or a mask."""

    shape: tuple[int, ...]
    kind: str = "float"


def f(*shape: int) -> Tensor:
    return Tensor(shape)


def i(*shape: int) -> Tensor:
    return Tensor(shape, "index")


IMAGE, KERNEL, HEADS = f(1, 2, 8, 8), f(3, 2, 3, 3), f(1, 2, 4, 8)
SQUARE, ROW, BATCH, LINE, VOLUME = f(4, 4), f(4), f(2, 4, 4), f(1, 2, 4), f(1, 2, 4, 4, 4)
GEOMETRY = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

CALLS: dict[str, tuple[Any, ...]] = {
    "_convolution": (IMAGE, KERNEL, None, *GEOMETRY, False, False, True, True),
    "_convolution.deprecated": (IMAGE, KERNEL, None, *GEOMETRY, False, False, True),
    "_scaled_dot_product_flash_attention": (HEADS, HEADS, HEADS),
    "_thnn_fused_gru_cell": (f(2, 12), f(2, 12), f(2, 4), f(12), f(12)),
    "_thnn_fused_lstm_cell": (f(2, 16), f(2, 16), f(2, 4), f(16), f(16)),
    "addbmm": (SQUARE, BATCH, BATCH),
    "addmm": (SQUARE, SQUARE, SQUARE),
    "addmv": (ROW, SQUARE, ROW),
    "addr": (SQUARE, ROW, ROW),
    "baddbmm": (BATCH, BATCH, BATCH),
    "bmm": (BATCH, BATCH),
    "chain_matmul": ([SQUARE, SQUARE, SQUARE],),
    "conv1d": (f(1, 2, 8), f(3, 2, 3)),
    "conv2d": (IMAGE, KERNEL, f(3)),
    "conv3d": (VOLUME, f(3, 2, 3, 3, 3)),
    "conv_tbc": (f(8, 1, 2), f(3, 2, 4), ROW),
    "conv_transpose1d": (f(1, 2, 8), f(2, 3, 3)),
    "conv_transpose2d.input": (IMAGE, f(2, 3, 3, 3)),
    "conv_transpose3d.input": (VOLUME, f(2, 3, 3, 3, 3)),
    "convolution": (IMAGE, KERNEL, None, *GEOMETRY),
    "cudnn_convolution": (IMAGE, KERNEL, [0, 0], [1, 1], [1, 1], 1, False, False, False),
    "cudnn_convolution_transpose": (IMAGE, f(2, 3, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, False),
    "einsum": ("ij,jk->ik", [SQUARE, SQUARE]),
    "gru_cell": (f(2, 4), f(2, 4), f(12, 4), f(12, 4)),
    "linalg_multi_dot": ([SQUARE, SQUARE, SQUARE],),
    "linalg_vecdot": (SQUARE, SQUARE),
    "linear": (SQUARE, SQUARE, ROW),
    "lstm_cell": (f(2, 4), [f(2, 4), f(2, 4)], f(16, 4), f(16, 4), f(16), f(16)),
    "matmul": (BATCH, SQUARE),
    "mm": (SQUARE, SQUARE),
    "mv": (SQUARE, ROW),
    "prelu": (f(2, 3), f(3)),
    "rnn_relu_cell": (f(2, 4), f(2, 4), SQUARE, SQUARE),
    "rnn_tanh_cell": (f(2, 4), f(2, 4), SQUARE, SQUARE),
    "scaled_dot_product_attention": (HEADS, HEADS, HEADS),
    "_upsample_bicubic2d_aa": (IMAGE, [9, 9], False),
    "_upsample_bilinear2d_aa": (IMAGE, [9, 9], False),
    "_upsample_nearest_exact1d": (LINE, [8]),
    "_upsample_nearest_exact2d": (IMAGE, [9, 9]),
    "_upsample_nearest_exact3d": (VOLUME, [8, 8, 8]),
    **dict.fromkeys(("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pdist"), (SQUARE,)),
    **dict.fromkeys(("nuclear_norm", "reciprocal", "rsqrt", "sinh", "softplus", "tan", "linalg_matrix_sqrth"), (SQUARE,)),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "cdist", "cosine_similarity", "dist", "kl_div", "l1_loss"), (SQUARE, SQUARE)),
    **dict.fromkeys(("hinge_embedding_loss", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"), (SQUARE, SQUARE)),
    "cosine_embedding_loss": (SQUARE, SQUARE, ROW),
    "frobenius_norm.dim": (SQUARE, [0, 1]),
    "group_norm": (BATCH, 2, ROW, ROW),
    "layer_norm": (SQUARE, [4], ROW, ROW),
    "logsumexp": (SQUARE, [0]),
    "margin_ranking_loss": (ROW, ROW, ROW),
    "multi_margin_loss": (SQUARE, i(4)),
    "multilabel_margin_loss": (SQUARE, i(4, 4)),
    "native_layer_norm": (SQUARE, [4], ROW, ROW, 1e-5),
    "nll_loss": (SQUARE, i(4), ROW),
    "nll_loss2d": (f(2, 4, 3, 3), i(2, 3, 3)),
    "nuclear_norm.dim": (SQUARE, [0, 1]),
    "poisson_nll_loss": (SQUARE, SQUARE, True, False, 1e-8, 1),
    "pow.Scalar": (2.0, SQUARE),
    "pow.Tensor_Scalar": (SQUARE, 3),
    "pow.Tensor_Tensor": (SQUARE, SQUARE),
    "renorm": (SQUARE, 2, 0, 1.0),
    "rms_norm": (SQUARE, [4], ROW),
    "triplet_margin_loss": (SQUARE, SQUARE, SQUARE),
    "upsample_bicubic2d": (IMAGE, [9, 9], False),
    "upsample_bilinear2d": (IMAGE, [9, 9], False),
    "upsample_linear1d": (LINE, [8], False),
    "upsample_nearest1d": (LINE, [8]),
    "upsample_nearest2d": (IMAGE, [9, 9]),
    "upsample_nearest3d": (VOLUME, [8, 8, 8]),
    "upsample_trilinear3d": (VOLUME, [8, 8, 8], False),
    "cumprod": (SQUARE, 0),
    "cumsum": (SQUARE, 0),
    "linalg_matrix_norm": (SQUARE, 1),
    "linalg_matrix_norm.str_ord": (SQUARE,),
    "linalg_vector_norm": (SQUARE,),
    "log_softmax.int": (SQUARE, 0),
    "prod": (SQUARE,),
    "prod.dim_int": (SQUARE, 0),
    "softmax.int": (SQUARE, 0),
    "sum": (SQUARE,),
    "sum.dim_IntList": (SQUARE, [0]),
    "norm.Scalar": (SQUARE,),
    "norm.ScalarOpt_dim": (SQUARE, 2, [0]),
    "addcdiv": (SQUARE, SQUARE, SQUARE),
    "addcmul": (SQUARE, SQUARE, SQUARE),
    "atan2": (SQUARE, SQUARE),
    "bilinear": (f(2, 4), f(2, 4), f(3, 4, 4)),
    "cross": (f(4, 3), f(4, 3)),
    "dot": (ROW, ROW),
    "grid_sampler": (f(1, 1, 4, 4), f(1, 4, 4, 2), 0, 0, False),
    "index_put": (SQUARE, [i(4)], SQUARE),
    "scatter_add": (SQUARE, 0, i(4, 4), SQUARE),
    "tensordot": (SQUARE, SQUARE, [1], [0]),
    "vdot": (ROW, ROW),
    "binary_cross_entropy": (SQUARE, SQUARE),
}
"""How each operator of the lists is called."""

DETECTION: dict[str, tuple[Any, ...]] = {
    "deform_conv2d": (IMAGE, KERNEL, f(1, 18, 6, 6), f(1, 9, 6, 6), f(3), 1, 1, 0, 0, 1, 1, 1, 1, True),
    "nms": (SQUARE, ROW, 0.5),
    "ps_roi_align": (f(1, 8, 8, 8), f(1, 5), 1.0, 2, 2, 1),
    "ps_roi_pool": (f(1, 8, 8, 8), f(1, 5), 1.0, 2, 2),
    "roi_align": (IMAGE, f(1, 5), 1.0, 2, 2, -1, False),
    "roi_pool": (IMAGE, f(1, 5), 1.0, 2, 2),
}

UNCAST: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("relu", "gelu", "silu", "sigmoid", "tanh", "mean", "sqrt", "erf", "cos", "abs", "var", "log_sigmoid"), (SQUARE,)),
    **{f"{name}.Tensor": (SQUARE, SQUARE) for name in ("add", "mul", "sub", "div")},
    "_log_softmax": (SQUARE, 0, False),
    "_softmax": (SQUARE, 0, False),
    "batch_norm": (IMAGE, f(2), f(2), f(2), f(2), True, 0.1, 1e-5, True),
    "cat": ([SQUARE, SQUARE],),
    "embedding": (SQUARE, i(4)),
    "gather": (SQUARE, 0, i(4, 4)),
    "index_select": (SQUARE, 0, i(4)),
    "lerp.Scalar": (SQUARE, SQUARE, 0.5),
    "masked_fill.Scalar": (SQUARE, Tensor((4, 4), "mask"), 0.0),
    "max_pool2d": (IMAGE, [2, 2]),
    "maximum": (SQUARE, SQUARE),
    "native_dropout": (SQUARE, 0.5, True),
    "stack": ([SQUARE, SQUARE],),
    "where.self": (Tensor((4, 4), "mask"), SQUARE, SQUARE),
}
"""Operators without a rule: nothing may be cast."""

OPERATORS = {
    **{f"aten::{name}": args for name, args in {**CALLS, **UNCAST}.items()},
    **{f"torchvision::{name}": args for name, args in DETECTION.items()},
}


def overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    return autocast._operator(namespace, rest)


def known(name: str) -> bool:
    """Whether it is in the installed version of its library."""
    if name.startswith("torchvision"):
        return find_spec("torchvision") is not None
    try:
        return overload(name) is not None
    except AttributeError:
        return False


def made(spec: Any, device: torch.device, dtypes: Iterator[torch.dtype]) -> Any:
    if isinstance(spec, list):
        return [made(item, device, dtypes) for item in spec]
    if not isinstance(spec, Tensor):
        return spec
    dtype = {"float": lambda: next(dtypes), "index": lambda: torch.int64, "mask": lambda: torch.bool}[spec.kind]()
    return torch.zeros(spec.shape, dtype=dtype, device=device)


def floats_in(spec: Any) -> int:
    return sum(isinstance(leaf, Tensor) and leaf.kind == "float" for leaf in tree_leaves(spec))


def outcomes(name: str, device: torch.device, low: torch.dtype) -> dict[str, list[str]]:
    """By the types of the first two floating-point arguments (the others are fp32): what the operator ran, or that it raised."""
    spec, result = OPERATORS[name], {}
    other = torch.float16 if low == torch.bfloat16 else torch.bfloat16
    options: list[dict[str, Any]] = [{}, {"dtype": torch.float64}] if name.removeprefix("aten::") in autocast.FP32_RESULT else [{}]
    for kwargs, dtypes in itertools.product(
        options, itertools.product((torch.float32, low, other, torch.float64), repeat=min(2, floats_in(spec)))
    ):
        args = made(list(spec), device, itertools.chain(dtypes, itertools.repeat(torch.float32)))
        with Log(device.type) as log, amp(device, low):
            try:
                log.paused = name == "aten::scaled_dot_product_attention"  # which kernel computes it is not a matter of autocast
                returned = overload(name)(*args, **kwargs)
                if log.paused:
                    log.paused = False
                    log.note("attention", returned)
            except RuntimeError:
                log.lines.append("raised")
        result[" ".join(map(str, (*dtypes, *kwargs.values())))] = log.lines
    return result


PROGRAMS: dict[str, Callable[[torch.device], None]] = {}


def program(function: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
    PROGRAMS[function.__name__] = function
    return function


@program
def no_grad_before_grad(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    with amp(device):
        with torch.no_grad():
            F.linear(x, w)
        assert F.linear(x, w).requires_grad


@program
def grad_before_no_grad(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    with amp(device):
        F.linear(x, w)
        with torch.no_grad():
            F.linear(x, w)


@program
def inference_mode_around_grad(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    with amp(device):
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                torch.mm(x, w)


@program
def regions_in_regions(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    for options in ({}, {"cache_enabled": False}, {"enabled": False}):
        with amp(device, **options):
            torch.mm(x, w)
            for inner in ({}, {"cache_enabled": False}, {"enabled": False}):
                with amp(device, **inner):
                    torch.mm(x, w)
            torch.mm(x, w)


@program
def another_type_within_a_region(device: torch.device) -> None:
    """The copy of the first type is found under the second: a bug of PyTorch's that the card has too."""
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    with amp(device, torch.bfloat16):
        F.linear(x, w)
        with amp(device, torch.float16):
            F.prelu(x, w[0])
            F.prelu(x, parameter(device, 1))
            torch.mm(x, w)  # which a real card refuses, and tensors without data do not


@program
def weights_that_are_not_kept(device: torch.device) -> None:
    w = parameter(device)
    half, double = (torch.zeros(4, 4, dtype=t, device=device, requires_grad=True) for t in (torch.float16, torch.float64))
    with amp(device):
        for other in (w.detach(), w * 1, w.detach()[:, :].requires_grad_(), half, double, w.detach().requires_grad_()):
            torch.mm(other, other)
            torch.mm(other, other)


@program
def one_weight_in_lists_and_options(device: torch.device) -> None:
    w, x = parameter(device), torch.zeros(4, 4, device=device)
    with amp(device):
        torch.einsum("ij,jk->ik", x, w)
        torch.linalg.multi_dot([x, w, w])
        F.layer_norm(F.linear(x, w, bias=parameter(device, 4)), (4,), weight=parameter(device, 4))
        F.conv2d(input=torch.zeros(1, 1, 8, 8, device=device), weight=parameter(device, 1, 1, 3, 3), bias=None)


@program
def arguments_left_at_their_defaults(device: torch.device) -> None:
    x = torch.zeros(4, 4, dtype=torch.bfloat16, device=device)
    with amp(device):
        for result in (torch.norm(x), torch.norm(x, 1), torch.norm(x, dim=1), torch.norm(x, 1, dim=1, keepdim=True), x.norm()):
            assert result.dtype == torch.float32
        torch.norm(x, dtype=torch.float64)
        torch.softmax(x, 0, torch.float64)
        torch.softmax(x, 0, dtype=torch.bfloat16)
        torch.sum(x, 0, keepdim=True, dtype=torch.float64)
        torch.sum(torch.zeros(4, dtype=torch.int64, device=device))
        torch.norm(torch.zeros(4, dtype=torch.float64, device=device))
        torch.linalg.vector_norm(x, 3, 1)
        torch.addcmul(x, x, x, value=2)


@program
def scalars_on_the_cpu(device: torch.device) -> None:
    x = torch.zeros(4, 4, dtype=torch.bfloat16, device=device)
    with amp(device):
        for dtype in (torch.float32, torch.float64):
            scalar = torch.ones((), dtype=dtype)
            torch.pow(x, scalar)
            torch.atan2(x, scalar)
            torch.addcmul(x, x, scalar)


@program
def in_place_and_out(device: torch.device) -> None:
    """CUDA's autocast has no rules for them."""
    x, y = (torch.zeros(4, 4, dtype=t, device=device) for t in (torch.bfloat16, torch.float32))
    with amp(device):
        y.addmm_(y, y)
        x.exp_()
        torch.mm(y, y, out=torch.empty_like(y))
        torch.exp(x, out=torch.empty_like(x))


@program
def layers_of_torch(device: torch.device) -> None:
    torch.manual_seed(0)
    image, line = torch.zeros(2, 4, 8, 8, device=device), torch.zeros(2, 8, 16, device=device)
    layers: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [
        (nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)), (image,)),
        (nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.GroupNorm(2, 8), nn.PReLU(), nn.Upsample(scale_factor=2)), (image,)),
        (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Softmax(-1)), (line,)),
        (nn.Bilinear(16, 16, 4), (line, line)),
        (nn.LSTMCell(16, 4), (line[0],)),
        (nn.RNNCell(16, 4), (line[0],)),
    ]
    with amp(device):
        for layer, inputs in layers:
            on(layer, device)(*inputs)


@program
def losses_of_torch(device: torch.device) -> None:
    x, y = (torch.zeros(4, 10, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2))
    classes = torch.zeros(4, dtype=torch.int64, device=device)
    with amp(device):
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
            assert loss(x, y).dtype == torch.float32
        for loss in (F.cross_entropy, F.nll_loss, F.multi_margin_loss):
            assert loss(x, classes).dtype == torch.float32


def on(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with its parameters and buffers on the device, tied ones still tied; the device may be one of fake tensors."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) not in moved:
                    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    moved[id(tensor)] = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new
                if tensor is not None:
                    slots[name] = moved[id(tensor)]  # type: ignore[assignment]
    return model


def tokens(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, 16, dtype=torch.int64, device=device)


def own(kind: str, device: torch.device) -> torch.Tensor:
    from vramlab.tasks.models import DECODERS, RESNETS, VITS, ResNet, ViT, decoder

    if kind in ("vit", "resnet"):
        model = real(lambda: ViT(VITS["nano"]) if kind == "vit" else ResNet(RESNETS["nano"]))
        return F.cross_entropy(on(model, device)(torch.zeros(2, 1, 8, 8, device=device)), tokens(device)[:, 0])
    return F.cross_entropy(on(real(lambda: decoder(DECODERS[kind])), device)(tokens(device)).flatten(0, 1), tokens(device).flatten())


def real(build: Callable[[], nn.Module]) -> nn.Module:
    """A model built on the CPU, also where tensors are fake: some initialisers look at values."""
    with unset_fake_temporarily():
        return build()


def of_transformers(kind: str, device: torch.device) -> torch.Tensor:
    import transformers as hf

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
    t5: dict[str, Any] = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    build: Callable[[], nn.Module] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, **ends)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**sizes)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **sizes)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **t5)),
    }[kind]
    loss: torch.Tensor = on(real(build), device)(input_ids=tokens(device), labels=tokens(device)).loss
    return loss


def of_torchvision(kind: str, device: torch.device) -> torch.Tensor:
    from torchvision.models import resnet18
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    model = real(lambda: resnet18(num_classes=10) if kind == "resnet18" else ConvNeXt(blocks, num_classes=10))
    return F.cross_entropy(on(model, device)(torch.zeros(2, 3, 64, 64, device=device)), tokens(device)[:, 0])


MODELS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    **{f"own {kind}": partial(own, kind) for kind in ("nano", "llama-nano", "vit", "resnet")},
    **{f"transformers {kind}": partial(of_transformers, kind) for kind in ("gpt2", "bert", "t5", "llama")},
    **{f"torchvision {kind}": partial(of_torchvision, kind) for kind in ("resnet18", "convnext")},
}


class OpaqueAttention(TorchFunctionMode):
    """Attention counts as one operator with a contiguous result: which kernel computes it is not a matter of autocast."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.log.paused = True
        result = func(*args, **(kwargs or {})).contiguous()
        self.log.paused = False
        self.log.note("attention", result)
        return result


def logged(run: Callable[[torch.device], object], device: torch.device) -> list[str]:
    torch.manual_seed(0)
    with Log(device.type) as log, OpaqueAttention(log):
        run(device)
    return log.lines


def model_step(model: Callable[[torch.device], torch.Tensor], low: torch.dtype, device: torch.device) -> None:
    with amp(device, low):
        assert model(device).dtype == torch.float32


JUDGED: dict[str, Callable[[torch.device], Any]] = {
    **{f"{name}, {low}": partial(outcomes, name, low=low) for name in filter(known, OPERATORS) for low in (torch.bfloat16, torch.float16)},
    **{name: partial(logged, run) for name, run in PROGRAMS.items()},
    **{
        f"{name}, {low}": partial(logged, partial(model_step, run, low))
        for name, run in MODELS.items()
        for low in (torch.bfloat16, torch.float16)
    },
}


# The program: on a device, results by name as JSON


@contextmanager
def judges_device() -> Iterator[torch.device]:
    """Fake tensors of type cuda under PyTorch's own autocast, which asks for a driver unless told that there is one."""
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # type: ignore[assignment]
    torch.cuda.is_bf16_supported = lambda *_: True  # type: ignore[assignment]
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):  # the choice of another asks the driver
        yield torch.device("cuda")


@contextmanager
def virtual_device() -> Iterator[torch.device]:
    from vramlab.virtual.device import virtual_gpu

    with virtual_gpu("RTX 4090") as gpu:
        yield gpu.device


def report(device: Callable[[], Any], tasks: dict[str, Callable[[torch.device], Any]]) -> dict[str, Any]:
    """What each task returns, or the traceback of its error."""
    results = {}
    for name, task in tasks.items():
        with device() as there:
            try:
                results[name] = task(there)
            except (Exception, pytest.fail.Exception):
                results[name] = traceback.format_exc()
    return results


def main(side: str, output: str) -> None:
    torch.set_num_threads(1)
    if find_spec("torchvision") is not None:
        import torchvision  # noqa: F401  its operators
    judged = JUDGED if torch.version.cuda else {}
    results = report(judges_device, judged) if side == "judge" else report(virtual_device, {**CHECKS, **judged})
    Path(output).write_text(json.dumps(results))


def in_a_process(side: str, folder: Path) -> dict[str, Any]:
    output = folder / "results.json"
    # Where there is a card it stays hidden: virtual ones refuse to be beside it, and the judge needs none.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, __file__, side, str(output)], capture_output=True, text=True, timeout=300, env=environment)
    # Not the exit status: what is left of the device may end the interpreter badly after all is said.
    assert output.exists(), result.stderr[-4000:]
    results: dict[str, Any] = json.loads(output.read_text())
    return results


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return in_a_process("virtual", tmp_path_factory.mktemp("virtual"))


@pytest.fixture(scope="module")
def by_judge(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return in_a_process("judge", tmp_path_factory.mktemp("judge"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_the_device(on_device: dict[str, Any], name: str) -> None:
    assert on_device[name] is None, on_device[name]


def test_every_operator_of_the_lists_is_called() -> None:
    named = {name for names in LISTS.values() for name in names} | set(autocast.BANNED)
    assert {name for name in named & with_cuda_kernel("aten") if "imname" not in name and "names" not in name} <= set(CALLS)
    assert set(DETECTION) == {*autocast.TORCHVISION_FP32, *autocast.TORCHVISION_FP32_AND_BACK}


needs_judge = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")

# They are judged by the casts before the error.
NEVER_RUN = {
    "aten::_thnn_fused_gru_cell": "has no implementation on fake tensors",
    "aten::_convolution": "has none in torch 2.11",
    "aten::_convolution.deprecated": "has none in torch 2.11",
    "aten::cudnn_convolution": "has none",
    "aten::cudnn_convolution_transpose": "has none",
    "torchvision::nms": "returns as many boxes as the values leave",
    "aten::gru_cell": "calls it",
    "aten::binary_cross_entropy": "is refused, as it should be",
}


def in_one_name(lines: Sequence[str]) -> list[str]:
    """cuDNN's batch norm under the name of the other: which kernel is taken is not a matter of autocast."""
    return [line.replace("cudnn_batch_norm", "native_batch_norm") for line in lines]


def as_far_as(expected: dict[str, list[str]], got: dict[str, list[str]], marker: str) -> dict[str, list[str]]:
    """What ran on the device; where the judge raised, for types with this marker, only what ran before."""
    return {
        dtypes: [*lines[: len(expected[dtypes]) - 1], "raised"] if marker in dtypes and expected[dtypes][-1:] == ["raised"] else lines
        for dtypes, lines in got.items()
    }


@needs_judge
def test_operators_that_cuda_alone_does_not_compose_have_a_kernel() -> None:
    on_cuda = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    composed = {name for name in on_cuda if "CompositeImplicitAutograd[alias]" in torch._C._dispatch_dump(name)}
    assert composed == {f"aten::{name}" for name in autocast.FUSED}


@needs_judge
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", list(filter(known, OPERATORS)))
def test_an_operator_casts_as_cudas_autocast_does(
    on_device: dict[str, Any], by_judge: dict[str, Any], operator: str, low: torch.dtype
) -> None:
    expected, got = by_judge[f"{operator}, {low}"], on_device[f"{operator}, {low}"]
    assert isinstance(expected, dict), expected
    assert isinstance(got, dict), got
    expected, got = ({dtypes: in_one_name(lines) for dtypes, lines in side.items()} for side in (expected, got))
    # A card's kernels refuse float64 among other types.
    assert as_far_as(expected, got, "" if operator in NEVER_RUN.keys() - {"aten::binary_cross_entropy"} else "float64") == expected
    if operator not in NEVER_RUN:
        assert any(lines[-1:] != ["raised"] for lines in expected.values())


@needs_judge
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_casts_as_under_cudas_autocast(on_device: dict[str, Any], by_judge: dict[str, Any], program: str) -> None:
    expected, got = by_judge[program], on_device[program]
    assert isinstance(expected, list), expected
    assert isinstance(got, list), got
    assert len(expected) >= 2
    assert in_one_name(got) == in_one_name(expected)


@needs_judge
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith("own") or find_spec(name.split()[0])])
def test_a_model_runs_in_the_types_of_cudas_autocast(
    on_device: dict[str, Any], by_judge: dict[str, Any], model: str, low: torch.dtype
) -> None:
    expected, got = by_judge[f"{model}, {low}"], on_device[f"{model}, {low}"]
    assert isinstance(expected, list), expected
    assert isinstance(got, list), got
    assert len(expected) >= 40
    assert {line.split()[1] for line in expected} == {"float32", str(low).removeprefix("torch.")}
    assert in_one_name(got) == in_one_name(expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
