"""`credo tune`: the table, the line and the files; what is wrong with the command line is one line and a code."""

from pathlib import Path

import pytest

from credo import cli
from credo.cli import exits
from credo.cli.run import ranges
from credo.experiments.results import load_results
from credo.experiments.tuning import outcome

pytest.importorskip("tyro")
pytest.importorskip("sklearn")
pytest.importorskip("optuna")

SMALL = ("--set", "epochs=2", "--set", "train_size=120", "--set", "test_size=60", "--set", "samples=2")


def test_a_search_ends_with_a_recipe_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "digits", "--row", "vogn", "--out", str(tmp_path / "tuned"), *SMALL]
    assert (
        cli.main([*words, "--trials", "3", "--defaults", "--search", "lr", "--search", "noise=0.5,2"])
        == exits.OK
    )
    folder = tmp_path / "tuned" / "digits" / "cpu" / "vogn"
    told = capsys.readouterr().out
    assert "trial  NLL" in told
    assert "optimizer = credo.VOGN(model, data_size=len(train_set))" in told
    assert str(folder / "tuning.html") in told
    assert cli.main(["run", str(folder / "recipe.toml"), "--out", str(tmp_path / "runs")]) == exits.OK
    (run,) = load_results(tmp_path / "runs")
    assert (run.recipe, run.row, run.training["epochs"]) == ("digits-tuned", "vogn", 2)


WRONG = [
    (["tune", "digit", "--row", "vogn"], "Did you mean 'digits'"),
    (
        ["tune", "digits", "--row", "vogm"],
        "unknown row of digits: 'vogm'. Did you mean 'vogn'? There are: vogn, adam",
    ),
    (["tune", "permuted-mnist", "--row", "vogn"], "stream of tasks"),
    (["tune", "digits", "--row", "vogn", "--trials", "0"], "trials must"),
    (["tune", "digits", "--row", "vogn", "--minutes", "0"], "minutes must lie in"),
    (["tune", "digits", "--row", "vogn", "--validation", "0"], "validation_fraction must lie in"),
    (["tune", "digits", "--row", "vogn", "--validation", "1e-6"], "0 for validation"),
    (["tune", "digits", "--row", "vogn", "--search", "weight_decay"], "unknown number to search with vogn"),
    (["tune", "digits", "--row", "vogn", "--search", "noise"], "search space of 'vogn' is empty"),
    (["tune", "digits", "--row", "vogn", "--search", "lr=1"], "must be NAME or NAME=LOW,HIGH"),
    (["tune", "digits", "--row", "vogn", "--set", "lrr=1"], "unknown key 'lrr'"),
    (["tune", "table1-lenet5", "--row", "vogn-released"], "has no cpu size"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_command_line_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.main([*words, "--out", str(tmp_path)]) == exits.USAGE
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_missing_data_are_bad_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "tune",
        "table1-lenet5",
        "--row",
        "vogn",
        "--data",
        str(tmp_path / "none"),
        "--out",
        str(tmp_path),
    ]
    assert cli.main(words) == exits.BAD_DATA
    assert "cifar" in capsys.readouterr().err.lower()


def test_another_study_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "page", lambda *_: "")
    words = ["tune", "digits", "--row", "adam", "--trials", "1", "--out", str(tmp_path), *SMALL]
    assert cli.main(words) == exits.OK
    assert cli.main([*words, "--seed", "1"]) == exits.USAGE
    assert "holds another study: seed was 0, now 1" in capsys.readouterr().err


def test_ranges_are_read() -> None:
    assert ranges(["lr", "noise=0.5,2"]) == {"lr": None, "noise": (0.5, 2.0)}
    assert ranges([]) is None
