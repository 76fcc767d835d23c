"""What one use of one parameter leaves behind: enough to rebuild any example's gradient.

An operation's backward pass gives, for each parameter it used, a `Contribution`. Written rᵢ for
example i's share of the gradient, it can say three things: Σᵢ rᵢ, Σᵢ rᵢ and Σᵢ rᵢ² together, and the
rᵢ of a few examples. The first two are fast; the last serves parameters that are used more than
once, where the shares of all uses must be added before they are squared.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# The scratch one chunk of per-example gradients may take: it stays in the cache, and bounds memory.
CHUNK_BYTES = 8 * 2**20

WIDE = frozenset((torch.float32, torch.float64))  # enough for a square

PerExample = Callable[[int, int], Tensor]
Factors = tuple[Tensor, Tensor]  # of the inputs and of the output gradients, summed over examples


class Contribution(ABC):
    """One use of one tensor, seen from its backward pass; `examples` is the number of examples M."""

    examples: int

    @abstractmethod
    def total(self) -> Tensor:
        """Σᵢ rᵢ: the ordinary gradient."""

    @abstractmethod
    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        """Σᵢ rᵢ and Σᵢ rᵢ²; the second belongs to the caller from then on, who reuses its memory."""

    @abstractmethod
    def per_example(self, start: int, stop: int) -> Tensor:
        """rᵢ for start ≤ i < stop, stacked: (stop − start, *shape)."""

    def factors(self, biased: bool, sharing: str) -> "Factors | None":
        """Kronecker factors of Σᵢ vec(rᵢ)vec(rᵢ)ᵀ as `curvature.factors` defines them; None: there is no rule for them.

        `biased`: a 1 is appended to each input, for the bias that is added to this product.
        """
        return None


class Stacked(Contribution):
    """The rᵢ themselves, for parameters so small that (M, *shape) is no larger than an activation."""

    def __init__(self, shares: Tensor):
        self.examples = len(shares)
        self._shares = shares  # (M, *shape)

    def total(self) -> Tensor:
        return self._shares.sum(0)

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return self._shares.sum(0), widen(self._shares).square().sum(0)

    def per_example(self, start: int, stop: int) -> Tensor:
        return self._shares[start:stop]


def widen(tensor: Tensor) -> Tensor:
    """Half-precision numbers in float32: a square of 1e-5 is already zero in float16."""
    return tensor if tensor.dtype in WIDE or tensor.is_complex() else tensor.float()


def chunks(examples: int, bytes_per_example: int) -> Iterator[tuple[int, int]]:
    """Cuts 0…M into ranges whose per-example gradients fit the scratch; one example at the least."""
    step = max(1, CHUNK_BYTES // max(1, bytes_per_example))
    for start in range(0, examples, step):
        yield start, min(start + step, examples)


def chunked_squares(per_example: PerExample, examples: int, like: Tensor) -> Tensor:
    """Σᵢ rᵢ² by rebuilding the rᵢ a chunk at a time; never (M, *shape) at once."""
    return chunked_sums(per_example, examples, like)[1]


def chunked_sums(per_example: PerExample, examples: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Σᵢ rᵢ and Σᵢ rᵢ², a chunk at a time; `like` has the parameter's shape and a wide enough dtype."""
    total, squares = torch.zeros_like(like), torch.zeros_like(like)
    for start, stop in chunks(examples, like.numel() * like.element_size()):
        shares = per_example(start, stop).to(like.dtype)
        total += shares.sum(0)
        squares += shares.square().sum(0)
    return total, squares
