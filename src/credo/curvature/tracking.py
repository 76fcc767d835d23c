"""Where a tensor comes from: a watched parameter, something computed from parameters alone, or data.

Examples meet parameters in an operation that has both among its arguments. An operation on
parameters alone (a weight norm, a transposition, a slice of a positional table) has no examples in
it: it gives a *derived* tensor, which stands for its parameters wherever it is used later. Example
i's gradient with respect to a derived tensor is pulled back to the parameters through the private
graph that made it.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from credo.curvature.rule import WIDE, merges_into
from credo.curvature.torch_private import (
    DisableTorchFunction,
    are_transforms_active,
    below_transform,
    compiled_module_type,
)
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation

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


class ParameterSource:
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

    def pull(self, gradients: Tensor, root: Tensor) -> Tensor:
        """Gradients (m, *shape) with respect to this tensor, as gradients (m, *root.shape) of a root."""
        if self.is_parameter:
            return gradients
        gradients = gradients.to(self.tensor.dtype)
        try:
            (pulled,) = torch.autograd.grad(
                self.tensor, root, gradients, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        except RuntimeError:  # no batching rule for an operation in the private graph
            rows = [self.pull_one(gradient, root) for gradient in gradients]
            return torch.stack(rows) if rows else gradients.new_zeros((0, *root.shape))
        return gradients.new_zeros((len(gradients), *root.shape)) if pulled is None else pulled

    def pull_one(self, gradient: Tensor, root: Tensor) -> Tensor:
        """One gradient with respect to this tensor, as a gradient of a root."""
        if self.is_parameter:
            return gradient
        gradient = gradient.to(self.tensor.dtype)
        (pulled,) = torch.autograd.grad(self.tensor, root, gradient, retain_graph=True, allow_unused=True)
        return torch.zeros_like(root) if pulled is None else pulled


class Derived(torch.autograd.Function):
    """Puts a derived tensor into the user's graph, and keeps the graph that made it private.

    Autograd frees a graph as it goes back through it; the private one must outlast that.
    """

    @staticmethod
    def forward(ctx: Any, source: ParameterSource, *roots: Tensor) -> Tensor:
        ctx.source = source
        return source.tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source = ctx.source
        with DisableTorchFunction():
            pulled = torch.autograd.grad(
                source.tensor, source.roots, grad, retain_graph=True, allow_unused=True
            )
        return None, *pulled


def _hand_out(source: ParameterSource) -> Tensor:
    """A derived tensor for the user's graph; below vmap, because parameters are the same for all samples."""
    if are_transforms_active():
        with below_transform():
            return _hand_out(source)
    public: Tensor = Derived.apply(source, *source.roots)  # type: ignore[no-untyped-call]
    return public


class Provenance:
    """Knows, by identity, the tensors that stand for parameters and those that are constant."""

    def __init__(self, watched: "WatchedParameters"):
        self.sources: dict[int, ParameterSource] = dict(watched.sources)
        self.constants: dict[int, Any] = watched.constants_now()
        self._alive: dict[int, Any] = {}
        self.complex = False  # whether any source is, which a parameter itself never is

    def touches(self, values: Iterable[Any]) -> bool:
        """Whether a parameter, or what was derived from one, is among the arguments."""
        sources = self.sources
        for value in values:  # noqa: SIM110  (asked at every operation, and a generator takes longer)
            if id(value) in sources or (isinstance(value, (list, tuple)) and self.touches(value)):
                return True
        return False

    def source(self, tensor: Tensor | None) -> ParameterSource | None:
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

    def derive(self, result: Tensor, parents: list[ParameterSource], selects: bool) -> Tensor:
        """Hands out a derived tensor in place of `result`, whose graph stays private."""
        roots = tuple({id(root): root for parent in parents for root in parent.roots}.values())
        selects = selects and len(parents) == 1 and parents[0].selects
        source = ParameterSource(result, roots, selects)
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


# ────────────────────────────────────────
# Whom a block watches: parameters, their names, and what else in the module is constant.

