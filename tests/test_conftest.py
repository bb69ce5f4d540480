"""The guard of conftest.py itself: in CI, a skip that nobody allowed fails the session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
RUNS = "def test_that_runs(): pass\n"
SKIPS = "import pytest\n@pytest.mark.skip(reason='{}')\ndef test_that_skips(): pass\n"
MODULE_SKIPS = "import pytest\npytest.skip('no browser', allow_module_level=True)\n"
IMPORT_SKIPS = "import pytest\npytest.importorskip('a_library_that_nobody_has', reason='no library')\n"
FIXTURE_SKIPS = "import pytest\n@pytest.fixture\ndef thing(): pytest.skip('no thing')\ndef test_it(thing): pass\n"
FAILS_AS_EXPECTED = "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert False\n"


def session(folder: Path, ci: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on made-up test modules beside a copy of conftest.py."""
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    # The guard needs no tensors, and the real torch takes a second to load.
    (folder / "torch.py").write_text("def set_num_threads(n): pass\ndef manual_seed(n): pass\n")
    for name, source in modules.items():
        (folder / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}", str(folder)]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (SKIPS.format("no browser"), "test_other.py::test_that_skips: no browser"),
        (MODULE_SKIPS, "test_other.py: no browser"),
        (IMPORT_SKIPS, "test_other.py: no library"),
        (FIXTURE_SKIPS, "test_other.py::test_it: no thing"),
    ],
    ids=["a test", "a module", "a missing import", "a fixture"],
)
def test_in_ci_an_unlisted_skip_fails_the_session_and_is_named(tmp_path: Path, source: str, named: str) -> None:
    result = session(tmp_path, "true", first=RUNS, other=source)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert named in result.stdout
    assert "add the reason to ALLOWED_SKIPS" in result.stdout


@pytest.mark.parametrize(
    ("ci", "source"),
    [("", SKIPS.format("no browser")), ("true", SKIPS.format("needs CUDA")), ("true", FAILS_AS_EXPECTED)],
    ids=["outside CI", "a listed skip", "an expected failure"],
)
def test_other_sessions_pass(tmp_path: Path, ci: str, source: str) -> None:
    result = session(tmp_path, ci, first=RUNS, other=source)
    assert result.returncode == pytest.ExitCode.OK, result.stdout
    assert "ALLOWED_SKIPS" not in result.stdout


def test_the_guard_does_not_hide_a_failure(tmp_path: Path) -> None:
    result = session(tmp_path, "true", first="def test_it(): assert False\n", other=SKIPS.format("needs CUDA"))
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "1 failed, 1 skipped" in result.stdout
