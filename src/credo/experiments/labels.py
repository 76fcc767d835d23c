"""What people read for the names of rows and data sets."""

import re
from typing import Final

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
