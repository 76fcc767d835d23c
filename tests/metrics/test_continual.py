"""Average accuracy, backward transfer and forgetting, by hand and against a slow reading of their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credo import metrics
from credo.errors import CredoError, InvalidType, InvalidValue

NAN = math.nan
MATRIX = [[0.9, NAN, NAN], [0.95, 0.8, NAN], [0.7, 0.6, 0.9]]


def test_by_hand():
    assert metrics.average_accuracies(MATRIX) == pytest.approx([0.9, 0.875, 2.2 / 3])
    assert metrics.average_accuracy(MATRIX) == pytest.approx(2.2 / 3)
    assert metrics.backward_transfer(MATRIX) == pytest.approx((0.7 - 0.9 + 0.6 - 0.8) / 2)
    assert metrics.forgetting(MATRIX) == pytest.approx((0.95 - 0.7 + 0.8 - 0.6) / 2)


def test_tensors_ragged_rows_and_what_lies_right_of_the_diagonal():
    ragged = [row[: i + 1] for i, row in enumerate(MATRIX)]
    full = torch.tensor(MATRIX, dtype=torch.float64)
    filled = full.nan_to_num(0.123)
    for function in (metrics.average_accuracy, metrics.backward_transfer, metrics.forgetting):
        assert function(ragged) == function(full) == function(filled)


def test_one_task_has_no_past():
    assert metrics.average_accuracy([[0.5]]) == 0.5
    assert math.isnan(metrics.backward_transfer([[0.5]]))
    assert math.isnan(metrics.forgetting([[0.5]]))


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_against_the_definitions(tasks, seed):
    a = torch.rand(tasks, tasks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lost = [a[j : tasks - 1, j].max() - a[tasks - 1, j] for j in range(tasks - 1)]
    gained = (a[-1] - a.diagonal())[:-1]
    assert metrics.average_accuracy(a) == pytest.approx(a[-1].mean().item())
    assert metrics.forgetting(a) == pytest.approx(torch.stack(lost).mean().item())
    assert metrics.backward_transfer(a) == pytest.approx(gained.mean().item())
    assert metrics.forgetting(a) >= -metrics.backward_transfer(a) - 1e-12


@pytest.mark.parametrize(
    ("matrix", "error", "words"),
    [
        ([], InvalidValue, "no rows"),
        (0.5, InvalidType, "float"),
        ([0.5, 0.6], InvalidType, "matrix"),
        (["ab"], InvalidType, "matrix"),
        ([[0.5], [0.5]], InvalidValue, r"matrix\[1\] has 1 entries"),
        ([[0.5], [NAN, 0.5]], InvalidValue, r"matrix\[1\].*finite"),
        (torch.rand(3), InvalidType, "matrix"),
    ],
)
def test_bad_matrices(matrix, error, words):
    for function in (metrics.average_accuracy, metrics.backward_transfer, metrics.forgetting):
        with pytest.raises(error, match=words) as caught:
            function(matrix)
        assert isinstance(caught.value, CredoError)
