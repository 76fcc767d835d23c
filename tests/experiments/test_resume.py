"""Exact resume (promise 1): a run that was cut anywhere ends, bit by bit, as one that was not."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from credo import load_posterior
from credo.errors import IntegrityError, InvalidValue
from credo.experiments.checkpoint import Checkpointing, Checkpoints, equal
from credo.experiments.learners import SwagApproximation
from credo.experiments.results import Result, load_result
from credo.experiments.stopping import Terminated
from credo.experiments.train import train
from credo.experiments.watchers import Watcher
from tests.experiments.small import TRAININGS, VOGN, last_state, log_without_times, same_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12  # 3 epochs of 4


class Crash(Exception):
    pass


class CrashingAt(Watcher):
    """Raises at one step, or at the end of one epoch."""

    def __init__(self, step: int = -1, epoch: int = -1) -> None:
        self._step, self._epoch = step, epoch

    def stepped(self, step: int) -> None:
        if step == self._step:
            raise Crash

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] == self._epoch:
            raise Crash


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of the method that nothing has cut; it is only read."""

    @cache
    def folder(method: str) -> Path:
        path = tmp_path_factory.mktemp(method)
        train(TRAININGS[method], 3, path)
        return path

    return folder


def assert_same(one: Path, other: Path) -> None:
    assert equal(last_state(one), last_state(other))
    assert log_without_times(one) == log_without_times(other)
    assert same_metrics(load_result(one), load_result(other))
    for tensors in (Result.predictions, Result.weights):
        mine, others = (tensors(load_result(folder)) for folder in (one, other))
        assert equal(dict(sorted(mine.items())), dict(sorted(others.items())))
    mine, others = (load_posterior(folder / "posterior.safetensors") for folder in (one, other))
    assert equal(mine.tensors(), others.tensors())


@pytest.mark.parametrize("method", TRAININGS)
def test_a_crash_after_any_step(whole: Callable[[str], Path], tmp_path: Path, method: str) -> None:
    training = TRAININGS[method]
    for step in range(1, STEPS + 1):
        with pytest.raises(Crash):
            train(
                training,
                3,
                tmp_path / "cut",
                watcher=CrashingAt(step),
                checkpointing=Checkpointing(steps=1 + step % 3),
            )
    train(training, 3, tmp_path / "cut")
    assert_same(whole(method), tmp_path / "cut")


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("steps", [None, 4])
def test_a_crash_between_training_and_saving(
    whole: Callable[[str], Path], tmp_path: Path, epoch: int, steps: int | None
) -> None:
    """With 4 steps the checkpoint lies after an epoch's last batch and before its evaluation."""
    with pytest.raises(Crash):
        train(
            VOGN,
            3,
            tmp_path / "cut",
            watcher=CrashingAt(epoch=epoch),
            checkpointing=Checkpointing(steps=steps),
        )
    train(VOGN, 3, tmp_path / "cut", resume=True)
    assert_same(whole("vogn"), tmp_path / "cut")


