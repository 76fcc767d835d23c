"""Updates and their checks on an accelerator, in plain torch: a number of launches that does not grow with the layers.

A step that is refused must leave every bit as it was, and the host need not wait to know that it is: the new values are
computed beside the old ones, and a flag on the device says which of both are kept (`torch.where`, since NaN·0 is NaN).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.kernels.accelerator import plain, scratch_bytes
from credo.kernels.tensors import Row, aligned, each, flat, is_number

SMALLEST_BLOCK = 1 << 16  # elements: less at a time would be all overhead, whatever the budget


@plain
def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """A flag on the device of the first: whether no element of tensors on it is infinite or NaN."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault(tensor.dtype, []).append(tensor)
    norms = [norm for row in alike.values() for norm in torch._foreach_norm(row, math.inf)]
    if not norms:
        return tensors[0].new_ones((), dtype=torch.bool)
    wide = {norm.dtype for norm in norms}
    largest = torch.stack(norms if len(wide) == 1 else [norm.float() for norm in norms]).amax()
    return largest < math.inf  # NaN is not, and amax hands it on


@plain
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
    flag: Tensor | None,  # nothing changes where it is False; the means are put back then too
    budget: int | None = None,
) -> None:
    """`optim.vogn.averaged_update` of tensors on one device, in place."""
    count = len(means)
    lrs, dampings = each(numbers.lr, count), each(numbers.damping, count)
    sources = [places or means, momenta, curvatures, *([offsets] if offsets is not None else [])]
    targets = [means, momenta, curvatures, *([offsets] if offsets is not None else [])]
    tensors = [] if is_number(priors) else [priors]
    given = [gradients, squares, *tensors, *([prior_means] if prior_means is not None else [])]
    shrinkages = each(priors, count) if is_number(priors) else None
    for block in _blocks([*targets, *sources, *given], 2 * len(targets) + 3, budget):
        taken, n = block.take, len(targets)
        rows = _Rows(taken(n, 2 * n), curvatures[0].dtype)
        gradient, square, *rest = taken(2 * n, None)
        prior_mean = rest.pop() if prior_means is not None else None
        mean, momentum, curvature = rows.begin(numbers.beta1, 1 - numbers.beta2)
        torch._foreach_add_(momentum, gradient, alpha=numbers.gradient_scale)
        away = mean if prior_mean is None else list(torch._foreach_sub(mean, prior_mean))
        own_lr = [-lrs[k] for k in block.tensors]
        if shrinkages is not None:
            own = [shrinkages[k] for k in block.tensors]
            if any(own):
                torch._foreach_add_(momentum, torch._foreach_mul(away, own))
        else:
            torch._foreach_addcmul_(momentum, away, rest[0])
        torch._foreach_add_(curvature, square, alpha=numbers.beta2 * numbers.squares_scale)
        if shrinkages is not None:
            total = torch._foreach_add(curvature, [shrinkages[k] + dampings[k] for k in block.tensors])
        else:
            total = torch._foreach_add(curvature, rest[0])
            torch._foreach_add_(total, [dampings[k] for k in block.tensors])
        torch._foreach_addcdiv_(mean, momentum, total, own_lr)
        del total, away
        rows.end(taken(0, n), flag, numbers.weight)
        del rows, mean, momentum, curvature  # before the next ones are made


@plain
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
    flag: Tensor | None,
    weight: float = 1.0,  # w of the iterate in the mean, with offsets
    budget: int | None = None,
) -> None:
    """`optim.ivon.ivon_update` of tensors on one device, in place; with offsets that of their iterates."""
    count = len(means)
    lrs, units = each(numbers.lr, count), each(numbers.product_unit, count)
    targets = [means, momenta, curvatures, *([offsets] if offsets is not None else [])]
    tensors = [] if is_number(priors) else [priors]
    given = [gradients, products, *tensors, *([prior_means] if prior_means is not None else [])]
    shrinkages = each(priors, count) if is_number(priors) else None
    for block in _blocks([*targets, *given], 2 * len(targets) + 6, budget):
        taken, n = block.take, len(targets)
        rows = _Rows(taken(0, n), curvatures[0].dtype)
        gradient, product, *rest = taken(n, None)
        prior_mean = rest.pop() if prior_means is not None else None
        prior: Any = rest[0] if shrinkages is None else [shrinkages[k] for k in block.tensors]
        mean, momentum, curvature = rows.begin(numbers.beta1, 1.0)
        away = mean if prior_mean is None else list(torch._foreach_sub(mean, prior_mean))
        if numbers.beta2 < 1:
            total = _Room(curvature, torch._foreach_add, prior)
            d = _Room(product, torch._foreach_mul, [units[k] for k in block.tensors])
            d.row.mul_(total.row).sub_(rows.new[2]).mul_(1 - numbers.beta2)
            rows.new[2].add_(d.row).add_(d.row.square_().div_(total.row), alpha=0.5).clamp_(max=1e30)
            del total, d
        torch._foreach_add_(momentum, gradient, alpha=(1 - numbers.beta1) * numbers.gradient_unit)
        step = _Room(away, torch._foreach_mul, prior)
        step.row.add_(rows.new[1], alpha=numbers.correction)
        total = _Room(curvature, torch._foreach_add, prior)
        step.row.div_(total.row)
        if math.isfinite(numbers.radius):
            step.row.clamp_(-numbers.radius, numbers.radius)
        torch._foreach_mul_(step.views, [-lrs[k] for k in block.tensors])
        rows.iterate.add_(step.row)
        rows.end(taken(0, n), flag, weight)
        del rows, mean, momentum, curvature, step, total


