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


def keys(generator: torch.Generator, n: int) -> list[int]:
    """63 bits a draw, in the order of the draws however many are taken at a time.

    The counter-based kernels make a whole row of ε of a key: several times faster than randn, the same for any number
    of threads, and draw i does not depend on n.
    """
    device, most = generator.device, 2**63 - 1
    if device.type == "cpu":  # elsewhere a generator moves on by calls, not by numbers
        return torch.randint(most, (n,), generator=generator).tolist()
    return [int(torch.randint(most, (), generator=generator, device=device)) for _ in range(n)]


def standard_normal(
    generator: torch.Generator, n: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """n rows of ε ~ N(0, I), of any width."""
    rows = torch.empty(n, width, dtype=dtype, device=device)
    for row, key in zip(rows, keys(generator, n), strict=True):
        normal_(row, seed=key, stream=0)
    return rows
