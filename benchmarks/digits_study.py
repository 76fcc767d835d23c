"""Adam, MC-dropout and VOGN on digits, with the same search for each: `python -m benchmarks.digits_study`.

Fixed before any run: eight settings a method, 300 training images, 100 epochs. For each method the setting with the
lowest NLL on validation images, averaged over three random splits of the data, is trained anew on ten other splits and
scored on their test images. A split's validation and test images are never trained on; the digits 8 and 9 are
unfamiliar throughout. Prints the choice, then means over the ten splits with their standard errors; then, split by
split, how much each method's numbers lie above VOGN's.
"""

import argparse
import itertools
import math
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from credo.data import Examples, Splits, load
from credo.experiments.recipe import Training
from credo.experiments.train import train

TUNING_SPLITS, TEST_SPLITS = range(100, 103), range(10)
MEASURES = ("accuracy", "nll", "ece", "ood_auroc.held_out", "ood_fpr95.held_out")
BASE = Training(
    "adam",
    "mlp",
    "digits",
    epochs=100,
    batch_size=32,
    train_size=300,
    milestones=(60,),
    samples=30,
    held_out_classes=(8, 9),
)


def grid(method: str, **axes: tuple[float, ...]) -> list[Training]:
    """Every combination; a "dropout" is the model's option, all others are the optimiser's."""
    found = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        model = {"dropout": chosen.pop("dropout")} if "dropout" in chosen else {}
        found.append(replace(BASE, method=method, settings=chosen, model_options=model))
    return found


GRIDS = {
    "Adam": grid("adam", lr=(1e-3, 3e-3), weight_decay=(0.0, 3e-4, 1e-3, 3e-3)),
    "MC-dropout": grid("mc_dropout", lr=(1e-2, 3e-2), weight_decay=(3e-4, 1e-3), dropout=(0.1, 0.3)),
    "VOGN": grid("vogn", lr=(2.5e-2, 5e-2), damping=(0.5, 1.0), prior_precision=(0.3, 1.0)),
}


def split(number: int, *, tuning: bool) -> Splits:
    """The number-th way to deal out all digits; when tuning, what would be the test part is left alone."""
    whole = load("digits", Path())
    every = Examples(
        torch.cat([whole.train.inputs, whole.test.inputs]),
        torch.cat([whole.train.targets, whole.test.targets]),
    )
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(number))
    test, validation, rest = order[:450], order[450:900], order[900:]
    return replace(whole, train=every.subset(rest), test=every.subset(validation if tuning else test))


def scores(training: Training, number: int, *, tuning: bool) -> Mapping[str, float]:
    def data() -> Splits:
        return split(number, tuning=tuning)

    with tempfile.TemporaryDirectory() as folder:
        return train(replace(training, data=data), number, folder).metrics


def best(settings: list[Training]) -> Training:
    def validation_nll(training: Training) -> float:
        return statistics.mean(scores(training, number, tuning=True)["nll"] for number in TUNING_SPLITS)

    losses = [validation_nll(training) for training in settings]
    for training, loss in zip(settings, losses, strict=True):
        print(
            f"  {dict(training.settings)} {dict(training.model_options)}: validation NLL {loss:.4f}",
            flush=True,
        )
    return settings[losses.index(min(losses))]


def mean_and_error(values: list[float]) -> str:
    return f"{statistics.mean(values):+.4f} ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    results: dict[str, list[Mapping[str, float]]] = {}
    for method, settings in GRIDS.items():
        print(method, flush=True)
        chosen = best(settings)
        results[method] = [scores(chosen, number, tuning=False) for number in TEST_SPLITS]
        print(f"  chosen: {dict(chosen.settings)} {dict(chosen.model_options)}")
        for measure in MEASURES:
            print(f"  {measure:20s} {mean_and_error([result[measure] for result in results[method]])}")
    for method in ("Adam", "MC-dropout"):
        print(f"{method} − VOGN")
        for measure in MEASURES:
            pairs = zip(results[method], results["VOGN"], strict=True)
            print(
                f"  {measure:20s} {mean_and_error([other[measure] - own[measure] for other, own in pairs])}"
            )


if __name__ == "__main__":
    main()
