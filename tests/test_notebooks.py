"""What every committed notebook keeps to, read from its JSON; that its outputs are right is nbval's part."""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest

import vramlab

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

CHECKS = "vramlab.notebook.exercises"  # what exercises are checked with
LIBRARIES = {"torch", "numpy", *sys.stdlib_module_names}
MODELS = {"11_your_own_model": {"transformers", "peft", "torchvision"}}  # what a notebook may import besides
# What fails when outputs are compared, or does not work in every front end.
FORBIDDEN = re.compile(r"\bclear_output\b|\bOutput\(|\binteract\b|^\s*%%?time", re.MULTILINE)
ABSOLUTE_PATH = re.compile(r"(?<![\w.~-])(?:/(?:work|root|home|tmp|usr|opt|mnt|Users)/\w|[A-Z]:\\+\w)")

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of the code read, not of this


def cells(notebook: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def python(cell: dict[str, Any]) -> str:
    """A code cell as plain Python: without magics, shell lines and questions."""
    return re.sub(r"(^\s*|=\s*)[%!].*$|^[\w.]+\?+$", r"\g<1>0", source(cell), flags=re.MULTILINE)


def texts(value: object) -> Iterator[str]:
    """Every text in a cell's source or outputs, but for pictures."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        # The notebook format cuts texts into lines.
        yield from ["".join(value)] if all(isinstance(part, str) for part in value) else itertools.chain(*map(texts, value))
    elif isinstance(value, dict):
        yield from itertools.chain(*(texts(part) for name, part in value.items() if not name.startswith("image/")))


def strangers(code: str, models: Set[str] = frozenset()) -> Iterator[str]:
    """Imports and attributes that a reader of the course is not meant to need; ``models``: libraries that this notebook is about."""
    names, libraries = set(), LIBRARIES | models
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "vramlab":
                    names.add(alias.asname or alias.name)
                elif alias.name.split(".")[0] not in libraries:
                    yield f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if node.module == "vramlab":
                yield from (f"from vramlab import {a.name}" for a in node.names if a.name not in vramlab.__all__)
            elif node.module != CHECKS and (node.module or "").split(".")[0] not in libraries:
                yield f"from {node.module} import {', '.join(a.name for a in node.names)}"
    for node in ast.walk(tree):
        of_vramlab = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
        if of_vramlab and node.attr not in [*vramlab.__all__, "__version__"]:
            yield f"{node.value.id}.{node.attr}"


def rule_breaks(notebook: dict[str, Any], models: Set[str] = frozenset()) -> list[str]:
    """Every rule that a notebook breaks, as text; what each means stands beside it."""
    found = []
    code, metadata = cells(notebook, "code"), notebook["metadata"]

    first = notebook["cells"][0]
    if first["cell_type"] != "markdown" or not source(first).startswith("# "):
        found.append("The first cell is Markdown that starts with '# '.")
    kernel = metadata.get("kernelspec", {})
    if (kernel.get("name"), kernel.get("display_name")) != ("python3", "Python 3 (ipykernel)"):
        found.append(f"The kernel is python3, 'Python 3 (ipykernel)', got {kernel}.")
    if "widgets" in metadata:
        found.append("Widget state is not stored.")
    counts = [cell["execution_count"] for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"Code cells were run once each, from top to bottom, got {counts}.")

    for index, cell in enumerate(notebook["cells"]):
        if path := ABSOLUTE_PATH.search("\n".join(texts([cell["source"], cell.get("outputs", [])]))):
            found.append(f"Cell {index} holds a path of one machine: {path[0]}...")
        if cell["cell_type"] != "code":
            continue
        errors = [output["ename"] for output in cell["outputs"] if output["output_type"] == "error"]
        if errors and "raises-exception" not in tags(cell):
            found.append(f"Cell {index} failed with {errors[0]}; a failure that teaches has the tag raises-exception.")
        lines, most = len(source(cell).splitlines()), 25 if "naked" in tags(cell) else 15
        if not 1 <= lines <= most:
            found.append(f"Cell {index} has 1 to {most} lines, got {lines}.")
        if word := FORBIDDEN.search(source(cell)):
            found.append(f"Cell {index} does not use {word[0].strip()}.")
    found += text_breaks(notebook)
    unknown = strangers("\n".join(map(python, code)), models)
    return found + [f"Only vramlab's public names, torch, numpy and Python's library are used, got {name}." for name in unknown]


def text_breaks(notebook: dict[str, Any]) -> list[str]:
    """Rules of the prose: headings in order, pictures with a text for those who cannot see them, no cell without words."""
    found, level = [], 0
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "markdown":
            continue
        text = re.sub(r"```.*?```", "", source(cell), flags=re.DOTALL)
        if not text.strip():
            found.append(f"Cell {index} has text.")
        for marks in re.findall(r"^(#+) ", text, flags=re.MULTILINE):
            if len(marks) > level + 1 or (len(marks) == 1 and level):
                found.append(
                    f"Cell {index} has headings that go one deeper at a time, and there is one title, got {marks!r} after level {level}."
                )
            level = len(marks)
        if re.search(r"!\[\s*\]\(", text) or re.search(r"<img(?![^>]*\balt=\"[^\"]+\")[^>]*>", text):
            found.append(f"Cell {index} has a picture without alternative text.")
    return found


def links(notebook: dict[str, Any]) -> list[str]:
    """Where the prose leads to, within the course."""
    prose = "\n".join(source(cell) for cell in cells(notebook, "markdown"))
    return [target for target in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in target]


def compared(notebook: dict[str, Any]) -> int:
    """How many cells' outputs nbval compares."""
    return sum(bool(cell["outputs"]) and not {"nbval-ignore-output", "nbval-skip"} & set(tags(cell)) for cell in cells(notebook, "code"))


def words(notebook: dict[str, Any]) -> int:
    return sum(len(source(cell).split()) for cell in cells(notebook, "markdown"))


def test_there_is_a_course() -> None:
    assert len(NOTEBOOKS) >= 2
    assert NOTEBOOKS[0].name == "00_start_here.ipynb"


def test_notebooks_are_numbered_without_gaps() -> None:
    names = [re.fullmatch(r"(\d\d)_[a-z0-9_]+\.ipynb", path.name) for path in NOTEBOOKS]
    assert [match and match[1] for match in names] == [f"{n:02}" for n in range(len(NOTEBOOKS))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_rules(path: Path) -> None:
    assert rule_breaks(json.loads(path.read_text(encoding="utf-8")), MODELS.get(path.stem, frozenset())) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small(path: Path) -> None:
    assert path.stat().st_size < 500_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere_and_to_the_neighbours(path: Path) -> None:
    found = links(json.loads(path.read_text(encoding="utf-8")))
    assert [target for target in found if not (FOLDER / target).exists()] == []
    place = NOTEBOOKS.index(path)
    assert {n.name for n in NOTEBOOKS[max(place - 1, 0) : place + 2] if n != path} <= set(found)


COMPARED = {"00": 4, "01": 11, "12": 30}
"""How many outputs nbval compares at least; 10 in all others."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_really_compared(path: Path) -> None:
    assert compared(json.loads(path.read_text(encoding="utf-8"))) >= COMPARED.get(path.name[:2], 10)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_neither_a_stub_nor_a_book(path: Path) -> None:
    most = {"12": 5_000}.get(path.name[:2], 2_000)
    assert 350 <= words(json.loads(path.read_text(encoding="utf-8"))) <= most


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if "01" <= p.name[:2] <= "11"], ids=lambda path: path.stem)
def test_a_notebook_of_the_course_has_the_parts_that_all_have(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code, prose = ("\n".join(map(source, cells(notebook, kind))) for kind in ("code", "markdown"))
    checked = re.findall(r"^check\(\"(\d\d\.\d)\"", code, flags=re.MULTILINE)
    assert checked == [f"{path.name[:2]}.{n}" for n in (1, 2, 3)]
    assert "vl.Lab(" in code
    assert any(part in code for part in ("except ValueError", "except TypeError", "raises-exception"))
    for part in ("guess first", "You know now", "References"):
        assert part in prose
    assert any("naked" in tags(cell) for cell in cells(notebook, "code")) or path.name[:2] in ("10", "11")


def made_up(code: str = "import vramlab as vl", *, cell: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A notebook that keeps every rule, but for the changes."""
    heading = {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "Text."]}
    coded = {"cell_type": "code", "metadata": {}, "source": code.splitlines(keepends=True), "execution_count": 1, "outputs": []}
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    return {"cells": [heading, coded | (cell or {})], "metadata": metadata} | changes


def prose(text: str) -> dict[str, Any]:
    """A notebook with this text in its first cell."""
    notebook = made_up()
    notebook["cells"][0]["source"] = text.splitlines(keepends=True)
    return notebook


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}


