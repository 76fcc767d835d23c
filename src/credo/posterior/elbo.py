"""The objective itself: −N·E_q[ℓ̄(w)] − τ·KL(q‖p), ℓ̄ the mean loss over examples."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.errors import InvalidType, InvalidValue
from credo.posterior.base import Posterior
from credo.posterior.model_copy import ModelCopy, device_of, preserve_rng
from credo.validate import positive, whole


@dataclass(frozen=True)
class Elbo:
    """The three numbers, in nats over the whole data set, and how sure the first one is."""

    expected_nll: float  # N·E_q[ℓ̄], estimated from the samples
    kl: float  # KL(q‖p), exact, not yet multiplied by τ
    elbo: float  # −expected_nll − τ·kl
    standard_error: float  # of expected_nll; infinite for one sample


def elbo(
    model: nn.Module,
    posterior: Posterior,
    loss: Callable[[nn.Module], Tensor],
    *,
    data_size: int,  # N
    prior_precision: float = 1.0,  # δ, of the prior N(0, 1/δ)
    prior: Posterior | None = None,  # instead of δ: the posterior of earlier data
    tempering: float = 1.0,  # τ
    samples: int = 10,
    seed: int = 0,
) -> Elbo:
    """Estimate the tempered evidence lower bound of a loss.

    `loss` is called with a copy of the model, in eval mode and with sampled weights, and returns the
    mean loss over examples: `lambda model: F.cross_entropy(model(x), y)`. The model is never touched.

    E_q[−log p(D|w)] is `data_size` times the mean of that loss over `samples` draws from the posterior, whose stream is
    `seed`'s. The KL divergence is to N(0, 1/prior_precision), or to `prior`, and weighs `tempering`.
    """
    total, weight = whole("data_size", data_size, at_least=1), positive("tempering", tempering)
    private, samples, seed = (
        ModelCopy(model),
        whole("samples", samples, at_least=1),
        whole("seed", seed, at_least=0),
    )
    kl = float(posterior.kl(positive("prior_precision", prior_precision) if prior is None else prior))
    with preserve_rng(seed, device_of(model)):
        losses = list(_losses(private, posterior, loss, samples, seed))
    nll = total * statistics.fmean(losses)
    error = total * statistics.stdev(losses) / math.sqrt(samples) if samples > 1 else math.inf
    return Elbo(expected_nll=nll, kl=kl, elbo=-nll - weight * kl, standard_error=error)


def _losses(
    private: ModelCopy, posterior: Posterior, loss: Callable[[nn.Module], Tensor], samples: int, seed: int
) -> Iterator[float]:
    private.check(posterior.mean)
    private.take_buffers(posterior.buffers)
    generator = torch.Generator(posterior.device).manual_seed(seed)
    for _ in range(samples):
        private.load(private.placed(posterior.sample(generator)))
        yield _scalar(loss(private.module))


def _scalar(loss: object) -> float:
    if not isinstance(loss, Tensor):
        raise InvalidType(f"loss must return the mean loss as a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise InvalidValue(
            f"loss must return the mean over examples, one number; got shape {tuple(loss.shape)}"
        )
    return float(loss)
