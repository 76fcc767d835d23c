"""Checks of what callers hand over: each names the argument, what it got and what would do."""

import json
import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue

SHOWN = 3  # mismatches spelt out before "and n more"


def positive(argument: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{argument} must be a number > 0, got {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise InvalidValue(f"{argument} must be finite and > 0, got {value}")
    return float(value)


def whole(argument: str, value: object, at_least: int, below: int = 2**63) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{argument} must be an int, got {value!r} of type {type(value).__name__}")
    if not at_least <= value < below:
        limit = f" and below {below}" if below < 2**63 or value >= below else ""
        raise InvalidValue(f"{argument} must be at least {at_least}{limit}, got {value}")
    return value


def positive_int(argument: str, value: object, at_least: int = 1) -> int:
    """An int that is the size of something: of a layer, an image."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(
            f"{argument}={value!r} is a {type(value).__name__}; give an int of at least {at_least}"
        )
    if value < at_least:
        raise InvalidValue(f"{argument}={value} is too small; give an int of at least {at_least}")
    return value


def named_tensors(argument: str, tensors: object) -> dict[str, Tensor]:
    """Detached copies in float32 or wider, contiguous, with no memory shared."""
    if not isinstance(tensors, Mapping):
        raise InvalidType(f"{argument} must map names to tensors, got {type(tensors).__name__}")
    return {_name(argument, name): _owned(argument, name, tensor) for name, tensor in tensors.items()}


def _name(argument: str, name: object) -> str:
    if not isinstance(name, str):
        raise InvalidType(f"{argument} must have strings as names, got {name!r}")
    return name


def _owned(argument: str, name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InvalidType(f"{argument} of {name!r} must be a real floating-point tensor, got {kind}")
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)


def json_copy(argument: str, value: Mapping[str, object]) -> dict[str, object]:
    """A copy that shares nothing with the original, or an error if JSON cannot hold it."""
    try:
        return cast("dict[str, object]", json.loads(json.dumps(dict(value), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise InvalidType(f"{argument} must be a dict of what JSON can hold: {error}") from error


def mismatches(expected: Mapping[str, torch.Size], given: Mapping[str, Tensor]) -> str:
    """The first differences between two sets of named shapes, in words; empty if there are none."""
    found = [f"{name!r} is missing" for name in expected if name not in given]
    found += [f"{name!r} is unexpected" for name in given if name not in expected]
    found += [
        f"{name!r} has shape {tuple(given[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in given and given[name].shape != shape
    ]
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more