@pytest.mark.parametrize(
    "notebook",
    [
        made_up(),
        made_up("import collections.abc\nimport numpy as np\nimport torch.nn.functional as F\n\nfrom vramlab import Recipe, run"),
        made_up("import vramlab as vl\n\nvl.techniques.Precision('bf16')\nvl.tasks.gpt()\nvl.__version__"),
        made_up("!ls\n%load_ext vramlab\nfiles = !ls\nx = 5 % 2\nlen?\nif x:\n    # why?\n    x = 2"),
        made_up("x = 1\n" * 25, cell={"metadata": {"tags": ["naked"]}}),
        made_up(cell={"outputs": [ERROR], "metadata": {"tags": ["raises-exception"]}}),
        made_up("interactive = 'see https://example.org/home/page'"),
        prose('# Title\n## Part\n### Piece\n## Part\n![the lab](x.png) <img alt="the lab" src="x.png">'),
    ],
)
def test_a_notebook_that_keeps_the_rules_passes(notebook: dict[str, Any]) -> None:
    assert rule_breaks(notebook) == []


def test_a_library_of_models_is_only_for_the_notebook_about_it() -> None:
    notebook = made_up("import torchvision\nfrom peft import LoraConfig")
    assert rule_breaks(notebook, MODELS["11_your_own_model"]) == []
    assert [message.rpartition("got ")[2] for message in rule_breaks(notebook)] == ["import torchvision.", "from peft import LoraConfig."]


