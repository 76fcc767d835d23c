"""What one call of the model gets, from what a user has: a tensor, an array, arguments, or a loader.

| `inputs` | is |
|---|---|
| a tensor or array | one batch: `model(x)` |
| a tuple | one batch of several arguments: `model(*inputs)` |
| a mapping | one batch of named arguments without the labels: `model(**inputs)` |
| any other iterable (loader, list, generator) | batches |

A batch of an iterable is a tensor, an array, a mapping, or a tuple or list `(x,)` or `(x, y)`: y is the target, and x
is again any of the first three. Longer ones are an error, since which part is a target cannot be known. In a mapping
the target is what `target=` names, or one of `TARGETS`, or "y" where the model takes no such argument. A model of
transformers from sequence to sequence gets the labels shifted as `decoder_input_ids`, where a batch has none.

Arrays of floating-point numbers get the dtype of the model's weights: numpy's are float64 by habit, not by choice.
Tensors keep theirs.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from credo.errors import InvalidType, InvalidValue
from credo.posterior.model_copy import device_of, unwrapped

TARGETS = frozenset({"label", "labels", "label_ids", "target", "targets"})


@dataclass(frozen=True)
class Batch:
    """The arguments of one call; tensors among them may also sit inside tuples, lists and mappings."""

    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    target: object = None  # what came with them and is no argument

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        _collect(self.args, found)
        _collect(self.kwargs, found)
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        args = tuple(_mapped(arg, change) for arg in self.args)
        return Batch(args, {name: _mapped(arg, change) for name, arg in self.kwargs.items()}, self.target)

    def call(self, function: Callable[..., object]) -> object:
        return function(*self.args, **self.kwargs)

    def size(self) -> int | None:
        """The number of examples: the first dimension of the first tensor that has one."""
        return next((tensor.shape[0] for tensor in self.tensors() if tensor.dim() > 0), None)

    def is_empty(self) -> bool:
        return self.size() == 0

    def with_one_blank(self) -> "Batch":
        """One example of zeros in place of none: many models cannot run on none, and only shapes matter."""
        return self.map(lambda t: t.new_zeros((1, *t.shape[1:])) if _has(t, 0) else t)

    def shapes(self) -> tuple[object, ...]:
        return tuple((tensor.shape, tensor.dtype) for tensor in self.tensors())


class Reader:
    """Makes batches for one model: knows its device, its dtype and the arguments it takes."""

    def __init__(self, model: nn.Module, target: str | None = None) -> None:
        if target is not None and not isinstance(target, str):
            raise InvalidType(f"target must be the name of the target in dict batches, got {target!r:.80}")
        inner = unwrapped(model)
        self.device, self._target, self._model = device_of(model), target, inner
        self._name, self._signature = type(inner).__name__, _signature(inner)

    def batches(self, inputs: object, batch_size: int | None = None, parts: int = 1) -> Iterator[Batch]:
        """Every batch, on the model's device; a single one without a batch_size in so many parts."""
        whole = self._single(inputs)
        if whole is None:
            _warn_of_order(inputs)
            found = self._of_loader(inputs, batch_size)
        else:
            found = _split(whole, batch_size or (-(-(whole.size() or 0) // parts) if parts > 1 else None))
        return map(self._placed, found)

    def labelled(self, validation: object, batch_size: int | None = None) -> Iterator[Batch]:
        """Batches with their targets, from a pair (inputs, targets), a dict, or an iterable of such."""
        if isinstance(validation, tuple) and len(validation) == 2:
            inputs, target = validation
            whole = self._single(tuple(inputs) if isinstance(inputs, list) else inputs)
            if whole is None:
                raise InvalidType(
                    f"the first of the pair (inputs, targets) must be a tensor, an array, a tuple or a dict,"
                    f" got {type(inputs).__name__}; a loader that yields (x, y) is passed by itself"
                )
            found = _split(replace(whole, target=_target(target)), batch_size)
        elif isinstance(validation, Mapping):
            found = _split(cast("Batch", self._single(validation)), batch_size)
        else:
            if isinstance(validation, Tensor) or hasattr(validation, "__array__"):
                raise InvalidType(
                    f"validation is a {type(validation).__name__} without targets; give (inputs, targets) or a loader"
                )
            found = self._of_loader(validation, batch_size)
        return map(self._placed, found)

    def _of_loader(self, inputs: object, batch_size: int | None) -> Iterator[Batch]:
        if batch_size is not None:
            raise InvalidValue("batch_size splits a tensor, tuple or mapping; a loader comes with its own")
        return map(self._unpacked, _iterable(inputs))

    def _placed(self, batch: Batch) -> Batch:
        self._check(batch)
        device = self.device
        return batch if device is None else batch.map(lambda tensor: tensor.to(device))

    def _single(self, value: object) -> Batch | None:
        if isinstance(value, Tensor):
            return Batch((value,))
        if isinstance(value, Mapping):
            return self._named({str(name): arg for name, arg in value.items()})
        if isinstance(value, tuple):
            return Batch(tuple(map(self._converted, value)))
        return Batch((self._tensor(value),)) if _is_array(value) else None

    def _named(self, arguments: dict[str, object]) -> Batch:
        if self._target is not None and self._target not in arguments:
            raise InvalidValue(
                f"target={self._target!r} names nothing in the batch, which has {', '.join(arguments)}"
            )
        left_out = {self._target} if self._target is not None else set()
        left_out |= {n for n in arguments if n in TARGETS or (n == "y" and not self._takes("y"))}
        names = [self._target] if self._target is not None else sorted(left_out & arguments.keys())
        target = _target(arguments[names[0]]) if len(names) == 1 else None
        arguments = self._with_decoder_inputs(arguments, target)
        return Batch((), {n: self._converted(a) for n, a in arguments.items() if n not in left_out}, target)

    def _with_decoder_inputs(self, arguments: dict[str, object], labels: object) -> dict[str, object]:
        """transformers' models from sequence to sequence shift the labels to the right, if they get them."""
        prepare = getattr(self._model, "prepare_decoder_input_ids_from_labels", None)
        own = ("decoder_input_ids", "decoder_inputs_embeds")
        if (
            prepare is None
            or not isinstance(labels, Tensor)
            or any(arguments.get(n) is not None for n in own)
        ):
            return arguments
        return {**arguments, "decoder_input_ids": prepare(labels=labels)}

    def _unpacked(self, batch: object) -> Batch:
        target: object = None
        if isinstance(batch, tuple | list):
            if len(batch) not in (1, 2):
                raise InvalidType(
                    f"a batch is a {type(batch).__name__} of {len(batch)}: which are inputs? yield x, (x, y),"
                    " ((x1, x2), y) or a dict of the model's arguments"
                )
            first, target = batch[0], _target(batch[1]) if len(batch) == 2 else None
            batch = tuple(first) if isinstance(first, list) else first
        single = self._single(batch)
        if single is None:
            raise InvalidType(
                f"a batch holds {type(batch).__name__} where a tensor, an array, a tuple or a dict is expected"
            )
        return single if target is None else replace(single, target=target)

    def _takes(self, name: str) -> bool:
        if self._signature is None:
            return True
        kinds = {p.kind for p in self._signature.parameters.values()}
        return name in self._signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def _check(self, batch: Batch) -> None:
        """Arguments that the model cannot take, named before it is called."""
        if self._signature is None:
            return
        unknown = [name for name in batch.kwargs if not self._takes(name)]
        if unknown:
            raise InvalidValue(
                f"a batch has {unknown[0]!r}, which {self._name}.forward{self._signature} does not take; if it is the"
                f" target say target={unknown[0]!r}, otherwise give it the name of an argument or leave it out"
            )
        try:
            self._signature.bind(*batch.args, **batch.kwargs)
        except TypeError as error:
            raise InvalidType(
                f"a batch of {len(batch.args)} arguments and the names {list(batch.kwargs)} does not fit"
                f" {self._name}.forward{self._signature}: {error}. A tuple holds the model's arguments; with targets"
                " it is one batch of a list, [(x, y)]"
            ) from error

    def _converted(self, value: object) -> object:
        """Arrays become tensors, also inside tuples, lists and mappings; single numbers stay."""
        if _is_array(value):
            return self._tensor(value)
        if type(value) in (tuple, list):
            return type(value)(self._converted(item) for item in value)  # type: ignore[call-arg,attr-defined]
        if isinstance(value, dict):
            return {key: self._converted(item) for key, item in value.items()}
        return value

    def _tensor(self, value: object) -> Tensor:
        if isinstance(value, Tensor):
            return value
        dtypes = (p.dtype for p in self._model.parameters() if p.is_floating_point())
        return as_tensor(value, "inputs", next(dtypes, torch.float32))


def as_tensor(value: object, argument: str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of an array or a list of numbers; floating-point ones in `dtype`, if given."""
    import numpy

    try:
        array = numpy.asarray(value)
        native = numpy.ascontiguousarray(array, array.dtype.newbyteorder("="))
        tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
    except (TypeError, ValueError) as error:
        raise InvalidType(
            f"{argument} is a {type(value).__name__} that is no array of numbers: {error}; give numbers of one dtype"
        ) from error
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _target(value: object) -> object:
    """Arrays as tensors, in the dtype they have."""
    return as_tensor(value, "targets") if _is_array(value) else value


def _is_array(value: object) -> bool:
    """numpy's, pandas', jax's; not numpy's single numbers."""
    return hasattr(value, "__array__") and not isinstance(value, Tensor) and getattr(value, "ndim", 1) > 0


def _signature(model: nn.Module) -> inspect.Signature | None:
    """Of `forward`; None where it cannot be known."""
    if type(model).__call__ is not nn.Module.__call__:
        return None
    if "forward" in vars(model):
        return _signature_of.__wrapped__(model.forward)  # not remembered: it may hold the model
    unbound = _signature_of(type(model).forward)
    parameters = [] if unbound is None else list(unbound.parameters.values())
    return unbound and unbound.replace(parameters=parameters[1:])


@lru_cache(maxsize=64)
def _signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _iterable(inputs: object) -> Iterable[object]:
    if isinstance(inputs, Dataset):
        raise InvalidType(
            f"inputs is a data set ({type(inputs).__name__}) of examples; wrap it in a DataLoader"
        )
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise InvalidType(
            f"inputs must be a tensor, an array, a tuple or dict of the model's arguments, or an iterable of batches,"
            f" got {type(inputs).__name__}"
        )
    return inputs


def _warn_of_order(inputs: object) -> None:
    """A loader that was made for training: its examples come in an order of their own, or not all of them."""
    if not isinstance(inputs, DataLoader):
        return
    if isinstance(inputs.sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        what = "shuffles, so the predictions are not in the order of the data set and fit no targets in that order"
    elif inputs.drop_last and inputs.batch_size and _length(inputs.sampler) % inputs.batch_size:
        what = f"leaves out the last {_length(inputs.sampler) % inputs.batch_size} examples (drop_last=True)"
    else:
        return
    warnings.warn(
        f"the loader {what}; give one with shuffle=False and drop_last=False", UserWarning, stacklevel=5
    )


def _length(sampler: object) -> int:
    return len(sampler) if isinstance(sampler, Sized) else 0


def _split(batch: Batch, batch_size: int | None) -> Iterator[Batch]:
    size = batch.size()
    if not batch_size or not size:
        return iter([batch])
    starts = range(0, size, batch_size)
    return (_part(batch, size, start, start + batch_size) for start in starts)


def _part(batch: Batch, size: int, start: int, end: int) -> Batch:
    """The examples from `start` to `end`; tensors of another length (a mask for all) stay as they are."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:end] if _has(tensor, size) else tensor

    return replace(batch.map(cut), target=_mapped(batch.target, cut))


def _has(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _collect(value: object, found: list[Tensor]) -> None:
    """Adds the tensors in the value to those found so far."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _collect(item, found)


def _mapped(value: object, change: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)  # type: ignore[call-arg,attr-defined]
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value
