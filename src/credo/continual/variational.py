"""Bayes' rule, task after task: each posterior is the next prior. With VOGN the paper's method, with BBB it is VCL."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from credo.continual.learner import (
    Annealing,
    Learner,
    Loss,
    annealed,
    cross_entropies,
    merged,
    prior_for,
    reset_parameters,
)
from credo.continual.tasks import Coreset, StoredCoreset, Task, joined
from credo.errors import CallOrderError, InvalidType
from credo.optim.arguments import number, option, whole
from credo.posterior import DiagonalPosterior, Posterior

# (model, N, the prior or None for the optimiser's own, seed) → an optimiser with .posterior()
MakeOptimizer: TypeAlias = Callable[[nn.Module, int, Posterior | None, int], Any]


@final
class Variational(Learner):
    """Learns with an optimiser that takes `prior=` and leaves a `posterior()`.

        learner = Variational(model, lambda model, n, prior, seed:
            credo.VOGN(model, data_size=n, prior=prior, seed=seed, initial_precision=1e4))

    start: where the mean of a task starts: "fresh" is torch's own initialisation, as in the paper; "mean" is the
        mean of the posterior so far. Weights that are sharp in the prior return to its mean either way.
    posterior: what is believed before the first task; None leaves the first prior to the optimiser.
    new_precision: the prior N(0, 1/new_precision) of weights that arrive later, those of a new head.
    coreset: examples of each task to be kept back, for a last look before predictions.
    samples: C, the samples of the posterior in predictions.
    annealing: scales the rate of the precision with that of the mean. To Bayes' rule they are one rate; what is stored
        is then a mean over the last part of the task, not over the last 1/`ema_rate` batches.
    """

    rates = ("lr", "ema_rate")

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        loss: Loss = cross_entropies,
        start: Literal["fresh", "mean"] = "fresh",
        posterior: Posterior | None = None,
        new_precision: float = 1.0,
        coreset: Coreset | None = None,
        annealing: Annealing | None = None,
        kind: str = "classification",
        samples: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__(model, loss=loss, annealing=annealing or annealed(), kind=kind, seed=seed)
        if posterior is not None and not isinstance(posterior, Posterior):
            raise InvalidType(f"posterior must be a credo posterior or None, got {type(posterior).__name__}")
        self.make_optimizer = make_optimizer
        self.start = option("start", start, ("fresh", "mean"))
        self.posterior = posterior
        self.new_precision = number("new_precision", new_precision, 0, math.inf, open_low=True)
        self.coreset = coreset
        self.samples = whole("samples", samples, 1)
        self._kept: list[StoredCoreset] = []
        self._looks: dict[str | None, Posterior] = {}  # by head: the posterior after a last look

    def _part(self, task: Task) -> Task:
        if self.coreset is None:
            return task
        rest, kept = self.coreset.split(task, torch.Generator().manual_seed(self._task_seed()))
        self._kept = [*self._kept[: self.tasks], StoredCoreset.of(kept)]
        return rest

    def _prepared(self, part: Task) -> Any:
        prior = prior_for(self.model, self.posterior, self.new_precision)
        before = self._weights()
        try:
            if (
                self.start == "fresh"
            ):  # before the optimiser, whose numbers may follow the weights it is handed
                reset_parameters(self.model, self._task_seed())
            else:
                self._move_to(self.posterior)
            return self.make_optimizer(self.model, len(part), prior, self._task_seed())
        except BaseException:
            self.model.load_state_dict(before)
            raise

    def _take_step(self, optimizer: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = optimizer.step(lambda: self.loss(self.model(inputs), targets))
        return loss

    def _consolidate(self, optimizer: Any, part: Task) -> None:
        self.posterior = merged(self.posterior, optimizer.posterior())
        self._looks.clear()

    def _answers(self, task: Task) -> Tensor:
        if self.posterior is None:
            raise CallOrderError("no task is finished yet, so there is no posterior to predict from")
        examples = joined(self._kept, task.head)
        posterior = self.posterior if examples is None else self._after_a_look(task.head, *examples)
        return self._predicted(posterior, task, self.samples)

    def memory(self) -> dict[str, Any]:
        kept = [{"inputs": k.inputs, "targets": k.targets, "head": k.head} for k in self._kept]
        if self.posterior is None:
            return {"posterior": None, "metadata": {}, "kept": kept}
        diagonal = DiagonalPosterior(self.posterior.mean, self.posterior.variance)
        return {"posterior": diagonal.tensors(), "metadata": self.posterior.metadata, "kept": kept}

    def recall(self, memory: dict[str, Any]) -> None:
        tensors = memory["posterior"]
        self.posterior = tensors and DiagonalPosterior.from_tensors(tensors, memory["metadata"])
        self._kept = [StoredCoreset(**kept) for kept in memory["kept"]]
        self._looks.clear()

    def _after_a_look(self, head: str | None, inputs: Tensor, targets: Tensor) -> Posterior:
        """The posterior after the coresets of this head; what is carried to the next task stays without."""
        if head not in self._looks:
            prior = prior_for(self.model, self.posterior, self.new_precision)
            with self._weights_kept():
                self._move_to(self.posterior)
                optimizer = self.make_optimizer(self.model, len(inputs), prior, self._task_seed())
                for _ in range(self.coreset.steps if self.coreset else 0):
                    self._take_step(optimizer, inputs, targets)
                self._looks[head] = merged(self.posterior, optimizer.posterior())
        return self._looks[head]

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @contextmanager
    def _weights_kept(self) -> Iterator[None]:
        before = self._weights()
        try:
            yield
        finally:
            self.model.load_state_dict(before)

    @torch.no_grad()
    def _move_to(self, posterior: Posterior | None) -> None:
        """New weights stay as torch made them: at their prior mean, zero, all hidden units would be alike."""
        known = {} if posterior is None else posterior.mean
        for name, p in self.model.named_parameters():
            if p.requires_grad and name in known:
                p.copy_(known[name])
