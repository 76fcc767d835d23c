"""Any torch optimiser, doing the steps of another one that keeps its state.

What the inner optimiser remembers of a tensor lies beside the parameter, under names such as "mean.exp_avg", so
that saving, copying and resuming need not know that there is an inner optimiser.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from credo.errors import InvalidType, InvalidValue

# Optimisers that move each weight without looking at the others of its tensor, and count steps as "step" at most.
ELEMENTWISE = frozenset(
    (
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.SGD,
    )
)
Build = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class Moved:
    """A tensor to move along its gradient; what is remembered of it is in `state` under names with `prefix`."""

    tensor: Tensor
    gradient: Tensor
    state: dict[str, Any]
    prefix: str


def adam(groups: list[dict[str, Any]]) -> Optimizer:
    """Adam in one pass over the numbers, where torch has that for all of them."""
    tensors = [tensor for group in groups for tensor in group["params"]]
    fusible = all(t.device.type in ("cpu", "cuda") and t.is_floating_point() for t in tensors)
    return torch.optim.Adam(groups, fused=fusible)


@final
class WrappedOptimizer:
    """Built once, then given tensors and gradients at every step."""

    def __init__(self, build: Build, groups: list[dict[str, Any]]):
        self._names: tuple[str, ...] = ()  # of what it remembers of a tensor, once that is known
        self.optimizer = build(groups)
        if not isinstance(self.optimizer, Optimizer):
            raise InvalidType(
                "inner must make a torch optimiser of a list of parameter groups, as torch.optim.Adam does; it made "
                f"{type(self.optimizer).__name__}."
            )
        self._forget()

    @property
    def method(self) -> str:
        return type(self.optimizer).__name__

    def require_elementwise(self, what: str) -> None:
        if type(self.optimizer) not in ELEMENTWISE:
            raise InvalidValue(
                f"{what} moves parts of tensors, and {self.method} is not known to move each weight by itself. "
                f"Allowed as inner: {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}."
            )

    def add_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)
        self._forget()

    def step(self, groups: Sequence[tuple[float, list[Moved]]]) -> None:
        """One step of each group at its learning rate; gradients are put where torch looks, and taken away again."""
        kept = [(move.tensor, move.tensor.grad) for _, moves in groups for move in moves]
        try:
            for group, (lr, moves) in zip(self.optimizer.param_groups, groups, strict=True):
                group["lr"], group["params"] = lr, [move.tensor for move in moves]
                for move in moves:
                    self._hand_over(move)
            self.optimizer.step()
            for _, moves in groups:
                for move in moves:
                    self._take_back(move)
        finally:
            self._forget()
            for tensor, grad in kept:
                tensor.grad = grad

    def _forget(self) -> None:
        """Between steps it holds settings only."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []

    def _hand_over(self, move: Moved) -> None:
        move.tensor.grad = move.gradient
        names = self._names or [n.partition(".")[2] for n in move.state if n.startswith(move.prefix)]
        memory = {
            name: _beside(move.state[move.prefix + name], move.tensor)
            for name in names
            if move.prefix + name in move.state
        }
        if memory:
            self.optimizer.state[move.tensor] = memory

    def _take_back(self, move: Moved) -> None:
        memory = self.optimizer.state.get(move.tensor, {})
        self._names = tuple(memory)
        for name, value in memory.items():
            move.state[move.prefix + name] = value


def _beside(value: Any, tensor: Tensor) -> Any:
    """What is remembered of a tensor follows it to another device or type; counters keep their type."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value.to(tensor.device, tensor.dtype)
