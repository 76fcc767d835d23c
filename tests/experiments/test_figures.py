"""Figures: what is drawn is what was given; looking at them is for people."""

import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from credo.data.examples import Examples, Normalise
from credo.errors import InvalidValue
from credo.experiments import figures
from credo.experiments.build import RunData
from credo.experiments.figures.calibration import BINS, FEW, pooled
from credo.experiments.figures.least_certain import pictures_of
from credo.experiments.figures.style import COLOURS, looks
from credo.experiments.results import Result
from credo.metrics import calibration_curve
from tests.experiments.synthetic import write_run


@pytest.fixture
def results(tmp_path: Path) -> list[Result]:
    return [write_run(tmp_path, row, seed=seed, ood=("svhn",)) for row in ("vogn", "adam") for seed in (0, 1)]


def drawn(axes: Axes, label: str) -> numpy.ndarray:
    """(points, 2) of the line with that label."""
    return next(line for line in axes.lines if line.get_label() == label).get_xydata()


def test_calibration_curves_are_those_of_all_predictions_together(results: list[Result]) -> None:
    figure = figures.calibration_curves(results)
    assert figure is not None
    (axes,) = figure.axes
    for row, label in (("adam", "Adam"), ("vogn", "VOGN")):
        kept = [result.predictions() for result in results if result.row == row]
        together = calibration_curve(
            torch.cat([k["test.probs"] for k in kept]), torch.cat([k["test.targets"] for k in kept])
        )
        shown = together.examples >= FEW
        expected = torch.stack([together.confidence[shown], together.accuracy[shown]], 1)
        numpy.testing.assert_allclose(drawn(axes, label), expected.numpy(), atol=1e-12)
    diagonals = [line for line in axes.lines if line.get_xydata().tolist() == [[0, 0], [1, 1]]]
    assert len(diagonals) == 1
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1), (0, 1))


def test_rows_stand_in_the_recipes_order(results: list[Result]) -> None:
    figure = figures.calibration_curves(results)  # given vogn first; the recipe has adam first
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["Adam", "VOGN"]


def test_reliability_bars(results: list[Result]) -> None:
    figure = figures.reliability(results)
    assert figure is not None
    curve = pooled([result for result in results if result.row == "vogn"])
    assert curve is not None
    above, below = (
        next(axes for axes in figure.axes if axes.get_title("left") == "VOGN"),
        figure.axes[3],
    )
    heights = [bar.get_height() for bar in above.patches]
    numpy.testing.assert_allclose(heights, curve.accuracy, equal_nan=True)
    shares = [bar.get_height() for bar in below.patches]
    numpy.testing.assert_allclose(shares, curve.examples / curve.examples.sum())
    assert sum(shares) == pytest.approx(1)


