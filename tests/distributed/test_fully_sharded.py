"""Models under FSDP2 (`fully_shard`): what P ranks do with rows of the parameters equals what one process does."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.distributed import fully_sharded_tasks as jobs
from tests.distributed.crews import together

SHARED = {"shared_noise": True}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "VOGN": ("VOGN", {}),
    "VOGN, given": ("VOGN", {"lr": 0.1, "damping": 0.1, "initial_precision": 20.0, "mc_samples": 2}),
    "OGN": ("OGN", {}),
    "OGN, given": ("OGN", {"lr": 0.1, "damping": 0.2, "prior_precision": 2.0, "reduction": "sum"}),
    "IVON": ("IVON", {}),
    "IVON, given": ("IVON", {"lr": 0.1, "mc_samples": 2, "clip_radius": 0.5}),
    "BBB": ("BayesByBackprop", {"local": False, **SHARED}),
    "BBB, given": (
        "BayesByBackprop",
        {
            "lr": 1e-2,
            "local": False,
            **SHARED,
            "mc_samples": 2,
            "initial_mean_sd": 0.2,
            "initial_log_variance": -4.0,
        },
    ),
}
FORMS = ("closure", "blocks")
ALL = [*jobs.PROBLEMS]


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest, relative to the largest number of its tensor."""
    assert a["mean"].keys() == b["mean"].keys()
    return max(
        float(np.abs(a[kind][name] - b[kind][name]).max() / (np.abs(b[kind][name]).max() + 1e-300))
        for kind in ("mean", "variance", "curvature")
        for name in b[kind]
    )


def cases(name: str, size: int) -> list[tuple[Any, ...]]:
    """Every problem but those whose numbers are of each rank's own share; the first in all ways."""
    own, kinds = METHODS[name], jobs.SHARES if size > 1 else ("equal",)
    many = [(*own, "layers", form, kind) for form in (*FORMS, "micro-batches") for kind in kinds]
    usual = [p for p in ALL if p not in ("layers", "statistics")]
    if "given" in name:
        return [(*own, "layers", "blocks", "unequal"), (*own, "derived", "closure", "unequal")]
    return [*many, *((*own, problem, "closure", "unequal") for problem in usual)]


@cache
def alone(name: str, problem: str, form: str) -> dict[str, Any]:
    method, options = METHODS[name]
    return jobs.train(0, 1, False, method, options, problem, form, "equal")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_equals_one_process(name: str, size: int) -> None:
    todo = cases(name, size)
    ranks = together(size, jobs.train_all, True, todo)
    for case, first, *others in zip(todo, *ranks, strict=True):
        _, _, problem, form, kind = case
        one = alone(name, problem, form)
        assert difference(first, one) < 1e-10, case
        assert first["counters"] == one["counters"], case
        if form == "closure":
            assert first["losses"] == pytest.approx(one["losses"], rel=1e-10), case
        for other in others:
            assert other["losses"] == first["losses"]
            for what in ("mean", "variance"):
                for key, value in first[what].items():
                    assert np.array_equal(other[what][key], value), (case, key)
