"""Checks of what users hand to an optimiser: the message names the argument, its value, the range, the remedy."""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from credo.curvature.tracking import refuse_distributed
from credo.distributed.world import world
from credo.errors import InvalidType, InvalidValue
from credo.optim.habits import refuse_unknown

# What torch's schedulers and samplers put into a parameter group of their own accord.
_FOREIGN = frozenset(
    ("params", "param_names", "initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr")
)


def number(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> float:
    """A finite number in the range; open ends leave the end out."""
    if not _is_real(value):
        raise InvalidType(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not math.isfinite(value) or not inside:
        ends = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise InvalidValue(f"{name} must lie in {ends.replace('inf]', 'inf)')}, got {value!r}.")
    return float(value)


def learning_rate(value: Any) -> float | Tensor:
    """lr may be a tensor of one element, of any shape, which schedulers then change in place."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InvalidValue(f"lr as a tensor must have one element, got shape {tuple(value.shape)}.")
        number("lr", value.item(), 0, math.inf)
        return value
    return number("lr", value, 0, math.inf)


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number; a float that is one (1e4) is taken as such."""
    if not _is_real(value):
        raise InvalidType(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}.")
    if not math.isfinite(value) or value != int(value) or value < low or (high is not None and value > high):
        upto = "" if high is None else f" and at most {high}"
        raise InvalidValue(f"{name} must be a whole number of at least {low}{upto}, got {value!r}.")
    return int(value)


def _is_real(value: Any) -> bool:
    """Whether it is a number; True and False are none here."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def seed(value: Any) -> int:
    return whole("seed", value, 0, 2**63 - 1)


def option(name: str, value: Any, allowed: Iterable[str]) -> str:
    names = list(allowed)
    if value not in names:
        raise InvalidValue(f"{name} must be one of {', '.join(map(repr, names))}, got {value!r}.")
    return str(value)


def known_options(group: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Refuses a misspelt option of a parameter group, which would otherwise be ignored in silence."""
    allowed = set(allowed)
    refuse_unknown(group.keys() - allowed - _FOREIGN, allowed)


def parameter(name: str, value: Any) -> Tensor:
    """A tensor that can have a mean and a variance."""
    if not isinstance(value, Tensor):
        raise InvalidType(f"{name} must be a tensor, got {type(value).__name__}.")
    refuse_distributed(name, value)
    wrong = "sparse" if value.layout is not torch.strided else "on the meta device" if value.is_meta else None
    if not value.is_floating_point():
        wrong = f"of dtype {value.dtype}"
    if wrong:
        raise InvalidType(
            f"{name} is {wrong}; a posterior needs real floating-point numbers in memory. Freeze it "
            "(requires_grad_(False)) and leave it out, or convert it."
        )
    return value


def groups_of_ranks(mc_groups: object) -> int | None:
    """G, which must divide the ranks; None: each rank reads a share of its own."""
    if mc_groups is None:
        return None
    size, groups = world().size, whole("mc_groups", mc_groups, 1)
    if size % groups:
        raise InvalidValue(f"mc_groups must divide the {size} ranks, got {mc_groups!r}.")
    return groups


def start(curvature: float | None, precision: float | None) -> None:
    """Where a curvature starts: at a number of its own, or where 1/σ² is one."""
    if curvature is not None:
        number("initial_curvature", curvature, 0, math.inf, open_low=True)
    if precision is not None:
        number("initial_precision", precision, 0, math.inf, open_low=True)
    if curvature is not None and precision is not None:
        raise InvalidValue(
            f"initial_curvature={curvature} and initial_precision={precision} exclude each other. Choose one."
        )
