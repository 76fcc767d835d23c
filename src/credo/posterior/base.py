"""The protocol of every posterior: moments, draws, exact divergences, and a file."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from os import PathLike
from typing import ClassVar, TypeAlias, TypeVar, Union, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from credo.curvature.tracking import whole_tensor
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation
from credo.kernels.noise import normal_
from credo.posterior.files import save_posterior
from credo.validate import positive

Weights: TypeAlias = dict[str, Tensor]
Self = TypeVar("Self", bound="Posterior")
Prior: TypeAlias = Union[float, "Posterior"]  # a precision δ, meaning N(0, 1/δ), or another posterior


class Posterior(ABC):
    """q(w), a Gaussian over a model's weights, which it knows by name only.

    A concrete posterior is final and decorated with `register_kind`. It owns its tensors (detached copies)
    and is not meant to be changed: `mean` and `variance` are to be read. Some names may be deterministic
    (normalisation layers): they have a mean and zero variance, every sample holds their mean, and they are
    no part of `kl`, `entropy` and `log_prob`.
    """

    kind: ClassVar[str]  # how files name the class
    _own: torch.Generator | None = None  # for draws without a generator
    _buffers: Mapping[str, Tensor] = {}

    @property
    @abstractmethod
    def mean(self) -> Weights:
        """μ by parameter name."""

    @property
    @abstractmethod
    def variance(self) -> Weights:
        """The marginal variances σ² by parameter name; zero for deterministic names."""

    @property
    @abstractmethod
    def deterministic(self) -> frozenset[str]:
        """The names that carry no uncertainty."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, object]:
        """Where the posterior comes from (method, data_size, tempering, ...), as JSON can hold it; a copy."""

    @abstractmethod
    def sample_many(self, generator: torch.Generator | None, n: int) -> Weights:
        """n draws, stacked along a new first dimension.

        Drawing n at once or in any split gives the same weights bit for bit: draws follow each other in the
        stream.
        """

    @abstractmethod
    def kl(self, prior: Prior) -> Tensor:
        """KL(q‖p) in nats, exact, summed over all weights; a float64 scalar."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """−E_q[log q(w)] in nats; a float64 scalar."""

    @abstractmethod
    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q(w); a float64 scalar. `weights` holds every name that is not deterministic."""

    @abstractmethod
    def to(self, device: torch.device | str) -> "Posterior":
        """The same posterior on another device; independent of this one."""

    @abstractmethod
    def dense_covariance(self, name: str) -> Tensor:
        """The covariance of vec([W b]), column-stacked, of a small layer: the truth tests compare with.

        `name` is a layer (`"fc"`: its weight, and its bias if there is one) or one parameter (`"fc.weight"`).
        """

    @abstractmethod
    def tensors(self) -> Weights:
        """All that a file must hold, in an order that matters."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Weights, metadata: Mapping[str, object]) -> "Posterior":
        """The inverse of `tensors`."""

    def scaled(self, factor: float) -> "Posterior":
        """The same mean, and every covariance multiplied by `factor`: σ² becomes factor·σ².

        Deterministic names stay so. `metadata["scale"]` holds the product of all factors so far. A class of your own
        that can do this defines `_scaled`.
        """
        factor = positive("factor", factor)
        if len(self.deterministic) == len(self.mean):
            raise InvalidValue(
                f"factor={factor:g} has nothing to scale: every tensor of this posterior is deterministic. To change"
                " how sure its predictions are, use predict(..., temperature=...) or noise=..."
            )
        return self._scaled(factor).with_buffers(self._buffers)

    def _scaled(self, factor: float) -> "Posterior":
        raise UnsupportedOperation(
            f"{type(self).__name__} cannot be scaled: it does not define _scaled(factor)"
        )

    @property
    @final
    def buffers(self) -> Weights:
        """What the module had beside the weights: buffers (BatchNorm's running statistics, …), frozen parameters.

        `predict` uses them. Often empty.
        """
        return dict(self._buffers)

    @final
    def with_buffers(self: Self, source: nn.Module | Mapping[str, Tensor]) -> Self:
        """The same posterior with copies of these instead: by name, or of a module.

        Of a module these are the buffers that `state_dict` has, and the frozen parameters that the posterior lacks.
        """
        other = copy.copy(self)
        other._own, other._buffers = None, owned_buffers(source, self.mean.keys())
        return other

    @final
    def _metadata_scaled(self, factor: float) -> dict[str, object]:
        before = self.metadata.get("scale", 1.0)
        return {**self.metadata, "scale": factor * (before if isinstance(before, int | float) else 1.0)}

    @final
    def _own_generator(self) -> torch.Generator:
        if self._own is None:
            self._own = torch.Generator(self.device).manual_seed(0)
        return self._own

    @property
    @final
    def device(self) -> torch.device:
        return next(iter(self.mean.values())).device

    @final
    def sample(self, generator: torch.Generator | None = None) -> Weights:
        """One draw w ~ q by parameter name, in tensors of its own.

        The generator lives on the posterior's device. Without one, a private generator of this posterior is
        used: seeded 0 when the posterior is made and advanced by every such draw. The global one never is.
        """
        return {name: stacked[0] for name, stacked in self.sample_many(generator, 1).items()}

    @final
    def save(self, path: str | PathLike[str], *, compact: bool = False) -> None:
        """Write a file that `credo.load_posterior` verifies; an old one stays until the new one is safe.

        compact: variances of a diagonal posterior in bfloat16, which changes each by at most 0.4 %, and a short header.
        The file of a float32 mean is then 1.5 times as large as the weights, instead of twice. Means are exact.
        """
        save_posterior(path, self.kind, self.tensors(), self.metadata, self._buffers, compact=compact)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """By name, those that `state_dict` has; others are made again with the module."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def frozen_parameters(module: nn.Module, uncertain: Collection[str]) -> dict[str, Tensor]:
    """By name, those without a gradient that are not among the weights of a posterior."""
    return {n: p for n, p in module.named_parameters() if not p.requires_grad and n not in uncertain}


def owned_buffers(source: object, uncertain: Collection[str] = ()) -> dict[str, Tensor]:
    """Detached copies, of any dtype."""
    found = source
    if isinstance(source, nn.Module):
        found = persistent_buffers(source) | frozen_parameters(source, uncertain)
    if not isinstance(found, Mapping) or not all(
        isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items()
    ):
        raise InvalidType(f"buffers must be a module, or map names to tensors; got {type(source).__name__}")
    return {
        name: whole_tensor(tensor.detach()).clone(memory_format=torch.contiguous_format)
        for name, tensor in found.items()
    }


def untrained_statistics(model: nn.Module) -> str | None:
    """The first normalisation layer that has never seen a batch in training mode, if any."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.num_batches_tracked is not None:
            statistics = module.running_mean, module.running_var
            if int(module.num_batches_tracked) == 0 and _as_made(*statistics):
                return name or type(module).__name__
    return None


def _as_made(mean: Tensor | None, variance: Tensor | None) -> bool:
    return mean is not None and variance is not None and not bool(mean.any()) and bool((variance == 1).all())


def check_generator(generator: object, device: torch.device) -> torch.Generator:
    if not isinstance(generator, torch.Generator):
        raise InvalidType(
            f"generator must be a torch.Generator, got {type(generator).__name__};"
            f" pass torch.Generator({str(device)!r}).manual_seed(...)"
        )
    if generator.device.type != device.type:
        raise InvalidValue(
            f"generator is on {generator.device} and the posterior on {device};"
            f" make it with torch.Generator({str(device)!r})"
        )
    return generator


def keys(generator: torch.Generator, n: int) -> list[int]:
    """63 bits a draw, in the order of the draws however many are taken at a time.

    The counter-based kernels make a whole row of ε of a key: several times faster than randn, the same for any number
    of threads, and draw i does not depend on n.
    """
    device, most = generator.device, 2**63 - 1
    if device.type == "cpu":  # elsewhere a generator moves on by calls, not by numbers
        return torch.randint(most, (n,), generator=generator).tolist()
    return [int(torch.randint(most, (), generator=generator, device=device)) for _ in range(n)]


def standard_normal(
    generator: torch.Generator, n: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """n rows of ε ~ N(0, I), of any width."""
    rows = torch.empty(n, width, dtype=dtype, device=device)
    for row, key in zip(rows, keys(generator, n), strict=True):
        normal_(row, seed=key, stream=0)
    return rows
