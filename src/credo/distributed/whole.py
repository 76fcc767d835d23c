"""What blocks and draws ask of parameters that may lie on the ranks in parts: here they are whole on every rank."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from credo.curvature.tracking import WatchedParameters


class WholeParameters:
    """`fully_sharded` says otherwise for those of FSDP2."""

    def open_block(self, reduction: str) -> None:
        """Before a sample is drawn."""

    def collect(self, seen: Any, localise: Callable[..., None]) -> None:
        """What a block has seen, as it ends."""

    def close_block(self, error: BaseException | None) -> None:
        """After a block, however it has ended."""

    def begin_step(self) -> None:
        """Before anything is asked of gradients."""

    def zero_grad(self) -> None:
        """Gradients that are not at the optimiser's own parameters."""

    def seen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What operations in a block see of parameters."""
        return list(parameters)

    def watch(self, watched: "WatchedParameters") -> None:
        """What blocks watch; it is kept between them."""

    def shape_of(self, p: Tensor) -> torch.Size:
        """Of all of a parameter."""
        return p.shape

    def starts(self, parameters: Sequence[Tensor]) -> list[int] | None:
        """At which of its numbers each parameter begins; None: all at their first."""
        return None

    def mean_square(self, p: Tensor) -> float:
        """Of all numbers of a parameter."""
        return float(p.detach().double().square().mean()) if p.numel() else 0.0

    def put_together(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors as large as the parameters, whole."""
        return list(tensors)
