"""Laplace's approximation around trained weights: q = N(μ, (H + δI)⁻¹), H the curvature of the negative log-likelihood.

H is the generalised Gauss–Newton matrix, Σᵢ Jᵢᵀ Λᵢ Jᵢ, of which the engine gives the diagonal exactly, or Kronecker
factors (`credo.baselines.eigen`). δ, the precision of the prior N(0, 1/δ), is a number, or where

    log p(D|δ) ≈ log p(D|μ) − ½(δ‖μ‖² − P log δ + log |H + δI|)

is largest; its only such point solves Σⱼ hⱼ/(hⱼ + δ) = δ‖μ‖², h the eigenvalues of H (MacKay 1992). Or it is the one of
a grid with the smallest NLL on validation data, as `credo.predict` predicts.

Classification: Λ = diag p − ppᵀ, the mean of ∇log p_c ∇log p_cᵀ over labels c ~ p. So H is the sum of the squares (or
products) of the gradients of √p_c log p_c, c over the classes, with p held fixed: one backward pass for each.
Regression: Λ = I/σ², one for each output. With labels of the data instead, one pass with the gradients of the loss.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.baselines.eigen import DiagonalCurvature, KroneckerCurvature
from credo.baselines.weights import uncertain
from credo.curvature.capture import capture
from credo.curvature.kronecker import FactorSums, layer_name, watching_factors
from credo.curvature.tracking import watched_parameters
from credo.curvature.uncompiled import uncompiled
from credo.errors import InvalidType, InvalidValue
from credo.posterior.base import Posterior
from credo.posterior.model_copy import device_of, eval_mode
from credo.predict import predict
from credo.validate import positive, whole

Structure = Literal["diagonal", "kronecker", "last_layer"]
STRUCTURES: Final = ("diagonal", "kronecker", "last_layer")
GRID: Final = tuple(10.0 ** (k / 4) for k in range(-16, 25))  # 1e-4 … 1e6
LOWEST, HIGHEST = 1e-8, 1e12
HALVINGS: Final = 100


class Curvature(Protocol):
    """H at μ, which a prior precision makes a posterior."""

    examples: int
    log_likelihood: float

    def eigenvalues(self) -> Tensor:
        """Of H, (P,), float64; P counts the weights that have a spread."""

    def square(self) -> float:
        """‖μ‖² of these weights."""

    def posterior(self, precision: float, metadata: dict[str, object]) -> Posterior: ...


@dataclass(frozen=True)
class LaplaceLikelihood:
    task: Literal["classification", "regression"]
    noise: float
    labels: str

    def __post_init__(self) -> None:
        if self.task not in ("classification", "regression"):
            raise InvalidValue(f"task must be 'classification' or 'regression', got {self.task!r}")

    def log_likelihood(self, output: Tensor, targets: Tensor) -> Tensor:
        """Σᵢ log p(yᵢ|xᵢ, w)."""
        if self.task == "classification":
            return -F.cross_entropy(output, targets, reduction="sum")
        output = output.flatten(1)
        squares = (output - targets.reshape(output.shape)).square() / self.noise
        constant = torch.log(torch.tensor(2 * torch.pi * self.noise, dtype=torch.float64)).item()
        return -0.5 * (squares + constant).sum()

    def losses(self, output: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """Sums over examples, whose squared gradients add up to the diagonal of H."""
        if self.labels == "data":
            yield -self.log_likelihood(output, targets)
        elif self.task == "classification":
            log_probs = output.log_softmax(1)
            roots = log_probs.detach().exp().sqrt()
            yield from (-(roots[:, c] * log_probs[:, c]).sum() for c in range(output.shape[1]))
        else:
            outputs = output.flatten(1) / self.noise**0.5
            yield from (outputs[:, k].sum() for k in range(outputs.shape[1]))


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
    likelihood = LaplaceLikelihood(task, positive("noise", noise), labels)
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
    likelihood: LaplaceLikelihood,
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
    likelihood: LaplaceLikelihood,
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


def curvature_of(
    model: nn.Module, loader: Iterable[Any], structure: str, likelihood: LaplaceLikelihood, layer: str | None
) -> Curvature:
    with eval_mode(model):
        if structure == "diagonal":
            return _diagonal(model, loader, likelihood)
        if structure == "kronecker":
            return _kronecker(model, model, "", uncertain(model), pairs_of(model, loader), likelihood)
        name = last_layer(model) if layer is None else layer
        part = _module(model, name)
        members = [f"{name}.{own}" if name else own for own, p in part.named_parameters() if p.requires_grad]
        if not members:
            raise InvalidValue(f"layer={name!r} has no trainable parameters; name another")
        return _kronecker(model, part, name, members, _features(model, part, name, loader), likelihood)


def _diagonal(model: nn.Module, loader: Iterable[Any], likelihood: LaplaceLikelihood) -> DiagonalCurvature:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(named[name], dtype=torch.float64) for name in uncertain(model)}
    examples, total = 0, 0.0
    for x, y in pairs_of(model, loader):
        with torch.enable_grad(), capture(model, "sum") as stats:
            output = model(x)
            for loss in likelihood.losses(output, y):
                torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for name, total_squares in sums.items():
            if named[name] in stats.squares:
                total_squares += stats.squares[named[name]].double()
        examples, total = examples + len(y), total + _log_likelihood(likelihood, output, y)
    _check_some_examples(examples)
    return DiagonalCurvature(weights_of(model), sums, examples, total)


def _kronecker(
    model: nn.Module,
    part: nn.Module,
    prefix: str,
    members: list[str],
    pairs: Iterable[tuple[Tensor, Tensor]],
    likelihood: LaplaceLikelihood,
) -> KroneckerCurvature:
    """`part` is run on the pairs; its parameters are `members` of the model, with `prefix` before their names."""
    subjects = watched_parameters(part)
    names = {key: f"{prefix}.{name}" if prefix else name for key, name in subjects.names().items()}
    found = KroneckerCurvature(weights_of(model), members)
    for x, y in pairs:
        passes = 0
        with torch.enable_grad(), uncompiled(watching_factors(subjects, "sum", fisher=True)) as stats:
            output = part(x)
            for loss in likelihood.losses(output, y):
                stats.observe(loss, list(subjects.watched.values()))
                passes += 1
        _add(found, stats.found(), names, len(y), passes)
        found.examples += len(y)
        found.log_likelihood += _log_likelihood(likelihood, output, y)
    _check_some_examples(found.examples)
    return found.finished()


def _add(
    found: KroneckerCurvature, batch: FactorSums, names: dict[int, str], examples: int, passes: int
) -> None:
    """Each pass has seen the same inputs: their moment counts once, the gradients' moments add up."""
    for sums in batch.layers.values():
        weight = names[id(sums.weight)]
        bias = None if sums.bias is None else names[id(sums.bias)]
        if weight in found.members:
            found.add_layer(layer_name(weight) or weight, weight, bias, sums.inputs / passes, sums.outputs)
    for key, square in batch.squares.items():
        if names[key] in found.members:
            found.add_squares(names[key], square)


