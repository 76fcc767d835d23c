"""Many processes cannot be told from one: means and variances after some steps, whatever the shares are."""

from typing import Any

import numpy as np
import pytest

from tests.distributed import tasks
from tests.distributed.crews import together

SHARED = {"shared_noise": True}
METHODS: dict[str, dict[str, Any]] = {
    "OGN": {},
    "VOGN": {**SHARED, "mc_samples": 2},
    "IVON": SHARED,
    "NoisyKFAC": {**SHARED, "factor_interval": 2, "inverse_interval": 2},
    "KFAC": {},
    "BayesByBackprop": {**SHARED, "local": False},
}


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(
        float(np.abs(a[kind][name] - b[kind][name]).max() / (np.abs(b[kind][name]).max() + 1e-300))
        for kind in ("mean", "variance")
        for name in b[kind]
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "kind"), [(2, "equal"), (2, "unequal"), (2, "empty"), (4, "one example"), (4, "unequal")]
)
def test_equals_one_process(method: str, size: int, kind: str) -> None:
    options = METHODS[method]
    ranks = together(size, tasks.train, method, kind, options)
    (alone,) = together(1, tasks.train, method, "equal", options)
    for result in ranks:
        assert isinstance(result, dict), result
        assert difference(result, alone) < 1e-10
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        for name, mean in ranks[0]["mean"].items():
            assert np.array_equal(result["mean"][name], mean), "ranks must be bitwise equal to each other"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["unequal", "empty"])
def test_samples_at_once_equal_one_process(kind: str, sharded: bool) -> None:
    """Two blocks a step, each of two samples that share the noise of the convolutions."""
    shared = {**METHODS["BayesByBackprop"], "mc_samples": 4, "convolution_samples": 2}
    at_once = {**shared, "vectorized": True, "sharded": sharded}
    ranks = together(2, tasks.train, "BayesByBackprop", kind, at_once)
    (alone,) = together(1, tasks.train, "BayesByBackprop", "equal", shared)
    for result in ranks:
        assert isinstance(result, dict), result
        assert difference(result, alone) < 1e-10
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_steps_from_blocks_are_taken_too(method: str) -> None:
    ranks = together(2, tasks.train_by_blocks, method, METHODS[method])
    (alone,) = together(1, tasks.train_by_blocks, method, METHODS[method])
    for result in ranks:
        assert isinstance(result, dict), result
        assert result["counters"]["refused"] == 0
        assert difference(result, alone) < 1e-10


@pytest.mark.parametrize("method", ["VOGN", "IVON"])
def test_sum_losses_are_weighted_by_true_counts(method: str) -> None:
    options = {**SHARED, "reduction": "sum"}
    ranks = together(2, tasks.train, method, "unequal", options)
    (alone,) = together(1, tasks.train, method, "equal", options)
    assert all(difference(result, alone) < 1e-10 for result in ranks)


@pytest.mark.parametrize("method", ["VOGN", "NoisyKFAC", "IVON"])
def test_a_nan_on_one_rank_is_refused_by_all(method: str) -> None:
    ranks = together(2, tasks.train_with_nan, method)
    for result in ranks:
        assert result["counters"]["refused"] == 1
        assert result["counters"]["step"] == tasks.STEPS - 1
        for name, mean in ranks[0]["mean"].items():
            assert np.array_equal(result["mean"][name], mean)
            assert np.isfinite(mean).all()
