"""The commands at work: a small run, its report, predictions on new inputs, data, and the demo."""

import csv
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from credo import cli, data
from credo.cli import exits
from credo.experiments.recipes import RECIPES
from credo.experiments.results import load_results

pytest.importorskip("tyro")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

SMALL = ("--set", "epochs=2", "--set", "train_size=200", "--set", "test_size=60")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run of every row of the demonstration."""
    out = tmp_path_factory.mktemp("runs with spaces and ümlaut")
    assert cli.main(["run", "digits", "--out", str(out), *SMALL]) == exits.OK
    return out


def of(runs: Path, row: str) -> Path:
    return runs / "digits" / "cpu" / row / "seed-0"


def numbers(runs: Path) -> list[dict[str, float]]:
    timeless = [
        {name: value for name, value in result.metrics.items() if "seconds" not in name}
        for result in load_results(runs)
    ]
    assert timeless
    return timeless


def test_a_run_leaves_its_folder_and_says_so(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (of(runs, "vogn") / "result.json").exists()
    assert (
        cli.main(["run", "digits", "--only", "vogn", "--out", str(runs), *SMALL]) == exits.OK
    )  # finished: no work
    out = capsys.readouterr().out
    assert "accuracy" in out
    assert f"credo report {runs}" in out


def test_resume_insists_on_something_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["run", "digits", "--only", "adam", "--resume", "--out", str(tmp_path), *SMALL])
        == exits.USAGE
    )
    assert "no checkpoint" in capsys.readouterr().err


def test_other_settings_in_a_finished_folder_are_refused(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = numbers(runs)
    words = ["run", "digits", "--only", "adam", "--out", str(runs), *SMALL, "--set", "lr=0.5"]
    assert cli.main(words) == exits.USAGE
    assert "holds another run" in capsys.readouterr().err
    assert numbers(runs) == before


def test_a_damaged_run_is_bad_data(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(of(runs, "vogn"), copy)
    model = copy / "model.safetensors"
    flipped = bytearray(model.read_bytes())
    flipped[-1] ^= 1
    model.write_bytes(flipped)
    np.save(tmp_path / "x.npy", np.zeros((1, 1, 8, 8), dtype=np.uint8))
    assert cli.main(["predict", str(copy), str(tmp_path / "x.npy"), "--out", "-"]) == exits.BAD_DATA
    assert "model.safetensors" in capsys.readouterr().err


def test_the_report_is_a_table_a_page_and_figures(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(runs)]) == exits.OK
    out = capsys.readouterr().out
    assert all(word in out for word in ("Adam", "MC-dropout", "VOGN"))
    assert "data:image/" in (runs / "report.html").read_text()
    assert "VOGN" in (runs / "report.md").read_text()


def test_a_report_of_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == exits.USAGE
    assert "no finished run" in capsys.readouterr().err


@pytest.mark.parametrize("row", ["adam", "mc-dropout", "vogn"])
def test_predictions_are_those_of_the_run(
    runs: Path, row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The inputs that the run was tested on: what the CSV says must be what the run stored."""
    result = next(result for result in load_results(runs) if result.row == row)
    stored = result.predictions()
    shown = _test_inputs(result.training["held_out_classes"])
    np.save(tmp_path / "x.npy", shown.numpy())
    assert cli.main(["predict", str(of(runs, row)), str(tmp_path / "x.npy"), "--out", "-"]) == exits.OK
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(lines[0]) == ["input", "class", "probability", "entropy", "mutual_information"]
    assert len(lines) == 60
    classes = result.facts["inputs"]["classes"]
    assert [line["class"] for line in lines] == [classes[k] for k in stored["test.probs"].argmax(-1).tolist()]
    found = torch.tensor([[float(line[name]) for name in ("probability", "entropy")] for line in lines])
    truth = torch.stack([stored["test.probs"].max(-1).values, stored["test.entropy"]], dim=1)
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["uint8", "float64", "unit", "images", "network"])
def test_digits_are_read_in_whatever_range_they_come(
    runs: Path, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """scikit-learn's count to 16, image files to 255: the answers are the same."""
    result = next(result for result in load_results(runs) if result.row == "adam")
    truth = result.predictions()["test.probs"].max(-1).values
    shown, place = _test_inputs(result.training["held_out_classes"]), tmp_path / "x.npy"
    bright = (shown.double() * 255 / 16).round().to(torch.uint8)
    if form == "images":
        place = tmp_path / "photos"
        place.mkdir()
        image = pytest.importorskip("PIL.Image")
        for k, pixels in enumerate(bright.numpy()):
            image.fromarray(pixels[0]).save(place / f"{k:03}.png")
    else:
        forms = {
            "uint8": bright,
            "float64": shown.double(),
            "unit": shown.double() / 16,
            "network": (shown.double() - 4.884) / 6.017,
        }
        np.save(place, forms[form].numpy())
    assert cli.main(["predict", str(of(runs, "adam")), str(place), "--out", "-"]) == exits.OK
    out, err = capsys.readouterr()
    found = torch.tensor([float(line["probability"]) for line in csv.DictReader(io.StringIO(out))])
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)
    words = {
        "uint8": "255, scaled to 0 … 16",
        "float64": "0 to 16",
        "unit": "0 to 1",
        "images": "255",
        "network": "",
    }
    assert words[form] in err
    assert bool(err) == (form != "network")


