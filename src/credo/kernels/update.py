"""The updates of VOGN and IVON in one pass over the parameters, and the check that comes before them.

A kernel computes what a function of plain tensors says, the `reference` that the algorithm hands to it. Where there is
no kernel the reference itself runs, tensor by tensor and of long ones a stretch at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int64
from itertools import chain
from math import isfinite
from struct import pack
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from credo.kernels import accelerator
from credo.kernels.flags import Flags
from credo.kernels.tensors import (
    Backup,
    MeanBackup,
    Numbers,
    Row,
    TensorList,
    aligned,
    by_device,
    call,
    each,
    flat,
    is_number,
    is_on_cpu,
    require_same_sizes,
)

TOGETHER = 1 << 17  # elements that the reference takes at a time: three such rows fit the L2 cache

# New values of the tensors that are changed, in order, from all tensors and numbers; None for one that is not there.
Reference: TypeAlias = Callable[..., tuple[Tensor | None, ...]]


class VOGNNumbers(NamedTuple):
    """The numbers of one update; those that may be one for each tensor are `Numbers`."""

    lr: Numbers  # α
    beta1: float  # β₁
    beta2: float  # β₂, the weight of the new curvature
    damping: Numbers  # γ
    gradient_scale: float  # ĝ = gradient_scale · gradient
    squares_scale: float  # ĥ = squares_scale · squares
    weight: float = 1.0  # w, of the new iterate in the mean, where that is an average


class IVONNumbers(NamedTuple):
    """The numbers of one update; those that may be one for each tensor are `Numbers`."""

    lr: Numbers  # α
    beta1: float  # b₁, the weight of the old momentum
    beta2: float  # b₂, the weight of the old curvature
    correction: float  # 1/(1 − b₁ᵗ)
    radius: float  # of the clipped step; infinite without
    gradient_unit: float  # ĝ = gradient_unit · gradient
    product_unit: Numbers  # ĥ = product_unit · product · (h + δ̃)


@torch.no_grad()
def vogn_(
    reference: Reference,
    means: Row,  # μ
    momenta: Row,  # m
    curvatures: Row,  # s
    gradients: Row,
    squares: Row,
    prior: Numbers | Row,  # δ̃: one number for all, one for each, or a tensor for each
    prior_means: Row | None,  # μ₀, zero when None
    numbers: VOGNNumbers,
    offsets: Row | None = None,  # z − μ: the update moves the iterates z, and μ ← μ + w(z − μ)
    backup: Backup | MeanBackup | None = None,  # where means may be before the update, and then no more
    check: bool = False,  # nothing changes unless all gradients and squares are finite, which is what is returned
    flags: Flags | None = None,  # on accelerators: whether anything changes, which the host does not know
) -> bool:
    """VOGN's update of many tensors, in place."""
    one = isinstance(prior, float | int) or (len(prior) > 0 and not isinstance(prior[0], Tensor))
    number, priors = cast("Numbers", prior if one else 0.0), cast("Row | None", None if one else prior)
    rows = (means, momenta, curvatures, gradients, squares)
    packed, threads = _packed(numbers, number, len(means)), _threads()
    keeper = backup if isinstance(backup, MeanBackup) else None
    if isinstance(backup, MeanBackup):
        assert isinstance(means, TensorList)
        backup = backup.taken(means)
    places = None if backup is None else backup.places
    if found := call("vogn", *rows, priors, prior_means, places, offsets):
        # The kernel notes itself that the means are back: an interrupt may come before the caller can.
        done = None if backup is None else byref(backup.done)
        if not found.kernel(*found[1:], packed, threads, c_int64(check), done):
            return False
        increment_version([*means, *momenta, *curvatures, *(offsets or ())])
        if keeper is not None:
            keeper.forget(backup)
        return True
    require_same_sizes(*[row for row in (*rows, places, offsets, priors, prior_means) if row is not None])
    if check and not all_finite([*gradients, *squares]):
        return False
    if places is not None and all(map(is_on_cpu, means)):
        torch._foreach_copy_([mean.detach() for mean in means], list(places))
        places = None
    all_rows = (*rows, number if priors is None else priors, prior_means, offsets, places)
    for at in by_device(means):
        own = _of(all_rows, at)
        own_numbers = numbers._replace(lr=_pick(numbers.lr, at), damping=_pick(numbers.damping, at))
        if means[at[0]].is_cpu:
            _vogn_reference(reference, own, own_numbers)
        else:
            flag = None if flags is None else flags.on(means[at[0]].device)
            accelerator.run("vogn", *own[:7], own_numbers, *own[7:], flag)
    if backup is not None:
        backup.done.value = 0
    if keeper is not None:
        keeper.forget(backup)
    return True


