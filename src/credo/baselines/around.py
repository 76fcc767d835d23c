"""Laplace's approximation around trained weights: q = N(μ, (H + δI)⁻¹), H the curvature of the negative log-likelihood.

H is the generalised Gauss–Newton matrix, Σᵢ Jᵢᵀ Λᵢ Jᵢ, of which the engine gives the diagonal exactly, or Kronecker
factors (`credo.baselines.curvature`). δ, the precision of the prior N(0, 1/δ), is a number, or where

    log p(D|δ) ≈ log p(D|μ) − ½(δ‖μ‖² − P log δ + log |H + δI|)

is largest; its only such point solves Σⱼ hⱼ/(hⱼ + δ) = δ‖μ‖², h the eigenvalues of H (MacKay 1992). Or it is the one of
a grid with the smallest NLL on validation data, as `credo.predict` predicts.
"""

import math
from collections.abc import Iterable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from credo.baselines.curvature import Curvature, Likelihood, curvature_of
from credo.errors import InvalidType, InvalidValue
from credo.posterior.base import Posterior
from credo.predict import predict
from credo.validate import positive, whole

Structure = Literal["diagonal", "kronecker", "last_layer"]
STRUCTURES: Final = ("diagonal", "kronecker", "last_layer")
GRID: Final = tuple(10.0 ** (k / 4) for k in range(-16, 25))  # 1e-4 … 1e6
LOWEST, HIGHEST = 1e-8, 1e12
HALVINGS: Final = 100


def laplace(
    model: nn.Module,
    loader: Iterable[Any],
    structure: Structure = "kronecker",
    prior_precision: float | Literal["marglik", "validation"] | None = None,
    *,
    task: Literal["classification", "regression"] = "classification",
    noise: float = 1.0,
    validation: Iterable[Any] | None = None,
    samples: int = 20,
    seed: int = 0,
    labels: Literal["model", "data"] = "model",
    layer: str | None = None,
) -> Posterior:
    """A posterior around the weights that the model has; for `credo.predict`. The model is not changed.

    model: trained with a mean of −log p(y|x, w) and, if any, an L2 term. It is run in eval mode.
    loader: pairs (x, y) of all training data, once; a data loader, or a list of pairs.
    structure: "diagonal", "kronecker" (each layer a Kronecker product, what has no factors diagonal), or "last_layer"
        (Kronecker for the last layer alone, all other weights certain). Normalisation layers are certain.
    prior_precision: δ. "marglik" takes the largest marginal likelihood, "validation" the smallest NLL on `validation`,
        pairs (x, y) too, which are read once for each of 41 values. None is "validation" if there are any, else
        "marglik". Drawn weights spread a network further than its linearisation would, so that δ by marginal
        likelihood is often too small for "diagonal" and "kronecker"; "validation" sees what is drawn.
    task: "classification" with logits, or "regression" with the variance `noise` of the observations.
    samples, seed: of the predictions on `validation`.
    labels: "model" is the Gauss–Newton matrix, with as many backward passes as there are outputs; "data" the empirical
        Fisher matrix, with one.
    layer: the name of the last layer, where it is not the last module with a weight.
    """
    if structure not in STRUCTURES:
        raise InvalidValue(f"structure must be one of {', '.join(map(repr, STRUCTURES))}, got {structure!r}")
    if labels not in ("model", "data"):
        raise InvalidValue(f"labels must be 'model' or 'data', got {labels!r}")
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}")
    likelihood = Likelihood(task, positive("noise", noise), labels)
    asked = _asked(prior_precision, validation)
    whole("samples", samples, at_least=1)
    found = curvature_of(model, loader, structure, likelihood, layer)
    facts: dict[str, object] = {"method": "Laplace", "structure": structure, "labels": labels}
    if asked == "validation":
        assert validation is not None
        chosen = _by_validation(model, found, validation, likelihood, samples, seed)
    else:
        chosen = _by_marginal_likelihood(found) if isinstance(asked, str) else asked
    evidence = log_marginal_likelihood(found, chosen)
    return found.posterior(
        chosen,
        {
            **facts,
            "prior_precision": chosen,
            "log_marginal_likelihood": evidence,
            "data_size": found.examples,
        },
    )


def log_marginal_likelihood(found: Curvature, precision: float) -> float:
    """log p(D|δ) as above."""
    values, square = found.eigenvalues(), found.square()
    log_det = (values + precision).log().sum().item()
    return found.log_likelihood - 0.5 * (precision * square - len(values) * math.log(precision) + log_det)


def _by_marginal_likelihood(found: Curvature) -> float:
    """Bisection: Σ h/(h + δ) − δ‖μ‖² falls with δ."""
    values, square = found.eigenvalues(), found.square()
    low, high = math.log(LOWEST), math.log(HIGHEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        precision = math.exp(middle)
        effective = (values / (values + precision)).sum().item()
        low, high = (middle, high) if effective > precision * square else (low, middle)
    return math.exp((low + high) / 2)


def _by_validation(
    model: nn.Module,
    found: Curvature,
    validation: Iterable[Any],
    likelihood: Likelihood,
    samples: int,
    seed: int,
) -> float:
    pairs = validation if isinstance(validation, list) else list(validation)
    if not pairs:
        raise InvalidValue("validation yielded no batch; an exhausted iterator must be made again")
    targets = torch.cat([torch.as_tensor(pair[1]) for pair in pairs])
    scores: dict[float, float] = {}
    for precision in GRID:
        posterior = found.posterior(precision, {})
        score = _nll(model, posterior, pairs, targets, likelihood, samples, seed)
        if math.isfinite(score):
            scores[precision] = score
    if not scores:
        raise InvalidValue(
            "the NLL on validation is not finite for any prior precision; look at model and data"
        )
    return min(scores, key=scores.__getitem__)


def _nll(
    model: nn.Module,
    posterior: Posterior,
    pairs: list[Any],
    targets: Tensor,
    likelihood: Likelihood,
    samples: int,
    seed: int,
) -> float:
    if likelihood.task == "classification":
        log_probs = predict(model, posterior, pairs, samples=samples, seed=seed).log_probs.double()
        return float(-log_probs.gather(1, targets.to(log_probs.device)[:, None]).mean())
    found = predict(
        model, posterior, pairs, samples=samples, seed=seed, task="regression", noise=likelihood.noise
    )
    variance = found.variance.double()
    away = (found.mean.double() - targets.to(variance.device).view_as(variance).double()).square()
    terms = 0.5 * (away / variance + (2 * math.pi * variance).log())
    return float(terms.mean())


def _asked(value: object, validation: object) -> float | str:
    if value is None:
        value = "marglik" if validation is None else "validation"
    if isinstance(value, str):
        if value not in ("marglik", "validation"):
            raise InvalidValue(
                f"prior_precision must be a number > 0, 'marglik' or 'validation', got {value!r}"
            )
        if value == "validation" and validation is None:
            raise InvalidValue(
                "prior_precision='validation' needs validation=, pairs (x, y) kept out of training"
            )
        return value
    return positive("prior_precision", value)
