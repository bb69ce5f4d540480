"""Which products call cuBLAS, and the workspace that it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_calls import card, empty

from vramlab.units import MiB
from vramlab.virtual import cublas

aten = torch.ops.aten
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
    assert cublas.uses_cublas(func, args) is uses


@pytest.mark.parametrize(("capability", "nbytes"), [((7, 5), 8519680), ((8, 9), 8519680), ((9, 0), 33554432), ((12, 0), 33554432)])
def test_the_workspace_of_cublas(capability: tuple[int, int], nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert cublas.cublas_workspace(card(capability)) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [(":4096:8", 32 * MiB), (":16:8", 128 * 1024), (":4096:2:16:8", 8519680), ("nonsense", 8519680)]
)
def test_the_environment_sets_the_workspace_of_cublas(text: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", text)
    assert cublas.cublas_workspace(card()) == nbytes
