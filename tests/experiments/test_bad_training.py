"""Settings that cannot be meant are refused before a folder is made (rows 64, 65)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from credo.errors import InvalidType, InvalidValue
from credo.experiments.train import train
from tests.experiments.small import TRAININGS, VOGN, small


@pytest.mark.parametrize("seed", [-1, 2**64, None, 1.5, "0", True])
def test_row_65_bad_seeds(tmp_path: Path, seed: Any) -> None:
    with pytest.raises((InvalidValue, InvalidType), match="seed"):
        train(VOGN, seed, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_row_65_the_seed_is_saved(tmp_path: Path) -> None:
    assert train(VOGN, 2**63 - 1, tmp_path).seed == 2**63 - 1
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 2**63 - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "vogm"}, "Did you mean 'vogn'"),
        ({"model": "lenet"}, "Did you mean 'lenet5'"),
        ({"model": "../evil"}, "unknown model"),
        ({"task": "classify"}, "classification"),
        ({"settings": {"dampnig": 1.0}}, "Did you mean 'damping'"),
        ({"settings": {"lr": "0.1"}}, r"settings\['lr'\] must be a int or float"),
        ({"settings": {"mc_samples": True}}, "mc_samples"),
        ({"settings": {"mc_samples": 1.5}}, "mc_samples"),
        ({"settings": {"vectorized": 1}}, "vectorized"),
        ({"settings": {"data_size": 5}}, "data_size"),
        ({"model": "mlp", "model_options": {"widht": 3}}, "Did you mean 'width'"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.0}, "epochs"),
        ({"batch_size": -4}, "batch_size"),
        ({"milestones": (0,)}, "milestones"),
        ({"decay": -1.0}, "decay"),
        ({"tempering_from": 2.0}, "tempering_from"),
        ({"augment": 1}, "augment"),
        ({"model": 3}, "model must be"),
        ({"data": None}, "data must be"),
    ],
)
def test_row_64_a_bad_training_is_refused_before_anything_is_made(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidValue, InvalidType), match=message):
        train(replace(VOGN, **change), 0, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tempering_needs_a_method_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="'sgd' has none"):
        train(replace(TRAININGS["sgd"], tempering_from=0.1), 0, tmp_path)


def test_mc_dropout_needs_a_model_that_drops(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="drops nothing"):
        train(replace(TRAININGS["mc_dropout"], model=small), 0, tmp_path)


@pytest.mark.parametrize("broken", [{"model": lambda: 3}, {"data": lambda: 3}])
def test_functions_that_make_something_else(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidType, match="must return"):
        train(replace(VOGN, **broken), 0, tmp_path)


def test_an_unknown_resume(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="resume"):
        train(VOGN, 0, tmp_path, resume="yes")
