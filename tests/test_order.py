"""One ordered list of modules: each imports only from those above it, and only the notebook part knows the front end."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vramlab

ROOT = Path(__file__).parents[1]

ORDER = [
    "vramlab.units",
    "vramlab.gpus",
    "vramlab.recipe",
    "vramlab.interrupts",
    "vramlab.memory.trace",
    "vramlab.memory.allocator",
    "vramlab.memory.steady",
    "vramlab.memory.splice",
    "vramlab.memory.law",
    "vramlab.memory.depth",
    "vramlab.memory.report",
    "vramlab.memory.cell",
    "vramlab.memory.snapshot",
    "vramlab.tensors",
    "vramlab.memory.free",
    "vramlab.memory.alive",
    "vramlab.devices",
    "vramlab.memory.now",
    "vramlab.memory.ledger",
    "vramlab.memory.recorder",
    "vramlab.memory.budget",
    "vramlab.memory",
    "vramlab.virtual.values",
    "vramlab.virtual.memo",
    "vramlab.virtual.travel",
    "vramlab.virtual.worker",
    "vramlab.virtual.backend",
    "vramlab.virtual.traffic",
    "vramlab.virtual.collectives",
    "vramlab.virtual.buckets",
    "vramlab.virtual.autocast",
    "vramlab.virtual.scratch",
    "vramlab.virtual.attention",
    "vramlab.virtual.attention_scratch",
    "vramlab.virtual.reductions",
    "vramlab.virtual.lookups",
    "vramlab.virtual.tables",
    "vramlab.virtual.cublas",
    "vramlab.virtual.kernels",
    "vramlab.virtual.patches",
    "vramlab.virtual.shapes",
    "vramlab.virtual.device",
    "vramlab.virtual.ranks",
    "vramlab.virtual.cuda_names",
    "vramlab.virtual.planner",
    "vramlab.virtual.cells",
    "vramlab.virtual",
    "vramlab.techniques.precision",
    "vramlab.techniques.accumulation",
    "vramlab.techniques.checkpointing",
    "vramlab.techniques.offload",
    "vramlab.techniques.adafactor",
    "vramlab.techniques.in_backward",
    "vramlab.techniques.low_bit",
    "vramlab.techniques.losses",
    "vramlab.techniques.choose",
    "vramlab.techniques",
    "vramlab.tasks.models",
    "vramlab.tasks.text",
    "vramlab.tasks",
    "vramlab.parallel.rank",
    "vramlab.parallel.launch",
    "vramlab.parallel.way",
    "vramlab.parallel.data",
    "vramlab.parallel.sharded",
    "vramlab.parallel.timeline",
    "vramlab.parallel.parts",
    "vramlab.parallel.flow",
    "vramlab.parallel.pipelined",
    "vramlab.parallel.split",
    "vramlab.parallel.choose",
    "vramlab.parallel",
    "vramlab.training",
    "vramlab.virtual.step_alone",
    "vramlab.planning",
    "vramlab.experiments",
    "vramlab.named",
    "vramlab.notebook.style",
    "vramlab.notebook.plots",
    "vramlab.notebook.svg",
    "vramlab.notebook.live",
    "vramlab.notebook.predictor",
    "vramlab.notebook.switches",
    "vramlab.notebook.plan_view",
    "vramlab.notebook.run_view",
    "vramlab.notebook.compare_view",
    "vramlab.notebook.lab",
    "vramlab.notebook.exercises",
    *(f"vramlab.notebook.course.n{number:02}" for number in range(1, 12)),
    "vramlab.notebook.course",
    "vramlab.notebook.magics",
    "vramlab.notebook",
    "vramlab",
    "vramlab.answers",
    "vramlab.command",
    "vramlab.__main__",
]
"""A package stands for its ``__init__.py``, so below its modules."""

TORCH_FREE = [
    "vramlab.units",
    "vramlab.gpus",
    "vramlab.recipe",
    "vramlab.memory.trace",
    "vramlab.memory.allocator",
    "vramlab.memory.law",
    "vramlab.memory.splice",
    "vramlab.memory.cell",
    "vramlab.memory.depth",
    "vramlab.memory.snapshot",
    "vramlab.virtual.memo",
    "vramlab.virtual.traffic",
    "vramlab.virtual.planner",
    "vramlab.virtual.worker",
    "vramlab.answers",
    "vramlab.command",
]
FRONT_END = {"matplotlib", "ipywidgets", "IPython", "PIL"}
HEAVY = ["torch", "pandas", *sorted(FRONT_END)]


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(file): file for file in sorted((ROOT / "vramlab").rglob("*.py"))}


def imported(module: str, source: str, packages: set[str], known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a source imports, wherever it stands: in functions and under TYPE_CHECKING too.

    ``from vramlab import tasks`` names the module ``vramlab.tasks``, ``from vramlab import run`` the module ``vramlab``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if module in packages else module.split(".")[:-1]
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def faults(module: str, source: str, order: list[str], packages: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """What a module imports against the order, or of the front end outside its place."""
    found = []
    above = set(order[: order.index(module)])
    for line, name in imported(module, source, packages, set(order)):
        top = name.split(".")[0]
        if top == "vramlab" and name not in above:
            found.append(f"{module}:{line} imports {name}, which does not stand above it in ORDER.")
        if top in FRONT_END and not module.startswith("vramlab.notebook"):
            found.append(f"{module}:{line} imports {top}, which only vramlab.notebook does.")
    return found


def test_the_list_names_every_file_once() -> None:
    assert sorted(ORDER) == sorted(FILES)


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_from_above(module: str) -> None:
    packages = {name for name, file in FILES.items() if file.name == "__init__.py"}
    assert faults(module, FILES[module].read_text(encoding="utf-8"), ORDER, packages) == []


@pytest.mark.parametrize(
    "source",
    [
        "import p.b",
        "import p.b as later",
        "from p.b import thing",
        "from p import b",
        "from p import thing_of_the_package",
        "from .b import thing",
        "from . import b",
        "def f():\n    from p.b import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import Thing",
        "try:\n    import p.b\nexcept ImportError:\n    pass",
        "import p.unlisted",
        "import p.a",
    ],
)
def test_the_check_sees_an_import_from_below(source: str) -> None:
    order = ["vramlab.first", "vramlab.a", "vramlab.b", "vramlab"]
    (fault,) = faults("vramlab.a", source.replace("import p", "import vramlab").replace("from p", "from vramlab"), order, {"vramlab"})
    assert fault.startswith("vramlab.a:")
    assert "does not stand above it in ORDER" in fault


def test_the_check_sees_the_front_end_outside_its_place() -> None:
    source = "def f():\n    import matplotlib.pyplot as plt\n    from PIL import Image\n    import numpy"
    assert faults("vramlab.a", source, ["vramlab.a"]) == [
        "vramlab.a:2 imports matplotlib, which only vramlab.notebook does.",
        "vramlab.a:3 imports PIL, which only vramlab.notebook does.",
    ]
    assert faults("vramlab.notebook.a", source, ["vramlab.notebook.a"]) == []


def test_the_check_lets_imports_from_above_pass() -> None:
    source = "import os\nimport vramlab.b.first\nfrom vramlab.b import first\nfrom . import first\nfrom .first import *"
    assert faults("vramlab.b.a", source, ["vramlab.b.first", "vramlab.b.a", "vramlab.b"], {"vramlab.b"}) == []


def python(source: str) -> None:
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_import_vramlab_loads_nothing_heavy() -> None:
    python(f"import sys, vramlab; dir(vramlab); loaded = [m for m in {HEAVY} if m in sys.modules]; assert not loaded, loaded")


@pytest.mark.parametrize("module", TORCH_FREE)
def test_the_lowest_modules_load_without_torch(module: str) -> None:
    python(f"import sys; sys.modules['torch'] = None; import {module}")


def test_a_blocked_torch_is_noticed() -> None:
    with pytest.raises(AssertionError, match="import of torch halted"):
        python("import sys; sys.modules['torch'] = None; import vramlab.tensors")


@pytest.mark.parametrize("name", vramlab.__all__)
def test_every_public_name_loads_on_first_use(name: str) -> None:
    assert getattr(vramlab, name) is not None


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(AttributeError, match=r"module 'vramlab' has no attribute 'Recipes'; it has Lab, Recipe, Task, budget, compare"):
        _ = vramlab.Recipes
