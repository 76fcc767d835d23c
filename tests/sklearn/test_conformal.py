"""Split-conformal prediction against what it promises, which is arithmetic, not statistics of a model."""

import numpy as np
import pytest

from credo.errors import InvalidValue

pytest.importorskip("sklearn", reason="extra: sklearn")

from credo.sklearn import VariationalClassifier, VariationalRegressor, conformal
from credo.sklearn.module import location_and_scale


@pytest.mark.parametrize(("n", "coverage"), [(9, 0.9), (19, 0.9), (20, 0.9), (50, 0.8), (99, 0.99)])
def test_the_threshold_holds_exactly(n, coverage):
    """All n + 1 scores are equally likely to be the new one: count them."""
    scores = np.random.default_rng(n).permutation(n + 1).astype(float)
    inside = [scores[k] <= conformal.threshold(np.delete(scores, k), coverage) for k in range(n + 1)]
    assert coverage - 1e-9 <= np.mean(inside) < coverage + 1 / (n + 1)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_how_many_examples_are_needed(coverage):
    n = conformal.smallest_set(coverage)
    conformal.threshold(np.arange(n) * 1.0, coverage)
    with pytest.raises(InvalidValue, match=f"needs at least {n} calibration examples, and there are {n - 1}"):
        conformal.threshold(np.arange(n - 1) * 1.0, coverage)


def test_scores_and_sets_are_each_others_inverse():
    rng = np.random.default_rng(0)
    probs, classes = rng.dirichlet(np.ones(4), 200), rng.integers(0, 4, 200)
    scores = conformal.class_scores(probs, classes)
    limit = conformal.threshold(scores, 0.9)
    sets = conformal.class_sets(probs, limit)
    top = probs.argmax(1)
    np.testing.assert_array_equal(sets[np.arange(200), classes], (scores <= limit) | (classes == top))
    assert sets[np.arange(200), top].all()


def test_intervals_hold_on_data_that_the_model_is_wrong_about():
    """Noise with heavy tails and a network without training: the guarantee is of the procedure."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4000, 2))
    y = x[:, 0] + rng.standard_t(2, 4000)
    model = VariationalRegressor(
        max_iter=1,
        coverage=0.9,
        calibration_fraction=0.5,
        early_stopping=False,
        batch_size=200,
        random_state=0,
    ).fit(x[:2000], y[:2000])
    lower, upper = model.predict_interval(x[2000:]).T
    inside = (lower <= y[2000:]) & (y[2000:] <= upper)
    assert abs(inside.mean() - 0.9) < 0.035  # three standard errors: 1000 calibration and 2000 new examples
    classes = VariationalClassifier(
        max_iter=1,
        coverage=0.9,
        calibration_fraction=0.5,
        early_stopping=False,
        batch_size=200,
        random_state=0,
    ).fit(x[:2000], (y[:2000] > 0))
    sets = classes.predict_set(x[2000:])
    assert sets[np.arange(2000), (y[2000:] > 0).astype(int)].mean() > 0.9 - 0.035
    with pytest.raises(InvalidValue, match="coverage is None"):
        VariationalClassifier(max_iter=1).fit(x[:50], y[:50] > 0).predict_set(x)


def test_constant_columns_are_not_divided_by_zero():
    import torch

    center, scale = location_and_scale(torch.tensor([[1.0, 1e6], [3.0, 1e6]], dtype=torch.float64))
    assert center.tolist() == [2.0, 1e6]
    assert scale.tolist() == [1.0, 1.0]
