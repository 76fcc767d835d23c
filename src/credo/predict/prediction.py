"""What `predict` returns, and the averages over samples that it is made of.

Examples are the first dimension; C is the number of functions drawn. Samples arrive in chunks, and nothing grows with
their number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.errors import InvalidValue
from credo.kernels.layout import NARROW

Outputs: TypeAlias = tuple[Tensor, ...]
Read: TypeAlias = Callable[[object], Outputs]


def class_place(dims: int, class_dim: int | None) -> int:
    """Which dimension of an output with so many holds the classes, counted from 0.

    By default: (B, C) and (B, C, H, W), and all with more dimensions, have them second, as torch's cross_entropy does;
    (B, T, C) has them last, as sequence models return them.
    """
    if class_dim is None:
        return 2 if dims == 3 else 1
    place = class_dim + dims if class_dim < 0 else class_dim
    if not 0 < place < dims:
        raise InvalidValue(
            f"class_dim={class_dim} is no dimension of classes in an output of {dims} dimensions; dimension 0 counts"
            f" the examples, so give one of 1 … {dims - 1}, or a negative one from the end"
        )
    return place


@dataclass(frozen=True)
class Prediction:
    """A categorical distribution per example, or per place of an example, and why it is uncertain (in nats).

    entropy = expected_entropy + mutual_information: the doubt that every single network has (noise in the
    data, aleatoric) and the doubt that comes from the networks' disagreement (lack of data, epistemic).

    The shapes below are those of (M, K) logits. Others keep the model's layout: `probs` is (M, T, K) or (M, K, H, W),
    and the entropies lack the dimension of the classes, which is `class_dim`.
    """

    probs: Tensor  # (M, K): the mean of softmax over samples, never the softmax of mean logits
    log_probs: Tensor  # (M, K): its logarithm, finite where probs underflows
    entropy: Tensor  # (M,): H[p̂]
    expected_entropy: Tensor  # (M,): the mean over samples of H[p]
    mutual_information: Tensor  # (M,): their difference, never negative
    samples: Tensor | None = None  # (C, M, K): softmax of each sample, if asked for
    class_dim: int = 1  # of probs and log_probs


@dataclass(frozen=True)
class MultilabelPrediction:
    """A probability for each label, independent of the others given the input; all fields as the model's output."""

    probs: Tensor  # (M, L): the mean of sigmoid over samples
    log_probs: Tensor  # log p̂
    log_complements: Tensor  # log(1 − p̂), finite where p̂ rounds to 1
    entropy: Tensor  # of each label, in nats
    expected_entropy: Tensor
    mutual_information: Tensor
    samples: Tensor | None = None  # (C, M, L)


@dataclass(frozen=True)
class RegressionPrediction:
    """Mean and variance of an equal mixture of C Gaussians, by the law of total variance.

    variance = aleatoric + epistemic: the mean noise variance, and the variance of the C means around their
    mean (divided by C, as it is the mixture's own).
    """

    mean: Tensor  # as the model's output
    variance: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    samples: Tensor | None = None  # (C, M, ...): the means of each sample, if asked for


AnyPrediction: TypeAlias = Prediction | MultilabelPrediction | RegressionPrediction


P = TypeVar("P", bound=AnyPrediction)


class Average(Protocol):
    def add(self, outputs: Outputs) -> None:
        """Take in the next samples, stacked along the first dimension."""

    def result(self) -> AnyPrediction: ...


def wide(tensor: Tensor) -> Tensor:
    """float32 or wider: probabilities and variances are never made in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """f/T, wide; at T = 1 the logits themselves."""
    return wide(logits) if temperature == 1 else wide(logits) / temperature


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension; where that is short, it lies first in the memory of the result."""
    if logits.shape[-1] >= NARROW:
        return logits.log_softmax(-1)
    return logits.movedim(-1, 0).log_softmax(0).movedim(0, -1)


