"""ResNet-18 with the ImageNet stem, which the paper also uses on CIFAR-10, or with a 3×3 stem; and ResNet-20.

Names in ResNet-18's state dict are those of torchvision's ResNet-18, so that its weights load where shapes agree.
"""

from collections import OrderedDict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.errors import InvalidValue
from credo.models.parts import dropout_layer, dropout_rate
from credo.validate import positive_int

Stem = Literal["imagenet", "cifar"]


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)), dropout between every conv and its bn."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        bias = not batch_norm
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=bias)
        self.bn1 = normalisation(outputs, batch_norm)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.bn2 = normalisation(outputs, batch_norm)
        self.downsample = shortcut(inputs, outputs, stride, dropout, batch_norm)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.dropout(self.conv1(x))))
        out = self.bn2(self.dropout(self.conv2(out)))
        return torch.relu(out + self.downsample(x))


class ResNet18(nn.Module):
    """Four stages of two blocks, of `width`, 2, 4 and 8 times `width` channels, BatchNorm after every conv.

    `stem="imagenet"`: 7×7 stride 2 and a max-pool, 11,181,642 parameters for 10 classes, also on 32×32 images
    in the paper. `stem="cifar"`: 3×3 stride 1 and no pool, today's choice for 32×32 images:
    slower, more accurate. `width=16` is a size two CPU cores can train. `batch_norm=False` leaves BatchNorm out
    and gives the convolutions biases, to see what it is worth.
    """

    def __init__(
        self,
        num_classes: int = 10,
        *,
        stem: Stem = "imagenet",
        width: int = 64,
        in_channels: int = 3,
        dropout: float = 0.0,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        width, dropout = positive_int("width", width), dropout_rate(dropout)
        self.stem: Stem = stem
        self.conv1 = stem_convolution(stem, positive_int("in_channels", in_channels), width, not batch_norm)
        self.bn1 = normalisation(width, batch_norm)
        self.layer1 = stage(width, width, 1, dropout, batch_norm)
        self.layer2 = stage(width, 2 * width, 2, dropout, batch_norm)
        self.layer3 = stage(2 * width, 4 * width, 2, dropout, batch_norm)
        self.layer4 = stage(4 * width, 8 * width, 2, dropout, batch_norm)
        self.fc = nn.Linear(8 * width, positive_int("num_classes", num_classes))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.dropout(self.conv1(x))))
        if self.stem == "imagenet":
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        logits: Tensor = self.fc(x)
        return logits


class ResNet20(nn.Module):
    """He et al. 2016 for 32×32 images: a 3×3 stem, three stages of three blocks of `width`, 2 and 4 times `width`.

    272,474 parameters for 10 classes. A shortcut that changes its shape is a 1×1 convolution with BatchNorm.
    """

    def __init__(
        self, num_classes: int = 10, *, width: int = 16, in_channels: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        width, dropout = positive_int("width", width), dropout_rate(dropout)
        self.conv1 = nn.Conv2d(positive_int("in_channels", in_channels), width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(width, width, 1, dropout, True, blocks=3)
        self.layer2 = stage(width, 2 * width, 2, dropout, True, blocks=3)
        self.layer3 = stage(2 * width, 4 * width, 2, dropout, True, blocks=3)
        self.fc = nn.Linear(4 * width, positive_int("num_classes", num_classes))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.dropout(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        logits: Tensor = self.fc(x)
        return logits


def stem_convolution(stem: Stem, inputs: int, width: int, bias: bool) -> nn.Conv2d:
    if stem == "imagenet":
        return nn.Conv2d(inputs, width, 7, stride=2, padding=3, bias=bias)
    if stem == "cifar":
        return nn.Conv2d(inputs, width, 3, padding=1, bias=bias)
    raise InvalidValue(f"stem={stem!r} is unknown; give 'imagenet' (7×7, stride 2, pool) or 'cifar' (3×3)")


def normalisation(channels: int, batch_norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if batch_norm else nn.Identity()


def stage(
    inputs: int, outputs: int, stride: int, dropout: float, batch_norm: bool, blocks: int = 2
) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(inputs, outputs, stride, dropout, batch_norm),
        *(BasicBlock(outputs, outputs, 1, dropout, batch_norm) for _ in range(blocks - 1)),
    )


def shortcut(inputs: int, outputs: int, stride: int, dropout: float, batch_norm: bool) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=not batch_norm)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["0"] = conv
    layers["dropout"] = dropout_layer(dropout)  # a name, so that conv and bn keep torchvision's numbers
    layers["1"] = normalisation(outputs, batch_norm)
    return nn.Sequential(layers)
