"""The scale and the temperature against grids, closed forms and data whose scale is known."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.calibration.objectives import sharpening
from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior, KroneckerPosterior, Layer, Root
from tests.calibration.problems import NOISE, PROBLEMS, drawn, generator, measured, mlp, options, rows

EACH = pytest.mark.parametrize("name", PROBLEMS)


@EACH
@pytest.mark.parametrize("fit", [None, "scale"])
def test_a_posterior_widened_by_four_is_found_again(name: str, fit: str | None) -> None:
    """The objective is the same function, seen from another place: the draws use the same noise."""
    model, q, x, y = drawn(name)
    how = {**options(name), "fit": fit}
    own, wide = (credo.calibrate(model, p, (x, y), **how) for p in (q, q.scaled(4)))
    assert wide.nll_after == pytest.approx(own.nll_after, abs=1e-4)
    assert wide.nll_after < wide.nll_before
    assert 4 * wide.scale == pytest.approx(own.scale, rel=0.05)
    again = credo.calibrate(model, own.posterior.scaled(4), (x, y), **{**how, **_fitted(own)})  # type: ignore[union-attr]
    assert again.nll_after == pytest.approx(own.nll_after, abs=2e-4)
    assert own.scale < 0.02 or 4 * again.scale == pytest.approx(1, rel=0.15)  # below, the NLL is flat
    assert own.scale > 0.02 or fit is None


def _fitted(found: credo.Calibration) -> dict[str, object]:
    return {name: value for name, value in found.options.items() if name != "task"}


@pytest.mark.parametrize("name", ["mlp", "labels", "regression"])
def test_the_scale_of_data_that_have_one_is_found(name: str) -> None:
    model, q, x, y = drawn(name, n=4000, draws=500)
    found = credo.calibrate(model, q.scaled(4), (x, y), fit="scale", samples=60, **options(name))
    assert 4 * found.scale == pytest.approx(1, rel=0.15)
    assert found.posterior.metadata["scale"] == pytest.approx(4 * found.scale)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "wide"), [("mlp", False), ("regression", True)])
def test_few_samples_find_the_same_scale_as_many(name: str, wide: bool) -> None:
    """On average over draws. Without the correction they find a narrower one; of values, whose variance in few samples
    is too small, a wider one."""
    model, q, x, y = drawn(name, n=600, draws=300)

    def found(unbiased: bool, samples: int, seeds: int) -> float:
        how: dict[str, object] = {**options(name), "fit": "scale", "samples": samples, "unbiased": unbiased}
        fits = [credo.calibrate(model, q.scaled(4), (x, y), seed=k, **how) for k in range(seeds)]  # type: ignore[arg-type]
        return math.exp(sum(math.log(4 * fit.scale) for fit in fits) / seeds)

    truth = found(False, 100, 1)
    assert found(True, 8, 6) == pytest.approx(truth, rel=0.15)
    few = found(False, 8, 6) / truth
    assert few > 1.2 if wide else few < 0.92


@EACH
def test_without_the_bias_of_few_samples_it_is_found_again_too(name: str) -> None:
    model, q, x, y = drawn(name)
    how = {**options(name), "fit": "scale", "unbiased": True}
    own, wide = (credo.calibrate(model, p, (x, y), **how) for p in (q, q.scaled(4)))
    assert wide.nll_after == pytest.approx(own.nll_after, abs=1e-4)
    assert wide.nll_after < wide.nll_before
    assert 4 * wide.scale == pytest.approx(own.scale, rel=0.05)
    assert own.nll_after <= own.nll_before < measured(model, q, x, y, **options(name))


def test_the_members_of_an_ensemble_are_no_sample() -> None:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        models = [mlp() for _ in "abc"]
    x, ensemble = rows(50), credo.Ensemble(models)
    data = (x, (3 * x[:, :3]).argmax(1))
    plain, other = (credo.calibrate(models[0], ensemble, data, unbiased=u) for u in (False, True))
    assert plain == other


@EACH
def test_what_it_says_is_what_predict_and_evaluate_say(name: str) -> None:
    model, q, x, y = drawn(name)
    found = credo.calibrate(model, q.scaled(9), (x, y), **options(name))
    before = measured(model, q.scaled(9), x, y, **options(name))
    after = measured(model, found.posterior, x, y, **found.options)
    assert found.nll_before == pytest.approx(before, rel=1e-5)
    assert found.nll_after == pytest.approx(after, rel=1e-5)
    assert after < before


@EACH
@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 2.0, 50.0])
@pytest.mark.parametrize("fit", [None, "scale", "sharpness"])
def test_it_is_never_worse_than_what_was_given(name: str, factor: float, fit: str | None) -> None:
    model, q, x, y = drawn(name, n=40, draws=20)
    chosen = fit if fit != "sharpness" else "noise" if name == "regression" else "temperature"
    found = credo.calibrate(model, q.scaled(factor), (x, y), fit=chosen, samples=3, seed=7, **options(name))
    before = measured(model, q.scaled(factor), x, y, samples=3, seed=7, **options(name))
    after = measured(model, found.posterior, x, y, samples=3, seed=7, **found.options)
    assert after <= before + 1e-6 * (1 + abs(before))
    assert found.nll_after <= found.nll_before
    again = credo.calibrate(
        model, found.posterior, (x, y), fit=chosen, samples=3, seed=7, **_fitted(found), task=found.task
    )
    assert again.nll_after >= found.nll_after - 1e-3  # there was little left to gain


def test_what_changes_nothing_is_left_as_it_was() -> None:
    model, _, x, y = drawn("mlp")
    mean = dict(model.named_parameters())
    narrow = DiagonalPosterior(mean, {name: torch.full_like(p, 1e-20) for name, p in mean.items()})
    found = credo.calibrate(model, narrow, (x, y), fit="scale")
    assert found.posterior is narrow
    assert (found.scale, found.temperature, found.nll_after) == (1.0, 1.0, found.nll_before)


@pytest.mark.parametrize("name", ["mlp", "one logit", "labels"])
def test_no_point_of_a_grid_is_better(name: str) -> None:
    model, q, x, y = drawn(name)
    found = credo.calibrate(model, q, (x, y), **options(name))
    for scale in (0.01, 0.1, 0.3, 0.7, 1, 1.5, 3, 10):
        for temperature in (0.3, 0.6, 0.8, 1.0, 1.2, 1.6, 2.5, 5):
            nll = measured(model, q.scaled(scale), x, y, temperature=temperature, **options(name))
            assert found.nll_after <= nll + 2e-4


def test_the_temperature_of_a_point_is_that_of_temperature_scaling() -> None:
    """Guo et al.: min over T of the NLL of softmax(f/T), here by thirds on 1/T, in which it is convex."""
    model, _, x, y = drawn("mlp")
    with torch.no_grad():
        logits = model(x).double()
    low, high = 0.01, 10.0
    for _ in range(80):
        thirds = (2 * low + high) / 3, (low + 2 * high) / 3
        left, right = (
            float(torch.nn.functional.cross_entropy(logits * beta, y)) + sharpening(1 / beta) / len(y)
            for beta in thirds
        )
        low, high = (low, thirds[1]) if left < right else (thirds[0], high)
    found = credo.calibrate(model, "mean", (x, y))
    assert found.temperature == pytest.approx(1 / low, rel=3e-3)
    assert (found.posterior, found.scale) == ("mean", 1.0)
    certain = DiagonalPosterior(dict(model.named_parameters()), {})
    assert credo.calibrate(model, certain, (x, y)).temperature == found.temperature


def test_without_an_error_the_prior_bounds_the_temperature() -> None:
    """The NLL falls to 0 with T, and one error on other data would then cost without end."""
    model, _, x, _ = drawn("mlp")
    with torch.no_grad():
        logits = model(x)
    kept = logits.softmax(1).max(1).values > 0.6
    data = x[kept], logits.argmax(1)[kept]
    with pytest.warns(UserWarning, match="nothing but a weak prior bounds the temperature"):
        found = credo.calibrate(model, "mean", data)
    assert 0.05 < found.temperature < 0.5
    assert found.nll_after < found.nll_before
    wrong = (logits[kept].argmin(1)[:1], x[kept][:1])
    assert measured(model, "mean", wrong[1], wrong[0], temperature=found.temperature) < 100
    judged = [
        measured(model, "mean", *data, temperature=factor * found.temperature)
        + sharpening(factor * found.temperature) / len(data[1])
        for factor in (0.99, 1.0, 1.01)
    ]
    assert judged[1] == min(judged)


def test_dropout_and_ensembles_have_a_temperature() -> None:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3)) for _ in "abc"
        ]
    x = rows(200)
    y = (3 * x[:, :3]).argmax(1)
    for posterior in (credo.DropoutPosterior(models[0]), credo.Ensemble(models)):
        found = credo.calibrate(models[0], posterior, (x, y))
        assert found.posterior is posterior
        assert found.scale == 1.0
        best = min(measured(models[0], posterior, x, y, temperature=t / 20) for t in range(1, 400))
        assert found.nll_after <= best + 1e-5


def test_the_noise_of_a_point_is_the_mean_squared_error() -> None:
    model, _, x, y = drawn("regression")
    with torch.no_grad():
        truth = float((model(x) - y).square().mean())
    for noise in (None, 0.0, 1e-3, 20.0, torch.tensor([0.5, 0.5])):
        found = credo.calibrate(model, "mean", (x, y), task="regression", noise=noise)
        assert torch.as_tensor(found.noise).flatten()[0].item() == pytest.approx(truth, rel=3e-3)
        assert found.nll_after == pytest.approx(0.5 * (1 + math.log(2 * math.pi * truth)), abs=1e-5)
        assert found.options == {"task": "regression", "noise": found.noise}
    assert torch.as_tensor(found.noise).shape == (2,)


def test_noise_that_was_given_stays_when_only_the_scale_is_fitted() -> None:
    model, q, x, y = drawn("regression")
    found = credo.calibrate(model, q.scaled(4), (x, y), task="regression", noise=NOISE, fit="scale")
    assert found.noise == NOISE
    assert found.scale != 1
    without = credo.calibrate(model, q.scaled(4), (x, y), task="regression", fit="scale")
    assert without.noise is None
    assert without.nll_after <= without.nll_before


class Heteroscedastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_variance = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.log_variance(x)


def test_noise_of_the_model_leaves_the_scale_to_fit() -> None:
    model, x = Heteroscedastic(), rows(100)
    mean = dict(model.named_parameters())
    q = DiagonalPosterior(mean, {name: torch.full_like(p, 9.0) for name, p in mean.items()})
    y = torch.randn(100, 1, generator=generator())
    how = {"task": "regression", "noise": "model"}
    found = credo.calibrate(model, q, (x, y), **how)  # type: ignore[arg-type]
    assert found.noise == "model"
    assert found.scale < 0.5
    assert found.nll_after == pytest.approx(measured(model, found.posterior, x, y, **found.options), rel=1e-5)
    with pytest.raises(InvalidValue, match="fit='scale'"):
        credo.calibrate(model, q, (x, y), fit="noise", **how)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="nothing to fit"):
        credo.calibrate(model, "mean", (x, y), **how)  # type: ignore[arg-type]


def test_a_kronecker_posterior_is_scaled_too() -> None:
    model, x, g = nn.Linear(5, 3), rows(300), generator()
    root = Root(0.5 * torch.eye(3), torch.eye(6), torch.tensor(1.0))
    mean = {name: 3 * torch.randn(p.shape, generator=g) for name, p in model.named_parameters()}
    q = KroneckerPosterior(mean, {"": Layer("weight", "bias", root)}, {})
    w = q.sample_many(g, 300)
    logits = (w["weight"] @ x.unsqueeze(2)).squeeze(2) + w["bias"]
    y = torch.multinomial(logits.softmax(1), 1, generator=g).squeeze(1)
    own, wide = (credo.calibrate(model, p, (x, y), fit="scale") for p in (q, q.scaled(4)))
    assert isinstance(wide.posterior, KroneckerPosterior)
    assert 4 * wide.scale == pytest.approx(own.scale, rel=0.05)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda x, y: (x.numpy().astype("float64"), y.numpy()), id="arrays"),
        pytest.param(lambda x, y: DataLoader(TensorDataset(x, y), 77), id="loader"),
        pytest.param(lambda x, y: DataLoader(TensorDataset(x, y), 64, shuffle=True), id="shuffled"),
        pytest.param(lambda x, y: iter([(x[:50], y[:50]), (x[50:], y[50:])]), id="iterator"),
        pytest.param(lambda x, y: [{"input": x, "labels": y}], id="dicts"),
        pytest.param(lambda x, y: {"input": x, "labels": y}, id="dict"),
        pytest.param(lambda x, y: [([x], y), (x[:0], y[:0])], id="lists and an empty batch"),
        pytest.param(lambda x, y: ((x,), y.tolist()), id="a tuple of arguments and a list"),
    ],
)
def test_every_form_of_data_gives_the_same_numbers(data) -> None:  # type: ignore[no-untyped-def]
    model, q, x, y = drawn("mlp")
    truth, found = credo.calibrate(model, q, (x, y)), credo.calibrate(model, q, data(x, y))
    assert found.nll_after == pytest.approx(truth.nll_after, abs=1e-5)
    assert found.scale == pytest.approx(truth.scale, rel=0.02)
    split = credo.calibrate(model, q, (x, y), batch_size=99)
    assert split.nll_after == pytest.approx(truth.nll_after, abs=1e-5)


def test_nothing_is_touched() -> None:
    model, q, x, y = drawn("convolution and batch norm")
    model.train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    spread = {name: v.clone() for name, v in q.variance.items()}
    credo.calibrate(model, q, DataLoader(TensorDataset(x, y), 64, shuffle=True))
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, spread[name]) for name, value in q.variance.items())


def test_targets_that_are_ignored_do_not_count() -> None:
    model, q, x, y = drawn("mlp")
    padded = y.clone()
    padded[::3] = -100
    kept = padded != -100
    found, truth = credo.calibrate(model, q, (x, padded)), credo.calibrate(model, q, (x[kept], y[kept]))
    assert found.nll_after == pytest.approx(truth.nll_after, abs=1e-6)
    with pytest.raises(InvalidValue, match="no target that counts"):
        credo.calibrate(model, q, (x, torch.full_like(y, -100)))


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"fit": "all"}, InvalidValue, "fit must be .*'all'"),
        ({"fit": "noise"}, InvalidValue, "fit must be"),
        ({"posterior": "mean", "fit": "scale"}, InvalidValue, "'mean' has no variances.*fit='temperature'"),
        ({"posterior": "mean", "fit": "both"}, InvalidValue, "'mean'"),
        ({"posterior": "Mean"}, InvalidType, "'mean'"),
        ({"samples": 0}, InvalidValue, "samples"),
        ({"unbiased": True, "samples": 1}, InvalidValue, "samples=1"),
        ({"unbiased": 1}, InvalidType, "unbiased"),
        ({"seed": -1}, InvalidValue, "seed"),
        ({"batch_size": 0}, InvalidValue, "batch_size"),
        ({"temperature": 0}, InvalidValue, "temperature"),
        ({"temperature": math.nan}, InvalidValue, "temperature"),
        ({"task": "ranking"}, InvalidValue, "'ranking'"),
        ({"validation": rows(9)}, InvalidType, "without targets"),
        ({"validation": [rows(9)]}, InvalidValue, "no target"),
        ({"validation": [rows(9), torch.zeros(9)]}, InvalidValue, "no target"),
        ({"validation": []}, InvalidValue, "no examples"),
        ({"validation": (rows(0), torch.zeros(0, dtype=torch.long))}, InvalidValue, "no examples"),
        ({"validation": (rows(9), torch.zeros(8, dtype=torch.long))}, InvalidValue, r"\(8,\).*\(9,\)"),
        ({"validation": (rows(9), torch.zeros(9))}, InvalidType, "class indices"),
        ({"validation": (rows(9), torch.full((9,), 3))}, InvalidValue, "class 3"),
        (
            {"validation": (rows(9) * math.nan, torch.zeros(9, dtype=torch.long))},
            InvalidValue,
            "not a number",
        ),
        ({"validation": TensorDataset(rows(9), rows(9))}, InvalidType, "DataLoader"),
        ({"validation": None}, InvalidType, "NoneType"),
        (
            {"task": "regression", "validation": (rows(9), torch.full((9, 3), math.nan))},
            InvalidValue,
            "not finite",
        ),
        ({"task": "regression", "fit": "temperature"}, InvalidValue, "noise instead of a temperature"),
        ({"task": "regression", "temperature": 2.0}, InvalidValue, "noise="),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], error: type[Exception], word: str) -> None:
    model = mlp()
    mean = dict(model.named_parameters())
    q = DiagonalPosterior(mean, {name: torch.ones_like(p) for name, p in mean.items()})
    arguments = {"model": model, "posterior": q, "validation": (rows(9), torch.zeros(9).long())} | change
    with pytest.raises(error, match=word):
        credo.calibrate(**arguments)  # type: ignore[arg-type]
