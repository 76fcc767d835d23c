"""The estimators as scikit-learn's users meet them: its own checks, its tools, data frames, files, seeds."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import credo
from credo.errors import InvalidType, InvalidValue

pytest.importorskip("sklearn", reason="extra: sklearn")

from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator

from credo.sklearn import VariationalClassifier, VariationalRegressor

Classifier = partial(VariationalClassifier, random_state=0, max_iter=15)
Regressor = partial(VariationalRegressor, random_state=0, max_iter=15)


def linear(outputs):
    """Without torch's initialisation, which draws from the global generator."""
    net = nn.utils.skip_init(nn.Linear, 2, outputs)
    for p in net.parameters():
        p.data.fill_(0.1)
    return net


def line(examples=200, seed=0, noise=0.5):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (examples, 2))
    return x, 100 + 30 * x[:, 0] + 30 * noise * rng.normal(size=examples)


@pytest.mark.parametrize("estimator", [VariationalClassifier, VariationalRegressor])
def test_scikit_learns_own_checks_pass(estimator):
    results = check_estimator(estimator(max_iter=40, random_state=0), on_skip=None)
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    skipped = [result["check_name"] for result in results if result["status"] == "skipped"]
    assert skipped in ([], ["check_array_api_input"])  # which asks for an environment variable
    assert len(results) > 40


def test_pipelines_searches_and_cross_validation():
    x, y = load_wine(return_X_y=True)
    search = GridSearchCV(
        Classifier(), {"hidden_layer_sizes": [(8,), (16, 16)]}, cv=2, scoring="neg_log_loss"
    )
    assert make_pipeline(search).fit(x, y).score(x, y) > -0.2
    model = make_pipeline(PolynomialFeatures(), Regressor(max_iter=60))
    assert cross_val_score(model, *line(), cv=2).min() > 0.5


def test_clones_have_the_parameters_and_nothing_learned():
    net = linear(2)
    model = Regressor(module=net, coverage=0.8, noise="constant")
    copy = clone(model)
    assert copy.get_params()["coverage"] == 0.8
    assert copy.get_params()["noise"] == "constant"
    assert copy.module is not net
    assert torch.equal(copy.module.weight, net.weight)
    assert not hasattr(copy, "posterior_")


def test_data_frames_in_and_out():
    pandas = pytest.importorskip("pandas", reason="extra: sklearn")
    x, y = line()
    frame = pandas.DataFrame(x, columns=["speed", "load"], index=[f"row {i}" for i in range(len(x))])
    model = Regressor().fit(frame, y)
    assert list(model.feature_names_in_) == ["speed", "load"]
    found = model.predict_uncertainty(frame)
    assert list(found.columns) == ["prediction", "aleatoric", "epistemic", "lower", "upper"]
    assert list(found.index) == list(frame.index)
    assert (found["lower"] < found["prediction"]).all()
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["load", "speed"]])
    labelled = Classifier().fit(frame, np.where(y > 100, "high", "low"))
    assert set(labelled.predict_uncertainty(frame)["prediction"]) == {"high", "low"}


def test_the_table_adds_up():
    x, y = line()
    model = Regressor().fit(x, y)
    mean, std = model.predict(x, return_std=True)
    table = model.predict_uncertainty(x)
    np.testing.assert_array_equal(table["prediction"], mean)
    np.testing.assert_allclose(np.hypot(table["aleatoric"], table["epistemic"]), std)
    np.testing.assert_allclose(table["upper"] - mean, 1.6448536 * std, rtol=1e-6)
    probabilities = Classifier().fit(x, y > 100)
    table, probs = probabilities.predict_uncertainty(x), probabilities.predict_proba(x)
    entropy = -(probs * np.log(probs)).sum(1)
    np.testing.assert_allclose(table["aleatoric"] + table["epistemic"], entropy, rtol=1e-9)
    assert ((table["lower"] <= probs.max(1) + 1e-9) | (table["upper"] >= probs.max(1))).all()


@pytest.mark.parametrize("make", [Classifier, Regressor])
def test_a_seed_is_reproducible_and_no_global_stream_is_touched(make):
    x, y = line(100)
    y = y > 100 if make is Classifier else y
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    models = [make(random_state=seed).fit(x, y) for seed in (3, 3, 4, None)]
    answers = [model.predict_uncertainty(x)["epistemic"] for model in models]
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(np.random.get_state()[1], numpys)
    np.testing.assert_array_equal(answers[0], answers[1])
    assert all((answers[0] != other).any() for other in answers[2:])


@pytest.mark.parametrize("make", [Classifier, partial(Regressor, coverage=0.9)])
def test_files(make, tmp_path):
    x, y = line()
    y = np.where(y > 100, "high", "low") if make is Classifier else y
    model = make().fit(x, y)
    model.save(tmp_path / "model.safetensors")
    loaded = type(model).load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict_uncertainty(x), model.predict_uncertainty(x))
    assert loaded.get_params() == model.get_params()
    if make is not Classifier:
        np.testing.assert_array_equal(loaded.predict_interval(x), model.predict_interval(x))
    other = VariationalRegressor if make is Classifier else VariationalClassifier
    with pytest.raises(InvalidValue, match=f"holds a {type(model).__name__}"):
        other.load(tmp_path / "model.safetensors")
    again = loaded.partial_fit(x, y)  # the posterior is a prior like any other
    assert again.n_fits_ == 2


