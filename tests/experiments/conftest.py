import os
from pathlib import Path

import pytest

from credo.experiments.checkpoint import Checkpoints
from tests.experiments.small import OLD


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power for real; a busy disk would take seconds for thousands of small syncs."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """One good checkpoint, which holds OLD."""
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    checkpoints.save(0, 1, OLD)
    return checkpoints
