"""Random views of whole batches of images, each kind knowing by how much it multiplies the data: ρ.

An augmentation is split into `draw` (random numbers, one row an image) and `apply` (none), so that processes that
share a batch can draw for all of it and apply their own rows, and together see what one process would.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from credo.errors import InvalidValue
from credo.kernels.windows import windows
from credo.validate import whole


class Augmentation(ABC):
    """A random change of images that leaves their class alone."""

    rho: float  # ρ: the effective size of the data set is ρN

    @abstractmethod
    def draw(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        """Random numbers for `count` images of this size, one row each, on the CPU."""

    @abstractmethod
    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images (n, C, H, W) changed as their rows of `draws` say."""

    @final
    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        if images.ndim != 4:
            raise InvalidValue(f"images must have shape (n, C, H, W), got {tuple(images.shape)}")
        height, width = images.shape[-2:]
        return self.apply(images, self.draw(len(images), height, width, generator))


@final
@dataclass(frozen=True)
class PadCropFlip(Augmentation):
    """Pad with black, cut a window of the old size at random, mirror half of them.

    The paper counts five windows (corners and centre) times two mirrorings on CIFAR-10: ρ = 10.
    """

    pad: int = 4
    rho: float = 10.0

    def __post_init__(self) -> None:
        _check(self.rho, pad=self.pad)

    def draw(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        return _windows(count, 2 * self.pad, 2 * self.pad, generator)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        return cut(images, draws, images.shape[-2], images.shape[-1], self.pad)


@final
@dataclass(frozen=True)
class RandomCropFlip(Augmentation):
    """Cut a `size`×`size` window at random, mirror half of them. ρ = 5: the paper's for 224 out of 256 on ImageNet."""

    size: int = 224
    rho: float = 5.0

    def __post_init__(self) -> None:
        _check(self.rho, size=self.size)

    def draw(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        if min(height, width) < self.size:
            raise InvalidValue(
                f"size={self.size} does not fit into images of {height}×{width}; give a smaller one"
            )
        return _windows(count, height - self.size, width - self.size, generator)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        return cut(images, draws, self.size, self.size, 0)


@final
@dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """A window of random area and aspect ratio, scaled to `size`×`size`, half of them mirrored.

    Not in the paper. ρ = 10 by default, the order of magnitude of pad-crop-flip; the paper finds no more is needed.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)  # share of the area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width over height
    rho: float = 10.0

    def __post_init__(self) -> None:
        _check(self.rho, size=self.size)
        for name, (low, high) in {"scale": self.scale, "ratio": self.ratio}.items():
            if not 0 < low <= high or (name == "scale" and high > 1):
                raise InvalidValue(f"{name}={(low, high)} must be two numbers, 0 < low <= high (scale: <= 1)")

    def draw(self, count: int, height: int, width: int, generator: Generator) -> Tensor:
        """Columns: centre x, centre y, half width, half height (all in [-1, 1] coordinates), mirror ±1."""
        u = torch.rand(5, count, generator=generator, dtype=torch.float64)
        area = self.scale[0] + (self.scale[1] - self.scale[0]) * u[0]
        low, high = torch.tensor(self.ratio, dtype=torch.float64).log()
        aspect = torch.exp(low + (high - low) * u[1]) * height / width  # in units of the image's own sides
        half_width, half_height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
        x, y = (2 * u[2] - 1) * (1 - half_width), (2 * u[3] - 1) * (1 - half_height)
        return torch.stack([x, y, half_width, half_height, 1 - 2 * (u[4] < 0.5).double()], dim=1)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        if images.numel() == 0:  # a rank's share may be empty
            return images.new_empty(len(images), images.shape[1], self.size, self.size)
        x, y, half_width, half_height, mirror = draws.to(images.device, torch.float32).unbind(1)
        zero = torch.zeros_like(x)
        rows = torch.stack([half_width * mirror, zero, x, zero, half_height, y], dim=1)
        shape = [len(images), images.shape[1], self.size, self.size]
        grid = F.affine_grid(rows.view(-1, 2, 3), shape, align_corners=False)
        sampled = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
        return sampled.round_().to(torch.uint8) if images.dtype == torch.uint8 else sampled.to(images.dtype)


def cut(images: Tensor, draws: Tensor, height: int, width: int, pad: int) -> Tensor:
    """Windows of height×width out of the images padded with zeros; rows of `draws` are (top, left, mirrored)."""
    if images.numel() == 0:
        return images.new_empty(*images.shape[:2], height, width)
    by_kernel = windows(images, draws, height, width, pad)
    return cut_by_runs(images, draws, height, width, pad) if by_kernel is None else by_kernel


def cut_by_runs(images: Tensor, draws: Tensor, height: int, width: int, pad: int) -> Tensor:
    """`cut` in torch alone.

    A window is gathered in runs of `width` pixels straight from the unpadded images and their mirror images: a run
    that leaves its row reads a neighbour's pixels, which the mask then clears. Whole runs move, never single pixels,
    and no padded copy is written.
    """
    count, channels, rows, columns = images.shape
    top, left, mirrored = draws.unbind(1)
    margin = images.new_zeros(
        pad * (columns + 1)
    )  # runs before the first and after the last image stay inside
    source = torch.cat([margin, images.reshape(-1), images.flip(-1).view(-1), margin])
    place = torch.arange(count) + count * mirrored
    first = place * (channels * rows * columns) + top * columns + left  # − pad·(columns + 1) + len(margin)
    cut_out = runs(source, first, run_offsets(channels, rows, columns, height), width)
    cut_out = cut_out.view(count, channels, height, width)
    if pad == 0:
        return cut_out
    framed = frame(rows, columns, pad, images.dtype, images.device)
    inside = runs(
        framed, top * (columns + 2 * pad) + left, run_offsets(1, 0, columns + 2 * pad, height), width
    )
    return cut_out.mul_(inside.view(count, 1, height, width))


def runs(source: Tensor, first: Tensor, offsets: Tensor, width: int) -> Tensor:
    """The runs of `width` elements that begin at first + offsets: (len(first) · len(offsets), width)."""
    every = source.as_strided((len(source) - width + 1, width), (1, 1))  # a view: runs overlap
    return every.index_select(0, (first.view(-1, 1) + offsets).view(-1).to(source.device))


@lru_cache(maxsize=16)
def run_offsets(channels: int, rows: int, columns: int, height: int) -> Tensor:
    """Where the runs of a window begin, counted from its first pixel: (channels · height,)."""
    planes = torch.arange(channels).view(-1, 1) * (rows * columns)
    return (planes + torch.arange(height) * columns).flatten()


@lru_cache(maxsize=16)
def frame(rows: int, columns: int, pad: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One padded image, flat: 1 where the image is, 0 where the padding is."""
    return F.pad(torch.ones(rows, columns, dtype=dtype, device=device), (pad, pad, pad, pad)).flatten()


def _windows(count: int, spare_rows: int, spare_columns: int, generator: Generator) -> Tensor:
    """Rows (top, left, mirrored), uniform over all positions."""
    columns = [spare_rows + 1, spare_columns + 1, 2]
    return torch.stack([torch.randint(n, (count,), generator=generator) for n in columns], dim=1)


def _check(rho: float, **sizes: int) -> None:
    for name, size in sizes.items():
        whole(name, size, at_least=1)
    if not 1 <= rho < float("inf"):
        raise InvalidValue(f"rho must be finite and at least 1, got {rho}")
