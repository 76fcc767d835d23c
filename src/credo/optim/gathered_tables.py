"""One more sum for each parameter, beside its gradient: what Bayes by Backprop and IVON gather over their samples."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from credo.errors import UnsupportedOperation
from credo.optim.columns import Column, tabled
from credo.optim.gathering import Gathered, Seen
from credo.optim.reparameterisation import Reparameterised


class GatheredTable(Gathered):
    """`table` holds the sums by the parameter's id; they are as the loss is: means or sums over the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[int, Tensor] = {}
        self._counted = True

    @final
    def _add(self, seen: Seen, parameters: Sequence[Tensor], examples: int) -> None:
        self._counted = self._counted and seen.counted
        self.likelihood = getattr(seen, "likelihood", False)
        self._add_to_table(seen)

    @property
    def counted(self) -> bool:
        """Whether the numbers of examples are exact."""
        return self._counted

    @abstractmethod
    def _add_to_table(self, seen: Seen) -> None:
        """Adds what one block has said."""

    @final
    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[Column]:
        if not self._counted:
            raise UnsupportedOperation(
                "the number of examples cannot be read from the operations of this model, and ranks are weighed by "
                "it. Train in one process."
            )
        return [tabled(self.table, parameters, mean_loss)]

    @final
    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        return self.table.items()

    @final
    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        """Norms: the updates square these numbers, and what overflows there would stay for ever."""
        numbers = [*self._gradients(parameters), *self.table.values()]
        return torch._foreach_norm(numbers) if numbers else ()

    @abstractmethod
    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that the update squares."""


@final
class GatheredVariances(GatheredTable):
    """Σₖ ∂ℓ/∂σ², taken from the leaves of each block."""

    shares_samples = False  # the noise is of outputs: every example has its own

    def _add_to_table(self, seen: Seen) -> None:
        assert isinstance(seen, Reparameterised)
        for key, belief in seen.uncertain.items():
            grad = belief.variance.grad
            if grad is not None:
                self.table[key] = self.table[key].add_(grad) if key in self.table else grad

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]


@final
class GatheredProducts(GatheredTable):
    """Σₖ ∂ℓ/∂w·(w − μ), in memory of the optimiser's, which each block has filled as it closed."""

    def _add_to_table(self, seen: Seen) -> None:
        pass

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Of those without noise only: where there is noise, a gradient that overflows shows in the product."""
        return [p.grad for p in parameters if p.grad is not None and id(p) not in self.table]
