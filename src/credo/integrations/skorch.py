"""skorch with a posterior (extra `skorch`): nets that train with credo's optimisers and predict by samples.

    net = VariationalNetClassifier(MyModule, optimizer__data_size=1000, max_epochs=20)
    net.fit(x, y).predict_proba(x_new)

skorch hands its training step to the optimiser as a closure. `optimizer__data_size` is the number of examples that are
trained on: with skorch's usual validation split, four fifths of what `fit` is given.
"""

from typing import Any, final

import numpy

try:
    import skorch  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError("credo.integrations.skorch needs skorch: pip install 'credo[skorch]'") from error

from credo.integrations.updates import draws, loaded, unwrapped_optimizer
from credo.optim import VOGN
from credo.posterior import Posterior


class VariationalNetMixin:
    """Before skorch's net among the bases. `lr=None` leaves the step to the optimiser; `samples` predict."""

    samples: int = 10
    seed: int = 0
    _own: tuple[str, ...] = ("samples", "seed")

    def __init__(
        self,
        *args: Any,
        optimizer: Any = VOGN,
        lr: float | None = None,
        samples: int = 10,
        seed: int = 0,
        **kwargs: Any,
    ):
        above: Any = super()
        above.__init__(*args, optimizer=optimizer, lr=lr, **kwargs)
        self.samples, self.seed = samples, seed

    def initialize_optimizer(self, triggered_directly: Any = None) -> Any:
        """From the module itself, whose names the posterior then has."""
        own: Any = self
        _, options = own.get_params_for_optimizer("optimizer", own.get_all_learnable_params())
        if options.get("lr") is None:
            options.pop("lr", None)
        own.optimizer_ = own.optimizer(own.module_, **options)
        return self

    def posterior(self) -> Posterior:
        """What is believed now."""
        own: Any = self
        return unwrapped_optimizer(own.optimizer_).posterior()

    def _averaged(self, predict: Any) -> Any:
        """The mean of what the net answers with each of `samples` weights.

        Scores of skorch's callbacks while it trains are of outputs that it has kept, which can be read once: those of
        the mean.
        """
        own: Any = self
        if "forward_iter" in vars(own):
            return numpy.asarray(predict(), dtype=numpy.float64)
        total: Any = 0.0
        weights = draws(own.module_, self.posterior(), self.samples, self.seed)
        for sample in weights:
            with loaded(own.module_, sample):
                total = total + numpy.asarray(predict(), dtype=numpy.float64)
        return total / len(weights)


@final
class VariationalNetClassifier(VariationalNetMixin, skorch.NeuralNetClassifier):  # type: ignore[misc,unused-ignore]
    """skorch's NeuralNetClassifier; probabilities are averages over samples."""

    def predict_proba(self, X: Any) -> Any:
        """p̂(y|x), (examples, classes)."""
        return self._averaged(lambda: skorch.NeuralNetClassifier.predict_proba(self, X))

    def predict(self, X: Any) -> Any:
        """The most probable class."""
        return numpy.asarray(self.classes_)[self.predict_proba(X).argmax(1)]


@final
class VariationalNetRegressor(VariationalNetMixin, skorch.NeuralNetRegressor):  # type: ignore[misc,unused-ignore]
    """skorch's NeuralNetRegressor; predictions are averages over samples."""

    def predict(self, X: Any) -> Any:
        """The mean over samples."""
        return self._averaged(lambda: skorch.NeuralNetRegressor.predict(self, X))