@torch.no_grad()
def ivon_(
    reference: Reference,
    means: Row,  # μ
    momenta: Row,  # m
    curvatures: Row,  # h
    gradients: Row,
    products: Row,  # Σ gradient·(w − μ)
    prior: Numbers | Row,  # δ̃: one number for all, one for each, or a tensor for each
    prior_means: Row | None,  # μ₀, zero when None
    numbers: IVONNumbers,
    offsets: Row | None = None,  # z − μ: the update moves the iterates z, and μ ← μ + w(z − μ)
    weight: float = 1.0,  # w
    flags: Flags | None = None,  # on accelerators: whether anything changes
) -> None:
    """IVON's update of many tensors, in place."""
    if not means:
        return
    rows = (means, momenta, curvatures, gradients, products, prior, prior_means, offsets)
    if not all(map(is_on_cpu, means)):
        for at in by_device(means):
            own = _of(rows, at)
            some = numbers._replace(lr=_pick(numbers.lr, at), product_unit=_pick(numbers.product_unit, at))
            if means[at[0]].is_cpu:
                m, n, c, g, h, shrinkage, prior_mean, z = own
                ivon_(reference, m, n, c, g, h, shrinkage, prior_mean, some, z, weight)
            else:
                flag = None if flags is None else flags.on(means[at[0]].device)
                accelerator.run("ivon", *own[:7], some, own[7], flag, weight)
        return
    if offsets is None:
        _ivon_on_the_cpu(reference, *rows[:7], numbers)
        return
    iterates = list(torch._foreach_add(list(means), list(offsets)))
    _ivon_on_the_cpu(reference, iterates, *rows[1:7], numbers)
    for mean, offset, iterate in zip(means, offsets, iterates, strict=True):
        torch.sub(iterate, mean, out=offset)
        step = weight * offset
        mean.add_(step)
        offset.sub_(step)


def _ivon_on_the_cpu(
    reference: Reference,
    means: Row,
    momenta: Row,
    curvatures: Row,
    gradients: Row,
    products: Row,
    prior: Numbers | Row,
    prior_means: Row | None,
    numbers: IVONNumbers,
) -> None:
    number, priors = (prior, None) if is_number(prior) else (0.0, cast("Row", prior))
    of_each = list(zip(*[each(own, len(means)) for own in (*numbers, number)], strict=True))
    if found := call("ivon", means, momenta, curvatures, gradients, products, priors, prior_means):
        found.kernel(*found[1:], b"".join([pack("8d", *own) for own in of_each]), _threads())
        increment_version([*means, *momenta, *curvatures])
        return
    own_rows = (means, momenta, curvatures, gradients, products, priors, prior_means)
    require_same_sizes(*[row for row in own_rows if row is not None])
    for k, own in enumerate(of_each):
        shrinkage, one = own[-1], IVONNumbers(*own[:-1])
        for mean, m, h, gradient, product, shrunk, prior_mean in _stretches(own_rows, k):
            new = reference(
                *(mean, m, h, _present(gradient) * one.gradient_unit),
                _present(product) * float(cast("float", one.product_unit)),
                lr=one.lr,
                beta1=one.beta1,
                beta2=one.beta2,
                correction=one.correction,
                radius=one.radius,
                prior=shrinkage if shrunk is None else shrunk,
                prior_mean=prior_mean,
            )
            _take((mean, m, h), new)


@torch.no_grad()
def restore_(weights: Row, means: Row, products: Row, gradients: Row, add: bool) -> None:
    """product ← (product +) gradient·(weight − mean), then weight ← mean."""
    if not weights:
        return
    rows = weights, means, products, gradients
    if not all(map(is_on_cpu, weights)):
        for at in by_device(weights):
            some = _of(rows, at)
            if weights[at[0]].is_cpu:
                restore_(some[0], some[1], some[2], some[3], add)
            else:
                accelerator.run("restore", *some, add)
        return
    if found := call("restore", *rows):
        found.kernel(*found[1:], c_int64(add), _threads())
        increment_version([*weights, *products])
        return
    for weight, mean, product, gradient in zip(*rows, strict=True):
        own = gradient.to(product.dtype) * (weight.to(product.dtype) - mean)
        product.add_(own) if add else product.copy_(own)
        weight.copy_(mean)


