"""What a run does besides being resumed: it is determined, watches itself, stops when asked, and leaves its files."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo import load_posterior, predict
from credo.data import Examples, PadCropFlip, Splits
from credo.errors import CredoError, InvalidValue, NonFiniteError
from credo.experiments.checkpoint import equal
from credo.experiments.recipe import Training
from credo.experiments.results import load_results
from credo.experiments.train import train
from credo.experiments.watchers import Several, Watcher
from tests.experiments.small import (
    TRAININGS,
    VOGN,
    blobs,
    last_state,
    same_metrics,
    small,
    three_blobs,
)

LOG_KEYS = (
    "epoch lr tempering train_accuracy train_nll accuracy nll brier ece auroc refused seconds".split()  # noqa: SIM905
)


@pytest.mark.parametrize("method", TRAININGS)
def test_a_seed_determines_a_run_and_the_global_stream_is_left_alone(tmp_path: Path, method: str) -> None:
    before = torch.get_rng_state()
    first = train(TRAININGS[method], 1, tmp_path / "a")
    torch.rand(3)
    moved = torch.get_rng_state()
    second = train(TRAININGS[method], 1, tmp_path / "b")
    other = train(TRAININGS[method], 2, tmp_path / "c")
    assert torch.equal(torch.get_rng_state(), moved)
    torch.set_rng_state(before)
    assert same_metrics(first, second)
    assert not same_metrics(first, other)
    assert equal(last_state(tmp_path / "a"), last_state(tmp_path / "b"))


@pytest.mark.parametrize("method", TRAININGS)
def test_the_files_of_a_run(tmp_path: Path, method: str) -> None:
    result = train(TRAININGS[method], 0, tmp_path / "some" / "run")
    assert [list(row) for row in result.log] == [LOG_KEYS] * 3
    assert not (result.folder / "lock").exists()
    config = json.loads((result.folder / "config.json").read_text())
    assert config["training"]["method"] == method
    assert {"credo", "torch", "python"} <= config["versions"].keys()
    assert {"cores", "processor"} <= config["machine"].keys()
    stored = result.predictions()
    assert result.metrics["accuracy"] == credo.metrics.accuracy(stored["test.probs"], stored["test.targets"])
    assert [found.folder for found in load_results(tmp_path)] == [tmp_path / "some" / "run"]


@pytest.mark.parametrize("method", TRAININGS)
def test_a_result_gives_back_the_model_and_what_it_believes(tmp_path: Path, method: str) -> None:
    training = TRAININGS[method]
    result = train(training, 4, tmp_path)
    model = result.model(factory=training.model)
    found = credo.predict(model, result.belief(model), blobs(33, 1).inputs, samples=3, seed=4)
    torch.testing.assert_close(found.probs, result.predictions()["test.probs"])


def test_a_registered_model_needs_no_factory(tmp_path: Path) -> None:
    training = replace(VOGN, model="mlp", model_options={"width": 5, "xavier": True})
    result = train(training, 0, tmp_path)
    assert next(tuple(p.shape) for p in result.model().parameters()) == (5, 2)
    with pytest.raises(InvalidValue, match="factory"):
        train(VOGN, 0, tmp_path / "own").model()


def test_training_learns(tmp_path: Path) -> None:
    result = train(replace(TRAININGS["adam"], epochs=20, milestones=()), 0, tmp_path)
    assert result.metrics["accuracy"] > 0.8
    assert result.metrics["train_nll"] < result.log[0]["train_nll"]
    assert result.metrics["epochs"] == 20


def test_schedules_reach_the_optimiser(tmp_path: Path) -> None:
    """4 steps an epoch, 2 of warm-up, decay after epoch 2; τ from .1 to 1 over 8 steps."""
    log = train(VOGN, 0, tmp_path).log
    assert [row["lr"] for row in log] == pytest.approx([5e-3, 5e-3, 5e-4])
    assert [row["tempering"] for row in log] == pytest.approx([0.55, 1.0, 1.0])


def test_vectorised_samples_are_the_same_run(tmp_path: Path) -> None:
    settings = {"lr": 5e-3, "damping": 1e-2, "mc_samples": 3}
    plain = replace(VOGN, model="mlp", model_options={"width": 6}, settings=settings)
    one = train(plain, 0, tmp_path / "one")
    other = train(replace(plain, settings={**settings, "vectorized": True}), 0, tmp_path / "other")
    for key in ("train_accuracy", "train_nll", "nll", "accuracy"):
        assert one.metrics[key] == pytest.approx(other.metrics[key], rel=1e-4)


def small_convolution() -> nn.Module:
    layers = nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 8), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(8, 3))


def test_bayes_by_backprop_trains_with_fewer_samples_for_convolutions(tmp_path: Path) -> None:
    shared = {"lr": 5e-3, "mc_samples": 4, "convolution_samples": 1}
    plain = replace(VOGN, method="bbb", model=small_convolution, settings=shared)
    one = train(plain, 0, tmp_path / "one")
    other = train(replace(plain, settings={**shared, "vectorized": True}), 0, tmp_path / "other")
    for key in ("train_accuracy", "train_nll", "nll", "accuracy"):
        assert one.metrics[key] == pytest.approx(other.metrics[key], rel=1e-3)


def test_held_out_classes_become_the_unfamiliar_ones(tmp_path: Path) -> None:
    result = train(replace(VOGN, model="mlp", held_out_classes=(1,)), 0, tmp_path)
    kept = result.predictions()
    assert kept["test.probs"].shape == (22, 2)
    assert set(kept["test.targets"].tolist()) == {0, 1}
    assert kept["ood.held_out.probs"].shape == (11, 2)
    assert set(kept["ood.held_out.targets"].tolist()) == {1}
    expected = credo.metrics.ood_auroc(kept["test.probs"], kept["ood.held_out.probs"])
    assert result.metrics["ood_auroc.held_out"] == expected
    assert "ood_fpr95.held_out" in result.metrics
    assert result.facts["inputs"]["classes"] == ["red", "blue"]


@pytest.mark.parametrize("held_out", [(3,), (-1,), (0, 1)])
def test_held_out_classes_must_exist_and_leave_two(tmp_path: Path, held_out: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue, match="held_out_classes"):
        train(replace(VOGN, held_out_classes=held_out), 0, tmp_path)


def test_subsets(tmp_path: Path) -> None:
    result = train(replace(VOGN, train_size=32, test_size=10), 0, tmp_path)
    assert result.metrics["steps"] == 6
    assert len(result.predictions()["test.probs"]) == 10
    assert last_state(tmp_path)["learner"]["optimizer"]["credo"]["settings"]["data_size"] == 32


def pictures() -> Splits:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, 6, 6), dtype=torch.uint8, generator=generator)
    examples = Examples(images, torch.arange(40) % 2)
    return Splits("pictures", examples, examples, ("a", "b"), augmentation=PadCropFlip(pad=1, rho=7.0))


@pytest.mark.parametrize(
    ("augment", "settings", "rho"), [(True, {}, 7.0), (True, {"augmentation": 2.0}, 2.0), (False, {}, 1.0)]
)
def test_the_augmentation_tells_its_rho(
    tmp_path: Path, augment: bool, settings: dict[str, Any], rho: float
) -> None:
    training = Training("vogn", "mlp", pictures, settings, {"width": 4}, 2, 20, augment=augment, samples=2)
    train(training, 0, tmp_path)
    assert last_state(tmp_path)["learner"]["optimizer"]["credo"]["settings"]["augmentation"] == rho


def test_augment_without_an_augmentation(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="has no augmentation"):
        train(replace(VOGN, augment=True), 0, tmp_path)


def line() -> Splits:
    x = torch.linspace(-1, 1, 48).unsqueeze(1)
    return Splits("line", Examples(x, 2 * x + 1), Examples(x + 0.01, 2 * x + 1.02))


@pytest.mark.parametrize("method", ["adam", "vogn"])
def test_regression(tmp_path: Path, method: str) -> None:
    settings = {"lr": 0.02, "noise_variance": 0.25}
    training = Training(method, "mlp", line, settings, {"width": 16}, 20, 16, task="regression", samples=4)
    result = train(training, 0, tmp_path)
    kept = result.predictions()
    error = (kept["test.mean"] - kept["test.targets"]).square().mean().sqrt()
    assert result.metrics["rmse"] == pytest.approx(error.item(), rel=1e-5)
    assert result.metrics["rmse"] < 0.6
    normal = torch.distributions.Normal(kept["test.mean"], kept["test.variance"].sqrt())
    assert result.metrics["nll"] == pytest.approx(
        -normal.log_prob(kept["test.targets"]).mean().item(), rel=1e-4
    )
    assert math.isnan(result.log[0]["train_accuracy"])


class Poisoned(nn.Module):
    """A network whose output is NaN in some of its training passes."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.inner, self.bad, self.calls = nn.Linear(2, 3), bad, 0

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        if self.training:
            self.calls += 1
            if self.calls in self.bad:
                output = output * math.nan
        return output


