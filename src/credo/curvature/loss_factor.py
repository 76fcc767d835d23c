"""What a mean loss was multiplied by as a whole, after the examples were reduced to one number.

A constant there may be part of every example's loss, as in 0.5 * mse. It may as well be what a loop does to a loss: a
division by the number of micro-batches, a product with the number of examples, a scaler's scale. The graph looks the
same, and gradients and squares are those of another loss. What is certain to be meant otherwise raises, here or where
it becomes certain. Numbers of things are whole: `len(x)`, `accumulation_steps`. A float of that value, such as 0.5 or a
squared temperature, is taken for part of the losses, with a warning.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credo.curvature.flow_lookup import operation_name
from credo.curvature.torch_private import saved
from credo.errors import CallOrderError, TrainingWarning, UnsupportedOperation

_FARTHEST = 12  # operations looked at
_COMPARED = 4  # gradients, which are enough to tell a division of all from clipping
_PASSED = frozenset(("Neg", "ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze"))

SEVERAL_MEANS = (
    "two backward passes in one block, and each loss is the mean over its own examples. Several passes in a block are "
    "micro-batches of one batch, so each loss must be its share of the mean of all: divide it by the number of "
    "micro-batches, or sum the losses and divide by the number of all examples. Two losses of the same examples: add "
    "them, and call backward once."
)


class Factor(NamedTuple):
    """One constant; a plain number, or a tensor of single precision, as a GradScaler's scale is.

    It is whole if it was written as an integer, or as a division by one.
    """

    value: float
    is_number: bool
    is_whole: bool = False


def outer_factors(roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> tuple[list[Factor], Any]:
    """The constants that multiply a loss, from the root down, and the operation below them."""
    if len(roots) != 1 or roots[0].numel() != 1:
        return [], None
    found: list[Factor] = []
    seed = seeds[0] if seeds else None
    if seed is not None:
        found.append(Factor(abs(float(seed)), False))
    node: Any = roots[0].grad_fn
    for _ in range(_FARTHEST):
        if node is None:
            break
        name = operation_name(type(node))
        edges = [k for k, (child, _) in enumerate(node.next_functions) if child is not None]
        if name in ("Mul", "Div") and len(edges) == 1 and not (name == "Div" and edges[0]):
            other = torch.as_tensor(saved(node, "self" if edges[0] else "other"))
            if other.numel() != 1 or not (size := abs(float(other))) or not math.isfinite(size):
                break
            number = other.dtype is not torch.float32
            whole = not other.dtype.is_floating_point
            found.append(Factor(size if name == "Mul" else 1 / size, number, whole))
        elif name not in _PASSED or len(edges) != 1:
            break
        node = node.next_functions[edges[0]][0]
    return found, node


def of_a_mean(factors: Sequence[Factor], share: float) -> tuple[Factor, ...]:
    """Those that multiply a mean: the innermost may have made it one, as in sum / M. `share` is of the whole loss."""
    kept = list(factors)
    base = share / math.prod(factor.value for factor in kept)
    while kept and base > 1 + 1e-6:
        base *= kept.pop().value
    return (
        tuple(kept) if base < 1 + 1e-6 else tuple(factors)
    )  # else constants of terms are in it: 16 * l₁ + l₂


def has_product(factors: Sequence[Factor], wanted: float) -> bool:
    """Whether constants that follow each other make up this number."""
    return any(abs(product / wanted - 1) < 1e-6 for product, _ in _products(factors))


def _products(factors: Sequence[Factor]) -> Iterable[tuple[float, bool]]:
    """Of constants that follow each other; and whether all of them are whole."""
    for first in range(len(factors)):
        product, whole = 1.0, True
        for factor in factors[first:]:
            if not factor.is_number:
                break
            product, whole = product * factor.value, whole and factor.is_whole
            yield product, whole


def refuse_number_of_examples(factors: Sequence[Factor], examples: int, constants: set[float]) -> None:
    """A mean that was multiplied by the number of its examples is a sum. `constants` were there at other numbers.

    Divided by the number of all examples as well it is its share of the mean of all micro-batches.
    """
    if math.prod(factor.value for factor in factors) < 1 + 1e-6:
        return
    number = next((f.value for f in factors if f.is_whole and abs(f.value / examples - 1) < 1e-6), None)
    if examples > 1 and number is not None and number not in constants:
        raise UnsupportedOperation(
            f"reduction='mean' is declared, and a mean over {examples} examples is multiplied by {examples}, their "
            "number, which makes it a sum: squares would be that number squared too large. Leave the product "
            "out, or declare reduction='sum'. A constant that happens to be that number belongs to the losses of "
            f"the examples: ({examples} * losses).mean(); or write it as a float, {float(examples)} * loss."
        )
    for product, _ in _products(factors):
        if examples > 1 and product not in constants and abs(product / examples - 1) < 1e-6:
            _warn(
                f"a mean over {examples} examples is multiplied by {float(examples)}, which is taken for a constant "
                "of the loss. If their number is meant, leave it out, or declare reduction='sum': squares are that "
                "number squared too large otherwise."
            )
        constants.add(product)


def refuse_divided(factors: Sequence[Factor], micro_batches: int, constants: set[float]) -> None:
    """A mean that was divided by the number of micro-batches, where these are weighed already."""
    for product, whole in _products(factors):
        if abs(product * micro_batches - 1) > 1e-6:
            continue
        if whole:
            raise UnsupportedOperation(
                f"accumulate({micro_batches}) makes one update of {micro_batches} micro-batches and weighs them by "
                f"their examples, but the mean loss is divided by {micro_batches} beforehand, so gradients would be "
                f"too small by {micro_batches} and squares by its square. Give each micro-batch its own mean loss, "
                "without the division. A constant that belongs to the loss goes to the losses of the examples: "
                f"(losses / {micro_batches}).mean(); or is written as a product, {1 / micro_batches:g} * loss."
            )
        if product not in constants:
            constants.add(product)
            _warn(
                f"a mean loss is multiplied by {product:g} beside accumulate({micro_batches}), which is taken for a "
                f"constant of the loss. If it is the share of a micro-batch, leave it out: micro-batches are weighed "
                "by their examples already."
            )


def _warn(message: str) -> None:
    warnings.warn(message, TrainingWarning, stacklevel=2)


# ────────────────────────────────────────
# What becomes of gradients that backward passes have filled, while squares stay as they are.


class Irregular:
    """What is unusual about the losses of a block and their gradients; most blocks have nothing of it."""

    def __init__(self) -> None:
        self.passes = 1
        self.cleared = False  # whether `.grad` was cleared between two backward passes
        self.factors: tuple[Factor, ...] = ()  # of the last loss, as far as it was a mean
        self.outer: tuple[Factor, ...] = ()
        self.unscaled: Unscaled | None = None  # the gradients that it gave

    def pass_begins(self, witness: tuple[Tensor, int]) -> None:
        """Another one that adds to `.grad`; the witness is a parameter with the version of its gradient before."""
        p, version = witness
        self.passes += 1
        if p.grad is None or (p.grad._version != version and not bool(p.grad.any())):
            self.cleared = True

    def pass_ends(
        self, factors: tuple[Factor, ...], outer: tuple[Factor, ...], parameters: Iterable[Tensor]
    ) -> None:
        """With the factors of its loss, and all that multiplies it, some of which may have made it a mean."""
        self.factors, self.outer = factors, outer
        self.unscaled = Unscaled(outer, parameters) if outer else None


@final
class Unscaled:
    """The sizes of gradients after a backward pass of a loss with factors, to be compared with those at the step.

    Whoever multiplies a loss by 1024 and divides the gradients again has the right gradients, and squares that are
    1024² times too large. Nothing is kept where no factor makes the loss larger.
    """

    def __init__(self, factors: Sequence[Factor], parameters: Iterable[Tensor]):
        self._products = [product for product, _ in _products(_as_numbers(factors)) if product > 1 + 1e-3]
        held = [p for p in parameters if p.grad is not None and p.numel()] if self._products else []
        found = ((p, size) for p in held if (size := _size(p)) > 0)  # what is zero says nothing
        self._sizes = list(islice(found, _COMPARED))

    def refuse(self, remedy: Callable[[float], str]) -> None:
        """Raises if all gradients have become smaller by a factor of the loss since."""
        ratios = [_size(p) / size for p, size in self._sizes]
        if not ratios or not all(abs(ratio / ratios[0] - 1) < 1e-3 for ratio in ratios):
            return
        for product in self._products:
            if abs(ratios[0] * product - 1) < 1e-3:
                raise CallOrderError(remedy(product))


def _as_numbers(factors: Sequence[Factor]) -> list[Factor]:
    return [factor._replace(is_number=True) for factor in factors]


def _size(parameter: Tensor) -> float:
    grad = parameter.grad
    return math.nan if grad is None else float(grad.norm())
