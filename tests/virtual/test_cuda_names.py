"""Code that names "cuda" means the card; where that cannot be carried out it is told by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vramlab.virtual.device import VirtualGPU, virtual_gpu


@pytest.mark.parametrize(
    "autocast",
    [
        lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16),
        lambda: torch.amp.autocast("cuda", torch.bfloat16),
        lambda: torch.autocast("vgpu", dtype=torch.bfloat16),
    ],
)
def test_autocast_for_cuda_is_the_cards(gpu: VirtualGPU, autocast: Callable[[], Any]) -> None:
    layer, x = nn.Linear(8, 8).to(gpu.device), torch.zeros(2, 8, device=gpu.device)
    with autocast():
        assert layer(x).dtype == torch.bfloat16
    with torch.autocast("cuda", enabled=False):
        assert layer(x).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")
@pytest.mark.parametrize("kind", [lambda: torch.amp.GradScaler("cuda"), lambda: torch.amp.GradScaler(device="cuda"), torch.amp.GradScaler])
def test_a_scaler_for_cuda_scales_on_the_card(gpu: VirtualGPU, kind: Callable[[], Any]) -> None:
    scaler, x = kind(), torch.ones(3, device=gpu.device, requires_grad=True)
    assert scaler.is_enabled()
    assert scaler.scale(x.sum()).item() == 3 * 65536


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.to("cuda"),
        lambda x: x.cuda(),
        lambda x: torch.zeros(3, device="cuda"),
        lambda x: torch.tensor([1], device="cuda:0"),
        lambda x: nn.Linear(2, 2).cuda(),
        lambda x: torch.cuda.get_device_properties(0),
    ],
)
def test_a_tensor_for_cuda_is_refused_by_line(gpu: VirtualGPU, call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"names the device 'cuda', and the card is a virtual one: at .*test_cuda_names.py:\d+\. Take"):
        call(torch.zeros(3, device=gpu.device))


def test_afterwards_cuda_is_what_it_was() -> None:
    before = (torch.autocast.__init__, torch.amp.GradScaler.__init__, torch.cuda._lazy_init)
    with virtual_gpu("RTX 4090"):
        assert torch.cuda._lazy_init is not before[2]
    assert (torch.autocast.__init__, torch.amp.GradScaler.__init__, torch.cuda._lazy_init) == before
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
