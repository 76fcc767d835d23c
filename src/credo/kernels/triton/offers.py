"""Which tasks of `credo.kernels.accelerator` have Triton programs."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from credo.kernels import accelerator
from credo.kernels.triton import lists, normalisation, sums
from credo.kernels.triton.availability import runs_for

OFFERED: tuple[Callable[..., Any], ...] = (
    *(lists.sample, lists.perturb, lists.all_finite, lists.vogn, lists.ivon, lists.restore),
    *(sums.convolution_sums, normalisation.batch_norm_backward),
)


def offer_all() -> None:
    """Puts them before plain torch."""
    for function in OFFERED:
        accelerator.offer(function.__name__, where_it_runs(function))


def where_it_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for devices that Triton runs on; NotImplemented for others."""

    @wraps(function)
    def own(*arguments: Any) -> Any:
        first = arguments[0] if isinstance(arguments[0], Tensor) else next(iter(arguments[0]), None)
        return function(*arguments) if first is not None and runs_for(first) else NotImplemented

    return own
