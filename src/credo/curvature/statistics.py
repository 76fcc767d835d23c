"""What the backward passes of one block said about each parameter."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from credo.curvature.ledger import Ledger


class Squares(Mapping[Tensor, Tensor]):
    """Parameter → Σᵢ gᵢ²; only the parameters that the loss reached are in it."""

    def __init__(self, ledger: Ledger, factor: Callable[[], float]):
        self._ledger, self._factor = ledger, factor

    def __getitem__(self, parameter: Tensor) -> Tensor:
        try:
            return self._ledger.squares[id(parameter)] * self._factor()
        except KeyError:
            raise KeyError("the loss did not reach this parameter, or it was not watched") from None

    def __iter__(self) -> Iterator[Tensor]:
        return (self._ledger.parameters[key] for key in self._ledger.squares)

    def __len__(self) -> int:
        return len(self._ledger.squares)


class Statistics:
    """`squares`, parameter → Σᵢ gᵢ² with gᵢ the gradient of example i's own loss; `examples`, their number M."""

    counted = True  # M is exact, not a guess

    def __init__(self, ledger: Ledger, reduction: str, scale: float):
        self._ledger, self._reduction, self._scale = ledger, reduction, scale
        self.squares: Mapping[Tensor, Tensor] = Squares(ledger, lambda: self.factor)

    @property
    def examples(self) -> int:
        return self._ledger.examples

    @property
    def factor(self) -> float:
        """Σᵢ gᵢ² = factor·Σᵢ rᵢ², rᵢ what example i sent back: gᵢ/M under a mean, times the loss scale."""
        share = self.examples if self._reduction == "mean" else 1
        return (share / self._scale) ** 2

    def raw(self, parameter: Tensor) -> Tensor | None:
        """Σᵢ rᵢ² itself, not a copy; None for a parameter that the loss did not reach."""
        return self._ledger.squares.get(id(parameter))
