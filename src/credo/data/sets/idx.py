"""MNIST, Fashion-MNIST and notMNIST: four idx files, gzipped or not. The training half may be missing where it may."""

from dataclasses import dataclass

from credo.data.examples import Examples, Splits
from credo.data.folder import Folder
from credo.data.formats.bounds import damaged, unpacked
from credo.data.formats.idx import parse_images, parse_labels
from credo.data.manifest import Entry
from credo.data.normalise import Normalise
from credo.data.official import CONTENTS

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
