"""The virtual card's kernels: which attention it takes, what kernels hold while they run, and what cuBLAS keeps.

The figures called seen are torch 2.14.1's own: its CUDA build's host code ran on a CUDA runtime that hands out addresses and
starts no kernel, and its caching allocator wrote down what was asked for.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramlab.gpus import GPU
from vramlab.units import GiB, MiB
from vramlab.virtual import kernels

aten = torch.ops.aten
ROOT = Path(__file__).parents[1]
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


def card(capability: tuple[int, int] = (8, 9), sms: int | None = 128) -> GPU:
    return GPU(name="card", memory=24 * GiB, capability=capability, sms=sms)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def _torch_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TORCH", (2, 14))
    monkeypatch.setattr(kernels, "CUDNN", 92400)
    monkeypatch.setattr(kernels, "_BROKEN_DECODE", True)


# Which kernel attention takes. ---------------------------------------------------------------------------------------

Call = dict[str, Any]


def calls() -> Iterator[Call]:
    """Calls over types, head sizes, gradients, dropout, masks, shared heads, lengths and layouts."""
    base = {"sizes": (2, 8, 8, 8, 128, 128, 64, 64), "layout": "bmhk", "grad": True, "mask": None, "dropout": 0.0, "causal": False}
    for dtype in TYPES:
        common: Call = base | {"dtype": dtype, "gqa": False, "kv_batch": None}
        for head in (8, 12, 24, 64, 65, 66, 68, 100, 128, 129, 136, 160, 192, 200, 224, 232, 256, 264, 512):
            for grad in (True, False):
                for dropout in (0.0, 0.1):
                    yield common | {"sizes": (2, 8, 8, 8, 128, 128, head, head), "grad": grad, "dropout": dropout}
        for heads in ((192, 128), (128, 64), (64, 128), (256, 128)):
            yield common | {"sizes": (2, 8, 8, 8, 128, 128, *heads)}
            yield common | {"sizes": (2, 8, 8, 8, 128, 128, *heads), "grad": False}
        for mask in (
            None,
            ((128, 128), "bool"),
            ((128, 128), "same"),
            ((2, 8, 128, 128), "same"),
            ((2, 1, 128, 128), "bool"),
            ((2, 1, 1, 128), "bool"),
            ((8, 128, 128), "same"),
            ((1, 128, 128), "same"),
            ((128, 1), "same"),
            ((128, 128), "grad"),
            ((128, 128), "transposed"),
        ):
            yield common | {"mask": mask}
            yield common | {"mask": mask, "causal": True}
        for heads in ((8, 2, 2), (8, 1, 1), (8, 2, 1), (8, 3, 3), (8, 8, 4)):
            for gqa in (True, False):
                yield common | {"sizes": (2, *heads, 128, 128, 64, 64), "gqa": gqa}
        for lengths in ((128, 256), (256, 128), (1, 128), (128, 1), (0, 128), (128, 0), (100, 100), (1, 1)):
            for causal in (True, False):
                for dropout in (0.0, 0.125, 0.1):
                    yield common | {"sizes": (2, 8, 8, 8, *lengths, 64, 64), "causal": causal, "dropout": dropout}
        for layout in ("bhmk", "strided", "shifted", "unbatched"):
            yield common | {"layout": layout}
            yield common | {"layout": layout, "mask": ((128, 128), "bool")}
        yield common | {"sizes": (2, 8, 8, 8, 128, 128, 1, 1), "layout": "strided"}
        yield common | {"kv_batch": 1}
        yield common | {"sizes": (0, 8, 8, 8, 128, 128, 64, 64)}
        yield common | {"sizes": (70000, 1, 1, 1, 2, 2, 8, 8)}


def tensors(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    batch, heads, key_heads, value_heads, queries, keys, head, value_head = call["sizes"]
    dtype, kv_batch = TYPES[call["dtype"]], call["kv_batch"] or batch

    def make(batch: int, heads: int, time: int, head: int) -> torch.Tensor:
        if call["layout"] == "bmhk":
            return empty(batch, time, heads, head, dtype=dtype).transpose(1, 2)
        if call["layout"] == "strided":
            return empty(batch, heads, head, time, dtype=dtype).transpose(-1, -2)
        if call["layout"] == "shifted":
            return empty(batch * heads * time * head + 1, dtype=dtype)[1:].view(batch, heads, time, head)
        return empty(heads, time, head, dtype=dtype) if call["layout"] == "unbatched" else empty(batch, heads, time, head, dtype=dtype)

    mask = None
    if call["mask"] is not None:
        shape, kind = call["mask"]
        mask = empty(*shape, dtype=torch.bool if kind == "bool" else dtype)
        mask = mask.t() if kind == "transposed" else mask.requires_grad_() if kind == "grad" else mask
    query = make(batch, heads, queries, head).requires_grad_(call["grad"])
    return query, make(kv_batch, key_heads, keys, head), make(kv_batch, value_heads, keys, value_head), mask


def choice(call: Call, capability: tuple[int, int]) -> int:
    arguments = (*tensors(call), call["dropout"], call["causal"], call["gqa"], capability)
    return int(kernels.attention_kernel(*arguments).value)


ANSWERS = {
    (7, 5): ("c-k{Eq7N`IFfss<Ab?v90$}KdlMr>-^uWaN*+Fmj8jJ#(0svzQhAj"),
    (8, 0): ("c-qyDw-Ep^2m@D=wEu9<3C@+>@C5~+Af2FNcX}i{V7T9Z7XDH_#1Gh9zbRP+IlDBKnS0+epsGcX(fT4736aQ#p#"),
    (8, 9): ("c-qyDNe%!Y2m`;=_WzGlh#MF$dU6suAYG&g8hNKjssp<F`DU{JxQBRwsa)A!&fPbbMUbP5yX3j{je)KfLH^bkpHTp#xQ49"),
    (9, 0): ("c-qyDQ4YW$2t%(_=>6|Dst`8azV_uKYN({t{Rxs)^PhwR%Kdw$*?)$I(`bTOE3NVMsLGXte3Gea7ZEMy8<OR%2yzIwd)_fno2fopbjDNi;xI0#A%|}"),
    (10, 0): ("c-qyD%MHLV2t!u_y#H=BKhY-bsi(XsAPh2?J&|J7>?d@PcK@Ck_D*;h6zZVf%4m4~{@N8mr6P6T1z{<fDQQNw>67t(Zw&Nic+FDg##8Q<!?*yT-G^x"),
}
"""Seen: PyTorch's choices (0 math, 1 flash, 2 efficient, 3 cuDNN) for ``calls()``, by capability; compressed."""


