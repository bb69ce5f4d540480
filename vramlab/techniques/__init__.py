"""The memory techniques, each usable alone in any training loop."""

from vramlab.techniques.accumulation import Window
from vramlab.techniques.checkpointing import checkpoint_blocks
from vramlab.techniques.precision import Precision

__all__ = ["Precision", "Window", "checkpoint_blocks"]
