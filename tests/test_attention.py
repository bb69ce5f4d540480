"""Attention on a virtual card: which kernel it takes, and what surrounds it.

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
from kernel_calls import empty
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramlab.virtual import attention

ROOT = Path(__file__).parents[1]
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


@pytest.fixture
def _torch_2_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TORCH", (2, 14))
    monkeypatch.setattr(attention, "CUDNN", 92400)
    monkeypatch.setattr(attention, "_BROKEN_DECODE", True)


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
    return int(attention.attention_kernel(*arguments).value)


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
    monkeypatch.setattr(attention, "TORCH", (2, 14))
    assert choice(call, (8, 9)) == SDPBackend.EFFICIENT_ATTENTION.value
    monkeypatch.setattr(attention, "TORCH", (2, 13))
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
        attention.attention(**arguments)
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
        ours = attention.attention(query, key, value, **kwargs)
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, **kwargs)
    assert torch.equal(ours, theirs)


# On the spare device type: in a process of its own, because registering it cannot be undone. --------------------------

SCRIPT = """
import json, torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from vramlab.virtual import attention

torch.set_num_threads(1)
results = {}
try:
    attention.install("card", lambda device: (8, 9))
except ValueError as error:
    results["refused"] = str(error)
_setup_privateuseone_for_python_backend("card", backend_module=_DummyBackendModule())
capability = (8, 9)
attention.install("card", lambda device: capability)
attention.install("card", lambda device: (0, 0))

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
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True, device="card", dtype=torch.bfloat16)
    x = tensor(2, 16, 64)
    results["module"] = ops(lambda: module(x, x, x, need_weights=False))
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
