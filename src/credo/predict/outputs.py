"""From whatever a model returns to the tensors a task needs, or an error that says what it should return.

Logits arrive as the model lays them out and leave with their classes in the last dimension.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue

Outputs: TypeAlias = tuple[Tensor, ...]
Read: TypeAlias = Callable[[object], Outputs]


def class_place(dims: int, class_dim: int | None) -> int:
    """Which dimension of an output with so many holds the classes, counted from 0.

    By default: (B, C) and (B, C, H, W), and all with more dimensions, have them second, as torch's cross_entropy does;
    (B, T, C) has them last, as sequence models return them.
    """
    if class_dim is None:
        return 2 if dims == 3 else 1
    place = class_dim + dims if class_dim < 0 else class_dim
    if not 0 < place < dims:
        raise InvalidValue(
            f"class_dim={class_dim} is no dimension of classes in an output of {dims} dimensions; dimension 0 counts"
            f" the examples, so give one of 1 … {dims - 1}, or a negative one from the end"
        )
    return place


def logits(output: object, class_dim: int | None = None) -> Outputs:
    """(B, …, C)."""
    tensor = _tensor(output)
    if tensor.dim() < 2:
        raise InvalidValue(
            f"a classifier must return logits of shape (examples, classes), (examples, positions, classes) or"
            f" (examples, classes, height, width), got {tuple(tensor.shape)}; one logit an example is"
            " task='binary', values are task='regression'"
        )
    place = class_place(tensor.dim(), class_dim)
    if tensor.shape[place] < 2:
        raise InvalidValue(
            f"the model returned {tuple(tensor.shape)}, with {tensor.shape[place]} classes in dimension {place}, and a"
            " softmax over one class is 1 for every input; one logit is task='binary', otherwise return two logits or"
            " name the dimension of the classes: class_dim=..."
        )
    return (tensor.movedim(place, -1),)


def single_logits(output: object, class_dim: int | None = None) -> Outputs:
    """(B, …, 2): the logits 0 and z of the two classes, whose softmax is 1 − sigmoid(z) and sigmoid(z)."""
    tensor = _with_examples(_tensor(output))
    if tensor.dim() > 1:
        place = class_place(tensor.dim(), class_dim)
        if tensor.shape[place] != 1:
            raise InvalidValue(
                f"task='binary' is one logit an example, (B,) or (B, 1), or a place, (B, 1, H, W) or (B, T, 1); the"
                f" model returned {tuple(tensor.shape)}, with {tensor.shape[place]} in dimension {place}. Two logits"
                " are task='classification', several labels task='multilabel'; class_dim=... names another dimension"
            )
        tensor = tensor.movedim(place, -1).squeeze(-1)
    return (torch.stack([torch.zeros_like(tensor), tensor], -1),)


def label_logits(output: object) -> Outputs:
    tensor = _with_examples(_tensor(output))
    if tensor.dim() < 2:
        raise InvalidValue(
            f"task='multilabel' is a logit for each label, (examples, labels, …), got {tuple(tensor.shape)};"
            " one logit an example is task='binary'"
        )
    return (tensor,)


def values(output: object) -> Outputs:
    return (_with_examples(_tensor(output)),)


def values_and_log_variances(output: object) -> Outputs:
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise InvalidType(
            f"with noise='model' the model must return (mean, log_variance), got {type(output).__name__}"
        )
    mean, log_variance = _with_examples(_tensor(output[0])), _tensor(output[1])
    try:
        return mean, log_variance.expand(mean.shape)
    except RuntimeError as error:
        raise InvalidValue(
            f"with noise='model' the model returned a mean of shape {tuple(mean.shape)} and a log_variance of shape"
            f" {tuple(log_variance.shape)}, which does not broadcast to it"
        ) from error


def _tensor(output: object) -> Tensor:
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise InvalidType(
            f"the model returned {type(output).__name__}; it must return a tensor, or something with .logits"
        )
    if not output.is_floating_point():
        raise InvalidType(
            f"the model returned a tensor of {output.dtype}; logits and values are floating-point"
        )
    return output


def _with_examples(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        raise InvalidValue(
            "the model returned a single number; its output needs the examples' dimension first"
        )
    return tensor
