"""The memory techniques, each usable alone in any training loop."""

from vramlab.techniques.accumulation import Window, accumulate
from vramlab.techniques.adafactor import Adafactor, adafactor_update, state_bytes
from vramlab.techniques.checkpointing import checkpoint_blocks, find_blocks
from vramlab.techniques.in_backward import step_in_backward
from vramlab.techniques.losses import chunked_cross_entropy
from vramlab.techniques.low_bit import adamw_8bit
from vramlab.techniques.offload import OffloadedOptimizer, offload_activations
from vramlab.techniques.precision import Precision, fp32_precision

__all__ = [
    "Adafactor",
    "OffloadedOptimizer",
    "Precision",
    "Window",
    "accumulate",
    "adafactor_update",
    "adamw_8bit",
    "checkpoint_blocks",
    "chunked_cross_entropy",
    "find_blocks",
    "fp32_precision",
    "offload_activations",
    "state_bytes",
    "step_in_backward",
]
