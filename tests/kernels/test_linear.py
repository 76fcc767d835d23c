"""Σᵢrᵢ and Σᵢrᵢ² of a linear layer's weight against a loop over examples."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from credo.kernels import forced
from credo.kernels.linear import _way, layer_sums, row_sums, sequence_sums
from credo.kernels.prepared import Prepared
from tests.kernels.modes import MODES, assert_close, every_mode, every_type


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    own = torch.einsum("mto,mti->moi", g.double(), x.double())
    return own.sum(0), own.square().sum(0)


def check_sequence(x: Tensor, g: Tensor, mode: str) -> None:
    with forced(mode):
        actual = sequence_sums(x, g)
    for own, truth in zip(actual, oracle(x, g), strict=True):
        assert_close(own, truth)


@every_mode
@every_type
@pytest.mark.parametrize(
    "shape", [(4, 7, 5, 3), (3, 1, 20, 40), (2, 50, 96, 64), (0, 3, 4, 5), (9, 2, 300, 260)]
)
def test_sequences(shape: tuple[int, ...], dtype: torch.dtype, mode: str) -> None:
    examples, positions, inputs, outputs = shape
    x = random(examples, positions, inputs, dtype=dtype)
    check_sequence(x, random(examples, positions, outputs, seed=1, dtype=dtype), mode)


@pytest.mark.parametrize("mode", MODES)
@given(sizes=st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=30, deadline=None)
def test_any_sequence(mode: str, sizes: tuple[int, ...]) -> None:
    examples, positions, inputs, outputs = sizes
    check_sequence(random(examples, positions, inputs), random(examples, positions, outputs, seed=1), mode)


@every_mode
def test_time_first(mode: str) -> None:
    """(T, M, d) seen as (M, T, d), as recurrent layers have it."""
    check_sequence(random(6, 3, 10).transpose(0, 1), random(6, 3, 20, seed=1).transpose(0, 1), mode)


@every_mode
@every_type
@pytest.mark.parametrize(
    "shape",
    [(4, 5, 3), (1, 1, 1), (0, 4, 5), (100, 64, 10), (300, 33, 13), (600, 70, 100), (150, 500, 9)],
)
def test_all_sums_of_a_layer(shape: tuple[int, ...], dtype: torch.dtype, mode: str) -> None:
    examples, inputs, outputs = shape
    x, g = random(examples, inputs, dtype=dtype), random(examples, outputs, seed=1, dtype=dtype)
    with forced(mode):
        actual = layer_sums(x, g)
    bias = g.double().sum(0), g.double().square().sum(0)
    for own, truth in zip(actual, (*oracle(x[:, None], g[:, None]), *bias), strict=True):
        assert_close(own, truth)


@pytest.mark.parametrize("mode", MODES)
@given(sizes=st.tuples(st.integers(1, 700), st.integers(1, 80), st.integers(1, 30)))
@settings(max_examples=30, deadline=None)
def test_any_layer(mode: str, sizes: tuple[int, ...]) -> None:
    examples, inputs, outputs = sizes
    x, g = random(examples, inputs), random(examples, outputs, seed=1)
    with forced(mode):
        actual = layer_sums(x, g)
    for own, truth in zip(actual[:2], oracle(x[:, None], g[:, None]), strict=True):
        assert_close(own, truth)


@every_mode
@every_type
@pytest.mark.parametrize(
    "shape", [(3, 4, 5, 3), (1, 2, 3, 4), (2, 0, 4, 5), (5, 130, 33, 13), (4, 300, 70, 100)]
)
def test_samples_that_share_an_input(shape: tuple[int, ...], dtype: torch.dtype, mode: str) -> None:
    samples, examples, inputs, outputs = shape
    x, g = random(examples, inputs, dtype=dtype), random(samples, examples, outputs, seed=1, dtype=dtype)
    with forced(mode):
        actual = layer_sums(x, g)
    rows = g.flatten(0, 1)
    truth = *oracle(x.repeat(samples, 1)[:, None], rows[:, None]), rows.double().sum(0)
    for own, true in zip(actual, (*truth, rows.double().square().sum(0)), strict=True):
        assert_close(own, true)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("shape", [(1, 600, 70, 100), (4, 300, 70, 40), (2, 300, 1100, 13)])
def test_threads_change_no_bit_of_a_layer(shape: tuple[int, ...], mode: str) -> None:
    samples, examples, inputs, outputs = shape
    x, g = random(examples, inputs).float(), random(samples, examples, outputs, seed=1).float()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with forced(mode):
                results.append(layer_sums(x, g))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(own, first) for own, first in zip(other, results[0], strict=True))


@every_type
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("shape", [(256, 784, 100), (256, 100, 10), (7, 13, 5), (1, 1, 1), (0, 4, 5)])
def test_the_reference_on_any_number_of_threads(
    shape: tuple[int, ...], number: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    threads(number)
    examples, inputs, outputs = shape
    x, g = random(examples, inputs, dtype=dtype), random(examples, outputs, seed=1, dtype=dtype)
    with forced("off"):
        actual, again = layer_sums(x, g), layer_sums(2 * x, 3 * g)
    truth = *oracle(x[:, None], g[:, None]), g.double().sum(0), g.double().square().sum(0)
    for own, other, true, factor in zip(actual, again, truth, (6, 36, 3, 9), strict=True):
        assert own.is_contiguous()
        assert_close(own, true)  # also after other sums were made in the same scratch
        assert_close(other, factor * true)


def test_two_python_threads_have_scratch_of_their_own(threads: Callable[[int], None]) -> None:
    threads(2)
    pairs = [(random(300, 200, seed=k), random(300, 50, seed=9 - k)) for k in range(4)]

    def differences(pair: tuple[Tensor, Tensor]) -> float:
        torch.set_num_threads(2)  # a thread begins with torch's own choice
        with forced("off"):
            truth = oracle(pair[0][:, None], pair[1][:, None])[1]
            return max(float((layer_sums(*pair)[1] - truth).abs().max()) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(differences, pairs)) < 1e-9


@every_type
@pytest.mark.parametrize("shape", [(4, 5, 3), (1, 1, 1), (0, 4, 5), (100, 64, 10)])
def test_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    examples, inputs, outputs = shape
    x, g = random(examples, inputs, dtype=dtype), random(examples, outputs, seed=1, dtype=dtype)
    for own, truth in zip(row_sums(x, g), oracle(x[:, None], g[:, None]), strict=True):
        assert_close(own, truth)


def test_rows_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("credo.kernels.linear.SQUARED", 300)
    x, g = random(10, 5), random(10, 3, seed=1)
    with forced("off"):
        actual = row_sums(x, g)
    for own, truth in zip(actual, oracle(x[:, None], g[:, None]), strict=True):
        assert_close(own, truth)


@pytest.mark.parametrize("shape", [(10, 3), (4, 10, 3)])
def test_large_weights_go_to_the_matrix_products(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    x, g = random(10, 5), random(*shape, seed=1)
    small = layer_sums(x, g)
    monkeypatch.setattr("credo.kernels.linear.FUSED", 14)
    monkeypatch.setattr("credo.kernels.linear._ways", Prepared(_way))  # knows nothing yet
    monkeypatch.setattr("credo.kernels.linear.Fused.__call__", None)  # nobody is to call it
    for own, truth in zip(layer_sums(x, g), small, strict=True):
        assert_close(own, truth)


def test_half_precision_rows_are_summed_in_single() -> None:
    total, squares = row_sums(random(4, 5, dtype=torch.bfloat16), random(4, 3, seed=1, dtype=torch.bfloat16))
    assert total.dtype == squares.dtype == torch.float32
