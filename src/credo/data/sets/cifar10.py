"""CIFAR-10: the binary version (records of 1 + 3072 bytes), else the python version, of which nothing is executed."""

import numpy as np
import torch
from torch import Tensor

from credo.data.augmentation import PadCropFlip
from credo.data.examples import Examples, Normalise, Splits
from credo.data.official import CONTENTS
from credo.data.sets.pickles import parse_pickle
from credo.data.verify import Folder, check_content, damaged
from credo.errors import IntegrityError

NUMBER_OF_CLASSES = 10
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS


def parse_binary(data: bytes, source: str) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) int64."""
    check_content(data, source)
    count, rest = divmod(len(data), RECORD)
    if rest:
        nearest = RECORD * (count + 1)
        why = (
            f"truncated or too long: {RECORD} bytes a record, {nearest} would be whole, {rest} are left over"
        )
        raise damaged(source, why, data)
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, RECORD)
    labels = records[:, 0].long()
    _check_labels(labels, source, data)
    return records[:, 1:].reshape(count, *SHAPE), labels


def parse_python(data: bytes, source: str) -> tuple[Tensor, Tensor]:
    """The same from a pickled batch, of which nothing is executed."""
    check_content(data, source)
    batch = parse_pickle(data, source)
    if not isinstance(batch, dict):
        raise damaged(source, f"a batch is a dict, this is a {type(batch).__name__}", data)
    fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    pixels, labels = fields.get("data"), fields.get("labels")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
        raise damaged(source, f"'data' must be a uint8 array of shape (n, {PIXELS})", data)
    if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(k) is int for k in labels):
        raise damaged(source, f"'labels' must be a list of {len(pixels)} integers", data)
    if not labels or not all(0 <= k < NUMBER_OF_CLASSES for k in labels):
        raise damaged(source, f"labels must lie in 0..{NUMBER_OF_CLASSES - 1}, and there must be some", data)
    return torch.from_numpy(pixels.reshape(-1, *SHAPE).copy()), torch.tensor(labels)


def parse_classes(data: bytes, source: str) -> tuple[str, ...]:
    """batches.meta.txt: ten names, one a line."""
    check_content(data, source)
    try:
        names = tuple(data.decode("ascii").split())
    except UnicodeDecodeError as error:
        raise damaged(source, "the names of the classes must be ASCII text", data) from error
    if len(names) != NUMBER_OF_CLASSES or len(set(names)) != NUMBER_OF_CLASSES:
        raise damaged(
            source, f"{NUMBER_OF_CLASSES} different names of classes expected, {len(set(names))} found", data
        )
    return names


def _check_labels(labels: Tensor, source: str, data: bytes) -> None:
    if int(labels.max()) >= NUMBER_OF_CLASSES:
        raise damaged(source, f"label {int(labels.max())} is outside 0..{NUMBER_OF_CLASSES - 1}", data)


TRAIN = tuple(f"data_batch_{k}" for k in range(1, 6))
TEST = "test_batch"
CLASSES: tuple[str, ...] = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
PER_FILE = 10_000
NORMALISE = Normalise((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def read_cifar10(folder: Folder) -> Splits:
    binary = folder.has(f"{TRAIN[0]}.bin") or not folder.has(TRAIN[0])
    names = [f"{name}.bin" if binary else name for name in (*TRAIN, TEST)]
    batches = []
    for name, data in zip(names, folder.read_all(names), strict=True):
        if binary:
            folder.expect(name, folder.seen[name], CONTENTS["cifar10"][name])
        images, labels = (parse_binary if binary else parse_python)(data, folder.where(name))
        if len(labels) != PER_FILE:
            raise IntegrityError(f"{folder.where(name)}: {len(labels)} images instead of {PER_FILE}")
        batches.append((images, labels))
    classes = CLASSES
    if binary and folder.has("batches.meta.txt"):
        classes = parse_classes(folder.read("batches.meta.txt"), folder.where("batches.meta.txt"))
    return Splits(
        "cifar10", _joined(batches[:-1]), _joined(batches[-1:]), classes, NORMALISE, PadCropFlip(pad=4)
    )


def _joined(batches: list[tuple[Tensor, Tensor]]) -> Examples:
    images, labels = zip(*batches, strict=True)
    return Examples(torch.cat(images), torch.cat(labels))
