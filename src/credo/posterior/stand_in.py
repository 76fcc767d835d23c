"""A private double of a model, in eval mode, whose weights can be set while the model is never touched.

`torch.func.functional_call` swaps the weights inside the model for the time of a call, and `model.eval()`
flips its flags: another thread, a hook or an interrupt can see either. The double has module objects of its
own and shares the parameters' memory, so making it costs microseconds a module and no copy of the weights.
"""

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from credo.errors import CallOrderError, InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior.arguments import SHOWN
from credo.posterior.buffers import untrained_statistics
from credo.posterior.double import Doubles
from credo.posterior.naming import Names

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class StandIn:
    """`stand_in.module` is called like the model; `load` sets some or all of its parameters and buffers.

    Training flags are False, buffers are copies, hooks are the model's own. A compiled or parallel wrapper is
    taken off: its double is that of the model inside.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = unwrapped(model)
        _refuse_what_cannot_be_doubled(inner)
        doubles = Doubles(inner)
        self.module: nn.Module = doubles.root
        self._inner, self.like = inner, _named(inner)
        self._names = Names({}, self.like, inner)
        self._slots = {name: doubles.slots[id(tensor)] for name, tensor in self.like.items()}
        self._first = {name: slots[0][0][slots[0][1]] for name, slots in self._slots.items()}

    def check(self, mean: Mapping[str, Tensor]) -> None:
        """Find the model's names for a posterior's; refuse names it lacks and shapes that differ.

        What the posterior lacks stays the model's.
        """
        found = Names(mean, self.like, self._inner)
        wrong = []
        for name, tensor in mean.items():
            own = self.like.get(found.own(name))
            if own is None:
                wrong.append(f"the model has no {name!r}")
            elif own.shape != tensor.shape:
                wrong.append(
                    f"{name!r} is {tuple(tensor.shape)} in the posterior, {tuple(own.shape)} in the model"
                )
        _refuse(wrong, "build the model exactly as it was trained")
        self._names = found

    def take_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Have a posterior's buffers instead of the model's own; after `check`."""
        if not buffers:
            self._warn_of_untrained_statistics()
            return
        named = {self._names.own(name): tensor for name, tensor in buffers.items()}
        wrong = [f"the model has no buffer {name!r}" for name in named if name not in self.like]
        wrong += [
            f"the buffer {name!r} is {tuple(tensor.shape)} in the posterior, {tuple(self.like[name].shape)} in the"
            " model"
            for name, tensor in named.items()
            if name in self.like and self.like[name].shape != tensor.shape
        ]
        _refuse(
            wrong,
            "build the model exactly as it was trained, or choose others: posterior.with_buffers(model)",
        )
        placed = {n: t.to(self.like[n].device, self.like[n].dtype).clone() for n, t in named.items()}
        self._first |= placed
        self.load(placed)

    def _warn_of_untrained_statistics(self) -> None:
        layer = untrained_statistics(self._inner)
        if layer is not None:
            warnings.warn(
                f"the posterior carries no buffers, and {layer!r} of the model has the running statistics of a new"
                " layer (it has seen no batch). If the model is not the one that was trained, load its buffers:"
                " model.load_state_dict(...), or save the posterior of an optimiser that was built with the module",
                UserWarning,
                stacklevel=2,
            )

    def own_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """The model's names for these."""
        return tuple(map(self._names.own, names))

    def placed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights under the model's names, in its dtypes and on its devices."""
        named = {self._names.own(name): tensor for name, tensor in weights.items()}
        return {name: t.to(self.like[name].device, self.like[name].dtype) for name, t in named.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put tensors wherever the double holds these weights: tied ones and flattened lists included."""
        for name, tensor in weights.items():
            for container, key in self._slots[name]:
                container[key] = tensor

    def release(self) -> None:
        """Go back to what was there at first, so that loaded tensors can be freed before the next are made."""
        self.load(self._first)


def _refuse(wrong: list[str], remedy: str) -> None:
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise InvalidValue(
            f"the posterior does not fit the model: {', '.join(wrong[:SHOWN])}{more}; {remedy}"
        )


def device_of(model: nn.Module) -> torch.device | None:
    """The one device of the parameters; None if there are several, or none."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Every name, also the second one of a tied weight."""
    parameters, buffers = model.named_parameters, model.named_buffers
    return {**dict(buffers(remove_duplicate=False)), **dict(parameters(remove_duplicate=False))}


def unwrapped(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        held = [n for n in ("module_", "module", "model") if isinstance(getattr(model, n, None), nn.Module)]
        hint = f"; it holds one: pass its .{held[0]}" if held else ""
        raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    inner = model.module if isinstance(model, PARALLEL) else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def _refuse_what_cannot_be_doubled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOperation(
                f"module {name!r} is scripted ({type(module).__name__}) and its weights cannot be replaced;"
                " use the model it was scripted from"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CallOrderError(f"parameter {name!r} is lazy and has no shape yet; run one forward first")
