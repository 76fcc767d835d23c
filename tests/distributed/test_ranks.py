"""Each rank's own noise, ranks that disagree, and ranks that fail."""

import numpy as np
import pytest

from credo.distributed import World, data_share
from credo.errors import InvalidValue
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


@pytest.mark.parametrize(
    ("everywhere", "words"),
    [(True, "UnsupportedOperation: no gradients of single examples"), (False, "nn.SyncBatchNorm is []")],
    ids=["on all ranks", "on one"],
)
def test_synchronised_normalisation_is_refused_with_the_remedy(everywhere: bool, words: str) -> None:
    for said in on_ranks(2, tasks.build_synchronised, everywhere):
        assert len(said) == 6
        assert all(words in message for message in said)
        assert not everywhere or all("average_buffers" in message for message in said)


def test_the_others_do_not_wait_for_ever_when_one_fails() -> None:
    survivor, failed = on_ranks(2, tasks.fail_on_one, timeout=3.0)
    assert survivor == "mean in place"
    assert isinstance(failed, RankFailed)
    assert "a loader failed" in str(failed)


def test_groups_share_the_data_and_count_once() -> None:
    ranks = on_ranks(4, tasks.train_in_groups, "OGN", 2, {})
    (alone,) = on_ranks(1, tasks.train, "OGN", "equal", {})
    for result in ranks:
        for name, mean in alone["mean"].items():
            assert np.allclose(result["mean"][name], mean, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rank", "size", "groups", "share"),
    [(0, 4, 2, (0, 2)), (1, 4, 2, (0, 2)), (3, 4, 2, (1, 2)), (3, 4, None, (3, 4))],
)
def test_data_shares(rank: int, size: int, groups: int | None, share: tuple[int, int]) -> None:
    assert data_share(groups, among=World(rank, size)) == share


@pytest.mark.parametrize("groups", [0, 3, 8, 1.5])
def test_groups_must_divide_the_ranks(groups: float) -> None:
    with pytest.raises(InvalidValue, match="mc_groups"):
        data_share(groups, among=World(0, 4))  # type: ignore[arg-type]


def test_buffers_are_averaged_and_counts_are_rank_0s() -> None:
    assert on_ranks(2, tasks.averaged_buffers) == [[0.5, 0.5, 10.0]] * 2


def test_more_ranks_with_own_samples_have_a_smaller_variance() -> None:
    """ĝ at four independent samples varies a quarter as much as at one; 30 seeds, so the ratio is within 2 or so."""
    spread = {}
    for size in (1, 4):
        gradients = np.array(on_ranks(size, tasks.gradients, 30)[0])
        spread[size] = gradients.var(0).sum()
    assert 2.0 < spread[1] / spread[4] < 8.0
