"""A run that is asked to stop finishes its step, saves, and goes on later as if nothing had been (promise 6)."""

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from credo.experiments.checkpoint import equal
from credo.experiments.results import load_result
from credo.experiments.stopping import EXIT_CODE_TERMINATED, Terminated
from credo.experiments.train import train
from credo.experiments.watchers import Watcher
from tests.experiments.small import VOGN, last_state, log_without_times


class Sending(Watcher):
    """Sends the process a signal at a step or after an epoch's line."""

    def __init__(self, number: int, step: int) -> None:
        self._number, self._step = number, step

    def stepped(self, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("step", [1, 4, 6, 12])
def test_sigterm_finishes_the_step_saves_and_ends_with_143(tmp_path: Path, step: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    train(VOGN, 0, tmp_path / "whole")
    with pytest.raises(Terminated) as caught:
        train(VOGN, 0, tmp_path / "cut", watcher=Sending(signal.SIGTERM, step))
    assert caught.value.code == EXIT_CODE_TERMINATED == 143
    assert last_state(tmp_path / "cut")["step"] == step
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "cut" / "lock").exists()
    train(VOGN, 0, tmp_path / "cut", resume=True)
    assert equal(last_state(tmp_path / "whole"), last_state(tmp_path / "cut"))
    assert log_without_times(tmp_path / "whole") == log_without_times(tmp_path / "cut")


def test_sigterm_at_the_very_end_is_heard_and_the_run_is_finished(tmp_path: Path) -> None:
    class AfterTheLastEpoch(Sending):
        def epoch_ended(self, row: Mapping[str, Any]) -> None:
            if row["epoch"] == VOGN.epochs:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        train(VOGN, 0, tmp_path, watcher=AfterTheLastEpoch(signal.SIGTERM, step=-1))
    assert load_result(tmp_path).metrics["epochs"] == VOGN.epochs


def test_ctrl_c_saves_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(VOGN, 0, tmp_path, watcher=Sending(signal.SIGINT, 5))
    assert last_state(tmp_path)["step"] == 5


def test_signals_during_the_evaluation_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import credo.experiments.tasks as evaluation

    train(VOGN, 0, tmp_path / "whole")
    real, calls = evaluation.Batches, []

    def batches(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "Batches", batches)
        with pytest.raises(Terminated):
            train(VOGN, 0, tmp_path / "cut")
    assert (last_state(tmp_path / "cut")["epoch"], last_state(tmp_path / "cut")["step"]) == (1, 8)
    train(VOGN, 0, tmp_path / "cut")
    assert equal(last_state(tmp_path / "whole"), last_state(tmp_path / "cut"))


def test_training_in_another_thread(tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=(VOGN, 0, tmp_path))
    thread.start()
    thread.join()
    assert load_result(tmp_path).metrics["epochs"] == 3
