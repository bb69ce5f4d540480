"""The package from outside: what a user types first, in a fresh Python."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

import vramlab as vl


def python(source: str, *options: str) -> str:
    environment = {**os.environ, "VRAMLAB_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *options, "-c", source]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_one_line_prints_bytes_and_tokens_per_second() -> None:
    source = (
        "import vramlab as vl; r = vl.run(vl.tasks.gpt('nano'), vl.Recipe(precision='amp-bf16', checkpointing='blocks'), steps=3); "
        "print(r.peak, r.throughput)"
    )
    peak, throughput = python(source).split()
    assert int(peak) > 1_700_000
    assert float(throughput) > 0


def test_technique_modules_load_alone_and_without_the_front_end() -> None:
    python(
        "import sys; from vramlab.techniques import Precision, Window, checkpoint_blocks; from vramlab.training import train\n"
        "assert not {'matplotlib', 'ipywidgets', 'IPython'} & set(sys.modules)"
    )


def test_a_run_needs_neither_scikit_learn_nor_matplotlib() -> None:
    python(
        "import sys\nfor name in ('sklearn', 'matplotlib', 'ipywidgets', 'IPython', 'torchvision'): sys.modules[name] = None\n"
        "import vramlab as vl; vl.run(vl.tasks.gpt('nano', sequence=4), vl.Recipe(micro_batch=1), steps=3, progress=False)"
    )


def test_nothing_warns_on_import_or_in_a_run() -> None:
    python("import vramlab as vl; vl.run(vl.tasks.gpt('nano', sequence=4), vl.Recipe(micro_batch=1), steps=3)", "-W", "error")


def test_the_version_is_that_of_the_distribution() -> None:
    assert importlib.metadata.version("vramlab") == vl.__version__


def test_dir_lists_the_public_names() -> None:
    assert set(vl.__all__) <= set(dir(vl))
    assert "__version__" in dir(vl)
    assert len(vl.__all__) <= 25  # short enough to read aloud


@pytest.mark.parametrize("name", vl.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert getattr(vl, name).__doc__


def test_a_wrong_name_says_which_there_are() -> None:
    with pytest.raises(AttributeError, match=r"^module 'vramlab' has no attribute 'Lap'; it has Lab, Recipe, Task, "):
        _ = vl.Lap
    with pytest.raises(ImportError, match="cannot import name 'Lap'"):
        from vramlab import Lap  # noqa: F401
