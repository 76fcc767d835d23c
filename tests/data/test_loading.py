"""`load`, `names` and `check` on small folders in the official layouts."""

import gzip
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import credo.data as data
from credo.data.sets import cifar10
from credo.errors import CredoError, IntegrityError, InvalidType, InvalidValue
from tests.data import writers

MAKERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "notmnist": (writers.notmnist_folder, "notMNIST/raw"),
    "svhn": (writers.svhn_folder, "SVHN"),
    "scenes_crop": (writers.scenes_folder, "scenes_crop"),
    "uci:yacht": (writers.uci_folder, "uci/yacht"),
}


def data_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "credo-manifest.json")


def test_notmnist_without_its_training_half(tmp_path: Path) -> None:
    x, y = writers.notmnist_folder(tmp_path)
    splits = data.load("notmnist", tmp_path)
    assert torch.equal(splits.test.inputs, x)
    assert torch.equal(splits.test.targets, y)
    assert len(splits.train) == 0
    assert splits.train.inputs.shape[1:] == (1, 28, 28)
    assert splits.classes == tuple("ABCDEFGHIJ")


def test_svhn_and_scenes(tmp_path: Path) -> None:
    x, y = writers.svhn_folder(tmp_path)
    assert torch.equal(data.load("svhn", str(tmp_path)).test.inputs, x)
    assert torch.equal(data.load("svhn", tmp_path).test.targets, y)
    scenes = writers.scenes_folder(tmp_path)
    assert torch.equal(data.load("scenes_crop", tmp_path).test.inputs, scenes)


def test_uci_is_standardised_by_its_training_half(tmp_path: Path) -> None:
    table = writers.uci_folder(tmp_path)
    splits = data.load("uci:yacht", tmp_path)
    assert splits.train.inputs.shape == (8, 2)
    assert splits.train.targets.shape == (8, 1)
    torch.testing.assert_close(splits.train.inputs.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(splits.train.inputs.std(0, correction=0), torch.ones(2))
    raw = splits.test.targets.double() * splits.target_std + splits.target_mean
    torch.testing.assert_close(raw, table[8:, 2:], atol=1e-6, rtol=0)


def test_uci_halves_that_overlap(tmp_path: Path) -> None:
    writers.uci_folder(tmp_path)
    (tmp_path / "uci/yacht/index_test_0.txt").write_text("7\n8\n")
    with pytest.raises(IntegrityError, match="1 rows are in both halves"):
        data.load("uci:yacht", tmp_path)


def test_digits_need_no_files() -> None:
    splits = data.load("digits")
    assert len(splits.train) + len(splits.test) == 1797
    assert splits.train.inputs.shape[1:] == (1, 8, 8)
    normal = splits.normalise(splits.train.inputs)
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.std()) - 1) < 0.01
    assert torch.equal(splits.test.inputs, data.load("digits", "nowhere").test.inputs)
    assert data.check("digits").ok


def test_photographs_are_decoded_when_asked_for(tmp_path: Path) -> None:
    written = writers.imagenette_folder(tmp_path)
    splits = data.load("imagenette", tmp_path)
    assert splits.classes == ("n01", "n02")
    assert splits.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    inputs, targets = splits.train.gather(torch.tensor([4, 0]))
    assert torch.equal(inputs[0], written["imagenette/train/n02/1.JPEG"])
    assert torch.equal(inputs[1], written["imagenette/train/n01/0.JPEG"])
    assert targets.tolist() == [1, 0]
    assert splits.augmentation is not None
    assert splits.augmentation.rho == 5
    assert splits.normalise(inputs).shape == (2, 3, 224, 224)
    few = splits.train.subset([5, 1])
    assert torch.equal(few.gather(torch.tensor([0]))[0][0], written["imagenette/train/n02/2.JPEG"])


