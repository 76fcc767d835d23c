"""What the training loop knows of a method: a learner takes batches and holds a posterior.

credo's own optimisers are their posterior. A torch optimiser leaves an approximation of one, made around its weights:
while training, all but MC-dropout predict with the weights as they are, and before the last evaluation `conclude` makes
what the method is about; done twice, as after a crash, it gives the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credo.baselines import SWAG, laplace
from credo.baselines.laplace_fit import STRUCTURES
from credo.distributed import SharedGradients
from credo.errors import CallOrderError, InvalidValue, NonFiniteError
from credo.experiments.names import known
from credo.experiments.tasks import PredictionTask, noise_of
from credo.kernels.update import all_finite
from credo.optim.base import BayesianOptimizer
from credo.optim.checks import MAX_REFUSED
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
    task: PredictionTask
    seed: int


class Approximation:
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
class DropoutApproximation(Approximation):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # An error for a model without dropout comes now, not after the first epoch
        self._posterior = DropoutPosterior(model)

    def now(self) -> AnyPosterior:
        return self._posterior


@final
class SwagApproximation(Approximation):
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
class LaplaceApproximation(Approximation):
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


class Outcome(NamedTuple):
    """Of one batch, at the weights the gradient was taken at; tensors, since reading them would wait for the device."""

    loss: Tensor  # mean over the examples of all ranks
    hits: Tensor  # how many of this rank's were right


NO_HITS: Final = torch.tensor(0.0, dtype=torch.float64)


class BatchLearner(ABC):
    """`optimizer.param_groups` hold lr, and τ where there is one: schedules set them there."""

    optimizer: Optimizer

    @abstractmethod
    def train_batch(self, inputs: Tensor, targets: Tensor) -> Outcome:
        """One step; among several processes on this rank's share of the batch, and the loss is that of all of it."""

    @abstractmethod
    def posterior(self) -> AnyPosterior:
        """What `credo.predict` averages over."""

    def epoch_ended(self, epoch: int) -> None:  # noqa: B027
        """`epoch` epochs have been trained; most methods have nothing to do."""

    def conclude(self, material: Material) -> None:  # noqa: B027
        """Training has ended, and the last evaluation comes next; most methods have nothing to do."""

    @property
    @abstractmethod
    def refused(self) -> int:
        """Steps that were not taken because a loss, gradient or curvature was not finite."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resumes exactly. The options (damping, momentum, …) stay those this learner was built with."""


@final
class PlainLearner(BatchLearner):
    """Any torch optimiser, and a posterior around what it finds. Non-finite steps are refused, as VOGN does."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, task: PredictionTask, approximation: Approximation
    ) -> None:
        self.optimizer, self._model, self._task = optimizer, model, task
        self._approximation = approximation
        self._counts = {"refused": 0, "refused_in_a_row": 0}
        self._shared = SharedGradients(model, optimizer)

    def train_batch(self, inputs: Tensor, targets: Tensor) -> Outcome:
        self.optimizer.zero_grad()
        own, hits = self._backward(inputs, targets) if len(targets) else (None, NO_HITS)
        loss = self._shared.average(own, len(targets))
        self._step_or_refuse(loss)
        return Outcome(loss, hits)

    def _backward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = self._model(inputs)
        loss = self._task.loss(output, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), self._task.hits(output.detach(), targets)

    def _step_or_refuse(self, loss: Tensor) -> None:
        grads = [
            p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if all_finite([loss, *grads]):
            self.optimizer.step()
            self._counts["refused_in_a_row"] = 0
            return
        self._counts["refused"] += 1
        self._counts["refused_in_a_row"] += 1
        if self._counts["refused_in_a_row"] >= MAX_REFUSED:
            raise NonFiniteError(
                f"{MAX_REFUSED} steps in a row had a non-finite loss or gradient and were refused. The weights are the "
                "last good ones. Lower lr, or look at the data."
            )

    def posterior(self) -> AnyPosterior:
        return self._approximation.now()

    def epoch_ended(self, epoch: int) -> None:
        self._approximation.epoch_ended(epoch)

    def conclude(self, material: Material) -> None:
        self._approximation.conclude(material)

    @property
    def refused(self) -> int:
        return self._counts["refused"]

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "counts": dict(self._counts),
            "belief": self._approximation.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(with_options_of(self.optimizer, saved["optimizer"]))
        self._counts.update(saved["counts"])
        self._approximation.load_state_dict(saved.get("belief", {}))


@final
class PosteriorLearner(BatchLearner):
    """credo's own optimisers, whose state is a posterior."""

    optimizer: BayesianOptimizer

    def __init__(self, model: nn.Module, optimizer: BayesianOptimizer, task: PredictionTask) -> None:
        self.optimizer, self._model, self._task = optimizer, model, task

    def train_batch(self, inputs: Tensor, targets: Tensor) -> Outcome:
        if not len(targets):  # this rank's share of the batch is empty
            return Outcome(_given(self.optimizer.step()), NO_HITS)
        outputs: list[Tensor] = []

        def closure() -> Tensor:
            output = self._model(inputs)
            if self.optimizer.settings.get("vectorized"):  # all samples at once: credo runs the backward pass
                return self._task.losses(Overheard.apply(output, outputs.append), targets)  # type: ignore[no-untyped-call]
            loss = self._task.loss(output, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            outputs.append(output.detach())
            return loss

        loss = _given(self.optimizer.step(closure))
        hits = [self._task.hits(output, targets).mean() for output in outputs]
        return Outcome(loss, torch.stack(hits).mean())

    def posterior(self) -> AnyPosterior:
        return self.optimizer.posterior()

    @property
    def refused(self) -> int:
        return self.optimizer.counters["refused"]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state = with_options_of(self.optimizer, saved["optimizer"])
        state["credo"] = {**state["credo"], "settings": dict(self.optimizer.settings)}
        self.optimizer.load_state_dict(state)


def _given(loss: Tensor | None) -> Tensor:
    assert loss is not None  # a closure was given, or other ranks have a loss
    return loss


class Overheard(torch.autograd.Function):
    """The identity, which lets the value be seen outside of `torch.vmap`: all samples of it, first dimension K."""

    @staticmethod
    def forward(value: Tensor, hear: Callable[[Tensor], None]) -> Tensor:
        hear(value.detach())
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, value: Tensor, hear: Callable[[Tensor], None]) -> Any:
        return Overheard.apply(value.movedim(in_dims[0], 0), hear), 0  # type: ignore[no-untyped-call]


def with_options_of(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state under the optimiser's own options: torch would take the saved ones, whatever was asked."""
    groups = [
        {**other, **{name: value for name, value in own.items() if name not in ("params", "param_names")}}
        for own, other in zip(optimizer.param_groups, saved["param_groups"], strict=False)
    ]
    return {**saved, "param_groups": groups}
