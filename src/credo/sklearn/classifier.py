"""`VariationalClassifier`: probabilities from a posterior over weights, as a scikit-learn estimator."""

import math
from typing import Any, final

import numpy
import torch
import torch.nn.functional as F
from sklearn.base import ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets, unique_labels  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from credo.calibration.objectives import minimise
from credo.errors import InvalidValue
from credo.posterior import Posterior
from credo.predict import predict
from credo.predict.prediction import Prediction
from credo.sklearn import conformal
from credo.sklearn.estimator import GAIN, WIDTHS, VariationalEstimator, prior, table
from credo.sklearn.module import Classes, Scaled

SMALLEST = 1e-300  # probability: its logarithm stays a number


@final
class _CrossEntropies:
    """The problem of a classifier."""

    def __init__(self, module: Classes, features: Tensor, targets: Tensor):
        self._module, self._features, self._targets = module, module.standardised(features), targets

    def losses(self, rows: Tensor) -> Tensor:
        logits = self._module.net(self._features[rows])
        return F.cross_entropy(logits, self._targets[rows], reduction="none")

    def end_epoch(self) -> None:
        """Nothing to learn beside the weights."""


@final
class VariationalClassifier(ClassifierMixin, VariationalEstimator):  # type: ignore[misc]
    """A Bayesian neural network with scikit-learn's interface.

    module: None, a multi-layer perceptron with `hidden_layer_sizes` in float64; or a torch module (it is copied), or a
        function of (features, outputs) that builds one. It answers (M, features) with logits (M, classes).
    optimizer: None, `credo.VOGN` with a prior for small tables; or any function of (module, data_size=, seed=), and
        prior= for `partial_fit`, that makes a credo optimiser: `functools.partial(credo.IVON, lr=0.1)`.
    max_iter: epochs at most. early_stopping: whether a `validation_fraction` of the examples chooses the epoch and fits
        the softmax temperature; it ends after `n_iter_no_change` epochs without gain. With fewer than 10 such examples,
        or without early stopping, max_iter is the number of epochs.
    samples: of the posterior, for predictions.
    coverage: for split-conformal sets, the probability with which they hold the true class; a `calibration_fraction` of
        the examples is then left out of training. None: no sets.
    random_state: an int is reproducible bit for bit. No global random stream is used or changed.

    There is no sample_weight: the curvature of VOGN squares the gradient of each example, and a weight w in the loss
    counts w² there where w copies of the example count w, so that it could not be exact.

    >>> from sklearn.datasets import load_iris
    >>> from credo.sklearn import VariationalClassifier
    >>> x, y = load_iris(return_X_y=True)
    >>> model = VariationalClassifier(max_iter=30, random_state=0).fit(x, y)
    >>> model.predict_proba(x).shape, model.predict_uncertainty(x).dtype.names
    ((150, 3), ('prediction', 'aleatoric', 'epistemic', 'lower', 'upper'))
    """

    def fit(self, X: Any, y: Any) -> "VariationalClassifier":
        """Learns from (examples, features) and their classes."""
        X, y = validate_data(self, X, y, dtype=numpy.float64)
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        self._learn(X, y, first=True)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "VariationalClassifier":
        """Learns from further examples, with the posterior so far as the prior.

        The first call needs all `classes`, as scikit-learn has it, unless `fit` came before. Scaling stays that of the
        first examples.
        """
        first = not hasattr(self, "posterior_")
        X, y = validate_data(self, X, y, dtype=numpy.float64, reset=first)
        check_classification_targets(y)
        if first:
            if classes is None:
                raise InvalidValue("classes must be passed on the first call to partial_fit.")
            self.classes_ = unique_labels(classes)
        unknown = numpy.setdiff1d(unique_labels(y), self.classes_)
        if len(unknown):
            raise InvalidValue(f"y has the classes {list(unknown)}, which are not in {list(self.classes_)}.")
        self._learn(X, y, first=first)
        return self

    def predict(self, X: Any) -> Any:
        """The most probable class."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Any:
        """p̂(y|x), (examples, classes): the mean over samples of the posterior."""
        return self._prediction(self._features(X)).probs.numpy()

    def predict_log_proba(self, X: Any) -> Any:
        """log p̂(y|x)."""
        return self._prediction(self._features(X)).log_probs.numpy()

    def predict_uncertainty(self, X: Any) -> Any:
        """A table: prediction, aleatoric, epistemic, lower, upper; a DataFrame where X is one.

        aleatoric and epistemic are nats: the mean entropy of the samples, and their mutual information. lower and upper
        are the central 90 % (or `coverage`) of the samples' probabilities of the predicted class.
        """
        found = self._prediction(self._features(X), keep_samples=True)
        best = found.probs.argmax(1)
        assert found.samples is not None
        each = found.samples.gather(2, best[None, :, None].expand(len(found.samples), -1, 1)).squeeze(2)
        tail = (1 - self._level()) / 2
        lower, upper = each.double().quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
        columns = {
            "prediction": self.classes_[best.numpy()],
            "aleatoric": found.expected_entropy.numpy(),
            "epistemic": found.mutual_information.numpy(),
            "lower": lower.numpy(),
            "upper": upper.numpy(),
        }
        return table(X, columns)

    def predict_set(self, X: Any) -> Any:
        """Split-conformal sets, (examples, classes) of booleans; the true class is in its set with `coverage`."""
        check_is_fitted(self, "posterior_")
        if self.threshold_ is None:
            raise InvalidValue("coverage is None: there are no sets. Give one before fit, coverage=0.9")
        return conformal.class_sets(self.predict_proba(X).astype(numpy.float64), self.threshold_)

    def _prediction(self, features: Tensor, keep_samples: bool = False) -> Prediction:
        if len(self.classes_) == 1:
            return _certain(features, self.samples)
        return predict(
            self.module_,
            self.posterior_,
            features,
            samples=self.samples,
            seed=self.seed_,
            temperature=self.temperature_,
            keep_samples=keep_samples,
        )

    # For the base

    def _outputs(self) -> int:
        return max(len(self.classes_), 2)

    def _targets(self, y: Any) -> Tensor:
        self.temperature_ = 1.0
        return torch.from_numpy(numpy.searchsorted(self.classes_, y))

    def _make_module(self, net: torch.nn.Module, features: Tensor, targets: Tensor) -> Scaled:
        return Classes(net, features)

    def _problem(self, features: Tensor, targets: Tensor) -> _CrossEntropies:
        assert isinstance(self.module_, Classes)
        return _CrossEntropies(self.module_, features, targets)

    def _nll(self, posterior: Posterior, features: Tensor, targets: Tensor, samples: int) -> float:
        found = predict(self.module_, posterior, features, samples=samples, seed=self.seed_)
        return float(F.nll_loss(found.log_probs, targets))

    def _fit_width(self, features: Tensor, targets: Tensor) -> None:
        found = self._prediction(features, keep_samples=True)
        assert found.samples is not None
        logits = found.samples.double().clamp_min(SMALLEST).log()  # (S, M, C), up to a constant of each row

        def penalised(log_temperature: float) -> float:
            log_probs = (logits / math.exp(log_temperature)).log_softmax(-1).logsumexp(0) - math.log(
                len(logits)
            )
            return float(F.nll_loss(log_probs, targets)) + prior(log_temperature) / len(targets)

        self.temperature_ = math.exp(minimise(penalised, WIDTHS, GAIN)[0])

    def _scores(self, features: Tensor, targets: Tensor) -> conformal.Array:
        return conformal.class_scores(self._prediction(features).probs.double().numpy(), targets.numpy())

    def _extra(self) -> dict[str, Any]:
        return {
            "classes": self.classes_.tolist(),
            "dtype": self.classes_.dtype.str,
            "temperature": self.temperature_,
        }

    def _take_extra(self, extra: dict[str, Any]) -> None:
        kind = object if extra["dtype"] == "|O" else numpy.dtype(extra["dtype"])
        self.classes_ = numpy.asarray(extra["classes"], dtype=kind)
        self.temperature_ = float(extra["temperature"])


def _certain(features: Tensor, samples: int) -> Prediction:
    """Where the training examples have one class only, there is no doubt to learn."""
    ones, zeros = features.new_ones(len(features), 1), features.new_zeros(len(features))
    many = features.new_ones(samples, len(features), 1)
    return Prediction(ones, ones.log(), zeros, zeros, zeros, many)
