"""Each rank's own noise, ranks that disagree, and ranks that fail."""

import numpy as np
import pytest

from tests.distributed import tasks
from tests.distributed.processes import RankFailed, on_ranks


def test_every_rank_draws_its_own_sample() -> None:
    first, second = on_ranks(2, tasks.noises, "VOGN", {})
    correlation = np.corrcoef(first, second)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(len(first))


@pytest.mark.parametrize("method", ["VOGN", "IVON", "NoisyKFAC"])
def test_shared_noise_is_the_same_on_all_ranks(method: str) -> None:
    first, second = on_ranks(2, tasks.noises, method, {"shared_noise": True})
    assert first == second


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", "'weight'"),
        ("dtype", "float64"),
        ("lr", "lr of group 0"),
        ("method", "OGN"),
        ("data_size", "60"),
    ],
)
def test_a_difference_is_named_on_every_rank(what: str, named: str) -> None:
    for message in on_ranks(2, tasks.build_differently, what):
        assert named in message
        assert "rank 0" in message
        assert "rank 1" in message


def test_the_others_do_not_wait_for_ever_when_one_fails() -> None:
    survivor, failed = on_ranks(2, tasks.fail_on_one, timeout=3.0)
    assert survivor == "mean in place"
    assert isinstance(failed, RankFailed)
    assert "a loader failed" in str(failed)
