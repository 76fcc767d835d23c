"""The weight samples of one prediction: the same for every batch, drawn in order, never many at once."""

import weakref
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from credo.kernels.scratch import expect_large_blocks
from credo.posterior.base import Posterior, Weights
from credo.posterior.model_copy import StandIn

LIMIT = 64 * 2**20  # bytes of stacked weights alive at a time
Key: TypeAlias = tuple[object, ...]


class WeightDraws:
    """Draw i depends on the posterior, the seed and i only, not on how many are taken at a time."""

    def __init__(self, stand_in: StandIn, posterior: Posterior, samples: int, seed: int) -> None:
        stand_in.check(posterior.mean)
        stand_in.take_buffers(posterior.buffers)
        self._stand_in, self._posterior, self.samples, self._seed = stand_in, posterior, samples, seed
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in posterior.mean.values())
        self.most = max(1, LIMIT // max(1, self.bytes))
        expect_large_blocks()

    def stream(self) -> "Stream":
        return Stream(self._all() if self.samples <= self.most else self._fresh, self.samples)

    def _fresh(self) -> Callable[[int], Weights]:
        """Draws from the start of the random stream, made when they are taken."""
        generator = self._generator()
        return lambda n: self._draw(generator, n)

    def _all(self) -> Weights:
        placement = tuple((name, t.device, t.dtype) for name, t in self._stand_in.like.items())
        names = self._stand_in.own_names(self._posterior.mean)
        key = (self.samples, self._seed, placement, names, _versions(self._posterior.tensors()))
        return _last.recall(self._posterior, key) or _last.keep(
            self._posterior, key, self._draw(self._generator(), self.samples)
        )

    def _draw(self, generator: torch.Generator, n: int) -> Weights:
        return self._stand_in.placed(self._posterior.sample_many(generator, n))

    def _generator(self) -> torch.Generator:
        return torch.Generator(self._posterior.device).manual_seed(self._seed)


class Stream:
    """Reads the draws once in order, as many at a time as one likes."""

    def __init__(self, source: Weights | Callable[[], Callable[[int], Weights]], samples: int) -> None:
        self._source, self._samples = source, samples
        self.rewind()

    def rewind(self) -> None:
        self.left = self._samples
        self._draw = None if isinstance(self._source, dict) else self._source()

    def one(self) -> Weights:
        """The next draw by itself."""
        if isinstance(self._source, dict):
            place, self.left = self._samples - self.left, self.left - 1
            return {name: tensor[place] for name, tensor in self._source.items()}
        return {name: tensor[0] for name, tensor in self.take(1).items()}

    def take(self, most: int) -> Weights:
        """The next draws, stacked; at most that many."""
        start, n = self._samples - self.left, min(most, self.left)
        self.left -= n
        if self._draw is not None:
            return self._draw(n)
        assert isinstance(self._source, dict)
        return {name: tensor[start : start + n] for name, tensor in self._source.items()}


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
