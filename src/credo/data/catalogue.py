"""Every data set by its name: where it lies, who reads it, where it comes from."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from credo.data import official
from credo.data.download import Remote
from credo.data.examples import Splits
from credo.data.sets.cifar10 import read_cifar10
from credo.data.sets.images import PhotographSet, UnfamiliarSet
from credo.data.sets.mnist import read_fashion_mnist, read_mnist, read_notmnist
from credo.data.sets.svhn import read_svhn
from credo.data.sets.uci import NAMES as UCI_NAMES
from credo.data.sets.uci import UciSet
from credo.data.verify import Folder
from credo.errors import InvalidType, InvalidValue

SPLITS = 20  # standard splits of each UCI set


@dataclass(frozen=True)
class DataSet:
    """`folders`: where it may lie below the data root; the first is where `fetch` puts it."""

    name: str
    folders: tuple[str, ...]
    read: Callable[[Folder], Splits]
    remotes: tuple[Remote, ...] = ()
    unpack_into: str | None = None  # archives: below the data root; None for plain files
    by_hand: str = ""  # how to get it where it cannot be fetched
    lazy: bool = False  # too large to hash at every load: `fetch` and `check` write the manifest

    def remedy(self) -> str:
        if self.remotes:
            return f"Fetch it with: credo data fetch {self.name}"
        return self.by_hand


def _by_hand(layout: str) -> str:
    return f"It cannot be fetched; lay it out by hand as {layout}"


_CLASS_FOLDERS = "train/<class>/*.JPEG and val/<class>/*.JPEG"
CATALOGUE = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            "cifar10", ("cifar-10-batches-bin", "cifar-10-batches-py"), read_cifar10, official.CIFAR10, unpack_into=""
        ),
        DataSet("mnist", ("MNIST/raw",), read_mnist, official.MNIST),
        DataSet("fashion_mnist", ("FashionMNIST/raw",), read_fashion_mnist, official.FASHION_MNIST),
        DataSet(
            "notmnist", ("notMNIST/raw",), read_notmnist,
            by_hand=_by_hand("notMNIST/raw/t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz"),
        ),
        DataSet("svhn", ("SVHN",), read_svhn, official.SVHN),
        DataSet("lsun_crop", ("lsun_crop", "LSUN"), UnfamiliarSet("lsun_crop"), official.LSUN_CROP, "lsun_crop"),
        DataSet(
            "lsun_resize", ("lsun_resize", "LSUN_resize"), UnfamiliarSet("lsun_resize"), official.LSUN_RESIZE,
            "lsun_resize",
        ),
        DataSet(
            "tinyimagenet_resize", ("tinyimagenet_resize", "Imagenet_resize"), UnfamiliarSet("tinyimagenet_resize"),
            official.TINYIMAGENET_RESIZE, "tinyimagenet_resize",
        ),
        DataSet("scenes_crop", ("scenes_crop",), UnfamiliarSet("scenes_crop"), by_hand=_by_hand("scenes_crop/*.png")),
        DataSet(
            "scenes_resize", ("scenes_resize",), UnfamiliarSet("scenes_resize"), by_hand=_by_hand("scenes_resize/*.png")
        ),
        DataSet(
            "imagenette", ("imagenette2-320", "imagenette", "imagenette2"), PhotographSet("imagenette"),
            official.IMAGENETTE, unpack_into="", lazy=True,
        ),
        DataSet(
            "imagenet", ("imagenet",), PhotographSet("imagenet"), lazy=True,
            by_hand=f"Its licence forbids fetching; lay it out by hand as imagenet/{_CLASS_FOLDERS}",
        ),
    )
}  # fmt: skip
DIGITS = "digits"  # comes with scikit-learn, not in a folder


def names() -> tuple[str, ...]:
    """Every name `load` knows; a UCI set also as uci:<name>:<split>, 0 to 19."""
    return (*CATALOGUE, DIGITS, *(f"uci:{name}" for name in UCI_NAMES))


def find(name: str) -> DataSet:
    """The data set of this name, or InvalidValue with the names that come close."""
    if not isinstance(name, str):
        raise InvalidType(f"name must be a string, got {name!r} of type {type(name).__name__}")
    if name in CATALOGUE:
        return CATALOGUE[name]
    kind, _, rest = name.partition(":")
    own, _, split = rest.partition(":")
    if kind == "uci" and own in UCI_NAMES and split in {"", *map(str, range(SPLITS))}:
        layout = f"uci/{own}/data.txt, index_features.txt, index_target.txt, index_{{train,test}}_<split>.txt"
        return DataSet(name, (f"uci/{own}",), UciSet(name, int(split or 0)), by_hand=_by_hand(layout))
    raise unknown(name)


def unknown(name: str) -> InvalidValue:
    if any(mark in name for mark in ("/", "\\", "..", "\0")):
        return InvalidValue(
            f"name={name!r} has path parts; give a name of {', '.join(names())}, and the folder as root"
        )
    close = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    rest = ", ".join(n for n in names() if n not in close)
    return InvalidValue(f"name={name!r} is no data set{hint} Known: {', '.join([*close, rest])}")
