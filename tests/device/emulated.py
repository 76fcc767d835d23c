"""Devices in pure Python: tensors that say they are on `npu:0` or `npu:1` and hold a CPU tensor inside.

Numbers and autograd are torch's own, and backward passes run on a worker thread, as for any accelerator. Three things
are seen that tests on a CPU cannot see:

    mixing      an operation on tensors of two devices raises, unless the one on the CPU has no dimensions
    waits       what makes the host wait for the device: .item(), bool(), .tolist(), nonzero, equal, copies to the host
    launches    one for each operation that is neither a view nor an allocation

    with Device() as seen:
        model.to("npu")
        ...
    seen.launches.total()

Copies between devices and the host are counted with their bytes, and the memory of all tensors on a device. With
`numbers=False` nothing is computed: tensors have shapes only, and what the host reads is 1. So large networks can be
counted. Only one
thing differs for the rest of a process: the name `npu` is known to torch. That has to be so before its first backward
pass, so these tests run in processes of their own (`tests/test_device.py`).
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import credo

NAME = "npu"
COUNT = 2
SOURCE = str(Path(credo.__file__).parent) + "/"
FREE = (
    "aten._unsafe_view",
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten.alias",
    "aten.lift",
    "aten.set_",
    "aten.resize_",
)
COPIED = "aten._local_scalar_dense"  # a copy of one number, and a wait
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.equal.default",
    "aten.allclose.default",
    "aten.is_nonzero.default",
    "aten._unique2.default",
    "aten.masked_select.default",
    "aten.repeat_interleave.Tensor",
}
# Operations that may read or write a table on the host by its indices.
INDEXED = {"aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default"}
MOVES = {"aten.copy_.default", "aten._to_copy.default", "aten._foreach_copy_.default"}


class _Module:
    """What torch asks of `torch.npu`."""

    _now = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self._now

    def set_device(self, device: Any) -> None:
        self._now = torch.device(device).index or 0

    def device_count(self) -> int:
        return COUNT

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self._now = self._now, index
        try:
            yield
        finally:
            self._now = before

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        states[self._now] = seed

    def manual_seed_all(self, seed: int) -> None:
        states.update(dict.fromkeys(range(COUNT), seed))

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.tensor([states[_index(device)]])

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        states[_index(device)] = int(state)


states = dict.fromkeys(range(COUNT), 0)  # of the devices' own generators: what they were seeded with
_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())  # type: ignore[no-untyped-call]


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def is_ours(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == NAME


class Seen:
    """What has happened, by the place in credo that asked for it."""

    def __init__(self) -> None:
        self.launches, self.waits = Counter[str](), Counter[str]()
        self.copies, self.operations = Counter[str](), Counter[str]()
        self.threads: set[str] = set()
        self.peak = memory.now

    def forget(self) -> None:
        """Counts from here on."""
        for counter in (self.launches, self.waits, self.copies, self.operations):
            counter.clear()
        memory.peak = memory.now


class _Memory:
    """Bytes of all tensors on the devices; views share them."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._uses = Counter[int]()
        self._lock = threading.RLock()

    def take(self, tensor: "OnDevice") -> None:
        storage = tensor.inner.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            self._uses[key] += 1
            if self._uses[key] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
        # The storage is kept alive with the count, so that its key is not another's.
        weakref.finalize(tensor.inner, self._give, key, size, storage)

    def _give(self, key: int, size: int, storage: Any) -> None:
        with self._lock:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.now -= size


memory = _Memory()
_seen: list[Seen] = []
home = [torch.device("cpu")]  # where the tensors are really: without numbers on torch's device of shapes


