"""MNIST, Fashion-MNIST and notMNIST: four idx files, gzipped or not. The training half may be missing where it may.

An idx file has two zero bytes, a type, the number of dimensions, their sizes, the values.
"""

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.data.examples import Examples, Normalise, Splits
from credo.data.official import CONTENTS
from credo.data.verify import Entry, Folder, check_content, damaged, unpacked

UNSIGNED_BYTE = 0x08


def parse_idx(data: bytes, source: str, dimensions: int) -> Tensor:
    """The unsigned bytes of an idx file (unpacked) with that many dimensions."""
    check_content(data, source)
    magic = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if data[:4] != magic:
        raise damaged(source, f"wrong magic number {data[:4].hex()}, expected {magic.hex()}", data)
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise damaged(source, f"truncated inside its header: {len(data)} of {header} bytes", data)
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected = header + math.prod(shape)
    if len(data) != expected:
        state = "truncated" if len(data) < expected else "too long"
        raise damaged(source, f"{state}: shape {shape} needs {expected} bytes, it holds {len(data)}", data)
    if expected == header:
        raise damaged(source, f"it holds no values: shape {shape}", data)
    values = torch.frombuffer(bytearray(memoryview(data)[header:]), dtype=torch.uint8)
    return values.view(shape)


def parse_images(data: bytes, source: str) -> Tensor:
    """(n, 1, height, width), uint8."""
    return parse_idx(data, source, 3).unsqueeze(1)


def parse_labels(data: bytes, source: str, classes: int) -> Tensor:
    """(n,), int64, each in 0..classes − 1."""
    labels = parse_idx(data, source, 1)
    if int(labels.max()) >= classes:
        raise damaged(source, f"label {int(labels.max())} is outside 0..{classes - 1}", data)
    return labels.long()


DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
LETTERS = tuple("ABCDEFGHIJ")


@dataclass(frozen=True)
class IdxSet:
    """Reads the halves `train` and `t10k`; `counts` are the official numbers of images, where there are such."""

    name: str
    classes: tuple[str, ...]
    normalise: Normalise
    counts: tuple[int, int] | None = None
    train_optional: bool = False

    def __call__(self, folder: Folder) -> Splits:
        test = self._half(folder, "t10k", self.counts[1] if self.counts else None)
        if self.train_optional and not any(folder.has(name) for name in _names("train-images-idx3-ubyte")):
            train = test.subset([])
        else:
            train = self._half(folder, "train", self.counts[0] if self.counts else None)
        return Splits(self.name, train, test, self.classes, self.normalise)

    def _half(self, folder: Folder, half: str, count: int | None) -> Examples:
        stems = f"{half}-images-idx3-ubyte", f"{half}-labels-idx1-ubyte"
        names = [next((n for n in _names(stem) if folder.has(n)), f"{stem}.gz") for stem in stems]
        raw = folder.read_all(names)
        data = [unpacked(packed, folder.where(name)) for packed, name in zip(raw, names, strict=True)]
        images = parse_images(data[0], folder.where(names[0]))
        labels = parse_labels(data[1], folder.where(names[1]), len(self.classes))
        if images.shape[-2:] != (28, 28) or count not in {None, len(images)}:
            shape = f"({count or 'n'}, 28, 28)"
            raise damaged(
                folder.where(names[0]), f"shape {tuple(images[:, 0].shape)} instead of {shape}", data[0]
            )
        if len(labels) != len(images):
            raise damaged(folder.where(names[1]), f"{len(labels)} labels for {len(images)} images", data[1])
        for name, stem, content in zip(names, stems, data, strict=True):
            if official := CONTENTS.get(self.name, {}).get(stem):
                folder.expect(name, Entry.of(content), official)
        return Examples(images, labels)


def _names(stem: str) -> tuple[str, str]:
    return stem, f"{stem}.gz"


read_mnist = IdxSet("mnist", DIGITS, Normalise((0.1307,), (0.3081,)), (60_000, 10_000))
read_fashion_mnist = IdxSet("fashion_mnist", CLOTHES, Normalise((0.2860,), (0.3530,)), (60_000, 10_000))
read_notmnist = IdxSet("notmnist", LETTERS, Normalise((0.4266,), (0.4589,)), train_optional=True)
