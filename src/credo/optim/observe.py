"""What is observed in a block by methods without per-example gradients: parameters that were used, what went back.

A plain backward pass does not say how many examples it was over. That is read from the operations in which
examples meet parameters; only a loss that is a sum needs it.
"""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credo.curvature.backward_calls import (
    ENGINE_CALLS,
    EngineCall,
    added_loss,
    is_discrete_likelihood,
    read_engine_call,
    refuse_other_reduction,
    takes_mean,
)
from credo.curvature.intercept import INSPECTIONS
from credo.curvature.loss_factor import (
    SEVERAL_MEANS,
    Factor,
    Irregular,
    outer_factors,
    refuse_number_of_examples,
)
from credo.curvature.rule import lead_before_merge
from credo.curvature.tracking import MERGING, Merges, Provenance, WatchedParameters, tensors_in
from credo.curvature.vmap import is_of_samples, refuse_backward, split
from credo.errors import CallOrderError, EmptyBatch, InvalidValue, UnsupportedOperation

CONVOLUTIONS = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}  # how many dimensions a batch has
_ON_ROWS = frozenset((F.linear, F.embedding, *CONVOLUTIONS))
_WATCHED_INSPECTIONS = {Tensor.detach}  # it shows the values, and those are a sample


class ForwardObserver(TorchFunctionMode, ABC):
    """`examples` went back so far; `used` are the ids of the parameters that operations in the block have met."""

    def __init__(self, subjects: WatchedParameters, reduction: str):
        super().__init__()
        self.examples = 0
        self.counted = True
        self.likelihood = False  # whether the last loss was one
        self.loss: Tensor | None = None  # the sum of what went back, as far as it was one number
        self.irregular: Irregular | None = None  # what is unusual about the losses of the block
        self.at_once = False  # whether several samples are computed together, under vmap
        self.used: set[int] = set()
        self.forward_number = 0  # of the forward passes that had a backward pass between them
        self._known = Provenance(subjects)
        self._reduction = reduction
        self._subjects = subjects
        self._witness: tuple[Tensor, int] | None = (
            None  # a parameter whose `.grad` was filled, and its version
        )
        self._whole = -1  # the forward pass of the last loss that was a mean, and not a part of one
        self._rows: set[int] = set()  # leading dimensions seen since the last backward pass
        self._merges = Merges()
        self._went_back = False
        self._going_back = False

    @abstractmethod
    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call with a parameter among its arguments."""

    @abstractmethod
    def _check_gradients(self) -> None:
        """After a backward pass: whether all gradients belong to the block."""

    @final
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ENGINE_CALLS:
            return self._run_engine(func, args, kwargs)
        if func in INSPECTIONS and func not in _WATCHED_INSPECTIONS:
            return func(*args, **kwargs)
        known = self._known
        if known.touches(args) or (kwargs and known.touches(kwargs.values())):
            if self.counting:
                self._note(func, args, kwargs)
            return self._call(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in MERGING or self._merges.known:
            self._merges.note(result, func, args)
        if isinstance(result, Tensor) and (func is torch.arange or known.constant(args)):
            known.add_constant(result)
        return result

    @property
    def counting(self) -> bool:
        """Whether a call is part of a forward pass: not under no_grad, and not a checkpoint's second run."""
        return not self._going_back and torch.is_grad_enabled()

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        if self._went_back:
            self._went_back = False
            self.forward_number += 1
            self._rows.clear()
            self._forget_pass()
        self.used.update(map(id, tensors_in((*args, *kwargs.values()))))
        if func in _ON_ROWS:
            rows = args[0] if args else kwargs["input"]
            if not self._known.knows(rows):
                self._rows.add(self._merges.lead(rows) or leading(func, rows))

    @abstractmethod
    def _forget_pass(self) -> None:
        """A new forward pass begins after a backward pass."""

    def _run_engine(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = read_engine_call(func, args, kwargs)
        if self.at_once:
            refuse_backward()
        if self._going_back or not self._fills_gradients(func, call):
            return call.run(self)
        if not self.used:
            raise CallOrderError(
                "the loss was not computed inside the block, so its gradient is not at the sample. Run the forward "
                "pass inside the block too."
            )
        examples = self._count()
        is_mean = refuse_other_reduction(call.roots, self._reduction, examples if self.counted else 1)
        if self._witness is not None:
            self.irregular = self.irregular or Irregular()
            self.irregular.pass_begins(self._witness)
        factors, outer = ((), ()) if is_mean is not None else self._read_factors(call, examples)
        if is_mean and self._reduction == "mean":
            if self._whole not in (-1, self.forward_number):
                self._refuse_several_means()
            self._whole = self.forward_number
        self.likelihood = is_discrete_likelihood(call.roots)
        if self._subjects.before_backward is not None:
            self._subjects.before_backward(examples if self.counted else -1)
        self._going_back = True
        try:
            result = call.run(self)
        finally:
            self._going_back = False
        self._check_gradients()
        for p in self._subjects.watched.values():
            if p.grad is not None:
                self._witness = (p, p.grad._version)
                break
        if outer or self.irregular is not None:
            self.irregular = self.irregular or Irregular()
            self.irregular.pass_ends(factors, outer, self._subjects.watched.values())
        self.examples += examples
        self.loss = added_loss(self.loss, call)
        self._went_back = True
        return result

    def _read_factors(self, call: EngineCall, examples: int) -> tuple[tuple[Factor, ...], tuple[Factor, ...]]:
        """By what a loss was multiplied that is certainly a mean; and by what, whatever it is."""
        factors, below = outer_factors(call.roots, call.seeds)
        if self._reduction != "mean" or not takes_mean(below):
            return (), tuple(factors)
        if self.counted:
            refuse_number_of_examples(factors, examples, self._subjects.factors)
        return tuple(factors), tuple(factors)

    def _refuse_several_means(self) -> None:
        """The sum of the means of several forward passes is no mean, unless the gradients of the others are gone."""
        if self.irregular is None or not self.irregular.cleared:
            raise InvalidValue(SEVERAL_MEANS)

    def _fills_gradients(self, func: Any, call: EngineCall) -> bool:
        if func is torch.autograd.grad:
            return False
        return call.wanted is None or self._known.touches(call.wanted)

    def _count(self) -> int:
        """M, where the operations agree on it; 1 where they do not, which only a sum would notice."""
        if self._rows == {0}:
            raise EmptyBatch("the batch is empty: no example went back.")
        if len(self._rows) == 1:
            return next(iter(self._rows))
        if self._reduction == "sum":
            seen = f"they have {sorted(self._rows)} rows" if self._rows else "there are none with rows"
            raise UnsupportedOperation(
                f"the number of examples cannot be read from the operations: {seen}. Use a mean loss and "
                "reduction='mean'."
            )
        self.counted = False
        return 1


def leading(func: Any, rows: Tensor) -> int:
    """The number of examples an operation sees."""
    batched = CONVOLUTIONS.get(func, 2 if func is F.linear else 1)
    if rows.dim() < batched:
        return 1
    merged = merged_from(rows) if func is F.linear else None
    return rows.shape[0] if merged is None else merged


def merged_from(rows: Tensor) -> int | None:
    """`lead_before_merge`, which under vmap is to be asked of the tensor with its samples."""
    if not is_of_samples(rows):
        return lead_before_merge(rows)
    physical, dim = split(rows)
    return lead_before_merge(physical, skip=1) if dim == 0 else rows.shape[0]  # unseen: as if it were so


@final
class GradientObserver(ForwardObserver):
    """Lets everything happen as it is."""

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _check_gradients(self) -> None:
        pass

    def _forget_pass(self) -> None:
        pass
