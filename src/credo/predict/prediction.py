"""What `predict` returns. Examples are the first dimension; C is the number of functions drawn."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """A categorical distribution per example, and why it is uncertain (in nats).

    entropy = expected_entropy + mutual_information: the doubt that every single network has (noise in the
    data, aleatoric) and the doubt that comes from the networks' disagreement (lack of data, epistemic).
    """

    probs: Tensor  # (M, K): the mean of softmax over samples, never the softmax of mean logits
    log_probs: Tensor  # (M, K): its logarithm, finite where probs underflows
    entropy: Tensor  # (M,): H[p̂]
    expected_entropy: Tensor  # (M,): the mean over samples of H[p]
    mutual_information: Tensor  # (M,): their difference, never negative
    samples: Tensor | None = None  # (C, M, K): softmax of each sample, if asked for


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
