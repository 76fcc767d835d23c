"""credo's scikit-learn estimators beside tuned MLPs of scikit-learn: accuracy or RMSE, NLL, coverage of intervals.

    python -m benchmarks.estimators                        # all three data sets, 20 splits
    python -m benchmarks.estimators --data diabetes --splits 5
    python -m benchmarks.estimators --alone                # without the MLPs, whose search takes most of the time

A split holds a quarter of the examples back. The MLP is tuned on the rest by three-fold cross-validation (width and
weight decay); a regressor's NLL is Gaussian, with the variance that cross-validation measured. credo's estimators have
their defaults. The intervals and sets are those of a second fit, with coverage=0.9.
"""

import argparse
import time
import warnings
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from credo.sklearn import VariationalClassifier, VariationalRegressor

LEVEL = 0.9
GRID = {"hidden_layer_sizes": [(32,), (100,)], "alpha": [1e-2, 1.0, 10.0]}


def california_like(examples: int = 2000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """House prices as in California's census: skewed incomes, two coordinates, and noise that grows with the price."""
    rng = np.random.default_rng(seed)
    income = rng.lognormal(1.2, 0.45, examples)
    age, rooms = rng.uniform(1, 52, examples), rng.lognormal(1.65, 0.25, examples)
    bedrooms, people = 0.2 * rooms * rng.lognormal(0, 0.1, examples), rng.lognormal(6.9, 0.7, examples)
    household = rng.lognormal(1.05, 0.2, examples)
    city = rng.integers(0, 3, examples)
    north = np.array([34.0, 37.7, 36.7])[city] + rng.normal(0, 0.8, examples)
    east = np.array([-118.2, -122.3, -119.8])[city] + rng.normal(0, 0.8, examples)
    coast = np.exp(-((east + 0.85 * (north - 34) + 118.6) ** 2) / 0.6)
    price = 0.35 * income + 0.9 * coast + 0.004 * age - 0.12 * household + 0.25 * np.log(rooms / household)
    value = np.clip(price * np.exp(rng.normal(0, 0.22, examples)) + 0.3, 0.15, 5.0)
    return np.column_stack([income, age, rooms, bedrooms, people, household, north, east]), value


DATA = {
    "breast_cancer": lambda: load_breast_cancer(return_X_y=True),
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "california_like": california_like,
}


def classifier_scores(x: Any, y: Any, seed: int, alone: bool) -> dict[str, float]:
    xa, xb, ya, yb = train_test_split(x, y, random_state=seed, stratify=y)

    def nll(model: Any) -> float:
        return float(-np.log(np.clip(model.predict_proba(xb)[np.arange(len(yb)), yb], 1e-15, 1)).mean())

    start = time.process_time()
    ours = VariationalClassifier(random_state=seed).fit(xa, ya)
    end = time.process_time()
    sets = VariationalClassifier(random_state=seed, coverage=LEVEL).fit(xa, ya).predict_set(xb)
    found = {
        "accuracy": ours.score(xb, yb),
        "NLL": nll(ours),
        "coverage": float(sets[np.arange(len(yb)), yb].mean()),
        "size": float(sets.sum(1).mean()),
        "seconds": end - start,
    }
    if alone:
        return found
    tuned = search(MLPClassifier(max_iter=400, random_state=seed), "neg_log_loss").fit(xa, ya)
    scores = {"MLP accuracy": tuned.best_estimator_.score(xb, yb), "MLP NLL": nll(tuned.best_estimator_)}
    return {**found, **scores, "MLP seconds": time.process_time() - end}


def regressor_scores(x: Any, y: Any, seed: int, alone: bool) -> dict[str, float]:
    xa, xb, ya, yb = train_test_split(x, y, random_state=seed)

    def nll(mean: Any, std: Any) -> float:
        return float((0.5 * ((yb - mean) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)).mean())

    def rmse(mean: Any) -> float:
        return float(np.sqrt(((yb - mean) ** 2).mean()))

    start = time.process_time()
    ours = VariationalRegressor(random_state=seed).fit(xa, ya)
    mean, std = ours.predict(xb, return_std=True)
    end = time.process_time()
    lower, upper = VariationalRegressor(random_state=seed, coverage=LEVEL).fit(xa, ya).predict_interval(xb).T
    found = {
        "RMSE": rmse(mean),
        "NLL": nll(mean, std),
        "coverage": float(((lower <= yb) & (yb <= upper)).mean()),
        "width/std(y)": float((upper - lower).mean() / ya.std()),
        "seconds": end - start,
    }
    if alone:
        return found
    tuned = search(MLPRegressor(max_iter=400, random_state=seed), "neg_mean_squared_error")
    scale = ya.std()  # scikit-learn's network does not scale its targets
    tuned.fit(xa, (ya - ya.mean()) / scale)
    plain = tuned.predict(xb) * scale + ya.mean()
    spread = np.full(len(yb), scale * np.sqrt(-tuned.best_score_))
    scores = {"MLP RMSE": rmse(plain), "MLP NLL": nll(plain, spread)}
    return {**found, **scores, "MLP seconds": time.process_time() - end}


def search(model: Any, scoring: str) -> Any:
    prefix = type(model).__name__.lower()
    grid = {f"{prefix}__{name}": values for name, values in GRID.items()}
    return GridSearchCV(make_pipeline(StandardScaler(), model), grid, scoring=scoring, cv=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=DATA, nargs="*", default=list(DATA))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    for name in given.data:
        x, y = DATA[name]()
        score = classifier_scores if np.issubdtype(y.dtype, np.integer) else regressor_scores
        rows = [score(x, y, seed, given.alone) for seed in range(given.splits)]
        print(f"{name}, {len(x)} examples, {given.splits} splits: mean ± standard error")
        for key in rows[0]:
            values = np.array([row[key] for row in rows])
            print(f"  {key:14s} {values.mean():9.4f} ± {values.std(ddof=1) / np.sqrt(len(values)):.4f}")
        if given.alone:
            continue
        gains = np.array([row["MLP NLL"] - row["NLL"] for row in rows])
        print(
            f"  {'NLL gain':14s} {gains.mean():9.4f} ± {gains.std(ddof=1) / np.sqrt(len(gains)):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
