"""The tests of the virtual GPU, in a process of their own: they register a device type, which nothing undoes."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "virtual"


def test_all_tests_on_a_virtual_gpu_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=os.environ, cwd=FOLDER.parents[1])
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
