"""An ensemble of runs against the mean of what its members predict."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from credo import predict
from credo.cli import main
from credo.errors import InvalidValue
from credo.experiments.ensembles import ensemble_of
from credo.experiments.recipe import Recipe, Row
from credo.experiments.records import read_record, write_record
from credo.experiments.results import Result, load_result
from credo.experiments.run import run
from tests.experiments.small import TRAININGS, small, three_blobs

ROWS = ("adam", "vogn")


def recipe(**changes: object) -> Recipe:
    rows = tuple(Row(name, None, replace(TRAININGS[name], **changes)) for name in ROWS)  # type: ignore[arg-type]
    return Recipe("small", "Small", "test", rows)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    """By row: three members, then the ensemble."""
    out = tmp_path_factory.mktemp("runs")
    found = run(recipe(validation_size=10), out=out, ensemble=3)
    return {name: [r for r in found if r.row in (name, f"{name}-ensemble-3")] for name in ROWS}


def test_points_are_averaged(results: dict[str, list[Result]]) -> None:
    *members, ensemble = results["adam"]
    for part in ("test", "validation"):
        mean = torch.stack([member.predictions()[f"{part}.probs"] for member in members]).mean(0)
        torch.testing.assert_close(ensemble.predictions()[f"{part}.probs"], mean)
    assert ensemble.row == "adam-ensemble-3"
    assert ensemble.metrics["members"] == 3
    assert ensemble.metrics["seconds_per_epoch"] == sum(m.metrics["seconds_per_epoch"] for m in members)


def test_posteriors_are_a_mixture(results: dict[str, list[Result]]) -> None:
    *members, ensemble = results["vogn"]
    probs = ensemble.predictions()["test.probs"]
    assert (members[0].predictions()["test.probs"] - probs).abs().max() > 1e-3
    each = torch.stack([member.predictions()["test.probs"] for member in members])
    assert (each.mean(0) - probs).abs().max() < 0.2  # other draws of the same members
    draws = ensemble.training["samples"]
    x = three_blobs().test.inputs
    assert isinstance(x, torch.Tensor)
    model = ensemble.model(small)
    again = predict(model, ensemble.belief(model, small), x, samples=draws, seed=0)
    torch.testing.assert_close(again.probs, probs)


def test_it_has_a_record_as_every_run(results: dict[str, list[Result]], tmp_path: Path) -> None:
    ensemble = results["vogn"][-1]
    lines = read_record(write_record(ensemble.folder, tmp_path / "record.jsonl"))
    assert [line["kind"] for line in lines] == ["run", "final", "calibration", "entropy"]
    assert lines[0]["ensemble"] == 3
    assert lines[1]["fitted_on"] == "validation"


def test_a_finished_ensemble_is_not_made_again_and_may_move(
    results: dict[str, list[Result]], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(results["adam"][0].folder.parents[3], tmp_path / "moved"))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*") if path.is_file()}
    found = run(recipe(validation_size=10), out=out, ensemble=3)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.*") if path.is_file()} == before
    assert all(member.is_relative_to(out) for member in found[-1].members)
    assert load_result(found[-1].members[2]).seed == 2


def test_members_must_be_finished_runs_of_the_same_settings(
    results: dict[str, list[Result]], tmp_path: Path
) -> None:
    folders = [member.folder for member in results["adam"][:-1]]
    training = replace(TRAININGS["adam"], validation_size=10)
    with pytest.raises(InvalidValue, match="at least 2 members"):
        ensemble_of(training, folders[:1], tmp_path / "e")
    with pytest.raises(InvalidValue, match="has not finished"):
        ensemble_of(training, [*folders, tmp_path / "none"], tmp_path / "e")
    with pytest.raises(InvalidValue, match="holds another run"):
        ensemble_of(replace(training, epochs=9), folders, tmp_path / "e")
    with pytest.raises(InvalidValue, match="should be the run with seed 0"):
        ensemble_of(training, folders[::-1], tmp_path / "e")
    assert not (tmp_path / "e" / "result.json").exists()


def test_the_command_makes_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "run",
        "digits",
        "--only",
        "adam",
        "--set",
        "epochs=1",
        "--set",
        "milestones=",
        "--out",
        str(tmp_path),
    ]
    assert main([*words, "--ensemble", "2"]) == 0
    assert "adam-ensemble-2/seed-0: accuracy" in capfd.readouterr().out
    assert main([*words, "--ensemble", "1"]) == 2
    assert "ensemble must be a whole number of at least 2" in capfd.readouterr().err
    inputs = tmp_path / "x.npy"
    import numpy

    numpy.save(inputs, numpy.zeros((2, 1, 8, 8), dtype=numpy.uint8))
    folder = tmp_path / "digits" / "cpu" / "adam-ensemble-2" / "seed-0"
    assert main(["predict", str(folder), str(inputs), "--out", "-"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 3