class OnDevice(Tensor):
    """A tensor on a device, and where its numbers really are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "OnDevice":
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=False,
        )
        made.inner = inner
        memory.take(made)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        """One wait, which torch refuses for subclasses of tensors."""
        if _seen:
            _seen[-1].waits[f"{place()} tolist"] += 1
        return torch.ones(self.shape).tolist() if self.inner.is_meta else self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_Generator = torch.Generator


class _OnDeviceGenerator(_Generator):
    """A generator of the CPU that says it is on a device."""

    where: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where


class _Kind(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, _Generator)


class _GeneratorStandIn(metaclass=_Kind):
    def __new__(cls, device: Any = "cpu") -> Any:
        if not is_ours(device):
            return _Generator(device)
        made = _OnDeviceGenerator()
        made.where = torch.device(NAME, _index(device))
        return made


def place() -> str:
    """Who in credo asks: file and line."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            return f"{frame.f_code.co_filename.removeprefix(SOURCE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "(user)"


def _gates(a: Tensor, b: Tensor, b_a: Tensor | None, b_b: Tensor | None) -> tuple[Tensor, Tensor]:
    return a if b_a is None else a + b_a, b if b_b is None else b + b_b


def _lstm_cell(a: Tensor, b: Tensor, c: Tensor, b_a: Any = None, b_b: Any = None) -> tuple[Tensor, ...]:
    """Accelerators have these operations and the CPU has not."""
    a, b = _gates(a, b, b_a, b_b)
    gates = a + b
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * c + i.sigmoid() * g.tanh()
    work = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)
    return o.sigmoid() * cell.tanh(), cell, work


def _lstm_cell_backward(
    gy: Any, gc: Any, cx: Tensor, cy: Tensor, work: Tensor, has_bias: bool
) -> tuple[Any, ...]:
    i, f, g, o = work.chunk(4, 1)
    gy = torch.zeros_like(cy) if gy is None else gy
    t = cy.tanh()
    dc = gy * o * (1 - t * t) + (0 if gc is None else gc)
    parts = [dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), gy * t * o * (1 - o)]
    gates = torch.cat(parts, 1)
    return gates, dc * f, gates.sum(0) if has_bias else None


def _gru_cell(a: Tensor, b: Tensor, h: Tensor, b_a: Any = None, b_b: Any = None) -> tuple[Tensor, Tensor]:
    a, b = _gates(a, b, b_a, b_b)
    (ar, az, an), (br, bz, bn) = a.chunk(3, 1), b.chunk(3, 1)
    r, z = (ar + br).sigmoid(), (az + bz).sigmoid()
    n = (an + r * bn).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, bn], 1)


def _gru_cell_backward(gy: Tensor, work: Tensor, has_bias: bool) -> tuple[Any, ...]:
    r, z, n, h, bn = work.chunk(5, 1)
    gn, gz = gy * (1 - z) * (1 - n * n), gy * (h - n) * z * (1 - z)
    gr = gn * bn * r * (1 - r)
    ga, gb = torch.cat([gr, gz, gn], 1), torch.cat([gr, gz, gn * r], 1)
    return ga, gb, gy * z, ga.sum(0) if has_bias else None, gb.sum(0) if has_bias else None


ONLY_ON_DEVICES = {
    "aten._thnn_fused_lstm_cell.default": _lstm_cell,
    "aten._thnn_fused_lstm_cell_backward_impl.default": _lstm_cell_backward,
    "aten._thnn_fused_gru_cell.default": _gru_cell,
    "aten._thnn_fused_gru_cell_backward.default": _gru_cell_backward,
}


def _note(func: Any, name: str, args: Any, devs: list[OnDevice], hosts: list[Tensor], target: Any) -> None:
    seen, where = _seen[-1], place()
    if devs:
        seen.threads.add(threading.current_thread().name)
    if devs and name in WAITS:
        seen.waits[f"{where} {name}"] += 1
    size = 0
    if name == "aten._to_copy.default" and target is not None:
        if devs and not is_ours(target):
            size, way = devs[0].inner.nbytes, "to the host"
        elif hosts and is_ours(target):
            size, way = hosts[0].nbytes, "to the device"
        elif devs and is_ours(target) and devs[0].device.index != _index(target):
            size, way = devs[0].inner.nbytes, "between devices"
    elif name == "aten.copy_.default" and devs and hosts:
        size = args[1].nbytes
        way = "to the device" if isinstance(args[0], OnDevice) else "to the host"
    elif name == "aten.copy_.default" and len({t.device.index for t in devs}) > 1:
        size, way = args[1].inner.nbytes, "between devices"
    if size:
        seen.copies[f"{where} {way}"] += size
        if way == "to the host":
            seen.waits[f"{where} {name}"] += 1
    if (
        (devs or is_ours(target))
        and not name.startswith(FREE)
        and not func.is_view
        and not name.startswith(COPIED)
    ):
        seen.launches[where] += 1
        seen.operations[name] += 1


