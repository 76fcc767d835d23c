"""Many samples by one call: bit by bit those of one call for each."""

import pytest
import torch
from torch import Tensor

from credo.kernels import forced, noise
from credo.kernels.stacked_noise import sample_stacks_
from tests.kernels.modes import every_mode, every_type

SHAPES = [(7, 41), (64,), (1,), (3, 5, 13), (300, 70)]  # whole tiles and pieces of them
INDICES = [4, 0, 9, 2, 7]
SAMPLES, SEED, STREAM = 5, 2**64 - 3, 2**48 - 2  # the streams cross a word


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=dtype) + 0.1 for shape in SHAPES]


@every_mode
@every_type
@pytest.mark.parametrize("one_shift", [True, False])
def test_stacks_are_single_samples(mode: str, dtype: torch.dtype, one_shift: bool) -> None:
    means, curvatures = tensors(1, dtype), tensors(2, dtype)
    shift = 0.5 if one_shift else tensors(3, dtype)
    stacks = [torch.empty(SAMPLES, *shape, dtype=dtype) for shape in SHAPES]
    with forced(mode):
        sample_stacks_(stacks, means, curvatures, 0.1, shift, SEED, STREAM, INDICES)
        for k in range(SAMPLES):
            own = [torch.empty_like(mean) for mean in means]
            starts = [0] * len(own)
            noise.sample_all_(own, curvatures, 0.1, shift, SEED, STREAM + k, INDICES, starts, means)
            assert all(torch.equal(stack[k], one) for stack, one in zip(stacks, own, strict=True))


@every_mode
def test_threads_change_nothing(mode: str) -> None:
    means, curvatures = tensors(1, torch.float32), tensors(2, torch.float32)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        stacks = [torch.empty(SAMPLES, *shape) for shape in SHAPES]
        try:
            with forced(mode):
                sample_stacks_(stacks, means, curvatures, 0.1, 0.5, SEED, STREAM, INDICES)
        finally:
            torch.set_num_threads(before)
        results.append(stacks)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
