"""A checkpoint is whole or is not there; what was damaged is noticed; nothing in it is executed (rows 56–58)."""

import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.errors import IntegrityError, InvalidType, VersionError
from credo.experiments import checkpoint as checkpoint_files
from credo.experiments.checkpoint import MANIFEST, NUMBERS, TENSORS, Checkpoints, equal
from tests.experiments.small import NEW, OLD


def file_of(checkpoints: Checkpoints, name: str) -> Path:
    return checkpoints.complete()[-1] / name


@pytest.mark.parametrize(
    "state",
    [
        {"step": 3, "nested": {0: {"momentum": torch.randn(2, 3)}, 1: {}}, "lr": 0.1, "none": None},
        {"betas": (0.9, 0.999), "list": [1, True, "text", [torch.tensor(1)]], "empty": [(), {}]},
        {"nan": math.nan, "inf": -math.inf, "small": 5e-324, "big": 2**70, "bits": torch.tensor([True])},
        {"$tensor": "a dict that looks like a mark", "half": torch.ones(3, dtype=torch.bfloat16)},
        {
            "shared": [torch.ones(2)] * 2,
            "strided": torch.arange(6.0).view(2, 3).t(),
            "none": torch.ones(0, 3),
        },
    ],
)
def test_states_come_back_bit_by_bit(tmp_path: Path, state: Any) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, 0, state)
    back = checkpoints.load_last()
    assert equal(state, back)
    assert list(back) == list(state)


def test_equal_can_fail() -> None:
    assert equal({"x": torch.tensor([math.nan])}, {"x": torch.tensor([math.nan])})
    assert not equal({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])})
    assert not equal({"x": torch.zeros(1)}, {"x": torch.zeros(1, dtype=torch.float64)})
    assert not equal({"x": 1}, {"x": 2})


def test_what_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidType, match=r"state\['a'\]\[1\] is a set"):
        Checkpoints(tmp_path).save(0, 0, {"a": [1, {2}]})


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(5):
        checkpoints.save(step // 3, step, {"n": step})
    assert [path.name[-2:] for path in checkpoints.complete()] == ["03", "04"]
    assert checkpoints.load_last() == {"n": 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == [p.name for p in checkpoints.complete()]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").load_last() is None


@pytest.mark.parametrize("name", [TENSORS, NUMBERS, MANIFEST])
def test_row_56_a_flipped_bit_in_any_byte_is_noticed(saved: Checkpoints, name: str) -> None:
    path = file_of(saved, name)
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        with pytest.raises(IntegrityError) as caught:
            saved.load_last()
        assert str(path.parent) in str(caught.value)
    path.write_bytes(good)
    assert equal(saved.load_last(), OLD)


@pytest.mark.parametrize("name", [TENSORS, NUMBERS, MANIFEST])
@pytest.mark.parametrize("kept", [0, 1, 10, -1])
def test_row_56_truncated_or_empty(saved: Checkpoints, name: str, kept: int) -> None:
    path = file_of(saved, name)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(IntegrityError, match="SHA-256") as caught:
        saved.load_last()
    assert str(path) in str(caught.value)


def test_row_56_both_digests_are_named(saved: Checkpoints) -> None:
    path = file_of(saved, NUMBERS)
    right = checkpoint_files.digest(path.read_bytes())
    path.write_bytes(b"{}")
    with pytest.raises(IntegrityError, match=f"{right}.*{checkpoint_files.digest(b'{}')}"):
        saved.load_last()


def test_row_56_extra_and_missing_files(saved: Checkpoints) -> None:
    file_of(saved, "stranger").write_bytes(b"not listed: never read")
    assert equal(saved.load_last(), OLD)
    file_of(saved, TENSORS).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        saved.load_last()


def test_row_56_falls_back_only_if_asked_and_says_so(saved: Checkpoints) -> None:
    saved.save(0, 2, NEW)
    damaged = file_of(saved, TENSORS)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError):
        saved.load_last()
    with pytest.warns(UserWarning, match="falling back"):
        assert equal(saved.load_last(fall_back=True), OLD)
    saved.save(0, 2, NEW)  # the damaged one does not stand in the way
    assert equal(saved.load_last(), NEW)


def test_row_56_nothing_whole_is_an_error_also_with_fall_back(saved: Checkpoints) -> None:
    file_of(saved, NUMBERS).write_bytes(b"")
    with pytest.warns(UserWarning, match="falling"), pytest.raises(IntegrityError, match="no checkpoint in"):
        saved.load_last(fall_back=True)


def test_row_57_a_newer_format(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "FORMAT_VERSION", 2)
    saved.save(0, 2, NEW)
    monkeypatch.undo()
    with pytest.raises(VersionError, match="format 2"):
        saved.load_last()


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Payload.target),)

    target: Path


@pytest.mark.parametrize("name", [TENSORS, NUMBERS, MANIFEST])
@pytest.mark.parametrize("signed", [False, True])
def test_row_58_a_pickle_is_refused_and_executes_nothing(
    saved: Checkpoints, tmp_path: Path, name: str, signed: bool
) -> None:
    """Also when its manifest is right: an attacker can compute digests."""
    Payload.target = tmp_path / "owned"
    folder = saved.complete()[-1]
    (folder / name).write_bytes(pickle.dumps(Payload()))
    if signed and name != MANIFEST:
        files = {part: (folder / part).read_bytes() for part in (TENSORS, NUMBERS)}
        checkpoint_files.write_manifest(folder, files)
    with pytest.raises(IntegrityError):
        saved.load_last()
    assert not Payload.target.exists()


@pytest.mark.parametrize(
    "text", ['{"$tensor":"nowhere"}', "[", '{"a":1,"b":2}', '{"$items":[[1]]}', "\udcff"]
)
def test_row_58_numbers_that_make_no_state(saved: Checkpoints, text: str) -> None:
    folder = saved.complete()[-1]
    files = {TENSORS: (folder / TENSORS).read_bytes(), NUMBERS: text.encode("utf-8", "surrogateescape")}
    (folder / NUMBERS).write_bytes(files[NUMBERS])
    checkpoint_files.write_manifest(folder, files)
    with pytest.raises(IntegrityError, match="no checkpoint"):
        saved.load_last()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", ".hidden"])
def test_row_58_a_manifest_cannot_point_elsewhere(saved: Checkpoints, name: str) -> None:
    checkpoint_files.write_manifest(saved.complete()[-1], {name: b""})
    with pytest.raises(IntegrityError, match="no plain file name"):
        saved.load_last()


def test_every_file_is_synced_before_it_counts_and_the_manifest_is_last(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace = os.replace

    def noted(source: Any, target: Any) -> None:
        calls.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda _: calls.append("sync"))
    monkeypatch.setattr(os, "replace", noted)
    saved.save(0, 2, NEW)
    synced = [["sync", name, "sync"] for name in (TENSORS, NUMBERS, MANIFEST)]
    assert calls == [call for three in synced for call in three]
