"""Weights that are a sample for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class MeanKeeper:
    """Memory for the mean while the parameters hold a sample; kept between steps, because fresh pages are slow."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    @contextmanager
    def in_place(self, parameters: list[Tensor], draw: Callable[[], None]) -> Iterator[None]:
        """Lets `draw` change the parameters in their own memory, and puts the mean back whatever happens."""
        means = self._copies(parameters)
        try:
            with torch.no_grad():
                draw()
            yield
        finally:
            with torch.no_grad():
                _copy(parameters, means)

    def _copies(self, parameters: list[Tensor]) -> list[Tensor]:
        values = [p.detach() for p in parameters]
        for p, value in zip(parameters, values, strict=True):
            kept = self._kept.get(id(p))
            if kept is None or not _alike(kept, value):
                self._kept[id(p)] = torch.empty_like(value)
        means = [self._kept[id(p)] for p in parameters]
        with torch.no_grad():
            _copy(means, values)
        return means


def _alike(kept: Tensor, value: Tensor) -> bool:
    return kept.shape == value.shape and kept.dtype is value.dtype and kept.device == value.device


def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    """All in one call: on a small network the calls take longer than the copies."""
    if targets:
        torch._foreach_copy_(targets, values)
