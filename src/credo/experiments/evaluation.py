"""Scores of the belief a run holds: on its test data after every epoch, on unfamiliar data at the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.data.batches import Batches, share_of
from credo.data.examples import Examples, Normalise
from credo.experiments.ranks import Ranks
from credo.experiments.tasks import Task
from credo.predict.functions import AnyPosterior

CHUNK = 500  # examples at a time: fits in cache, and a request to stop is heard in between


@dataclass(frozen=True)
class Evaluator:
    """`between` is called before every chunk, on all ranks alike, and may raise to stop."""

    task: Task
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
