"""Under `torch.vmap`: operations that see all samples at once, as one longer batch.

vmap's own way to a custom rule, an autograd function with a `vmap` method, gives the same and takes longer than
many an operation on a small network; its rule for cross-entropy is a dozen operations.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.overrides import TorchFunctionMode

from credo.errors import CallOrderError

Physical = Callable[
    [tuple[Any, ...], tuple[int | None, ...]], Tensor
]  # of tensors, and where their samples are


def physically(run: Physical, tensors: Sequence[Tensor | None], axis: int) -> Tensor:
    """What `run` makes, outside of vmap, of the tensors with their samples: (…, K·M, …), the rows at `axis`."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    level, samples = interpreter.level(), interpreter.batch_size()
    pairs = [(None, None) if t is None else _functorch._unwrap_batched(t, level) for t in tensors]
    with interpreter.lower():
        out = run(tuple(t for t, _ in pairs), tuple(dim for _, dim in pairs))
        out = out.unflatten(axis, (samples, out.shape[axis] // samples))  # type: ignore[no-untyped-call]
    batched: Tensor = _functorch._add_batch_dim(out, axis, level)
    return batched


def by_one_run(closure: Callable[[], Any], samples: int) -> Any:
    """What the closure returns for all samples, the samples first: (K, M) or (K,)."""
    kept: list[Any] = []

    def one(index: Tensor) -> Tensor:
        kept.append(unwrapped(closure()))
        return index  # what vmap returns it keeps until the garbage collector comes: not a whole graph

    with FoldedLosses(samples):
        torch.vmap(one, randomness="different")(torch.arange(samples))
    return kept[0]


def refuse_backward() -> None:
    raise CallOrderError(
        "vectorized=True needs a closure that returns losses without calling backward: all samples run at once, and "
        "the optimiser calls backward for them together."
    )


def is_of_samples(tensor: Tensor) -> bool:
    """Whether the tensor is one for each sample, under vmap."""
    found: bool = _functorch.is_batchedtensor(tensor)
    return found


def split(tensor: Tensor) -> tuple[Tensor, int | None]:
    """The tensor with its samples, and which dimension they are; None where all samples have the same."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    found: tuple[Tensor, int | None] = _functorch._unwrap_batched(tensor, interpreter.level())
    return found


def outside(make: Callable[[], Tensor], *, samples_first: bool) -> Tensor:
    """What `make` makes outside of vmap: one tensor for all samples, or one with a row for each."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    with interpreter.lower():
        made = make()
    if not samples_first:
        return made
    batched: Tensor = _functorch._add_batch_dim(made, 0, interpreter.level())
    return batched


def unwrapped(losses: Any) -> Any:
    """What a function under vmap returned, with its samples first: (K, …); what is no tensor as it is."""
    if not isinstance(losses, Tensor):
        return losses
    interpreter: Any = retrieve_current_functorch_interpreter()
    tensor, dim = _functorch._unwrap_batched(losses, interpreter.level())
    with interpreter.lower():
        return (
            tensor.expand(interpreter.batch_size(), *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        )


class FoldedLosses(TorchFunctionMode):
    """Cross-entropy of each row, of all samples by one call."""

    def __init__(self, samples: int):
        super().__init__()
        self._samples = samples

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.cross_entropy and options.get("reduction") == "none" and _is_plain(args):
            return physically(self._losses(options), args, 0)
        return func(*args, **options)

    def _losses(self, options: dict[str, Any]) -> Physical:
        def losses(tensors: tuple[Any, ...], dims: tuple[int | None, ...]) -> Tensor:
            logits, target = (self._fold(t, dim) for t, dim in zip(tensors, dims, strict=True))
            return F.cross_entropy(logits, target, **options)

        return losses

    def _fold(self, tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor.repeat(self._samples, *[1] * (tensor.dim() - 1))
        return tensor.movedim(dim, 0).flatten(0, 1)


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Rows of logits and the number of each one's class."""
    rows = len(args) == 2 and all(isinstance(t, Tensor) for t in args)
    return rows and args[0].dim() == 2 and args[1].dim() == 1
