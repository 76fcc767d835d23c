"""VOGN's update in one pass over the parameters, and the check that comes before it."""

from collections.abc import Iterator, Sequence
from ctypes import byref, c_int64
from math import isfinite
from struct import pack
from typing import NamedTuple, cast, final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from credo.kernels import lists
from credo.kernels.lists import Kept, Numbers, Row, Steady
from credo.kernels.standing import Standing

# Elements that each thread of the twin updates at a time: three rows of them fit the L2 cache.
TOGETHER = 1 << 17
FEW = 1 << 18  # elements that are not worth cutting
ELSEWHERE = 1 << 22  # on an accelerator, which likes few large calls


class Settings(NamedTuple):
    """The numbers of one update; those that may be one for each tensor are `Numbers`."""

    lr: Numbers  # α
    beta1: float  # β₁
    beta2: float  # β₂, the weight of the new curvature
    damping: Numbers  # γ
    gradient_scale: float  # ĝ = gradient_scale · gradient
    squares_scale: float  # ĥ = squares_scale · squares
    weight: float = 1.0  # w, of the new iterate in the mean, where that is an average


def vogn_(
    mean: Tensor,  # μ
    momentum: Tensor,  # m
    curvature: Tensor,  # s
    gradient: Tensor,
    squares: Tensor,
    *,
    prior: float | Tensor,  # δ̃
    prior_mean: Tensor | None,  # μ₀, zero when None
    lr: float,
    beta1: float,
    beta2: float,
    damping: float,
    gradient_scale: float,
    squares_scale: float,
) -> None:
    """m ← β₁m + ĝ + δ̃(μ−μ₀),  s ← (1−β₂)s + β₂ĥ,  μ ← μ − α·m / (s+δ̃+γ)."""
    settings = Settings(lr, beta1, beta2, damping, gradient_scale, squares_scale)
    priors = [prior] if isinstance(prior, Tensor) else prior
    rows = [mean], [momentum], [curvature], [gradient], [squares]
    vogn_all_(*rows, priors, None if prior_mean is None else [prior_mean], settings)


def vogn_all_(
    means: Row,
    momenta: Row,
    curvatures: Row,
    gradients: Row,
    squares: Row,
    prior: Numbers | Row,
    prior_means: Row | None,
    settings: Settings,
    origins: Kept | None = None,
    check: bool = False,
    offsets: Row | None = None,
) -> bool:
    """`vogn_` for many tensors in one call; `prior` is one number for all, one for each, or a tensor for each.

    `origins`: where the means are before the update, unless they are in `means`; after it they are not there any more.
    With `check` nothing changes unless all gradients and squares are finite, which is what is returned.
    With `offsets` z − μ the update moves the iterates z, and μ ← μ + w(z − μ).
    """
    number, priors = (prior, None) if lists.is_number(prior) else (0.0, cast("Row", prior))
    rows = [means, momenta, curvatures, gradients, squares]
    places = None if origins is None else origins.places
    if call := lists.call("vogn", *rows, priors, prior_means, places, offsets):
        changed = [*means, *momenta, *curvatures, *(offsets or ())]
        return _run(call, settings, number, check, origins, changed, len(means))
    with torch.no_grad():
        if check and not _pairs_finite_twin(gradients, squares):
            return False
        optional = [row for row in (places, offsets, priors, prior_means) if row is not None]
        for tensors, (mu, m, s, gradient, square, *others) in _cut([*rows, *optional]):
            if places is not None:
                torch._foreach_copy_(mu, others.pop(0))
            own_offsets = None if offsets is None else others.pop(0)
            own_prior = _chosen(number, tensors) if priors is None else others[0]
            own_means = None if prior_means is None else others[-1]
            own = settings._replace(
                lr=_chosen(settings.lr, tensors), damping=_chosen(settings.damping, tensors)
            )
            _vogn_twin(mu, m, s, gradient, square, own_prior, own_means, own, own_offsets)
    if origins is not None:
        origins.done.value = 0
    return True


@final
class Updater:
    """`vogn_all_` for means, momenta and curvatures that stay where they are."""

    def __init__(
        self,
        means: Steady,
        momenta: Steady,
        curvatures: Steady,
        rooms: Steady | None,
        offsets: Steady | None = None,
    ):
        self._rows, self._offsets = (means, momenta, curvatures), offsets
        self._changed = [*means, *momenta, *curvatures, *(offsets or ())]
        self._standing = Standing("vogn", self._rows, (None, None, rooms, offsets))

    def __call__(
        self,
        gradients: Row,
        squares: Row,
        prior: Numbers,
        settings: Settings,
        origins: Kept | None = None,
        check: bool = False,
    ) -> bool:
        """`origins` is about the rooms."""
        if call := self._standing.call(gradients, squares):
            return _run(call, settings, prior, check, origins, self._changed, len(self._rows[0]))
        return vogn_all_(
            *self._rows, gradients, squares, prior, None, settings, origins, check, self._offsets
        )


