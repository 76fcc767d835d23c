"""Whom a block watches: parameters, their names, and what else in the module is constant."""

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue, UnsupportedOperation

Parameters = torch.nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


class Subjects:
    """Parameters in order, a name for each (by id), and constants: buffers and frozen parameters."""

    def __init__(self, named: list[tuple[str, Tensor]], constants: list[Tensor]):
        self.parameters = [parameter for _, parameter in named if parameter.requires_grad]
        self.names = {id(parameter): name for name, parameter in named}
        frozen = [parameter for _, parameter in named if not parameter.requires_grad]
        self.constants = [*constants, *frozen]


def subjects_of(parameters: Parameters) -> Subjects:
    """Reads a module, parameters() or named_parameters(); anything else is an error that says what it got."""
    if isinstance(parameters, torch.nn.Module):
        named: dict[int, tuple[str, Tensor]] = {}
        buffers: list[Tensor] = []
        for prefix, part in _parts(parameters):
            _refuse_opaque(prefix, part)
            for name, p in part._parameters.items():
                if p is not None:
                    named.setdefault(id(p), (prefix + name, p))
            buffers += [b for b in part._buffers.values() if b is not None]
        return Subjects(list(named.values()), buffers)
    if isinstance(parameters, (Tensor, str, dict)) or not isinstance(parameters, Iterable):
        raise InvalidType(
            "parameters must be a module, model.parameters() or model.named_parameters(); "
            f"got {type(parameters).__name__}."
        )
    pairs = [_named(k, entry) for k, entry in enumerate(parameters)]
    if not pairs:
        raise InvalidValue("parameters is empty: nothing to watch. Was a generator used up before?")
    return Subjects(pairs, [])


def buffers_of(module: torch.nn.Module) -> list[Tensor]:
    return [b for _, part in _parts(module) for b in part._buffers.values() if b is not None]


def _parts(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The module and all in it, each once, with the prefix of its names; several times faster than named_modules."""
    found, seen = [("", module)], {id(module)}
    for prefix, part in found:
        for name, child in part._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append((f"{prefix}{name}.", child))
    return found


def refuse_opaque(module: torch.nn.Module) -> None:
    """Compiled and scripted modules run where no operation can be seen."""
    for prefix, part in _parts(module):
        _refuse_opaque(prefix, part)


def _refuse_opaque(prefix: str, part: torch.nn.Module) -> None:
    kind = _opacity(type(part))  # type: ignore[arg-type]  # mypy: the hash of a class is not that of its instances
    if kind:
        raise UnsupportedOperation(
            f"module {prefix.rstrip('.') or type(part).__name__!r} is {kind}, so its operations cannot be watched. "
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
