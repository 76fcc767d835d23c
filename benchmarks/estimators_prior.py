"""Which prior the estimators have by default, chosen on data that the table of `benchmarks.estimators` does not have.

    python -m benchmarks.estimators_prior --uci /data/uci --out prior.jsonl        # runs what is missing
    python -m benchmarks.estimators_prior --out prior.jsonl --show

scikit-learn's wine, iris and digits, a synthetic problem with wrong labels, and UCI sets with --uci; at most 400
examples each. A split holds a quarter back. The score of a setting on a data set is its NLL minus that of the best.
"""

import argparse
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits, load_iris, load_wine, make_classification
from sklearn.model_selection import train_test_split

import credo
from credo.sklearn import VariationalClassifier, VariationalRegressor

MOST = 400  # examples
UCI = ("yacht", "energy", "concrete", "bostonHousing")  # folders with data.txt and the numbers of its columns


def settings() -> dict[str, tuple[float, float, bool]]:
    """Name → τ, δ, early stopping."""
    named = {f"τ {t:g}": (t, 100.0, True) for t in (0.01, 0.03, 0.1, 0.3)}
    return named | {f"τ {t:g}, all epochs": (t, 100.0, False) for t in (0.03, 0.1)}


def data_sets(uci: Path | None) -> dict[str, tuple[Any, Any, bool]]:
    """Name → features, targets, whether they are classes."""
    wrong = make_classification(300, 10, n_informative=5, n_classes=3, flip_y=0.1, random_state=0)
    found = {name: (*load(return_X_y=True), True) for name, load in
             (("iris", load_iris), ("wine", load_wine), ("digits", load_digits))}  # fmt: skip
    found["wrong labels"] = (*wrong, True)
    for name in UCI if uci else ():
        table = np.loadtxt(uci / name / "data.txt")
        features, target = (
            np.loadtxt(uci / name / f"index_{part}.txt").astype(int) for part in ("features", "target")
        )
        found[name] = (table[:, features], table[:, target].squeeze(), False)
    rng = np.random.default_rng(0)
    kept = {name: rng.permutation(len(x))[:MOST] for name, (x, _, _) in found.items()}
    return {name: (x[kept[name]], y[kept[name]], classes) for name, (x, y, classes) in found.items()}


def nll(x: Any, y: Any, classes: bool, setting: tuple[float, float, bool], seed: int) -> float:
    tempering, precision, stops = setting
    xa, xb, ya, yb = train_test_split(x, y, random_state=seed, stratify=y if classes else None)
    optimizer = functools.partial(credo.VOGN, tempering=tempering, prior_precision=precision)
    options = {"optimizer": optimizer, "early_stopping": stops, "random_state": seed}
    if classes:
        model = VariationalClassifier(**options).fit(xa, ya)
        return float(-model.predict_log_proba(xb)[np.arange(len(yb)), yb].mean())
    mean, std = VariationalRegressor(**options).fit(xa, ya).predict(xb, return_std=True)
    return float((0.5 * ((yb - mean) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)).mean())


def show(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["data"] for row in rows))
    print(f"{'NLL above the best':24s}", *(f"{name:>13s}" for name in names), "         mean")
    means = {
        (s, name): np.mean([r["nll"] for r in rows if r["data"] == name and r["setting"] == s] or [np.nan])
        for s in settings()
        for name in names
    }
    best = {name: np.nanmin([means[s, name] for s in settings()]) for name in names}
    for s in settings():
        above = [means[s, name] - best[name] for name in names]
        print(f"{s:24s}", *(f"{a:13.4f}" for a in above), f"{np.mean(above):13.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--uci", type=Path)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(row["data"], row["setting"], row["seed"]) for row in rows}
    warnings.simplefilter("ignore")
    for seed in range(0 if given.show else given.splits):
        for name, (x, y, classes) in data_sets(given.uci).items():
            for label, setting in settings().items():
                if (name, label, seed) in done:
                    continue
                row = {"data": name, "setting": label, "seed": seed, "nll": nll(x, y, classes, setting, seed)}
                rows.append(row)
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
