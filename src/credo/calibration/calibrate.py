"""`credo.calibrate`: the scale of a posterior and the temperature of its predictions, by validation NLL.

    min over s, T of  −1/N Σᵢ log (1/C) Σ_c softmax(f(xᵢ; μ + √s·σ·ε_c) / T)_{yᵢ}

The ε_c are the same for every s (common random numbers), so that the objective is a smooth function. For each s the
network is run once; the best T for it is found from the answers, which are kept. What remains is a search over log s.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from credo.calibration.objectives import Grid, Objective, OfClasses, OfLabels, OfValues, minimise
from credo.errors import InvalidType, InvalidValue
from credo.metrics.targets import IGNORED
from credo.posterior.base import Posterior
from credo.posterior.model_copy import preserve_rng
from credo.predict.ensemble import Ensemble
from credo.predict.functions import AnyPosterior, functions_of
from credo.predict.inputs import Batch, Reader
from credo.predict.outputs import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    Noise,
    Task,
    likelihood_of,
)
from credo.validate import whole

Fit: TypeAlias = Literal["both", "scale", "temperature", "noise"]
GAIN = 1e-6  # nats, relative to 1 + |NLL|: smaller differences are rounding, and change nothing
WORTH = 1e-4  # nats: towards scale zero, and T zero or infinity, the NLL is flat; what gains less is not worth going on
NO_ERRORS = (
    0.02  # nats: a mean NLL below is that of examples which are all predicted right, and nearly certainly
)
SCALES = Grid(step=math.log(2), steps=8, most=20, tolerance=math.log(1.02))
SHARPNESS = Grid(step=math.log(2), steps=3, most=14, tolerance=math.log(1.002))


@dataclass(frozen=True)
class Calibration:
    """What to pass on: `credo.predict(model, found.posterior, x, **found.options)`."""

    posterior: AnyPosterior  # with its scale, where one was fitted
    scale: float  # what σ² was multiplied by
    task: Task
    temperature: float  # of the logits; 1 for regression
    noise: Noise  # of regression
    class_dim: int | None
    nll_before: float  # on the validation data, in nats; with `unbiased` the estimate for very many samples
    nll_after: float  # never more
    samples: int
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `predict` that belong to it; `samples` and `seed` stay the caller's choice."""
        own = {"noise": self.noise} if self.task == "regression" else {"temperature": self.temperature}
        place = {} if self.class_dim is None else {"class_dim": self.class_dim}
        return {"task": self.task, **own, **place}


def calibrate(
    model: nn.Module,
    posterior: AnyPosterior,
    validation: object,
    *,
    fit: Fit | None = None,
    samples: int = 10,
    unbiased: bool = False,
    seed: int = 0,
    task: Task = "classification",
    temperature: float = 1.0,
    noise: Noise = None,
    class_dim: int | None = None,
    ignore_index: int | None = IGNORED,
    target: str | None = None,
    batch_size: int | None = None,
    vectorise: bool | None = None,
) -> Calibration:
    """Fit the scale of σ² and the temperature (of regression: the noise) by the NLL of validation data.

    The model is not touched. What was given is always a candidate: the result has at most its NLL, at the same
    `samples` and `seed`. The fit is for that number of samples; for few of them another scale is best than for many.
    For the scale of the posterior itself, that of very many samples, there is `unbiased`.

    Args:
        validation: a pair (inputs, targets) of tensors or arrays, or an iterable of batches (x, y) or dicts. Data that
            were not trained on. A loader is read once for each scale that is tried, about 25 times.
        fit: "both"; "scale" alone; "temperature" alone, or for regression "noise" alone. None fits both where the
            posterior has variances, and else what is left: "mean", dropout and ensembles have a temperature only.
        temperature, noise: what was used so far, where the search begins; kept if it is not fitted.
        unbiased: fit to the NLL of very many samples, as estimated from these: the part of the NLL that comes from
            their small number is taken off (to first order). `nll_before` and `nll_after` are that estimate too.
        samples, seed, task, class_dim, target, batch_size, vectorise: as in `credo.predict`.
        ignore_index: class targets that do not count.
    """
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size, at_least=1)
    likelihood = likelihood_of(task, noise, temperature, class_dim)
    scale_too, sharpness_too = _what_to_fit(fit, posterior, likelihood)
    search = _Search(
        model=model,
        posterior=posterior,
        likelihood=likelihood,
        samples=_samples(samples, unbiased),
        unbiased=unbiased,
        seed=whole("seed", seed, at_least=0),
        vectorise=vectorise,
        reader=Reader(model, target),
        validation=_reread(validation),
        batch_size=batch_size,
        ignore_index=ignore_index,
    )
    before = search.given()
    best = search.best(before, scale_too, sharpness_too)
    regression = isinstance(likelihood, Gaussian)
    if not regression and sharpness_too and best.nll < NO_ERRORS and best.value < before.value:
        warnings.warn(
            f"every validation example is predicted right, so nothing but a weak prior bounds the temperature: "
            f"{best.value:.3g}. Give more validation data, or keep the temperature at 1",
            stacklevel=2,
        )
    return Calibration(
        posterior=search.scaled(best.scale),
        scale=best.scale,
        task=task,
        temperature=1.0 if regression else best.value,
        noise=_noise(noise, best.value) if regression and best != before else noise,
        class_dim=class_dim,
        nll_before=before.nll,
        nll_after=best.nll,
        samples=samples,
        seed=seed,
    )


