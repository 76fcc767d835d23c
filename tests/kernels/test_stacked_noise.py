"""Many samples by one call: bit by bit those of one call for each."""

import pytest
import torch
from torch import Tensor

from credo.kernels import forced, noise
from credo.kernels.stacked_noise import sample_rows_, sample_stacks_
from tests.kernels.modes import TOLERANCE, every_mode, every_type

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
            noise.sample_all_(own, curvatures, 0.1, shift, SEED, STREAM + k, INDICES, means)
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


@every_mode
def test_samples_on_several_threads_are_the_same(mode: str) -> None:
    mean, curvature, before = torch.zeros(50_000), torch.ones(50_000), torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        stack = torch.empty(7, 50_000)
        try:
            with forced(mode):
                sample_stacks_([stack], [mean], [curvature], 0.1, 0.5, SEED, STREAM, [0])
        finally:
            torch.set_num_threads(before)
        results.append(stack)
    assert torch.equal(*results)
    assert len({float(row.sum()) for row in results[0]}) == 7


SEEDS = [3, 2**63 - 1, 0, 77]


def rows_of(means: list[Tensor], variances: list[Tensor], seeds: list[int]) -> list[Tensor]:
    stacks = [torch.empty(len(seeds), *mean.shape, dtype=mean.dtype) for mean in means]
    sample_rows_(stacks, means, variances, seeds)
    return stacks


@every_mode
@every_type
def test_rows_are_one_stretch_of_noise_for_all_tensors(mode: str, dtype: torch.dtype) -> None:
    """No tensor but the first begins with a tile."""
    means, variances = tensors(1, dtype), tensors(2, dtype)
    with forced(mode):
        stacks = rows_of(means, variances, SEEDS)
    for k, seed in enumerate(SEEDS):
        row = torch.empty(sum(mean.numel() for mean in means), dtype=dtype)
        noise.normal_(row, seed, 0)
        parts = row.split([mean.numel() for mean in means])
        for stack, mean, variance, part in zip(stacks, means, variances, parts, strict=True):
            truth = mean + part.view(mean.shape) * variance.sqrt()
            torch.testing.assert_close(stack[k], truth, rtol=0, atol=10 * TOLERANCE[dtype])


@every_mode
def test_rows_do_not_depend_on_threads_or_on_how_many_are_drawn(mode: str) -> None:
    means, variances = tensors(1, torch.float32), tensors(2, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with forced(mode):
            together = rows_of(means, variances, SEEDS)
            torch.set_num_threads(1)
            apart = [rows_of(means, variances, [seed]) for seed in SEEDS]
    finally:
        torch.set_num_threads(before)
    for k, stack in enumerate(together):
        assert torch.equal(stack, torch.cat([single[k] for single in apart]))


def test_rows_of_mixed_types_and_layouts() -> None:
    """In plain torch: the same numbers."""
    means, variances = tensors(1, torch.float64), tensors(2, torch.float64)
    truth = rows_of(means, variances, SEEDS)
    means[0], means[3] = means[0].T.contiguous().T, means[3].float()
    for stack, own in zip(rows_of(means, variances, SEEDS), truth, strict=True):
        torch.testing.assert_close(stack.double(), own, rtol=0, atol=1e-6)