def test_a_photograph_that_changed_is_found_when_it_is_decoded(tmp_path: Path) -> None:
    writers.imagenette_folder(tmp_path)
    assert data.check("imagenette", tmp_path).ok
    victim = tmp_path / "imagenette/train/n01/0.JPEG"
    writers.write(victim, writers.picture(writers.images(1, 3, 256, seed=99)[0]))
    splits = data.load("imagenette", tmp_path)
    splits.train.gather(torch.tensor([1]))
    with pytest.raises(IntegrityError, match=r"0\.JPEG: .*expected"):
        splits.train.gather(torch.tensor([0]))
    victim.unlink()
    with pytest.raises(IntegrityError, match=r"0\.JPEG: missing"):
        data.load("imagenette", tmp_path)


@pytest.mark.parametrize("name", MAKERS)
def test_every_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    make, folder = MAKERS[name]
    make(tmp_path)
    data.load(name, tmp_path)
    for path in data_files(tmp_path / folder):
        good = path.read_bytes()
        for at in {0, len(good) // 3, len(good) // 2, len(good) - 1}:
            bad = bytearray(good)
            bad[at] ^= 1
            path.write_bytes(bad)
            with pytest.raises(IntegrityError, match=f"{path.name}: changed: expected SHA-256 .*, found "):
                data.load(name, tmp_path)
            report = data.check(name, tmp_path)
            assert not report.ok
            assert [file.name for file in report.files if file.problem] == [path.name]
        path.write_bytes(good)
    assert data.check(name, tmp_path).ok


@pytest.mark.parametrize("name", MAKERS)
def test_cut_longer_empty_and_missing_files(name: str, tmp_path: Path) -> None:
    make, folder = MAKERS[name]
    make(tmp_path)
    report = data.check(name, tmp_path)
    assert report.ok
    assert report.first_time
    path = data_files(tmp_path / folder)[0]
    good = path.read_bytes()
    for bad, word in ((good[:-1], "truncated"), (good + b"x", "too long"), (b"", "truncated")):
        path.write_bytes(bad)
        with pytest.raises(IntegrityError, match=f"{word}: expected {len(good)} bytes, found {len(bad)}"):
            data.load(name, tmp_path)
        assert f"{word}: expected {len(good)}" in str(data.check(name, tmp_path))
    path.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        data.load(name, tmp_path)
    assert "missing" in str(data.check(name, tmp_path))
    shutil.rmtree(tmp_path / folder)
    with pytest.raises(IntegrityError, match="missing: no folder"):
        data.load(name, tmp_path)
    assert not data.check(name, tmp_path).ok


def test_damage_before_the_first_load_leaves_no_manifest(tmp_path: Path) -> None:
    writers.notmnist_folder(tmp_path)
    path = tmp_path / "notMNIST/raw/t10k-images-idx3-ubyte.gz"
    path.write_bytes(b"<html>Service unavailable</html>")
    with pytest.raises(IntegrityError, match="HTML"):
        data.load("notmnist", tmp_path)
    report = data.check("notmnist", tmp_path)
    assert "HTML" in report.problem
    assert not (path.parent / "credo-manifest.json").exists()


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_official_sets_must_be_official(name: str, tmp_path: Path) -> None:
    """Well-formed files of another number of images, or with other pixels, are not MNIST."""
    writers.notmnist_folder(tmp_path)
    folder = tmp_path / {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}[name]
    shutil.copytree(tmp_path / "notMNIST/raw", folder)
    with pytest.raises(IntegrityError, match=r"instead of \(10000, 28, 28\)"):
        data.load(name, tmp_path)
    if name == "mnist":
        blank, none = torch.zeros(10_000, 28, 28), torch.zeros(10_000)
        writers.write(folder / "t10k-images-idx3-ubyte.gz", gzip.compress(writers.idx(blank), 1))
        writers.write(folder / "t10k-labels-idx1-ubyte", writers.idx(none))
        (folder / "t10k-labels-idx1-ubyte.gz").unlink()
        with pytest.raises(IntegrityError, match="changed: expected SHA-256 0fa7898d5"):
            data.load(name, tmp_path)


def test_cifar10_must_be_official(tmp_path: Path) -> None:
    whole = writers.cifar_binary(writers.images(2), writers.labels(2))
    for name in (
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
    ):
        writers.write(tmp_path / f"cifar-10-batches-bin/{name}.bin", whole)
    with pytest.raises(
        IntegrityError, match=r"data_batch_1\.bin: truncated: expected 30730000 bytes, found 6146"
    ):
        data.load("cifar10", tmp_path)


def test_cifar10_python_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "PER_FILE", 3)
    for k in range(6):
        name = f"data_batch_{k + 1}" if k < 5 else "test_batch"
        batch = writers.cifar_python(writers.images(3, seed=k), writers.labels(3))
        writers.write(tmp_path / "cifar-10-batches-py" / name, batch)
    splits = data.load("cifar10", tmp_path)
    assert torch.equal(splits.train.inputs, torch.cat([writers.images(3, seed=k) for k in range(5)]))
    assert torch.equal(splits.test.inputs, writers.images(3, seed=5))
    assert splits.augmentation is not None
    assert splits.augmentation.rho == 10


