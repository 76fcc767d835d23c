"""Standard normal numbers from an explicit generator, sample after sample."""

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue
from credo.kernels.noise import normal_


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
    """n rows of ε ~ N(0, I), of any width.

    The generator gives each row a key of 63 bits, the counter-based kernel the row itself: several times faster
    than randn, the same for any number of threads, and row i does not depend on n.
    """
    rows = torch.empty(n, width, dtype=dtype, device=device)
    for row in rows:
        key = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
        normal_(row, seed=int(key), stream=0)
    return rows
