"""Inputs of `credo predict`: arrays and images are read, everything else is refused and nothing is executed."""

from pathlib import Path
from pickle import dumps

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from credo.cli.predict import read_inputs
from credo.errors import IntegrityError, InvalidValue

SHAPE = (1, 4, 4)
IMAGES = np.arange(32, dtype=np.uint8).reshape(2, 1, 4, 4)


def test_arrays_of_both_kinds(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    save_file({"x": torch.from_numpy(IMAGES)}, tmp_path / "x.safetensors")
    for name in ("x.npy", "x.safetensors"):
        found = read_inputs(tmp_path / name, SHAPE)
        assert found.names == ["0", "1"]
        assert torch.equal(found.values, torch.from_numpy(IMAGES))


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "int16", "bool"])
def test_numbers_of_every_kind_become_floats(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "x.npy", IMAGES.astype(dtype))
    found = read_inputs(tmp_path / "x.npy", SHAPE).values
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), IMAGES.astype(dtype).astype(np.float32))


def test_images_are_scaled_and_named_by_their_place(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "b").mkdir()
    image.new("RGB", (9, 7), (255, 255, 255)).save(tmp_path / "b" / "white.png")
    image.new("L", (4, 4), 0).save(tmp_path / "black.png")
    (tmp_path / "notes.txt").write_text("no image")
    found = read_inputs(tmp_path, SHAPE)
    assert found.names == ["b/white.png", "black.png"]
    assert found.values.shape == (2, 1, 4, 4)
    assert found.values.flatten(1).float().mean(1).tolist() == [255, 0]
    assert read_inputs(tmp_path, (3, 2, 5)).values.shape == (2, 3, 2, 5)


class Payload:
    """Would leave a file behind if it were ever unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_a_pickle_is_not_executed(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "executed"
    (tmp_path / name).write_bytes(dumps(Payload(trace)))
    with pytest.raises(IntegrityError, match=name):
        read_inputs(tmp_path / name, SHAPE)
    objects = np.empty(1, dtype=object)
    objects[0] = Payload(trace)
    np.save(tmp_path / "o.npy", objects, allow_pickle=True)
    with pytest.raises(IntegrityError, match=r"o\.npy"):
        read_inputs(tmp_path / "o.npy", SHAPE)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("x.npy", b"", IntegrityError),
        ("x.npy", b"\x93NUMPY\x01\x00", IntegrityError),
        ("x.npy", b"<html>404</html>", IntegrityError),
        ("x.safetensors", b"\xff" * 20, IntegrityError),
        ("x.csv", b"1,2", InvalidValue),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, error: type[Exception]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=name.replace(".", r"\.")):
        read_inputs(tmp_path / name, SHAPE)


def test_truncated_array_and_damaged_image(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    np.save(tmp_path / "x.npy", IMAGES)
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-3])
    with pytest.raises(IntegrityError):
        read_inputs(tmp_path / "x.npy", SHAPE)
    (tmp_path / "x.png").write_bytes(b"no image")
    with pytest.raises(IntegrityError, match=r"x\.png"):
        read_inputs(tmp_path, SHAPE)


def test_what_does_not_fit_the_model(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    np.save(tmp_path / "none.npy", IMAGES[:0])
    np.save(tmp_path / "flat.npy", np.arange(3.0))
    save_file({"a": torch.ones(1, 2), "b": torch.ones(1, 2)}, tmp_path / "two.safetensors")
    for name, match in (
        ("x.npy", r"\(1, 4, 4\).*\(3, 4, 4\)"),
        ("none.npy", "no example"),
        ("flat.npy", "examples first"),
        ("two.safetensors", "2 tensors"),
    ):
        with pytest.raises(InvalidValue, match=match):
            read_inputs(tmp_path / name, (3, 4, 4))
    with pytest.raises(FileNotFoundError):
        read_inputs(tmp_path / "absent.npy", SHAPE)
    with pytest.raises(InvalidValue, match="no image"):
        read_inputs(tmp_path, SHAPE)
    with pytest.raises(InvalidValue, match="no images"):
        read_inputs(tmp_path, (64,))