@pytest.mark.usefixtures("_torch_2_14")
@pytest.mark.parametrize("capability", ANSWERS)
def test_attention_takes_the_kernel_that_pytorch_takes(capability: tuple[int, int]) -> None:
    seen = zlib.decompress(base64.b85decode(ANSWERS[capability])).decode()
    wrong = [(call, int(answer)) for call, answer in zip(calls(), seen, strict=True) if choice(call, capability) != int(answer)]
    assert wrong == []


@pytest.mark.usefixtures("_torch_2_14")
@pytest.mark.parametrize(("like", "capability"), [((7, 5), (7, 0)), ((8, 9), (8, 6)), ((8, 9), (12, 0))])
def test_cards_that_choose_alike(like: tuple[int, int], capability: tuple[int, int]) -> None:
    assert [choice(call, capability) for call in calls()] == [choice(call, like) for call in calls()]


@pytest.mark.parametrize("heads", [(8, 2, 2), (8, 1, 1)])
def test_before_torch_2_14_efficient_attention_shares_no_heads(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(calls()) | {"sizes": (2, *heads, 128, 128, 64, 64), "gqa": True}
    monkeypatch.setattr(kernels, "TORCH", (2, 14))
    assert choice(call, (8, 9)) == SDPBackend.EFFICIENT_ATTENTION.value
    monkeypatch.setattr(kernels, "TORCH", (2, 13))
    assert choice(call, (8, 9)) == SDPBackend.MATH.value


half = {"dtype": "bf16", "sizes": (2, 8, 8, 8, 128, 128, 64, 64)}


@pytest.mark.usefixtures("_torch_2_14")
@pytest.mark.parametrize(
    "backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_a_users_context_decides(backend: SDPBackend) -> None:
    with sdpa_kernel(backend):
        assert choice(next(calls()) | half, (9, 0)) == backend.value


@pytest.mark.usefixtures("_torch_2_14")
def test_a_users_priorities_decide() -> None:
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert choice(next(calls()) | half, (9, 0)) == SDPBackend.EFFICIENT_ATTENTION.value


@pytest.mark.usefixtures("_torch_2_14")
def test_cudnn_comes_last_when_deprioritized(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(next(calls()) | half, (9, 0)) == SDPBackend.CUDNN_ATTENTION.value
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choice(next(calls()) | half, (9, 0)) == SDPBackend.FLASH_ATTENTION.value


def test_no_kernel_that_can_says_why() -> None:
    call = next(calls()) | {"dtype": "f32"}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match=r"No available kernel. Aborting execution.") as caught:
        choice(call, (8, 9))
    assert "FLASH_ATTENTION: types are not one of float16 and bfloat16" in str(caught.value)
    assert "MATH: switched off" in str(caught.value)


def test_no_kernel_allowed_says_so() -> None:
    with sdpa_kernel([]), pytest.raises(RuntimeError, match=r"No viable backend for scaled_dot_product_attention was found: all kernels"):
        choice(next(calls()), (8, 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": empty(2, 4, 8, 8, dtype=torch.float16)}, "to have the same dtype, but got torch.float32, torch.float16"),
        ({"key": torch.empty(2, 4, 8, 8)}, "to have the same device type, but got meta, cpu, meta. Move them"),
        ({"query": empty(8), "key": empty(8), "value": empty(8)}, "to all be at least 2 dimensional, but got 1, 1, 1"),
        ({"attn_mask": empty(8, 8, dtype=torch.int64)}, "attn_mask dtype to be bool or float or to match query dtype, but got torch.int64"),
        ({"attn_mask": empty(8, 8), "is_causal": True}, "Explicit attn_mask should not be set when is_causal=True"),
        ({"key": empty(2, 3, 8, 8), "value": empty(2, 3, 8, 8), "enable_gqa": True}, "3 do not divide 4. Choose a divisor"),
    ],
)
def test_what_attention_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {"query": empty(2, 4, 8, 8), "key": empty(2, 4, 8, 8), "value": empty(2, 4, 8, 8)} | change
    with pytest.raises(RuntimeError) as caught:
        kernels.attention(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kwargs", [{}, {"is_causal": True}, {"scale": -0.5}, {"attn_mask": "bool"}, {"attn_mask": "float"}, {"enable_gqa": True}]
)
def test_the_math_path_computes_what_pytorch_computes(dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    key_heads = 2 if kwargs.get("enable_gqa") else 4
    query, key, value = (torch.randn(2, heads, 6, 8, dtype=dtype) for heads in (4, key_heads, key_heads))
    if "attn_mask" in kwargs:
        mask = torch.rand(6, 6) > 0.3
        kwargs = kwargs | {"attn_mask": mask if kwargs["attn_mask"] == "bool" else torch.randn(6, 6, dtype=dtype)}
    with sdpa_kernel(SDPBackend.MATH):
        ours = kernels.attention(query, key, value, **kwargs)
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, **kwargs)
    assert torch.equal(ours, theirs)


# What kernels allocate and free again. -------------------------------------------------------------------------------


def flash(batch: int, heads: int, queries: int, head: int, key_heads: int | None = None, contiguous: bool = False) -> tuple[Any, ...]:
    def make(heads: int) -> torch.Tensor:
        tensor = empty(batch, queries, heads, head, dtype=torch.bfloat16).transpose(1, 2)
        return tensor.contiguous() if contiguous else tensor

    query, key = make(heads), make(key_heads or heads)
    number = empty(1, dtype=torch.int64)
    sums = empty(batch, heads, queries)
    return query, query, key, key, query, sums, None, None, queries, queries, 0.0, False, number, number


def efficient(
    batch: int, heads: int, time: int, head: int, dtype: torch.dtype, key_heads: int | None = None, dropout: float = 0.0
) -> tuple[Any, ...]:
    query, key = (empty(batch, time, n, head, dtype=dtype).transpose(1, 2) for n in (heads, key_heads or heads))
    number = empty(1, dtype=torch.int64)
    return query, query, key, key, None, query, empty(batch, heads, time), number, number, dropout, [True, True, True, False]


FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
BF16, F32 = torch.bfloat16, torch.float32
H100, A100, T4 = card((9, 0), 132), card((8, 0), 108), card((7, 5), 40)

SEEN: list[tuple[Any, tuple[Any, ...], Any, GPU, list[int]]] = [
    (FLASH, flash(2, 8, 1000, 64, contiguous=True), None, H100, [2048000, 2048000, 65536, 4194304]),
    (FLASH, flash(4, 8, 512, 64), None, card(), [65536, 4194304]),
    (FLASH, flash(4, 8, 512, 64, key_heads=2), None, card(), [65536, 4194304, 2097152, 2097152]),
    (EFFICIENT, efficient(2, 4, 512, 64, F32), None, H100, [1048576, 16384, 16384, 1049600]),
    (EFFICIENT, efficient(2, 4, 500, 128, F32), None, H100, [2048000, 16000, 16000, 2098176]),
    (EFFICIENT, efficient(2, 4, 500, 128, F32), None, card(), [2048000, 16000, 16000, 2099200]),
    (EFFICIENT, efficient(2, 4, 512, 96, BF16), None, H100, [16384, 2097664]),
    (EFFICIENT, efficient(2, 4, 512, 96, BF16), None, card(), [16384, 2098176]),
    (EFFICIENT, efficient(2, 4, 512, 128, BF16), None, H100, [16384, 2097664]),
    (EFFICIENT, efficient(2, 4, 512, 128, BF16), None, card(), [16384, 6293504]),
    (EFFICIENT, efficient(2, 4, 512, 192, BF16), None, H100, [16384, 11535872]),
    (EFFICIENT, efficient(2, 4, 500, 256, BF16), None, card(), [16000, 12584960]),
    (EFFICIENT, efficient(1, 12, 512, 72, torch.float16), None, T4, [24576, 3147264]),
    (EFFICIENT, efficient(2, 4, 512, 64, BF16, key_heads=2), None, card(), [524288, 524288, 16384, 1049600]),
    (EFFICIENT, efficient(2, 4, 512, 64, BF16, dropout=0.1), None, card(), [16384, 1049600]),
    (aten.sum.dim_IntList, (empty(2048, 8000), [0]), empty(8000), card(), [102400000, 252]),
    (aten.sum.dim_IntList, (empty(2048, 2048), [0], True), empty(1, 2048), card(), [33554432, 64]),
    (aten.sum.dim_IntList, (empty(4096, 3072, dtype=BF16), [0]), empty(3072, dtype=BF16), H100, [100663296, 96]),
    (aten.sum.default, (empty(1024, 1024),), empty(1), card(), [512, 4]),
    (aten.sum.default, (empty(800, 1024, dtype=torch.bool),), empty(1, dtype=torch.int64), card(), [6553600, 800, 4]),
    (aten.sum.dim_IntList, (empty(63, 8, dtype=torch.float64), [0]), empty(8), card(), [2016]),
    (aten.mean.dim, (empty(1024, 1024), [0]), empty(1024), card(), [8388608, 32]),
    (aten.amax.default, (empty(1024, 1024, dtype=BF16),), empty(1, dtype=BF16), card(), [256, 4]),
    (aten.max.default, (empty(3, 512)[:, ::2],), empty(1), card(), [3072]),
    (aten.argmax.default, (empty(1024, 1024), 0), empty(1024), card(), [33554432, 32]),
    (aten.var.correction, (empty(1024, 1024), [0]), empty(1024), card(), [33554432, 32]),
    (aten.var.correction, (empty(512, 4096, dtype=torch.float64), None), empty(1, dtype=torch.float64), card(), [8192, 4]),
    (aten.mse_loss.default, (empty(1024, 1024), empty(1024, 1024)), empty(1), card(), [4194304, 512, 4]),
    (aten.mse_loss.default, (empty(1024, 1024), empty(1024, 1024), 0), empty(1024, 1024), card(), []),
    (aten.binary_cross_entropy_with_logits.default, (empty(1024, 1024),) * 2, empty(1), card(), [4194304, 4194304, 512, 4]),
    (aten.logsumexp.default, (empty(1024, 1024), [-1]), empty(1024), card(), [4096, 4096, 1024, 4194304]),
    (aten._safe_softmax.default, (empty(8, 4, 32, 32), -1), empty(8, 4, 32, 32), card(), [32768, 1024, 4]),
    (aten._softmax.default, (empty(64, 16).t(), -1, False), empty(16, 64), card(), [4096]),
    (aten._softmax_backward_data.default, (empty(64, 64), empty(64, 64), -1, F32), empty(64, 64), card(), [16384]),
    (aten._log_softmax_backward_data.default, (empty(1, 1).expand(64, 64), empty(64, 64), -1, F32), empty(64, 64), card(), [16384]),
    (aten._foreach_norm.Scalar, ([empty(8000, 512), *[empty(512)] * 15],), None, card(), [4032]),
    (aten.mm.default, (empty(1, 1).expand(64, 64), empty(64, 64)), empty(64, 64), card(), [16384]),
    (aten.mm.default, (empty(64, 128)[:, :64], empty(64, 64).t()), empty(64, 64), card(), []),
    (aten.bmm.default, (empty(8, 64, 128)[:, :, ::2], empty(1, 64, 64).expand(8, 64, 64)), empty(8, 64, 64), card(), [131072]),
    (aten.embedding.default, (empty(2, 512), empty(1, 512, dtype=torch.int64).expand(4, 512)), empty(4, 512, 512), card(), [16384]),
    (aten.embedding_dense_backward.default, (empty(2048, 64), empty(2048, dtype=torch.int64), 30000, -1, False), None, card(), []),
]


@pytest.mark.parametrize(
    ("func", "args", "out", "gpu", "seen"), SEEN, ids=[str(i) + str(row[0]).split(".")[1] for i, row in enumerate(SEEN)]
)
def test_a_kernel_allocates_what_pytorchs_own_did(func: Any, args: tuple[Any, ...], out: Any, gpu: GPU, seen: list[int]) -> None:
    events = kernels.transients(func, args, {}, out, gpu)
    assert sorted(size for size in events if size > 0) == sorted(seen)


@pytest.mark.parametrize(
    ("func", "args", "out", "gpu", "seen"), SEEN, ids=[str(i) + str(row[0]).split(".")[1] for i, row in enumerate(SEEN)]
)
def test_what_is_freed_was_allocated_before(func: Any, args: tuple[Any, ...], out: Any, gpu: GPU, seen: list[int]) -> None:
    live: list[int] = []
    for size in filter(None, kernels.transients(func, args, {}, out, gpu)):
        live.append(size) if size > 0 else live.remove(-size)


def test_the_peak_counts_what_is_held_at_one_time() -> None:
    assert kernels.workspace(EFFICIENT, efficient(2, 4, 512, 64, F32), {}, None, H100) == 1048576 + 2 * 16384
    assert kernels.workspace(EFFICIENT, efficient(2, 4, 512, 192, BF16), {}, None, H100) == 16384 + 11535872


def test_layer_norm_sums_very_many_short_rows_in_blocks() -> None:
    rows, columns = 131072, 256
    args = (
        empty(rows, columns),
        empty(rows, columns),
        [columns],
        empty(rows, 1),
        empty(rows, 1),
        empty(columns),
        empty(columns),
        [True] * 3,
    )
    out = (empty(rows, columns), empty(columns), empty(columns))
    seen = [1024, 1024, 4194304, 4194304, 8388608, 8, 8388608, 8]  # on an RTX 4090
    events = kernels.transients(aten.native_layer_norm_backward.default, args, {}, out, card())
    assert sorted(size for size in events if size > 0) == sorted(seen)
    few = (empty(4096, 768), empty(768, 4096).t(), [768], empty(4096, 1), empty(4096, 1), empty(768), empty(768), [True] * 3)
    assert kernels.workspace(aten.native_layer_norm_backward.default, few, {}, (None,) * 3, card()) == 4096 * 768 * 4


def test_few_queries_split_the_keys() -> None:
    query, key = empty(1, 1, 64, 64, dtype=BF16), empty(1, 1, 8192, 64, dtype=BF16)
    events = kernels.transients(aten._scaled_dot_product_flash_attention.default, (query, key, key), {}, None, card())
    sums, outputs = events
    assert outputs == 64 * sums
    assert sums % (64 * 4) == 0
    many = empty(8, 32, 64, 64, dtype=BF16)
    assert kernels.transients(aten._scaled_dot_product_flash_attention.default, (many, many, many), {}, None, card()) == []
    assert kernels.transients(aten._scaled_dot_product_flash_attention.default, (query, key, key, 0.1), {}, None, card()) == [16]


def embedding(indices: int, rows: int, width: int, dtype: torch.dtype = F32, index: torch.dtype = torch.int64) -> tuple[Any, ...]:
    return empty(indices, width, dtype=dtype), empty(indices, dtype=index), rows, -1, False


# As seen: in order, 0 for the output; releases in any order among themselves, and at the end none.
ROWS = [
    (embedding(8192, 50257, 4), (8, 9), [138751, 1535, 65536, 1279, 72088, 144176]),
    (embedding(8192, 50257, 4), (8, 0), [138751, 1279, 65536, 1279, 72088, 144176]),
    (embedding(8192, 50257, 4), (9, 0), [137727, 1279, 65536, 1279, 72088, 144176]),
    (embedding(8192, 50257, 4), (7, 5), [138751, 1535, 65536, 1279, 72088, 144176]),
    (embedding(65536, 128256, 4), (12, 0), [1070591, 1279, 524288, 2303, 576712, 1153424]),
    (embedding(4096, 50257, 4, index=torch.int32), (8, 9), [1, 1279, 16384, 1023, 18020, 72080]),
    (embedding(65536, 500, 4), (8, 9), [1071615, 4351, 4000, 1279, 56424, 56424]),  # few rows: added up in place
    (embedding(20000, 200, 8, dtype=BF16), (8, 9), [8703, 2047, 1600, 1279, 17600, 17600, 6400]),  # ... in float32
]


@pytest.mark.parametrize(("args", "capability", "seen"), ROWS)
def test_an_embeddings_gradient_is_sorted_and_summed_in_scratch(
    args: tuple[Any, ...], capability: tuple[int, int], seen: list[int]
) -> None:
    events = kernels.transients(aten.embedding_dense_backward.default, args, {}, None, card(capability))
    sort, unique, counts, scan, pieces, *sums = seen
    list_ = args[1].numel() * args[1].element_size()
    made = [list_, list_, list_, sort, 0, list_, 8, list_, unique, counts, counts, scan, 8, pieces, *sums]
    assert [size for size in events if size >= 0] == made
    assert sum(-size for size in events if size < 0) == 2 * list_ + sort + unique + scan


def test_few_indices_are_not_sorted() -> None:
    assert kernels.transients(aten.embedding_dense_backward.default, embedding(3072, 50257, 4), {}, None, card()) == [0]


def test_deterministic_algorithms_sum_pieces_of_few_rows_too() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        events = kernels.transients(aten.embedding_dense_backward.default, embedding(65536, 500, 4), {}, None, card())
    finally:
        torch.use_deterministic_algorithms(False)
    assert events[-1] == (6553 + 500) * 4 * 4


def test_several_indices_are_copied_where_their_strides_differ() -> None:
    tensor, rows, columns = empty(4, 384), empty(4, 1, dtype=torch.int64), empty(384, dtype=torch.int64)
    events = kernels.transients(aten.index.Tensor, (tensor, [rows, columns]), {}, empty(4, 384), card())
    assert events == [12288, 12288, 0, -12288, -12288]
    alike = (tensor, [columns, columns])
    assert kernels.transients(aten.index.Tensor, alike, {}, empty(384), card()) == []
    masked = (tensor, [empty(4, dtype=torch.bool), None])
    assert kernels.transients(aten.index.Tensor, masked, {}, empty(4, 384), card()) == []


@pytest.mark.parametrize(
    ("indices", "rows", "sort"), [(2304, 1000, 1), (2305, 200, 3583), (2305, 1000, 43007), (77777, 128256, 1272831), (10000, 50000, 167935)]
)
def test_values_added_at_indices_are_sorted(indices: int, rows: int, sort: int) -> None:
    args = (empty(rows, 8), [empty(indices, dtype=torch.int64)], empty(indices, 8), True)
    events = kernels.transients(aten.index_put.default, args, {}, empty(rows, 8), card())
    list_ = indices * 8
    assert [size for size in events if size >= 0] == [list_, list_, list_, list_, list_, sort, 0]
    assert sum(events) == 0
    assert kernels.transients(aten.index_put.default, (*args[:3], False), {}, empty(rows, 8), card()) == []


def test_outputs_are_allocated_in_the_order_of_the_kernel() -> None:
    output, mask = empty(8), empty(8, dtype=torch.bool)
    assert kernels.in_order(aten.native_dropout.default, [output, mask]) == [mask, output]
    assert kernels.in_order(aten.native_layer_norm.default, [output, mask]) == [output, mask]


def test_a_convolutions_bias_is_a_sum_outside_cudnn() -> None:
    grad = empty(256, 64, 56, 56)
    args = (grad, empty(256, 3, 56, 56), empty(64, 3, 3, 3), [64], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    events = kernels.transients(aten.convolution_backward.default, (*args, [True, True, True]), {}, None, card())
    assert events == kernels.transients(aten.sum.dim_IntList, (grad, [0, 2, 3]), {}, empty(64), card())
    assert events
    assert kernels.transients(aten.convolution_backward.default, (*args, [True, True, False]), {}, None, card()) == []


def test_a_convolutions_workspace_is_a_range() -> None:
    image, weight = empty(8, 3, 32, 32), empty(16, 3, 3, 3)
    args = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert kernels.convolution_workspace_range(aten.convolution.default, args, {}, empty(8, 16, 32, 32)) == (0, 8 * 32 * 32 * 27 * 4)


def test_deterministic_kernels_need_more_or_less() -> None:
    usual = kernels.workspace(FLASH, flash(1, 2, 512, 64), {}, None, card())
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.workspace(FLASH, flash(1, 2, 512, 64), {}, None, card()) == 512 * 2 * 4 + 64 * (512 * 2 * 64 * 4)
        few = kernels.workspace(EFFICIENT, efficient(2, 4, 512, 192, BF16), {}, None, H100)
    finally:
        torch.use_deterministic_algorithms(False)
    assert usual == 512 * 2 * 4 + 512 * 2 * 64 * 4
    assert few < kernels.workspace(EFFICIENT, efficient(2, 4, 512, 192, BF16), {}, None, H100)


def test_operators_without_scratch_have_none() -> None:
    assert kernels.transients(aten.add.Tensor, (empty(8), empty(8)), {}, empty(8), card()) == []
    assert kernels.workspace(aten.relu.default, (empty(8),), {}, empty(8), card()) == 0
    assert kernels.transients(aten.sum.default, (empty(0),), {}, empty(1), card()) == []


def test_sums_too_large_for_32_bit_are_split() -> None:
    rows = 2**20
    whole = kernels.transients(aten.sum.dim_IntList, (empty(rows, 4096), [0]), {}, empty(4096), card())
    part = kernels.transients(aten.sum.dim_IntList, (empty(rows // 8, 4096), [0]), {}, empty(4096), card())
    assert max(whole) == max(part) > MiB


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.data())
def test_the_sum_of_everything_does_not_depend_on_the_order_of_dimensions(shape: list[int], data: st.DataObject) -> None:
    tensor = empty(*[size * 16 for size in shape])
    order = data.draw(st.permutations(range(len(shape))))
    usual = kernels.transients(aten.sum.default, (tensor,), {}, empty(1), card())
    assert kernels.transients(aten.sum.default, (tensor.permute(order),), {}, empty(1), card()) == usual
    assert bool(usual) == (tensor.numel() > 255 * 512)  # one block of 512 threads takes up to 255 values each


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.data())
def test_a_sum_frees_what_it_allocates(shape: list[int], data: st.DataObject) -> None:
    tensor, dims = empty(*[size * 8 for size in shape]), data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    events = kernels.transients(aten.sum.dim_IntList, (tensor, sorted(dims)), {}, empty(1), card())
    assert sum(events) == 0
    assert len(events) in (0, 4)


def test_seeds_of_attention_with_dropout_are_on_the_cpu() -> None:
    func = aten._scaled_dot_product_efficient_attention.default
    query = empty(1, 1, 8, 8)
    out = (query, query, empty(1), empty(1))
    assert kernels.kernel_outputs(func, (query, query, query, None, True), {}, out) is out
    corrected = kernels.kernel_outputs(func, (query, query, query, None, True, 0.1), {}, out)
    assert [tensor.device.type for tensor in corrected] == ["meta", "meta", "cpu", "cpu"]


# The workspace of cuBLAS. --------------------------------------------------------------------------------------------

square, vector = empty(8, 8), empty(8)


@pytest.mark.parametrize(
    ("func", "args", "uses"),
    [
        (aten.mm.default, (square, square), True),
        (aten.addmm.default, (vector, square, square), True),
        (aten._addmm_activation.default, (vector, square, square), True),
        (aten.bmm.default, (empty(2, 8, 8), empty(2, 8, 8)), True),
        (aten.baddbmm.default, (empty(2, 8, 8),) * 3, True),
        (aten.mv.default, (square, vector), True),
        (aten.dot.default, (vector, vector), True),
        (aten.mm.default, (empty(0, 8), square), False),
        (aten.mm.default, (empty(8, 0), empty(0, 8)), False),
        (aten.bmm.default, (empty(2, 8, 0), empty(2, 0, 8)), False),
        (aten.addr.default, (square, vector, vector), False),
        (aten._int_mm.default, (square, square), False),
        (aten.add.Tensor, (square, square), False),
    ],
)
def test_which_products_call_cublas(func: Any, args: tuple[Any, ...], uses: bool) -> None:
    assert kernels.uses_cublas(func, args) is uses


@pytest.mark.parametrize(("capability", "nbytes"), [((7, 5), 8519680), ((8, 9), 8519680), ((9, 0), 33554432), ((12, 0), 33554432)])
def test_the_workspace_of_cublas(capability: tuple[int, int], nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert kernels.cublas_workspace(card(capability)) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [(":4096:8", 32 * MiB), (":16:8", 128 * 1024), (":4096:2:16:8", 8519680), ("nonsense", 8519680)]
)
def test_the_environment_sets_the_workspace_of_cublas(text: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", text)
    assert kernels.cublas_workspace(card()) == nbytes


# On the spare device type: in a process of its own, because registering it cannot be undone. --------------------------

SCRIPT = """
import json, torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from vramlab.virtual import kernels

torch.set_num_threads(1)
results = {}
try:
    kernels.install("card", lambda device: (8, 9))
except ValueError as error:
    results["refused"] = str(error)
_setup_privateuseone_for_python_backend("card", backend_module=_DummyBackendModule())
capability = (8, 9)
kernels.install("card", lambda device: capability)
kernels.install("card", lambda device: (0, 0))

class Fake(FakeTensorMode):
    avoid_device_init = True

class Card(TorchDispatchMode):
    fake, ops = Fake(allow_non_fake_inputs=True), []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.__name__.split(".")[0])
        with self.fake:
            return func(*args, **(kwargs or {}))

def tensor(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(*shape, device="card", dtype=dtype).requires_grad_(grad)

def ops(function):
    Card.ops.clear()
    function()
    return list(Card.ops)

with Card():
    q = tensor(2, 4, 100, 64)
    f = tensor(2, 4, 100, 64, dtype=torch.float32)
    bools = torch.ones(100, 100, dtype=torch.bool, device="card")
    sdpa = F.scaled_dot_product_attention
    results["flash"] = ops(lambda: sdpa(q, q, q))
    odd = tensor(2, 4, 100, 60)
    results["padded"] = ops(lambda: results.update(shape=list(sdpa(odd, odd, odd).shape)))
    results["efficient"] = ops(lambda: sdpa(f, f, f))
    results["masked"] = ops(lambda: sdpa(f, f, f, bools))
    odd32, zeros = tensor(2, 4, 8, 63, dtype=torch.float32), torch.zeros(8, 8, device="card")
    results["math"] = ops(lambda: sdpa(odd32, odd32, odd32, zeros))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        results["context"] = ops(lambda: sdpa(q, q, q))
    with torch.no_grad():
        results["no_grad"] = ops(lambda: sdpa(q, q, q))
    results["choices"] = [torch._fused_sdp_choice(*[x] * 3) for x in (q, f, odd32)]
    results["choice, mask"] = torch._fused_sdp_choice(q, q, q, bools, 0.0, False)
    out = sdpa(q, q, q)
    results["backward"] = ops(lambda: out.sum().backward())
    results["gradient"] = list(q.grad.shape)
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True, device="card", dtype=torch.bfloat16)
    x = tensor(2, 16, 64)
    results["module"] = ops(lambda: attention(x, x, x, need_weights=False))
    capability = (9, 0)
    results["hopper"] = ops(lambda: sdpa(q, q, q))
    capability = (7, 5)
    results["turing"] = ops(lambda: sdpa(q, q, q))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def device() -> dict[str, Any]:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("check", "kernel"),
    [
        ("flash", "_scaled_dot_product_flash_attention"),
        ("padded", "_scaled_dot_product_flash_attention"),
        ("efficient", "_scaled_dot_product_efficient_attention"),
        ("masked", "_scaled_dot_product_efficient_attention"),
        ("context", "_scaled_dot_product_efficient_attention"),
        ("no_grad", "_scaled_dot_product_flash_attention"),
        ("module", "_scaled_dot_product_flash_attention"),
        ("hopper", "_scaled_dot_product_cudnn_attention"),
        ("math", "_safe_softmax"),
        ("turing", "_safe_softmax"),
        ("backward", "_scaled_dot_product_flash_attention_backward"),
    ],
)
def test_attention_on_the_device_runs_this_kernel(device: dict[str, Any], check: str, kernel: str) -> None:
    assert kernel in device[check]


def test_heads_and_masks_are_padded_as_on_the_card(device: dict[str, Any]) -> None:
    assert device["padded"].count("constant_pad_nd") == 3
    assert device["shape"] == [2, 4, 100, 60]
    masked = [op for op in device["masked"] if op not in ("detach", "device")]
    assert masked == [
        "scalar_tensor",
        "scalar_tensor",
        "where",
        "constant_pad_nd",
        "slice",
        "expand",
        "_scaled_dot_product_efficient_attention",
    ]


def test_the_math_path_adds_the_mask_in_place(device: dict[str, Any]) -> None:
    assert "add_" in device["math"]


def test_the_device_answers_which_kernel_it_would_take(device: dict[str, Any]) -> None:
    assert device["choices"] == [SDPBackend.FLASH_ATTENTION.value, SDPBackend.EFFICIENT_ATTENTION.value, SDPBackend.MATH.value]
    assert device["choice, mask"] == SDPBackend.EFFICIENT_ATTENTION.value


def test_gradients_have_the_shape_of_what_they_belong_to(device: dict[str, Any]) -> None:
    assert device["gradient"] == [2, 4, 100, 64]


def test_kernels_are_installed_for_the_spare_device_alone(device: dict[str, Any]) -> None:
    assert "called 'privateuseone' here, not 'card'. Register it first." in device["refused"]
