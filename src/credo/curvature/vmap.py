"""All samples of a step by one run of the closure: one level of `torch.vmap`, opened by hand.

An operation then either has vmap's own rule or runs outside of it, on tensors with the samples as one more dimension.
`torch.vmap` itself would first pack and unpack arguments, and its way to a rule of one's own is an autograd function
with a `vmap` method; on a small network each takes longer than an operation does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credo.curvature.torch_private import (
    add_batch,
    begin_vmap,
    below_transform,
    current_level,
    end_vmap,
    is_batched,
    load_decompositions,
    remove_batch,
)
from credo.errors import CallOrderError, CredoError, UnsupportedOperation
from credo.kernels.layout import NARROW

# How torch's errors about its own limits under vmap can be told from those of the model itself.
_OF_VMAP = ("vmap", "functorch", "batched tensor", "Batching rule", "BatchedTensor")
MANY = 512  # narrow rows from which on their softmax takes longer than to transpose them

Placed = tuple[Any, Any]  # a tensor, and which of its dimensions counts the samples; or a tuple of each
Physical = Callable[[tuple[Any, ...], tuple[int | None, ...]], Placed]


class Level:
    """The run of a closure for `samples` at once; `randomness` as for `torch.vmap`."""

    def __init__(self, samples: int, randomness: str = "different"):
        self.samples, self.active = samples, False
        self._randomness, self._number = randomness, 0

    def run(self, closure: Callable[[], Any]) -> Any:
        """The tensor that the closure returns, or a tuple of some, samples first: (K, …); anything else as it is."""
        load_decompositions()
        self._number, self.active = begin_vmap(self.samples, self._randomness), True
        try:
            result = closure()
            return (
                tuple(map(self._unwrapped, result)) if isinstance(result, tuple) else self._unwrapped(result)
            )
        except RuntimeError as error:
            if isinstance(error, CredoError) or not any(word in str(error) for word in _OF_VMAP):
                raise
            raise UnsupportedOperation(
                "the samples cannot be computed at once: vectorized=True runs the closure under torch.vmap, which has "
                f"no answer for an operation in it. Use vectorized=False. torch says: {error}"
            ) from error
        finally:
            end_vmap()
            self.active = False

    def _unwrapped(self, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        (tensor,), (place,) = self.unwrapped([result])
        with below_transform():
            return tensor.expand(self.samples, *tensor.shape) if place is None else tensor.movedim(place, 0)

    def batched(self, stack: Tensor) -> Tensor:
        """What every sample sees as its own row of a stack (K, …)."""
        return add_batch(stack, 0, self._number)

    def unwrapped(self, tensors: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        """The tensors with their samples, and the places of these: None for what all samples share."""
        pairs = [(None, None) if t is None else remove_batch(t, self._number) for t in tensors]
        return tuple(t for t, _ in pairs), tuple(place for _, place in pairs)

    def physically(self, run: Physical, tensors: Sequence[Tensor | None]) -> Any:
        """What `run` makes, outside of vmap, of the tensors with their samples and the places of these."""
        if current_level() != self._number:
            raise UnsupportedOperation(
                "vectorized=True runs the closure under torch.vmap, and a function transform inside of it (vmap, grad, "
                "jvp) cannot be followed. Use vectorized=False."
            )
        own, places = self.unwrapped(tensors)
        with below_transform():
            out, place = run(own, places)
        if isinstance(out, tuple):
            return tuple(add_batch(t, p, self._number) for t, p in zip(out, place, strict=True))
        return add_batch(out, place, self._number)

    def cross_entropy(self, args: tuple[Tensor, ...], options: Mapping[str, Any]) -> Tensor:
        """Of each row, all samples by one call; vmap's rule is a dozen operations."""

        def losses(tensors: tuple[Any, ...], places: tuple[int | None, ...]) -> Placed:
            rows, target = (self._fold(t, place) for t, place in zip(tensors, places, strict=True))
            if rows.shape[1] < NARROW and len(rows) >= MANY:
                out = F.cross_entropy(rows.T.unsqueeze(0), target.unsqueeze(0), **options)
            else:
                out = F.cross_entropy(rows, target, **options)
            return out.view(self.samples, -1), 0

        out: Tensor = self.physically(losses, args)
        return out

    def _fold(self, tensor: Tensor, place: int | None) -> Tensor:
        """(K, M, …) → (K·M, …); what all samples share is repeated."""
        if place is None:
            return tensor.expand(self.samples, *tensor.shape).flatten(0, 1)
        return tensor.movedim(place, 0).flatten(0, 1)


def is_loss_of_rows(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether a call is the cross-entropy of rows of logits with the number of each one's class."""
    if func is not F.cross_entropy or options.get("reduction") != "none" or len(args) != 2:
        return False
    return all(isinstance(t, Tensor) for t in args) and args[0].dim() == 2 and args[1].dim() == 1


class FoldedLosses(TorchFunctionMode):
    """Hands the losses of rows to `Level.cross_entropy`, where no other mode sees them."""

    def __init__(self, level: Level):
        super().__init__()
        self._level = level

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if is_loss_of_rows(func, args, options):
            return self._level.cross_entropy(args, options)
        return func(*args, **options)


def by_one_run(closure: Callable[[], Any], samples: int) -> Any:
    """What the closure returns for all samples, the samples first: (K, M) or (K,)."""
    level = Level(samples)
    with FoldedLosses(level):
        return level.run(closure)


def refuse_backward() -> None:
    raise CallOrderError(
        "vectorized=True needs a closure that returns losses without calling backward: all samples run at once, and "
        "the optimiser calls backward for them together."
    )


def is_of_samples(tensor: Tensor) -> bool:
    """Whether the tensor is one for each sample, under vmap."""
    return is_batched(tensor)


def split(tensor: Tensor) -> tuple[Tensor, int | None]:
    """The tensor with its samples, and which dimension they are; None where all samples have the same."""
    return remove_batch(tensor, current_level())


def outside(make: Callable[[], Tensor], *, samples_first: bool) -> Tensor:
    """What `make` makes outside of vmap: one tensor for all samples, or one with a row for each."""
    with below_transform():
        made = make()
    return add_batch(made, 0, current_level()) if samples_first else made
