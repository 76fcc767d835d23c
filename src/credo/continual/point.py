"""Learners that know a point and no posterior: fine-tuning, which forgets; EWC; and joint training, the upper bound."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credo.continual.ewc import EWC, fisher
from credo.continual.learner import Annealing, Learner, Loss, annealed, cross_entropies, reset_parameters
from credo.continual.tasks import Batch, Task
from credo.distributed import SharedGradients, world
from credo.errors import InvalidValue
from credo.optim.arguments import number, option

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


@final
class Point(Learner):
    """Learns with any torch optimiser, made anew for each task; the weights go on from where they are.

    ewc: λ of elastic weight consolidation; None is plain fine-tuning.
    online: None keeps the sum of EWC's penalties; a decay in (0, 1] is its online variant.
    labels: whose labels EWC's Fisher information uses, the "model"'s own or those of the "data".
    joint: start afresh at each task and train on all tasks so far: no continual learning, but its upper bound.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        loss: Loss = cross_entropies,
        ewc: float | None = None,
        online: float | None = None,
        labels: str = "model",
        joint: bool = False,
        annealing: Annealing | None = None,
        kind: str = "classification",
        seed: int = 0,
    ) -> None:
        super().__init__(model, loss=loss, annealing=annealing or annealed(), kind=kind, seed=seed)
        if joint and ewc is not None:
            raise InvalidValue(f"joint=True and ewc={ewc} exclude each other: joint training forgets nothing")
        self.make_optimizer, self.joint = make_optimizer, joint
        self.strength = None if ewc is None else number("ewc", ewc, 0, float("inf"))
        self.online, self.labels = online, option("labels", labels, ("model", "data"))
        self._anchors: dict[str, dict[str, Tensor]] = {"importance": {}, "centre": {}}

    def _part(self, task: Task) -> Task:
        return task

    def _prepared(self, part: Task) -> Any:
        parameters = list(self.model.parameters()) if self.joint else self._trained()
        optimizer = self.make_optimizer(parameters)
        if self.joint or self.tasks == 0:
            reset_parameters(self.model, self._task_seed())
        self._shared = SharedGradients(self.model, optimizer)
        if self.strength is None:
            return optimizer
        wrapped = EWC(optimizer, self.model, strength=self.strength, online=self.online)
        wrapped.importance, wrapped.centre = self._anchors["importance"], self._anchors["centre"]
        return wrapped

    def _take_step(self, optimizer: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of several processes one may have no examples left; it steps with the gradients of the others."""
        optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets).mean() if len(inputs) else None
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        common = self._shared.average(None if loss is None else loss.detach(), len(inputs))
        optimizer.step()
        return common

    def _consolidate(self, optimizer: Any, part: Task) -> None:
        if isinstance(optimizer, EWC):
            generator = torch.Generator().manual_seed(self._task_seed())
            found = fisher(
                self.model, _in_order(part), labels=self.labels, loss=self.loss, generator=generator
            )
            world().broadcast_(list(found.values()))
            optimizer.consolidate(found)
            self._anchors = {"importance": optimizer.importance, "centre": optimizer.centre}

    def _answers(self, task: Task) -> Tensor:
        return self._predicted("mean", task)

    def memory(self) -> dict[str, Any]:
        return {part: {name: t.clone() for name, t in held.items()} for part, held in self._anchors.items()}

    def recall(self, memory: dict[str, Any]) -> None:
        self._anchors = {part: dict(memory[part]) for part in ("importance", "centre")}

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def _in_order(task: Task, size: int = 256) -> Iterator[Batch]:
    for start in range(0, len(task), size):
        yield task.batch(torch.arange(start, min(start + size, len(task))))
