"""Standard normal numbers from an explicit generator, sample after sample."""

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue


def check_generator(generator: object, device: torch.device) -> torch.Generator:
    if not isinstance(generator, torch.Generator):
        raise InvalidType(
            f"generator must be a torch.Generator, got {type(generator).__name__};"
            f" pass torch.Generator({str(device)!r}).manual_seed(...)"
        )
    if generator.device.type != device.type:
        raise InvalidValue(
            f"generator is on {generator.device} and the posterior on {device};"
            f" make it with torch.Generator({str(device)!r})"
        )
    return generator


def standard_normal(
    generator: torch.Generator, n: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """n rows of ε ~ N(0, I).

    One randn per row: how randn uses the stream depends on its length, and row i must not depend on n.
    """
    rows = torch.empty(n, width, dtype=dtype, device=device)
    for row in rows:
        torch.randn(width, generator=generator, out=row)
    return rows
