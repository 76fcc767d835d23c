"""CIFAR-10: the binary version where it is there, else the python version, of which nothing is executed."""

import torch
from torch import Tensor

from credo.data.augmentation import PadCropFlip
from credo.data.examples import Examples, Splits
from credo.data.folder import Folder
from credo.data.formats.cifar import parse_binary, parse_classes, parse_python
from credo.data.normalise import Normalise
from credo.data.official import CONTENTS
from credo.errors import IntegrityError

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
