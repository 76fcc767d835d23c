"""Prediction and evaluation by several ranks: what one process says, on all of them."""

from typing import Any

import numpy as np
import pytest
import torch

import credo
from credo.errors import CallOrderError
from tests.distributed import exchanges
from tests.distributed.processes import on_ranks

BITWISE = ("batch_size", "loader", "dropout", "mean", "regression loader", "no example", "one example")


@pytest.mark.parametrize("size", [2, 3])
def test_predictions_are_those_of_one_process(size: int) -> None:
    alone = exchanges.predictions(0, 1, False)
    for ranks in on_ranks(size, exchanges.predictions, True):
        assert isinstance(ranks, dict), ranks
        for name, fields in alone.items():
            for field, value in fields.items():
                found = ranks[name][field]
                assert (found is None) == (value is None)
                if value is not None:
                    _compare(name, np.array(found), np.array(value))


def _compare(name: str, found: Any, value: Any) -> None:
    assert found.shape == value.shape
    if name in BITWISE and name != "mean":
        assert np.array_equal(found, value)
    else:
        assert np.allclose(found, value, rtol=1e-12, atol=1e-14)


def test_errors_of_one_rank_are_errors_of_all() -> None:
    (bad_first, few_first), (bad_second, few_second) = on_ranks(2, exchanges.bad_predictions)
    assert bad_second[0] == "RuntimeError"
    assert "5x3" in bad_second[1]
    assert bad_first[1] == f"rank 1: {bad_second[1]}"
    assert few_first == few_second
    assert "all ranks must give the same inputs" in few_first[1]
    assert "[5, 4]" in few_first[1]


def test_scores_of_parts_are_those_of_the_whole() -> None:
    model, (x, y) = exchanges.network_of(0), exchanges.inputs()
    whole = credo.evaluate(credo.predict(model, "mean", x), y, ood=credo.predict(model, "mean", 3 * x))
    for found in on_ranks(2, exchanges.scores):
        assert found == pytest.approx(whole, rel=1e-12)


def test_row_67_without_a_process_group_the_remedy_is_told() -> None:
    x = torch.zeros(2, 4, dtype=torch.float64)
    model = exchanges.network_of(0)
    with pytest.raises(CallOrderError, match="torchrun --nproc-per-node"):
        credo.predict(model, "mean", x, distributed=True)
    with pytest.raises(CallOrderError, match="init_process_group"):
        credo.evaluate(credo.predict(model, "mean", x), torch.zeros(2).long(), distributed=True)