Parameters = torch.nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class WatchedParameters:
    """Parameters in order, and constants: buffers and frozen parameters; all by id. Errors ask for `names`.

    None stands for a parameter or a buffer that a module might have had.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor | None],
        constants: Iterable[Tensor | None],
        names: Callable[[], Mapping[int, str]],
        module: "weakref.ref[torch.nn.Module] | None" = None,
    ):
        """With a `module` its frozen parameters are constants, and its buffers, asked for anew for every block."""
        self.names, self._module = names, module
        # Where ranks share parameters: hears of each backward pass, and of how many examples it is.
        self.before_backward: Callable[[int], None] | None = None
        self.watched: dict[int, Tensor] = {}
        self.sources: dict[int, ParameterSource] = {}
        self.constants: dict[int, Tensor] = {}
        self.factors: set[float] = set()  # constants that have multiplied losses, whatever the batch
        self.graphs: set[int] = set()  # in which rows were examples, of several examples each
        held = None if module is None else module()
        # A weight that is made of a frozen one has no examples in it.
        for constant in (*constants, *(() if held is None else held.parameters())):
            if constant is not None and not (
                isinstance(constant, torch.nn.Parameter) and constant.requires_grad
            ):
                self.constants[id(constant)] = constant
        for p in parameters:
            if p is None:
                continue
            key = id(p)
            if not p.requires_grad:
                self.constants[key] = p
            elif p.is_complex():
                raise InvalidType(
                    f"parameter {names().get(key)!r} is complex ({p.dtype}), and has no squared gradient. Keep its two "
                    "parts in a real one, and use torch.view_as_complex of it."
                )
            else:
                self.watched[key], self.sources[key] = p, ParameterSource(p)
        self.subjects = tuple(self.watched.values())

    def constants_now(self) -> dict[int, Any]:
        """With the buffers that the module has now."""
        module = None if self._module is None else self._module()
        if module is None:
            return dict(self.constants)
        return self.constants | {id(own): own for own in _contents(module)[1] if own is not None}


def watched_parameters(parameters: Parameters) -> WatchedParameters:
    """Reads a module, parameters() or named_parameters(); anything else is an error that says what it got."""
    if isinstance(parameters, torch.nn.Module):
        held, buffers = _contents(parameters)
        for name, parameter in parameters.named_parameters():
            refuse_distributed(name, parameter)
        return WatchedParameters(held, buffers, partial(_names, parameters))
    if isinstance(parameters, (Tensor, str, dict)) or not isinstance(parameters, Iterable):
        raise InvalidType(
            "parameters must be a module, model.parameters() or model.named_parameters(); "
            f"got {type(parameters).__name__}."
        )
    pairs = [_named(k, entry) for k, entry in enumerate(parameters)]
    if not pairs:
        raise InvalidValue("parameters is empty: nothing to watch. Was a generator used up before?")
    for name, p in pairs:
        refuse_distributed(name, p)
    return WatchedParameters([p for _, p in pairs], [], {id(p): name for name, p in pairs}.copy)


def refuse_opaque(module: torch.nn.Module) -> None:
    """Compiled and scripted modules run where no operation can be seen."""
    _contents(module)


def _contents(module: torch.nn.Module) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Parameters and buffers of the module and all in it, in one loop: it is asked for every block."""
    found, seen = [module], {module}
    parameters: list[Tensor | None] = []
    buffers: list[Tensor | None] = []
    for part in found:
        if type(part) not in _CLEAR:
            _look_at(part, module)
        parameters += part._parameters.values()
        if part._buffers:
            buffers += part._buffers.values()
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return parameters, buffers


def _names(module: torch.nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


def _look_at(part: torch.nn.Module, module: torch.nn.Module) -> None:
    """Raises on a part of the module that is compiled or scripted."""
    if kind := _opacity(type(part)):
        name = next(name for name, other in module.named_modules() if other is part)
        raise UnsupportedOperation(
            f"module {name or type(part).__name__!r} is {kind}, so its operations cannot be watched. "
            "Pass and call the plain module (of a compiled one: module._orig_mod)."
        )
    _CLEAR.add(type(part))


_CLEAR: set[type[torch.nn.Module]] = set()  # types of modules that can be watched


def _opacity(kind: type[torch.nn.Module]) -> str:
    """Why modules of this type cannot be watched; empty if they can."""
    compiled = compiled_module_type()
    if compiled is not None and issubclass(kind, compiled):
        return "compiled"
    return "scripted" if issubclass(kind, torch.jit.ScriptModule) else ""


def _named(index: int, entry: Any) -> tuple[str, Tensor]:
    if isinstance(entry, Tensor):
        return f"parameter {index} of shape {tuple(entry.shape)}", entry
    if (
        isinstance(entry, tuple)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], Tensor)
    ):
        return entry
    raise InvalidType(
        f"parameters[{index}] must be a tensor or a (name, tensor) pair; got {type(entry).__name__}."
    )


def dtensor_type() -> Any:
    """The type of the tensors that FSDP2 and tensor parallelism make of parameters; None while there are none."""
    tensors = sys.modules.get("torch.distributed.tensor")  # importing it takes long
    return None if tensors is None else tensors.DTensor


def whole_tensor(value: Tensor) -> Tensor:
    """Of a DTensor all numbers, on every rank, and all ranks must ask; other tensors as they are."""
    kind = dtensor_type()
    return value.full_tensor() if kind is not None and isinstance(value, kind) else value


def refuse_distributed(name: str, value: Tensor) -> None:
    """A DTensor, whose numbers are on several ranks."""
    kind = dtensor_type()
    if kind is not None and isinstance(value, kind):
        raise UnsupportedOperation(
            f"parameter {name!r} is a DTensor (fully_shard, FSDP2 or tensor parallelism), whose numbers are on several "
            "ranks. Give the optimiser the module on which fully_shard was called, not its parameters; or train the "
            "plain module, and let the optimiser shard what it keeps: sharded=True, after "
            "torch.distributed.init_process_group (docs/distributed.md)."
        )


# ────────────────────────────────────────
# Inputs whose leading dimension was two, (B, T, …) → (B·T, …), inside a block: no graph shows it.

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
