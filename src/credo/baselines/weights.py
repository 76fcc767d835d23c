"""Which parameters of a model have a spread, by name."""

from torch import Tensor, nn

from credo.optim.groups import parameter_groups


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters in the order of the model; an error where credo's optimisers raise one."""
    asked = {name for group in parameter_groups(model) for name, _ in group["params"]}
    return {name: p for name, p in model.named_parameters() if name in asked}


def uncertain(model: nn.Module) -> list[str]:
    """All of these but the weights of normalisation layers."""
    groups = [group for group in parameter_groups(model) if not group.get("deterministic")]
    asked = {name for group in groups for name, _ in group["params"]}
    return [name for name in trainable(model) if name in asked]
