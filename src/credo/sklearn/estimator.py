"""What the two estimators share: their parameters, how they learn, what they keep, and their files.

`fit` cuts the examples into three parts: those that are trained on; a validation part (`validation_fraction`), by which
the epoch is chosen and the width of predictions is fitted; and, with a `coverage`, a calibration part
(`calibration_fraction`), which nothing else sees, for split-conformal prediction.
"""

import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from credo.calibration.objectives import Grid
from credo.errors import InvalidType, InvalidValue
from credo.optim import VOGN, BayesianOptimizer
from credo.posterior import Posterior, load_posterior
from credo.sklearn import conformal
from credo.sklearn.module import Build, Scaled, check_outputs, dtype_of, network
from credo.sklearn.training import FitBudget, FitProblem, Trained, train
from credo.validate import positive, whole

FORMAT = 1  # of saved estimators
FEWEST = 10  # validation examples, below which there is no validation
GAIN = 1e-6  # nats: what gains less is rounding
WIDTHS = Grid(step=math.log(2) / 2, steps=4, most=20, tolerance=math.log(1.002))
LEVEL = 0.9  # of intervals where no coverage is asked for
Optimizer = Callable[..., BayesianOptimizer]
Self = TypeVar("Self", bound="VariationalEstimator")


class Parts(NamedTuple):
    """Row numbers: what is trained on, validated with, and calibrated with."""

    train: numpy.ndarray[Any, Any]
    validation: numpy.ndarray[Any, Any]
    calibration: numpy.ndarray[Any, Any]