@pytest.mark.parametrize(
    ("notebook", "rule"),
    [
        (made_up(cells=made_up()["cells"][1:]), "The first cell is Markdown"),
        (made_up(metadata={}), "The kernel is python3"),
        (prose("# Title\n### Deep"), "go one deeper at a time"),
        (prose("# Title\n# Title"), "there is one title"),
        (prose("# Title\n![ ](images/lab.png)"), "without alternative text"),
        (prose("# Title\n<img src='images/lab.png'>"), "without alternative text"),
        (made_up(metadata=made_up()["metadata"] | {"widgets": {}}), "Widget state"),
        (made_up(cell={"execution_count": None}), r"got \[None\]"),
        (made_up(cell={"execution_count": 2}), r"got \[2\]"),
        (made_up("open('/" + "home/me/data')"), "a path of one machine: /home"),
        (made_up(cell={"outputs": [{"output_type": "stream", "text": ["at\n", "/" + "usr/lib"]}]}), "a path of one machine: /usr"),
        (made_up("open('C:\\\\Users')"), "a path of one machine: C:"),
        (made_up(cell={"outputs": [ERROR]}), "failed with ValueError"),
        (made_up("x = 1\n" * 16), "has 1 to 15 lines, got 16"),
        (made_up("x = 1\n" * 26, cell={"metadata": {"tags": ["naked"]}}), "has 1 to 25 lines, got 26"),
        (made_up(""), "has 1 to 15 lines, got 0"),
        (made_up("clear_output()"), "does not use clear_output"),
        (made_up("with widgets.Output() as out:\n    pass"), r"does not use Output\("),
        (made_up("interact(f)"), "does not use interact"),
        (made_up("x = 1\n%time f()"), "does not use %time"),
        (made_up("%%timeit\nf()"), "does not use %%time"),
        (made_up("import matplotlib.pyplot as plt"), "got import matplotlib.pyplot"),
        (made_up("def f():\n    from tqdm import tqdm"), "got from tqdm import tqdm"),
        (made_up("from vramlab.units import GiB"), "got from vramlab.units import GiB"),
        (made_up("from vramlab import devices"), "got from vramlab import devices"),
        (made_up("import vramlab as v\n\nv.units.GiB"), "got v.units"),
        (made_up("import vramlab\n\nvramlab.devices.describe()"), "got vramlab.devices"),
    ],
    ids=itertools.count(),
)
def test_a_broken_rule_is_named(notebook: dict[str, Any], rule: str) -> None:
    (message,) = rule_breaks(notebook)
    assert re.search(rule, message)


