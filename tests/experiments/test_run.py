"""Recipes: rows times seeds, each in its folder; names are checked before they become paths (row 64)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from credo.errors import InvalidType, InvalidValue
from credo.experiments.methods import METHODS
from credo.experiments.names import known, nearest_first, plain_name
from credo.experiments.recipe import Recipe, Row
from credo.experiments.results import load_results
from credo.experiments.run import run
from tests.experiments.small import TRAININGS, VOGN

QUICK = replace(VOGN, epochs=1, tempering_from=None)
RECIPE = Recipe(
    "mine",
    "Mine",
    "nowhere",
    (
        Row("vogn", paper=replace(QUICK, epochs=2), cpu=QUICK),
        Row("adam", paper=None, cpu=replace(TRAININGS["adam"], epochs=1)),
    ),
)


def test_rows_times_seeds(tmp_path: Path) -> None:
    results = run(RECIPE, seeds=2, out=tmp_path)
    assert [(r.recipe, r.row, r.size, r.seed) for r in results] == [
        ("mine", row, "cpu", seed) for row in ("vogn", "adam") for seed in (0, 1)
    ]
    assert results[0].folder == tmp_path / "mine" / "cpu" / "vogn" / "seed-0"
    found = load_results(tmp_path)
    assert {(r.row, r.seed) for r in found} == {(r.row, r.seed) for r in results}
    assert [str(r.metrics) for r in run(RECIPE, seeds=2, out=tmp_path)] == [str(r.metrics) for r in results]


def test_some_rows_some_seeds_other_settings(tmp_path: Path) -> None:
    (result,) = run(RECIPE, only=["vogn"], seeds=[7], out=tmp_path, overrides={"lr": "0.5", "epochs": 2})
    assert (result.seed, result.training["settings"]["lr"], result.metrics["epochs"]) == (7, 0.5, 2)


def test_rows_that_cannot_be_run_are_left_out_aloud(tmp_path: Path) -> None:
    future = Row("future", paper=None, cpu=replace(QUICK, method="of_tomorrow"))
    recipe = replace(RECIPE, rows=(*RECIPE.rows[:1], future))
    with pytest.warns(UserWarning, match="'future' of mine needs the method 'of_tomorrow'"):
        assert [result.row for result in run(recipe, out=tmp_path)] == ["vogn"]
    with pytest.raises(InvalidValue, match="of_tomorrow"):
        run(recipe, only=["future"], out=tmp_path)
    with pytest.warns(UserWarning, match="'adam' of mine has no paper size"):
        assert [result.row for result in run(RECIPE, size="paper", out=tmp_path)] == ["vogn"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": ["vong"]}, "Did you mean 'vogn'"),
        ({"only": ["../vogn"]}, "unknown row"),
        ({"size": "gpu"}, "size"),
        ({"seeds": 0}, "seeds"),
        ({"seeds": True}, "seeds|seed"),
        ({"seeds": [-1]}, "seed"),
        ({"overrides": {"epoch": 1}}, "Did you mean 'epochs'"),
        ({"overrides": {"beta1": 0.5}}, "unknown key 'beta1'"),
    ],
)
def test_row_64_mistakes_before_anything_runs(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidValue, InvalidType), match=message):
        run(RECIPE, out=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


EVIL = ["..", ".", "a/b", "/etc", "a\\b", "", ".hidden", "a..b", "-rf", "x" * 101, "nul\0", "a b", "ü"]


@pytest.mark.parametrize("name", EVIL)
def test_row_64_names_with_path_parts(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValue, match="cannot name a folder"):
        plain_name("recipe name", name)
    with pytest.raises(InvalidValue, match="cannot name a folder"):
        run(replace(RECIPE, name=name), out=tmp_path)
    with pytest.raises(InvalidValue, match="cannot name a folder"):
        run(replace(RECIPE, rows=(Row(name, paper=None, cpu=QUICK),)), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_row_64_close_matches_come_first() -> None:
    assert nearest_first("vong", METHODS)[0] == "vogn"
    assert set(nearest_first("vong", METHODS)) == set(METHODS)
    with pytest.raises(InvalidType, match="must be a name"):
        known("method", 3, METHODS)


@pytest.mark.parametrize("name", ["table1-lenet5", "a", "vogn_2", "lr=1e-3", "x" * 100])
def test_plain_names(name: str) -> None:
    assert plain_name("row name", name) == name
