"""Official data files, verified; batches of tensors, fast; augmentation that knows its ρ."""

from credo.data.augmentation import Augmentation, PadCropFlip, RandomCropFlip, RandomResizedCrop
from credo.data.batches import Batches
from credo.data.catalogue import names
from credo.data.examples import Examples, LazyInputs, Normalise, Splits
from credo.data.fetching import fetch
from credo.data.loading import CheckReport, FileReport, check, default_root, load

__all__ = [
    "load",
    "names",
    "fetch",
    "check",
    "default_root",
    "CheckReport",
    "FileReport",
    "Splits",
    "Examples",
    "LazyInputs",
    "Normalise",
    "Augmentation",
    "PadCropFlip",
    "RandomCropFlip",
    "RandomResizedCrop",
    "Batches",
]