@dataclass(frozen=True)
class Fitted:
    """A candidate: the scale, the temperature or multiple of the noise, and the NLL they give."""

    nll: float
    scale: float
    value: float

    def better_than(self, other: "Fitted") -> bool:
        return other.nll == math.inf > self.nll or self.nll < other.nll - GAIN * (1 + abs(other.nll))


@dataclass
class _Search:
    """Runs the network on the validation data, once a scale."""

    model: nn.Module
    posterior: AnyPosterior
    likelihood: Likelihood
    samples: int
    unbiased: bool
    seed: int
    vectorise: bool | None
    reader: Reader
    validation: object
    batch_size: int | None
    ignore_index: int | None

    def given(self) -> Fitted:
        """What the caller has, unchanged."""
        self._first = self._answered(self.posterior)
        value = _given_value(self.likelihood)
        nll = self._first.nll(value)
        if math.isnan(nll):
            raise InvalidValue(
                "the validation NLL is not a number: the model's outputs or the targets are not finite"
            )
        return Fitted(nll, 1.0, value)

    def best(self, before: Fitted, scale_too: bool, sharpness_too: bool) -> Fitted:
        start = before.value or self._first.mean_square() if sharpness_too else None
        tried: dict[float, Fitted] = {}

        def at(x: float) -> float:
            tried[x] = self._at_scale(math.exp(x), before.value, start)
            return tried[x].nll

        at(0.0)
        chosen = before
        for candidate in (
            tried[0.0],
            *([tried[minimise(at, SCALES, WORTH, flat_below=True)[0]]] if scale_too else []),
        ):
            chosen = candidate if candidate.better_than(chosen) else chosen
        return chosen

    def scaled(self, scale: float) -> AnyPosterior:
        if scale == 1.0:
            return self.posterior
        assert isinstance(self.posterior, Posterior)
        return self.posterior.scaled(scale)

    def _at_scale(self, scale: float, given: float, start: float | None) -> Fitted:
        """The least NLL at a scale; with a `start`, over the temperatures or noises around it."""
        try:
            candidate = self.scaled(scale)
        except InvalidValue:  # variances out of the range of their dtype
            return Fitted(math.inf, scale, given)
        objective = self._first if scale == 1.0 else self._answered(candidate)
        if start is None:
            return Fitted(objective.nll(given), scale, given)

        def judged(x: float) -> float:
            value = start * math.exp(x)
            return objective.nll(value) + objective.prior(value)

        value = start * math.exp(minimise(judged, SHARPNESS, WORTH)[0])
        return Fitted(objective.nll(value), scale, value)

    def _corrects(self) -> bool:
        """The members of an ensemble are all there are: nothing was sampled."""
        return self.unbiased and not isinstance(self.posterior, Ensemble)

    def _answered(self, posterior: AnyPosterior) -> Objective:
        read = self.likelihood.read
        functions = functions_of(self.model, posterior, self.samples, self.seed, read, self.vectorise)
        objective = _objective(self.likelihood, self.ignore_index, self._corrects())
        with preserve_rng(self.seed, self.reader.device):
            for batch in _with_targets(self.reader.labelled(self.validation, self.batch_size)):
                columns = zip(*functions(batch), strict=True)
                objective.add(tuple(torch.cat(column) for column in columns), batch.target)
        return objective


