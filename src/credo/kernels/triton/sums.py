"""Σᵢrᵢ and Σᵢrᵢ² of linear layers on sequences and of convolutions; no rᵢ is ever in memory.

The functions stand in front of those in plain torch of the same name (`credo.kernels.accelerator`), and answer
NotImplemented where the tensors are not for them.

Where the weight has too few tiles to fill a GPU, the examples are shared out too, and the shares are added up.
"""

import math
from typing import Any

import torch
from torch import Tensor

from credo.kernels.accelerator import scratch_bytes
from credo.kernels.convolution_reference import Geometry
from credo.kernels.layout import flat_strides, readable
from credo.kernels.triton.launching import blocks, launch, power

PROGRAMS = 512  # wanted in a launch; a number of ours, so that all GPUs add up in the same order
SMALLEST, TILE = 16, 64  # the sides of a tile, in numbers
ALONG = 32  # positions that are multiplied at a time
LINEAR = Geometry((1,), (1,), (0,), (1,), 1)  # of a layer on sequences
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def sequence_sums(x: Tensor, g: Tensor) -> Any:
    """Both (O, I), float32, from x (M, T, I) and g (M, T, O) in any layout."""
    if not _suit(x, g):
        return NotImplemented
    (examples, places, inputs), outputs = x.shape, g.shape[2]
    tile_o, tile_i = power(outputs, SMALLEST, TILE), power(inputs, SMALLEST, TILE)
    tiles = blocks(outputs, tile_o) * blocks(inputs, tile_i)
    per, shares = _shares(examples, tiles, outputs * inputs)
    out = x.new_empty((2, shares, outputs, inputs), dtype=torch.float32)
    arguments = (x, g, out, examples, places, inputs, outputs, *x.stride(), *g.stride())
    tile = {"PER": per, "BO": tile_o, "BI": tile_i, "BT": ALONG}
    done = launch("sums.sequence_sums", (tiles, shares), *arguments, **tile, **_way(x, convolution=False))
    return _added(out) if done else NotImplemented


def convolution_sums(x: Tensor, g: Tensor, at: Geometry) -> Any:
    """Both (C_out, C_in / groups, *kernel_size), float32, in one or two dimensions; a kernel of one place is linear."""
    if not _suit(x, g) or x.dim() > 4:
        return NotImplemented
    if x.dim() == 3 and at == LINEAR:
        found = sequence_sums(x.mT, g.mT)
        return found if found is NotImplemented else tuple(own.unsqueeze(2) for own in found)
    shape = (g.shape[1], x.shape[1] // at.groups, *at.kernel_size)
    g = readable(g)
    if x.dim() == 3:  # an image of one row
        x, g = x.unsqueeze(2), g.unsqueeze(2)
        at = Geometry((1, *at.kernel_size), (1, *at.stride), (0, *at.padding), (1, *at.dilation), at.groups)
    examples, inputs, outputs = len(x), x.shape[1] // at.groups, g.shape[1] // at.groups
    line = inputs * at.taps
    tile_o, tile_k = power(outputs, SMALLEST, TILE), power(line, SMALLEST, TILE)
    tiles = blocks(outputs, tile_o) * blocks(line, tile_k)
    per, shares = _shares(examples, tiles * at.groups, g.shape[1] * line)
    out = x.new_empty((2, shares, *shape), dtype=torch.float32)
    sizes = (examples, inputs, outputs, *x.shape[2:], math.prod(g.shape[2:]), g.shape[3])
    moves = (*x.stride(), *flat_strides(g), *at.stride, *at.padding, *at.dilation)
    last = x.stride(1) == 1 and inputs > 1
    tile = {"KH": at.kernel_size[0], "KW": at.kernel_size[1], "LAST": last, "PER": per}
    tile |= {"BO": tile_o, "BK": tile_k, "BP": ALONG}
    grid, way = (tiles, shares, at.groups), _way(x, convolution=True)
    done = launch("sums.convolution_sums", grid, x, g, out, *sizes, *moves, **tile, **way)
    return _added(out) if done else NotImplemented


def _suit(x: Tensor, g: Tensor) -> bool:
    alike = x.dtype is g.dtype and x.dtype in TYPES and x.device == g.device
    return alike and x.numel() > 0 and g.numel() > 0


def _shares(examples: int, tiles: int, weights: int) -> tuple[int, int]:
    """How many examples a program has, and how many shares there are."""
    wanted = min(examples, blocks(PROGRAMS, tiles), max(1, scratch_bytes() // (8 * weights)))
    per = power(blocks(examples, wanted), 1, 1 << 30)  # few programs for all batch sizes
    return per, blocks(examples, per)


def _way(x: Tensor, convolution: bool) -> dict[str, Any]:
    """How float32 is multiplied: as torch's own layers are told to. Numbers gathered one by one fill registers."""
    exact = x.dtype is torch.float32 and not _tf32(convolution)
    stages = 2 if convolution and x.dtype is torch.float32 else 3
    precision = "ieee" if exact else "tf32"
    return {"PRECISION": precision, "num_warps": 8, "num_stages": stages, "enable_fp_fusion": True}


def _tf32(convolution: bool) -> bool:
    backend: Any = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return str(backend.fp32_precision) == "tf32"


def _added(out: Tensor) -> tuple[Tensor, Tensor]:
    sums = out.sum(1) if out.shape[1] > 1 else out.squeeze(1)
    return sums[0], sums[1]
