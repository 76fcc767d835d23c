"""Scores that are a mean over examples. Each has its per-example form, which the running scores add up."""

import torch
from torch import Tensor

from credo.metrics.checks import check_pair, check_probs


def accuracy(probs: Tensor, targets: Tensor) -> float:
    """Share of examples whose top class is the true one; of classes that tie at the top the first counts."""
    return each_correct(*check_pair(probs, targets)).double().mean().item()


def nll(probs: Tensor, targets: Tensor) -> float:
    """−1/N Σᵢ log pᵢ(yᵢ), in nats. Infinite, and rightly so, if a true class was given probability 0."""
    return each_nll(*check_pair(probs, targets)).mean().item()


def brier(probs: Tensor, targets: Tensor) -> float:
    """1/N Σᵢ Σₖ (pᵢₖ − [yᵢ=k])², between 0 and 2: the sum over classes, not their mean and not half of it."""
    return each_brier(*check_pair(probs, targets)).mean().item()


def entropy(probs: Tensor) -> Tensor:
    """−Σₖ pᵢₖ log pᵢₖ of every row, in nats, between 0 and log C; 0·log 0 is 0. Shape (N,), possibly (0,)."""
    terms: Tensor = torch.special.entr(check_probs(probs, may_be_empty=True))
    return terms.sum(1)


def each_correct(probs: Tensor, targets: Tensor) -> Tensor:
    return probs.argmax(1) == targets


def each_nll(probs: Tensor, targets: Tensor) -> Tensor:
    return -probs.double().gather(1, targets[:, None]).squeeze(1).log()


def each_brier(probs: Tensor, targets: Tensor) -> Tensor:
    """Σₖ pₖ² − 2p_y + 1, which needs no one-hot matrix beside the probabilities."""
    probs = probs.double()
    return probs.square().sum(1) - 2 * probs.gather(1, targets[:, None]).squeeze(1) + 1
