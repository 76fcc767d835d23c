"""What the networks share: dropout, and starting points other than torch's own."""

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from credo.errors import InvalidType, InvalidValue


def dropout_rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"dropout={value!r} is a {type(value).__name__}; give a number, 0 <= p < 1")
    if not 0 <= value < 1:
        raise InvalidValue(f"dropout={value} is outside 0 <= p < 1; 0 is none, the paper uses 0.1")
    return float(value)


def dropout_layer(rate: object) -> nn.Module:
    """Of rate 0 it is none: a layer that does nothing still costs a call, and more where calls are watched."""
    checked = dropout_rate(rate)
    return nn.Dropout(checked) if checked else nn.Identity()


def xavier_normal_(model: nn.Module, gain: float = 1.0, generator: torch.Generator | None = None) -> None:
    """Draw every convolution and fc weight from N(0, 2·gain²/(fan_in + fan_out)), set their biases to zero.

    Normalisation layers keep weight 1 and bias 0. Without a `generator` the global one is used, as by torch.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd)):
            nn.init.xavier_normal_(module.weight, gain, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
