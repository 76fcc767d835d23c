"""`credo.tune`: each trial is an ordinary training, judged on validation data; what goes wrong is said or recorded."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.data.examples import Examples, LazyInputs, Splits
from credo.errors import InvalidType, InvalidValue
from credo.experiments.recipe import Recipe, Row, Training
from credo.experiments.recipe_file import load_recipe
from credo.experiments.train import train
from credo.experiments.tuning import SPACES, outcome, trials, tune, tune_row
from credo.experiments.tuning.outcome import constructor
from tests.experiments.small import TRAININGS, blobs, small_with_dropout
from tests.experiments.tuned import TRAIN, VALIDATION, quick, signalling, trials_of

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def _without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "page", lambda *_: "")


def row(training: Training) -> Recipe:
    return Recipe("small", "Small", "mine", (Row("row", None, training),))


def splits() -> Splits:
    return Splits("blobs", blobs(120, 0), blobs(30, 1), ("red", "green", "blue"))


@pytest.mark.parametrize("method", ["vogn", "adam", "mc_dropout"])
def test_the_first_trial_is_what_credo_run_trains(tmp_path: Path, method: str) -> None:
    """Schedules, order, noise and initialisation: the same bits as the one training loop."""
    training = replace(TRAININGS[method], data=splits, train_size=60)
    found = tune_row(row(training), "row", trials=1, out=tmp_path / "tuned", seed=3, progress=False)
    kept, held = trials.cut(splits().train, 0.2)
    judged = replace(training, data=lambda: replace(splits(), train=kept, test=held))
    ordinary = train(judged, 3, tmp_path / "run")
    scores = {name: value for name, value in found.defaults.scores.items() if name != "nll_error"}
    assert scores == {name: ordinary.metrics[name] for name in scores}
    assert found.defaults.nll == ordinary.metrics["nll"]


class Untouchable(LazyInputs):
    def __len__(self) -> int:
        return 30

    def gather(self, indices: Tensor) -> Tensor:
        raise AssertionError("the test data were looked at")

    def subset(self, indices: Tensor) -> LazyInputs:
        raise AssertionError("the test data were looked at")


def test_the_test_data_are_never_looked_at(tmp_path: Path) -> None:
    guarded = replace(splits(), test=Examples(Untouchable(), torch.zeros(30, dtype=torch.int64)))
    training = replace(TRAININGS["vogn"], data=lambda: guarded)
    found = tune_row(row(training), "row", trials=2, out=tmp_path, progress=False)
    assert len(found.trials) == 2


def test_training_and_validation_share_no_example() -> None:
    examples = Examples(torch.arange(50.0)[:, None], torch.arange(50))
    train_part, held = trials.cut(examples, 0.3)
    assert (len(train_part), len(held)) == (35, 15)
    assert sorted([*train_part.targets.tolist(), *held.targets.tolist()]) == list(range(50))
    assert torch.equal(trials.cut(examples, 0.3)[1].targets, held.targets)


def test_the_search_finds_what_the_defaults_lack(tmp_path: Path) -> None:
    """A learning rate that is far too low is put right, and never for something worse."""
    found = quick(tmp_path, method="adam", settings={"lr": 1e-3}, trials=8, search=["lr"])
    assert found.best.nll == min(t.nll for t in found.complete) < found.defaults.nll
    assert found.best.settings["lr"] > 1e-3
    assert found.defaults.settings == {"lr": 1e-3}
    assert found.best.nll < 0.9 * found.defaults.nll


def test_a_trial_that_diverges_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from credo.experiments.learners import PlainLearner

    ordinary = PlainLearner.train_batch

    def train_batch(self: PlainLearner, inputs: Tensor, targets: Tensor) -> Any:
        too_high = self.optimizer.param_groups[0]["lr"] > 1e-3
        return ordinary(self, inputs * float("nan") if too_high else inputs, targets)

    monkeypatch.setattr(PlainLearner, "train_batch", train_batch)
    found = quick(tmp_path, method="adam", trials=6, epochs=5)
    failed = [t for t in found.trials if t.state == "failed"]
    assert failed
    assert len(found.trials) == 6
    assert all("10 steps in a row" in t.reason and t.settings["lr"] > 1e-3 for t in failed)  # type: ignore[operator]
    assert all(t.settings.get("lr", 1e-3) <= 1e-3 for t in found.complete)  # type: ignore[operator]
    assert f"{len(failed)} failed" in found.table()
    assert f"trial {failed[0].number} failed: 10 steps in a row" in found.table()
    assert trials_of(quick(tmp_path, method="adam", trials=6, epochs=5)) == trials_of(found)  # failures count


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * float("nan")
        return found


def test_where_all_diverge_the_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidValue, match=r"none of 2 trials is complete; trial 0, the defaults, failed: .*finite"
    ):
        quick(tmp_path, model=Broken, method="adam", trials=2)


def test_a_loader_does_as_well_as_tensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    train_set = TensorDataset(TRAIN.inputs, TRAIN.targets)
    loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=generator)
    held = DataLoader(TensorDataset(VALIDATION.inputs, VALIDATION.targets), batch_size=25)
    found = quick(tmp_path / "one", data=loader, validation=held, trials=3)
    generator.manual_seed(5)  # a new program would begin so
    assert trials_of(quick(tmp_path / "two", data=loader, validation=held, trials=1)) == trials_of(found)[:1]
    generator.manual_seed(5)
    assert trials_of(quick(tmp_path / "two", data=loader, validation=held, trials=3)) == trials_of(found)


def test_the_validation_nll_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """Against predict and evaluate by hand, on a model that does not move."""
    found = quick(tmp_path, method="sgd", settings={"lr": 1e-30}, search=["lr"], trials=1)
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        model = signalling()
    losses = nn.functional.cross_entropy(
        model(VALIDATION.inputs), VALIDATION.targets, reduction="none"
    ).double()
    assert found.defaults.nll == pytest.approx(losses.mean().item(), rel=1e-6)
    assert found.defaults.scores["nll_error"] == pytest.approx((losses.std() / 60**0.5).item(), rel=1e-5)


def test_a_score_is_the_mean_over_the_seeds(tmp_path: Path) -> None:
    both = quick(tmp_path / "both", seed=4, seeds=2, trials=2)
    each = [quick(tmp_path / str(seed), seed=seed, trials=1).defaults for seed in (4, 5)]
    assert each[0].nll != each[1].nll
    assert both.defaults.nll == pytest.approx((each[0].nll + each[1].nll) / 2, rel=1e-12)
    assert both.defaults.scores["ece"] == pytest.approx(sum(t.scores["ece"] for t in each) / 2, rel=1e-12)
    assert both.study.trials[0].intermediate_values[3] == each[0].nll


def test_regression_is_judged_by_its_nll(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 80)[:, None]
    found = quick(
        tmp_path,
        model=lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)),
        data=(x, 2 * x),
        validation=(x[::3], 2 * x[::3]),
        task="regression",
        settings={"noise_variance": 0.1},
        trials=3,
    )
    assert found.best.scores.keys() == {"rmse", "nll", "nll_error"}
    assert "noise_variance" not in found.constructor


@pytest.mark.parametrize("method", sorted(SPACES))
def test_every_method_has_the_same_door(tmp_path: Path, method: str) -> None:
    """Trials are judged by the posterior that the method gives at the end, and the line to paste is Python."""

    def model(dropout: float = 0.2) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))

    found = quick(tmp_path, model=model, method=method, trials=3)
    assert len(found.trials) == 3
    assert found.best.nll <= found.defaults.nll
    exec(found.constructor, {**NAMES, "model": model(), "train_set": range(60)})
    assert (found.folder / "tuning.html").exists()


@pytest.mark.parametrize("method", ["swag", "laplace"])
def test_what_follows_training_is_part_of_a_trial(tmp_path: Path, method: str) -> None:
    """Against the same training by hand, its posterior made by the public functions."""
    settings = {"laplace": {"structure": "diagonal"}, "swag": {"lr": 0.05}}[method]
    loaders = [DataLoader(TensorDataset(part.inputs, part.targets), 45) for part in (TRAIN, VALIDATION)]
    found = quick(
        tmp_path, data=loaders[0], validation=loaders[1], method=method, trials=1, settings=settings
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = signalling()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if method == "swag"
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    swag = credo.SWAG(model)
    for _ in range(3):
        for x, y in loaders[0]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        swag.collect(model)
    if method == "swag":
        swag.load_mean(model, loaders[0])
        posterior = swag.posterior()
    else:
        posterior = credo.laplace(model, loaders[0], "diagonal", validation=list(loaders[1]), samples=8)
    prediction = credo.predict(model, posterior, VALIDATION.inputs, samples=2)
    assert found.best.nll == pytest.approx(credo.evaluate(prediction, VALIDATION.targets)["nll"], rel=1e-4)


NAMES = {"credo": credo, "torch": torch}
LINES = [
    ("vogn", {}),
    ("vogn", {"lr_factor": 2.0, "noise_factor": 0.5, "damping_factor": 3.0}),
    ("vogn", {"lr": 0.02, "damping": 0.4, "prior_precision": 2.0, "tempering": 0.5}),
    ("ogn", {"lr_factor": 2.0}),
    ("ivon", {"lr": 0.1, "beta1": 0.8, "initial_curvature": 0.2}),
    ("bbb", {"lr": 0.01, "initial_log_variance": -7.5}),
    ("kfac", {"lr": 0.01, "damping": 0.1}),
    ("noisy_kfac", {"prior_precision": 3.0}),
    ("adam", {"lr": 0.01, "beta2": 0.99}),
    ("adamw", {"weight_decay": 0.1}),
    ("sgd", {}),
    ("swag", {"lr": 0.02, "collect_from": 3, "rank": 5}),
    ("laplace", {"weight_decay": 0.1, "structure": "diagonal", "labels": "data"}),
]


@pytest.mark.parametrize(("method", "settings"), LINES)
def test_the_line_to_paste_makes_the_optimiser_that_was_found(method: str, settings: dict[str, Any]) -> None:
    training = Training(method, "mlp", "digits", settings)
    model, train_set = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3)), range(60)
    scope: dict[str, Any] = {**NAMES, "model": model, "train_set": train_set}
    exec(constructor(training), scope)
    record = outcome.TrialRecord(0, "complete", 0.1, settings, {}, {}, 1, 1.0)
    built = outcome.Tuned(training, (record,), Path(), None).optimizer(model, data_size=60)
    pasted = scope["optimizer"]
    assert type(pasted) is type(built)
    for one, other in zip(pasted.param_groups, built.param_groups, strict=True):
        shared = one.keys() & other.keys() - {"params", "param_names"}
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}


def test_a_row_of_known_names_leaves_a_recipe_and_the_best_numbers(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    training = Training(
        "mc_dropout", "mlp", "digits", {"lr": 0.02, "nesterov": True}, {"dropout": 0.2, "width": 16}
    )
    small_row = replace(
        training, epochs=2, train_size=90, milestones=(1,), held_out_classes=(8, 9), decay=0.5
    )
    found = tune_row(row(small_row), "row", trials=3, out=tmp_path, progress=False)
    written = load_recipe(found.folder / "recipe.toml")
    assert written.name == "small-tuned"
    assert written.rows == (Row("row", None, found.training),)
    best = json.loads((found.folder / "best.json").read_text())
    assert best["settings"] == found.best.settings
    assert best["validation"]["best"]["nll"] == found.best.nll
    assert "dropout=" in found.constructor


def test_the_door_is_open() -> None:
    assert credo.tune is tune


def test_own_models_leave_no_recipe(tmp_path: Path) -> None:
    found = quick(tmp_path, trials=1)
    assert sorted(p.name for p in found.folder.iterdir()) == ["best.json", "study.db", "tuning.html"]


def test_a_dropout_rate_is_searched_where_the_model_takes_one(tmp_path: Path) -> None:
    def build(dropout: float = 0.2) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(dropout), nn.Linear(8, 3))

    found = quick(tmp_path, model=build, method="mc_dropout", trials=3)
    assert found.defaults.model_options == {"dropout": 0.2}
    assert len({t.model_options["dropout"] for t in found.trials}) == 3
    fixed = quick(tmp_path / "fixed", model=small_with_dropout, method="mc_dropout", trials=2)
    assert all(t.model_options == {} for t in fixed.trials)


@pytest.mark.parametrize(
    ("method", "name"), [(credo.VOGN, "vogn"), (torch.optim.Adam, "adam"), (credo.IVON, "ivon")]
)
def test_a_method_may_be_a_class(tmp_path: Path, method: type, name: str) -> None:
    assert quick(tmp_path, method=method, trials=1).folder.name == name


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield TRAIN.inputs, TRAIN.targets


LOADER = [(TRAIN.inputs, TRAIN.targets)]
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"validation": None}, InvalidValue, "validation data decide .* neither is given"),
    ({"validation_fraction": 0.5}, InvalidValue, "both are given"),
    ({"validation": None, "validation_fraction": 0.0}, InvalidValue, "validation_fraction must lie in"),
    ({"validation": None, "validation_fraction": 0.001}, InvalidValue, "leaves 90 for training and 0"),
    ({"validation": blobs(0, 0)}, InvalidValue, "validation has no examples"),
    ({"data": blobs(0, 0)}, InvalidValue, "data has no examples"),
    ({"validation": LOADER}, InvalidType, "validation must be .*not a loader"),
    ({"data": LOADER}, InvalidType, "validation must be a loader too"),
    ({"data": LOADER, "validation": None, "validation_fraction": 0.2}, InvalidValue, "loader cannot be cut"),
    ({"data": LOADER, "validation": LOADER}, InvalidValue, "data_size.* must be given"),
    ({"data": batches(), "validation": LOADER}, InvalidType, "iterated over anew"),
    ({"data": 3, "validation": LOADER}, InvalidType, "data must be .*got int"),
    ({"data": (TRAIN.inputs, TRAIN.targets[:-1])}, InvalidValue, "90 inputs do not fit 89"),
    ({"data": (TRAIN.inputs,)}, InvalidValue, "pair"),
    ({"method": "vogm"}, InvalidValue, "unknown method 'vogm'. Did you mean 'vogn'"),
    ({"method": torch.optim.Rprop}, InvalidType, "method must be a name or an optimiser's class"),
    ({"model": nn.Linear(2, 3), "epochs": 0}, InvalidValue, "epochs"),
    ({"model": 3}, InvalidType, "build_model must be a function"),
    ({"model": lambda: 3}, InvalidType, "model must return a torch.nn.Module"),
    ({"settings": {"lrr": 0.1}}, InvalidValue, "'lrr'. Did you mean 'lr'"),
    ({"search": []}, InvalidValue, "search space of 'vogn' is empty"),
    ({"seed": -1}, InvalidValue, "seed"),
    ({"seeds": 0}, InvalidValue, "seeds must"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_what_cannot_be_searched_is_refused_before_a_folder_is_made(
    tmp_path: Path, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        quick(tmp_path, **change)
    assert list(tmp_path.iterdir()) == []
