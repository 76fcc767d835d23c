"""Whether a loss is what `reduction` declares, as far as its last operations tell; for methods that need no squares."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from credo.curvature.torch_private import saved
from credo.errors import UnsupportedOperation

_MEAN, _SUM = 1, 2  # torch's numbers for a loss's reduction
_PASSED = ("ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze", "Neg")
_FARTHEST = 4


def refuse_other_reduction(roots: Sequence[Tensor], reduction: str, examples: int) -> None:
    """A sum that was declared a mean, or a mean a sum: the gradients would be wrong by the number of examples.

    Only what is certain: a loss function's own reduction, or the sum of what it gave, with nothing behind it.
    """
    if len(roots) != 1 or roots[0].numel() != 1 or examples < 2:
        return
    node: Any = roots[0].grad_fn
    for _ in range(_FARTHEST):
        if node is None or _name(node) not in _PASSED:
            break
        node = node.next_functions[0][0]
    found = _reduced(node)
    if reduction == "mean" and found == _SUM:
        raise UnsupportedOperation(
            f"reduction='mean' is declared, but {node.name()} sums the losses of {examples} examples, so the gradients "
            f"would be {examples} times too large. Take the mean, or build the optimiser with reduction='sum'."
        )
    if reduction == "sum" and found == _MEAN:
        raise UnsupportedOperation(
            f"reduction='sum' is declared, but {node.name()} takes the mean over {examples} examples, so the gradients "
            f"would be {examples} times too small. Sum the losses, or build the optimiser with reduction='mean'."
        )


def _reduced(node: Any) -> int | None:
    """How a node reduces the losses of the examples; None where that is not certain."""
    if node is None:
        return None
    name = _name(node)
    if name == "Mean":
        return _MEAN
    if name == "Sum":
        below = node.next_functions[0][0]
        return _SUM if below is not None and saved(below, "reduction", None) == 0 else None
    return saved(node, "reduction", None)  # type: ignore[no-any-return]


def _name(node: Any) -> str:
    name: str = node.name()
    return name.removesuffix("0").removesuffix("1").removesuffix("Backward")
