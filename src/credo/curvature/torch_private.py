"""All that credo uses of torch beyond its documented interface, in one file, with the reason for each use.

A new version of torch is tried against this file: `make test-torch VERSION=2.15.0`. Tried on 2.13.0, 2.14.1 and 2.15.0.

    name                          what it is for                           what is public, and why that is not enough
    DisableTorchFunction          operations that no mode is to see        DisableTorchFunctionSubclass: modes still see
    is_any_autocast_enabled       one question a layer in a backward pass  is_autocast_enabled: one for each device
    are_transforms_active         whether vmap or grad runs                nothing
    active_modes, count_modes     blocks in blocks, interrupted exits      nothing
    compiled_module_type          errors about compiled modules            nothing
    COMPILER                      whether torch.compile was ever called    nothing
    without_override              operations in torch's Python functions   a mode sees such a function as a whole
    around_engine, run_engine     the forward that a checkpoint repeats    a mode would see backward's own questions too
    node_type                     the watched nodes of a graph             nothing, before there is a node
    saved, saved_getter, …        dimensions and indices of a node         these attributes, without a list of them
    results_of, creation_order    shapes and order of the nodes            nothing
    begin_vmap … below_transform  many samples, operations below vmap      torch.vmap: it takes longer than a layer
    tree_flatten, …               arguments in lists and dicts             nothing
    profiler_runs, global_…_hooks a step that has no name to tell          profile_hook_step: it takes a while each time
    fsdp_groups                   policies of fully_shard, kept parameters setters without getters
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunction,
    _are_functorch_transforms_active,
    _functorch,
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _len_torch_function_stack,
)
from torch.autograd.graph import _engine_run_backward
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

__all__ = ["DisableTorchFunction", "tree_flatten", "tree_map_only", "tree_unflatten"]

is_any_autocast_enabled: Callable[[], bool] = _is_any_autocast_enabled
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
# Those that run before and after the step of every optimiser.
global_pre_hooks, global_post_hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
are_transforms_active: Callable[[], bool] = _are_functorch_transforms_active  # vmap, grad and the like


count_modes: Callable[[], int] = _len_torch_function_stack  # of this thread


def active_modes() -> list[Any]:
    """The modes of this thread, the innermost last."""
    return [_get_function_stack_at(k) for k in range(_len_torch_function_stack())]


COMPILER = (
    "torch._inductor.compiler_bisector"  # in sys.modules once `torch.compile` was called, and not before
)


def compiled_module_type() -> type | None:
    """What `torch.compile` makes of a module; None while nothing has been compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    return None if dynamo is None else dynamo.OptimizedModule


# ────────────────────────────────────────
# Torch's functions that are written in Python. Such a function (F.multi_head_attention_forward, say) first asks
# whether it is overridden, and hands itself over as a whole. What is watched are the operations in its body:
# `without_override` gives the same code with that question answered by no.

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def can_run_inside(function: Any) -> bool:
    return isinstance(function, FunctionType) and (function.__module__ or "").startswith("torch")


@cache
def without_override(function: FunctionType) -> Callable[..., Any]:
    """The same function, which does not offer itself for overriding."""
    return _with_globals(function, dict.fromkeys(_QUESTIONS, _no))


def _with_globals(function: FunctionType, others: dict[str, Any]) -> Callable[..., Any]:
    """The same function, which finds `others` where its module has such names."""
    known = function.__globals__
    scope = {**known, **{name: value for name, value in others.items() if name in known}}
    copy = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False


# ────────────────────────────────────────
# The autograd engine and its graph.

run_engine = _engine_run_backward


def around_engine(function: FunctionType, run: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.backward` or `grad`, without override, with `run` in the place of `run_engine`."""
    assert (
        function.__globals__["_engine_run_backward"] is _engine_run_backward
    )  # else `run` would never be called
    return _with_globals(without_override(function), {"_engine_run_backward": run})  # type: ignore[arg-type]


def node_type(function: type[torch.autograd.Function]) -> Any:
    """The type of the nodes that a function of `torch.autograd` puts into the graph."""
    return function._backward_cls


results_of: Callable[[Any], Any] = attrgetter("_input_metadata")  # of a node: shape and dtype of each result
_ABSENT = object()


# Of nodes: later ones have larger numbers, as far as one thread made them.
creation_order: Callable[[Any], int] = methodcaller("_sequence_nr")


def saved(node: Any, name: str, default: Any = _ABSENT) -> Any:
    """What a node of torch's own has saved of its arguments; LookupError where it has nothing of that name."""
    found = getattr(node, f"_saved_{name}", default)
    if found is _ABSENT:
        raise LookupError(f"{node.name()} has saved no {name}")
    return found


def has_saved(kind: Any, name: str) -> bool:
    """Whether nodes of a type save something of that name."""
    return hasattr(kind, f"_saved_{name}")


def saved_getter(*names: str) -> Callable[[Any], Any]:
    """A function of a node that gives what it has saved: a tuple, or of one name the value itself."""
    return attrgetter(*(f"_saved_{name}" for name in names))


# ────────────────────────────────────────
# One level of `torch.vmap`, opened by hand. `torch.vmap` itself would pack and unpack arguments.

begin_vmap: Callable[[int, str], int] = _functorch._vmap_increment_nesting  # the level's number
end_vmap: Callable[[], int] = _functorch._vmap_decrement_nesting
add_batch: Callable[[Tensor, int, int], Tensor] = _functorch._add_batch_dim  # tensor, dimension, level
remove_batch: Callable[[Tensor, int], tuple[Tensor, int | None]] = _functorch._unwrap_batched  # tensor, level
is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor


def current_level() -> int:
    """The number of the innermost function transform."""
    number: int = _functorch.peek_interpreter_stack().level()
    return number


@contextmanager
def below_transform() -> Iterator[None]:
    """What runs inside is outside of the innermost function transform."""
    level = _functorch.pop_dynamic_layer_stack()
    try:
        yield
    finally:
        _functorch.push_dynamic_layer_stack(level)


@cache
def load_decompositions() -> None:
    """The rules of vmap that are written in Python, which torch loads when `torch.vmap` first runs."""
    torch.vmap(torch.neg)(torch.zeros(1))


# ────────────────────────────────────────
# FSDP2.


def fsdp_groups(module: Any) -> list[Any]:
    """What `fully_shard` knows of the parameters that it gathers together."""
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups
