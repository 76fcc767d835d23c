"""The validation NLL as a function of the number that costs no further pass: the temperature T, or the noise.

The answers of the functions are kept, so that trying another T or noise does not run the network again. Memory: one
number for each function, example and class; of regression two for each value.

The mean p̄ of C samples p_c is itself noisy, and −log p̄ is too high on average, by Var(p_c) / (2C·p²) to first order. A
wider posterior has more variance, so the least NLL of few samples is at too narrow a posterior. `unbiased` takes that
term off, as estimated from the samples. What remains is the NLL of very many samples, but for terms in 1/C².
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.errors import InvalidValue
from credo.metrics.regression import each_gaussian_nll
from credo.metrics.targets import class_rows, label_targets, value_targets
from credo.predict.prediction import Outputs, RegressionAverage, tempered, wide


class Objective(Protocol):
    def add(self, answers: Outputs, targets: object) -> None:
        """The answers (C, M, …) of all functions for one batch, and its targets."""

    def nll(self, value: float) -> float:
        """The mean validation NLL in nats, at this temperature or multiple of the noise."""

    def prior(self, value: float) -> float:
        """What is added to the NLL while the value is fitted: minus its log density, for each example."""

    def mean_square(self) -> float:
        """Of the errors: where to look for a noise when none was given."""


def sharpening(temperature: float) -> float:
    """Minus the log density of a temperature below 1: log-normal, with σ = 1; above 1 it is flat.

    A few dozen validation examples cannot tell that a network is never wrong: the NLL alone falls with T down to 0,
    and the first error on other data then costs without end.
    """
    return 0.5 * min(math.log(temperature), 0.0) ** 2


class OfLogits:
    count = 0  # predictions that are judged

    def prior(self, value: float) -> float:
        return sharpening(value) / max(self.count, 1)

    def mean_square(self) -> float:
        return 1.0  # a temperature is always given


def each_nll(log_p: Tensor, unbiased: bool) -> Tensor:
    """−log (1/C) Σ_c p_c of every column."""
    count = len(log_p)
    average = log_p.logsumexp(0) - math.log(count)
    if not unbiased or count < 2:
        return -average
    spread = (log_p - average).exp().var(0).where(average > -math.inf, 0.0)
    return -average - spread / (2 * count)


class OfClasses(OfLogits):
    """−1/N Σ log (1/C) Σ_c softmax(f_c/T)_y."""

    def __init__(self, ignore_index: int | None, unbiased: bool) -> None:
        self._ignore_index, self._unbiased = ignore_index, unbiased
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, answers: Outputs, targets: object) -> None:
        logits = wide(answers[0])  # (C, M, …, K)
        _, classes, kept = class_rows(logits[0], targets, self._ignore_index)
        rows = logits.reshape(len(logits), -1, logits.shape[-1])[:, kept]
        self.count += rows.shape[1]
        self._kept.append((rows, rows.gather(2, classes.expand(len(rows), -1).unsqueeze(2)).squeeze(2)))

    def nll(self, value: float) -> float:
        total = 0.0
        for rows, own in self._kept:
            log_p = tempered(own, value) - tempered(rows, value).logsumexp(-1)  # (C, N)
            total += float(each_nll(log_p, self._unbiased).double().sum())
        return total / _some(self.count)


class OfLabels(OfLogits):
    """The same with sigmoids, over all labels."""

    def __init__(self, unbiased: bool) -> None:
        self._unbiased = unbiased
        self._kept: list[Tensor] = []

    def add(self, answers: Outputs, targets: object) -> None:
        logits = wide(answers[0])  # (C, M, …)
        signs = 2 * label_targets(logits[0], targets) - 1
        self._kept.append((logits * signs).flatten(1))  # sigmoid(−z) = 1 − sigmoid(z)
        self.count += self._kept[-1].shape[1]

    def nll(self, value: float) -> float:
        total = 0.0
        for signed in self._kept:
            total += float(each_nll(F.logsigmoid(tempered(signed, value)), self._unbiased).double().sum())
        return total / _some(self.count)


class OfValues:
    """The Gaussian NLL with the variance `value`·noise + epistemic; the noise may be what the model tells.

    Of C samples the squared error of the mean is too high by v/C, v their variance. If they are Gaussian, what they
    say of V = v + noise has the relative variance q = 2v²/((C − 1)V²). So log V is too low by q/2, and 1/V too high by
    the factor 1 + q.
    """

    def __init__(self, noise: Tensor | None, unbiased: bool) -> None:
        self._noise, self._unbiased, self._samples = noise, unbiased, 0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, answers: Outputs, targets: object) -> None:
        average = RegressionAverage(False, self._noise)
        average.add(answers)
        found, self._samples = average.result(), len(answers[0])
        errors = value_targets(found.mean, targets) - found.mean.double()
        if not bool(errors.isfinite().all()):
            raise InvalidValue(
                "the validation targets or the model's outputs hold numbers that are not finite"
            )
        self._kept.append((errors, found.epistemic.double(), found.aleatoric.double()))

    def nll(self, value: float) -> float:
        errors, epistemic, noise = (
            torch.cat([part.flatten() for part in column]) for column in zip(*self._kept, strict=True)
        )
        _some(len(errors))
        if not self._unbiased or self._samples < 2:
            return float(each_gaussian_nll(errors, epistemic + value * noise).mean())
        count = self._samples
        own = epistemic * (count / (count - 1))
        variance = own + value * noise
        share = (own / variance).nan_to_num(0.0)  # 0/0 where nothing varies
        q = 2 * share.square() / (count - 1)
        plain = each_gaussian_nll(errors / (1 + q).sqrt(), variance)
        return float((plain - 0.5 * share / (count * (1 + q)) + q / 4).mean())

    def prior(self, value: float) -> float:
        return 0.0

    def mean_square(self) -> float:
        errors = torch.cat([errors.flatten() for errors, _, _ in self._kept])
        return max(float(errors.square().mean()), 1e-30)


def _some(count: int) -> int:
    if not count:
        raise InvalidValue("validation holds no target that counts; give at least one example")
    return count


GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Grid:
    step: float
    steps: int  # on each side of 0
    most: int  # steps on one side, where the least value is at its end
    tolerance: float  # of the answer


def minimise(
    function: Callable[[float], float], grid: Grid, gain: float, flat_below: bool = False
) -> tuple[float, float]:
    """(x, f(x)) with the least f of all that were evaluated.

    First the points of the grid around 0. While the best is at an end of it, the grid grows there, as long as that
    gains more than `gain`. Then a golden-section search between the neighbours of the best point, down to the
    tolerance. Where the function is not a number it counts as infinite.

    `flat_below` is for functions that may tend to a constant as x falls. Where that is the least value, to within
    `gain`, the answer is the largest x that has it.
    """
    known: dict[float, float] = {}

    def value(x: float) -> float:
        if x not in known:
            found = function(x)
            known[x] = math.inf if math.isnan(found) else found
        return known[x]

    def best_of(points: list[float]) -> float:
        return min(points, key=lambda x: (value(x), abs(x)))

    best = best_of([k * grid.step for k in range(-grid.steps, grid.steps + 1)])
    for direction in (-1, 1):
        for k in range(grid.steps, grid.most):
            further = direction * (k + 1) * grid.step
            if best == direction * k * grid.step and value(further) < value(best) - gain:
                best = further
    _narrow(value, best - grid.step, best + grid.step, grid.tolerance)
    least = best_of(list(known))
    level = known[least] + gain
    if flat_below and value(best - grid.step) <= level:
        least = _edge(value, known, level, grid)
    return least, known[least]


def _edge(value: Callable[[float], float], known: dict[float, float], level: float, grid: Grid) -> float:
    """Between points that are known, the largest x where the function does not exceed the level; by halves."""
    low = max(x for x, found in known.items() if found <= level)
    high = min((x for x in known if x > low), default=low + grid.step)
    while high - low > grid.tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) <= level else (low, middle)
    return low


def _narrow(value: Callable[[float], float], low: float, high: float, tolerance: float) -> None:
    """Golden section: one new evaluation shortens the interval to .618 of its length."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    while high - low > tolerance:
        if value(left) <= value(right):
            high, right = right, left
            left = high - GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
