"""One call of one operation: how to run it, and how to take its gradient apart by example."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from credo.curvature.torch_private import saved_getter
from credo.errors import UnsupportedOperation

if TYPE_CHECKING:
    from credo.curvature.accumulate import SquareAccumulator
    from credo.curvature.tracking import ParameterSource, Provenance

# ────────────────────────────────────────
# What one use of one parameter leaves behind: enough to rebuild any example's gradient.
#
# An operation's backward pass gives a `PerExampleGradient` for each parameter it used. With rᵢ the gradient of
# example i, it gives three things: Σᵢ rᵢ; Σᵢ rᵢ and Σᵢ rᵢ² together; the rᵢ of a few examples. The first two are
# fast. The last is for parameters that are used more than once: all uses are added before they are squared.

# The scratch one chunk of per-example gradients may take: it stays in the cache, and bounds memory.
CHUNK_BYTES = 8 * 2**20

WIDE = frozenset((torch.float32, torch.float64))  # enough for a square

PerExample = Callable[[int, int], Tensor]
Factors = tuple[Tensor, Tensor]  # of the inputs and of the output gradients, summed over examples


class PerExampleGradient(ABC):
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


class Stacked(PerExampleGradient):
    """The rᵢ themselves, for parameters so small that (M, *shape) is no larger than an activation."""

    def __init__(self, gradients: Tensor):
        self.examples = len(gradients)
        self._gradients = gradients  # (M, *shape)

    def total(self) -> Tensor:
        return self._gradients.sum(0)

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return self._gradients.sum(0), widen(self._gradients).square().sum(0)

    def per_example(self, start: int, stop: int) -> Tensor:
        return self._gradients[start:stop]


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
        gradients = per_example(start, stop).to(like.dtype)
        total += gradients.sum(0)
        squares += gradients.square().sum(0)
    return total, squares


# ────────────────────────────────────────

Outputs = Tensor | tuple[Tensor, ...]
Pieces = Sequence[Tensor | PerExampleGradient | None]
Sums = tuple[Sequence[Tensor | None], Sequence[Tensor]]  # Σᵢ rᵢ of its tensors, Σᵢ rᵢ² of its parameters

# How autograd names the operations that can merge the examples with what follows them, (B, T, d) → (B·T, d).
_sizes_before = saved_getter("self_sym_sizes")
MERGE_NODES = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
# Functions of FSDP2's own, around a module that it gathers: their results are their arguments.
HANDED_ON = ("RegisterPostBackwardFunctionBackward", "RegisterPreBackwardFunctionBackward")


class Operation(ABC):
    """A call with its arguments. A rule returns one; the engine runs it and asks for its gradients.

    `tensors` are all tensors of the call in a fixed order (None where one is left out);
    `parameter_slots` are the places in it for which `backward` gives a `PerExampleGradient`. Names that begin with
    `watched_` belong to the block that watches it.
    """

    parameter_slots: frozenset[int]
    tensors: tuple[Tensor | None, ...]
    name: str
    example_rows: Tensor | None = (
        None  # whose leading dimension the block is to count, unless the constructor has done it
    )
    lead: int  # how many rows the operation sees where the examples are counted; −1: none
    merged_from: int | None = None  # how many there were before a view merged them with another dimension
    layer: tuple[int, int] | None = None  # slots of a weight with Kronecker factors, and of its bias
    axis: int = 0  # where the examples are: 1 inside attention, whose rows are (T, M, d) or (T·M, d)
    watched_sources: "tuple[ParameterSource | None, ...]"  # which are in its slots
    watched_keys: tuple[int, ...] = ()  # ids of what is in its slots, if these are all parameters themselves
    watched_by: "SquareAccumulator"
    watched_order: int  # among the calls of the block
    watched_loss: int = -1  # the loss of the last backward pass through it; −1: there was none
    _may_have_none: bool = False  # whether `has_no_examples` is a question

    def __init_subclass__(cls) -> None:
        cls._may_have_none = cls.has_no_examples is not Operation.has_no_examples

    @abstractmethod
    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        """The operation itself, by torch, and what else `backward` needs to see again."""

    @abstractmethod
    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        """For each of `tensors`: its gradient, a `PerExampleGradient`, or None; `saved` is tensors, then extras."""

    def sums(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Sums | None:
        """What `backward` would be asked for if each parameter has no other use, all at once; None: ask that.

        The squares are those of `watched_keys`, in this order and in float32 at least, and belong to the caller.
        """
        return None

    def has_no_examples(self, provenance: "Provenance") -> bool:
        """Whether what looks like data is a constant, so that the result stands for parameters alone."""
        return False

    def example_axis(self, slot: int) -> int:
        """Where the examples are in the data of a slot."""
        return self.axis

    def result_axis(self, number: int) -> int:
        """Where the examples are in one of the results."""
        return self.axis

    def release(self) -> tuple[Tensor | None, ...]:
        """Its tensors, which it forgets: autograd keeps what the backward pass needs, and frees it as that goes on."""
        tensors, self.tensors = self.tensors, ()
        return tensors

    def on(self, tensors: Sequence[Tensor | None]) -> "Operation":
        """The same operation on other tensors."""
        other = copy(self)
        other.tensors = tuple(tensors)
        return other

    def count_examples(self, rows: Tensor) -> None:
        """Takes the number of examples from the leading dimension of `rows`."""
        try:
            shape, node = rows.shape, rows.grad_fn
        except RuntimeError:
            raise UnsupportedOperation(
                f"{self.name} on a nested tensor has no rows that could count as examples. Pass padded tensors, and "
                "mask the padding in the loss."
            ) from None
        self.lead = shape[0] if len(shape) > 1 else -1
        if rows._base is not None if node is None else type(node).__name__ in (*MERGE_NODES, *HANDED_ON):
            self.merged_from = lead_before_merge(rows)


def lead_before_merge(rows: Tensor, skip: int = 0) -> int | None:
    """The leading dimension, after `skip`, before a view merged it with the next ones, if that can be seen."""
    node: Any = rows.grad_fn
    own = rows.output_nr
    while node is not None and type(node).__name__ in HANDED_ON:
        node, own = node.next_functions[own]
    if node is not None and node.name() in MERGE_NODES:
        sizes = tuple(_sizes_before(node))
    elif node is None and rows._base is not None:
        sizes = tuple(rows._base.shape)
    else:
        return None
    return merges_into(sizes[skip:], rows.shape[skip:])


def merges_into(sizes: Sequence[int], shape: Sequence[int]) -> int | None:
    """The leading dimension of a tensor if a view merges it with the next ones."""
    merges = any(math.prod(sizes[:k]) == shape[0] for k in range(2, len(sizes)))
    return int(sizes[0]) if merges else None


def by_example(rows: Tensor, examples: int, axis: int = 0) -> Tensor:
    """(M, …, d) or merged (M·T, d) as (M, T, d), or as (M, d) if T = 1; with axis 1, (T, M, d) or merged (T·M, d)."""
    width = rows.shape[-1]
    if axis == 1:
        return rows.reshape(-1, examples, width).transpose(0, 1)
    if rows.dim() == 2 and rows.shape[0] == examples:
        return rows
    return rows.reshape(examples, math.prod(rows.shape[:-1]) // max(examples, 1), width)


def examples_second(rows: Tensor, name: str) -> int:
    """M of (T, M, d). Where T = M, only a transposed view shows that the model has the examples first."""
    if rows.dim() < 3:
        return 1
    positions, examples = rows.shape[:2]
    if positions == examples > 1 and rows.stride(1) < rows.stride(0):
        raise UnsupportedOperation(
            f"{name} without batch_first on {examples} examples of {positions} positions: which of the two "
            "dimensions counts examples in the operations around it cannot be told. Use batch_first=True."
        )
    return examples
