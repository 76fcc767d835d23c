"""From stored inputs to what a network reads."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from credo.errors import InvalidValue


@dataclass(frozen=True)
class Normalise:
    """(x/white − mean) / std per channel, uint8 → float32; feature data passes unchanged.

    `white`: the largest pixel value of the data set, 255 for nearly all.
    `crop`: images larger than this are cut to their centre, as the paper evaluates what it trained on random crops.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int | None = None
    white: int = 255

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or any(not s > 0 for s in self.std):
            raise InvalidValue(f"mean={self.mean} and std={self.std} must pair up, every std > 0")
        if isinstance(self.white, bool) or not isinstance(self.white, int) or not 0 < self.white < 256:
            raise InvalidValue(f"white={self.white!r} must be an int from 1 to 255, the largest pixel value")

    def __call__(self, batch: Tensor) -> Tensor:
        if self.crop is not None:
            batch = centre(batch, self.crop)
        if batch.dtype != torch.uint8:
            return batch
        if not self.mean:
            return batch.float().mul_(1 / self.white)
        if batch.ndim != 4 or batch.shape[1] != len(self.mean):
            expected = f"(n, {len(self.mean)}, height, width)"
            raise InvalidValue(f"images must have shape {expected}, got {tuple(batch.shape)}")
        scale, shift = affine(self.mean, self.std, self.white, batch.device)
        return batch.float().mul_(scale).add_(shift)  # in place: one float buffer, two passes in cache


@lru_cache(maxsize=16)
def affine(
    mean: tuple[float, ...], std: tuple[float, ...], white: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """a = 1/(white·std) and b = −mean/std, each (C, 1, 1), so that a·x + b is the normalised image."""
    means, stds = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (mean, std))
    return (1 / (white * stds)).float().to(device), (-means / stds).float().to(device)


def centre(images: Tensor, size: int) -> Tensor:
    """The middle `size`×`size` of each image; images that are smaller already pass."""
    top, left = (max(0, (extent - size) // 2) for extent in images.shape[-2:])
    return images[..., top : top + size, left : left + size]