@pytest.mark.parametrize("method", ["sgd", "adam", "ogn", "vogn"])
def test_refused_steps_are_counted_and_harmless(tmp_path: Path, method: str) -> None:
    settings = {"lr": 1e-3}
    training = replace(
        VOGN, method=method, model=lambda: Poisoned({2, 3, 7}), settings=settings, tempering_from=None
    )
    result = train(training, 0, tmp_path)
    assert [row["refused"] for row in result.log] == [2, 3, 3]
    assert math.isfinite(result.metrics["nll"])


@pytest.mark.parametrize("method", ["sgd", "vogn"])
def test_too_many_refused_steps_are_an_error(tmp_path: Path, method: str) -> None:
    bad = set(range(2, 40))
    training = replace(
        VOGN, method=method, model=lambda: Poisoned(bad), settings={"lr": 1e-3}, tempering_from=None
    )
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        train(training, 0, tmp_path)
    assert not (tmp_path / "lock").exists()


def test_watchers_see_every_step_and_epoch(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Noting(Watcher):
        def started(self, title: str, epochs: int, steps_per_epoch: int, step: int) -> None:
            seen.append((title, epochs, steps_per_epoch, step))

        def stepped(self, step: int) -> None:
            seen.append(step)

        def epoch_ended(self, row: Mapping[str, Any]) -> None:
            seen.append(f"epoch {row['epoch']}")

        def ended(self) -> None:
            seen.append("end")

    train(VOGN, 0, tmp_path, watcher=Several([Watcher(), Noting()]))
    start, *between, end = seen
    assert (start, end) == (("VOGN, seed 0", 3, 4, 0), "end")
    assert between == [1, 2, 3, 4, "epoch 1", 5, 6, 7, 8, "epoch 2", 9, 10, 11, 12, "epoch 3"]


def test_own_data_is_any_function() -> None:
    assert three_blobs().classes == ("red", "green", "blue")


def test_a_laplace_row_has_the_weights_of_its_adamw_row_and_a_spread_around_them(tmp_path: Path) -> None:
    laplace = TRAININGS["laplace"]
    point = replace(laplace, method="adamw", settings={"lr": 0.01})
    one, other = train(point, 3, tmp_path / "adamw"), train(laplace, 3, tmp_path / "laplace")
    mine, theirs = one.weights(), other.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    spread = load_posterior(tmp_path / "laplace" / "posterior.safetensors")
    assert spread.metadata["method"] == "Laplace"
    assert spread.deterministic == {"norm.weight", "norm.bias"}
    assert not torch.equal(one.predictions()["test.probs"], other.predictions()["test.probs"])


def test_a_swag_row_ends_at_the_mean_of_what_it_collected(tmp_path: Path) -> None:
    result = train(TRAININGS["swag"], 3, tmp_path)
    posterior = load_posterior(tmp_path / "posterior.safetensors")
    assert (posterior.metadata["method"], posterior.metadata["collected"]) == ("SWAG", 2)
    weights = result.weights()
    assert all(torch.equal(weights[name], mean) for name, mean in posterior.mean.items())
    model = result.model(small)
    x = three_blobs().test.inputs
    again = predict(model, result.belief(model), x, samples=3, seed=3).probs
    torch.testing.assert_close(again, result.predictions()["test.probs"])


def test_swag_that_could_collect_only_once_says_so(tmp_path: Path) -> None:
    settings = {**TRAININGS["swag"].settings, "collect_from": 3}
    with pytest.raises(CredoError, match="needs at least 2"):
        train(replace(TRAININGS["swag"], settings=settings), 3, tmp_path)