def test_a_read_only_folder_goes_without_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "manifest")

    monkeypatch.setattr("credo.data.verify.write_manifest", refuse)
    writers.svhn_folder(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert len(data.load("svhn", tmp_path).test) == 5
    assert len(caught) == 1
    assert "later changes of these files go unnoticed" in str(caught[0].message)


def test_a_damaged_manifest_is_not_trusted(tmp_path: Path) -> None:
    writers.svhn_folder(tmp_path)
    data.load("svhn", tmp_path)
    manifest = tmp_path / "SVHN/credo-manifest.json"
    good = manifest.read_text()
    for bad in (
        "",
        "{",
        good.replace("test_32x32.mat", "../../etc/passwd"),
        good.replace('"size": ', '"size": -'),
    ):
        manifest.write_text(bad)
        with pytest.raises(IntegrityError):
            data.load("svhn", tmp_path)
        assert not data.check("svhn", tmp_path).ok


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cifar", "'cifar10'"),
        ("CIFAR10", "'cifar10'"),
        ("fashion", "fashion_mnist"),
        ("uci:yaht", "'uci:yacht'"),
    ],
)
def test_unknown_names_suggest_the_nearest(name: str, hint: str, tmp_path: Path) -> None:
    for call in (data.load, data.check, data.fetch):
        with pytest.raises(InvalidValue, match="did you mean") as caught:
            call(name, tmp_path)
        assert hint in str(caught.value).partition("?")[0]
        assert "svhn" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../cifar10", "/etc/passwd", "uci:../yacht", "a\\b", "uci:yacht/..", "..", "x\0y"]
)
def test_names_with_path_parts_are_refused(name: str, tmp_path: Path) -> None:
    for call in (data.load, data.check, data.fetch):
        with pytest.raises(InvalidValue, match="path parts"):
            call(name, tmp_path)


@pytest.mark.parametrize("name", ["", "uci:", "uci:yacht:20", "uci:yacht:-1", "uci:yacht:01", "n" * 300])
def test_other_names_that_are_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="no data set"):
        data.load(name, tmp_path)


def test_names_are_strings_and_all_are_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidType, match="string"):
        data.load(3, tmp_path)  # type: ignore[arg-type]
    for name in set(data.names()) - {"digits"}:
        with pytest.raises(CredoError, match="missing"):
            data.load(name, tmp_path)


def test_paths_with_spaces_and_unicode(tmp_path: Path) -> None:
    root = tmp_path / "my data, übrigens"
    writers.scenes_folder(root)
    assert len(data.load("scenes_crop", root).test) == 4
    assert data.check("scenes_crop", root).ok


def test_the_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers.svhn_folder(tmp_path)
    monkeypatch.setenv("CREDO_DATA", str(tmp_path))
    assert len(data.load("svhn").test) == 5
    monkeypatch.delenv("CREDO_DATA")
    assert data.default_root() == Path.home() / ".cache" / "credo"
