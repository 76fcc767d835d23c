"""`VariationalRegressor`: means and intervals from a posterior over the weights of a network, with learned noise."""

import math
from typing import Any, Literal, final

import numpy
import torch
from sklearn.base import RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from credo.calibration.objectives import minimise
from credo.errors import InvalidValue
from credo.posterior import Posterior
from credo.predict import predict
from credo.predict.prediction import RegressionPrediction
from credo.sklearn import conformal
from credo.sklearn.estimator import GAIN, WIDTHS, Optimizer, VariationalEstimator, normal_width, prior, table
from credo.sklearn.module import Build, Scaled, Values


@final
class _GaussianNlls:
    """The problem of a regressor: −log N(y; f(x), σ²) of standardised targets.

    One variance for all inputs is the mean squared residual under the samples of the last epoch: the maximum of the
    evidence lower bound for σ², given the posterior.
    """

    def __init__(self, module: Values, features: Tensor, targets: Tensor, learns_noise: bool):
        self._learns_noise = learns_noise
        self._module, self._features = module, module.standardised(features)
        self._targets = module.standardised_targets(targets)
        self._squares, self._count = 0.0, 0

    def losses(self, rows: Tensor) -> Tensor:
        mean, log_variance = self._module.answers(self._features[rows])
        squares = (self._targets[rows] - mean).square()
        if self._learns_noise:
            self._squares += float(squares.detach().sum())
            self._count += len(rows)
        return 0.5 * (squares * (-log_variance).exp() + log_variance)

    def end_epoch(self) -> None:
        if self._count:
            variance = max(self._squares / self._count, 1e-10)
            self._module.log_noise.fill_(math.log(variance))
        self._squares, self._count = 0.0, 0


