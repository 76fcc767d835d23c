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
        means = [self._copy(p) for p in parameters]
        try:
            with torch.no_grad():
                draw()
            yield
        finally:
            with torch.no_grad():
                for p, mean in zip(parameters, means, strict=True):
                    p.copy_(mean)

    def _copy(self, parameter: Tensor) -> Tensor:
        value, kept = parameter.detach(), self._kept.get(id(parameter))
        if (
            kept is None
            or kept.shape != value.shape
            or kept.dtype != value.dtype
            or kept.device != value.device
        ):
            self._kept[id(parameter)] = value.clone()
            return self._kept[id(parameter)]
        return kept.copy_(value)
