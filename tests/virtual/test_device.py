"""Ordinary PyTorch code on a virtual card."""

import torch

from vramlab.virtual.device import VirtualGPU


def test_bytes_are_those_of_the_blocks(gpu: VirtualGPU) -> None:
    x = torch.zeros(1000, device=gpu.device)  # 4000 bytes
    assert gpu.allocated == 4096
    del x
    assert gpu.allocated == 0
