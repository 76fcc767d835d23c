"""Data in the shape that training and prediction want: examples, and the two halves of a data set."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from credo.data.augmentation import Augmentation
from credo.errors import InvalidType, InvalidValue


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


SUBSET_SEED = 0x5EED  # `take` cuts the same shuffle on all ranks


class LazyInputs(ABC):
    """Inputs too large for memory: looked up by position, decoded when asked for."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Tensor) -> Tensor:
        """The inputs at these positions as one tensor, first dimension `len(indices)`."""

    @abstractmethod
    def subset(self, indices: Tensor) -> "LazyInputs":
        """Inputs at these positions, still not decoded."""


@dataclass(frozen=True, eq=False)
class Examples:
    """n inputs with their n targets.

    Images are uint8 of shape (n, C, H, W), features float32 of shape (n, d); targets are int64 classes or float32
    values (n, 1). Inputs that do not fit into memory are `LazyInputs`: use `gather`, which serves both.
    """

    inputs: Tensor | LazyInputs
    targets: Tensor

    def __post_init__(self) -> None:
        inputs, targets = cast("tuple[object, object]", (self.inputs, self.targets))
        if not isinstance(inputs, Tensor | LazyInputs) or not isinstance(targets, Tensor):
            kinds = f"{type(inputs).__name__} and {type(targets).__name__}"
            raise InvalidType(f"inputs and targets must be tensors (inputs may be LazyInputs), got {kinds}")
        if 0 in (self.targets.ndim, getattr(self.inputs, "ndim", 1)):
            raise InvalidValue(
                "inputs and targets need a first dimension that counts the examples, got a scalar"
            )
        if len(self.inputs) != len(self.targets):
            raise InvalidValue(f"{len(self.inputs)} inputs do not fit {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets at these positions."""
        if isinstance(self.inputs, Tensor):
            inputs = self.inputs.index_select(0, indices.to(self.inputs.device))
        else:
            inputs = self.inputs.gather(indices)
        return inputs, self.targets.index_select(0, indices.to(self.targets.device))

    def subset(self, indices: Tensor | Sequence[int]) -> "Examples":
        """The examples at these positions, in this order."""
        at = torch.as_tensor(indices, dtype=torch.int64).reshape(-1)
        if len(at) and (int(at.min()) < 0 or int(at.max()) >= len(self)):
            raise InvalidValue(
                f"indices must lie in 0..{len(self) - 1}, got {int(at.min())}..{int(at.max())}"
            )
        inputs, targets = self.inputs, self.targets.index_select(0, at.to(self.targets.device))
        if isinstance(inputs, Tensor):
            return Examples(inputs.index_select(0, at.to(inputs.device)), targets)
        return Examples(inputs.subset(at), targets)

    def take(self, n: int) -> "Examples":
        """The first n after a shuffle that is always the same; all of them if n is larger."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidValue(f"n must be an int of at least 1, got {n!r}")
        if n >= len(self):
            return self
        generator = torch.Generator().manual_seed(SUBSET_SEED)
        return self.subset(torch.randperm(len(self), generator=generator)[:n])

    def hold_out(self, n: int) -> "tuple[Examples, Examples]":
        """All but n examples in their order, and the n: the last after the shuffle that `take` cuts the first from."""
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n < len(self):
            raise InvalidValue(
                f"n must be an int from 1 to {len(self) - 1}, one less than there are, got {n!r}"
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(SUBSET_SEED))
        return self.subset(order[:-n].sort().values), self.subset(order[-n:])

    def to(self, device: torch.device | str) -> "Examples":
        """The same examples with their tensors on `device`; lazy inputs stay where they are."""
        inputs = self.inputs.to(device) if isinstance(self.inputs, Tensor) else self.inputs
        return replace(self, inputs=inputs, targets=self.targets.to(device))


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set: what to train on, what to test on, and how its inputs want to be treated.

    Sets that exist to be unfamiliar (LSUN, notMNIST) may have an empty `train`.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...] = ()  # empty for regression
    normalise: Normalise = field(default_factory=Normalise)
    augmentation: Augmentation | None = None  # the paper's for this set; knows its ρ
    target_mean: float = 0.0  # regression targets were standardised: y = target_mean + target_std · stored
    target_std: float = 1.0
