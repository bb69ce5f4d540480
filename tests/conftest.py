"""The same start for every test: the CPU, one thread, one seed. In CI a test that did not run is a failure."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# A test that needs CUDA names the device itself.
os.environ.setdefault("VRAMLAB_DEVICE", "cpu")

import torch

ALLOWED_SKIPS = {
    r"needs CUDA": "CI has no GPU",
    r"needs the real CUDA traces": "they are not part of the project",
    r"needs a CUDA build of torch": "its rules in C++ judge ours; torch for CPUs has none",
    r"needs torchao": "it is an option, and compiles for a minute; its place is taken by one of the tests' own",
    r"judged with torch 2\.14": "other versions allocate here and there in another way",
}
"""Skips that CI accepts: a pattern found in ``test id: reason``, and why it is fine."""

_refused_skips: list[str] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that register the virtual GPU run in a process of their own, which names their folder; see tests/test_virtual.py."""
    folder = Path(__file__).parent / "virtual"
    named = [Path(arg.split("::")[0]).resolve() for arg in config.args]
    alone = all(path.is_relative_to(folder) for path in named)
    return True if collection_path.is_relative_to(folder) and not alone else None


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # small tensors: more threads only wait for one another


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def cheap_collections() -> Iterator[None]:
    """Failed and compared runs collect garbage; what was there before the module need not be searched each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not hasattr(report, "wasxfail"):  # an expected failure is reported as a skip too, but it ran
        _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)  # a whole module that skips itself


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skip = f"{report.nodeid}: {reason.removeprefix('Skipped: ')}"
        if not any(re.search(pattern, skip) for pattern in ALLOWED_SKIPS):
            _refused_skips.append(skip)


def _skips_fail() -> bool:
    return bool(_refused_skips) and os.environ.get("CI") == "true"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skips_fail() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skips_fail():
        terminalreporter.section("skipped, which CI does not accept", red=True)
        for skip in _refused_skips:
            terminalreporter.write_line(skip)
        terminalreporter.write_line("Install what these tests need, or add the reason to ALLOWED_SKIPS in tests/conftest.py.")
