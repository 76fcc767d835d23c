"""credo on a device that is no CPU, each file of checks in a process of its own.

The device (`tests/device/emulated.py`) has to be known to torch before the first backward pass of a process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests" / "device").glob("check_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_checks_on_the_device_pass(file):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
