"""Many samples of the same weights at once, in one call: the numbers of as many single ones."""

from collections.abc import Sequence
from ctypes import c_int64
from itertools import accumulate
from typing import cast

import torch
from torch.autograd.graph import increment_version

from credo.kernels import tensors
from credo.kernels.native import integers
from credo.kernels.noise import normal_, pairs, sample_all_
from credo.kernels.tensors import Numbers, Row


@torch.no_grad()
def sample_stacks_(
    stacks: Row,  # (S, *shape) each
    means: Row,
    curvatures: Row,
    scale: Numbers,
    shift: Numbers | Row,
    seed: int,
    stream: int,
    indices: Sequence[int],
) -> None:
    """stacks[s] ← mean + ε·√(scale / (curvature + shift)), ε of stream + s; `shift` is numbers or tensors.

    As `noise.sample_all_` at following streams.
    """
    number, shifts = (shift, None) if tensors.is_number(shift) else (0.0, cast("Row", shift))
    rows = [stacks, means, curvatures, shifts]
    contiguous = all(tensor.is_contiguous() for row in rows for tensor in row or ())
    call = tensors.call("sample_stacks", *rows, stacked=True) if contiguous else None
    samples = len(stacks[0]) if stacks else 0
    if call is None:
        for k in range(samples):
            own = [stack[k] for stack in stacks]
            sample_all_(own, curvatures, scale, shift, seed, stream + k, indices, means)
        return
    layout = tensors.whole_numbers(*[mean.numel() for mean in means], *indices)
    key, numbers = integers(seed, stream), pairs(scale, number, len(means))
    threads = c_int64(torch.get_num_threads())
    call.kernel(call.addresses, layout, call.length, key, numbers, c_int64(samples), threads)
    increment_version(stacks)


@torch.no_grad()
def sample_rows_(stacks: Row, means: Row, variances: Row, seeds: Sequence[int]) -> None:
    """stacks[s] ← mean + ε·√variance, ε of all tensors, one after the other, one row of `noise.normal_` at seeds[s]."""
    sizes = [mean.numel() for mean in means]
    starts = [0, *accumulate(sizes)][:-1]
    call = tensors.call("sample_rows", stacks, means, variances, stacked=True)
    if call is not None and all(t.is_contiguous() for row in (stacks, means, variances) for t in row):
        layout, threads = tensors.whole_numbers(*sizes, *starts), c_int64(torch.get_num_threads())
        call.kernel(call.addresses, layout, call.length, integers(*seeds), c_int64(len(seeds)), threads)
        increment_version(stacks)
        return
    wide = max((stack.dtype for stack in stacks), key=lambda dtype: dtype.itemsize, default=torch.float32)
    row = means[0].new_empty(sum(sizes), dtype=wide) if means else None
    for k, seed in enumerate(seeds):
        assert row is not None
        normal_(row, seed, 0)
        for stack, mean, variance, size, start in zip(stacks, means, variances, sizes, starts, strict=True):
            torch.add(mean, row[start : start + size].view(mean.shape) * variance.sqrt(), out=stack[k])
