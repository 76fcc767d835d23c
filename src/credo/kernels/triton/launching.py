"""How a program is started: the one door to Triton, which gives it up where it cannot be compiled."""

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from credo.kernels.triton.availability import give_up

FILES = ("lists", "sums", "normalisation")
Grid = tuple[int, ...]


def launch(name: str, grid: Grid, *arguments: Any, **constants: Any) -> bool:
    """Start program `file.name` on the device of the first tensor; False, and no more of them, where that fails.

    One launch. Nothing has changed when it returns False: a program fails before it starts.
    """
    if 0 in grid:
        return True
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    file, _, function = name.partition(".")
    try:
        program = getattr(import_module(f"credo.kernels.triton.programs.{file}"), function)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            program[grid](*arguments, **{key: _constant(value) for key, value in constants.items()})
    except Exception as error:  # of Triton, LLVM, ptxas or the driver
        give_up(name, error)
        return False
    return True


def _constant(value: Any) -> Any:
    """torch's types are Triton's here."""
    if isinstance(value, torch.dtype):
        return getattr(import_module("triton.language"), str(value).removeprefix("torch."))
    return value


def blocks(size: int, block: int) -> int:
    return -(-size // block)


def power(size: int, low: int, high: int) -> int:
    """The power of two that holds `size`, within bounds that are powers of two."""
    return min(high, max(low, 1 << max(0, size - 1).bit_length()))
