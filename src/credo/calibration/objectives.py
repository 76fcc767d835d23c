"""The validation NLL as a function of the number that costs no further pass: the temperature T, or the noise.

The answers of the functions are kept, so that trying another T or noise does not run the network again. Memory: one
number for each function, example and class; of regression two for each value.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.errors import InvalidValue
from credo.metrics.layouts import class_rows, label_targets, value_targets
from credo.metrics.regression import each_gaussian_nll
from credo.predict.averages import RegressionAverage, tempered, wide
from credo.predict.outputs import Outputs


class Objective(Protocol):
    def add(self, answers: Outputs, targets: object) -> None:
        """The answers (C, M, …) of all functions for one batch, and its targets."""

    def nll(self, value: float) -> float:
        """The mean validation NLL in nats, at this temperature or multiple of the noise."""

    def mean_square(self) -> float:
        """Of the errors: where to look for a noise when none was given."""


class OfLogits:
    def mean_square(self) -> float:
        return 1.0  # a temperature is always given


class OfClasses(OfLogits):
    """−1/N Σ log (1/C) Σ_c softmax(f_c/T)_y."""

    def __init__(self, ignore_index: int | None) -> None:
        self._ignore_index = ignore_index
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, answers: Outputs, targets: object) -> None:
        logits = wide(answers[0])  # (C, M, …, K)
        _, classes, kept = class_rows(logits[0], targets, self._ignore_index)
        rows = logits.reshape(len(logits), -1, logits.shape[-1])[:, kept]
        self._kept.append((rows, rows.gather(2, classes.expand(len(rows), -1).unsqueeze(2)).squeeze(2)))

    def nll(self, value: float) -> float:
        total, count = 0.0, 0
        for rows, own in self._kept:
            log_p = tempered(own, value) - tempered(rows, value).logsumexp(-1)  # (C, N)
            total -= float((log_p.logsumexp(0) - math.log(len(rows))).double().sum())
            count += own.shape[1]
        return total / _some(count)


class OfLabels(OfLogits):
    """The same with sigmoids, over all labels."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def add(self, answers: Outputs, targets: object) -> None:
        logits = wide(answers[0])  # (C, M, …)
        signs = 2 * label_targets(logits[0], targets) - 1
        self._kept.append((logits * signs).flatten(1))  # sigmoid(−z) = 1 − sigmoid(z)

    def nll(self, value: float) -> float:
        total, count = 0.0, 0
        for signed in self._kept:
            log_p = F.logsigmoid(tempered(signed, value)).logsumexp(0) - math.log(len(signed))
            total -= float(log_p.double().sum())
            count += signed.shape[1]
        return total / _some(count)


class OfValues:
    """The Gaussian NLL with the variance `value`·noise + epistemic; the noise may be what the model tells."""

    def __init__(self, noise: Tensor | None) -> None:
        self._noise = noise
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, answers: Outputs, targets: object) -> None:
        average = RegressionAverage(False, self._noise)
        average.add(answers)
        found = average.result()
        errors = value_targets(found.mean, targets) - found.mean.double()
        self._kept.append((errors, found.epistemic.double(), found.aleatoric.double()))

    def nll(self, value: float) -> float:
        errors, epistemic, noise = (
            torch.cat([part.flatten() for part in column]) for column in zip(*self._kept, strict=True)
        )
        _some(len(errors))
        return float(each_gaussian_nll(errors, epistemic + value * noise).mean())

    def mean_square(self) -> float:
        errors = torch.cat([errors.flatten() for errors, _, _ in self._kept])
        return max(float(errors.square().mean()), 1e-30)


def _some(count: int) -> int:
    if not count:
        raise InvalidValue("validation holds no target that counts; give at least one example")
    return count
