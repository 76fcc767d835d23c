"""The parameters of a module under `fully_shard` (FSDP2), as an optimiser that knows nothing of it can use them.

FSDP2 cuts each parameter by rows, ⌈n/P⌉ for each of P ranks and less for the last ones, and registers a DTensor. For a
forward pass the rows of all ranks are gathered into a plain parameter, the same object each time; after it that is
emptied again. So a parameter has three faces:

    the DTensor     what the module shows between passes, and where FSDP2 puts the gradient
    the part        a plain parameter, this rank's rows in the DTensor's own memory: what the optimiser has
    the whole       the plain parameter that operations see: what a block watches
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from credo.curvature.torch_private import fsdp_groups
from credo.curvature.tracking import dtensor_type
from credo.distributed.world import world
from credo.errors import UnsupportedOperation

REMEDY = (
    "Otherwise train the plain module, and let the optimiser shard what it keeps: sharded=True, after "
    "torch.distributed.init_process_group (docs/distributed.md)."
)


@dataclass(eq=False)
class ShardedParameter:
    """One parameter."""

    name: str
    dtensor: Any
    part: nn.Parameter
    rows: list[tuple[int, int]]  # by rank: its first row, and how many it has
    whole: Tensor | None = None  # once FSDP2 has made it

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return torch.Size(self.dtensor.shape)

    def start(self, rank: int) -> int:
        """The place of a rank's first number in the whole."""
        return self.rows[rank][0] * math.prod(self.shape[1:])


@final
class Shards:
    """All trainable parameters of one module, in the module's order."""

    def __init__(self, module: nn.Module):
        self._modules = _managed(module)
        _refuse(module, self._modules)
        kind, size, rank = dtensor_type(), world().size, world().rank
        assert kind is not None
        self.places = [
            ShardedParameter(name, p, _part(p), _rows(len(p), size))
            for name, p in module.named_parameters()
            if isinstance(p, kind) and p.requires_grad
        ]
        self.rank = rank
        self._by_dtensor = {id(place.dtensor): place for place in self.places}
        self._by_part = {id(place.part): place for place in self.places}
        self._kept: list[tuple[Any, bool]] = []

    def part(self, p: Tensor) -> Tensor:
        """The part of a DTensor; other tensors as they are."""
        place = self._by_dtensor.get(id(p))
        return p if place is None else place.part

    def of_part(self, p: Tensor) -> ShardedParameter | None:
        return self._by_part.get(id(p))

    # Between blocks

    def follow(self) -> None:
        """Parts follow what has become of their DTensors: other memory, frozen, gradients clipped or cleared."""
        for place in self.places:
            local, grad = _local(place.dtensor), place.dtensor.grad
            if local.data_ptr() != place.part.data_ptr() or local.dtype != place.part.dtype:
                place.part.data = local.detach()
            if place.part.requires_grad != place.dtensor.requires_grad:
                place.part.requires_grad_(place.dtensor.requires_grad)
            self._take_gradient(place, grad)

    def _take_gradient(self, place: ShardedParameter, grad: Any) -> None:
        own = None if grad is None else _local(grad)
        known = place.part.grad
        if own is None or known is None or own.data_ptr() != known.data_ptr():
            place.part.grad = own

    def take_gradients(self) -> None:
        """What FSDP2 has left at the DTensors."""
        for place in self.places:
            self._take_gradient(place, place.dtensor.grad)

    def show_gradients(self) -> None:
        """The DTensors have the gradients of their parts, in the same memory: clipping finds them there."""
        for place in self.places:
            own, shown = place.part.grad, place.dtensor.grad
            if own is None:
                place.dtensor.grad = None
            elif shown is None or _local(shown).data_ptr() != own.data_ptr():
                place.dtensor.grad = _like(place.dtensor, own)

    def clear_gradients(self) -> None:
        for place in self.places:
            place.dtensor.grad = None

    # Around blocks

    def reshard(self) -> None:
        """Empties the wholes: what they hold may be of other weights."""
        for module in self._modules:
            module.reshard()

    def recover(self) -> None:
        """After an error amid a pass."""
        inner: set[int] = set()
        for module in self._modules:  # outer ones first
            if id(module) not in inner:
                module.reset_iter_state()
                inner |= set(map(id, module.modules()))
        self.reshard()

    def find_wholes(self) -> None:
        """Which plain parameter stands for which DTensor: FSDP2 makes them at the first gathering, once."""
        if all(place.whole is not None for place in self.places):
            return
        for module in reversed(self._modules):
            held = [
                (part, name, self._by_dtensor[id(p)])
                for part in module.modules()
                for name, p in part._parameters.items()
                if id(p) in self._by_dtensor
            ]
            module.unshard()
            for part, name, place in held:
                found = part._parameters[name]
                if found is not None and found is not place.dtensor:
                    place.whole = found
            module.reshard()

    def wholes(self) -> Iterator[tuple[ShardedParameter, Tensor]]:
        for place in self.places:
            assert place.whole is not None
            yield place, place.whole

    def keep_wholes(self) -> None:
        """After a backward pass too, for what is squared at its end."""
        groups = [group for module in self._modules for group in fsdp_groups(module)]
        self._kept = [(group, group.reshard_after_backward) for group in groups]
        for group in groups:
            group.reshard_after_backward = False

    def keep_as_before(self) -> None:
        for group, value in self._kept:
            group.reshard_after_backward = value
        self._kept = []


