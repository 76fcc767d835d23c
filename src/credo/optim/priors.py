"""A posterior as the prior: what was believed before these data."""

import torch

from credo.errors import InvalidType, InvalidValue
from credo.optim.base import BayesianOptimizer
from credo.posterior import Posterior


def take_prior(optimizer: BayesianOptimizer, prior: Posterior) -> None:
    """Stores precision and mean of `prior` beside each parameter it names; all uncertain ones must be named."""
    if not isinstance(prior, Posterior):
        raise InvalidType(
            f"prior must be a posterior, as optimizer.posterior() gives; got {type(prior).__name__}."
        )
    names, mean, variance = optimizer.names(), prior.mean, prior.variance
    wanted = [
        (names[id(p)], p)
        for group in optimizer.param_groups
        if not group["deterministic"]
        for p in group["params"]
    ]
    wrong = [_mismatch(name, p, variance) for name, p in wanted]
    found = [message for message in wrong if message]
    if found:
        raise InvalidValue(
            f"prior does not fit the parameters: {'; '.join(found[:3])}. It holds {sorted(mean)[:5]} …"
        )
    for name, p in wanted:
        optimizer.state[p]["prior_precision"] = variance[name].to(p.device).reciprocal()
        optimizer.state[p]["prior_mean"] = mean[name].to(p.device).clone()


def _mismatch(name: str, p: torch.Tensor, variance: dict[str, torch.Tensor]) -> str | None:
    if name not in variance:
        return f"nothing is called {name!r}"
    if variance[name].shape != p.shape:
        return f"{name!r} has shape {tuple(variance[name].shape)} there and {tuple(p.shape)} here"
    if not bool(variance[name].any()):
        return f"{name!r} is deterministic there"
    return None
