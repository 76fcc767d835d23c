"""The weight samples of one prediction: the same for every batch, drawn in order, never many at once."""

import weakref
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from credo.posterior.base import Posterior, Weights
from credo.posterior.stand_in import StandIn

LIMIT = 64 * 2**20  # bytes of stacked weights alive at a time
Key: TypeAlias = tuple[object, ...]


class WeightDraws:
    """Draw i depends on the posterior, the seed and i only, not on how many are taken at a time."""

    def __init__(self, stand_in: StandIn, posterior: Posterior, samples: int, seed: int) -> None:
        stand_in.check(posterior.mean)
        self._stand_in, self._posterior, self.samples, self._seed = stand_in, posterior, samples, seed
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in posterior.mean.values())
        self.most = max(1, LIMIT // max(1, self.bytes))

    def first(self) -> Weights:
        """The first draw by itself; `chunks` begins with it again."""
        stacked = self._all() if self.samples <= self.most else self._draw(self._generator(), 1)
        return {name: tensor[0] for name, tensor in stacked.items()}

    def chunks(self, size: int) -> Iterator[Weights]:
        """All draws, at most `size` at a time, stacked."""
        if self.samples <= self.most:
            stacked = self._all()
            for start in range(0, self.samples, size):
                yield {name: tensor[start : start + size] for name, tensor in stacked.items()}
        else:
            generator = self._generator()
            for start in range(0, self.samples, size):
                yield self._draw(generator, min(size, self.samples - start))

    def _all(self) -> Weights:
        placement = tuple((name, t.device, t.dtype) for name, t in self._stand_in.like.items())
        key = (self.samples, self._seed, placement, _versions(self._posterior.tensors()))
        return _last.recall(self._posterior, key) or _last.keep(
            self._posterior, key, self._draw(self._generator(), self.samples)
        )

    def _draw(self, generator: torch.Generator, n: int) -> Weights:
        return self._stand_in.placed(self._posterior.sample_many(generator, n))

    def _generator(self) -> torch.Generator:
        return torch.Generator(self._posterior.device).manual_seed(self._seed)


class _LastDraws:
    """The last prediction's draws, for the next one: with small networks drawing takes most of the time.

    They are used again only for the same posterior object, samples and seed, and only if nobody wrote to the
    posterior's tensors or to the draws since. At most LIMIT bytes, freed with the posterior.
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Posterior], Key, Weights, Key] | None = None

    def recall(self, posterior: Posterior, key: Key) -> Weights | None:
        entry = self._entry  # read once: other threads may replace it
        if entry is None:
            return None
        owner, known, stacked, versions = entry
        fits = owner() is posterior and known == key and versions == _versions(stacked)
        return stacked if fits else None

    def keep(self, posterior: Posterior, key: Key, stacked: Weights) -> Weights:
        self._entry = (weakref.ref(posterior, self._forget), key, stacked, _versions(stacked))
        return stacked

    def _forget(self, gone: "weakref.ref[Posterior]") -> None:
        if self._entry is not None and self._entry[0] is gone:
            self._entry = None


_last = _LastDraws()


def _versions(tensors: Mapping[str, Tensor]) -> Key:
    return tuple(tensor._version for tensor in tensors.values())