def pairs_of(model: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    device = device_of(model)
    for pair in loader:
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not all(isinstance(t, Tensor) for t in pair)
        ):
            raise InvalidType(f"loader must yield pairs (x, y) of tensors, got {type(pair).__name__}")
        x, y = pair
        if len(x) != len(y):
            raise InvalidValue(f"a batch of loader has {len(x)} inputs and {len(y)} targets")
        if len(x):
            yield (x, y) if device is None else (x.to(device), y.to(device))


def _features(
    model: nn.Module, part: nn.Module, name: str, loader: Iterable[Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the last layer sees, so that nothing before it needs a gradient."""
    seen: list[Tensor] = []
    hook = part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    try:
        for x, y in pairs_of(model, loader):
            seen.clear()
            with torch.no_grad():
                output = model(x)
                if len(seen) != 1 or not torch.equal(part(seen[0]), output):
                    raise InvalidValue(
                        f"layer={name!r} does not give the model's output, or is used more than once; name the layer"
                        " that does, or take structure='kronecker'"
                    )
            yield seen[0], y
    finally:
        hook.remove()


def last_layer(model: nn.Module) -> str:
    """The last module, in the order of the model, with a weight of its own."""
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if not found:
        raise InvalidValue(f"the model {type(model).__name__} has no trainable parameters")
    return found[-1]


def _module(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if name not in modules:
        raise InvalidValue(
            f"layer={name!r} is no module of the model; there are {', '.join(filter(None, modules))}"
        )
    return modules[name]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def _log_likelihood(likelihood: LaplaceLikelihood, output: Tensor, targets: Tensor) -> float:
    return likelihood.log_likelihood(output.detach().double(), targets).item()


def _check_some_examples(examples: int) -> None:
    if not examples:
        raise InvalidValue("loader yielded no examples; an exhausted iterator must be made again")
