"""Scores that are a mean over examples. Each has its per-example form, which the running scores add up."""

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue

SUM_TOLERANCE = 1e-4


def check_probs(probs: object, name: str = "probs", may_be_empty: bool = False) -> Tensor:
    """The argument itself, detached, or an error: (N, C), N ≥ 1, entries in [0, 1], rows that sum to one."""
    if not isinstance(probs, Tensor) or not probs.is_floating_point():
        raise InvalidType(f"{name} is {describe(probs)}; give a floating-point tensor (examples, classes)")
    if probs.ndim != 2 or probs.shape[1] == 0:
        raise InvalidValue(
            f"{name} has shape {tuple(probs.shape)}; give (examples, classes). "
            "For a binary problem: torch.stack([1 - p, p], dim=1)"
        )
    if probs.shape[0] == 0 and not may_be_empty:
        raise InvalidValue(
            f"{name} has shape {tuple(probs.shape)}: no examples, so there is nothing to measure"
        )
    check_rows(probs.detach(), name)
    return probs.detach()


def check_rows(probs: Tensor, name: str) -> None:
    tolerance = max(SUM_TOLERANCE, 8 * torch.finfo(probs.dtype).eps)
    sums = probs.double().sum(1)
    outside = ((probs < 0) | (probs > 1 + tolerance)).any(1)
    wrong = (outside | ~((sums - 1).abs() <= tolerance)).nonzero()  # so written, a NaN is wrong too
    if len(wrong):
        row = int(wrong[0])
        low, high = probs[row].min().item(), probs[row].max().item()
        raise InvalidValue(
            f"{name}[{row}] ranges from {low:.4g} to {high:.4g} and sums to {sums[row].item():.6g}; "
            "probabilities lie in [0, 1] and sum to 1. For logits: logits.softmax(-1)"
        )


def check_targets(targets: object, probs: Tensor) -> Tensor:
    """Class indices (N,), on the device of `probs`."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype is torch.bool:
        raise InvalidType(f"targets is {describe(targets)}; give an integer tensor of class indices")
    examples, classes = probs.shape
    if targets.shape != (examples,):
        raise InvalidValue(
            f"targets has shape {tuple(targets.shape)}; give ({examples},), a class index per row of probs. "
            "For one-hot rows: targets.argmax(1)"
        )
    outside = targets[(targets < 0) | (targets >= classes)]
    if len(outside):
        raise InvalidValue(f"targets has the class {int(outside[0])}; probs has classes 0 to {classes - 1}")
    return targets.detach().to(probs.device, torch.long)


def check_pair(probs: object, targets: object, may_be_empty: bool = False) -> tuple[Tensor, Tensor]:
    checked = check_probs(probs, may_be_empty=may_be_empty)
    return checked, check_targets(targets, checked)


def check_bins(bins: object) -> int:
    if isinstance(bins, bool) or not isinstance(bins, int):
        raise InvalidType(f"bins is {describe(bins)}; give an int of at least 1, the paper uses 20")
    if bins < 1:
        raise InvalidValue(f"bins={bins} is too small; give an int of at least 1, the paper uses 20")
    return bins


def describe(value: object) -> str:
    kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return kind if isinstance(value, Tensor) else f"{value!r:.40}, {kind}"


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
