"""`credo predict`: a saved run on new inputs, as a CSV.

Inputs are folders of images, .npy and .safetensors files; nothing in them is ever executed.
"""

import csv
import io
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from credo.cli.exits import OK
from credo.data.examples import Normalise
from credo.errors import IntegrityError, InvalidValue
from credo.experiments.results import Result, load_result
from credo.posterior.files import write_atomically
from credo.predict import Prediction
from credo.predict import predict as predicted
from credo.validate import whole

COLUMNS = ("input", "class", "probability", "entropy", "mutual_information")


@dataclass(frozen=True)
class Inputs:
    names: list[str]  # one an example, for the CSV's first column
    values: Tensor  # examples first


def predict(run: Path, inputs: Path, out: Path, samples: int | None, seed: int, batch_size: int) -> int:
    result = _finished(run)
    stored = result.facts["inputs"]
    given = read_inputs(inputs, tuple(stored["shape"]))
    model, normalise = result.model(), result.normalise()
    values, note = in_range(given.values, normalise)
    batches = (normalise(part) for part in torch.split(values, whole("--batch-size", batch_size, at_least=1)))
    count = result.training["samples"] if samples is None else whole("--samples", samples, at_least=1)
    prediction = predicted(model, result.belief(model), batches, samples=count, seed=seed)
    text = as_csv(given, prediction, stored["classes"])
    if note:
        print(f"{inputs} was read as {note}", file=sys.stderr)
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        write_atomically(out, text.encode())
        print(f"{len(given.names):,} inputs → {out}", file=sys.stderr)
    return OK


def as_csv(inputs: Inputs, prediction: Prediction, classes: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_lines(inputs, prediction, classes))
    return text.getvalue()


def _lines(inputs: Inputs, prediction: Prediction, classes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    best, at = prediction.probs.max(-1)
    numbers = zip(
        best.tolist(), prediction.entropy.tolist(), prediction.mutual_information.tolist(), strict=True
    )
    for name, k, values in zip(inputs.names, at.tolist(), numbers, strict=True):
        yield name, str(classes[k]) if classes else str(k), *(f"{value:.6g}" for value in values)


def _finished(run: Path) -> Result:
    if not run.exists():
        raise FileNotFoundError(f"there is no run folder {run}")
    result = load_result(run)
    if result.is_stream:
        raise InvalidValue(f"{run} is a stream of tasks, of which there are scores alone")
    if result.training["task"] != "classification":
        raise InvalidValue(
            f"{run} is a regression; the command line predicts classes, credo.predict in Python both"
        )
    return result


IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
ARRAYS = (".npy", ".safetensors")


def read_inputs(path: Path, shape: tuple[int, ...]) -> Inputs:
    """The examples at `path`, each of the model's input shape; images of another size are scaled to it."""
    inputs = _images(path, shape) if path.is_dir() else _array(path)
    if not len(inputs.values):
        raise InvalidValue(f"{path} holds no example")
    if tuple(inputs.values.shape[1:]) != shape:
        raise InvalidValue(
            f"{path} holds examples of shape {tuple(inputs.values.shape[1:])}, and the model was trained on {shape}"
        )
    finite = inputs.values.flatten(1).isfinite().all(1)
    if not bool(finite.all()):
        raise InvalidValue(
            f"{path} holds numbers that are not finite, first in example {int((~finite).nonzero()[0])} "
            "(counted from 0): leave those examples out"
        )
    return inputs


def in_range(values: Tensor, normalise: Normalise) -> tuple[Tensor, str]:
    """What `normalise` makes the network's inputs of, and in words what was done to get there; empty if nothing.

    Pixels count to 255 in most files, and to `normalise.white` in the data that the network knows. Floats are as the
    network reads them, unless their range says that they are pixels.
    """
    if not normalise.mean or not values.numel():
        return values, ""
    low, high, white = float(values.min()), float(values.max()), normalise.white
    if values.dtype != torch.uint8:
        whole = bool((values == values.round()).all())
        if low < 0 or not math.isfinite(high):
            return values, ""
        if high <= 1:
            return _read(values, normalise), "pixels from 0 to 1"
        if not whole or high > 255:
            raise InvalidValue(
                f"inputs range from {low:g} to {high:g}: neither pixels (uint8, or floats from 0 to 1) nor what the"
                " network reads, which has values below 0; save the pixels as uint8, 0 to 255"
            )
        values = values.to(torch.uint8)
    if high <= white:
        return values, f"pixels from 0 to {white}" if white != 255 else ""
    return (values.float() * (white / 255)).round().to(
        torch.uint8
    ), f"pixels from 0 to 255, scaled to 0 … {white}"


def _read(shares: Tensor, normalise: Normalise) -> Tensor:
    """(x − mean)/std of pixels from 0 to 1."""
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (normalise.mean, normalise.std))
    return (shares - mean) / std


