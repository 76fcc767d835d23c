"""Whom a block watches: parameters, their names, and what else in the module is constant."""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from credo.curvature.provenance import Source
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation

Parameters = torch.nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class Subjects:
    """Parameters in order, and constants: buffers and frozen parameters; all by id. Errors ask for `names`.

    None stands for a parameter or a buffer that a module might have had.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor | None],
        constants: Iterable[Tensor | None],
        names: Callable[[], Mapping[int, str]],
    ):
        self.names = names
        self.watched: dict[int, Tensor] = {}
        self.sources: dict[int, Source] = {}
        self.constants: dict[int, Tensor] = {}
        for constant in constants:
            if constant is not None:
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
                self.watched[key], self.sources[key] = p, Source(p)


def subjects_of(parameters: Parameters) -> Subjects:
    """Reads a module, parameters() or named_parameters(); anything else is an error that says what it got."""
    if isinstance(parameters, torch.nn.Module):
        held, buffers = _contents(parameters)
        for name, parameter in parameters.named_parameters():
            refuse_distributed(name, parameter)
        return Subjects(held, buffers, partial(_names, parameters))
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
    return Subjects([p for _, p in pairs], [], {id(p): name for name, p in pairs}.copy)


def buffers_of(module: torch.nn.Module) -> list[Tensor]:
    """All buffers in it."""
    return [buffer for buffer in _contents(module)[1] if buffer is not None]


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
    """Refuses a part of the module that is opaque; one that is not never is."""
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
    # Importing dynamo takes seconds; without it nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and issubclass(kind, dynamo.OptimizedModule):
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


def refuse_distributed(name: str, value: Tensor) -> None:
    """A DTensor, as FSDP2 and tensor parallelism make of parameters: its numbers are on several ranks."""
    tensors = sys.modules.get(
        "torch.distributed.tensor"
    )  # without it there are none, and importing it takes long
    if tensors is not None and isinstance(value, tensors.DTensor):
        raise UnsupportedOperation(
            f"parameter {name!r} is a DTensor (fully_shard, FSDP2 or tensor parallelism), whose numbers are on several "
            "ranks. Train the plain module, and let the optimiser shard what it keeps: sharded=True, after "
            "torch.distributed.init_process_group (docs/distributed.md)."
        )