# The reader's own choice


def lab_of(notebook: dict[str, Any]) -> tuple[vramlab.Task, vramlab.Recipe]:
    """What the notebook's last lab trains at first: its call, and only the assignments that it needs."""
    body = [node for cell in cells(notebook, "code") for node in ast.parse(python(cell)).body]
    calls = [n for node in body for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "vl.Lab"]
    assigned: dict[str, ast.expr] = {}
    for node in body:
        if isinstance(node, ast.Assign):
            target, given = node.targets[0], node.value
            pairs = (
                zip(target.elts, given.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(given, ast.Tuple)
                else [(target, given)]
            )
            assigned |= {one.id: other for one, other in pairs if isinstance(one, ast.Name)}
    names: dict[str, Any] = {"vl": vramlab}

    def value(expression: ast.expr) -> Any:
        for name in {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)} - names.keys():
            names[name] = value(assigned[name])
        return eval(compile(ast.Expression(expression), "cell", "eval"), names)

    task, recipe = map(value, calls[-1].args)
    return task, recipe


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if "01" <= p.name[:2] <= "05"], ids=lambda path: path.stem)
def test_the_lab_of_a_notebook_trains_in_bf16_where_the_reader_chooses_it(path: Path) -> None:
    """Where a reader chooses. Not all cells: those that count bytes by hand count 4 a number, so in bf16 five of them are rightly red."""
    task, recipe = lab_of(json.loads(path.read_text(encoding="utf-8")))
    plain = vramlab.run(task, recipe, steps=2, device="cpu", progress=False)
    run = vramlab.run(task, recipe.with_(precision="bf16"), steps=2, device="cpu", progress=False)
    assert run.losses[0] == pytest.approx(plain.losses[0], rel=0.02)
    assert 1.9 * run.breakdown.parameters <= plain.breakdown.parameters <= 2 * run.breakdown.parameters


# Stored outputs are worth something only if a wrong number differs from them


MUTATIONS = {
    "01_where_memory_goes": (
        "memory/ledger.py",
        "len(self._all), storage.nbytes(), device",
        "len(self._all), storage.nbytes() + 512, device",
    ),
    "05_optimizer_state": (
        "memory/trace.py",
        "    return MemoryBreakdown(*sums.tolist())",
        "    sums[1] //= 2\n    return MemoryBreakdown(*sums.tolist())",
    ),
}
"""Notebook -> a file of the package, what stands there, and a fault: 512 bytes more an allocation, half of the optimizer's state."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_in_the_package_fails_its_notebook(name: str, tmp_path: Path) -> None:
    file, right, wrong = MUTATIONS[name]
    package = tmp_path / "vramlab"
    shutil.copytree(Path(vramlab.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / file).read_text(encoding="utf-8")
    assert text.count(right) == 1
    (package / file).write_text(text.replace(right, wrong), encoding="utf-8")
    shutil.copy(FOLDER / f"{name}.ipynb", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env", f"{name}.ipynb"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "VRAMLAB_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout[-2000:]
    assert "1 failed" in done.stdout
