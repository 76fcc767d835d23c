"""The networks of the paper, at the paper's sizes, and their MC-dropout variants (`dropout=p`)."""

from credo.models.alexnet import AlexNet
from credo.models.initialise import xavier_normal_
from credo.models.lenet import LeNet5
from credo.models.mlp import MLP
from credo.models.resnet import ResNet18

__all__ = ["MLP", "LeNet5", "AlexNet", "ResNet18", "xavier_normal_"]
