"""Elastic weight consolidation (Kirkpatrick et al. 2017) around any torch optimiser.

    loss + λ/2 Σₜ Fₜ(θ − θₜ)²,  Fₜ = mean of gᵢ² over task t

The sum of penalties is itself one quadratic, with F = Σ Fₜ and centre Σ Fₜθₜ / F, so memory does not grow with the
tasks. Online (Schwarz et al. 2018): F ← decay·F + Fₜ around the newest θₜ only.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from credo.continual.learner import Loss, cross_entropies
from credo.continual.tasks import Batch
from credo.curvature.capture import squared_gradients
from credo.errors import InvalidType, InvalidValue
from credo.optim import arguments
from credo.posterior.model_copy import eval_mode


@final
class EWC:
    """Adds the penalty to the gradients that the wrapped optimiser steps with.

        ewc = EWC(torch.optim.Adam(model.parameters()), model, strength=100.0)
        loss.backward(); ewc.step()                     # or ewc.step(closure)
        ewc.consolidate(fisher(model, batches))         # after each task

    strength: λ, for a loss that is a mean over examples.
    online: None keeps the sum of all penalties; a decay in (0, 1] is the online variant.
    Parameters that arrive later, those of a new head, are free until they are consolidated.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, *, strength: float, online: float | None = None
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidType(f"optimizer must be a torch optimiser, got {type(optimizer).__name__}")
        self.optimizer, self.model = optimizer, model
        self.strength = arguments.number("strength", strength, 0, math.inf)  # λ
        if online is not None:
            arguments.number("online", online, 0, 1, open_low=True)
        self.online = online
        self.importance: dict[str, Tensor] = {}  # F
        self.centre: dict[str, Tensor] = {}  # θ*

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        """One step of the wrapped optimiser with λF(θ − θ*) in the gradients; a closure's loss gets the penalty."""
        if closure is None:
            self._add_pull()
            return self.optimizer.step()

        def penalised() -> Tensor:
            loss = closure()
            self._add_pull()
            return loss.detach() + self.penalty()

        return self.optimizer.step(penalised)  # type: ignore[arg-type]

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """λ/2 Σ F(θ − θ*)², up to a constant where several penalties have become one."""
        terms = [
            (self.importance[name] * (p - self.centre[name]).square()).sum()
            for name, p in self.model.named_parameters()
            if name in self.importance
        ]
        return self.strength / 2 * torch.stack(terms).sum() if terms else torch.zeros(())

    @torch.no_grad()
    def consolidate(self, importance: Mapping[str, Tensor]) -> None:
        """From now on the weights are held where they are, each as firmly as `importance` (F by name) says."""
        parameters = dict(self.model.named_parameters())
        _check_importance(importance, parameters)
        for name, new in importance.items():
            here, weight = parameters[name].detach().clone(), new.detach().clone()
            if name in self.importance and self.online is None:
                weight, here = _sum_of_quadratics(self.importance[name], self.centre[name], weight, here)
            elif name in self.importance and self.online is not None:
                weight += self.online * self.importance[name]
            self.importance[name], self.centre[name] = weight, here

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "importance": {name: tensor.clone() for name, tensor in self.importance.items()},
            "centre": {name: tensor.clone() for name, tensor in self.centre.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _check_importance(state_dict["importance"], dict(self.model.named_parameters()))
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.importance = {name: tensor.clone() for name, tensor in state_dict["importance"].items()}
        self.centre = {name: tensor.clone() for name, tensor in state_dict["centre"].items()}

    @torch.no_grad()
    def _add_pull(self) -> None:
        for name, p in self.model.named_parameters():
            if name in self.importance and p.grad is not None:
                p.grad += self.strength * self.importance[name] * (p - self.centre[name])


def fisher(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    labels: str = "model",
    loss: Loss = cross_entropies,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The mean of gᵢ² over all examples of the batches, by name, exact, at the weights the model has; in eval mode.

    labels: "model" draws them from the classifier's own probabilities, which gives the Fisher information; "data"
        takes those of the batches (the empirical Fisher), with any loss.
    """
    arguments.option("labels", labels, ("model", "data"))
    generator = generator or torch.Generator().manual_seed(0)
    total: dict[str, Tensor] = {}
    examples = 0
    with eval_mode(model):
        for inputs, given in batches:
            targets = given if labels == "data" else _drawn(model(inputs), generator)
            squares = squared_gradients(model, lambda x=inputs, y=targets: loss(model(x), y).sum(), "sum")  # type: ignore[misc]
            total = {name: square + total.get(name, 0.0) for name, square in squares.items()}
            examples += len(inputs)
    if not examples:
        raise InvalidValue("batches is empty: the Fisher information needs at least one example")
    return {name: square / examples for name, square in total.items()}


@torch.no_grad()
def _drawn(outputs: Tensor, generator: torch.Generator) -> Tensor:
    probabilities = F.softmax(outputs.detach(), -1).to(generator.device)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(outputs.device)


def _sum_of_quadratics(f1: Tensor, c1: Tensor, f2: Tensor, c2: Tensor) -> tuple[Tensor, Tensor]:
    """f₁(θ − c₁)² + f₂(θ − c₂)² = f(θ − c)² + a constant; where nothing holds the weight, c is the newest place."""
    f = f1 + f2
    return f, torch.where(f > 0, (f1 * c1 + f2 * c2) / f.clamp(min=torch.finfo(f.dtype).tiny), c2)


def _check_importance(importance: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    for name, value in importance.items():
        if name not in parameters:
            raise InvalidValue(f"importance names {name!r}; the model has {list(parameters)[:5]} …")
        if value.shape != parameters[name].shape:
            raise InvalidValue(
                f"importance of {name!r} has shape {tuple(value.shape)}, the parameter {tuple(parameters[name].shape)}"
            )
        if not bool((value.isfinite() & (value >= 0)).all()):
            raise InvalidValue(
                f"importance of {name!r} must be finite and ≥ 0 everywhere; fisher(model, …) gives one"
            )
