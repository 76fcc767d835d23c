"""The three ways to start a backward pass, read and run as one."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from credo.curvature.torch_private import are_transforms_active, around_engine, run_engine, saved
from credo.curvature.tracking import tensors_in
from credo.errors import UnsupportedOperation

_NAMES = {
    torch.Tensor.backward: ("self", "gradient", "retain_graph", "create_graph", "inputs"),
    torch.autograd.backward: (
        "tensors",
        "grad_tensors",
        "retain_graph",
        "create_graph",
        "grad_variables",
        "inputs",
    ),
    torch.autograd.grad: ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
}
ENGINE_CALLS = frozenset(_NAMES)


class EngineCall(ABC):
    """A backward pass that was asked for."""

    __slots__ = ("create_graph", "roots", "seeds", "wanted")

    roots: Sequence[Tensor]
    seeds: Sequence[Tensor | None]  # gradients of the roots; None: ones
    wanted: list[Tensor] | None  # whose gradients; None: all leaves
    create_graph: bool

    @abstractmethod
    def run(self, mode: AbstractContextManager[Any]) -> Any:
        """Runs it inside `mode`, because a checkpoint runs its forward during the backward pass."""


@final
class AnyCall(EngineCall):
    """torch.autograd.backward or torch.autograd.grad, by its arguments."""

    __slots__ = ("_arguments", "_function")

    def __init__(
        self,
        function: FunctionType,
        arguments: dict[str, Any],
        roots: Sequence[Tensor],
        wanted: list[Tensor] | None,
    ):
        self._function, self._arguments, self.roots, self.wanted = function, arguments, roots, wanted
        self.create_graph = bool(arguments.get("create_graph"))
        given = arguments.get("grad_outputs" if function is torch.autograd.grad else "grad_tensors")
        seeds = [given] if isinstance(given, Tensor) or given is None else list(given)
        self.seeds = seeds if len(seeds) == len(roots) else [None] * len(roots)

    def run(self, mode: AbstractContextManager[Any]) -> Any:
        function = _unlocked(self._function)
        _now.mode = mode
        try:
            return function(**self._arguments)
        finally:
            _now.mode = None


@final
class PlainBackward(EngineCall):
    """loss.backward() and no more: what torch asks before it runs takes longer than a small layer."""

    __slots__ = ("_retain",)

    def __init__(self, loss: Tensor, retain: bool):
        self.roots, self.wanted, self.create_graph, self._retain = (loss,), None, False, retain
        self.seeds = (None,)

    def run(self, mode: AbstractContextManager[Any]) -> Any:
        ones = (torch.ones_like(self.roots[0]),)
        with mode:
            return run_engine(
                self.roots, ones, self._retain, False, (), allow_unreachable=True, accumulate_grad=True
            )


def read_engine_call(func: Any, args: Any, kwargs: Any) -> EngineCall:
    if func is torch.Tensor.backward and len(args) == 1 and _is_plain(args[0], kwargs):
        return PlainBackward(args[0], bool(kwargs.get("retain_graph")))
    given = dict(zip(_NAMES[func], args, strict=False))
    given.update(kwargs)
    if func is torch.Tensor.backward:
        func = torch.autograd.backward
        given["tensors"], given["grad_tensors"] = given.pop("self"), given.pop("gradient", None)
    roots, wanted = given["outputs" if func is torch.autograd.grad else "tensors"], given.get("inputs")
    roots = [roots] if isinstance(roots, (Tensor, GradientEdge)) else list(roots)
    if any(isinstance(root, GradientEdge) for root in roots):
        raise UnsupportedOperation(
            "a backward pass from a GradientEdge cannot be followed: its graph is read from tensors. Call backward "
            "on the tensor itself."
        )
    return AnyCall(func, given, roots, None if wanted is None else list(tensors_in((wanted,))))


def _is_plain(loss: Tensor, given: Mapping[str, Any]) -> bool:
    return (
        given.get("gradient") is None
        and given.get("inputs") is None
        and not given.get("create_graph")
        and loss.requires_grad
        and loss.numel() == 1
        and loss.is_floating_point()
        and type(loss) is Tensor
        and not are_transforms_active()
    )


class _Now(threading.local):
    """The backward pass that this thread is about to begin."""

    mode: AbstractContextManager[Any] | None = None


_now = _Now()


@cache
def _unlocked(function: FunctionType) -> Callable[..., Any]:
    """The function without override, inside the mode only while the engine runs.

    Before, it asks the root a dozen small questions, each of which would go through them.
    """
    return around_engine(function, _run_seen)


def _run_seen(*args: Any, **kwargs: Any) -> Any:
    mode, _now.mode = _now.mode, None
    assert mode is not None
    with mode:
        return run_engine(*args, **kwargs)


def added_loss(before: Tensor | None, call: EngineCall) -> Tensor | None:
    """The sum over the losses that went back so far, and of this call, if it is of one number."""
    if len(call.roots) != 1 or call.roots[0].numel() != 1:
        return before
    loss = call.roots[0].detach()
    return loss if before is None else before + loss


# ────────────────────────────────────────
# Whether a loss is the negative log-probability of discrete targets; read from its graph.
#
# Such a loss has a natural zero: every target predicted with certainty. A squared error leaves the variance of the
# observations open, and the loss alone does not say how sure the data are. A density (a Gaussian with a variance of
# its own, a Poisson rate) has a loss with an arbitrary constant, which may be negative. Between the loss and what
# decides there are means, sums, masks and factors, so that a few operations from the root on are enough.

DISCRETE = (
    "NllLoss",
    "LogSoftmax",
    "Logsumexp",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "LogSigmoid",
    "KlDiv",
    "CtcLoss",
)
PROBABILITIES = (
    "Log",
    "Log1P",
    "Softplus",
)  # of a discrete target by hand, unless a squared error stands beside it
ERRORS = ("MseLoss", "Pow", "SmoothL1Loss", "HuberLoss", "Abs", "L1Loss", "Norm", "LinalgVectorNorm")
FARTHEST = 24  # operations looked at


def is_discrete_likelihood(roots: Sequence[Tensor]) -> bool:
    """Whether a way from the loss meets the likelihood of a class or label; a penalty beside it changes nothing."""
    waiting: deque[Any] = deque(root.grad_fn for root in roots if root.grad_fn is not None)
    probability = error = False
    for _ in range(FARTHEST):
        if not waiting:
            break
        node = waiting.popleft()
        name = node.name().removesuffix("0").removesuffix("Backward").rstrip("0123456789D")
        if name in DISCRETE:
            return True
        error |= name in ERRORS
        probability |= name in PROBABILITIES
        if name not in ERRORS and name not in PROBABILITIES:
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return probability and not error


# ────────────────────────────────────────
# Whether a loss is what `reduction` declares, as far as its last operations tell; for methods that need no squares.

_MEAN, _SUM = 1, 2  # torch's numbers for a loss's reduction
_PASSED = ("ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze", "Neg")
_PASSED_AT_MOST = 4


def refuse_other_reduction(roots: Sequence[Tensor], reduction: str, examples: int) -> bool | None:
    """A sum that was declared a mean, or a mean a sum: the gradients would be wrong by the number of examples.

    Only what is certain: a loss function's own reduction, or the sum of what it gave, with nothing behind it. Returns
    whether it is a mean; None where that is not certain.
    """
    if len(roots) != 1 or roots[0].numel() != 1:
        return None
    node: Any = roots[0].grad_fn
    for _ in range(_PASSED_AT_MOST):
        if node is None or _kind(node) not in _PASSED:
            break
        node = node.next_functions[0][0]
    found = _reduced(node)
    if reduction == "mean" and found == _SUM and examples > 1:
        raise UnsupportedOperation(
            f"reduction='mean' is declared, but {node.name()} sums the losses of {examples} examples, so the gradients "
            f"would be {examples} times too large. Take the mean, or build the optimiser with reduction='sum'."
        )
    if reduction == "sum" and found == _MEAN and examples > 1:
        raise UnsupportedOperation(
            f"reduction='sum' is declared, but {node.name()} takes the mean over {examples} examples, so the gradients "
            f"would be {examples} times too small. Sum the losses, or build the optimiser with reduction='mean'."
        )
    return None if found is None else found == _MEAN


def takes_mean(node: Any) -> bool:
    """Whether it is certain that a node takes a mean."""
    return _reduced(node) == _MEAN


def _reduced(node: Any) -> int | None:
    """How a node reduces the losses of the examples; None where that is not certain."""
    if node is None:
        return None
    name = _kind(node)
    if name == "Mean":
        return _MEAN
    if name == "Sum":
        below = node.next_functions[0][0]
        return _SUM if below is not None and saved(below, "reduction", None) == 0 else None
    found: int | None = saved(node, "reduction", None)
    return found


def _kind(node: Any) -> str:
    name: str = node.name()
    return name.removesuffix("0").removesuffix("1").removesuffix("Backward")
