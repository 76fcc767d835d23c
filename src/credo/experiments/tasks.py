"""What a task decides: the loss of a batch, what is counted while training, and the scores of a prediction."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo import metrics
from credo.data.batches import Batches, share_of
from credo.data.examples import Examples, Normalise
from credo.errors import InvalidValue
from credo.experiments.names import known
from credo.experiments.ranks import Ranks
from credo.experiments.recipe import Training
from credo.predict import predict
from credo.predict.functions import AnyPosterior

TASKS = ("classification", "regression")
Predicted: TypeAlias = dict[str, Tensor]  # by name, examples first


class PredictionTask(ABC):
    """The loss is −log p(y|x, w), a mean over examples: what both a posterior and a weight decay are relative to."""

    @abstractmethod
    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        """The negative log-likelihood of each example, (M,), in nats."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Their mean."""
        return self.losses(output, targets).mean()

    @abstractmethod
    def hits(self, output: Tensor, targets: Tensor) -> Tensor:
        """How many of the (…, M) examples are right, summed over the last dimension; NaN where that makes no sense."""

    @abstractmethod
    def predict(
        self, model: nn.Module, posterior: AnyPosterior, inputs: Iterable[Any], samples: int, seed: int
    ) -> dict[str, Tensor]:
        """All that figures and scores need of a prediction, by name, examples first."""

    @abstractmethod
    def scores(self, prediction: dict[str, Tensor], targets: Tensor) -> dict[str, float]:
        """The metrics of a prediction."""

    @abstractmethod
    def ood_scores(self, familiar: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
        """How well unfamiliar inputs are told apart."""

    @abstractmethod
    def curve(self, prediction: dict[str, Tensor], targets: Tensor) -> dict[str, list[float]]:
        """The calibration curve, bin by bin."""


@final
class Classification(PredictionTask):
    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets, reduction="none")

    def hits(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output.argmax(-1) == targets).sum(-1).double()

    def predict(
        self, model: nn.Module, posterior: AnyPosterior, inputs: Iterable[Any], samples: int, seed: int
    ) -> dict[str, Tensor]:
        prediction = predict(model, posterior, inputs, samples=samples, seed=seed)
        kept = {
            "probs": prediction.probs,
            "log_probs": prediction.log_probs,
            "entropy": prediction.entropy,
            "mutual_information": prediction.mutual_information,
        }
        return {name: tensor.cpu() for name, tensor in kept.items()}

    def scores(self, prediction: dict[str, Tensor], targets: Tensor) -> dict[str, float]:
        functions = ("accuracy", "nll", "brier", "ece", "auroc")
        return {name: getattr(metrics, name)(prediction["probs"], targets) for name in functions}

    def ood_scores(self, familiar: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
        inside, outside = familiar["probs"], other["probs"]
        return {
            "ood_auroc": metrics.ood_auroc(inside, outside),
            "ood_fpr95": metrics.fpr_at_tpr(inside, outside, tpr=0.95),
        }

    def curve(self, prediction: dict[str, Tensor], targets: Tensor) -> dict[str, list[float]]:
        found = metrics.calibration_curve(prediction["probs"], targets)
        return {name: getattr(found, name).tolist() for name in ("confidence", "accuracy", "examples")}


@final
class Regression(PredictionTask):
    """p(y|x, w) = N(y; f(x, w), σ²) with σ² = `noise`, in the units of the targets."""

    def __init__(self, noise: float = 1.0) -> None:
        if not (math.isfinite(noise) and noise > 0):
            raise InvalidValue(f"noise_variance must be a finite number above 0, got {noise!r}.")
        self.noise = noise

    def losses(self, output: Tensor, targets: Tensor) -> Tensor:
        output = output.flatten(1)
        squares = (output - targets.reshape(output.shape)).square().sum(1)
        constant = math.log(2 * math.pi * self.noise) * output.shape[1]
        return 0.5 * (squares / self.noise + constant)

    def hits(self, output: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor(math.nan, dtype=torch.float64, device=output.device)

    def predict(
        self, model: nn.Module, posterior: AnyPosterior, inputs: Iterable[Any], samples: int, seed: int
    ) -> dict[str, Tensor]:
        task: Literal["regression"] = "regression"
        prediction = predict(
            model, posterior, inputs, samples=samples, seed=seed, task=task, noise=self.noise
        )
        kept = {"mean": prediction.mean, "variance": prediction.variance, "epistemic": prediction.epistemic}
        return {name: tensor.cpu() for name, tensor in kept.items()}

    def scores(self, prediction: dict[str, Tensor], targets: Tensor) -> dict[str, float]:
        mean, variance = prediction["mean"].double(), prediction["variance"].double()
        squares = (mean - targets.reshape(mean.shape).double()).square()
        nll = 0.5 * (squares / variance + (2 * math.pi * variance).log())
        return {"rmse": squares.mean().sqrt().item(), "nll": nll.flatten(1).sum(1).mean().item()}

    def ood_scores(self, familiar: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
        return {}

    def curve(self, prediction: dict[str, Tensor], targets: Tensor) -> dict[str, list[float]]:
        return {}


def noise_of(task: PredictionTask) -> float | None:
    """The variance of a regression's observations; None for classification."""
    return task.noise if isinstance(task, Regression) else None


def task_of(training: Training) -> PredictionTask:
    if known("task", training.task, TASKS) == "classification":
        return Classification()
    return Regression(float(training.settings.get("noise_variance", 1.0)))


# The test data: after every epoch, and unfamiliar data at the end

CHUNK = 500  # examples at a time: fits in cache, and a request to stop is heard in between


@dataclass(frozen=True)
class Evaluator:
    """`between` is called before every chunk, on all ranks alike, and may raise to stop."""

    task: PredictionTask
    normalise: Normalise
    samples: int  # C
    seed: int
    device: torch.device
    between: Callable[[], object]
    ranks: Ranks

    def predict(
        self, model: nn.Module, posterior: AnyPosterior, examples: Examples, samples: int | None = None
    ) -> dict[str, Tensor]:
        """The prediction for all examples, on the CPU; `targets` among it. Each rank predicts a share of each chunk."""
        found = self.task.predict(
            model, posterior, self._inputs(examples), samples or self.samples, self.seed
        )
        return {**self._of_all_ranks(found, len(examples)), "targets": examples.targets.cpu()}

    def scores(self, prediction: dict[str, Tensor]) -> dict[str, float]:
        return self.task.scores(prediction, prediction["targets"])

    def curve(self, prediction: dict[str, Tensor]) -> dict[str, list[float]]:
        return self.task.curve(prediction, prediction["targets"])

    def ood_scores(
        self, familiar: dict[str, Tensor], unfamiliar: dict[str, dict[str, Tensor]]
    ) -> dict[str, float]:
        """`ood_auroc.<name>` and `ood_fpr95.<name>` for each set."""
        return {
            f"{metric}.{name}": value
            for name, prediction in unfamiliar.items()
            for metric, value in self.task.ood_scores(familiar, prediction).items()
        }

    def _inputs(self, examples: Examples) -> Iterator[Tensor]:
        rank, ranks = self.ranks.test_share()
        batches = Batches(
            examples,
            CHUNK * ranks,
            shuffle=False,
            normalise=self.normalise,
            device=self.device,
            rank=rank,
            world=ranks,
        )
        for inputs, _ in batches:  # as many on every rank
            self.between()
            yield inputs

    def _of_all_ranks(self, found: dict[str, Tensor], examples: int) -> dict[str, Tensor]:
        """The shares, back in the order of the examples."""
        if self.ranks.alone:
            return found
        chunk = CHUNK * self.ranks.size
        chunks = [range(start, min(start + chunk, examples)) for start in range(0, examples, chunk)]
        order = [
            k
            for rank in range(self.ranks.size)
            for c in chunks
            for k in c[share_of(len(c), rank, self.ranks.size)]
        ]
        back = torch.tensor(order).argsort()
        rows = self.ranks.gathered(found)
        return {name: torch.cat([row[name] for row in rows])[back] for name in found}
