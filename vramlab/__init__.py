"""vramlab: see, predict and shrink the GPU memory of a training step, on any machine.

The names below load on first use, so ``import vramlab`` loads neither torch nor matplotlib nor ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vramlab.recipe import Recipe

if TYPE_CHECKING:
    from vramlab import parallel, tasks, techniques
    from vramlab.experiments import compare, run
    from vramlab.memory.budget import budget
    from vramlab.memory.free import free
    from vramlab.memory.recorder import record
    from vramlab.notebook.lab import Lab
    from vramlab.notebook.plots import plot
    from vramlab.planning import plan
    from vramlab.tasks import Task
    from vramlab.training import train
    from vramlab.virtual.device import virtual_gpu
    from vramlab.virtual.ranks import virtual_rank

__version__ = "0.1.0"

_HOME = {
    "Lab": "vramlab.notebook.lab",
    "Task": "vramlab.tasks",
    "budget": "vramlab.memory.budget",
    "compare": "vramlab.experiments",
    "free": "vramlab.memory.free",
    "parallel": "vramlab.parallel",
    "plan": "vramlab.planning",
    "plot": "vramlab.notebook.plots",
    "record": "vramlab.memory.recorder",
    "run": "vramlab.experiments",
    "tasks": "vramlab.tasks",
    "techniques": "vramlab.techniques",
    "train": "vramlab.training",
    "virtual_gpu": "vramlab.virtual.device",
    "virtual_rank": "vramlab.virtual.ranks",
}

__all__ = [
    "Lab",
    "Recipe",
    "Task",
    "budget",
    "compare",
    "free",
    "parallel",
    "plan",
    "plot",
    "record",
    "run",
    "tasks",
    "techniques",
    "train",
    "virtual_gpu",
    "virtual_rank",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vramlab' has no attribute {name!r}; it has {', '.join(__all__)}")
    home = importlib.import_module(_HOME[name])
    return home if _HOME[name] == f"vramlab.{name}" else getattr(home, name)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext vramlab``: the magics ``%%vram`` and ``%vram``."""
    importlib.import_module("vramlab.notebook.magics").load(shell)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