def _what_to_fit(fit: object, posterior: object, likelihood: Likelihood) -> tuple[bool, bool]:
    """Whether the scale is fitted, and whether the temperature or noise is."""
    regression, sharpness = isinstance(likelihood, Gaussian), "temperature"
    if regression:
        sharpness = "noise"
    if fit not in (None, "both", "scale", sharpness):
        other = " (task='regression' has noise instead of a temperature)" if regression else ""
        raise InvalidValue(f"fit must be 'both', 'scale', {sharpness!r} or None, got {fit!r:.80}{other}")
    has_variance = isinstance(posterior, Posterior) and len(posterior.deterministic) < len(posterior.mean)
    has_sharpness = not (isinstance(likelihood, Gaussian) and likelihood.learnt)
    if fit in ("both", "scale") and not has_variance:
        name = repr(posterior) if isinstance(posterior, str) else type(posterior).__name__
        raise InvalidValue(
            f"fit={fit!r}: the posterior {name:.80} has no variances to scale; fit={sharpness!r} is what it has"
        )
    if fit in ("both", "noise") and not has_sharpness:
        raise InvalidValue(f"fit={fit!r}: noise='model' is told by the model and not fitted; use fit='scale'")
    scale, value = fit in (None, "both", "scale") and has_variance, fit != "scale" and has_sharpness
    if not scale and not value:
        raise InvalidValue("nothing to fit: the posterior has no variances, and noise='model' is the model's")
    return scale, value


def _samples(samples: object, unbiased: object) -> int:
    found = whole("samples", samples, at_least=1)
    if not isinstance(unbiased, bool):
        raise InvalidType(f"unbiased must be True or False, got {unbiased!r:.80}")
    if unbiased and found == 1:
        raise InvalidValue("unbiased=True estimates from the spread of the samples, and samples=1 has none")
    return found


def _objective(likelihood: Likelihood, ignore_index: int | None, unbiased: bool) -> Objective:
    if isinstance(likelihood, Gaussian):
        return OfValues(likelihood.noise if _given_value(likelihood) else torch.ones(()), unbiased)
    return OfClasses(ignore_index, unbiased) if isinstance(likelihood, Categorical) else OfLabels(unbiased)


def _given_value(likelihood: Likelihood) -> float:
    """The temperature, or what multiplies the noise: 1, and 0 where there is none, for then its unit is 1."""
    if isinstance(likelihood, Categorical | Bernoulli):
        return likelihood.temperature
    assert isinstance(likelihood, Gaussian)
    return (
        1.0 if likelihood.learnt or (likelihood.noise is not None and bool(likelihood.noise.any())) else 0.0
    )


def _noise(given: Noise, value: float) -> Noise:
    if isinstance(given, str):
        return given
    if isinstance(given, Tensor):
        return given * value if bool(given.any()) else value
    return given * value if given else value or None


def _reread(validation: object) -> object:
    """Iterators can be read once, and are kept; loaders, lists and tensors are read again."""
    return list(validation) if isinstance(validation, Iterator) else validation


def _with_targets(batches: Iterator[Batch]) -> Iterator[Batch]:
    found = False
    for batch in batches:
        if batch.target is None:
            raise InvalidValue(
                "a validation batch has no target; give (inputs, targets), a loader of (x, y), or dicts with the"
                " target under its usual name or target=..."
            )
        if not batch.is_empty():
            found = True
            yield batch
    if not found:
        raise InvalidValue("validation holds no examples; an exhausted iterator must be made again")
