"""Sees every torch operation inside a block and replaces those on watched parameters.

An operation with examples and a parameter among its arguments becomes a `Watched` node; one on
parameters alone gives a derived tensor; everything else runs as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credo.curvature.accumulate import SquareAccumulator, Watched
from credo.curvature.audit import audit
from credo.curvature.backward_calls import ENGINE_CALLS, added_loss, is_discrete_likelihood, read_engine_call
from credo.curvature.loss_factor import Irregular
from credo.curvature.rule import MERGE_NODES, Operation, examples_second
from credo.curvature.rules import Generic, rule_for
from credo.curvature.torch_private import (
    active_modes,
    are_transforms_active,
    can_run_inside,
    count_modes,
    tree_map_only,
    without_override,
)
from credo.curvature.tracking import (
    MERGING,
    SELECTIONS,
    Merges,
    ParameterSource,
    Provenance,
    WatchedParameters,
    tensors_in,
)
from credo.errors import CallOrderError, UnsupportedOperation

# ────────────────────────────────────────
# What a block may do to a watched operation before it runs: give it many weights, or have it leave its factors.

Watch = Callable[[Operation, tuple[ParameterSource | None, ...]], Any]


class OperationTransform(Protocol):
    def apply(self, operation: Operation, sources: tuple[ParameterSource | None, ...], watch: Watch) -> Any:
        """Runs the operation, or what takes its place, by `watch`."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a call without parameters, or what takes its place."""

    def refuse_backward(self) -> None:
        """Raises where no backward pass may begin."""

    @property
    def needs_rules(self) -> bool:
        """Whether an operation on parameters without a rule goes to `run_without_rule`, not row by row."""

    def run_without_rule(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a look at parameters, a comparison; raises where the result has a gradient."""

    def derive(self, function: Any, make: Callable[[Callable[[Tensor], Tensor]], Any], made: Any) -> None:
        """Hears what a function of parameters alone has made; `make` makes it of other values for its tensors."""

    def refuse_left_out(self, counted: int, examples: int) -> None:
        """Raises where a loss that leaves examples out cannot be served."""


# ────────────────────────────────────────
# What looks at a tensor without computing with it: attributes, sizes, flags. None of it needs watching.

# These attributes are operations: their values have a gradient.
_COMPUTED = {"T", "mT", "H", "mH", "real", "imag"}
_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "storage_offset",
    "is_contiguous",
    "data_ptr",
    "untyped_storage",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "detach",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__hash__",
    "__len__",
    "__repr__",
    "__format__",
]


def _attributes() -> set[Any]:
    """The getters and setters of all attributes that are not operations."""
    found = set()
    for name in dir(torch.Tensor):
        attribute: Any = getattr(torch.Tensor, name, None)
        if type(attribute).__name__ in ("getset_descriptor", "property") and name not in _COMPUTED:
            found |= {attribute.__get__, attribute.__set__}
    return found


INSPECTIONS = frozenset(
    _attributes() | {getattr(torch.Tensor, name) for name in _METHODS} | {torch.is_grad_enabled}
)


# ────────────────────────────────────────

_WHOLE = {F.embedding_bag}  # its rows are examples; those of the operation inside are not
_INTEGERS = {torch.int32, torch.int64}


class Interception(TorchFunctionMode):
    """The mode of one block; `accumulator` has what its backward passes gave."""

    def __init__(
        self,
        parameters: WatchedParameters,
        declared: int | None,
        transform: OperationTransform | None = None,
        reduction: str | None = None,
        samples: int = 1,
    ):
        self._samples = samples  # computed at once
        self._transform = transform
        self.accumulator = SquareAccumulator(
            parameters.watched, parameters.names, reduction, parameters.factors, parameters.graphs
        )
        self._provenance, self._before_backward = Provenance(parameters), parameters.before_backward
        self._declared = declared
        self._calls = 0
        self._examples_second, self._merges = 0, Merges()  # the number of examples inside attention

    def withdraw(self) -> None:
        """Leaves torch's stack of modes, if it is there."""
        modes = active_modes()
        if modes and modes[-1] is self:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENGINE_CALLS:
            return self._run_engine(func, args, kwargs)
        known = self._provenance
        sources, constants, plain = known.sources, known.constants, self._transform is None
        for value in (
            (*args, *kwargs.values()) if kwargs else args
        ):  # `touches`, and whether a constant is there
            if id(value) in sources:
                break
            if isinstance(value, (list, tuple)):
                plain = False
                if known.touches(value):
                    break
            elif id(value) in constants:
                plain = False
        else:
            if plain and func is not torch.arange:
                result = func(*args, **kwargs)
                return (
                    self._merges.note(result, func, args) if func in MERGING or self._merges.known else result
                )
            return self._pass(func, args, kwargs)
        if func in INSPECTIONS or not torch.is_grad_enabled():
            return known.note_values(func(*args, **kwargs), args, kwargs)
        rule = rule_for(func)
        if rule is None:
            return self._replace_without_rule(func, args, kwargs)
        return self._replace_by(rule(*args, **kwargs), func, args, kwargs)

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call without a parameter, as it is; what it makes of constants alone is a constant."""
        result = func(*args, **kwargs) if self._transform is None else self._transform.run(func, args, kwargs)
        self._merges.note(result, func, args)
        known = self._provenance
        if (
            (known.constants or func is torch.arange)
            and id(result) not in known.constants  # as a buffer is that was changed in place
            and isinstance(result, Tensor)
            and (_is_positions(func, result) or known.constant((*args, *kwargs.values())))
        ):
            known.add_constant(result)
        return result

    def _replace_without_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """By what it does inside, or by rows."""
        if can_run_inside(func) and func not in _WHOLE:
            with self, self._inside(func, args, kwargs):
                return without_override(func)(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        if all(self._provenance.knows(tensor) for tensor in tensors):
            return self._derive(func, args, kwargs)
        if _writes_in_place(func):
            return self._write(func, args, kwargs)
        return self._replace_row_by_row(func, args, kwargs)

    def _replace_by(self, operation: Operation, func: Any, args: Any, kwargs: Any) -> Any:
        """By an operation with a rule, if parameters stand where the rule expects them."""
        # One loop, here: between two large kernels Python runs from cold caches, and pays for every function it meets.
        if (rows := operation.example_rows) is not None:
            operation.example_rows = None
            if rows.is_nested or rows._base is not None or type(rows.grad_fn).__name__ in MERGE_NODES:
                operation.count_examples(rows)
            else:
                operation.lead = rows.shape[0] if rows.dim() > 1 else -1
        known, slots, data, expected = self._provenance, operation.parameter_slots, False, True
        table, constants = known.sources, known.constants
        found: list[ParameterSource | None] = []
        for tensor in operation.tensors:
            source = table.get(key := id(tensor))
            if source is not None:
                expected = expected and len(found) in slots
            elif tensor is not None and key not in constants:
                data = True
            found.append(source)
        sources = tuple(found)
        if not data or (operation._may_have_none and operation.has_no_examples(known)):
            return self._derive(func, args, kwargs)
        if not expected or (self._examples_second and operation.name != "linear"):
            return self._replace_row_by_row(func, args, kwargs)
        # Rules are for real numbers; complex ones have torch's own gradients.
        if known.complex and known.complex_among(operation.tensors):
            return self._replace_row_by_row(func, args, kwargs)
        if self._examples_second or self._transform is not None:
            return self._place(operation, sources)
        return self._watch(operation, sources)

    def _replace_row_by_row(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._transform is not None and self._transform.needs_rules:
            return self._transform.run_without_rule(func, args, kwargs)
        sources = tuple(map(self._provenance.source, tensors_in((*args, *kwargs.values()))))
        operation = Generic(func, args, kwargs, [source is not None for source in sources])
        if self._transform is not None and are_transforms_active():
            raise UnsupportedOperation(
                f"{operation.name} has no vectorised form that equals one sample after the other. Use vectorized=False."
            )
        result, differentiable = operation.run()
        return self._place(operation, sources) if differentiable else result  # else a comparison, a shape

    def _place(self, operation: Operation, sources: tuple[ParameterSource | None, ...]) -> Any:
        if self._examples_second:
            operation.axis, operation.lead, operation.merged_from = 1, self._examples_second, None
        if self._transform is not None:
            return self._transform.apply(operation, sources, self._watch)
        return self._watch(operation, sources)

    def _watch(self, operation: Operation, sources: tuple[ParameterSource | None, ...]) -> Any:
        operation.watched_sources, operation.watched_by = sources, self.accumulator
        operation.watched_order = self._calls
        self._calls += 1
        tensors, operation.tensors = operation.tensors, ()  # `release`
        for tensor in tensors if self._merges.known and operation.axis == 0 else ():
            if (known := self._merges.lead(tensor)) is not None:
                operation.merged_from = known
        if are_transforms_active() and self._transform is None:
            raise UnsupportedOperation(
                f"{operation.name} runs under a transform of torch.func (vmap, grad, jvp, …), where gradients of "
                "single examples cannot be followed. Call the model on the whole batch; take derivatives by inputs "
                "with torch.autograd.grad outside the block."
            )
        return Watched.apply(operation, *tensors)  # type: ignore[no-untyped-call]

    @contextmanager
    def _inside(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Attention works on (T, M, d), whatever its module is given: there the examples come second."""
        before = self._examples_second
        if func is F.multi_head_attention_forward:
            query = kwargs["query"] if "query" in kwargs else args[0]
            self._examples_second = examples_second(query, "MultiheadAttention")
        try:
            yield
        finally:
            self._examples_second = before

    def _derive(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call on parameters alone: run it on their private copies, and hand out the result as derived."""
        parents = [s for s in map(self._provenance.source, tensors_in((*args, *kwargs.values()))) if s]
        if _writes_in_place(func) and not parents[0].is_parameter:
            raise UnsupportedOperation(
                f"{func.__name__} changes in place a tensor computed from parameters. Use the function that "
                f"returns a new tensor: {func.__name__.strip('_')}."
            )
        private = {
            id(s.tensor): t
            for t in tensors_in((*args, *kwargs.values()))
            if (s := self._provenance.source(t))
        }
        given = tree_map_only(Tensor, self._private, (tuple(args), kwargs))

        def make(value: Callable[[Tensor], Tensor]) -> Any:
            own_args, own_kwargs = tree_map_only(Tensor, value, given)
            return func(*own_args, **own_kwargs)

        result = make(lambda tensor: tensor)
        if self._transform is not None and any(out.requires_grad for out in tensors_in((result,))):
            self._transform.derive(func, make, result)

        def hand_out(out: Tensor) -> Tensor:
            if id(out) in private:
                return private[id(out)]
            if not out.requires_grad:
                return self._provenance.add_constant(out)
            return self._provenance.derive(out, parents, func in SELECTIONS)

        return tree_map_only(Tensor, hand_out, result)

    def _private(self, tensor: Tensor) -> Tensor:
        source = self._provenance.source(tensor)
        return tensor if source is None else source.tensor

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """x.add_(p): the new values by a watched operation on a copy of x, then written into x."""
        target, out_of_place = args[0], getattr(torch.Tensor, _name(func).strip("_").removeprefix("i"), None)
        if out_of_place is None or self._provenance.source(target) is not None:
            raise UnsupportedOperation(
                f"{_name(func)} writes a parameter into another tensor, so its squared gradient cannot be followed. "
                "Build the tensor with torch.cat, torch.where or arithmetic instead."
            )
        args, rule = (target.clone(), *args[1:]), rule_for(out_of_place)
        if rule is None:
            return target.copy_(self._replace_without_rule(out_of_place, args, kwargs))
        return target.copy_(self._replace_by(rule(*args, **kwargs), out_of_place, args, kwargs))

    def _run_engine(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A backward pass: look at its graph first, then run it, then square what had to wait."""
        if self._transform is not None:
            self._transform.refuse_backward()
        call = read_engine_call(func, args, kwargs)
        if call.create_graph:
            raise UnsupportedOperation(
                "create_graph=True asks for the gradient of a gradient, which has no per-example squares. "
                "Compute it outside the block."
            )
        wanted = (
            self.accumulator.parameters if call.wanted is None else {id(tensor) for tensor in call.wanted}
        )
        accumulator = self.accumulator
        new = audit(call, accumulator, wanted, self._declared, self._samples)
        outer = accumulator.current
        fills = outer is None and func is not torch.autograd.grad
        if fills and accumulator.witness is not None:
            accumulator.irregular = accumulator.irregular or Irregular()
            accumulator.irregular.pass_begins(accumulator.witness)
        if self._transform is not None and new.counted != new.examples:
            self._transform.refuse_left_out(new.counted, new.examples)
        if outer is not None:  # a re-entrant checkpoint's own backward: its uses belong to the outer pass
            new.join(outer)
        else:
            accumulator.likelihood = is_discrete_likelihood(call.roots)
            accumulator.loss = added_loss(accumulator.loss, call)
        if fills and self._before_backward is not None:
            self._before_backward(new.counted)
        accumulator.current = new
        try:
            # Another block around this one wants to see it too.
            nested = count_modes() and any(isinstance(mode, Interception) for mode in active_modes())
            result = func(*args, **kwargs) if nested else call.run(self)
        except BaseException:
            self.withdraw()  # after an interrupt while the mode was entered or left
            raise
        finally:
            accumulator.current = outer
        if outer is None:
            accumulator.settle(new)
        if fills:
            for p in accumulator.parameters.values():
                if p.grad is not None:
                    accumulator.witness = (p, p.grad._version)
                    break
            if accumulator.outer or accumulator.irregular is not None:
                accumulator.irregular = accumulator.irregular or Irregular()
                accumulator.irregular.pass_ends(
                    accumulator.factors, accumulator.outer, accumulator.parameters.values()
                )
        return result


# ────────────────────────────────────────


@final
class watching(AbstractContextManager[SquareAccumulator]):
    """A block in which backward passes leave squares; it cannot begin again. For arguments that are known to be good.

    With a `transform`, parameters may have many values; `samples` says how many of them are computed at once.
    """

    def __init__(
        self,
        parameters: WatchedParameters,
        reduction: str,
        examples: int | None = None,
        transform: OperationTransform | None = None,
        samples: int = 1,
    ):
        self.reduction = reduction
        self._interception = Interception(parameters, examples, transform, reduction, samples)
        self.accumulator = self._interception.accumulator

    def __enter__(self) -> SquareAccumulator:
        if self.accumulator.closed:
            raise CallOrderError(
                "a block has ended and cannot begin again. Call capture anew for each block."
            )
        try:
            self._interception.__enter__()  # type: ignore[no-untyped-call]
            return self.accumulator
        except BaseException:  # an interrupt, after which nobody else would leave the mode
            self._interception.withdraw()
            raise

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._interception.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.accumulator.closed = True
        if kind is None and self.accumulator.has_open_shares:
            self.accumulator.check_shares()

    def __del__(self) -> None:
        accumulator: SquareAccumulator | None = getattr(self, "accumulator", None)
        if accumulator is not None and not accumulator.closed:  # an interrupt came before the end could
            self._interception.withdraw()


def _is_positions(func: Any, result: Tensor) -> bool:
    """torch.arange(T), which numbers positions: no example is in it, whatever its length."""
    return func is torch.arange and result.dtype in _INTEGERS


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


@cache
def _writes_in_place(func: Any) -> bool:
    name = _name(func)
    in_place_operator = name.startswith("__i") and name not in (
        "__invert__",
        "__index__",
        "__int__",
        "__iter__",
    )
    return name == "__setitem__" or in_place_operator or (name.endswith("_") and not name.endswith("__"))
