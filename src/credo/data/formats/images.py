"""Photographs: decoded with pillow, which is imported only when an image is read."""

import io
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from credo.data.formats.bounds import damaged, refuse_empty_or_html
from credo.errors import UnsupportedOperation

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
    refuse_empty_or_html(data, source)
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
