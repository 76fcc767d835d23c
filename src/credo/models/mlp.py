"""A multilayer perceptron; (784, 100, 100, 10) is the paper's network for permuted MNIST."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from credo.errors import InvalidValue
from credo.models.parts import dropout_layer
from credo.validate import positive_int


class MLP(nn.Module):
    """Fully connected layers of the given `sizes`, inputs first and logits last, ReLU between them.

    Inputs of any shape are flattened to (M, sizes[0]). Dropout acts on every layer but the last,
    before its ReLU.
    """

    def __init__(self, sizes: Sequence[int] = (784, 100, 100, 10), *, dropout: float = 0.0) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise InvalidValue(f"sizes={tuple(sizes)!r} is too short; give at least (inputs, outputs)")
        sizes = [positive_int(f"sizes[{i}]", size) for i, size in enumerate(sizes)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.relu(self.dropout(layer(x)))
        logits: Tensor = last(x)
        return logits
