"""Whom a block watches: parameters, their names, and what else in the module is constant."""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from credo.curvature.provenance import Source
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation

Parameters = torch.nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class Subjects:
    """Parameters in order, and constants: buffers and frozen parameters; all by id. Errors ask for `names`."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        constants: Iterable[Tensor],
        names: Callable[[], Mapping[int, str]],
    ):
        self.names = names
        self.watched: dict[int, Tensor] = {}
        self.sources: dict[int, Source] = {}
        self.constants = {id(constant): constant for constant in constants}
        for p in parameters:
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
        parts = _parts(parameters)
        _refuse_opaque(parameters, parts)
        held = [p for part in parts for p in part._parameters.values() if p is not None]
        return Subjects(held, buffers_of(parameters), partial(_names, parameters))
    if isinstance(parameters, (Tensor, str, dict)) or not isinstance(parameters, Iterable):
        raise InvalidType(
            "parameters must be a module, model.parameters() or model.named_parameters(); "
            f"got {type(parameters).__name__}."
        )
    pairs = [_named(k, entry) for k, entry in enumerate(parameters)]
    if not pairs:
        raise InvalidValue("parameters is empty: nothing to watch. Was a generator used up before?")
    return Subjects([p for _, p in pairs], [], {id(p): name for name, p in pairs}.copy)


def buffers_of(module: torch.nn.Module) -> list[Tensor]:
    """All buffers in it. One loop, which is asked for at every step."""
    found, seen = [module], {module}
    buffers: list[Tensor] = []
    for part in found:
        for buffer in part._buffers.values():
            if buffer is not None:
                buffers.append(buffer)
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return buffers


def _names(module: torch.nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The module and all in it, each once; several times faster than modules()."""
    found, seen = [module], {module}
    for part in found:
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def refuse_opaque(module: torch.nn.Module) -> None:
    """Compiled and scripted modules run where no operation can be seen."""
    _refuse_opaque(module, _parts(module))


def _refuse_opaque(module: torch.nn.Module, parts: list[torch.nn.Module]) -> None:
    for part in parts:
        if kind := _opacity(type(part)):  # type: ignore[arg-type]  # mypy: the hash of a class is not that of its instances
            name = next(name for name, other in module.named_modules() if other is part)
            raise UnsupportedOperation(
                f"module {name or type(part).__name__!r} is {kind}, so its operations cannot be watched. "
                "Pass and call the plain module (of a compiled one: module._orig_mod)."
            )


@cache
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
