"""LeNet-5 as the paper trains it on CIFAR-10: ReLU, max-pooling, biases; 62,006 parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.models.arguments import dropout_layer, positive_int


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
