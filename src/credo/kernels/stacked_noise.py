"""Many samples of the same weights at once: the numbers of `noise.sample_all_` at following streams, in one call."""

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch.autograd.graph import increment_version

from credo.kernels import lists
from credo.kernels.lists import Row
from credo.kernels.native import integers
from credo.kernels.noise import sample_all_


@torch.no_grad()
def sample_stacks_(
    stacks: Row,  # (S, *shape) each
    means: Row,
    curvatures: Row,
    scale: float,
    shift: float | Row,
    seed: int,
    stream: int,
    indices: Sequence[int],
) -> None:
    """stacks[s] ← mean + ε·√(scale / (curvature + shift)), ε of stream + s; `shift` is one number, or tensors."""
    shifts = None if isinstance(shift, float | int) else shift
    rows = [stacks, means, curvatures, *([] if shifts is None else [shifts])]
    contiguous = all(tensor.is_contiguous() for row in rows for tensor in row)
    kernel = lists.native("sample_stacks", *rows) if contiguous else None
    samples = len(stacks[0]) if stacks else 0
    if kernel is None:
        for k in range(samples):
            own = [stack[k] for stack in stacks]
            sample_all_(own, curvatures, scale, shift, seed, stream + k, indices, [0] * len(own), means)
        return
    layout = integers(*[mean.numel() for mean in means], *indices)
    numbers = lists.doubles(scale, 0.0 if shifts is not None else float(shift))  # type: ignore[arg-type]
    pointers = lists.addresses(stacks, means, curvatures, shifts)
    key, threads = integers(seed, stream), c_int64(torch.get_num_threads())
    kernel(pointers, layout, c_int64(len(means)), key, numbers, c_int64(samples), threads)
    increment_version(stacks)
