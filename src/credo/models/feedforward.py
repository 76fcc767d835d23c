"""Networks without shortcuts, as the paper trains them: MLP, LeNet-5 and AlexNet; ReLU, biases, no BatchNorm.

For 32×32 images and 10 classes LeNet-5 has 62,006 parameters and AlexNet 2,472,266. The MLP (784, 100, 100, 10) is the
paper's network for permuted MNIST.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
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


class LeNet5(nn.Module):
    """conv 6@5, pool 2, conv 16@5, pool 2, fc 120, 84, `num_classes`.

    `image_size` is the side of the square input; 28 (MNIST) leaves maps of 4 for the first fc, 32 leaves 5.
    Dropout acts on every convolution and fc but the last, before its ReLU. The paper's released code also
    drops logits here, though not in its AlexNet; a logit set to zero is a vote, not a missing one,
    so no model of ours does.
    """

    def __init__(
        self, num_classes: int = 10, *, in_channels: int = 3, image_size: int = 32, dropout: float = 0.0
    ) -> None:
        super().__init__()
        side = ((positive_int("image_size", image_size, at_least=16) - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(positive_int("in_channels", in_channels), 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, positive_int("num_classes", num_classes))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.dropout(self.conv1(x))), 2)
        x = F.max_pool2d(torch.relu(self.dropout(self.conv2(x))), 2)
        x = x.flatten(1)
        x = torch.relu(self.dropout(self.fc1(x)))
        x = torch.relu(self.dropout(self.fc2(x)))
        logits: Tensor = self.fc3(x)
        return logits


class AlexNet(nn.Module):
    """conv 64@11 stride 4, pool 2, 192@5, pool 2, 384@3, 256@3, 256@3, pool 2, fc `num_classes`.

    `width` is the 64 of the first convolution; the others keep their proportions to it.
    The three pools leave one pixel of a 32×32 image, which is what the fc expects.
    Dropout acts on every convolution, before its ReLU; the fc is the last layer and has none.
    """

    def __init__(
        self, num_classes: int = 10, *, in_channels: int = 3, width: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        width = positive_int("width", width)
        self.conv1 = nn.Conv2d(positive_int("in_channels", in_channels), width, 11, stride=4, padding=5)
        self.conv2 = nn.Conv2d(width, 3 * width, 5, padding=2)
        self.conv3 = nn.Conv2d(3 * width, 6 * width, 3, padding=1)
        self.conv4 = nn.Conv2d(6 * width, 4 * width, 3, padding=1)
        self.conv5 = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        self.fc = nn.Linear(4 * width, positive_int("num_classes", num_classes))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.dropout(self.conv1(x))), 2)  # maps of 8 → 4
        x = F.max_pool2d(torch.relu(self.dropout(self.conv2(x))), 2)  # 4 → 2
        x = torch.relu(self.dropout(self.conv3(x)))
        x = torch.relu(self.dropout(self.conv4(x)))
        x = F.max_pool2d(torch.relu(self.dropout(self.conv5(x))), 2)  # 2 → 1
        logits: Tensor = self.fc(x.flatten(1))
        return logits
