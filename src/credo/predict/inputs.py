"""What one call of the model gets, from what a user has: a tensor, arguments, or a loader.

| `inputs` | is |
|---|---|
| a tensor | one batch: `model(x)` |
| a tuple | one batch of several arguments: `model(*inputs)` |
| a mapping | one batch of named arguments without the labels: `model(**inputs)` |
| any other iterable (loader, list, generator) | batches |

A batch of an iterable is a tensor, a mapping, or a tuple or list `(x,)` or `(x, y)`: y is left out, and x is
again any of the first three. Longer ones are refused, since which part is a label cannot be known.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Dataset

from credo.errors import InvalidType, InvalidValue

LABELS = frozenset({"label", "labels", "label_ids", "target", "targets"})


@dataclass(frozen=True)
class Batch:
    """The arguments of one call; tensors among them may also sit inside tuples, lists and mappings."""

    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        return [*_found(self.args), *_found(self.kwargs)]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        args = tuple(_mapped(arg, change) for arg in self.args)
        return Batch(args, {name: _mapped(arg, change) for name, arg in self.kwargs.items()})

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


def batches(
    inputs: object, batch_size: int | None, device: torch.device | None, parts: int = 1
) -> Iterator[Batch]:
    """Every batch, on the model's device; a single one without a batch_size in so many parts."""
    whole = _single(inputs)
    if whole is None:
        if batch_size is not None:
            raise InvalidValue("batch_size splits a tensor, tuple or mapping; a loader comes with its own")
        found: Iterable[Batch] = map(_unpacked, _iterable(inputs))
    else:
        found = _split(whole, batch_size or (-(-(whole.size() or 0) // parts) if parts > 1 else None))
    for batch in found:
        yield batch if device is None else batch.map(lambda tensor: tensor.to(device))


def _single(value: object) -> Batch | None:
    if isinstance(value, Tensor):
        return Batch((value,))
    if isinstance(value, Mapping):
        return Batch((), {str(name): arg for name, arg in value.items() if name not in LABELS})
    if isinstance(value, tuple):
        return Batch(tuple(value))
    return None


def _unpacked(batch: object) -> Batch:
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise InvalidType(
                f"a batch is a {type(batch).__name__} of {len(batch)}: which are inputs? yield x, (x, y),"
                " ((x1, x2), y) or a dict of the model's arguments"
            )
        first = batch[0]
        batch = tuple(first) if isinstance(first, list) else first
    single = _single(batch)
    if single is None:
        raise InvalidType(
            f"a batch holds {type(batch).__name__} where a tensor, a tuple or a dict is expected"
        )
    return single


def _iterable(inputs: object) -> Iterable[object]:
    if isinstance(inputs, Dataset):
        raise InvalidType(
            f"inputs is a data set ({type(inputs).__name__}) of examples; wrap it in a DataLoader"
        )
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable) or hasattr(inputs, "__array__"):
        raise InvalidType(
            f"inputs must be a tensor, a tuple or dict of the model's arguments, or an iterable of batches,"
            f" got {type(inputs).__name__}"
        )
    return inputs


def _split(batch: Batch, batch_size: int | None) -> Iterator[Batch]:
    size = batch.size()
    if not batch_size or not size:
        return iter([batch])
    starts = range(0, size, batch_size)
    return (_part(batch, size, start, start + batch_size) for start in starts)


def _part(batch: Batch, size: int, start: int, end: int) -> Batch:
    """The examples from `start` to `end`; tensors of another length (a mask for all) stay as they are."""
    return batch.map(lambda tensor: tensor[start:end] if _has(tensor, size) else tensor)


def _has(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _found(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _found(item)


def _mapped(value: object, change: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)  # type: ignore[call-arg,attr-defined]
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value
