"""Lightning with two gloo processes is a plain loop under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_lightning_with_two_processes_is_a_plain_loop():
    """Automatic, with micro-batches, and manual; `two_processes.py` runs both loops on the same ranks."""
    pytest.importorskip("lightning", reason="extra: lightning")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.integrations.two_processes"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = re.findall(r"difference (\d) ([\d.]+(?:e-\d+)?)", done.stdout)
    assert [sum(rank == own for rank, _ in found) for own in "01"] == [3, 3], done.stderr[-3000:]
    assert all(float(difference) < 1e-10 for _, difference in found)