class VariationalEstimator(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn has no types
    """Parameters are scikit-learn's where it has them; see `VariationalClassifier`."""

    module_: Scaled
    posterior_: Posterior

    def __init__(
        self,
        module: torch.nn.Module | Build | None = None,
        *,
        hidden_layer_sizes: tuple[int, ...] = (64, 64),
        optimizer: Optimizer | None = None,
        max_iter: int = 200,
        batch_size: int = 32,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 20,
        samples: int = 20,
        coverage: float | None = None,
        calibration_fraction: float = 0.2,
        random_state: object = None,
    ):
        self.module = module
        self.hidden_layer_sizes = hidden_layer_sizes
        self.optimizer = optimizer
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.samples = samples
        self.coverage = coverage
        self.calibration_fraction = calibration_fraction
        self.random_state = random_state

    # What an estimator says

    @abstractmethod
    def _targets(self, y: Any) -> Tensor:
        """Targets as the loss wants them."""

    @abstractmethod
    def _make_module(self, net: torch.nn.Module, features: Tensor, targets: Tensor) -> Scaled:
        """The network between scaled features and answers in the targets' units."""

    @abstractmethod
    def _outputs(self) -> int:
        """How many numbers the network answers with."""

    @abstractmethod
    def _problem(self, features: Tensor, targets: Tensor) -> FitProblem:
        """The losses of the examples that are trained on."""

    @abstractmethod
    def _nll(self, posterior: Posterior, features: Tensor, targets: Tensor, samples: int) -> float:
        """The mean NLL of predictions."""

    @abstractmethod
    def _fit_width(self, features: Tensor, targets: Tensor) -> None:
        """Fits how sure predictions are, by validation data."""

    @abstractmethod
    def _scores(self, features: Tensor, targets: Tensor) -> conformal.Array:
        """Conformal scores of the calibration part."""

    @abstractmethod
    def _extra(self) -> dict[str, Any]:
        """What files keep beside the parameters and the posterior; JSON."""

    @abstractmethod
    def _take_extra(self, extra: dict[str, Any]) -> None:
        """What `_extra` gave."""

    # Learning

    def _learn(self, X: Any, y: Any, *, first: bool) -> None:
        """From arrays that are checked; a first call starts anew, further ones take the posterior as prior."""
        self._check_parameters()
        if first:
            self.seed_ = seed_of(self.random_state)
            self.n_fits_ = 0
        order = numpy.random.default_rng([self.seed_, self.n_fits_])
        parts = self._parts(len(X), order)
        targets = self._targets(y)
        features = torch.from_numpy(numpy.array(X, dtype=numpy.float64))  # a copy: some are read-only
        if first:
            net = network(
                self.module, tuple(self.hidden_layer_sizes), X.shape[1], self._outputs(), self.seed_
            )
            features = features.to(dtype_of(net))
            own = torch.from_numpy(parts.train)
            self.module_ = self._make_module(net, features[own], targets[own])
            check_outputs(net, self.module_.standardised(features[own[:1]]), self._outputs())
        trained = self._trained(
            features.to(dtype_of(self.module_)), targets, parts, order, None if first else self.posterior_
        )
        self.posterior_, self.n_iter_ = trained.posterior, trained.epochs
        self.loss_curve_, self.validation_nll_ = trained.losses, trained.validation
        self.n_fits_ += 1
        self._place(trained.posterior)
        features = features.to(dtype_of(self.module_))
        if len(parts.validation):
            rows = torch.from_numpy(parts.validation)
            self._fit_width(features[rows], targets[rows])
        self.threshold_: float | None = None
        if self.coverage is not None:
            rows = torch.from_numpy(parts.calibration)
            scores = self._scores(features[rows], targets[rows])
            self.threshold_ = conformal.threshold(scores, self.coverage)

    def _trained(
        self,
        features: Tensor,
        targets: Tensor,
        parts: Parts,
        order: numpy.random.Generator,
        prior: Posterior | None,
    ) -> Trained:
        rows, held = torch.from_numpy(parts.train), torch.from_numpy(parts.validation)
        make = default_optimizer if self.optimizer is None else self.optimizer
        given: dict[str, Any] = {} if prior is None else {"prior": prior}
        self.module_.train()
        optimizer = make(self.module_, data_size=len(rows), seed=self.seed_ + self.n_fits_, **given)
        if not isinstance(optimizer, BayesianOptimizer):
            raise InvalidType(
                f"optimizer made a {type(optimizer).__name__}; it must make a credo optimiser, as credo.VOGN does: "
                "optimizer(module, data_size=..., seed=...)"
            )
        validate = None
        if len(held):
            few = min(self.samples, 10)

            def validate(posterior: Posterior) -> float:
                return self._nll(posterior, features[held], targets[held], few)

        problem = self._problem(features[rows], targets[rows])
        budget = FitBudget(self.max_iter, self.batch_size, self.n_iter_no_change)
        trained = train(optimizer, problem, len(rows), order, budget, validate)
        if validate is not None and trained.epochs == self.max_iter and self.early_stopping:
            last = len(trained.validation) - 1 - trained.validation.index(min(trained.validation))
            if last < self.n_iter_no_change and self.max_iter >= 100:
                warnings.warn(
                    f"the validation NLL was still falling after max_iter={self.max_iter} epochs. Raise max_iter.",
                    ConvergenceWarning,
                    stacklevel=4,
                )
        return trained

    def _place(self, posterior: Posterior) -> None:
        """The mean into the module, which is then the estimator's best single network."""
        placed = {**posterior.mean, **posterior.buffers}
        own = self.module_.state_dict()
        with torch.no_grad():
            for name, tensor in placed.items():
                own[name].copy_(tensor)
        self.module_.eval()

    def _parts(self, examples: int, order: numpy.random.Generator) -> Parts:
        rows = order.permutation(examples)
        calibration = validation = 0
        if self.coverage is not None:
            calibration = round(self.calibration_fraction * examples)
            least = conformal.smallest_set(self.coverage)
            if calibration < least:
                raise InvalidValue(
                    f"coverage={self.coverage} needs at least {least} calibration examples, and "
                    f"calibration_fraction={self.calibration_fraction} of {examples} are {calibration}. Give more "
                    "examples, raise calibration_fraction, or lower coverage"
                )
        if self.early_stopping:
            validation = round(self.validation_fraction * (examples - calibration))
            validation = validation if validation >= FEWEST else 0
        ends = numpy.cumsum([calibration, validation])
        return Parts(rows[ends[1] :], rows[ends[0] : ends[1]], rows[: ends[0]])

    def _check_parameters(self) -> None:
        for name in ("max_iter", "batch_size", "n_iter_no_change", "samples"):
            whole(name, getattr(self, name), at_least=1)
        for name in ("validation_fraction", "calibration_fraction", "coverage"):
            value = getattr(self, name)
            if name == "coverage" and value is None:
                continue
            if positive(name, value) >= 1:
                raise InvalidValue(f"{name} must be below 1, got {value}")

    # Predicting

    def _features(self, X: Any) -> Tensor:
        """Checked features of examples to predict."""
        check_is_fitted(self, "posterior_")
        X = validate_data(self, X, reset=False, dtype=numpy.float64)
        return torch.from_numpy(numpy.array(X)).to(dtype_of(self.module_))

    def _level(self) -> float:
        return LEVEL if self.coverage is None else self.coverage

    # Files

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the fitted estimator into one verified safetensors file: the posterior, all else as its metadata.

        A `module` or an `optimizer` that was given is code, and is given again to `load`.
        """
        check_is_fitted(self, "posterior_")
        given = {n: v for n, v in self.get_params(deep=False).items() if n not in ("module", "optimizer")}
        given["hidden_layer_sizes"] = list(given["hidden_layer_sizes"])
        if not isinstance(given["random_state"], int | None):
            given["random_state"] = None
        fitted = {
            name: getattr(self, name)
            for name in ("seed_", "n_fits_", "n_iter_", "loss_curve_", "validation_nll_", "threshold_")
        }
        fitted["n_features_in_"] = self.n_features_in_
        names = getattr(self, "feature_names_in_", None)
        fitted["feature_names_in_"] = None if names is None else list(names)
        own = {
            "format": FORMAT,
            "class": type(self).__name__,
            "module": self.module is not None,
            "parameters": given,
            "fitted": fitted,
            "extra": self._extra(),
        }
        posterior = self.posterior_
        holder = type(posterior).from_tensors(
            posterior.tensors(), {**posterior.metadata, "estimator": json.loads(json.dumps(own))}
        )
        holder.with_buffers(self._buffers()).save(path)

    def _buffers(self) -> dict[str, Tensor]:
        """All of the module that is not in the posterior."""
        own = self.posterior_.mean
        return {n: t for n, t in self.module_.state_dict().items() if n not in own}

    @classmethod
    def load(
        cls: type[Self], path: str | PathLike[str], *, module: Any = None, optimizer: Optimizer | None = None
    ) -> Self:
        """The estimator that `save` wrote."""
        posterior = load_posterior(path)
        own = posterior.metadata.get("estimator")
        if not isinstance(own, dict) or own["format"] > FORMAT or own["class"] != cls.__name__:
            found = own["class"] if isinstance(own, dict) else "posterior"
            raise InvalidValue(f"{path} holds a {found}, and not a {cls.__name__} that this credo can read.")
        if own["module"] and module is None:
            raise InvalidValue(f"{path} was saved with a module of its own; give it: load(path, module=...)")
        parameters = {
            **own["parameters"],
            "hidden_layer_sizes": tuple(own["parameters"]["hidden_layer_sizes"]),
        }
        made = cls(module, optimizer=optimizer, **parameters)
        fitted = dict(own["fitted"])
        names = fitted.pop("feature_names_in_")
        if names is not None:
            made.feature_names_in_ = numpy.asarray(names, dtype=object)
        for name, value in fitted.items():
            setattr(made, name, value)
        made._take_extra(own["extra"])
        made._rebuild(posterior)
        return made

    def _rebuild(self, posterior: Posterior) -> None:
        inputs, outputs = self.n_features_in_, self._outputs()
        net = network(self.module, tuple(self.hidden_layer_sizes), inputs, outputs, self.seed_)
        blank = torch.zeros(1, inputs, dtype=dtype_of(net))
        self.module_ = self._make_module(net, blank, torch.zeros(1, dtype=blank.dtype))
        metadata = {name: value for name, value in posterior.metadata.items() if name != "estimator"}
        bare = type(posterior).from_tensors(posterior.tensors(), metadata)
        self.posterior_ = bare.with_buffers(posterior.buffers) if posterior.buffers else bare
        self._place(self.posterior_)


def default_optimizer(module: torch.nn.Module, **options: Any) -> BayesianOptimizer:
    """VOGN with a weight decay of 3/N: tables are often small. The prior N(0, 1/100) is tempered by 0.03."""
    return VOGN(module, tempering=0.03, prior_precision=100.0, **options)


def prior(logarithm: float) -> float:
    """Minus the log density of a temperature, or of a factor of the noise: log-normal around 1, with σ = ½.

    A few dozen validation examples cannot tell that a network is never wrong.
    """
    return 2.0 * logarithm**2


def seed_of(random_state: object) -> int:
    """A seed from what scikit-learn calls a random state; None takes one from the system, not from a global stream."""
    if random_state is None:
        return int(numpy.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, numpy.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, numpy.random.Generator):
        return int(random_state.integers(2**31))
    if isinstance(random_state, bool) or not isinstance(random_state, int | numpy.integer):
        raise InvalidType(f"random_state must be an int, a numpy generator or None, got {random_state!r:.80}")
    if random_state < 0:
        raise InvalidValue(f"random_state must be at least 0, got {random_state}")
    return int(random_state)


def table(X: Any, columns: dict[str, Any]) -> Any:
    """A DataFrame with the index of X if X is one, else a structured array with the columns as fields."""
    if hasattr(X, "index") and hasattr(X, "columns"):
        import pandas  # type: ignore[import-untyped,unused-ignore]

        return pandas.DataFrame(columns, index=X.index)
    kinds = [(name, numpy.asarray(values).dtype) for name, values in columns.items()]
    found = numpy.empty(len(next(iter(columns.values()))), dtype=kinds)
    for name, values in columns.items():
        found[name] = values
    return found


def normal_width(level: float) -> float:
    """z with P(|Z| ≤ z) = level for a standard normal Z."""
    return math.sqrt(2) * float(torch.tensor(level, dtype=torch.float64).erfinv())