def test_training_curves_are_means_over_seeds(results: list[Result]) -> None:
    figure = figures.training_curves(results)
    assert figure is not None
    accuracy, nll, by_time = figure.axes
    seeds = [result.log for result in results if result.row == "vogn"]
    epochs = numpy.array([row["epoch"] for row in seeds[0]])
    mean = {
        key: numpy.mean([[row[key] for row in log] for log in seeds], 0)
        for key in seeds[0][0]
        if key != "tempering"
    }
    seconds = numpy.cumsum(mean["seconds"])
    numpy.testing.assert_allclose(drawn(accuracy, "VOGN"), numpy.stack([epochs, 100 * mean["accuracy"]], 1))
    numpy.testing.assert_allclose(drawn(nll, "VOGN"), numpy.stack([epochs, mean["nll"]], 1))
    numpy.testing.assert_allclose(drawn(by_time, "VOGN"), numpy.stack([seconds, 100 * mean["accuracy"]], 1))
    dashed = [line for line in accuracy.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    assert any(numpy.allclose(line.get_ydata(), 100 * mean["train_accuracy"]) for line in dashed)


def test_entropy_histograms_are_densities(results: list[Result]) -> None:
    figure = figures.entropy_histograms(results)
    assert figure is not None
    assert len(figure.axes) == 2  # one set: methods side by side
    axes = next(axes for axes in figure.axes if axes.get_title("left").startswith("VOGN: SVHN"))
    kept = [result.predictions() for result in results if result.row == "vogn"]
    bars = [patch for patch in axes.patches if hasattr(patch, "get_height")]
    for k, key in enumerate(("test.entropy", "ood.svhn.entropy")):
        values = torch.cat([k[key] for k in kept]).numpy()
        heights = [bar.get_height() for bar in bars[k * BINS : (k + 1) * BINS]]
        expected, _ = numpy.histogram(values, BINS, (0, numpy.log(10)), density=True)
        numpy.testing.assert_allclose(heights, expected)
        assert sum(heights) * numpy.log(10) / BINS == pytest.approx(1)
    auroc = numpy.mean([result.metrics["ood_auroc.svhn"] for result in results if result.row == "vogn"])
    assert f"AUROC {auroc:.3f}" in axes.get_title("left")


def test_several_unfamiliar_sets_are_columns(tmp_path: Path) -> None:
    sets = ("svhn", "lsun_crop")
    found = [write_run(tmp_path, row, ood=sets, training={"ood": sets}) for row in ("adam", "vogn")]
    figure = figures.entropy_histograms(found)
    assert figure is not None
    titles = [axes.get_title("left").splitlines()[0] for axes in figure.axes]
    assert titles == ["Adam: SVHN", "Adam: LSUN (crop)", "VOGN: SVHN", "VOGN: LSUN (crop)"]


def test_sensitivity_finds_the_setting_that_varies(tmp_path: Path) -> None:
    found = [
        write_run(
            tmp_path,
            f"delta-{delta}",
            recipe="mine",
            seed=seed,
            training={"settings": {"lr": 1e-3, "prior_precision": delta}},
            metrics={"accuracy": 0.5 + 0.01 * seed + delta / 1e4},
        )
        for delta in (100.0, 1.0, 10.0)
        for seed in (0, 1)
    ]
    figure = figures.sensitivity(found)
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_xlabel() == "prior precision δ"
    assert axes.get_xscale() == "log"
    line = axes.lines[0].get_xydata()
    numpy.testing.assert_allclose(line, [[d, 100 * (0.505 + d / 1e4)] for d in (1, 10, 100)])
    assert figures.sensitivity(found[:2]) is None  # one row: nothing varies


# Inputs


def run_data(inputs: torch.Tensor) -> RunData:
    examples = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    classes = tuple("abcdefghij")
    return RunData(examples, examples, {}, classes, Normalise(), None)


def test_the_most_uncertain_inputs_come_first(results: list[Result]) -> None:
    images = torch.randint(
        0, 17, (400, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    figure = figures.uncertain_inputs(results, run_data(images))
    assert figure is not None
    kept = next(result for result in results if result.row == "adam").predictions()
    order = kept["test.entropy"].argsort(descending=True)[:10]
    for axes, index in zip(figure.axes[:10], order, strict=True):
        shown = axes.images[0].get_array()
        numpy.testing.assert_allclose(shown, images[index, 0].numpy() / images[order].max().item())
        guess, sure = kept["test.probs"][index].argmax(), kept["test.probs"][index].max()
        assert axes.get_title() == f"{'abcdefghij'[guess]}? {100 * sure:.0f} %"
        assert axes.get_xlabel() == "a"


def test_what_is_no_image_is_not_drawn(results: list[Result]) -> None:
    assert figures.uncertain_inputs(results, run_data(torch.zeros(400, 13))) is None
    assert pictures_of(torch.rand(3, 64)).shape == (3, 8, 8, 1)  # type: ignore[union-attr]
    assert pictures_of(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)).shape == (2, 4, 4, 3)  # type: ignore[union-attr]


def test_overview_has_every_part(results: list[Result]) -> None:
    figure = figures.overview(results, run_data(torch.rand(400, 1, 8, 8)))
    assert figure is not None
    titles = [axes.get_title("left") for axes in figure.axes]
    assert {"Calibration", "Adam", "VOGN"} <= set(titles)
    assert sum(len(axes.images) for axes in figure.axes) == 10


# Looks, files, names


def test_a_method_has_one_colour_everywhere() -> None:
    assert looks(["vogn", "adam"])["vogn"].colour == looks(["adam", "mine", "vogn"])["vogn"].colour
    assert len(set(COLOURS.values())) == len(COLOURS)
    many = looks([f"prior-variance-{k}" for k in range(6)])
    assert len({to_hex(look.colour) for look in many.values()}) == 6


def test_files_are_what_they_say(results: list[Result], tmp_path: Path) -> None:
    figure = figures.calibration_curves(results)
    assert figure is not None
    paths = figures.save(figure, tmp_path / "new" / "curve-7.5e-4", kinds=("png", "svg", "pdf"))
    assert [path.name for path in paths] == ["curve-7.5e-4.png", "curve-7.5e-4.svg", "curve-7.5e-4.pdf"]
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG", b"<?xm", b"%PDF"]


def test_names_lead_to_figures_or_to_an_error(results: list[Result]) -> None:
    assert figures.draw("calibration_curves", results) is not None
    assert figures.draw("calibration_curves", []) is None
    with pytest.raises(InvalidValue, match="Did you mean 'calibration_curves'"):
        figures.draw("calibration_curve", results)


def test_missing_pieces_leave_a_figure_out(tmp_path: Path) -> None:
    plain = [write_run(tmp_path, "vogn")]
    assert figures.draw("entropy_histograms", plain) is None  # no unfamiliar data
    assert figures.draw("uncertain_inputs", plain, data_root=tmp_path / "nowhere") is None  # no data to show


def test_no_global_state_is_touched(results: list[Result], tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figures.save(figures.calibration_curves(results), tmp_path / "a", kinds=("svg",))  # type: ignore[arg-type]
    assert dict(matplotlib.rcParams) == before
    probe = "import sys, credo.experiments.figures; print('matplotlib.pyplot' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"
