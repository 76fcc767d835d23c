"""What the backward passes of one block said about each parameter."""

from collections.abc import Iterator, Mapping
from functools import cached_property

from torch import Tensor

from credo.curvature.ledger import Ledger


class Squares(Mapping[Tensor, Tensor]):
    """Parameter → Σᵢ gᵢ²; only the parameters that the loss reached are in it."""

    def __init__(self, ledger: Ledger, reduction: str, scale: float):
        # Not a method of `Statistics`: the circle would keep the squares until the garbage collector comes.
        self._ledger, self._reduction, self._scale = ledger, reduction, scale

    def __getitem__(self, parameter: Tensor) -> Tensor:
        try:
            return self._ledger.squares[id(parameter)] * factor(self._ledger, self._reduction, self._scale)
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

    @cached_property
    def squares(self) -> Mapping[Tensor, Tensor]:
        return Squares(self._ledger, self._reduction, self._scale)

    @property
    def examples(self) -> int:
        return self._ledger.examples

    @property
    def loss(self) -> Tensor | None:
        """The sum of what went back, as far as it was one number."""
        return self._ledger.loss

    @property
    def rows(self) -> int:
        """As `examples`, with those that the loss leaves out."""
        return self._ledger.rows

    @property
    def likelihood(self) -> bool:
        """Whether the loss was a log-likelihood; else it is an error of unknown scale."""
        return self._ledger.likelihood

    def raw(self) -> tuple[dict[int, Tensor], float]:
        """Σᵢ rᵢ² by the parameter's id, not copies, and by what it is to be multiplied for Σᵢ gᵢ²."""
        return self._ledger.squares, factor(self._ledger, self._reduction, self._scale)


def factor(ledger: Ledger, reduction: str, scale: float) -> float:
    """Σᵢ gᵢ² = factor·Σᵢ rᵢ², rᵢ what example i sent back: gᵢ/M under a mean, times the loss scale."""
    share = ledger.examples if reduction == "mean" else 1
    return (share / scale) ** 2
