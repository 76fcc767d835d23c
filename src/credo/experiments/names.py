"""Names: those that users give are checked before they name a folder; rows and data sets are shown by proper ones."""

import difflib
import re
from collections.abc import Iterable
from typing import Final

from credo.errors import InvalidType, InvalidValue

# One plain part of a path that no system gives a meaning of its own: no separators, no leading dot or dash.
PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")


def nearest_first(name: str, valid: Iterable[str]) -> list[str]:
    """All valid names, those that look like `name` first."""
    names = sorted(valid)
    near = difflib.get_close_matches(name.lower(), names, n=len(names), cutoff=0.6)
    return near + [other for other in names if other not in near]


def unknown(kind: str, name: object, valid: Iterable[str]) -> InvalidValue:
    """The error for a name that is none of `valid`; to be raised by the caller."""
    names = nearest_first(str(name), valid)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return InvalidValue(f"unknown {kind} {name!r}.{hint} There are: {', '.join(names) or 'none'}.")


def known(kind: str, name: object, valid: Iterable[str]) -> str:
    names = list(valid)
    if not isinstance(name, str):
        raise InvalidType(f"{kind} must be a name, got {type(name).__name__}; there are {', '.join(names)}.")
    if name not in names:
        raise unknown(kind, name, names)
    return name


def plain_name(kind: str, name: object) -> str:
    """A name that becomes a folder: letters, digits and ._+=- only, so that it stays inside its parent."""
    if not isinstance(name, str):
        raise InvalidType(f"{kind} must be a str, got {type(name).__name__}.")
    if PLAIN_NAME.fullmatch(name) is None or ".." in name:
        raise InvalidValue(
            f"{kind} {name!r} cannot name a folder: use at most 100 letters, digits and the characters _ . + = -, "
            "starting with a letter, digit or _; no path parts."
        )
    return name


# What people read for the names of rows and data sets

ROW_LABELS: Final = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "mc-dropout": "MC-dropout",
    "bbb": "BBB",
    "ogn": "OGN",
    "vogn": "VOGN",
    "vogn-defaults": "VOGN (defaults)",
    "vogn-released": "VOGN (released settings)",
    "kfac": "K-FAC",
    "noisy-kfac": "Noisy K-FAC",
    "ivon": "IVON",
    "swag": "SWAG",
    "laplace": "Laplace (last layer)",
    "laplace-kronecker": "Laplace (Kronecker)",
    "laplace-diagonal": "Laplace (diagonal)",
    "ensemble": "Ensemble",
    "vcl": "VCL",
    "ewc": "EWC",
    "joint": "Adam, all tasks together",
    "momentum-batchnorm": "momentum and BatchNorm",
    "batchnorm": "BatchNorm only",
    "momentum": "momentum only",
}
MODEL_AND_DATA_LABELS: Final = {
    "lenet5": "LeNet-5",
    "alexnet": "AlexNet",
    "resnet18": "ResNet-18",
    "resnet20": "ResNet-20",
    "mlp": "MLP",
    "cifar10": "CIFAR-10",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "notmnist": "notMNIST",
    "svhn": "SVHN",
    "lsun_crop": "LSUN (crop)",
    "lsun_resize": "LSUN (resize)",
    "tinyimagenet_resize": "TinyImageNet (resize)",
    "imagenet": "ImageNet",
    "imagenette": "Imagenette",
    "held_out": "held-out classes",
}


def label(row: str) -> str:
    """A method's proper name; any other row's own, its dashes as spaces unless they belong to a number (7.5e-4)."""
    return ROW_LABELS.get(row) or re.sub(r"(?<!\de)[-_]", " ", row)


def set_label(name: str) -> str:
    """The proper name of a model or a data set."""
    return MODEL_AND_DATA_LABELS.get(name, name.replace("_", " "))
