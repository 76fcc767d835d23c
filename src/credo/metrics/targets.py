"""Targets beside outputs of more than two dimensions: shapes compared, positions laid out as rows."""

import math

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue
from credo.predict.inputs import as_tensor

IGNORED = -100  # torch's cross_entropy leaves such targets out by default


def tensor_of(targets: object, device: torch.device) -> Tensor:
    """Targets as a tensor, from an array or a list of numbers too."""
    if targets is None:
        raise InvalidType("targets is None; give one for every example")
    found = targets if isinstance(targets, Tensor) else as_tensor(targets, "targets")
    return found.detach().to(device)


def class_rows(
    values: Tensor, targets: object, ignore_index: int | None = IGNORED
) -> tuple[Tensor, Tensor, Tensor]:
    """(M, …, K) values as rows (N, K), their classes (N,), and which of the M·… places they are.

    For two classes also what losses of one logit take: True and False, 0. and 1., and a dimension of size one.
    """
    wanted, given = values.shape[:-1], tensor_of(targets, values.device)
    if values.shape[-1] == 2:
        given = _as_classes(given, wanted)
    if given.is_floating_point() or given.dtype is torch.bool:
        raise InvalidType(f"targets is a tensor of {given.dtype}; give an integer tensor of class indices")
    if given.shape != wanted:
        raise InvalidValue(
            f"targets has shape {tuple(given.shape)}; give {tuple(wanted)}, a class index for each row of probs"
            f"{_other_layout(values, given)}. For one-hot rows: targets.argmax of the dimension of the classes"
        )
    given = given.reshape(-1).long()
    kept = given != ignore_index if ignore_index is not None else torch.ones_like(given, dtype=torch.bool)
    classes, known = given[kept], values.shape[-1]
    outside = classes[(classes < 0) | (classes >= known)]
    if len(outside):
        raise InvalidValue(f"targets has the class {int(outside[0])}; probs has classes 0 to {known - 1}")
    return values.reshape(-1, known)[kept], classes, kept


def label_targets(like: Tensor, targets: object) -> Tensor:
    """Zeros and ones in the shape of the labels' probabilities."""
    given = tensor_of(targets, like.device)
    if given.shape != like.shape:
        raise InvalidValue(
            f"targets has shape {tuple(given.shape)}; task='multilabel' needs {tuple(like.shape)},"
            " a 0 or 1 for each label"
        )
    return _zeros_and_ones(given, "task='multilabel'").to(like.dtype)


def value_targets(like: Tensor, targets: object) -> Tensor:
    """Values in the shape of the predicted mean. (N,) and (N, 1) are the same; nothing else is broadcast."""
    given = tensor_of(targets, like.device)
    if given.is_complex() or given.dtype is torch.bool:
        raise InvalidType(f"targets is a tensor of {given.dtype}; regression has real numbers")
    if given.shape != like.shape and {tuple(given.shape), tuple(like.shape)} != {
        (len(like),),
        (len(like), 1),
    }:
        raise InvalidValue(
            f"targets has shape {tuple(given.shape)} and the predicted mean {tuple(like.shape)}; give one for each"
        )
    return given.reshape(like.shape).double()


def _zeros_and_ones(targets: Tensor, task: str) -> Tensor:
    wrong = targets[(targets != 0) & (targets != 1)]
    if len(wrong):
        raise InvalidValue(f"targets has the value {wrong.flatten()[0].item():g}; {task} has 0 and 1")
    return targets


def _as_classes(targets: Tensor, wanted: torch.Size) -> Tensor:
    if targets.is_floating_point() or targets.dtype is torch.bool:
        targets = _zeros_and_ones(targets, "a problem of two classes").long()
    longer = targets.dim() == len(wanted) + 1 and targets.numel() == math.prod(wanted)
    return (
        targets.reshape(wanted)
        if longer and _without_ones(targets.shape) == _without_ones(wanted)
        else targets
    )


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]


def _other_layout(values: Tensor, targets: Tensor) -> str:
    """A remedy, if the targets fit another dimension of classes."""
    for place in range(1, values.dim()):
        others = [size for k, size in enumerate(values.shape) if k != place]
        if list(targets.shape) == others and place != values.dim() - 1:
            return "; they fit an output with its classes in another dimension: predict(..., class_dim=...)"
    return ""
