"""Scores of the belief a run holds: on its test data after every epoch, on unfamiliar data at the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.data.batches import Batches
from credo.data.examples import Examples
from credo.data.normalise import Normalise
from credo.experiments.tasks import Task
from credo.predict.functions import AnyPosterior

CHUNK = 500  # examples at a time: fits in cache, and a request to stop is heard in between


@dataclass(frozen=True)
class Evaluator:
    """`between` is called before every chunk, and may raise to stop."""

    task: Task
    normalise: Normalise
    samples: int  # C
    seed: int
    device: torch.device
    between: Callable[[], None]

    def predict(self, model: nn.Module, posterior: AnyPosterior, examples: Examples) -> dict[str, Tensor]:
        """The prediction for all examples, on the CPU; `targets` among it."""
        found = self.task.predict(model, posterior, self._inputs(examples), self.samples, self.seed)
        return {**found, "targets": examples.targets.cpu()}

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
        batches = Batches(examples, CHUNK, shuffle=False, normalise=self.normalise, device=self.device)
        for inputs, _ in batches:
            self.between()
            yield inputs
