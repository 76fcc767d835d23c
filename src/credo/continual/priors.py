"""Yesterday's posterior as today's prior, also for weights that yesterday did not know; and a fresh start."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior, Posterior
from credo.posterior.model_copy import undisturbed
from credo.validate import positive


def prior_for(
    model: nn.Module, posterior: Posterior | None, precision: float = 1.0
) -> DiagonalPosterior | None:
    """The posterior, over exactly the weights that `model` trains now; N(0, 1/`precision`) for new ones.

    Every kind of posterior will do: what is kept of it is its mean and marginal variances. None stays None, for
    which an optimiser has a `prior_precision` of its own.
    """
    fresh = positive("precision", precision)
    if posterior is None:
        return None
    if not isinstance(posterior, Posterior):
        raise InvalidType(f"posterior must be a credo posterior, got {type(posterior).__name__}")
    mean, variance, kept = posterior.mean, posterior.variance, {"method": "prior", "of": posterior.metadata}
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    _refuse_other_models(trained, mean)
    return DiagonalPosterior(
        {name: mean.get(name, p.new_zeros(p.shape)) for name, p in trained.items()},
        {name: variance.get(name, p.new_full(p.shape, 1 / fresh)) for name, p in trained.items()},
        kept,
    )


def merged(old: Posterior | None, new: Posterior) -> DiagonalPosterior:
    """`new`, and what `old` says of the names that `new` lacks: heads that were not in use."""
    names = [] if old is None else [name for name in old.mean if name not in new.mean]
    mean, variance = (
        dict(getattr(new, part)) | ({name: getattr(old, part)[name] for name in names} if names else {})
        for part in ("mean", "variance")
    )
    return DiagonalPosterior(mean, variance, new.metadata)


def reset_parameters(model: nn.Module, seed: int) -> None:
    """torch's own initialisation of every layer that trains, from a private random stream."""
    device = next((p.device for p in model.parameters()), None)
    resets = [_reset_of(module) for module in model.modules() if _trains(module)]  # all or none
    with undisturbed(seed, device):
        for reset in resets:
            reset()


def _trains(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and all(p.requires_grad for p in own)


def _reset_of(module: nn.Module) -> Callable[[], Any]:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise InvalidType(
            f"{type(module).__name__} has parameters and no reset_parameters(), so its mean cannot start afresh. "
            "Give it one, or start from the previous mean: start='mean'"
        )
    return reset  # type: ignore[no-any-return]


def _refuse_other_models(trained: dict[str, Tensor], mean: dict[str, Tensor]) -> None:
    """New names are welcome, but a posterior that shares none, or has other shapes, is of another model."""
    if not trained.keys() & mean.keys():
        raise InvalidValue(
            f"the posterior does not fit the model: it knows {sorted(mean)[:3]} …, the model trains "
            f"{sorted(trained)[:3]} …"
        )
    wrong = [
        f"{name!r} is {tuple(mean[name].shape)} in the posterior and {tuple(p.shape)} in the model"
        for name, p in trained.items()
        if name in mean and mean[name].shape != p.shape
    ]
    if wrong:
        raise InvalidValue(f"the posterior does not fit the model: {'; '.join(wrong[:3])}")
