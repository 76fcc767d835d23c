"""From what users pass (a module, parameters, named parameters, groups) to torch's parameter groups.

With a module, its normalisation layers go into a group of their own: they are deterministic and have
no prior, as in the paper, and are preconditioned like all others.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from credo.curvature.tracking import refuse_opaque
from credo.distributed.shards import Shards
from credo.errors import CallOrderError, InvalidType, InvalidValue, UnsupportedOperation
from credo.optim import arguments
from credo.optim.checkpoints import SCALE
from credo.posterior import Posterior

_NORMS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_WRAPPERS = (nn.DataParallel,)
_SHARDING = "FullyShardedDataParallel"  # asked by its name, since its import takes long


class Grouped(Optimizer):
    """The part of an optimiser that knows its parameters, and the module that they came with."""

    _module: "weakref.ref[nn.Module] | None"

    def names(self) -> dict[int, str]:
        """id → name; parameters that came without names are numbered."""
        return parameter_names(self.param_groups)


def parameter_groups(given: Any, shards: Shards | None = None) -> list[dict[str, Any]]:
    """Groups for torch.optim.Optimizer; every group with names if the parameters came with names.

    Of a module with `shards` they have this rank's parts of its parameters.
    """
    if isinstance(given, nn.Module):
        return _groups_of(given, shards)
    if isinstance(given, (Tensor, str, bytes, dict)) or not isinstance(given, Iterable):
        raise InvalidType(
            "params must be a module, model.parameters(), model.named_parameters() or a list of parameter groups; "
            f"got {type(given).__name__}."
        )
    entries = list(given)
    if not entries:
        raise InvalidValue("params is an empty parameter list. Was a generator used up before?")
    groups = entries if isinstance(entries[0], dict) else [{"params": entries}]
    return [_checked(dict(group)) for group in groups]


def parameter_names(groups: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """id → name; parameters that came without names are numbered."""
    named: dict[int, str] = {}
    for group in groups:
        for k, p in enumerate(group["params"]):
            named[id(p)] = group["param_names"][k] if "param_names" in group else f"parameter_{len(named)}"
    return named


def refuse_other_sizes(group: Mapping[str, Any], p: Tensor, known: Mapping[str, Tensor]) -> None:
    """Kernels go by the parameter's size, and would write beyond what is smaller."""
    for name, tensor in known.items():
        if name != SCALE and tensor.numel() != p.numel():
            raise CallOrderError(
                f"parameter {parameter_names([group])[id(p)]!r} has shape {tuple(p.shape)}, but its {name} has shape "
                f"{tuple(tensor.shape)}: one of them was replaced. Construct the optimiser after changing the model."
            )


def carrying_buffers(posterior: Callable[..., Posterior]) -> Callable[..., Posterior]:
    """What the method returns, with the buffers of the module that the optimiser was given."""

    @wraps(posterior)
    def carried(self: Any, *args: Any, **kwargs: Any) -> Posterior:
        found, module = posterior(self, *args, **kwargs), self._module_now()
        return found if module is None else found.with_buffers(module)

    return carried


def joining_group(
    groups: Sequence[Mapping[str, Any]], group: Mapping[str, Any], module: nn.Module | None
) -> dict[str, Any]:
    """A group that joins others, with names if they have names: its own, or those that the module has for it."""
    joined = _checked(dict(group))
    wanted = bool(groups) and "param_names" in groups[0]
    known = {} if module is None else {id(p): name for name, p in module.named_parameters()}
    if wanted and all(id(p) in known for p in joined["params"]):
        joined["params"] = [(known[id(p)], p) for p in joined["params"]]
    if groups and any(isinstance(entry, tuple) != wanted for entry in joined["params"]):
        raise InvalidValue(
            "all parameters of an optimiser have names or none has, and those of this group differ from the others. "
            f"Give {'(name, parameter) pairs, as named_parameters() does' if wanted else 'parameters without names'}."
        )
    return joined


