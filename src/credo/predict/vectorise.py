"""Many functions at a time: a level of vmap over stacked weights, with rules for linear layers and images."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credo.curvature.vmap import Level
from credo.posterior.base import Weights
from credo.posterior.model_copy import StandIn
from credo.predict.image_rules import IMAGE_RULES
from credo.predict.inputs import Batch
from credo.predict.outputs import Outputs, Read


def run_together(
    stand_in: StandIn, weights: Weights, batch: Batch, read: Read, channels_last: bool
) -> Outputs:
    """Rows of answers, one per function; raises whatever vmap raises when it cannot."""
    level = Level(len(next(iter(weights.values()))), randomness="error")

    def answers() -> Outputs:
        stand_in.load({name: level.batched(stack) for name, stack in weights.items()})
        return read(batch.call(stand_in.module))

    if channels_last:
        batch = batch.map(lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)
    with SamplesAsChannels(level) if channels_last else SampledRows(level):
        outputs: Outputs = level.run(answers)
        return outputs


class SampledRows(TorchFunctionMode):
    """A linear layer on rows is one batched product; vmap's own rule for it multiplies, and adds in another pass."""

    def __init__(self, level: Level) -> None:
        super().__init__()
        self._level = level

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) == 3 and args[0].dim() == 2 and self._stacked(args[1:]):
            return self._level.physically(_product, args)
        return func(*args, **(kwargs or {}))

    def _stacked(self, parameters: tuple[Tensor | None, ...]) -> bool:
        """Whether each function has its own, as the draws are."""
        _, places = self._level.unwrapped(parameters)
        return places == (0, 0)


def _product(tensors: tuple[Any, ...], places: tuple[int | None, ...]) -> tuple[Tensor, int]:
    rows, weights, biases = tensors
    rows = rows.expand(len(weights), *rows.shape) if places[0] is None else rows.movedim(places[0], 0)
    return torch.baddbmm(biases.unsqueeze(1), rows, weights.transpose(1, 2)), 0


class SamplesAsChannels(SampledRows):
    """Images stay (examples, samples·channels, H, W) in channels_last from one operation to the next."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in IMAGE_RULES and args and isinstance(args[0], Tensor) and args[0].dim() == 4:
            return IMAGE_RULES[func](func, *args, **options)
        if func is Tensor.view:
            return _view(args[0], args[1:], options)
        return super().__torch_function__(func, types, args, options)


def _view(tensor: Tensor, shape: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """`x.view(len(x), -1)`, as much code flattens images, cannot view channels_last: copy instead.

    What is written through such a view is lost; the caller compares the answers with the plain loop's.
    """
    try:
        return tensor.view(*shape, **options)
    except RuntimeError:
        return tensor.contiguous().view(*shape, **options)
