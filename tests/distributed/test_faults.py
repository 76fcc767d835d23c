"""Ranks that die, hang or go astray: the others neither wait beyond the timeout nor lose the mean, and say why."""

import pytest

from tests.distributed import exchanges
from tests.distributed.processes import RankFailed, on_ranks

TIMEOUT = 2.5


@pytest.mark.parametrize("what", ["killed", "fewer steps", "slow"])
def test_a_rank_that_is_gone_or_silent(what: str) -> None:
    survivor, other = on_ranks(2, exchanges.fault, what, timeout=TIMEOUT)
    assert survivor["ended"].startswith("RankLost: rank 0 has waited for the other ranks in vain")
    words = {"killed": "Connection", "fewer steps": "", "slow": "Timed out waiting"}
    assert words[what] in survivor["ended"]
    assert survivor["mean in place"]
    assert survivor["seconds"] < TIMEOUT + 5.0  # a busy machine wakes nobody on the second
    if what == "killed":
        assert isinstance(other, RankFailed)
    if what == "slow":
        assert other["ended"].startswith("RankLost")
        assert other["mean in place"]


@pytest.mark.parametrize("method", ["VOGN", "IVON", "NoisyKFAC"])
def test_a_rank_that_is_killed_and_had_a_part_of_the_state(method: str) -> None:
    survivor, other = on_ranks(2, exchanges.fault, "killed", method, True, timeout=TIMEOUT)
    assert survivor["ended"].startswith("RankLost: rank 0 has waited for the other ranks in vain")
    assert survivor["mean in place"]
    assert isinstance(other, RankFailed)


def test_ranks_at_different_steps_are_told_so_on_all() -> None:
    for result in on_ranks(2, exchanges.fault, "another step"):
        assert result["ended"].startswith("CallOrderError: ranks are at different steps")
        assert result["mean in place"]


def test_errors_of_one_rank_are_errors_of_all() -> None:
    first, second = on_ranks(2, exchanges.outcomes)
    assert (first["all well"], second["all well"]) == (0, 1)
    assert first["first well"] == second["first well"] == {"by": 0}
    assert first["locked on 0"] == ("LockedError", "in use", None)
    assert second["locked on 0"] == ("LockedError", "rank 0: in use", 0)
    assert first["file on 1"] == ("FileNotFoundError", "rank 1: no such data", 1)
    assert second["file on 1"] == ("FileNotFoundError", "no such data", None)
    assert first["own class"] == ("IntegrityError", "rank 1: flipped", 1)
    assert first["bug"] == ("CredoError", "rank 1: AssertionError", 1)
    assert second["bug"] == ("AssertionError", "", None)


def test_tensors_of_all_shapes_and_dtypes_arrive_bit_for_bit() -> None:
    ranks = on_ranks(3, exchanges.gathered)
    assert ranks[0] == ranks[1] == ranks[2]
    zeroth, first, nothing = ranks[0]
    assert nothing == []
    assert [entry[0] for entry in first] == ["torch.float64", "torch.bool", "torch.int16", "torch.bfloat16"]
    assert [entry[1] for entry in zeroth] == [(0, 2), (2,), (), (2,)]
    assert [entry[2] for entry in first] == ["[[1.1, 1.1]]", "[True, True]", "1", "[nan, -inf]"]
