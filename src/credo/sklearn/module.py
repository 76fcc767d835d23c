"""The module of an estimator: scaling of inputs and targets around a network, as buffers.

It takes features in their own units and answers in the targets' own units. So it can be predicted with, saved and
exported by itself; the posterior of its network carries the buffers.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import final

import torch
from torch import Tensor, nn

from credo.errors import InvalidType, InvalidValue
from credo.models import MLP
from credo.posterior.model_copy import preserve_rng

# (number of features, number of outputs) → a network
Build = Callable[[int, int], nn.Module]


class Scaled(nn.Module):
    """A network of standardised features."""

    center: Tensor  # (features,)
    scale: Tensor

    def __init__(self, net: nn.Module, features: Tensor):
        """`features`: (examples, features), from which centre and scale are taken."""
        super().__init__()
        self.net = net
        center, scale = location_and_scale(features)
        self.register_buffer("center", center)
        self.register_buffer("scale", scale)

    def standardised(self, features: Tensor) -> Tensor:
        return (features - self.center) / self.scale


@final
class Classes(Scaled):
    """Logits (M, C) of features in their own units."""

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.net(self.standardised(features))
        return logits


@final
class Values(Scaled):
    """(mean, log variance) of the target, both (M,), in the target's own units.

    The network answers for standardised targets: one number, beside which `log_noise` is one variance for all, or two,
    of which the second is the log variance at this input.
    """

    target_center: Tensor  # ()
    target_scale: Tensor
    log_noise: Tensor  # log σ² of a standardised target

    def __init__(self, net: nn.Module, features: Tensor, targets: Tensor, per_input: bool):
        super().__init__(net, features)
        center, scale = location_and_scale(targets[:, None])
        self.register_buffer("target_center", center[0])
        self.register_buffer("target_scale", scale[0])
        self.register_buffer("log_noise", torch.zeros_like(scale[0]))
        self.per_input = per_input

    def standardised_targets(self, targets: Tensor) -> Tensor:
        return (targets - self.target_center) / self.target_scale

    def answers(self, standardised: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the standardised target."""
        out: Tensor = self.net(standardised)
        if self.per_input:
            return out[:, 0], out[:, 1] + self.log_noise
        mean = out.squeeze(1) if out.dim() == 2 else out
        return mean, self.log_noise.expand_as(mean)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.answers(self.standardised(features))
        return (
            mean * self.target_scale + self.target_center,
            log_variance + 2 * self.target_scale.log(),
        )


def location_and_scale(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column; 1 for a column that is constant."""
    center = columns.mean(0)
    scale = columns.std(0, correction=0)
    constant = scale <= 1e-12 * (1 + center.abs())
    return center, scale.masked_fill(constant, 1.0)


def network(module: object, sizes: tuple[int, ...], features: int, outputs: int, seed: int) -> nn.Module:
    """The default MLP in float64, a copy of the given module, or what a function builds; no global stream is used."""
    with preserve_rng(seed, None), torch.enable_grad():
        if module is None:
            return MLP((features, *sizes, outputs)).double()
        if isinstance(module, nn.Module):
            return deepcopy(module)
        if callable(module):
            built = module(features, outputs)
            if isinstance(built, nn.Module):
                return built
            raise InvalidType(f"module built a {type(built).__name__}; it must return a torch.nn.Module")
    raise InvalidType(
        f"module must be a torch.nn.Module, a function of (features, outputs) that builds one, or None for an MLP, got "
        f"{module!r:.80}"
    )


def check_outputs(module: nn.Module, row: Tensor, outputs: int) -> None:
    """What the network answers to one example, before it is trained."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            answer = module(row)
    finally:
        module.train(was_training)
    shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    allowed = [(len(row), outputs)] + ([(len(row),)] if outputs == 1 else [])
    if shape not in allowed:
        raise InvalidValue(
            f"the module answers {len(row)} examples with {shape}; this estimator needs {allowed[0]}. module may be a "
            "function of (features, outputs) that builds one that fits"
        )


def dtype_of(module: nn.Module) -> torch.dtype:
    """Of its weights; features and targets are converted to it."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float64)
