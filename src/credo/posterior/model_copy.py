"""A private copy of a model, in eval mode, whose weights can be set while the model is never touched.

`torch.func.functional_call` swaps the weights inside the model for the time of a call, and `model.eval()` flips its
flags: another thread, a hook or an interrupt can see either. The copy has module objects of its own and shares the
parameters' memory until others are loaded. A model that cannot be copied, because its own functions close over it, is
borrowed: for the time of a call its tensors have other memory. No other thread may use it then.
"""

import copy
import functools
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credo.errors import CallOrderError, InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior.base import untrained_statistics
from credo.posterior.naming import Names
from credo.validate import SHOWN

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
CONTAINERS = (dict, OrderedDict, list, tuple)
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type))


class ModelCopy:
    """`copy.module` is called like the model; `load` sets some or all of its parameters and buffers.

    Training flags are False, buffers are copies, hooks are the model's own. A compiled or parallel wrapper is
    taken off: the copy is that of the model inside.
    """

    def __init__(self, model: nn.Module) -> None:
        self._inner = copyable(model)
        self.like = _named(self._inner)
        own: dict[int, Tensor] = {}  # by the id of the model's tensor
        for tensor in self.like.values():
            if id(tensor) not in own:
                own[id(tensor)] = _own(tensor)
        self._own = {name: own[id(tensor)] for name, tensor in self.like.items()}
        self._first = {name: tensor.detach() for name, tensor in self._own.items()}
        self._found: Names | None = None  # the model's names for a posterior's, where they differ
        shared = _shared(self._inner, own)
        self.borrows = shared is None  # whether each call runs the model itself
        if shared is None:
            pairs = [(self.like[name], tensor) for name, tensor in self._own.items()]
            self.module: nn.Module = _Borrowed(self._inner, pairs)
        else:
            self.module = copy.deepcopy(self._inner, {**shared, **own})
        self.activate(frozenset())
        self._versions = self._written()

    def activate(self, names: frozenset[str]) -> None:
        """Training mode for the modules of these names, eval mode for all others."""
        if isinstance(self.module, _Borrowed):
            self.module.active = names
            return
        for name, module in self.module.named_modules():
            module.__dict__["training"] = name in names
            module.__dict__.pop("_compiled_call_impl", None)  # module.compile() bound it to the original

    def check(self, mean: Mapping[str, Tensor]) -> None:
        """Find the model's names for a posterior's; raises for names it lacks and shapes that differ.

        What the posterior lacks stays the model's.
        """
        found = None if mean.keys() <= self.like.keys() else Names(mean, self.like, self._inner)
        wrong = []
        for name, tensor in mean.items():
            own = self.like.get(name if found is None else found.own(name))
            if own is None:
                wrong.append(f"the model has no {name!r}")
            elif own.shape != tensor.shape:
                wrong.append(
                    f"{name!r} is {tuple(tensor.shape)} in the posterior, {tuple(own.shape)} in the model"
                )
        _raise_unfit(wrong, "build the model exactly as it was trained")
        self._found = found

    def take_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Have a posterior's buffers instead of the model's own; after `check`."""
        if not buffers:
            self._warn_of_untrained_statistics()
            return
        named = self._renamed(buffers)
        wrong = [f"the model has no buffer {name!r}" for name in named if name not in self.like]
        wrong += [
            f"the buffer {name!r} is {tuple(tensor.shape)} in the posterior, {tuple(self.like[name].shape)} in the"
            " model"
            for name, tensor in named.items()
            if name in self.like and self.like[name].shape != tensor.shape
        ]
        _raise_unfit(
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

    def _renamed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors if self._found is None else {self._found.own(name): t for name, t in tensors.items()}

    def placed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights under the model's names, in its dtypes and on its devices."""
        like = self.like
        return {n: t.to(like[n].device, like[n].dtype) for n, t in self._renamed(weights).items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Have the copy compute with these tensors, wherever it holds the weights: tied and flattened ones included."""
        for name, tensor in weights.items():
            self._own[name].data = tensor

    def release(self) -> None:
        """Go back to what was there at first, so that loaded tensors can be freed before the next are made."""
        self.load(self._first)

    def wrote(self) -> bool:
        """Whether the model has written to its weights since this was asked last."""
        before, self._versions = self._versions, self._written()
        return before != self._versions

    def _written(self) -> int:
        total = 0
        for tensor in self._own.values():
            if isinstance(tensor, nn.Parameter):
                total += tensor._version
        return total


class _Borrowed(nn.Module):
    """Calls the model itself with other weights and flags; whatever the call changes in its modules is put back.

    The tensors keep their identity and change their memory, so that all who hold them compute with the others.
    """

    def __init__(self, model: nn.Module, tensors: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._borrowed = (model, tensors)  # in a tuple: it is no part of this module
        self.active: frozenset[str] = frozenset()

    def forward(self, *args: Any, **options: Any) -> Any:
        model, tensors = self._borrowed
        states = [(part, dict(vars(part))) for part in model.modules()]
        memory = [(tensor, tensor.data) for tensor, _ in tensors]
        try:
            for name, part in model.named_modules():
                part.__dict__["training"] = name in self.active
            for tensor, other in tensors:
                tensor.data = other.data
            return model(*args, **options)
        finally:
            for tensor, first in memory:
                tensor.data = first
            for part, state in states:
                for new in vars(part).keys() - state.keys():
                    del vars(part)[new]
                vars(part).update(state)


def _own(tensor: Tensor) -> Tensor:
    """What the copy has in its place: a parameter shares the memory, a buffer is a copy."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach().clone()


def _shared(model: nn.Module, tensors: Mapping[int, Tensor]) -> dict[int, Any] | None:
    """By id, what the copy shares with the model; None where a function of the model closes over the model itself.

    What leads from a module back into the model is copied: modules, containers, bound methods, partials. All else is
    shared. A function cannot be copied, so one whose closure holds a part of the model would call the original.
    """
    shared: dict[int, Any] = {}
    followed: list[Any] = []
    enclosed: list[Any] = []  # found in closures
    inside, seen = set(tensors), set[int]()
    for module in model.modules():
        inside.add(id(module))
        followed.append(vars(module))
    for waiting in (followed, enclosed):
        seen.clear()
        while waiting:
            value = waiting.pop()
            kind, key = type(value), id(value)
            if key in inside:
                if waiting is enclosed:
                    return None
            elif kind in PLAIN or key in seen:
                continue
            elif kind in CONTAINERS:
                seen.add(key)
                waiting.extend(value.values() if isinstance(value, dict) else value)
            elif kind is types.MethodType:
                waiting.append(value.__self__)
            elif kind is functools.partial:
                waiting.extend((value.func, value.args, value.keywords))
            elif kind is types.FunctionType:
                seen.add(key)
                for cell in value.__closure__ or ():
                    try:
                        enclosed.append(cell.cell_contents)
                    except ValueError:  # not assigned yet
                        continue
            elif waiting is followed:
                shared[key] = value
    return shared


def _raise_unfit(wrong: list[str], remedy: str) -> None:
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


def copyable(model: object) -> nn.Module:
    """The module inside of wrappers, of which a copy can be made."""
    inner = unwrapped(model)
    _check_copyable(inner)
    return inner


def unwrapped(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        held = [n for n in ("module_", "module", "model") if isinstance(getattr(model, n, None), nn.Module)]
        hint = f"; it holds one: pass its .{held[0]}" if held else ""
        raise InvalidType(f"model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    inner = model.module if isinstance(model, PARALLEL) else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def _check_copyable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOperation(
                f"module {name!r} is scripted ({type(module).__name__}) and its weights cannot be replaced;"
                " use the model it was scripted from"
            )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes long
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        raise UnsupportedOperation(
            "the model is under fully_shard (FSDP2), whose parameters are DTensors that cannot be replaced by samples. "
            "Build the plain model on each rank and pass that: its weights are the posterior's, and distributed=True "
            "divides the batches among the ranks."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CallOrderError(f"parameter {name!r} is lazy and has no shape yet; run one forward first")


@contextmanager
def preserve_rng(seed: int, device: torch.device | None) -> Iterator[None]:
    """No gradients inside, and what draws from the global generators gets numbers that depend on `seed` only.

    Loaders shuffle and some models draw even in eval mode; afterwards the global state is bitwise as before.
    Inference mode is lifted: its tensors keep no version, which would tell that a model wrote to its input.
    """
    accelerated = device is not None and device.type not in ("cpu", "meta")
    kind = device.type if device is not None and accelerated else "cuda"
    devices = [device.index or 0] if device is not None and accelerated else []
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if accelerated:
            torch.get_device_module(device).manual_seed(seed)
        with torch.inference_mode(False), torch.no_grad():
            yield


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """In eval mode, and afterwards every module in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
