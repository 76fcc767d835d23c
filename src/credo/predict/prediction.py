"""What `predict` returns. Examples are the first dimension; C is the number of functions drawn."""

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


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
