"""The networks of the paper, at the paper's sizes, ResNet-20, and their MC-dropout variants (`dropout=p`)."""

from credo.models.feedforward import MLP, AlexNet, LeNet5
from credo.models.parts import xavier_normal_
from credo.models.resnet import ResNet18, ResNet20

__all__ = ["MLP", "LeNet5", "AlexNet", "ResNet18", "ResNet20", "xavier_normal_"]