@torch.no_grad()
def follow_squares_(
    curvatures: Row, gradients: Row, unit: float, shares: Sequence[float], weight: float
) -> None:
    """curvature ← (1 − w)·curvature + w·(unit·gradient² + share), of many tensors on accelerators."""
    for at in by_device(curvatures):
        own, squares = [curvatures[k] for k in at], [gradients[k].to(curvatures[k].dtype) for k in at]
        squares = list(torch._foreach_mul(squares, squares))
        torch._foreach_mul_(squares, unit)
        torch._foreach_add_(squares, [shares[k] for k in at])
        torch._foreach_lerp_(own, squares, weight)


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is infinite or NaN: one pass, no copy, at most one wait for the device."""
    if found := call("all_finite", tensors):
        return bool(found.kernel(*found[1:], _threads()))
    here = [tensor for tensor in tensors if tensor.is_cpu]
    if len(here) < len(tensors) and not bool(Flags([t for t in tensors if not t.is_cpu]).first):
        return False
    # A sum is finite only if all elements are. Large finite ones may overflow: then look at each.
    finite = isfinite(sum([tensor.sum().item() for tensor in here]))
    return finite or all(bool(tensor.isfinite().all()) for tensor in here)


def _vogn_reference(reference: Reference, rows: Sequence[Any], numbers: VOGNNumbers) -> None:
    """On the CPU, tensor by tensor."""
    means, momenta, curvatures, gradients, squares, prior, prior_means, offsets, places = rows
    if places is not None:
        torch._foreach_copy_([mean.detach() for mean in means], list(places))
    number, priors = (prior, None) if is_number(prior) else (0.0, prior)
    each_number = zip(*[each(own, len(means)) for own in (numbers.lr, numbers.damping, number)], strict=True)
    for k, (lr, damping, shrinkage) in enumerate(each_number):
        own = [means, momenta, curvatures, offsets, gradients, squares, priors, prior_means]
        for mean, m, s, offset, gradient, square, shrunk, prior_mean in _stretches(own, k):
            new = reference(
                *(mean, m, s, _present(gradient) * numbers.gradient_scale),
                _present(square) * numbers.squares_scale,
                offset,
                lr=lr,
                beta1=numbers.beta1,
                beta2=numbers.beta2,
                prior=shrinkage if shrunk is None else shrunk,
                prior_mean=prior_mean,
                damping=damping,
                weight=numbers.weight,
            )
            _take((mean, m, s, offset), new)


def _of(rows: Sequence[Any], at: Sequence[int]) -> list[Any]:
    """Tensors and numbers of the parameters at these places; what there is not, and one number for all, as it is."""
    return [_pick(row, at) for row in rows]


def _pick(row: Any, at: Sequence[int]) -> Any:
    if row is None or isinstance(row, float | int) or len(at) == len(row):
        return row
    return [row[k] for k in at]


def _packed(numbers: VOGNNumbers, prior: Numbers, count: int) -> bytes:
    """The numbers of each tensor, as the kernel wants them."""
    lr, beta1, beta2, damping, gradient, squares, weight = numbers
    if isinstance(lr, float) and isinstance(damping, float) and isinstance(prior, float):
        return pack("8d", lr, beta1, beta2, damping, gradient, squares, prior, weight) * count
    columns = (lr, beta1, beta2, damping, gradient, squares, prior, weight)
    own = zip(*[[c] * count if isinstance(c, float | int) else c for c in columns], strict=True)
    return pack(f"{8 * count}d", *chain.from_iterable(own))


def _stretches(rows: Sequence[Row | None], k: int) -> Iterator[list[Tensor]]:
    """Tensor k of each row; of long ones a stretch at a time, if the elements lie in the same order in all of them.

    What stands for a row that is None is None.
    """
    tensors = [None if row is None else row[k].detach() for row in rows]
    there = [tensor for tensor in tensors if tensor is not None]
    if there[0].numel() <= TOGETHER or not aligned(*[[tensor] for tensor in there]):
        yield cast("list[Tensor]", tensors)
        return
    flats = [None if tensor is None else flat(tensor) for tensor in tensors]
    for begin in range(0, there[0].numel(), TOGETHER):
        yield cast("list[Tensor]", [None if t is None else t[begin : begin + TOGETHER] for t in flats])


def _present(tensor: Tensor) -> Tensor:
    """A gradient in half precision would lose digits when it is multiplied by its unit."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _take(tensors: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> None:
    for tensor, own in zip(tensors, new, strict=True):
        if tensor is not None and own is not None:
            tensor.copy_(own)


def _threads() -> c_int64:
    return c_int64(torch.get_num_threads())
