"""Execute notebooks in place and write them so that two executions differ only in what was measured.

python benchmarks/execute_notebooks.py [NOTEBOOK ...]      all of notebooks/ if none is named
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parents[1] / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(path: Path) -> None:
    """Run every cell of a notebook from its own folder, as JupyterLab does, and write it back.

    Raises:
        CellExecutionError: a cell failed; the file stays as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,  # else the same text comes in as many pieces as the kernel happened to send
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    normalise(notebook)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)  # indent 1, newline at the end


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Replace what differs between machines and between runs: versions, widget state, cell and widget ids."""
    notebook.nbformat_minor = 5  # the first with cell ids
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02}"
        cell.metadata.pop("execution", None)
        for number, output in enumerate(cell.get("outputs", [])):
            if WIDGET in output.get("data", {}):  # the widget died with its kernel
                output.data[WIDGET]["model_id"] = f"{cell.id}-{number}"


def main(names: list[str]) -> int:
    """Execute the named notebooks, or all; returns the exit status."""
    paths = [Path(name) for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        start = time.perf_counter()
        try:
            execute(path)
        except CellExecutionError as error:
            print(f"{path.name} failed and was not written.\n{error}", file=sys.stderr)
            return 1
        print(f"{path.name} {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
