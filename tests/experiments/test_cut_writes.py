"""A write cut at any byte, by a full disk or by the end of the process, loses no checkpoint (row 59)."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from credo.experiments.checkpoint import TENSORS, Checkpoints, equal
from credo.posterior import files
from tests.experiments.small import NEW, OLD


class PowerCut(BaseException):
    """The process is gone: nothing after this runs any more."""


class Disk:
    """Takes `room` bytes in all; then it is full, or the power is gone and with it every later call."""

    def __init__(self, room: int, cut: bool) -> None:
        self.room, self.cut, self.dead = room, cut, False

    def open(self, path: Path, mode: str) -> Any:
        disk, file = self, open(path, mode)  # noqa: SIM115
        real = file.write

        class Writer:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: bytes) -> None:
                real(data[: disk.room])
                file.flush()
                if disk.room < len(data):
                    disk.fail()
                disk.room -= len(data)

            flush, fileno = file.flush, file.fileno

        return Writer()

    def fail(self) -> None:
        self.dead = self.cut
        raise PowerCut if self.cut else OSError(errno.ENOSPC, "No space left on device")

    def guard(self, function: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise PowerCut
            return function(*args, **kwargs)

        return guarded


def broken(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    monkeypatch.setattr(files, "open", disk.open, raising=False)
    monkeypatch.setattr(Path, "unlink", disk.guard(Path.unlink))
    monkeypatch.setattr(shutil, "rmtree", disk.guard(shutil.rmtree))
    monkeypatch.setattr(os, "replace", disk.guard(os.replace))


def size_of(checkpoints: Checkpoints) -> int:
    return sum(path.stat().st_size for path in checkpoints.complete()[-1].iterdir())


@pytest.mark.parametrize("cut", [False, True], ids=["disk full", "power cut"])
def test_row_59_a_write_cut_at_any_byte_never_loses_the_last_good_one(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    for room in range(size_of(saved)):
        with monkeypatch.context() as patch:
            broken(patch, Disk(room, cut))
            with pytest.raises(PowerCut if cut else OSError) as caught:
                saved.save(0, 2, NEW)
        assert equal(saved.load_last(), OLD)
        if not cut:
            assert caught.value.errno == errno.ENOSPC
            assert str(saved.folder) in str(caught.value)
            assert [path.name for path in saved.folder.iterdir()] == [saved.complete()[0].name]
    saved.save(0, 2, NEW)  # and what was left behind stands in nobody's way
    assert equal(saved.load_last(), NEW)
    assert sorted(saved.folder.iterdir()) == saved.complete()


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("after", [False, True])
def test_row_59_a_power_cut_around_every_rename(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, call: int, after: bool
) -> None:
    disk, real, calls = Disk(10**9, cut=True), os.replace, []

    def replace(source: Any, target: Any) -> None:
        calls.append(target)
        if after:
            real(source, target)
        if len(calls) == call + 1:
            disk.fail()
        if not after:
            real(source, target)

    with monkeypatch.context() as patch:
        broken(patch, disk)
        patch.setattr(os, "replace", replace)
        with pytest.raises(PowerCut):
            saved.save(0, 2, NEW)
    complete = after and call == 2  # the manifest is there
    assert equal(saved.load_last(), NEW if complete else OLD)


def test_row_59_a_removal_cut_off_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, 1, OLD)
    checkpoints.save(0, 2, OLD)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: (path / TENSORS).unlink(missing_ok=True))
        checkpoints.save(0, 3, NEW)
    assert len(checkpoints.complete()) == 2
    assert equal(checkpoints.load_last(), NEW)
