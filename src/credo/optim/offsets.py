"""Weights that are a sample for a while, and on the way back to the mean say how their offset met the gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.rule import widen
from credo.kernels.ivon import restore_all_

Products = dict[int, Tensor]  # Σ ∂ℓ/∂w·(w − μ) by the parameter's id


@final
class OffsetKeeper:
    """Memory for means and products; kept between steps, because fresh pages are slow. A copy begins without."""

    def __init__(self) -> None:
        self._means: dict[int, Tensor] = {}
        self._products: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return OffsetKeeper, ()

    @contextmanager
    def in_place(
        self, parameters: list[Tensor], draw: Callable[[list[Tensor]], None], products: Products
    ) -> Iterator[None]:
        """Lets `draw` make a sample of the means in the parameters' own memory, and puts the means back in any case.

        If all went well, the products of the parameters that have a gradient are added to `products`.
        """
        away = {id(p): (p, _memory(self._means, p, p.detach()).copy_(p.detach())) for p in parameters}
        try:
            with torch.no_grad():
                draw([mean for _, mean in away.values()])
            yield
            self._multiply(away, products)
        finally:
            with torch.no_grad():
                for p, mean in away.values():
                    p.copy_(mean)

    def _multiply(self, away: dict[int, tuple[Tensor, Tensor]], products: Products) -> None:
        """Takes those that it brings back to their mean out of `away`."""
        for add in (True, False):
            keys = [key for key, (p, _) in away.items() if p.grad is not None and (key in products) == add]
            back = [away[key] for key in keys]
            sums = [_memory(self._products, p, widen(p.detach())) for p, _ in back]
            gradients = [p.grad for p, _ in back]
            restore_all_([p.detach() for p, _ in back], [mean for _, mean in back], sums, gradients, add)  # type: ignore[arg-type]
            products.update(zip(keys, sums, strict=True))
            for key in keys:
                del away[key]


def _memory(kept: dict[int, Tensor], parameter: Tensor, like: Tensor) -> Tensor:
    """Kept memory for a parameter, of the shape, type and layout of `like`."""
    memory = kept.get(id(parameter))
    if memory is None or _kind(memory) != _kind(like):
        memory = kept[id(parameter)] = torch.empty_like(like)
    return memory


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
