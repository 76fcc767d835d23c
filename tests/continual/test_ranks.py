"""Streams of tasks on several processes: what one process learns, stopped together, written once."""

from pathlib import Path

import pytest

from tests.continual import ranked
from tests.distributed.crews import together


@pytest.mark.parametrize("heads", [False, True], ids=["one head", "a head a task"])
@pytest.mark.parametrize("name", ranked.LEARNERS)
def test_equals_one_process(name: str, heads: bool) -> None:
    alone = ranked.learnt(0, 1, name, heads)
    ranks = together(2, ranked.learnt, name, heads)
    assert [sum(shares) for shares in zip(*(r["examples"] for r in ranks), strict=True)] == alone["examples"]
    assert 0 in ranks[1]["examples"]
    for result in ranks:
        assert result["matrix"] == alone["matrix"]
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        for key, value in alone["weights"].items():
            assert result["weights"][key] == pytest.approx(value, rel=1e-8, abs=1e-10), key


@pytest.mark.parametrize("row", ["vogn", "ewc"])
def test_a_signal_to_one_rank_stops_all_and_they_go_on(tmp_path: Path, row: str) -> None:
    whole = together(2, ranked.run, tmp_path / "whole", row)
    assert whole[0]["matrix"] == whole[1]["matrix"]
    assert [ended["ended"] for ended in together(2, ranked.run, tmp_path / "cut", row, 3)] == [143, 143]
    again = together(2, ranked.run, tmp_path / "cut", row)
    assert again[0]["matrix"] == whole[0]["matrix"]
    assert again[0]["warnings"] == []


def test_another_number_of_processes_goes_on_with_a_warning(tmp_path: Path) -> None:
    together(2, ranked.run, tmp_path, "adam", 2)
    alone = ranked.run(0, 1, tmp_path, "adam")
    assert any("written by 2 process(es), and here are 1" in text for text in alone["warnings"])
    assert len(alone["matrix"]) == 2
