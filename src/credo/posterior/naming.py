"""The model's names for the tensors of a posterior, where the two were named from different places.

A posterior has the names that the optimiser was given. The model at hand may hold the same network inside a wrapper
(`module.`), or without the wrapper it was trained in; and an optimiser that was given `model.parameters()` knows
numbers only. Names are matched where there is one way to do it; where there are several, or none, it is an error.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from credo.errors import InvalidValue

WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before every name
NUMBERED = re.compile(r"parameter_(\d+)")
REMEDY = "build the optimiser with the module, credo.VOGN(model, ...), or with model.named_parameters()"


class Names:
    """`own(name)` is the model's name for a posterior's, also for buffers."""

    def __init__(self, mean: Mapping[str, Tensor], model: Mapping[str, Tensor], module: nn.Module) -> None:
        self._model = model
        self._rename: Callable[[str], str] = self._unwrapped
        self._numbers: dict[str, str] = {}
        if all(self._unwrapped(name) in model for name in mean):
            return
        if all(NUMBERED.fullmatch(name) for name in mean):
            self._numbers = _by_number(mean, model, [name for name, _ in module.named_parameters()])
        else:
            self._rename = _by_prefix(mean, model) or self._unwrapped

    def own(self, name: str) -> str:
        return self._numbers.get(name) or self._rename(name)

    def _unwrapped(self, name: str) -> str:
        while name not in self._model:
            prefix = next((p for p in WRAPPERS if name.startswith(p)), None)
            if prefix is None:
                break
            name = name.removeprefix(prefix)
        return name


def _by_prefix(mean: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> Callable[[str], str] | None:
    """One prefix to add to all names, or to take from all, so that all of them fit."""
    first = next(iter(mean))
    longer = [name.removesuffix(first) for name in model if name.endswith(f".{first}")]
    parts = first.split(".")
    shorter = [".".join(parts[:k]) + "." for k in range(1, len(parts))]
    ways = {f"{prefix}…": partial(_with, prefix) for prefix in longer}
    for prefix in shorter:
        if all(name.startswith(prefix) for name in mean):
            ways[f"without {prefix}"] = partial(_without, prefix)
    fitting = {what: way for what, way in ways.items() if _fits({n: way(n) for n in mean}, mean, model)}
    if len(fitting) > 1:
        same = [what for what, way in fitting.items() if _same_values({n: way(n) for n in mean}, mean, model)]
        fitting = {what: fitting[what] for what in same} if len(same) == 1 else fitting
    if len(fitting) > 1:
        raise InvalidValue(
            f"the posterior does not name its place in the model: {first!r} fits"
            f" {', '.join(list(fitting)[:3])}; {REMEDY}, of the model that predicts"
        )
    return next(iter(fitting.values()), None)


def _with(prefix: str, name: str) -> str:
    return prefix + name


def _without(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)


def _by_number(
    mean: Mapping[str, Tensor], model: Mapping[str, Tensor], parameters: list[str]
) -> dict[str, str]:
    """parameter_k: by the values, if the model still has them, else as the k-th of the model's parameters."""
    found = _by_value(mean, model, parameters)
    if found is not None:
        return found
    trainable = [name for name in parameters if model[name].requires_grad]
    numbers = {name: int(name.removeprefix("parameter_")) for name in mean}
    for rows, covered in ((parameters, parameters), (parameters, trainable), (trainable, trainable)):
        if sorted(numbers.values()) == [rows.index(name) for name in covered]:
            names = {name: rows[k] for name, k in numbers.items()}
            if _fits(names, mean, model):
                return names
    raise InvalidValue(
        f"the posterior has no names, only {', '.join(list(mean)[:2])} … ({len(mean)} tensors), and they do not fit the"
        f" model's {len(parameters)} parameters ({len(trainable)} trainable) in their order; {REMEDY}"
    )


def _by_value(
    mean: Mapping[str, Tensor], model: Mapping[str, Tensor], parameters: list[str]
) -> dict[str, str] | None:
    """Each tensor the one parameter that equals it, bit for bit; None unless that is so for all."""
    names: dict[str, str] = {}
    for name, tensor in mean.items():
        equal = [own for own in parameters if _equal(tensor, model[own])]
        if len(equal) != 1:
            return None
        names[name] = equal[0]
    return names if len(set(names.values())) == len(names) else None


def _fits(names: Mapping[str, str], mean: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> bool:
    return all(own in model and model[own].shape == mean[name].shape for name, own in names.items())


def _same_values(names: Mapping[str, str], mean: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> bool:
    return all(_equal(mean[name], model[own]) for name, own in names.items())


def _equal(tensor: Tensor, own: Tensor) -> bool:
    return tensor.shape == own.shape and torch.equal(tensor, own.detach().to(tensor.device, tensor.dtype))
