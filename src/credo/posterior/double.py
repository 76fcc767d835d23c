"""Doubling a tree of modules: new module objects, the same tensors, and where each of them is held."""

import functools
import types
from collections import OrderedDict, defaultdict
from typing import Any

from torch import nn


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