def _groups_of(model: nn.Module, shards: Shards | None) -> list[dict[str, Any]]:
    _refuse(model)
    norms = {
        id(p) for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(False)
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise InvalidValue(f"the model {type(model).__name__} has no trainable parameters.")
    part = (lambda p: p) if shards is None else shards.part
    weights = [(name, part(p)) for name, p in named if id(p) not in norms]
    certain = [(name, part(p)) for name, p in named if id(p) in norms]
    groups: list[dict[str, Any]] = [{"params": weights}] if weights else []
    if certain:
        groups.append({"params": certain, "deterministic": True})
    return [_checked(group) for group in groups]


def _checked(group: dict[str, Any]) -> dict[str, Any]:
    params = group.get("params", ())
    group["params"] = [params] if isinstance(params, Tensor) else list(params)
    if not group["params"]:
        raise InvalidValue("a parameter group is an empty parameter list.")
    for k, entry in enumerate(group["params"]):
        name, value = entry if isinstance(entry, tuple) and len(entry) == 2 else (f"params[{k}]", entry)
        _refuse_lazy(name, value)
        arguments.parameter(name, value)
    return group


def _refuse(model: nn.Module) -> None:
    """Modules whose operations cannot be seen, or have no exact squared gradient."""
    if isinstance(model, _WRAPPERS):
        raise UnsupportedOperation(
            f"the model is wrapped in {type(model).__name__}. Pass and train the inner module: model.module."
        )
    if any(type(part).__name__ == _SHARDING for part in model.modules()):
        raise UnsupportedOperation(
            f"the model is wrapped in {_SHARDING}, which flattens and divides its parameters. Train the plain module, "
            "and let the optimiser shard what it keeps: sharded=True, after torch.distributed.init_process_group."
        )
    refuse_opaque(model)
    for name, parameter in model.named_parameters():
        _refuse_lazy(name, parameter)
    embeddings = {
        f"{name or 'the model'} ({type(part).__name__})": part
        for name, part in model.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag))
    }
    renormed = [name for name, part in embeddings.items() if part.max_norm is not None]
    if renormed:
        raise UnsupportedOperation(
            f"max_norm of {', '.join(renormed)} shortens rows of the weight in each forward pass. Here that is a "
            "sample of the weight, and the mean would not change. Build the layers without; shorten the mean after a "
            "step: torch.renorm(weight, 2, 0, max_norm)."
        )
    sparse = [name for name, part in embeddings.items() if part.sparse or part.scale_grad_by_freq]
    if sparse:
        raise UnsupportedOperation(
            f"no exact squared gradient for {', '.join(sparse)}: sparse=True and scale_grad_by_freq=True are not "
            "supported. Build the layers without."
        )


def _refuse_lazy(name: str, parameter: Any) -> None:
    if torch.nn.parameter.is_lazy(parameter):
        raise CallOrderError(f"parameter {name!r} of a lazy module has no shape yet. Run one forward first.")


def take_prior(optimizer: Grouped, prior: Posterior) -> None:
    """Stores precision and mean of `prior` beside each parameter it names; all uncertain ones must be named."""
    if not isinstance(prior, Posterior):
        raise InvalidType(
            f"prior must be a posterior, as optimizer.posterior() gives; got {type(prior).__name__}."
        )
    names, mean, variance = optimizer.names(), prior.mean, prior.variance
    wanted = [
        (names[id(p)], p)
        for group in optimizer.param_groups
        if not group["deterministic"]
        for p in group["params"]
    ]
    wrong = [_mismatch(name, p, variance) for name, p in wanted]
    found = [message for message in wrong if message]
    if found:
        raise InvalidValue(
            f"prior does not fit the parameters: {'; '.join(found[:3])}. It holds {sorted(mean)[:5]} …"
        )
    for name, p in wanted:
        optimizer.state[p]["prior_precision"] = variance[name].to(p.device).reciprocal()
        optimizer.state[p]["prior_mean"] = mean[name].to(p.device).clone()


def _mismatch(name: str, p: Tensor, variance: dict[str, Tensor]) -> str | None:
    if name not in variance:
        return f"nothing is called {name!r}"
    if variance[name].shape != p.shape:
        return f"{name!r} has shape {tuple(variance[name].shape)} there and {tuple(p.shape)} here"
    if not bool(variance[name].any()):
        return f"{name!r} is deterministic there"
    return None


@final
class RunningStatistics:
    """Statistics of the batches that a module's BatchNorm and InstanceNorm layers keep, averaged as the mean is.

    By themselves they are of the last ten batches or so, at iterates. The mean is over many more. So inside of blocks
    their momentum is at most the weight with which the mean follows; outside it is what it was.
    """

    def __init__(self, module: nn.Module | None) -> None:
        parts = () if module is None else module.modules()
        self.layers = [m for m in parts if isinstance(m, _NormBase) and m.running_mean is not None]
        self.changed: list[tuple[_NormBase, float]] = []

    def slow(self, weight: float) -> None:
        for layer in self.layers:
            if layer.momentum is not None and layer.momentum > weight:  # None is an average of its own
                self.changed.append((layer, layer.momentum))
                layer.momentum = weight

    def restore(self) -> None:
        """Safe against interrupts: what was not put back is still in the list."""
        while self.changed:
            layer, momentum = self.changed[-1]
            layer.momentum = momentum
            self.changed.pop()