# ────────────────────────────────────────
# What there is.


def shards_of(given: object) -> Shards | None:
    """Of a module with DTensors among its parameters; None of anything else."""
    kind = dtensor_type()
    if kind is None or not isinstance(given, nn.Module):
        return None
    for module in _managed(given):
        module.reshard()  # it may be gathered since a forward pass
    return Shards(given) if any(isinstance(p, kind) for p in given.parameters()) else None


def _managed(module: nn.Module) -> list[Any]:
    """The modules on which `fully_shard` was called, outer ones first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _part(p: Any) -> nn.Parameter:
    return nn.Parameter(_local(p).detach(), requires_grad=True)


def _local(p: Any) -> Tensor:
    with torch.no_grad():
        local: Tensor = p.to_local()
    return local


def _like(p: Any, local: Tensor) -> Any:
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        where = p.device_mesh, p.placements
        return DTensor.from_local(local, *where, run_check=False, shape=p.shape, stride=p.stride())


def _rows(rows: int, ranks: int) -> list[tuple[int, int]]:
    each = -(-rows // ranks)
    return [(min(k * each, rows), max(min(each, rows - k * each), 0)) for k in range(ranks)]


def _refuse(module: nn.Module, managed: Sequence[Any]) -> None:
    """What is not one row of ranks that cut all parameters by their rows."""
    from torch.distributed.tensor import Shard

    kind = dtensor_type()
    groups = [group for part in managed for group in fsdp_groups(part)]
    known = {id(own.sharded_param) for group in groups for own in group.fsdp_params}
    for name, p in module.named_parameters():
        if kind is None or not isinstance(p, kind):
            if p.requires_grad:
                raise UnsupportedOperation(
                    f"parameter {name!r} is not sharded, and others of the model are DTensors. Call fully_shard on the "
                    f"whole model too, without ignored_params. {REMEDY}"
                )
            continue
        if id(p) not in known:
            raise UnsupportedOperation(
                f"parameter {name!r} is a DTensor that fully_shard (FSDP2) does not manage, as tensor parallelism or "
                "distribute_tensor make them, or the model is gathered now (call model.reshard()). Build the optimiser "
                f"after fully_shard(model), on plain parameters. {REMEDY}"
            )
        mesh = p.device_mesh
        if mesh.ndim != 1 or mesh.size() != world().size or len(p.placements) != 1:
            raise UnsupportedOperation(
                f"parameter {name!r} lies on a mesh of shape {tuple(mesh.shape)} in a world of {world().size} ranks. "
                "Hybrid sharding, meshes of several dimensions and of some of the ranks are not supported: leave mesh "
                f"out of fully_shard. {REMEDY}"
            )
        if p.placements[0] != Shard(0):
            raise UnsupportedOperation(
                f"parameter {name!r} is cut as {p.placements[0]}, and only Shard(0) is supported. Leave "
                f"shard_placement_fn out of fully_shard. {REMEDY}"
            )
    for group in groups:
        _refuse_policies(group)


def _refuse_policies(group: Any) -> None:
    policies: Iterable[tuple[str, bool]] = (
        ("offload_policy=CPUOffloadPolicy", getattr(group.offload_policy, "pin_memory", None) is not None),
        ("mp_policy with a param_dtype", group.mp_policy.param_dtype is not None),
        ("mp_policy with a reduce_dtype", group.mp_policy.reduce_dtype is not None),
        ("set_gradient_divide_factor", group.gradient_divide_factor is not None),
        (
            "reshard_after_forward with a number",
            group.post_forward_mesh_info not in (None, group.mesh_info),
        ),
    )
    for what, present in policies:
        if present:
            raise UnsupportedOperation(
                f"{what} of fully_shard is not supported by an optimiser with a posterior. Leave it out; for mixed "
                f"precision use torch.autocast in the closure. {REMEDY}"
            )
