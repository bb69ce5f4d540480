"""Code that was written for CUDA runs on the virtual card unchanged while `cuda_names` is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from vramlab.virtual import backend
from vramlab.virtual.cuda_names import cuda_names
from vramlab.virtual.device import VirtualGPU


@pytest.fixture
def card(gpu: VirtualGPU) -> Iterator[VirtualGPU]:
    with cuda_names(gpu):
        yield gpu


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.zeros(3, device="cuda:0"),
        lambda: torch.zeros(3, device=torch.device("cuda")),
        lambda: torch.zeros(3, device=0),
        lambda: torch.tensor([1.0, 2, 3], device="cuda"),
        lambda: torch.as_tensor([1, 2, 3], device="cuda"),
        lambda: torch.randn(3, generator=torch.Generator("cuda"), device="cuda"),
        lambda: torch.zeros(3).new_zeros(3, device="cuda"),
        lambda: torch.empty_like(torch.zeros(3), device="cuda"),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).cuda(0, non_blocking=True),
        lambda: torch.zeros(3).cuda(torch.device("cuda:0")),
        lambda: torch.zeros(3).pin_memory().cuda(),
        lambda: torch.zeros(3).to("cuda"),
        lambda: torch.zeros(3).to(0),
        lambda: torch.zeros(3).to(torch.device("cuda"), torch.float16),
        lambda: torch.zeros(3).to(device="cuda", dtype=torch.int64),
        lambda: nn.Linear(2, 3).cuda().bias,
        lambda: nn.Linear(2, 3).to("cuda").bias,
        lambda: nn.Linear(2, 3).to(torch.device("cuda")).bias,
        lambda: nn.Linear(2, 3, device="cuda").bias,
        lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(device="cuda", dtype=torch.bfloat16)[1].running_mean,
    ],
)
def test_a_tensor_for_cuda_is_on_the_card(card: VirtualGPU, make: Callable[[], torch.Tensor]) -> None:
    made = make()
    assert made.device == card.device
    assert made.is_cuda
    assert not torch.zeros(1).is_cuda
    assert card.allocated >= made.nbytes


def test_cuda_as_the_default_is_the_card(card: VirtualGPU) -> None:
    with torch.device("cuda"):
        assert torch.zeros(3).device == card.device
    assert torch.zeros(3).device.type == "cpu"
    torch.set_default_device("cuda")
    try:
        assert nn.Linear(2, 2).weight.device == card.device
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_training_loop_as_people_write_it_runs(card: VirtualGPU, precision: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    losses = []
    for _ in range(2):
        x, y = torch.randn(32, 64).to(device, non_blocking=True), torch.randint(8, (32,)).cuda()
        dtype = torch.float16 if precision == "fp16" else torch.bfloat16
        with torch.autocast(device_type=device.type, dtype=dtype, enabled=precision != "fp32"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    torch.cuda.synchronize()
    assert losses == [0.0, 0.0]
    numbers = sum(p.numel() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() == card.peak_allocated > 16 * numbers
    assert torch.cuda.max_memory_reserved() == card.peak_reserved
    assert card.trace.breakdown("end").optimizer_state == 8 * numbers  # its counters of steps are on the host
    assert (card.trace.breakdown().weight_copies > 0) == (precision != "fp32")


def test_the_card_answers_for_torch_cuda(card: VirtualGPU) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(0).name == "RTX 4090"
    assert torch.cuda.get_device_capability() == (8, 9)
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.get_device_properties("cuda").total_memory == torch.cuda.mem_get_info()[1] == card.card.memory
    kept = torch.zeros(1024, device="cuda")
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated() == kept.nbytes
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        torch.cuda.Event(enable_timing=True).record()


def test_a_large_model_costs_no_host_memory(card: VirtualGPU) -> None:
    model = nn.Sequential(*(nn.Linear(2**14, 2**14) for _ in range(32)))  # 32 GiB
    assert model[0].weight.device.type == "cpu"
    with pytest.raises(torch.OutOfMemoryError, match="RTX 4090 out of memory"):
        model.cuda()


def test_what_torch_cuda_cannot_answer_is_told_by_line(card: VirtualGPU) -> None:
    with pytest.raises(RuntimeError, match=r"names the device 'cuda', and the card is a virtual one: at .*test_cuda_code\.py:\d+"):
        torch.cuda.current_blas_handle()


def test_afterwards_cuda_is_what_it_was(gpu: VirtualGPU) -> None:
    def state() -> list[Any]:
        names = [name for name in dir(backend.Module) if hasattr(torch.cuda, name) and not name.startswith("__")]
        return [torch.Generator, nn.init.normal_, torch.utils._device.DeviceContext.__init__, *(getattr(torch.cuda, n) for n in names)]

    before = state()
    inside = cuda_names(gpu)
    inside.__enter__()
    assert all(a is not b for a, b in zip(before, state(), strict=True))
    assert not inside.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert all(a is b for a, b in zip(before, state(), strict=True))
    assert not torch.cuda.is_available()