@final
class VariationalRegressor(RegressorMixin, VariationalEstimator):  # type: ignore[misc]
    """A Bayesian neural network for one target, with learned observation noise and scikit-learn's interface.

    module: as for `VariationalClassifier`; it answers (M, features) with (M, 2), mean and log variance, or where the
        noise is none of the network's, with (M, 1) or (M,). Features and targets are standardised around it.
    noise: the variance of the observations. "input": a function of the input that the network learns; "constant": one
        number, learned in closed form; or a variance that is known, in the target's units.
    coverage: for split-conformal intervals, the probability with which they hold the target. None: intervals are the
        central 90 % of the predictive distribution, without a guarantee.

    All other parameters as for `VariationalClassifier`; the validation part fits the noise once more at the end.

    >>> from sklearn.datasets import load_diabetes
    >>> from credo.sklearn import VariationalRegressor
    >>> x, y = load_diabetes(return_X_y=True)
    >>> model = VariationalRegressor(max_iter=20, coverage=0.9, random_state=0).fit(x, y)
    >>> mean, std = model.predict(x, return_std=True)
    >>> model.predict_interval(x).shape
    (442, 2)
    """

    def __init__(
        self,
        module: torch.nn.Module | Build | None = None,
        *,
        hidden_layer_sizes: tuple[int, ...] = (64, 64),
        optimizer: Optimizer | None = None,
        noise: Literal["constant", "input"] | float = "input",
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
        self.noise = noise
        super().__init__(
            module,
            hidden_layer_sizes=hidden_layer_sizes,
            optimizer=optimizer,
            max_iter=max_iter,
            batch_size=batch_size,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
            samples=samples,
            coverage=coverage,
            calibration_fraction=calibration_fraction,
            random_state=random_state,
        )

    def fit(self, X: Any, y: Any) -> "VariationalRegressor":
        """Learns from (examples, features) and one target each."""
        X, y = validate_data(self, X, y, dtype=numpy.float64, y_numeric=True)
        self._learn(X, y, first=True)
        return self

    def partial_fit(self, X: Any, y: Any) -> "VariationalRegressor":
        """Learns from further examples, with the posterior so far as the prior; scaling stays that of the first."""
        first = not hasattr(self, "posterior_")
        X, y = validate_data(self, X, y, dtype=numpy.float64, y_numeric=True, reset=first)
        self._learn(X, y, first=first)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean; with `return_std` also the standard deviation of a new observation."""
        found = self._prediction(self._features(X))
        return (found.mean.numpy(), found.variance.sqrt().numpy()) if return_std else found.mean.numpy()

    def predict_interval(self, X: Any) -> Any:
        """(examples, 2): lower and upper end; see `coverage`."""
        return self._interval(self._prediction(self._features(X)))

    def predict_uncertainty(self, X: Any) -> Any:
        """A table: prediction, aleatoric, epistemic, lower, upper; a DataFrame where X is one.

        aleatoric and epistemic are standard deviations in the target's units, of the observations and of the mean;
        their squares add up to the predictive variance. lower and upper are those of `predict_interval`.
        """
        found = self._prediction(self._features(X))
        lower, upper = self._interval(found).T
        columns = {
            "prediction": found.mean.numpy(),
            "aleatoric": found.aleatoric.sqrt().numpy(),
            "epistemic": found.epistemic.sqrt().numpy(),
            "lower": lower,
            "upper": upper,
        }
        return table(X, columns)

    def _interval(self, found: RegressionPrediction) -> Any:
        width = normal_width(self._level()) if self.threshold_ is None else self.threshold_
        mean, half = found.mean, width * found.variance.sqrt()
        return torch.stack([mean - half, mean + half], 1).numpy()

    def _prediction(self, features: Tensor) -> RegressionPrediction:
        check_is_fitted(self, "posterior_")
        return self._predicted(self.posterior_, features, self.samples)

    def _predicted(self, posterior: Posterior, features: Tensor, samples: int) -> RegressionPrediction:
        options: dict[str, Any] = {"samples": samples, "seed": self.seed_}
        return predict(self.module_, posterior, features, task="regression", noise="model", **options)

    # For the base

    def _outputs(self) -> int:
        return 2 if self.noise == "input" else 1

    def _check_parameters(self) -> None:
        super()._check_parameters()
        known = isinstance(self.noise, int | float) and not isinstance(self.noise, bool) and self.noise > 0
        if self.noise not in ("constant", "input") and not known:
            raise InvalidValue(f"noise must be 'constant', 'input' or a variance > 0, got {self.noise!r:.80}")

    def _targets(self, y: Any) -> Tensor:
        return torch.from_numpy(numpy.array(y, dtype=numpy.float64))

    def _make_module(self, net: torch.nn.Module, features: Tensor, targets: Tensor) -> Scaled:
        module = Values(net, features, targets.to(features.dtype), self.noise == "input")
        if not isinstance(self.noise, str):
            module.log_noise.fill_(math.log(self.noise) - 2 * float(module.target_scale.log()))
        return module

    def _problem(self, features: Tensor, targets: Tensor) -> _GaussianNlls:
        assert isinstance(self.module_, Values)
        return _GaussianNlls(self.module_, features, targets.to(features.dtype), self.noise == "constant")

    def _nll(self, posterior: Posterior, features: Tensor, targets: Tensor, samples: int) -> float:
        found = self._predicted(posterior, features, samples)
        return _mean_nll(found, targets, 0.0)

    def _fit_width(self, features: Tensor, targets: Tensor) -> None:
        """The noise once more, on examples that the weights were not fitted to."""
        if not isinstance(self.noise, str):
            return
        found = self._prediction(features)

        def penalised(log_factor: float) -> float:
            return _mean_nll(found, targets, log_factor) + prior(log_factor) / len(targets)

        factor = minimise(penalised, WIDTHS, GAIN)[0]
        assert isinstance(self.module_, Values)
        self.module_.log_noise += factor
        self.posterior_ = self.posterior_.with_buffers(
            {**self.posterior_.buffers, "log_noise": self.module_.log_noise}
        )

    def _scores(self, features: Tensor, targets: Tensor) -> conformal.Array:
        found = self._prediction(features)
        return conformal.value_scores(*(t.double().numpy() for t in (found.mean, found.variance, targets)))

    def _extra(self) -> dict[str, Any]:
        return {}

    def _take_extra(self, extra: dict[str, Any]) -> None:
        """Noise and scaling are buffers."""


def _mean_nll(found: RegressionPrediction, targets: Tensor, log_factor: float) -> float:
    """The mean Gaussian NLL with the noise variance times e^log_factor."""
    variance = found.aleatoric * math.exp(log_factor) + found.epistemic
    squares = (targets - found.mean).square()
    return float((0.5 * (squares / variance + (2 * math.pi * variance).log())).mean())
