"""MC-dropout as a posterior: a function is the network with one set of units dropped."""

from collections.abc import Iterable, Iterator
from typing import NoReturn, final

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from credo.errors import InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior.model_copy import StandIn, device_of, undisturbed
from credo.predict.functions import Functions
from credo.predict.inputs import Batch
from credo.predict.masks import FixedMasks, derived_key
from credo.predict.outputs import Outputs, Read

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
        self._active = _active(StandIn(model).module, _names(also))

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
        self._module, self._device = StandIn(model).module, device_of(model)
        for name, module in self._module.named_modules():
            module.training = name in active
        self._keys, self._read = [derived_key(seed, i) for i in range(samples)], read

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        for key in self._keys:
            yield tuple(tensor.unsqueeze(0) for tensor in self._read(self._one(batch, key)))

    def _one(self, batch: Batch, key: int) -> object:
        private = batch.map(lambda tensor: tensor.clone())  # a model may write to its input
        with undisturbed(key, self._device), FixedMasks(key):
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
