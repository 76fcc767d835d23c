"""The three ways to start a backward pass, read and run as one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credo.curvature.provenance import tensors_in
from credo.curvature.unlock import unlocked

# What Tensor.backward takes, in its order; it is a shorthand for torch.autograd.backward.
_BACKWARD = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
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


class EngineCall(NamedTuple):
    """A backward pass that somebody asked for."""

    roots: list[Tensor]
    wanted: list[Tensor] | None  # whose gradients; None: all leaves
    create_graph: bool
    run: Callable[[], Any]  # runs it without offering it for overriding once more


def read_engine_call(func: Any, args: Any, kwargs: Any) -> EngineCall:
    names = _NAMES[func]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    wanted = given.get("inputs")
    if func is torch.Tensor.backward:
        func, given = (
            torch.autograd.backward,
            {b: given[a] for a, b in zip(names, _BACKWARD, strict=True) if a in given},
        )
    return EngineCall(
        roots=list(tensors_in((given["outputs" if func is torch.autograd.grad else "tensors"],))),
        wanted=None if wanted is None else list(tensors_in((wanted,))),
        create_graph=bool(given.get("create_graph")),
        run=lambda: unlocked(func)(**given),
    )