def test_numbers_that_are_neither_pixels_nor_normalised_are_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.full((2, 1, 8, 8), 100.5))
    assert cli.main(["predict", str(of(runs, "adam")), str(tmp_path / "x.npy"), "--out", "-"]) == exits.USAGE
    assert "range from 100.5 to 100.5" in capsys.readouterr().err


def _test_inputs(held_out: list[int]) -> torch.Tensor:
    test = data.load("digits").test
    familiar = test.subset((~torch.isin(test.targets, torch.tensor(held_out))).nonzero().flatten())
    inputs = familiar.take(60).inputs
    assert isinstance(inputs, torch.Tensor)
    return inputs


def test_predictions_of_an_image_folder_go_into_a_file(runs: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    for name in ("b.png", "a.png"):
        image.new("RGB", (20, 30), (90, 0, 0)).save(tmp_path / "photos" / name)
    words = ["predict", str(of(runs, "vogn")), str(tmp_path / "photos"), "--out", str(tmp_path / "out.csv")]
    assert cli.main(words) == exits.OK
    lines = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [line["input"] for line in lines] == ["a.png", "b.png"]


@pytest.mark.parametrize(
    "option", [("--samples", "0"), ("--batch-size", "0"), ("--seed", "-1")], ids=" ".join
)
def test_wrong_numbers_for_predict(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 1, 8, 8), dtype=np.uint8))
    words = [
        "predict",
        str(of(runs, "vogn")),
        str(tmp_path / "x.npy"),
        "--out",
        str(tmp_path / "o.csv"),
        *option,
    ]
    assert cli.main(words) == exits.USAGE
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "o.csv").exists()


def test_data_that_is_missing_is_bad_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "check", "cifar10", "--data", str(tmp_path)]) == exits.BAD_DATA
    assert str(tmp_path) in capsys.readouterr().err
    assert (
        cli.main(["run", "table1-lenet5", "--only", "adam", "--data", str(tmp_path), "--out", str(tmp_path)])
        == 3
    )
    assert cli.main(["data", "check", "digits"]) == exits.OK


def test_the_demo_twice_gives_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, threads = tmp_path / "demo", torch.get_num_threads()
    words = ["demo", "--methods", "vogn", "mc-dropout", "--seeds", "1", "--epochs", "2", "--out", str(out)]
    assert cli.main(words) == exits.OK
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("VOGN", "OOD AUROC", "report.html", ".png"))
    assert torch.get_num_threads() == threads
    first = numbers(out)
    assert len(first) == 2
    monkeypatch.setattr("credo.cli.demo.report.write", lambda out, results: [out])  # drawn once is enough
    assert cli.main(words) == exits.OK
    assert numbers(out) == first


def test_the_demonstration_compares_like_with_like() -> None:
    """The same network, data, epochs, batches and test-time samples for every method; only dropout may differ."""
    trainings = [row.cpu for row in RECIPES["digits"].rows]
    assert [training.method for training in trainings] == ["adam", "mc_dropout", "vogn"]
    for name in (
        "model",
        "data",
        "epochs",
        "batch_size",
        "train_size",
        "samples",
        "held_out_classes",
        "milestones",
    ):
        assert len({getattr(training, name) for training in trainings}) == 1
