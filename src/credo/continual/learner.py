"""What learns task after task: the verbs that the loop needs, and what all learners share.

Also the posterior of earlier tasks as the prior of the next one, for weights that it did not know too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.continual.heads import MultiHead
from credo.continual.tasks import Task
from credo.distributed import world
from credo.errors import CallOrderError, InvalidType, InvalidValue
from credo.optim import arguments
from credo.posterior import DiagonalPosterior, Posterior
from credo.posterior.model_copy import preserve_rng
from credo.predict import predict
from credo.validate import positive

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]  # (outputs, targets) → a loss for each example
Annealing: TypeAlias = Callable[[float], float]  # progress in the task, 0 to 1 → factor of the rates


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example, (M,)."""
    return F.cross_entropy(outputs, targets, reduction="none")


def annealed(end: float = 1.0, hold: float = 0.0) -> Annealing:
    """The rates stay for the share `hold` of a task, then fall exponentially to `end` times their values."""
    arguments.number("end", end, 0, 1, open_low=True)
    arguments.number("hold", hold, 0, 1, open_high=True)
    return lambda progress: float(end ** (max(progress - hold, 0.0) / (1 - hold)))


class Learner(ABC):
    """`begin` a task, `step` through its batches, `finish` it; `predict` between tasks.

    kind: "classification", where `predict` gives probabilities, or "regression", where it gives values.
    """

    joint = False  # whether the data of earlier tasks may be seen again; only for upper bounds
    rates: ClassVar[tuple[str, ...]] = (
        "lr",
    )  # what the annealing scales, of the optimiser's parameter groups

    def __init__(self, model: nn.Module, *, loss: Loss, annealing: Annealing, kind: str, seed: int) -> None:
        self.model, self.loss, self.annealing = model, loss, annealing
        self.kind = arguments.option("kind", kind, ("classification", "regression"))
        self.seed = arguments.seed(seed)
        self.tasks = 0  # how many are finished
        self._optimizer: Any = None
        self._first_rates: list[dict[str, float]] = []  # of the task under way, group by group

    # What a method must say

    @abstractmethod
    def _part(self, task: Task) -> Task:
        """What of the task to train on; the rest, if any, is kept."""

    @abstractmethod
    def _prepared(self, part: Task) -> Any:
        """The optimiser of a task that begins; the model has the task's head in use."""

    @abstractmethod
    def _take_step(self, optimizer: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step; returns the mean loss."""

    @abstractmethod
    def _consolidate(self, optimizer: Any, part: Task) -> None:
        """Keeps of a finished task what the method keeps."""

    @abstractmethod
    def _answers(self, task: Task) -> Tensor:
        """Probabilities or values for the test inputs, examples first; the task's head is in use."""

    @abstractmethod
    def memory(self) -> dict[str, Any]:
        """What the method carries from task to task, as plain tensors and numbers."""

    @abstractmethod
    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`."""

    # What all of them do

    @final
    def begin(self, task: Task) -> Task:
        """The task arrives: its head comes into use, an optimiser is made. Returns what to train on."""
        if self._optimizer is not None:
            raise CallOrderError(f"task {task.name!r} cannot begin before the one under way is finished")
        with self._entered(task):
            part = self._part(task)
            self._optimizer = self._prepared(part)
        groups = self._optimizer.param_groups
        self._first_rates = [
            {name: float(group[name]) for name in self.rates if name in group} for group in groups
        ]
        return part

    @final
    def step(self, inputs: Tensor, targets: Tensor, progress: float = 0.0, head: str | None = None) -> float:
        """One step on a batch; `progress` is the share of the task's steps already taken.

        head: that of the batch, where it is not the one of the task under way (joint training).
        """
        if self._optimizer is None:
            raise CallOrderError("no task is under way; begin(task) comes first")
        factor = self.annealing(progress)
        for group, first in zip(self._optimizer.param_groups, self._first_rates, strict=True):
            group.update({name: rate * factor for name, rate in first.items()})
        with self._using(head):
            return float(self._take_step(self._optimizer, inputs, targets))

    @final
    def finish(self, part: Task) -> None:
        """The data will not be seen again; `part` is what `begin` returned."""
        if self._optimizer is None:
            raise CallOrderError(f"task {part.name!r} was not begun; begin(task) comes first")
        self._consolidate(self._optimizer, part)
        self._optimizer = None
        self.tasks += 1

    @final
    def predict(self, task: Task) -> Tensor:
        """Answers to the test inputs of a task."""
        with self._using(task.head):
            return self._answers(task)

    @final
    def _predicted(self, posterior: Any, task: Task, samples: int = 1) -> Tensor:
        """What the functions of a posterior say on average; of several processes each answers for a part."""
        how: dict[str, Any] = {"samples": samples, "distributed": not world().alone}
        if self.kind == "regression":
            values: Tensor = predict(self.model, posterior, task.tests(), task="regression", **how).mean
            return values
        probabilities: Tensor = predict(self.model, posterior, task.tests(), **how).probs
        return probabilities

    @final
    def _task_seed(self) -> int:
        """Of the task under way, or to come: neighbouring seeds of learners share none."""
        return self.seed * 10_007 + self.tasks

    @contextmanager
    def _entered(self, task: Task) -> Iterator[None]:
        """The head of the task is in use, made if it is new; after an error the model is as it was."""
        model = self._heads_for(task.head, task.name)
        if model is None or task.head is None:
            yield
            return
        before, heads = model.used, list(model.heads)
        try:
            with preserve_rng(self._task_seed(), None), torch.enable_grad():
                model.arrive(task.head)
            yield
        except BaseException:
            for name in [name for name in model.heads if name not in heads]:
                del model.heads[name]
            model.use_again(before)
            raise

    @contextmanager
    def _using(self, head: str | None) -> Iterator[None]:
        """The head is in use inside, and the one before it afterwards."""
        model = self.model
        if head is None or (isinstance(model, MultiHead) and model.used == head):
            yield
            return
        heads = self._heads_for(head, head)
        assert heads is not None
        before = heads.used
        heads.use(head)
        try:
            yield
        finally:
            heads.use_again(before)

    def _heads_for(self, head: str | None, task: str) -> MultiHead | None:
        """The model, if it is one with heads; it and the task must agree on that."""
        if isinstance(self.model, MultiHead):
            if head is None:
                raise InvalidValue(
                    f"task {task!r} names no head, and the model has several; give Task(head=...)"
                )
            return self.model
        if head is not None:
            raise InvalidValue(
                f"task {task!r} asks for the head {head!r}, but the model has none; "
                "wrap it: credo.continual.MultiHead(body, new_head=...)"
            )
        return None

    # Resuming

    @final
    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, inside a task too; plain numbers and tensors only."""
        return {
            "tasks": self.tasks,
            "heads": list(self.model.heads) if isinstance(self.model, MultiHead) else [],
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "memory": self.memory(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
        }

    @final
    def load_state_dict(self, state: dict[str, Any], task: Task | None) -> Task | None:
        """Goes on from `state_dict()`. `task` is the one under way, if one was; returns what to train on."""
        self._optimizer, self.tasks, part = None, state["tasks"], None
        self.recall(state["memory"])
        if isinstance(self.model, MultiHead):
            for head in state["heads"]:
                self.model.arrive(head)
        if state["optimizer"] is not None and task is not None:
            part = self.begin(task)
            self._optimizer.load_state_dict(state["optimizer"])
        self.model.load_state_dict(state["model"])
        return part


def prior_for(
    model: nn.Module, posterior: Posterior | None, precision: float = 1.0
) -> DiagonalPosterior | None:
    """The posterior, over exactly the weights that `model` trains now; N(0, 1/`precision`) for new ones.

    Every kind of posterior will do: what is kept of it is its mean and marginal variances. None stays None, for
    which an optimiser has a `prior_precision` of its own.
    """
    fresh = positive("precision", precision)
    if posterior is None:
        return None
    if not isinstance(posterior, Posterior):
        raise InvalidType(f"posterior must be a credo posterior, got {type(posterior).__name__}")
    mean, variance, kept = posterior.mean, posterior.variance, {"method": "prior", "of": posterior.metadata}
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    _check_same_model(trained, mean)
    return DiagonalPosterior(
        {name: mean.get(name, p.new_zeros(p.shape)) for name, p in trained.items()},
        {name: variance.get(name, p.new_full(p.shape, 1 / fresh)) for name, p in trained.items()},
        kept,
    )


def merged(old: Posterior | None, new: Posterior) -> DiagonalPosterior:
    """`new`, and what `old` says of the names that `new` lacks: heads that were not in use."""
    names = [] if old is None else [name for name in old.mean if name not in new.mean]
    mean, variance = (
        dict(getattr(new, part)) | ({name: getattr(old, part)[name] for name in names} if names else {})
        for part in ("mean", "variance")
    )
    return DiagonalPosterior(mean, variance, new.metadata)


def reset_parameters(model: nn.Module, seed: int) -> None:
    """torch's own initialisation of every layer that trains, from a private random stream."""
    device = next((p.device for p in model.parameters()), None)
    resets = [_reset_of(module) for module in model.modules() if _trains(module)]  # all or none
    with preserve_rng(seed, device):
        for reset in resets:
            reset()


def _trains(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and all(p.requires_grad for p in own)


def _reset_of(module: nn.Module) -> Callable[[], Any]:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise InvalidType(
            f"{type(module).__name__} has parameters and no reset_parameters(), so its mean cannot start afresh. "
            "Give it one, or start from the previous mean: start='mean'"
        )
    return reset  # type: ignore[no-any-return]


def _check_same_model(trained: dict[str, Tensor], mean: dict[str, Tensor]) -> None:
    """New names are welcome, but a posterior that shares none, or has other shapes, is of another model."""
    if not trained.keys() & mean.keys():
        raise InvalidValue(
            f"the posterior does not fit the model: it knows {sorted(mean)[:3]} …, the model trains "
            f"{sorted(trained)[:3]} …"
        )
    wrong = [
        f"{name!r} is {tuple(mean[name].shape)} in the posterior and {tuple(p.shape)} in the model"
        for name, p in trained.items()
        if name in mean and mean[name].shape != p.shape
    ]
    if wrong:
        raise InvalidValue(f"the posterior does not fit the model: {'; '.join(wrong[:3])}")