@plain
def restore(weights: Row, means: Row, products: Row, gradients: Row, add: bool) -> None:
    """product ← (product +) gradient·(weight − mean), then weight ← mean, of tensors on one device."""
    weights, moved = [weight.detach() for weight in weights], list(products)
    away = torch._foreach_sub(weights, list(means))
    if add:
        torch._foreach_addcmul_(moved, away, list(gradients))
    else:
        torch._foreach_copy_(moved, away)
        torch._foreach_mul_(moved, list(gradients))
    torch._foreach_copy_(weights, list(means))


class _Room:
    """What an operation makes of a list of tensors, in one row of memory that can be worked on as a whole."""

    def __init__(self, tensors: Sequence[Tensor], operation: Any, *arguments: Any):
        self.row = torch.cat([own.reshape(-1) for own in operation(list(tensors), *arguments)])
        self.views = _split(self.row, tensors)


class _Rows:
    """Old and new values of μ, m, s and maybe z − μ of some tensors: each is one row, cut into views of its tensors."""

    def __init__(self, sources: Sequence[Sequence[Tensor]], dtype: torch.dtype):
        size = sum(tensor.numel() for tensor in sources[0])
        self.old = sources[0][0].new_empty((len(sources), size), dtype=dtype)
        old = [view for row, tensors in zip(self.old, sources, strict=True) for view in _split(row, tensors)]
        torch._foreach_copy_(old, [tensor for row in sources for tensor in row])
        self.new = torch.empty_like(self.old)
        self.views = [_split(row, tensors) for row, tensors in zip(self.new, sources, strict=True)]

    def begin(
        self, of_momentum: float, of_curvature: float
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The iterate z, or μ, and the shares of m and s that stay, for the update to work on."""
        if self.averaged:
            torch.add(self.old[0], self.old[3], out=self.new[3])
        else:
            self.new[0].copy_(self.old[0])
        torch.mul(self.old[1], of_momentum, out=self.new[1])
        torch.mul(self.old[2], of_curvature, out=self.new[2])
        return self.views[3 if self.averaged else 0], self.views[1], self.views[2]

    @property
    def averaged(self) -> bool:
        return len(self.new) == 4

    @property
    def iterate(self) -> Tensor:
        return self.new[3 if self.averaged else 0]

    def end(self, targets: Sequence[Sequence[Tensor]], flag: Tensor | None, weight: float) -> None:
        """The new values where the flag is True, or there is none; else the old ones. The mean follows its iterate."""
        if self.averaged:
            torch.lerp(self.old[0], self.new[3], weight, out=self.new[0])
            torch.sub(self.new[3], self.new[0], out=self.new[3])
        if flag is not None:
            torch.where(flag, self.new, self.old, out=self.new)
        torch._foreach_copy_(
            [tensor for row in targets for tensor in row], [view for row in self.views for view in row]
        )


def _split(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in like]
    return [part.view(tensor.shape) for part, tensor in zip(row.split(sizes), like, strict=True)]  # type: ignore[no-untyped-call]


class _Block:
    """Some tensors of each list, or pieces of them."""

    def __init__(self, rows: Sequence[Row], tensors: list[int], pieces: list[slice] | None):
        self._rows, self.tensors, self._pieces = rows, tensors, pieces

    def take(self, first: int, end: int | None) -> list[list[Tensor]]:
        """Of the lists number first to end."""
        rows = self._rows[first:end]
        if self._pieces is None:
            return [[row[k].detach() for k in self.tensors] for row in rows]
        pairs = list(zip(self.tensors, self._pieces, strict=True))
        return [[flat(row[k].detach())[piece] for k, piece in pairs] for row in rows]


def _blocks(rows: Sequence[Row], copies: int, budget: int | None) -> Iterator[_Block]:
    """The tensors of all lists, in blocks for which that many copies fit the budget; long ones are cut."""
    wide = max(tensor.element_size() for row in rows[:3] for tensor in row)
    most = max(SMALLEST_BLOCK, (scratch_bytes() if budget is None else budget) // (copies * max(wide, 4)))
    sizes = [tensor.numel() for tensor in rows[0]]
    if sum(sizes) <= most or not aligned(*rows):
        yield from (_Block(rows, own, None) for own in _whole(sizes, most))
        return
    own: list[int] = []
    pieces: list[slice] = []
    left = most
    for k, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + left)
            own.append(k)
            pieces.append(slice(begin, end))
            begin, left = end, left - (end - begin)
            if not left:
                yield _Block(rows, own, pieces)
                own, pieces, left = [], [], most
    if own:
        yield _Block(rows, own, pieces)


def _whole(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    own: list[int] = []
    used = 0
    for k, size in enumerate(sizes):
        if own and used + size > most:
            yield own
            own, used = [], 0
        own.append(k)
        used += size
    if own:
        yield own