def _run(
    call: lists.Call,
    settings: Settings,
    prior: Numbers,
    check: bool,
    origins: Kept | None,
    changed: list[Tensor],
    count: int,
) -> bool:
    """The kernel notes itself that the means are at home: an interrupt may come before the caller can."""
    function, addresses, sizes, length = call
    numbers, threads = _packed(settings, prior, count), c_int64(torch.get_num_threads())
    away = None if origins is None else byref(origins.done)
    done = function(addresses, sizes, length, numbers, threads, c_int64(check), away)
    if done:
        increment_version(changed)
    return bool(done)


def _packed(settings: Settings, prior: Numbers, count: int) -> bytes:
    """The numbers of each tensor, as the kernel wants them."""
    lr, beta1, beta2, damping, gradient, squares, weight = settings
    if isinstance(lr, float) and isinstance(damping, float) and isinstance(prior, float):
        return pack("8d", lr, beta1, beta2, damping, gradient, squares, prior, weight) * count
    each = zip(lists.each(lr, count), lists.each(damping, count), lists.each(prior, count), strict=True)
    return b"".join([pack("8d", a, beta1, beta2, g, gradient, squares, p, weight) for a, g, p in each])


def _chosen(numbers: Numbers, tensors: Sequence[int]) -> Numbers:
    """Those of some tensors."""
    return numbers if isinstance(numbers, float | int) else [numbers[k] for k in tensors]


def _vogn_twin(
    means: list[Tensor],
    momenta: list[Tensor],
    curvatures: list[Tensor],
    gradients: list[Tensor],
    squares: list[Tensor],
    prior: Numbers | list[Tensor],
    prior_means: list[Tensor] | None,
    settings: Settings,
    offsets: list[Tensor] | None,
) -> None:
    torch._foreach_mul_(momenta, settings.beta1)
    torch._foreach_add_(momenta, gradients, alpha=settings.gradient_scale)
    torch._foreach_mul_(curvatures, 1 - settings.beta2)
    torch._foreach_add_(curvatures, squares, alpha=settings.beta2 * settings.squares_scale)
    iterates = means if offsets is None else list(torch._foreach_add(means, offsets))
    away = iterates if prior_means is None else torch._foreach_sub(iterates, prior_means)
    count = len(means)
    if not lists.is_number(prior):
        tensors = cast("list[Tensor]", prior)
        torch._foreach_addcmul_(momenta, tensors, away)
        precisions = torch._foreach_add(curvatures, tensors)
        torch._foreach_add_(precisions, list(lists.each(settings.damping, count)))
    else:
        priors = lists.each(prior, count)
        torch._foreach_add_(momenta, torch._foreach_mul(away, list(priors)))
        shifts = [p + g for p, g in zip(priors, lists.each(settings.damping, count), strict=True)]
        precisions = torch._foreach_add(curvatures, shifts)
    torch._foreach_addcdiv_(iterates, momenta, precisions, [-a for a in lists.each(settings.lr, count)])
    if offsets is not None:
        torch._foreach_copy_(offsets, torch._foreach_sub(iterates, means))
        steps = torch._foreach_mul(offsets, settings.weight)
        torch._foreach_sub_(offsets, steps)
        torch._foreach_add_(means, steps)


def _cut(rows: Sequence[Row]) -> Iterator[tuple[Sequence[int], list[list[Tensor]]]]:
    """All rows, some elements at a time; whole tensors where there are few, or they lie in different orders.

    With them, which tensors the pieces are of.
    """
    sizes = [tensor.numel() for tensor in rows[0]]
    if sum(sizes) <= FEW:
        yield range(len(sizes)), [list(row) for row in rows]
    elif not lists.aligned(*rows):
        for k, tensors in enumerate(zip(*rows, strict=True)):
            yield (k,), [[tensor] for tensor in tensors]
    else:
        on_cpu = all(tensor.is_cpu for tensor in rows[0])
        together = TOGETHER * torch.get_num_threads() if on_cpu else ELSEWHERE
        flats = [lists.flats(row) for row in rows]
        for pieces in lists.blocks(sizes, together, together):
            yield [piece.tensor for piece in pieces], [lists.cut(row, pieces) for row in flats]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is infinite or NaN: one pass, no copy, at most one wait for the device."""
    if call := lists.call("all_finite", tensors):
        return bool(call.kernel(*call[1:], c_int64(torch.get_num_threads())))
    with torch.no_grad():
        return _all_finite_twin(tensors)


def _pairs_finite_twin(ones: Row, others: Row) -> bool:
    """`all_finite` for two rows: what is not finite makes the product with anything, zero too, infinite or NaN."""
    same = all(one.is_cpu and one.dtype is other.dtype for one, other in zip(ones, others, strict=True))
    if same and lists.aligned(ones) and lists.aligned(others):
        products = map(torch.dot, lists.flats(ones), lists.flats(others))
        if isfinite(sum([own.item() for own in products])):
            return True
    return _all_finite_twin([*ones, *others])


def _all_finite_twin(tensors: Sequence[Tensor]) -> bool:
    # A sum is finite only if all elements are. Large finite ones may overflow: then look at each.
    sums = [tensor.sum() for tensor in tensors]
    if all(own.is_cpu for own in sums):
        finite = isfinite(sum([own.item() for own in sums]))
    else:
        finite = bool(torch.stack([own.double() for own in sums]).isfinite().all())
    return finite or all(bool(tensor.isfinite().all()) for tensor in tensors)
