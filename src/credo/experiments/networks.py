"""Models by name, cut to the data: classes, channels and image size follow from the examples."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Final

from torch import nn

from credo.errors import InvalidType
from credo.experiments.methods import checked_options
from credo.experiments.names import known
from credo.experiments.recipe import Setting, Training
from credo.models import MLP, AlexNet, LeNet5, ResNet18, ResNet20, xavier_normal_

Shape = tuple[int, ...]  # of one example


def lenet5(shape: Shape, outputs: int, *, dropout: float = 0.0) -> nn.Module:
    return LeNet5(outputs, in_channels=shape[0], image_size=shape[-1], dropout=dropout)


def alexnet(shape: Shape, outputs: int, *, width: int = 64, dropout: float = 0.0) -> nn.Module:
    return AlexNet(outputs, in_channels=shape[0], width=width, dropout=dropout)


def resnet18(
    shape: Shape,
    outputs: int,
    *,
    width: int = 64,
    stem: str = "cifar",
    dropout: float = 0.0,
    batch_norm: bool = True,
) -> nn.Module:
    channels = shape[0]
    return ResNet18(
        outputs,
        stem=stem,  # type: ignore[arg-type]
        width=width,
        in_channels=channels,
        dropout=dropout,
        batch_norm=batch_norm,
    )


def resnet20(shape: Shape, outputs: int, *, width: int = 16, dropout: float = 0.0) -> nn.Module:
    return ResNet20(outputs, width=width, in_channels=shape[0], dropout=dropout)


def mlp(shape: Shape, outputs: int, *, width: int = 100, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """`layers` hidden layers of `width` units; images are flattened."""
    return MLP((math.prod(shape), *[width] * layers, outputs), dropout=dropout)


NETWORKS: Final[dict[str, Callable[..., nn.Module]]] = {
    "lenet5": lenet5,
    "alexnet": alexnet,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "mlp": mlp,
}
# xavier-normal initialisation, as in the released code; and how many outputs, if not one for each class of the data
FOR_ALL: Final[Mapping[str, Setting]] = {"xavier": False, "num_classes": 0}


def options_of(name: str) -> dict[str, object]:
    """The options of a registered model, with their defaults."""
    parameters = inspect.signature(NETWORKS[known("model", name, NETWORKS)]).parameters
    return {**{k: p.default for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}, **FOR_ALL}


def build_model(training: Training, shape: Shape, outputs: int) -> nn.Module:
    """Weights come from torch's global generator, which the caller has forked and seeded."""
    if isinstance(training.model, str):
        options = checked_options("model_options", training.model_options, options_of(training.model))
        xavier, classes = options.pop("xavier", False), options.pop("num_classes", 0)
        model = NETWORKS[training.model](shape, classes or outputs, **options)
        if xavier:
            xavier_normal_(model)
        return model
    built: object = training.model(**training.model_options)
    if not isinstance(built, nn.Module):
        raise InvalidType(f"model must return a torch.nn.Module, got {type(built).__name__}.")
    return built
