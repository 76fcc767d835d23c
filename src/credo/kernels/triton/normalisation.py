"""BatchNorm's way back in three launches, for any layout; formulas in `credo.kernels.normalisation`."""

from typing import Any

import torch
from torch import Tensor

from credo.kernels.layout import flat_strides
from credo.kernels.triton.launching import blocks, launch, power
from credo.kernels.triton.tables import HOW

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FILE = "normalisation"  # of the programs
TILE = 1024  # numbers that a program looks at together


def batch_norm_backward(
    x: Tensor,  # (M, C, *S)
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    need_input: bool,
) -> Any:
    """(gx or None, Σaᵢ, Σaᵢ², Σbᵢ, Σbᵢ²), sums float32 at least; NotImplemented where this is not for them."""
    if x.dtype not in TYPES or g.dtype not in TYPES or x.numel() == 0 or x.device != g.device:
        return NotImplemented
    x, g = (t if flat_strides(t)[2] else t.contiguous() for t in (x, g))
    mean, invstd = mean.contiguous(), invstd.contiguous()
    weight = None if weight is None else weight.detach().contiguous()
    (examples, channels), places = x.shape[:2], x[0, 0].numel()
    acc = torch.float64 if torch.float64 in (x.dtype, g.dtype) else torch.float32
    last = flat_strides(x)[1] == 1
    tile_c = power(channels, 1, 64) if last else 1
    tile_p = power(places, 1, TILE // tile_c)
    of_channels = blocks(channels, tile_c)
    shares = x.new_empty((2, examples, channels), dtype=acc)
    totals = x.new_empty((4, channels), dtype=acc)
    sizes = examples, channels, places
    strides = *flat_strides(x), *flat_strides(g)
    tile: dict[str, Any] = {"ACC": acc, "BC": tile_c, "BP": tile_p, **HOW}
    grid: tuple[int, ...] = examples, of_channels
    if not launch(f"{FILE}.batch_norm_shares", grid, x, g, mean, invstd, shares, *sizes, *strides, **tile):
        return NotImplemented
    columns: dict[str, Any] = {"ACC": acc, "BM": 32, "BC": 32, **HOW}
    grid = (blocks(channels, 32),)
    if not launch(f"{FILE}.batch_norm_totals", grid, shares, totals, examples, channels, **columns):
        return NotImplemented
    gx = torch.empty_like(x) if need_input else None
    if gx is not None:
        if not flat_strides(gx)[2]:
            gx = torch.empty_like(x, memory_format=torch.contiguous_format)
        tile |= {"AFFINE": weight is not None, "TRAINING": training}
        grid = examples, of_channels, blocks(places, tile_p)
        own = x, g, mean if weight is None else weight, mean, invstd, totals, gx
        where = *sizes, *strides, *flat_strides(gx)
        if not launch(f"{FILE}.batch_norm_input", grid, *own, *where, **tile):
            return NotImplemented
    return gx, totals[0], totals[1], totals[2], totals[3]