class ClassAverage:
    """p̂ = (1/C) Σ softmax(f/T), as log p̂ = logsumexp(log softmax) − log C."""

    def __init__(self, keep_samples: bool, temperature: float = 1.0, class_dim: int | None = None) -> None:
        self._temperature, self._class_dim = temperature, class_dim
        self._keep, self._kept, self._count = keep_samples, list[Tensor](), 0
        self._log_sum: Tensor | None = None
        self._entropies: Tensor | float = 0.0

    def add(self, outputs: Outputs) -> None:
        log_p = log_softmax(tempered(outputs[0], self._temperature))  # (c, M, …, K)
        p = log_p.exp()
        self._log_sum = _added(self._log_sum, log_p)
        self._entropies = self._entropies - (p * log_p.clamp_min(torch.finfo(p.dtype).min)).sum((0, -1))
        self._count += len(p)
        if self._keep:
            self._kept.append(p)

    def result(self) -> Prediction:
        assert self._log_sum is not None
        log_probs = self._log_sum - math.log(self._count)
        probs = log_probs.exp()
        entropy, expected = torch.special.entr(probs).sum(-1), torch.as_tensor(self._entropies) / self._count
        if self._count == 1:  # the two are one number, computed in two ways
            expected = entropy
        disagreement = (entropy - expected).clamp_min(0)  # by Jensen; rounding may say otherwise
        place = class_place(probs.dim(), self._class_dim)
        probs, log_probs = (tensor.movedim(-1, place) for tensor in (probs, log_probs))
        samples = torch.cat(self._kept).movedim(-1, place + 1) if self._keep else None
        return Prediction(probs, log_probs, entropy, expected, disagreement, samples, place)


class LabelAverage:
    """p̂ = (1/C) Σ sigmoid(f/T) for every output by itself; log p̂ and log(1 − p̂) as in `ClassAverage`."""

    def __init__(self, keep_samples: bool, temperature: float = 1.0) -> None:
        self._temperature = temperature
        self._keep, self._kept, self._count = keep_samples, list[Tensor](), 0
        self._yes: Tensor | None = None
        self._no: Tensor | None = None
        self._entropies: Tensor | float = 0.0

    def add(self, outputs: Outputs) -> None:
        z = tempered(outputs[0], self._temperature)  # (c, M, …)
        yes, no = F.logsigmoid(z), F.logsigmoid(-z)
        p = yes.exp()
        self._yes, self._no = _added(self._yes, yes), _added(self._no, no)
        self._entropies = self._entropies - (p * yes + no.exp() * no).sum(0)
        self._count += len(z)
        if self._keep:
            self._kept.append(p)

    def result(self) -> MultilabelPrediction:
        assert self._yes is not None
        assert self._no is not None
        yes, no = (total - math.log(self._count) for total in (self._yes, self._no))
        probs = yes.exp()
        entropy = -(probs * yes + no.exp() * no)
        expected = torch.as_tensor(self._entropies) / self._count
        samples = torch.cat(self._kept) if self._keep else None
        if self._count == 1:
            expected = entropy
        disagreement = (entropy - expected).clamp_min(0)
        return MultilabelPrediction(probs, yes, no, entropy, expected, disagreement, samples)


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
        if self._noise is None:
            return torch.zeros_like(mean)
        try:
            return self._noise.to(mean).expand(mean.shape)
        except RuntimeError as error:
            raise InvalidValue(
                f"noise has shape {tuple(self._noise.shape)}, which does not broadcast to the model's output"
                f" {tuple(mean.shape)}; give a number, or a variance for each output"
            ) from error

    def result(self) -> RegressionPrediction:
        aleatoric, epistemic = self._aleatoric / self._count, self._squares / self._count
        samples = torch.cat(self._kept) if self._keep else None
        return RegressionPrediction(self._mean, aleatoric + epistemic, aleatoric, epistemic, samples)


def _added(total: Tensor | None, logarithms: Tensor) -> Tensor:
    """log(e^total + Σ e^logarithms), the sum over the first dimension."""
    new = logarithms.logsumexp(0)
    return new if total is None else torch.logaddexp(total, new)


def joined(results: Sequence[AnyPrediction]) -> AnyPrediction:
    """Batches one after another."""
    if len(results) == 1:
        return results[0]
    shapes = [result.mean if isinstance(result, RegressionPrediction) else result.probs for result in results]
    for k, tensor in enumerate(shapes):
        if tensor.shape[1:] != shapes[0].shape[1:]:
            raise InvalidValue(
                f"batch {k} has outputs of shape {tuple(tensor.shape[1:])} an example and batch 0 of"
                f" {tuple(shapes[0].shape[1:])}; one prediction holds one shape: pad the batches to one length, or call"
                " predict for each of them"
            )
    return _field_by_field(results, torch.cat)


def first_examples(result: AnyPrediction, n: int) -> AnyPrediction:
    return _field_by_field([result], lambda tensors, axis: tensors[0].narrow(axis, 0, n))


def _field_by_field(results: Sequence[P], combine: Callable[[list[Tensor], int], Tensor]) -> P:
    """Examples are the first dimension of every tensor but `samples`, where they are the second."""
    made: dict[str, Any] = {}
    for field in fields(results[0]):
        tensors = [getattr(result, field.name) for result in results]
        if isinstance(tensors[0], Tensor):
            made[field.name] = combine(tensors, 1 if field.name == "samples" else 0)
    return replace(results[0], **made)
