"""Averages over samples that arrive in chunks, for one batch; nothing grows with the number of samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from credo.kernels.layout import NARROW
from credo.predict.outputs import Outputs
from credo.predict.prediction import Prediction, RegressionPrediction

AnyPrediction: TypeAlias = Prediction | RegressionPrediction


class Average(Protocol):
    def add(self, outputs: Outputs) -> None:
        """Take in the next samples, stacked along the first dimension."""

    def result(self) -> AnyPrediction: ...


def wide(tensor: Tensor) -> Tensor:
    """float32 or wider: probabilities and variances are never made in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension; where that is short, it lies first in the memory of the result."""
    if logits.shape[-1] >= NARROW:
        return logits.log_softmax(-1)
    return logits.movedim(-1, 0).log_softmax(0).movedim(0, -1)


class ClassAverage:
    """p̂ = (1/C) Σ softmax, as log p̂ = logsumexp(log softmax) − log C."""

    def __init__(self, keep_samples: bool) -> None:
        self._keep, self._kept, self._count = keep_samples, list[Tensor](), 0
        self._log_sum: Tensor | None = None
        self._entropies: Tensor | float = 0.0

    def add(self, outputs: Outputs) -> None:
        log_p = log_softmax(wide(outputs[0]))  # (c, M, K)
        p = log_p.exp()
        log_sum = log_p.logsumexp(0)
        self._log_sum = log_sum if self._log_sum is None else torch.logaddexp(self._log_sum, log_sum)
        self._entropies = self._entropies - (p * log_p.clamp_min(torch.finfo(p.dtype).min)).sum((0, 2))
        self._count += len(p)
        if self._keep:
            self._kept.append(p)

    def result(self) -> Prediction:
        assert self._log_sum is not None
        log_probs = self._log_sum - math.log(self._count)
        probs = log_probs.exp()
        entropy, expected = torch.special.entr(probs).sum(-1), torch.as_tensor(self._entropies) / self._count
        disagreement = (entropy - expected).clamp_min(0)  # by Jensen; rounding may say otherwise
        samples = torch.cat(self._kept) if self._keep else None
        return Prediction(probs, log_probs, entropy, expected, disagreement, samples)


class RegressionAverage:
    """Mean and variance by Chan's update of Welford's sums: no difference of large squares."""

    def __init__(self, keep_samples: bool, noise: Tensor | None) -> None:
        self._keep, self._kept, self._count, self._noise = keep_samples, list[Tensor](), 0, noise
        self._mean, self._squares, self._aleatoric = torch.zeros(()), torch.zeros(()), torch.zeros(())

    def add(self, outputs: Outputs) -> None:
        values = wide(outputs[0])  # (c, M, ...)
        mean, squares, count = values.mean(0), values.var(0, correction=0) * len(values), len(values)
        step, total = mean - self._mean.to(mean), self._count + count
        self._squares = self._squares.to(mean) + squares + step**2 * (self._count * count / total)
        self._mean = self._mean.to(mean) + step * (count / total)
        self._aleatoric = self._aleatoric.to(mean) + self._noise_of(outputs, mean) * count
        self._count = total
        if self._keep:
            self._kept.append(values)

    def _noise_of(self, outputs: Outputs, mean: Tensor) -> Tensor:
        if len(outputs) == 2:
            return wide(outputs[1]).exp().mean(0)
        return torch.zeros_like(mean) if self._noise is None else self._noise.to(mean).expand(mean.shape)

    def result(self) -> RegressionPrediction:
        aleatoric, epistemic = self._aleatoric / self._count, self._squares / self._count
        samples = torch.cat(self._kept) if self._keep else None
        return RegressionPrediction(self._mean, aleatoric + epistemic, aleatoric, epistemic, samples)


def joined(results: Sequence[AnyPrediction]) -> AnyPrediction:
    """Batches one after another."""
    return results[0] if len(results) == 1 else _field_by_field(results, torch.cat)


def first_examples(result: AnyPrediction, n: int) -> AnyPrediction:
    return _field_by_field([result], lambda tensors, axis: tensors[0].narrow(axis, 0, n))


def _field_by_field(
    results: Sequence[AnyPrediction], combine: Callable[[list[Tensor], int], Tensor]
) -> AnyPrediction:
    """Examples are the first dimension of every field but `samples`, where they are the second."""
    made: dict[str, Any] = {}
    for field in fields(results[0]):
        tensors = [getattr(result, field.name) for result in results]
        made[field.name] = (
            None if tensors[0] is None else combine(tensors, 1 if field.name == "samples" else 0)
        )
    return type(results[0])(**made)
