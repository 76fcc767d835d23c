"""Many processes cannot be told from one: means and variances after some steps, whatever the shares are."""

from functools import cache
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
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{name: (name, options, tuple(tasks.STEP_BY)) for name, options in METHODS.items()},
    "VOGN at once": ("VOGN", {**SHARED, "mc_samples": 3, "vectorized": True}, ("losses",)),
    "IVON, samples": ("IVON", {**SHARED, "mc_samples": 2}, ("closure", "blocks")),
    "NoisyKFAC, samples": (
        "NoisyKFAC",
        {**SHARED, "mc_samples": 3, "damping_form": "pi"},
        ("closure", "blocks"),
    ),
    "VOGN, sum": ("VOGN", {**SHARED, "reduction": "sum"}, tuple(tasks.STEP_BY)),
    "IVON, sum": ("IVON", {**SHARED, "reduction": "sum"}, tuple(tasks.STEP_BY)),
}


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(
        float(np.abs(a[kind][name] - b[kind][name]).max() / (np.abs(b[kind][name]).max() + 1e-300))
        for kind in ("mean", "variance")
        for name in b[kind]
    )


@cache
def alone(case: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Without any process group, by the form of a step."""
    method, options, forms = CASES[case]
    return tasks.train_in_all_ways(0, 1, method, options, forms)


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


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(case: str, size: int, sharded: bool) -> None:
    """Whatever the shares are and however the steps are written; and ranks are bitwise equal to each other."""
    method, options, forms = CASES[case]
    ranks = together(size, tasks.train_in_all_ways, method, {**options, "sharded": sharded}, forms)
    for (form, kind), first in ranks[0].items():
        one = alone(case)[form, "equal"]
        assert difference(first, one) < 1e-10, (form, kind)
        assert first["counters"] == one["counters"], (form, kind)
        if one["losses"][0] is not None:
            assert first["losses"] == pytest.approx(one["losses"], rel=1e-10), (form, kind)
        for result in ranks[1:]:
            assert result[form, kind]["losses"] == first["losses"]
            for what in ("mean", "variance"):
                for name, value in first[what].items():
                    assert np.array_equal(result[form, kind][what][name], value), (form, kind, name)


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("method", ["VOGN", "IVON", "NoisyKFAC"])
def test_groups_of_ranks_are_samples_of_one_process(method: str, sharded: bool) -> None:
    """MC-parallel: ranks that read the same data and draw by themselves are one process with their samples."""
    one = tasks.train_for_many(method, 2, {})
    for result in together(2, tasks.train_in_groups, method, 1, {"sharded": sharded}):
        assert difference(result, one) < 1e-10
        assert result["losses"] == pytest.approx(one["losses"], rel=1e-10)


@pytest.mark.parametrize("method", ["VOGN", "NoisyKFAC", "IVON"])
def test_a_nan_on_one_rank_is_refused_by_all(method: str) -> None:
    ranks = together(2, tasks.train_with_nan, method)
    for result in ranks:
        assert result["counters"]["refused"] == 1
        assert result["counters"]["step"] == tasks.STEPS - 1
        for name, mean in ranks[0]["mean"].items():
            assert np.array_equal(result["mean"][name], mean)
            assert np.isfinite(mean).all()


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"sharded": True}], ids=str)
def test_what_a_refused_step_left_says_nothing_for_an_empty_rank(options: dict[str, Any]) -> None:
    for counters in together(2, tasks.empty_after_nan, options):
        assert (counters["step"], counters["refused"]) == (1, 1)
