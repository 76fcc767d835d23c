"""SWAG: a Gaussian around the path of any optimiser (Maddox et al. 2019).

After each `collect`, with n weights collected so far:

    θ̄ ← (n θ̄ + θ)/(n + 1)          θ̄² ← (n θ̄² + θ²)/(n + 1)          D ← last K of θ − θ̄

and the posterior is N(θ̄, ½ diag(θ̄² − θ̄·θ̄) + D Dᵀ/(2(K − 1))), K the number of columns in D.
"""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from credo.baselines.weights import trainable, uncertain
from credo.errors import CallOrderError, InvalidType, InvalidValue
from credo.posterior.base import Posterior, Weights
from credo.posterior.diagonal import DiagonalPosterior
from credo.posterior.low_rank import LowRankPosterior
from credo.posterior.model_copy import device_of, eval_mode, preserve_rng
from credo.predict.functions import Functions, functions_of
from credo.predict.inputs import Reader
from credo.predict.prediction import Read
from credo.validate import mismatches, whole

SMALLEST_VARIANCE: Final = 1e-30  # as the authors clamp it: rounding can make θ̄² − θ̄·θ̄ negative


@final
class SWAG:
    """Collects along a run; what it has collected is a posterior.

        swag = credo.SWAG(model, rank=20)
        for epoch in range(epochs):
            ...                               # any optimiser, with a constant or cyclical learning rate at the end
            if epoch >= start:
                swag.collect(model)
        posterior = swag.posterior()          # for credo.predict; save and load as all others
        swag.load_mean(model, loader)         # the mean into the model, BatchNorm statistics computed anew

    rank: K, the deviations that are kept. With rank 0 the posterior is diagonal, SWAG-Diagonal.
    The weights of normalisation layers are averaged, and have no variance, as everywhere in credo. Moments are kept in
    float64: they are differences of large numbers. `credo.predict` uses the model's BatchNorm statistics.
    """

    def __init__(self, model: nn.Module, rank: int = 20) -> None:
        self._rank = whole("rank", rank, at_least=0)
        if rank == 1:
            raise InvalidValue("rank must be 0 or at least 2, got 1: one deviation has no spread, K − 1 = 0")
        named = trainable(model)
        self._uncertain = uncertain(model)
        self._mean: Weights = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
        self._square: Weights = {name: torch.zeros_like(self._mean[name]) for name in self._uncertain}
        self._deviations: list[Weights] = []
        self._dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in named.items()}
        self._collected = 0

    @property
    def collected(self) -> int:
        """How many times weights were collected."""
        return self._collected

    def collect(self, model: nn.Module) -> None:
        """Take the model's weights in; the model is not changed. Weights that are not finite are an error."""
        given = self._weights_of(model)
        n = self._collected
        for name, weight in given.items():
            self._mean[name] += (weight - self._mean[name]) / (n + 1)
        for name in self._uncertain:
            self._square[name] += (given[name].square() - self._square[name]) / (n + 1)
        if self._rank:
            kept = {name: given[name] - self._mean[name] for name in self._uncertain}
            self._deviations = [*self._deviations, kept][-self._rank :]
        self._collected += 1

    def posterior(self) -> Posterior:
        """A `LowRankPosterior`; with rank 0 a `DiagonalPosterior`. Needs two collections at least."""
        if self._collected < 2:
            raise CallOrderError(
                f"SWAG has collected {self._collected} times, and a spread needs at least 2: call collect(model) more"
            )
        mean = {name: tensor.to(self._dtypes[name]) for name, tensor in self._mean.items()}
        spread = {
            name: (self._square[name] - self._mean[name].square()).clamp_min(SMALLEST_VARIANCE)
            for name in self._uncertain
        }
        facts = {"method": "SWAG", "collected": self._collected, "rank": min(self._rank, self._collected)}
        if not self._rank:
            return DiagonalPosterior(mean, self._as_weights(spread), facts)
        columns = (2 * (len(self._deviations) - 1)) ** 0.5
        factors = {
            name: torch.stack([deviation[name] for deviation in self._deviations]) / columns
            for name in self._uncertain
        }
        halves = {name: tensor / 2 for name, tensor in spread.items()}
        return LowRankPosterior(mean, self._as_weights(halves), self._as_weights(factors), facts)

    def functions(
        self, model: nn.Module, samples: int, seed: int, read: Read, vectorise: bool | None
    ) -> Functions:
        """So that `credo.predict(model, swag, x)` works as with the posterior itself."""
        return functions_of(model, self.posterior(), samples, seed, read, vectorise)

    def load_mean(self, model: nn.Module, loader: Any = None) -> None:
        """Write the mean into the model. With a loader, BatchNorm statistics are those of the mean on its batches."""
        if not self._collected:
            raise CallOrderError("SWAG has collected nothing yet: call collect(model) first")
        self._weights_of(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in self._mean:
                    parameter.copy_(self._mean[name])
        if loader is not None:
            from credo.baselines.swag import refresh_batch_norm

            refresh_batch_norm(model, loader)

    def save(self, path: str | PathLike[str]) -> None:
        """The posterior, for `credo.load_posterior`."""
        self.posterior().save(path)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on collecting, bit for bit."""
        return {
            "collected": self._collected,
            "rank": self._rank,
            "mean": {name: tensor.clone() for name, tensor in self._mean.items()},
            "square": {name: tensor.clone() for name, tensor in self._square.items()},
            "deviations": [{n: t.clone() for n, t in kept.items()} for kept in self._deviations],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Of a SWAG for the same model and rank; checked before anything is changed."""
        if saved["rank"] != self._rank:
            raise InvalidValue(f"the state was saved with rank={saved['rank']}, and here it is {self._rank}")
        wrong = mismatches({name: t.shape for name, t in self._mean.items()}, saved["mean"])
        if wrong:
            raise InvalidValue(f"the state belongs to another model: {wrong}")
        self._collected = int(saved["collected"])
        self._mean = {name: saved["mean"][name].clone() for name in self._mean}
        self._square = {name: saved["square"][name].clone() for name in self._square}
        self._deviations = [{n: kept[n].clone() for n in self._uncertain} for kept in saved["deviations"]]

    def __repr__(self) -> str:
        return f"SWAG(rank={self._rank}, collected {self._collected} times, {len(self._mean)} tensors)"

    def _weights_of(self, model: nn.Module) -> Weights:
        if not isinstance(model, nn.Module):
            raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}")
        given = {n: p.detach().double() for n, p in model.named_parameters() if n in self._mean}
        wrong = mismatches({name: t.shape for name, t in self._mean.items()}, given)
        if wrong:
            raise InvalidValue(f"model is not the one SWAG was made for: {wrong}")
        bad = next((name for name, tensor in given.items() if not bool(tensor.isfinite().all())), None)
        if bad is not None:
            raise InvalidValue(f"the weights of {bad!r} are not finite; nothing was collected")
        return {name: given[name].to(self._mean[name].device) for name in self._mean}

    def _as_weights(self, tensors: Weights) -> Weights:
        """In the dtype of the parameters; what a smaller one rounds to zero stays as small as it can be."""
        return {name: tensor.to(self._dtypes[name]) for name, tensor in tensors.items()}


def refresh_batch_norm(model: nn.Module, loader: Iterable[Any]) -> int:
    """Running means and variances of the model's own weights, averaged over the batches of the loader.

    One pass without gradients, BatchNorm in training mode and all else in eval mode; afterwards modes, momenta and the
    global random streams are as before. Batches are as `credo.predict` takes them. Returns how many layers there were;
    without any, the loader is not read.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return 0
    momenta = [layer.momentum for layer in layers]
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    device, seen = device_of(model), 0
    try:
        with eval_mode(model), preserve_rng(0, device):
            for layer in layers:
                layer.reset_running_stats()
                layer.momentum = None  # a plain average over batches
                layer.training = True
            for batch in Reader(model).batches(loader):
                batch.call(model)
                seen += 1
    except BaseException:
        model.load_state_dict(kept)
        raise
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    if not seen:
        model.load_state_dict(kept)
        raise InvalidValue("loader yielded no batch; an exhausted iterator must be made again")
    with torch.no_grad():
        for layer in layers:
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.fill_(seen)
    return len(layers)