def _refuse_mixing(name: str, devs: list[OnDevice], hosts: list[Tensor]) -> None:
    if not devs or name in MOVES:
        return
    if any(t.dim() > 0 for t in hosts) and name not in INDEXED:
        shapes = [tuple(t.shape) for t in hosts]
        raise RuntimeError(f"{name}: tensors on {devs[0].device} and on the CPU {shapes} at {place()}")
    if len({t.device for t in devs}) > 1:
        raise RuntimeError(f"{name}: tensors on two devices at {place()}")


def _by_device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A foreach operation on lists whose tensors are on several devices, place by place the same: each for itself."""
    rows = [row for row in args if isinstance(row, (list, tuple)) and isinstance(row[0], Tensor)]
    places: dict[torch.device, list[int]] = {}
    for k, tensor in enumerate(rows[0]):
        places.setdefault(tensor.device, []).append(k)
    found: list[Any] = [None] * len(rows[0])
    for own in places.values():
        some = [[row[k] for k in own] if isinstance(row, (list, tuple)) else row for row in args]
        results = _run(func, tuple(some), kwargs)
        for k, result in zip(own, results or (), strict=False):
            found[k] = result
    return None if found[0] is None else found


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = str(func)
    lists = name.startswith("aten._foreach") and isinstance(args[0], (list, tuple))
    if lists and len({tensor.device for tensor in args[0]}) > 1:
        return _by_device(func, args, kwargs)
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    devs = [t for t in leaves if isinstance(t, OnDevice)]
    hosts = [t for t in leaves if not isinstance(t, OnDevice)]
    target = kwargs.get("device")
    _refuse_mixing(name, devs, hosts)
    if _seen:
        _note(func, name, args, devs, hosts, target)
    if is_ours(target):
        kwargs = {**kwargs, "device": home[0]}
    elif home[0].type == "meta" and devs:
        if name == "aten._local_scalar_dense.default":
            return 1 if not devs[0].dtype.is_floating_point else 1.0
        if target is not None or (name == "aten.copy_.default" and not isinstance(args[0], OnDevice)):
            return torch.ones(devs[0].shape, dtype=kwargs.get("dtype") or devs[0].dtype)
        kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
    inner_args, inner_kwargs = tree_map(lambda t: t.inner if isinstance(t, OnDevice) else t, (args, kwargs))
    out = ONLY_ON_DEVICES.get(name, func)(*inner_args, **inner_kwargs)
    if name == "aten.copy_.default":
        return args[0]
    if target is not None:
        where = torch.device(NAME, _index(target)) if is_ours(target) else None
    else:
        where = devs[0].device if devs else None
    if where is None:
        return out
    given = {id(t.inner): t for t in devs}  # operations in place hand back what they were given
    return tree_map(
        lambda t: (given[id(t)] if id(t) in given else OnDevice(t, where)) if isinstance(t, Tensor) else t,
        out,
    )


class Device(TorchDispatchMode):
    """A block in which tensors can be made on the devices, and what happens there is seen."""

    def __init__(self, numbers: bool = True) -> None:
        super().__init__()
        self._numbers = numbers

    def __enter__(self) -> Seen:  # type: ignore[override]
        _seen.append(Seen())
        home[0] = torch.device("cpu" if self._numbers else "meta")
        torch.Generator = _GeneratorStandIn  # type: ignore[assignment,misc]
        super().__enter__()
        return _seen[-1]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Generator = _Generator  # type: ignore[misc]
        home[0] = torch.device("cpu")
        _seen.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("prim."):
            return func(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


# What C++ makes on a device by itself, below the modes (the number in torch.where(c, a, 1.0)).
_library = torch.library.Library("aten", "IMPL")


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    where = torch.device(NAME, _index(device if device is not None else 0))
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype, device=home[0]), where)


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    where = torch.device(NAME, _index(device if device is not None else 0))
    return OnDevice(torch.empty(size, dtype=dtype, device=home[0]), where)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    (target.inner if isinstance(target, OnDevice) else target).copy_(
        source.inner if isinstance(source, OnDevice) else source
    )
    return target


_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
