"""Where a tensor comes from: a watched parameter, something computed from parameters alone, or data.

Examples meet parameters in an operation that has both among its arguments. An operation on
parameters alone (a weight norm, a transposition, a slice of a positional table) has no examples in
it: it gives a *derived* tensor, which stands for its parameters wherever it is used later. Example
i's gradient with respect to a derived tensor is pulled back to the parameters through the private
graph that made it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from credo.curvature.contribution import WIDE

# Each element of the result is an element of the argument, none twice: squares pull back like gradients.
SELECTIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("t", "transpose", "permute", "view", "reshape", "flatten", "unflatten", "contiguous"),
        *("unsqueeze", "squeeze", "swapaxes", "movedim", "chunk", "split", "narrow", "select", "unbind"),
    )
) | {
    torch.Tensor.T.__get__,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    torch.transpose,
    torch.permute,
    torch.chunk,
    torch.split,
}
# Each element of the result is an element of the argument, whatever the values are; some may be there twice.
PICKS = SELECTIONS | {
    torch.Tensor.__getitem__,
    torch.Tensor.expand,
    torch.Tensor.expand_as,
    torch.Tensor.repeat,
    torch.Tensor.index_select,
    torch.index_select,
    torch.embedding,
    torch.squeeze,
    torch.unsqueeze,
    torch.reshape,
    torch.flatten,
    torch.narrow,
    torch.select,
    torch.unbind,
    torch.Tensor.split_with_sizes,
    torch.split_with_sizes,
}


class Source:
    """A tensor that stands for parameters: a watched parameter itself, or one derived from some (its `roots`)."""

    __slots__ = ("_roots", "at_once", "is_parameter", "key", "selects", "tensor")

    def __init__(self, tensor: Tensor, roots: tuple[Tensor, ...] = (), selects: bool = True):
        self.tensor = tensor  # for a derived tensor, the one with the private graph
        self._roots = roots
        self.is_parameter = not roots
        self.key = id(roots[0] if roots else tensor)
        self.selects = selects  # made from one parameter by selections only
        # Whether squares pull back as such: through a graph in half precision small ones would become zero.
        self.at_once = selects and (self.is_parameter or tensor.dtype in WIDE)

    @property
    def roots(self) -> tuple[Tensor, ...]:
        return self._roots or (self.tensor,)

    def pull(self, shares: Tensor, root: Tensor) -> Tensor:
        """Gradients (m, *shape) with respect to this tensor, as gradients (m, *root.shape) of a root."""
        if self.is_parameter:
            return shares
        shares = shares.to(self.tensor.dtype)
        try:
            (pulled,) = torch.autograd.grad(
                self.tensor, root, shares, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        except RuntimeError:  # no batching rule for an operation in the private graph
            rows = [self.pull_one(share, root) for share in shares]
            return torch.stack(rows) if rows else shares.new_zeros((0, *root.shape))
        return shares.new_zeros((len(shares), *root.shape)) if pulled is None else pulled

    def pull_one(self, share: Tensor, root: Tensor) -> Tensor:
        """One gradient with respect to this tensor, as a gradient of a root."""
        if self.is_parameter:
            return share
        share = share.to(self.tensor.dtype)
        (pulled,) = torch.autograd.grad(self.tensor, root, share, retain_graph=True, allow_unused=True)
        return torch.zeros_like(root) if pulled is None else pulled


class Derived(torch.autograd.Function):
    """Puts a derived tensor into the user's graph, and keeps the graph that made it private.

    Autograd frees a graph as it goes back through it; the private one must outlast that.
    """

    @staticmethod
    def forward(ctx: Any, source: Source, *roots: Tensor) -> Tensor:
        ctx.source = source
        return source.tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source = ctx.source
        with torch._C.DisableTorchFunction():
            pulled = torch.autograd.grad(
                source.tensor, source.roots, grad, retain_graph=True, allow_unused=True
            )
        return None, *pulled


def _hand_out(source: Source) -> Tensor:
    """A derived tensor for the user's graph; below vmap, because parameters are the same for all samples."""
    if not torch._C._are_functorch_transforms_active():
        public: Tensor = Derived.apply(source, *source.roots)  # type: ignore[no-untyped-call]
        return public
    lowered = _functorch.pop_dynamic_layer_stack()
    try:
        return _hand_out(source)
    finally:
        _functorch.push_dynamic_layer_stack(lowered)


class Provenance:
    """Knows, by identity, the tensors that stand for parameters and those that are constant."""

    def __init__(self, sources: Mapping[int, Source], constants: Mapping[int, Tensor]):
        self.sources: dict[int, Source] = dict(sources)
        self.constants: dict[int, Any] = dict(constants)
        self._alive: dict[int, Any] = {}
        self.complex = False  # whether any source is, which a parameter itself never is

    def touches(self, values: Iterable[Any]) -> bool:
        """Whether a parameter, or what was derived from one, is among the arguments."""
        sources = self.sources
        for value in values:  # noqa: SIM110  (asked at every operation, and a generator takes longer)
            if id(value) in sources or (isinstance(value, (list, tuple)) and self.touches(value)):
                return True
        return False

    def source(self, tensor: Tensor | None) -> Source | None:
        return self.sources.get(id(tensor))

    def knows(self, tensor: Tensor) -> bool:
        """Whether no example has touched this tensor."""
        return id(tensor) in self.sources or id(tensor) in self.constants

    def complex_among(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether a tensor is complex, as what was derived from parameters may be."""
        return any(tensor is not None and tensor.is_complex() for tensor in tensors)

    def constant(self, values: Iterable[Any]) -> bool:
        """Whether there are tensors among the arguments, and all of them are constant."""
        found = list(tensors_in(values))
        return bool(found) and all(id(tensor) in self.constants for tensor in found)

    def add_constant(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.constants:
            self.constants[id(tensor)] = self._forget_with(tensor, "constants")
        return tensor

    def note_values(self, result: Any, args: Any, kwargs: Any) -> Any:
        """The result of a look at parameters; values taken from parameters alone (detach, a norm) are constant."""
        if (
            isinstance(result, Tensor)
            and id(result) not in self.sources
            and all(self.knows(tensor) for tensor in tensors_in((*args, *kwargs.values())))
        ):
            self.add_constant(result)
        return result

    def derive(self, result: Tensor, parents: list[Source], selects: bool) -> Tensor:
        """Hands out a derived tensor in place of `result`, whose graph stays private."""
        roots = tuple({id(root): root for parent in parents for root in parent.roots}.values())
        selects = selects and len(parents) == 1 and parents[0].selects
        source = Source(result, roots, selects)
        self.complex = self.complex or result.is_complex()
        public = _hand_out(source)
        self.sources[id(public)] = source
        self._forget_with(public, "sources")
        return public

    def _forget_with(self, tensor: Tensor, table: str) -> Any:
        """Drops the entry when the tensor dies, so that another one at its address is not mistaken for it.

        What does so must not hold this object: that would be a cycle, garbage for the collector at every step.
        """
        self._alive[id(tensor)] = weakref.ref(tensor, partial(_forget, weakref.ref(self), table, id(tensor)))
        return self._alive[id(tensor)]


def _forget(owner: Callable[[], Provenance | None], table: str, key: int, _: Any) -> None:
    known = owner()
    if known is not None:
        getattr(known, table).pop(key, None)
        known._alive.pop(key, None)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among arguments, also inside lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
