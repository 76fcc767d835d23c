"""Memory that is used again must never be somebody's still."""

import os
import platform
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import credo
from credo.kernels.scratch import LARGE, SPARE, is_worth_space, scratch, spacious


def squares_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with credo.capture(model) as stats:
        model(x).square().mean().backward()
    return stats.squares[model.weight]


def test_the_memory_of_a_block_is_free_with_its_statistics() -> None:
    """At once, not when the garbage collector comes."""
    model = torch.nn.Linear(9, 5)
    with credo.capture(model) as stats:
        model(torch.ones(8, 9)).square().mean().backward()
    squares = weakref.ref(stats._accumulator.squares[id(model.weight)])
    assert squares() is not None
    del stats
    assert squares() is None


def test_statistics_that_are_kept_do_not_change_with_later_blocks() -> None:
    model, kept = torch.nn.Linear(6 << 12, 4), []
    inputs = [torch.randn(8, 6 << 12, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    expected = [squares_of(model, x).clone() for x in inputs]
    for x in inputs:  # the blocks stay alive, so their memory must stay theirs
        with credo.capture(model) as stats:
            model(x).square().mean().backward()
        kept.append(stats)
    for stats, square in zip(kept, expected, strict=True):
        assert torch.equal(stats.squares[model.weight], square)


def test_scratch_of_one_name_is_the_same_memory_in_every_shape() -> None:
    like = torch.empty(0)
    large = scratch("test", (6, 7), like)
    assert scratch("test", (6, 7), like).data_ptr() == large.data_ptr()
    assert scratch("test", (5,), like).data_ptr() == large.data_ptr()
    assert scratch("test", (6, 7), like.double()).data_ptr() != large.data_ptr()


def test_scratch_that_has_grown_keeps_nothing_of_the_old() -> None:
    """Neither memory nor views of it: two shapes of one name never lie in different places."""
    like = torch.empty(0)
    scratch("growing", (3,), like), scratch("growing", (5, 5), like)
    grown = scratch("growing", (100, 100), like)
    for shape in ((3,), (5, 5)):
        assert scratch("growing", shape, like).data_ptr() == grown.data_ptr()


def test_every_thread_has_scratch_of_its_own() -> None:
    mine = scratch("threads", (3,), torch.empty(0))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(scratch, "threads", (3,), torch.empty(0)).result()
    assert other.data_ptr() != mine.data_ptr()


LARGE_ONES = {
    "contiguous": torch.empty(16, 8, 64, 32),
    "channels last": torch.empty(16, 8, 64, 32).to(memory_format=torch.channels_last),
    "double": torch.empty(1 << 17, dtype=torch.float64),
    "a part": torch.empty(3, 1 << 18)[1],
}
OTHERS = {
    "small": torch.empty(LARGE // 4 - 1),
    "with gaps": torch.empty(1 << 18, 2)[:, 0],
    "empty": torch.empty(0),
}


@pytest.mark.parametrize("x", OTHERS.values(), ids=OTHERS)
def test_small_ones_and_those_with_gaps_are_not_worth_it(x: torch.Tensor) -> None:
    assert not is_worth_space(x)


@pytest.mark.parametrize("x", LARGE_ONES.values(), ids=LARGE_ONES)
def test_spacious_tensors_look_like_others(x: torch.Tensor) -> None:
    assert is_worth_space(x)
    found, expected = spacious(x), torch.empty_like(x)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert not found._is_view()  # autograd forbids changes of views in place
    assert found.copy_(torch.ones_like(x)).eq(1).all()


@pytest.mark.parametrize("x", LARGE_ONES.values(), ids=LARGE_ONES)
def test_large_ones_have_bytes_to_spare(x: torch.Tensor) -> None:
    """glibc looks for a block larger by the alignment, 64 in torch, and by its smallest block, 32."""
    assert spacious(x).untyped_storage().nbytes() == x.nbytes + SPARE >= x.nbytes + 64 + 32


FAULTS = """
import resource, torch
from credo.kernels.scratch import expect_large_blocks
expect_large_blocks()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(2 << 20) for _ in range(25)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages()
print(min(pages() for _ in range(3)))
"""


def faults_of_two_hundred_megabytes(**environment: str) -> int:
    """When they are taken for another time, in a new process."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    probe = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=others | environment
    )
    return int(probe.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    kept = faults_of_two_hundred_megabytes()
    assert kept < 20
    # 50,000 and more; where pages are huge, 100.
    assert faults_of_two_hundred_megabytes(MALLOC_TRIM_THRESHOLD_="131072") > kept + 50
    assert faults_of_two_hundred_megabytes(GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072") > kept + 50
