"""A private double of a model, in eval mode, whose weights can be set while the model is never touched.

`torch.func.functional_call` swaps the weights inside the model for the time of a call, and `model.eval()`
flips its flags: another thread, a hook or an interrupt can see either. The double has module objects of its
own and shares the parameters' memory, so making it costs microseconds a module and no copy of the weights.
"""

import functools
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credo.errors import CallOrderError, InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior.base import untrained_statistics
from credo.posterior.naming import Names
from credo.validate import SHOWN

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


@contextmanager
def undisturbed(seed: int, device: torch.device | None) -> Iterator[None]:
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


class Doubles:
    """`root` is the double of the model; `slots[id(t)]` are the (container, key) places that hold tensor t.

    What leads from a module back into the tree is followed, or the double would call the original:
    containers, bound methods, partials, closures, hooks. Other objects are shared. So are parameters;
    buffers are copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self.slots: defaultdict[int, list[tuple[Any, Any]]] = defaultdict(list)
        self._modules = {id(module) for module in model.modules()}
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._memo: dict[int, object] = {id(b): b.detach().clone() for b in model.buffers()}
        self._buffers = set(self._memo)
        self.root: nn.Module = self._module(model)

    def _of(self, value: object) -> object:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if id(value) in self._modules and isinstance(value, nn.Module):
            return self._module(value)
        double = _FOLLOWED.get(type(value))
        return value if double is None else double(self, value)

    def _module(self, module: nn.Module) -> nn.Module:
        twin: nn.Module = object.__new__(type(module))
        self._memo[id(module)] = twin
        self._fill(twin.__dict__, module.__dict__)
        twin.__dict__["training"] = False
        twin.__dict__.pop("_compiled_call_impl", None)  # module.compile() bound it to the original
        return twin

    def _fill(self, twin: dict[Any, object], source: dict[Any, object]) -> None:
        for key, value in source.items():
            twin[key] = self._of(value)
            self._note(value, twin, key)

    def _note(self, value: object, container: object, key: object) -> None:
        if id(value) in self._parameters or id(value) in self._buffers:
            self.slots[id(value)].append((container, key))

    def _mapping(self, source: dict[object, object]) -> object:
        twin = source.copy()
        self._memo[id(source)] = twin
        self._fill(twin, source)
        return twin

    def _list(self, source: list[object]) -> object:
        twin: list[object] = []
        self._memo[id(source)] = twin
        for key, value in enumerate(source):
            twin.append(self._of(value))
            self._note(value, twin, key)
        return twin

    def _tuple(self, source: tuple[object, ...]) -> object:
        return tuple(map(self._of, source))

    def _method(self, source: types.MethodType) -> object:
        return types.MethodType(source.__func__, self._of(source.__self__))

    def _partial(self, source: "functools.partial[object]") -> object:
        function: Any = self._of(source.func)
        keywords = {key: self._of(value) for key, value in source.keywords.items()}
        return functools.partial(function, *map(self._of, source.args), **keywords)

    def _function(self, source: types.FunctionType) -> object:
        """A function whose closure reaches into the tree is made anew over the doubles; others are shared."""
        self._memo[id(source)] = source  # it may close over itself
        cells = source.__closure__ or ()
        twins = [self._cell(cell) for cell in cells]
        if all(twin is cell for twin, cell in zip(twins, cells, strict=True)):
            return source
        code, scope = source.__code__, source.__globals__
        twin = types.FunctionType(code, scope, source.__name__, source.__defaults__, tuple(twins))
        twin.__kwdefaults__ = source.__kwdefaults__
        twin.__dict__.update(source.__dict__)
        self._memo[id(source)] = twin
        return twin

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        if isinstance(content, dict | list) and not self._leads_back(content, set()):
            return cell  # somebody's records, to be written as ever
        twin = self._of(content)
        return cell if twin is content else types.CellType(twin)

    def _leads_back(self, value: object, seen: set[int]) -> bool:
        if id(value) in self._modules | self._parameters | self._buffers:
            return True
        if id(value) in seen or not isinstance(value, dict | list | tuple):
            return False
        seen.add(id(value))
        return any(
            self._leads_back(item, seen) for item in (value.values() if isinstance(value, dict) else value)
        )


_FOLLOWED: dict[type, Any] = {
    dict: Doubles._mapping,
    OrderedDict: Doubles._mapping,
    list: Doubles._list,
    tuple: Doubles._tuple,
    types.MethodType: Doubles._method,
    functools.partial: Doubles._partial,
    types.FunctionType: Doubles._function,
}
