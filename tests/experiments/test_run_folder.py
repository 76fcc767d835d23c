"""Folders that cannot be written are found before training (row 59), and two runs never share one (row 60)."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from credo.errors import IntegrityError, InvalidValue, LockedError
from credo.experiments.checkpoint import Checkpointing, equal
from credo.experiments.lock import locked
from credo.experiments.results import load_result, load_results
from credo.experiments.train import train
from credo.posterior import files
from tests.experiments.small import VOGN, last_state
from tests.experiments.test_resume import Crash, CrashingAt


@pytest.mark.parametrize(
    "name", ["with spaces", "ünïcode-日本語", "/".join(["x" * 50] * 8), "-dash", "new\nline"]
)
def test_row_59_unusual_paths_work(tmp_path: Path, name: str) -> None:
    result = train(VOGN, 0, tmp_path / name)
    assert load_result(tmp_path / name).metrics["nll"] == result.metrics["nll"]


def test_row_59_a_name_too_long_for_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long") as caught:
        train(VOGN, 0, tmp_path / ("x" * 300))
    assert "xxx" in str(caught.value)


@pytest.mark.parametrize("below", [".", "run"])
def test_row_59_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="file"):
        train(VOGN, 0, tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_row_59_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """root may write everywhere, so the system's answer is played."""

    def refuse(path: Any, *_: object) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        train(VOGN, 0, tmp_path, watcher=CrashingAt(1))
    assert caught.value.errno == number
    assert not (tmp_path / "lock").exists()


def test_row_59_a_disk_that_fills_up_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Crash):
        train(VOGN, 0, tmp_path, watcher=CrashingAt(5), checkpointing=Checkpointing(steps=1))
    before, real = last_state(tmp_path), files._write_durably

    def full(path: Path, data: bytes) -> None:
        real(path, data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_durably", full)
        with pytest.raises(OSError, match="No space left") as caught:
            train(VOGN, 0, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert equal(last_state(tmp_path), before)
    assert list(tmp_path.rglob("*.tmp")) == []
    assert train(VOGN, 0, tmp_path).metrics["epochs"] == 3


def test_row_60_two_runs_on_one_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
        train(VOGN, 0, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_row_60_a_finished_run_can_be_read_while_somebody_holds_the_lock(tmp_path: Path) -> None:
    train(VOGN, 0, tmp_path)
    with locked(tmp_path / "lock"):
        assert train(VOGN, 0, tmp_path).metrics["epochs"] == 3


@pytest.mark.parametrize("name", ["config.json", "result.json", "log.jsonl"])
def test_damaged_text_files_are_named(tmp_path: Path, name: str) -> None:
    train(VOGN, 0, tmp_path)
    (tmp_path / name).write_text('{"cut off": ')
    with pytest.raises(IntegrityError, match=name):
        load_result(tmp_path)


@pytest.mark.parametrize("name", ["predictions", "model"])
def test_a_flipped_bit_in_the_arrays_is_noticed(tmp_path: Path, name: str) -> None:
    result = train(VOGN, 0, tmp_path)
    path = tmp_path / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="SHA-256 should be"):
        result.predictions() if name == "predictions" else result.weights()


def test_a_flipped_bit_in_the_result_is_noticed(tmp_path: Path) -> None:
    train(VOGN, 0, tmp_path)
    path = tmp_path / "result.json"
    metrics = json.loads(path.read_text())["metrics"]
    path.write_text(path.read_text().replace(str(metrics["nll"]), str(metrics["nll"] / 2)))
    with pytest.raises(IntegrityError, match=r"result\.json is damaged: its SHA-256"):
        load_result(tmp_path)


def test_runs_under_way_are_no_results(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(VOGN, 0, tmp_path / "a", watcher=CrashingAt(5))
    train(VOGN, 1, tmp_path / "b")
    assert [result.seed for result in load_results(tmp_path)] == [1]
    with pytest.raises(InvalidValue, match="no finished run"):
        load_result(tmp_path / "a")


def test_another_version_is_warned_of(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(VOGN, 0, tmp_path, watcher=CrashingAt(5))
    config = json.loads((tmp_path / "config.json").read_text())
    config["versions"]["torch"] = "1.0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="last bits"):
        train(VOGN, 0, tmp_path)


@pytest.mark.parametrize("bad", [{"keep": 1}, {"steps": 0}])
def test_checkpoint_policies_that_could_lose_work(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="at least"):
        Checkpointing(**bad)
