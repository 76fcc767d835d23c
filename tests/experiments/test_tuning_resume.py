"""A search that is killed with SIGKILL, stopped or given more trials ends with the trials of an undisturbed one."""

import sqlite3
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from credo.errors import IntegrityError, InvalidValue, LockedError
from credo.experiments.lock import locked
from credo.experiments.tuning import outcome
from credo.experiments.tuning import study as studies
from credo.experiments.tuning.study import Budget
from tests.experiments.small import blobs
from tests.experiments.tuned import KILLS, VALIDATION, Signalling, quick, search, signalling, trials_of

optuna = pytest.importorskip("optuna")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all else here, and has its own tests."""
    monkeypatch.setattr(outcome, "page", lambda *_: "")


def stored(folder: Path) -> list[str]:
    """States of all trials in the storage, those that were interrupted too."""
    found = optuna.load_study(study_name="credo", storage=studies.storage_at(folder / "study.db"))
    return [trial.state.name for trial in found.trials]


def test_killed_again_and_again_it_ends_with_the_same_trials(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.experiments.tuned", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert child.stdout.split() == ["killed", str(len(KILLS))]
    left = stored(tmp_path / "war" / "vogn")
    assert left.count("RUNNING") <= 1  # of the last kill, unless it came between two trials
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the children
    try:
        with pytest.warns(UserWarning, match="stale"):
            after = search(tmp_path / "war")
        assert trials_of(after) == trials_of(search(tmp_path / "peace"))
    finally:
        torch.set_num_threads(before)
    states = stored(tmp_path / "war" / "vogn")
    assert "RUNNING" not in states
    assert states.count("FAIL") >= 1  # the interrupted ones are on record, and do not count
    assert len(after.trials) == len(after.study.trials) == 10


def test_trials_that_fall_behind_are_dropped(tmp_path: Path) -> None:
    """By the median rule, written out: the best so far is worse than the median of the complete trials there."""
    trials = quick(tmp_path, method="adam", settings={"lr": 1e-2}, trials=9, epochs=8).study.trials
    dropped = [t for t in trials if t.state.name == "PRUNED"]
    assert dropped
    for trial in trials:
        before = [t for t in trials[: trial.number] if t.state.name == "COMPLETE"]
        for epoch in trial.intermediate_values:
            best = min(value for at, value in trial.intermediate_values.items() if at <= epoch)
            behind = len(before) >= 4 and epoch >= 2
            behind = behind and best > median(t.intermediate_values[epoch] for t in before)
            assert behind == (trial in dropped and epoch == trial.last_step)


def test_more_trials_go_on_where_it_was(tmp_path: Path) -> None:
    whole = quick(tmp_path / "whole", trials=4)
    parts = [quick(tmp_path / "parts", trials=trials) for trials in (2, 4)]
    assert trials_of(parts[0]) == trials_of(whole)[:2]
    assert trials_of(parts[1]) == trials_of(whole)


def test_a_finished_search_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quick(tmp_path, trials=2)
    monkeypatch.setattr(studies, "run_trial", None)
    assert trials_of(quick(tmp_path, trials=2)) == trials_of(first)
    assert trials_of(quick(tmp_path, trials=1)) == trials_of(first)  # a smaller budget loses nothing


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a mistake in the model")])
def test_what_interrupts_a_trial_passes_and_the_trial_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    quick(tmp_path, trials=1)
    with monkeypatch.context() as patch:
        patch.setattr(studies, "run_trial", raising(error))
        with pytest.raises(type(error) if isinstance(error, Exception) else KeyboardInterrupt):
            quick(tmp_path, trials=2)
    assert stored(tmp_path / "vogn") == ["COMPLETE", "FAIL"]
    assert trials_of(quick(tmp_path, trials=2)) == trials_of(quick(tmp_path / "undisturbed", trials=2))


def raising(error: BaseException):
    def trial(*_: object) -> None:
        raise error

    return trial


def test_another_study_in_the_folder_is_refused_and_kept(tmp_path: Path) -> None:
    first = quick(tmp_path, trials=1)
    others = [
        {"seed": 1},
        {"epochs": 4},
        {"settings": {"momentum": 0.8}},
        {"data": blobs(90, 2)},
        {"validation": blobs(60, 3)},
        {"search": ["lr"]},
        {"model": lambda: nn.Linear(2, 3)},
    ]
    for change in others:
        with pytest.raises(InvalidValue, match=f"another study: {'data' if 'validation' in change else ''}"):
            quick(tmp_path, trials=1, **change)
    assert trials_of(quick(tmp_path, trials=1)) == trials_of(first)


def test_the_name_of_the_function_that_makes_the_model_does_not_matter(tmp_path: Path) -> None:
    first = quick(tmp_path, trials=1)
    assert trials_of(quick(tmp_path, trials=1, model=lambda: WithAddress())) == trials_of(first)


class WithAddress(Signalling):
    def __repr__(self) -> str:
        return object.__repr__(self)


WithAddress.__name__ = Signalling.__name__


def test_a_study_of_somebody_else_is_refused_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "vogn"
    folder.mkdir()
    optuna.create_study(study_name="mine", storage=studies.storage_at(folder / "study.db"))
    with pytest.raises(InvalidValue, match=r"credo did not make \(mine\)"):
        quick(tmp_path)
    assert optuna.get_all_study_names(studies.storage_at(folder / "study.db")) == ["mine"]


@pytest.mark.parametrize("content", [b"no database at all, but longer than a header" * 30, b"\x00" * 5000])
def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "vogn"
    folder.mkdir()
    (folder / "study.db").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"study\.db is damaged or no SQLite database"):
        quick(tmp_path)
    assert (folder / "study.db").read_bytes() == content


def test_a_cut_database_is_refused(tmp_path: Path) -> None:
    quick(tmp_path, trials=1)
    path = tmp_path / "vogn" / "study.db"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(IntegrityError, match=r"study\.db is damaged"):
        quick(tmp_path, trials=1)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vogn").mkdir()
    with locked(tmp_path / "vogn" / "lock"), pytest.raises(LockedError, match="being written by process"):
        quick(tmp_path)


def test_a_folder_of_any_name_will_do(tmp_path: Path) -> None:
    folder = tmp_path / "with spaces, ümlaut, 100 % ? # & ;"
    found = quick(folder, trials=1)
    assert (folder / "vogn" / "study.db").exists()
    assert trials_of(quick(folder, trials=1)) == trials_of(found)


def test_the_storage_is_plain_sqlite(tmp_path: Path) -> None:
    quick(tmp_path, trials=2)
    with sqlite3.connect(tmp_path / "vogn" / "study.db") as connection:
        assert connection.execute("SELECT COUNT(*) FROM trials").fetchone() == (2,)
    connection.close()


def test_the_global_generator_is_as_before(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    quick(tmp_path, trials=1)
    assert torch.equal(torch.get_rng_state(), before)


def finished(*minutes: float) -> list[SimpleNamespace]:
    from datetime import timedelta

    return [SimpleNamespace(duration=timedelta(minutes=m)) for m in minutes]


@pytest.mark.parametrize(
    ("budget", "done", "left"),
    [
        (Budget(trials=2), (5.0,), True),
        (Budget(trials=2), (5.0, 5.0), False),
        (Budget(minutes=10), (5.0, 4.9), True),
        (Budget(minutes=10), (5.0, 5.0), False),
        (Budget(trials=3, minutes=10), (1.0, 1.0, 1.0), False),
        (Budget(trials=3, minutes=10), (11.0,), False),
        (Budget(trials=3, minutes=10), (), True),
    ],
)
def test_a_budget_counts_trials_and_their_minutes(
    budget: Budget, done: tuple[float, ...], left: bool
) -> None:
    assert budget.left(finished(*done)) is left  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trials": 0}, "trials must"),
        ({"trials": -3}, "trials must"),
        ({"trials": None, "minutes": 0.0}, "minutes must lie in"),
        ({"minutes": float("nan")}, "minutes must lie in"),
    ],
)
def test_a_budget_of_nothing_is_refused(tmp_path: Path, given: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        quick(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_minutes_end_a_search(tmp_path: Path) -> None:
    found = quick(tmp_path, trials=None, minutes=1e-6, validation=VALIDATION, model=signalling)
    assert len(found.trials) == 1  # the trial under way is finished
