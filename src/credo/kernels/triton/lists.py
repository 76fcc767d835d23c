"""Samples, updates and the check for finite numbers, a list of tensors in one launch.

Each function stands in front of the one in plain torch of the same name and arguments (`credo.kernels.accelerator`).
It answers NotImplemented where the tensors are not for it; nothing has changed then.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from credo.kernels.tensors import Row, each, is_number
from credo.kernels.triton.launching import launch
from credo.kernels.triton.tables import ListTable, on_device, table


def sample(
    weights: Row,
    means: Row,
    curvatures: Row,
    scales: Sequence[float],
    shifts: Sequence[float] | Row,
    seed: int,
    stream: int,
    indices: Sequence[int],
    offsets: Row | None = None,
) -> Any:
    """weight ← mean (+ offset) + ε·√(scale / (curvature + shift)), ε the numbers of the CPU."""
    one = is_number(shifts)
    rows = weights, means, curvatures, None if one else shifts, offsets
    found = table(rows, indices)  # type: ignore[arg-type]
    if found is None:
        return NotImplemented
    numbers = _numbers(found, scales, shifts if one else 0.0)
    flags = {"SHIFTS": not one, "MOVED": offsets is not None}
    arguments = found.place, numbers, *key(seed, stream), found.length
    if not launch("lists.sample", (found.programs,), *arguments, **flags, **found.constants):
        return NotImplemented
    return increment_version(list(weights))


def perturb(mean: Tensor, variance: Tensor, seed: int, stream: int, index: int, tiny: float) -> Any:
    """mean ← mean + √(variance + tiny)·ε and variance ← ε / 2√(variance + tiny)."""
    found = table([[mean], [variance]], [index])
    if found is None:
        return NotImplemented
    arguments = found.place, _numbers(found, tiny), *key(seed, stream), found.length
    if not launch("lists.perturb", (found.programs,), *arguments, **found.constants):
        return NotImplemented
    return increment_version([mean, variance])


def all_finite(tensors: Row) -> Any:
    """A flag on the device: whether no element is infinite or NaN. Tensors of several types are as many launches."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    tables = [table([row]) for row in kinds.values()]
    if not all(tables):
        return NotImplemented
    flag = tensors[0].new_ones((), dtype=torch.bool)
    for found in tables:
        assert found is not None
        arguments = found.place, flag.view(torch.int8), found.length
        if not launch("lists.all_finite", (found.programs,), *arguments, **found.constants):
            return NotImplemented
    return flag


def vogn(
    means: Row,
    momenta: Row,
    curvatures: Row,
    gradients: Row,
    squares: Row,
    priors: Any,  # a number for all, one for each, or a tensor for each
    prior_means: Row | None,
    numbers: Any,  # VOGNNumbers
    offsets: Row | None,
    places: Row | None,  # where the means are, if not in `means`
    flag: Tensor | None,  # where it is False the means are put back, and nothing else changes
) -> Any:
    """VOGN's update."""
    one = is_number(priors)
    rows = (
        means,
        momenta,
        curvatures,
        gradients,
        squares,
        None if one else priors,
        prior_means,
        places,
        offsets,
    )
    found = table(rows)
    if found is None:
        return NotImplemented
    lr, beta1, beta2, damping, gradient, square, weight = numbers
    own = _numbers(found, lr, beta1, beta2, damping, gradient, square, priors if one else 0.0, weight)
    flags = {"AWAY": places is not None, "AVERAGES": offsets is not None}
    return _update(
        "lists.vogn", found, own, flag, flags, rows, [*means, *momenta, *curvatures, *(offsets or ())]
    )


def ivon(
    means: Row,
    momenta: Row,
    curvatures: Row,
    gradients: Row,
    products: Row,
    priors: Any,
    prior_means: Row | None,
    numbers: Any,  # IVONNumbers
    offsets: Row | None,
    flag: Tensor | None,  # where it is False nothing changes
    weight: float = 1.0,  # of the iterate in the mean, with offsets
) -> Any:
    """IVON's update; with offsets that of the iterates."""
    one = is_number(priors)
    rows = (
        means,
        momenta,
        curvatures,
        gradients,
        products,
        None if one else priors,
        prior_means,
        None,
        offsets,
    )
    found = table(rows)
    if found is None:
        return NotImplemented
    own = _numbers(found, *numbers, priors if one else 0.0, weight)
    flags = {"AVERAGES": offsets is not None}
    return _update(
        "lists.ivon", found, own, flag, flags, rows, [*means, *momenta, *curvatures, *(offsets or ())]
    )


def restore(weights: Row, means: Row, products: Row, gradients: Row, add: bool) -> Any:
    """product ← (product +) gradient·(weight − mean), weight ← mean."""
    found = table([weights, means, products, gradients])
    if found is None:
        return NotImplemented
    arguments = found.place, found.length
    if not launch("lists.restore", (found.programs,), *arguments, ADD=add, **found.constants):
        return NotImplemented
    return increment_version([*weights, *products])


def _update(
    name: str,
    found: ListTable,
    numbers: Tensor,
    flag: Tensor | None,
    flags: dict[str, bool],
    rows: Sequence[Row | None],
    changed: list[Tensor],
) -> Any:
    own = found.place if flag is None else flag.view(torch.int8)
    flags = {
        **flags,
        "CHECKED": flag is not None,
        "PRIORS": rows[5] is not None,
        "PRIOR_MEANS": rows[6] is not None,
    }
    if not launch(
        name, (found.programs,), found.place, numbers, own, found.length, **flags, **found.constants
    ):
        return NotImplemented
    return increment_version(changed)


def key(seed: int, stream: int) -> tuple[int, int, int, int]:
    """The halves of both, as signed numbers: others would be of another type, and another program."""
    halves = seed & 0xFFFFFFFF, seed >> 32, stream & 0xFFFFFFFF, stream >> 32
    low, high, first, second = (half - (half >> 31 << 32) for half in halves)
    return low, high, first, second


def _numbers(found: ListTable, *columns: Any) -> Tensor:
    """A row of numbers for each tensor."""
    rows = zip(*[each(column, found.length) for column in columns], strict=True)
    return on_device(tuple(chain.from_iterable(rows)), found.place.device, torch.float64)