def test_a_crash_while_the_result_is_written(
    whole: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import credo.experiments.train as loop

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_result", crash)
        with pytest.raises(Crash):
            train(VOGN, 3, tmp_path / "cut")
    assert not (tmp_path / "cut" / "result.json").exists()
    train(VOGN, 3, tmp_path / "cut")
    assert_same(whole("vogn"), tmp_path / "cut")


def test_killed_ten_times_at_random_moments(tmp_path: Path) -> None:
    """SIGKILL, in real processes; some of the kills fall into the writing of a checkpoint."""
    methods = ("vogn", "mc_dropout")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.experiments.killing",
        str(tmp_path),
        "10",
        *methods,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed 10") == len(methods)
    for method in methods:
        assert_same(tmp_path / method / "peace", tmp_path / method / "war")


def test_the_log_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(VOGN, 0, tmp_path, watcher=CrashingAt(epoch=2), checkpointing=Checkpointing(seconds=None))
    assert len(log_without_times(tmp_path)) == 2
    with pytest.raises(Crash):
        train(VOGN, 0, tmp_path, watcher=CrashingAt(step=1))
    assert log_without_times(tmp_path) == []


def test_row_56_a_damaged_checkpoint_stops_the_run_or_falls_back(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        train(VOGN, 3, tmp_path / "cut", watcher=CrashingAt(7), checkpointing=Checkpointing(steps=1))
    newest = Checkpoints(tmp_path / "cut" / "checkpoint").complete()[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="SHA-256"):
        train(VOGN, 3, tmp_path / "cut")
    with pytest.warns(UserWarning, match="falling back"):
        train(VOGN, 3, tmp_path / "cut", resume="fallback")
    assert_same(whole("vogn"), tmp_path / "cut")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "ogn", "settings": {"lr": 5e-3, "damping": 1e-2}}, "method was 'vogn', now 'ogn'"),
        ({"batch_size": 20}, "batch_size was 16, now 20"),
        ({"train_size": 50}, "train_size was None, now 50"),
        ({"held_out_classes": (2,)}, "held_out_classes"),
        ({"model": lambda: None}, "model was"),
    ],
)
def test_row_57_another_run_is_refused_and_left_alone(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(Crash):
        train(VOGN, 3, tmp_path, watcher=CrashingAt(5))
    before = last_state(tmp_path)
    with pytest.raises((InvalidValue, TypeError), match=named if "model" not in change else None):
        train(replace(VOGN, **change), 3, tmp_path)
    assert equal(last_state(tmp_path), before)


def test_row_57_another_seed_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(VOGN, 3, tmp_path, watcher=CrashingAt(5))
    with pytest.raises(InvalidValue, match="seed was 3, now 4"):
        train(VOGN, 4, tmp_path)


def test_row_57_drift_of_a_hyper_parameter_is_warned_of_and_taken(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(VOGN, 3, tmp_path, watcher=CrashingAt(5), checkpointing=Checkpointing(steps=1))
    changed = replace(VOGN, settings={**VOGN.settings, "damping": 0.5, "mc_samples": 1})
    with pytest.warns(UserWarning, match=r"continues with other settings: settings was .*0.01.*now .*0.5"):
        result = train(changed, 3, tmp_path)
    saved = last_state(tmp_path)["learner"]["optimizer"]
    assert [group["damping"] for group in saved["param_groups"]] == [0.5, 0.5]
    assert saved["credo"]["settings"]["mc_samples"] == 1
    assert result.training["settings"]["damping"] == 0.5
    assert "damping" in (tmp_path / "config.json").read_text()


def test_more_epochs_go_on_from_an_unfinished_run(tmp_path: Path) -> None:
    train(replace(VOGN, epochs=4), 3, tmp_path / "whole")
    with pytest.raises(Crash):
        train(VOGN, 3, tmp_path / "cut", watcher=CrashingAt(11), checkpointing=Checkpointing(steps=1))
    with pytest.warns(UserWarning, match="epochs was 3, now 4"):
        train(replace(VOGN, epochs=4), 3, tmp_path / "cut")
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_row_66_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="no checkpoint"):
        train(VOGN, 0, tmp_path, resume=True)
    assert train(VOGN, 0, tmp_path, resume="auto").metrics["epochs"] == 3


def test_row_66_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = train(VOGN, 0, tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for resume in ("auto", True, "fallback"):
        again = train(VOGN, 0, tmp_path, resume=resume, watcher=CrashingAt(1))
        assert str(again.metrics) == str(first.metrics)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_row_66_a_finished_run_of_other_settings_is_no_answer(tmp_path: Path) -> None:
    train(VOGN, 0, tmp_path)
    with pytest.raises(InvalidValue, match="epochs was 3, now 5"):
        train(replace(VOGN, epochs=5), 0, tmp_path)
    assert train(replace(VOGN, epochs=5), 0, tmp_path, resume=False).metrics["epochs"] == 5


@pytest.mark.parametrize("epoch", [2, 3])
def test_stopped_in_an_evaluation_swag_has_collected_once(
    whole: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """The last epoch too, whose evaluation comes after the mean is in the model."""
    training = TRAININGS["swag"]
    collect, stopped = SwagApproximation.epoch_ended, []

    def stopping(self: SwagApproximation, now: int) -> None:
        collect(self, now)
        if now == epoch and not stopped:
            stopped.append(now)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SwagApproximation, "epoch_ended", stopping)
    with pytest.raises(Terminated):
        train(training, 3, tmp_path / "cut")
    train(training, 3, tmp_path / "cut")
    assert_same(whole("swag"), tmp_path / "cut")
