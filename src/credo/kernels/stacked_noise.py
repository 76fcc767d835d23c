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
    number, shifts = (float(shift), None) if isinstance(shift, float | int) else (0.0, shift)
    rows = [stacks, means, curvatures, shifts]
    contiguous = all(tensor.is_contiguous() for row in rows for tensor in row or ())
    call = lists.call("sample_stacks", *rows) if contiguous else None
    samples = len(stacks[0]) if stacks else 0
    if call is None:
        for k in range(samples):
            own = [stack[k] for stack in stacks]
            sample_all_(own, curvatures, scale, shift, seed, stream + k, indices, [0] * len(own), means)
        return
    layout = lists.whole_numbers(*[mean.numel() for mean in means], *indices)
    key, numbers = integers(seed, stream), lists.doubles(scale, number)
    threads = c_int64(torch.get_num_threads())
    call.kernel(call.addresses, layout, call.length, key, numbers, c_int64(samples), threads)
    increment_version(stacks)