def test_modules_and_optimisers_of_ones_own(tmp_path):
    x, y = line()
    net = linear(1)
    before = [p.clone() for p in net.parameters()]
    model = Regressor(module=net, noise="constant", optimizer=credo.IVON, max_iter=80).fit(x, y)
    assert model.score(x, y) > 0.5
    assert model.posterior_.metadata["method"] == "IVON"
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    assert model.predict(x).dtype == np.float32  # the module's own type
    built = Classifier(module=lambda inputs, outputs: nn.Linear(inputs, outputs)).fit(x, y > 100)
    assert built.score(x, y > 100) > 0.8
    model.save(tmp_path / "own.safetensors")
    with pytest.raises(InvalidValue, match=r"module of its own.*module="):
        VariationalRegressor.load(tmp_path / "own.safetensors")
    loaded = VariationalRegressor.load(tmp_path / "own.safetensors", module=linear(1), optimizer=credo.IVON)
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"module": linear(3)}, InvalidValue, r"answers 1 examples with \(1, 3\).*\(1, 2\)"),
        ({"module": "mlp"}, InvalidType, "module must be a torch.nn.Module"),
        ({"module": lambda i, o: 3}, InvalidType, "must return a torch.nn.Module"),
        ({"optimizer": lambda m, **_: torch.optim.Adam(m.parameters())}, InvalidType, "credo optimiser"),
        ({"max_iter": 0}, InvalidValue, "max_iter must be at least 1, got 0"),
        ({"coverage": 1.2}, InvalidValue, "coverage must be below 1"),
        ({"coverage": 0.999}, InvalidValue, "at least 999 calibration examples"),
        ({"noise": "loud"}, InvalidValue, "noise must be"),
        ({"random_state": "zero"}, InvalidType, "random_state must be an int"),
    ],
)
def test_what_cannot_be_meant_is_named(wrong, error, message):
    with pytest.raises(error, match=message):
        VariationalRegressor(**wrong).fit(*line(50))


def test_the_noise_is_learned():
    x, y = line(600, noise=0.5)  # a standard deviation of 15
    for noise in ("constant", "input"):
        model = VariationalRegressor(random_state=0, max_iter=60, noise=noise).fit(x, y)
        _, std = model.predict(x, return_std=True)
        assert abs(std.mean() - 15) < 2
    known = Regressor(noise=225.0).fit(x, y).predict_uncertainty(x)["aleatoric"]
    np.testing.assert_allclose(known, 15, rtol=1e-9)
    rng = np.random.default_rng(0)
    uneven = 100 + rng.normal(size=600) * np.where(x[:, 1] > 0, 30, 3)
    spread = (
        VariationalRegressor(random_state=0, max_iter=60).fit(x, uneven).predict_uncertainty(x)["aleatoric"]
    )
    assert spread[x[:, 1] > 0.5].mean() > 4 * spread[x[:, 1] < -0.5].mean()


def test_one_variance_is_the_mean_squared_residual_of_the_last_epoch():
    from credo.sklearn.module import Values
    from credo.sklearn.regressor import _GaussianNlls

    x, y = (torch.from_numpy(a) for a in line(30))
    module = Values(nn.Linear(2, 1).double(), x, y, per_input=False)
    problem = _GaussianNlls(module, x, y, True)
    problem.losses(torch.arange(20))
    problem.losses(torch.arange(20, 30))
    problem.end_epoch()
    mean, log_variance = module(x)
    squares = (y - mean).square().mean()
    assert math.isclose(float(log_variance[0].exp()), float(squares), rel_tol=1e-12)  # in the targets' units


def test_partial_fit_takes_the_posterior_as_the_prior():
    given = []

    def make(module, **options):
        given.append(options.get("prior"))
        return credo.VOGN(module, **options)

    x, y = line(300)
    model = Classifier(optimizer=make)
    model.partial_fit(x[:150], y[:150] > 100, classes=[False, True])
    first = model.posterior_
    model.partial_fit(x[150:], y[150:] > 100)
    assert given == [None, first]
    with pytest.raises(InvalidValue, match=r"classes \[.*7.*\], which are not in"):
        model.partial_fit(x, np.full(len(x), 7))
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        Classifier().partial_fit(x, y > 100)


def test_what_was_learned_first_is_kept():
    """Two halves of the input, one after the other: the second call must not forget the first."""
    x, _ = line(400)
    x = x[np.argsort(x[:, 0])]
    y = np.abs(x[:, 0])  # a line on either side
    left, right = (x[:200], y[:200]), (x[200:], y[200:])
    both = Regressor(max_iter=40).partial_fit(*left)
    before = both.score(*right)
    both.partial_fit(*right)
    assert both.score(*left) > 0 > -2 > Regressor(max_iter=40).partial_fit(*right).score(*left)
    assert both.score(*right) > 0 > -2 > before
