"""From whatever a model returns to the tensors a task needs, or an error that says what it should return."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from credo.errors import InvalidType, InvalidValue

Outputs: TypeAlias = tuple[Tensor, ...]
Read: TypeAlias = Callable[[object], Outputs]


def logits(output: object) -> Outputs:
    tensor = _tensor(output)
    if tensor.dim() != 2:
        raise InvalidValue(
            f"a classifier must return logits of shape (examples, classes), got {tuple(tensor.shape)};"
            " reshape inside the model, or use task='regression'"
        )
    if tensor.shape[1] < 2:
        raise InvalidValue(
            "a classifier with one output has a softmax of 1 for every input; return two logits,"
            " for instance torch.cat([torch.zeros_like(z), z], dim=1)"
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
    return mean, log_variance.expand(mean.shape)


def _tensor(output: object) -> Tensor:
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise InvalidType(
            f"the model returned {type(output).__name__}; it must return a tensor, or something with .logits"
        )
    return output


def _with_examples(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        raise InvalidValue(
            "the model returned a single number; its output needs the examples' dimension first"
        )
    return tensor
