"""Weights that are a sample for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def in_place(parameters: list[Tensor], draw: Callable[[], None]) -> Iterator[None]:
    """Lets `draw` change the parameters in their own memory, and puts the mean back whatever happens."""
    means = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            draw()
        yield
    finally:
        with torch.no_grad():
            for p, mean in zip(parameters, means, strict=True):
                p.copy_(mean)
