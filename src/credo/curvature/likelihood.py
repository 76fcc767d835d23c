"""Whether a loss is a log-likelihood, with its scale, or an error whose scale is left open; read from its graph.

A cross-entropy is minus the log-probability of the targets. A squared error is so only up to the unknown variance of
the observations: the loss alone does not say how sure the data are. Between the loss and what decides there are means,
sums, masks and factors, so that a few operations from the root on are enough.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

LIKELIHOODS = (
    "NllLoss",
    "LogSoftmax",
    "Logsumexp",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "LogSigmoid",
    "Softplus",
    "KlDiv",
    "CtcLoss",
    "Log",
    "Exp",
)
ERRORS = ("MseLoss", "Pow", "SmoothL1Loss", "HuberLoss", "Abs", "L1Loss", "Norm", "LinalgVectorNorm")
FARTHEST = 24  # operations looked at


def is_likelihood(roots: Sequence[Tensor]) -> bool:
    """Whether a way from the loss meets a likelihood before it meets an error; a penalty beside it changes nothing."""
    waiting: deque[Any] = deque(root.grad_fn for root in roots if root.grad_fn is not None)
    for _ in range(FARTHEST):
        if not waiting:
            return False
        node = waiting.popleft()
        name = node.name().removesuffix("0").removesuffix("Backward").rstrip("0123456789D")
        if name in LIKELIHOODS:
            return True
        if name not in ERRORS:
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return False
