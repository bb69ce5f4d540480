"""Tests that open a virtual GPU in their own process. The device type stays registered in it, so that process runs nothing else.

`tests/test_virtual.py` starts it; by hand: ``pytest tests/virtual``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vramlab.virtual.device import VirtualGPU, virtual_gpu


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    """An open RTX 4090."""
    with virtual_gpu("RTX 4090") as card:
        yield card
