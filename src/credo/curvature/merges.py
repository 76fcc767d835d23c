"""Inputs whose leading dimension was two, (B, T, …) → (B·T, …), inside a block: no graph shows it."""

from typing import Any

import torch
from torch import Tensor

from credo.curvature.operation import merges_into

MERGING = frozenset(
    (
        *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.view_as, Tensor.reshape_as),
        *(torch.flatten, torch.reshape),
    )
)


class Merges:
    """The tensors that one block has seen being merged, or being computed from such, and their B."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, int]] = {}  # with the tensor, so that its id stays its own

    def note(self, result: Any, func: Any, args: Any) -> Any:
        """Looks at a call and its result, which it returns."""
        if func not in MERGING and not self.known:
            return result
        given = args[0] if args else None
        if (
            isinstance(result, Tensor)
            and isinstance(given, Tensor)
            and result.grad_fn is None
            and result.dim()
        ):
            lead = merges_into(given.shape, result.shape) if func in MERGING else None
            if lead is None and given.dim() and result.shape[0] == given.shape[0]:
                lead = self.lead(given)
            if lead is not None:
                self.known[id(result)] = (result, lead)
        return result

    def lead(self, tensor: Tensor | None) -> int | None:
        """B; None where nothing was merged."""
        known = self.known.get(id(tensor))
        return None if known is None else known[1]
