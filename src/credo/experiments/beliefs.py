"""What a torch optimiser leaves behind, for methods that are no posterior by themselves.

While training, all but MC-dropout believe in the weights as they are. Before the last evaluation, `conclude` makes of
them what the method is about; done twice, as after a crash, it gives the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor, nn

from credo.baselines import SWAG, laplace
from credo.baselines.laplace_fit import STRUCTURES
from credo.errors import CallOrderError, InvalidValue
from credo.experiments.names import known
from credo.experiments.tasks import Task, noise_of
from credo.predict import DropoutPosterior
from credo.predict.functions import AnyPosterior

Pairs = Iterable[tuple[Tensor, Tensor]]
SAMPLES: Final = 8  # with each of the prior precisions that are tried on validation data
PRECISIONS: Final = ("auto", "marglik", "validation")


@dataclass(frozen=True)
class Material:
    """What is at hand when training has ended."""

    batches: Callable[[], Pairs]  # the training data once, shuffled, without augmentation
    validation: Callable[[], Pairs] | None
    task: Task
    seed: int


class Belief:
    """A point: the weights as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def now(self) -> AnyPosterior:
        return "mean"

    def epoch_ended(self, epoch: int) -> None:
        """`epoch` epochs have been trained."""

    def conclude(self, material: Material) -> None:
        """Training has ended."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


@final
class DropoutBelief(Belief):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._posterior = DropoutPosterior(
            model
        )  # refuses a model without dropout now, not after the first epoch

    def now(self) -> AnyPosterior:
        return self._posterior


@final
class SwagBelief(Belief):
    """Collects after every epoch from `collect_from` on; at the end the model becomes the mean of these weights."""

    def __init__(self, model: nn.Module, *, collect_from: int = 1, rank: int = 20) -> None:
        super().__init__(model)
        if collect_from < 1:
            raise InvalidValue(f"collect_from={collect_from} must be at least 1, the first epoch")
        self._swag, self._from, self._concluded = SWAG(model, rank), collect_from, False

    def now(self) -> AnyPosterior:
        return self._swag.posterior() if self._concluded else "mean"

    def epoch_ended(self, epoch: int) -> None:
        if epoch >= self._from and self._swag.collected <= epoch - self._from:  # not twice after a crash
            self._swag.collect(self.model)

    def conclude(self, material: Material) -> None:
        if self._swag.collected < 2:
            raise CallOrderError(
                f"SWAG has collected {self._swag.collected} times from epoch {self._from} on, and needs at least 2: "
                "lower settings.collect_from, or train for more epochs."
            )
        self._swag.load_mean(self.model, material.batches())
        self._concluded = True

    def state_dict(self) -> dict[str, Any]:
        return {"swag": self._swag.state_dict(), "concluded": self._concluded}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved:
            self._swag.load_state_dict(saved["swag"])
            self._concluded = saved["concluded"]


@final
class LaplaceBelief(Belief):
    """`precision`: how the prior's is found; "auto" by validation data where there are any, else "marglik"."""

    def __init__(
        self,
        model: nn.Module,
        *,
        structure: str = "last_layer",
        precision: str = "auto",
        labels: str = "model",
    ) -> None:
        super().__init__(model)
        self._structure = known("structure", structure, STRUCTURES)
        self._precision = known("precision", precision, PRECISIONS)
        self._labels = known("labels", labels, ("model", "data"))
        self._posterior: AnyPosterior = "mean"

    def now(self) -> AnyPosterior:
        return self._posterior

    def conclude(self, material: Material) -> None:
        noise = noise_of(material.task)
        validation = None if material.validation is None else list(material.validation())
        self._posterior = laplace(
            self.model,
            material.batches(),
            self._structure,  # type: ignore[arg-type]
            None if self._precision == "auto" else self._precision,  # type: ignore[arg-type]
            task="classification" if noise is None else "regression",
            noise=noise or 1.0,
            validation=validation,
            samples=SAMPLES,
            seed=material.seed,
            labels=self._labels,  # type: ignore[arg-type]
        )
