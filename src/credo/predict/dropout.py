"""MC-dropout as a posterior: a function is the network with one set of units dropped."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from typing import Any, NoReturn, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from credo.errors import InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior.model_copy import ModelCopy, copyable, device_of, preserve_rng
from credo.predict.functions import Functions
from credo.predict.inputs import Batch
from credo.predict.prediction import Outputs, Read

# Torch's modules that drop inside; in eval mode the last three also take a path on which nothing is dropped.
DROP_INSIDE = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
)


@final
class DropoutPosterior:
    """Draws functions from a model by leaving its dropout on: `predict(model, DropoutPosterior(model), x)`.

    Function i drops the same units for every example and batch; which ones depends on the seed, i and the
    shape of an example, not on the device or the batch size. Two things are not quite so: dropout inside torch's
    attention and recurrent layers draws by example, the same for every batch of one shape; and a tensor whose
    first dimension is not the examples shares its masks along that dimension all the same.

    Dropout layers are active and all else is in eval mode, BatchNorm included. The weights are those the model
    has when `predict` is called. `also` names modules to be run in training mode too, for those that call
    `F.dropout(x, training=self.training)` themselves ("" is the model).
    """

    def __init__(self, model: nn.Module, also: Iterable[str] = ()) -> None:
        self.model = model
        self._active = _active(copyable(model), _names(also))

    def functions(
        self, model: nn.Module, samples: int, seed: int, read: Read, vectorise: bool | None
    ) -> Functions:
        if not _same(model, self.model):
            raise InvalidValue(
                "the model to predict with is not the one this DropoutPosterior was made for; pass that one,"
                " or make credo.DropoutPosterior(model) for the one at hand"
            )
        return DropoutFunctions(model, self._active, samples, seed, read)

    def scaled(self, factor: float) -> NoReturn:
        raise UnsupportedOperation(
            f"scaled({factor!r:.40}): a DropoutPosterior has no variances to scale; its spread is the dropout rate p of"
            " the layers. credo.calibrate fits a temperature for it, predict(..., temperature=...) uses one"
        )

    def __repr__(self) -> str:
        return f"DropoutPosterior({type(self.model).__name__}, {len(self._active)} modules active)"


class DropoutFunctions:
    """f with masks 1, …, C, one after the other."""

    def __init__(self, model: nn.Module, active: frozenset[str], samples: int, seed: int, read: Read) -> None:
        copy = ModelCopy(model)
        copy.activate(active)
        self._module, self._device = copy.module, device_of(model)
        self._keys, self._read = [derived_key(seed, i) for i in range(samples)], read

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        for key in self._keys:
            yield tuple(tensor.unsqueeze(0) for tensor in self._read(self._one(batch, key)))

    def _one(self, batch: Batch, key: int) -> object:
        private = batch.map(lambda tensor: tensor.clone())  # a model may write to its input
        with preserve_rng(key, self._device), FixedMasks(key):
            return private.call(self._module)


def _same(one: nn.Module, other: nn.Module) -> bool:
    """The same weights, whatever wrapper is around them."""
    mine, others = list(one.parameters()), list(other.parameters())
    return len(mine) == len(others) and all(a is b for a, b in zip(mine, others, strict=True))


def _names(also: object) -> list[str]:
    if isinstance(also, str) or not isinstance(also, Iterable):
        raise InvalidType(f"also must be a list of module names, got {also!r:.80}")
    return [str(name) for name in also]


def _active(model: nn.Module, also: list[str]) -> frozenset[str]:
    modules = dict(model.named_modules())
    unknown = [name for name in also if name not in modules]
    if unknown:
        raise InvalidValue(f"also names {unknown[0]!r}, and the model has only {', '.join(modules)!r:.200}")
    dropping = {name for name, module in modules.items() if _rate(module) > 0}
    if not dropping and not also:
        raise InvalidValue(
            "the model drops nothing: it has no dropout layer with p > 0; give it some (credo.models: dropout=0.1)"
            " and train with them, or name in `also` the modules that call F.dropout themselves"
        )
    return frozenset(dropping | set(also) | {n for n, m in modules.items() if isinstance(m, DROP_INSIDE)})


def _rate(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return module.p
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


ALPHA = 1.7580993408473766  # SELU's limit for very negative inputs, as torch.nn.AlphaDropout has it

WHOLE_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout}
KEEPS_MOMENTS = {F.alpha_dropout, F.feature_alpha_dropout}
DROPOUTS = {F.dropout, torch.dropout, torch.dropout_, *WHOLE_CHANNELS, *KEEPS_MOMENTS}


def derived_key(*parts: int) -> int:
    """63 bits that are the same everywhere and look unrelated for neighbouring parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FixedMasks(TorchFunctionMode):
    """Inside, every call of a dropout function drops what the key and the number of the call say."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self._key, self._calls = key, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in DROPOUTS:
            return func(*args, **(kwargs or {}))
        return self._dropped(func, *args, **(kwargs or {}))

    def _dropped(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool | None = None,  # torch.dropout's word for `training`
    ) -> Tensor:
        if not (training if train is None else train) or p == 0:
            return input
        kept = self._kept(input, p, func in WHOLE_CHANNELS)
        result = _keeping_moments(input, kept, p) if func in KEEPS_MOMENTS else _scaled(input, kept, p)
        return input.copy_(result) if inplace or func is torch.dropout_ else result

    def _kept(self, input: Tensor, p: float, whole_channels: bool) -> Tensor:
        """Made on the CPU, so that all devices drop the same."""
        shape = (1, *input.shape[1:2], *(1 for _ in input.shape[2:])) if whole_channels else input.shape[1:]
        generator = torch.Generator().manual_seed(derived_key(self._key, self._calls))
        self._calls += 1
        return (torch.rand(shape, generator=generator) >= p).to(input.device)


def _scaled(input: Tensor, kept: Tensor, p: float) -> Tensor:
    """x·m/(1−p)."""
    return torch.zeros_like(input) if p == 1 else input * (kept.to(input.dtype) / (1 - p))


def _keeping_moments(input: Tensor, kept: Tensor, p: float) -> Tensor:
    """a·(x where kept, else −α) + b, with a and b such that mean 0 and variance 1 stay."""
    if p == 1:
        return torch.zeros_like(input)
    a = 1 / sqrt((1 - p) * (1 + p * ALPHA**2))
    return a * torch.where(kept, input, -ALPHA) + a * ALPHA * p
