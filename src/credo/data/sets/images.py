"""Folders of images: small unfamiliar ones, read whole, and photographs in class folders, decoded when asked for."""

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from credo.data.augmentation import RandomCropFlip
from credo.data.examples import Examples, LazyInputs, Normalise, Splits
from credo.data.sets.cifar10 import NORMALISE as CIFAR10_NORMALISE
from credo.data.verify import THREADS, Folder, check_content, damaged
from credo.errors import IntegrityError, UnsupportedOperation

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LARGEST_PIXELS = 100_000_000  # the largest photograph of ImageNet has 61 million


def require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UnsupportedOperation("reading images needs pillow: pip install pillow") from error


def parse_image(data: bytes, source: str, *, short_side: int | None = None, size: int) -> Tensor:
    """(3, size, size) uint8: the shorter side scaled to `short_side` (None: as it is), then the centre."""
    check_content(data, source)
    image = _decoded(data, source)
    if short_side is not None and min(image.size) != short_side:
        scale = short_side / min(image.size)
        image = image.resize([max(short_side, round(side * scale)) for side in image.size])
    if min(image.size) < size:
        raise damaged(
            source, f"{image.size[0]}×{image.size[1]} pixels, at least {size}×{size} expected", data
        )
    left, top = ((side - size) // 2 for side in image.size)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


def _decoded(data: bytes, source: str) -> "Image.Image":
    require_pillow()
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "BMP", "WEBP")) as image:
            if image.size[0] * image.size[1] > LARGEST_PIXELS:
                raise ValueError(f"{image.size[0]}×{image.size[1]} pixels are more than {LARGEST_PIXELS}")
            return image.convert("RGB")
    except Exception as error:  # pillow's decoders raise a dozen types for damaged files
        raise damaged(source, f"not a readable image ({type(error).__name__}: {error})", data) from error


NO_CLASS = -1  # the target of images without a class
STORED, CROPPED = 256, 224  # ImageNet: shorter side scaled to the first, windows of the second
PHOTOGRAPHS = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop=CROPPED)


@dataclass(frozen=True)
class UnfamiliarSet:
    """Every image below the folder, in the order of names, as a test set without classes.

    Larger images are cut to their centre: those of LSUN (crop) come with a border.
    """

    name: str
    size: int = 32

    def __call__(self, folder: Folder) -> Splits:
        names = folder.images(SUFFIXES)
        require_pillow()
        with ThreadPoolExecutor(THREADS) as pool:
            images = torch.stack(list(pool.map(lambda name: self._image(folder, name), names)))
        test = Examples(images, torch.full((len(names),), NO_CLASS))
        return Splits(self.name, test.subset([]), test, (), CIFAR10_NORMALISE)

    def _image(self, folder: Folder, name: str) -> Tensor:
        return parse_image(folder.read(name), folder.where(name), size=self.size)


@final
@dataclass(frozen=True)
class ImageFiles(LazyInputs):
    """Images by file name: shorter side scaled to `short_side`, centre `size`×`size`, as (3, size, size) uint8."""

    folder: Folder
    names: tuple[str, ...]
    short_side: int = STORED
    size: int = STORED

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Tensor) -> "ImageFiles":
        return replace(self, names=tuple(self.names[k] for k in indices.tolist()))

    def gather(self, indices: Tensor) -> Tensor:
        if not len(indices):
            return torch.empty(0, 3, self.size, self.size, dtype=torch.uint8)
        with ThreadPoolExecutor(THREADS) as pool:
            return torch.stack(list(pool.map(self._image, indices.tolist())))

    def _image(self, index: int) -> Tensor:
        name = self.names[index]
        data = self.folder.read(name)  # verified where the manifest knows the file
        return parse_image(data, self.folder.where(name), short_side=self.short_side, size=self.size)


@dataclass(frozen=True)
class PhotographSet:
    """train/<class>/*.JPEG and val/<class>/*.JPEG, as ImageNet and Imagenette are laid out."""

    name: str

    def __call__(self, folder: Folder) -> Splits:
        require_pillow()
        classes = sorted(p.name for p in (folder.path / "train").glob("*") if p.is_dir())
        if len(classes) < 2:
            raise IntegrityError(
                f"{folder.path / 'train'}: a folder for each class expected. {folder.remedy}".strip()
            )
        train, test = (self._half(folder, half, classes) for half in ("train", "val"))
        return Splits(self.name, train, test, tuple(classes), PHOTOGRAPHS, RandomCropFlip(CROPPED))

    def _half(self, folder: Folder, half: str, classes: list[str]) -> Examples:
        names = folder.images(SUFFIXES, half)
        number = {name: k for k, name in enumerate(classes)}
        owners = [name.split("/")[1] for name in names]
        if strangers := sorted(set(owners) - set(classes)):
            raise IntegrityError(f"{folder.path / half / strangers[0]}: no such class in train")
        return Examples(ImageFiles(folder, tuple(names)), torch.tensor([number[owner] for owner in owners]))
