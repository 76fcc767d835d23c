"""Starting points other than torch's own."""

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd


def xavier_normal_(model: nn.Module, gain: float = 1.0, generator: torch.Generator | None = None) -> None:
    """Draw every convolution and fc weight from N(0, 2·gain²/(fan_in + fan_out)), set their biases to zero.

    Normalisation layers keep weight 1 and bias 0. Without a `generator` the global one is used, as by torch.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd)):
            nn.init.xavier_normal_(module.weight, gain, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