def _array(path: Path) -> Inputs:
    data = path.stat().st_size  # a missing file is the FileNotFoundError it always is
    if path.suffix not in ARRAYS:
        raise InvalidValue(f"inputs must be a folder of images or a file *{' or *'.join(ARRAYS)}, got {path}")
    if not data:
        raise IntegrityError(f"{path} is empty")
    values = _npy(path) if path.suffix == ".npy" else _safetensors(path)
    if values.ndim < 2:
        raise InvalidValue(
            f"{path} has shape {tuple(values.shape)}; it needs examples first, then their values"
        )
    values = values if values.dtype == torch.uint8 else values.float()
    return Inputs([str(i) for i in range(len(values))], values)


def _npy(path: Path) -> Tensor:
    try:
        if path.read_bytes()[:6] != b"\x93NUMPY":
            raise ValueError("it does not begin as one")
        array = numpy.load(path, allow_pickle=False)
        if not isinstance(array, numpy.ndarray) or array.dtype.kind not in "fiub":
            raise ValueError("not an array of numbers")
        native = array.astype(array.dtype.newbyteorder("="))
        return torch.from_numpy(native if native.dtype == numpy.uint8 else native.astype(numpy.float32))
    except (ValueError, EOFError, SyntaxError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged or no .npy file of numbers: {error}") from error


def _safetensors(path: Path) -> Tensor:
    try:
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, ValueError) as error:
        raise IntegrityError(f"{path} is damaged or no .safetensors file: {error}") from error
    if len(tensors) != 1:
        raise InvalidValue(
            f"{path} holds {len(tensors)} tensors ({', '.join(tensors)[:80]}); keep one, the inputs"
        )
    (values,) = tensors.values()
    if values.is_complex():
        raise InvalidValue(f"{path} holds complex numbers")
    return values


def _images(folder: Path, shape: tuple[int, ...]) -> Inputs:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InvalidValue(
            f"the model was trained on inputs of shape {shape}, which are no images; give a .npy file"
        )
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES and path.is_file())
    if not paths:
        raise InvalidValue(f"{folder} holds no image ({', '.join(sorted(IMAGES))})")
    return Inputs(
        [path.relative_to(folder).as_posix() for path in paths],
        torch.stack([_image(path, shape) for path in paths]),
    )


def _image(path: Path, shape: tuple[int, ...]) -> Tensor:
    from PIL import Image, UnidentifiedImageError  # named by the error if it is missing

    channels, height, width = shape
    try:
        with Image.open(path) as image:
            scaled = image.convert("RGB" if channels == 3 else "L").resize(
                (width, height), Image.Resampling.BILINEAR
            )
    except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise IntegrityError(f"{path} is damaged or no image: {error}") from error
    except OSError as error:  # a truncated image, says pillow; a missing permission keeps its own class
        raise error if error.errno else IntegrityError(f"{path} is damaged: {error}") from error
    return torch.from_numpy(numpy.array(scaled)).reshape(height, width, channels).permute(2, 0, 1)
