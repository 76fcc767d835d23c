"""What does not change from step to step: which parameters of a group are trained, and where their state is."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credo.curvature.rule import widen
from credo.curvature.tracking import WatchedParameters, buffers_of
from credo.errors import CallOrderError
from credo.kernels.lists import Kept, Steady
from credo.kernels.noise import Sampler
from credo.kernels.update import Updater
from credo.optim.checkpoints import SCALE
from credo.optim.groups import parameter_names
from credo.optim.sampling import MeanKeeper, identical

State = Mapping[Tensor, dict[str, Tensor]]


@final
class Plan:
    """The trainable parameters of one group in order, those among them that have a curvature, and where all that is.

    Found once; a step then asks whether it still `fits`. It is stale when the group has other parameters; when one was
    frozen or unfrozen, or has other memory, or another type, size or layout; and when the state of one was loaded,
    cleared or replaced, or the momentum or the curvature in it has other memory or was made just now. Memory is told
    by its address, so a plan `keeps` on the CPU only.
    """

    def __init__(self, group: Mapping[str, Any], state: State):
        self._all: list[Tensor] = list(group["params"])
        self._frozen = [p for p in self._all if not p.requires_grad]
        self.parameters = Steady([p for p in self._all if p.requires_grad])
        self.states = [state[p] for p in self.parameters]
        self._state = list(state.items())
        self.keys = list(map(id, self.parameters))
        with_curvature = [k for k, own in enumerate(self.states) if "curvature" in own]
        self.uncertain = Steady([self.parameters[k] for k in with_curvature])
        self.uncertain_states = [self.states[k] for k in with_curvature]
        self.curvatures = Steady([self.states[k]["curvature"] for k in with_curvature])
        self.whole = all("curvature" in own and "momentum" in own for own in self.states)
        self._momenta = Steady([own["momentum"] for own in self.states]) if self.whole else None
        self._offsets = _offsets(self.states)
        self.uncertain_offsets = _offsets(self.uncertain_states)
        self._rooms: Steady | None = None  # for the means of the uncertain ones, once they were away
        self._sampler: Sampler | None = None
        self._updaters: dict[bool, Updater] = {}
        kept = chain(self._all, *[own.values() for own in self.states])
        self.keeps = all(t.is_cpu for t in kept)
        self._seen = list(map(_look, self.parameters, self.states)) if self.keeps else []

    def fits(self, group: Mapping[str, Any], state: State) -> bool:
        present, known = group["params"], self._all
        if len(state) != len(self._state) or len(present) != len(known) or not all(map(is_, present, known)):
            return False
        for (p, own), (held_p, held) in zip(state.items(), self._state):  # noqa: B905  (asked at every step)
            if p is not held_p or own is not held:
                return False
        for (
            p,
            own,
            dtype,
            shape,
            stride,
            address,
            s,
            address_of_s,
            m,
            address_of_m,
            z,
            address_of_z,
        ) in self._seen:
            if (
                p.data_ptr() != address
                or own.get("curvature") is not s
                or own.get("momentum") is not m
                or own.get("offset") is not z
                or (z is not None and z.data_ptr() != address_of_z)
                or (s is not None and s.data_ptr() != address_of_s)
                or (m is not None and m.data_ptr() != address_of_m)
                or not p.requires_grad
                or p.dtype is not dtype
                or p.shape != shape
                or p.stride() != stride
            ):
                return False
        return not any(p.requires_grad for p in self._frozen) if self._frozen else True

    def rooms(self, keeper: MeanKeeper) -> Steady:
        """Where the means of the uncertain ones are while those hold a sample."""
        if self._rooms is None:
            self._rooms = keeper.rooms(self.uncertain)
        return self._rooms

    def sampler(self, places: range, keeper: MeanKeeper) -> Sampler:
        """For the uncertain ones, which have these places among all groups'."""
        if self._sampler is None or self._sampler.indices != places:
            self._sampler = Sampler(
                self.uncertain, self.curvatures, places, self.rooms(keeper), self.uncertain_offsets
            )
        return self._sampler

    def updater(self, origins: Kept | None) -> Updater | None:
        """For all parameters with their means at home, or in their rooms; else, or without all state, there is none."""
        if self._momenta is None or not (origins is None or origins.places is self._rooms):
            return None
        away = origins is not None
        if away not in self._updaters:
            rooms = self._rooms if away else None
            self._updaters[away] = Updater(
                self.parameters, self._momenta, self.curvatures, rooms, self._offsets
            )
        return self._updaters[away]


def _offsets(states: Sequence[Mapping[str, Tensor]]) -> Steady | None:
    """From means to iterates: all of a group have one from their first gradient on, or none."""
    found = [own["offset"] for own in states if "offset" in own]
    return Steady(found) if found and len(found) == len(states) else None


def _look(p: Tensor, own: dict[str, Tensor]) -> tuple[Any, ...]:
    """What `fits` compares. State is made by the optimiser, in the parameter's order: it may move, but not turn."""
    s, m, z = own.get("curvature"), own.get("momentum"), own.get("offset")
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (p, s, m, z)]
    known = p, own, p.dtype, p.shape, p.stride()
    return (*known, addresses[0], s, addresses[1], m, addresses[2], z, addresses[3])


def averages(group: Mapping[str, Any]) -> bool:
    """Whether means of this group can be averages: with less than single precision, offsets would be rounded away."""
    return all(p.dtype in (torch.float32, torch.float64) for p in group["params"])


def refuse_other_sizes(group: Mapping[str, Any], p: Tensor, known: Mapping[str, Tensor]) -> None:
    """Kernels go by the parameter's size, and would write beyond what is smaller."""
    for name, tensor in known.items():
        if name != SCALE and tensor.numel() != p.numel():
            raise CallOrderError(
                f"parameter {parameter_names([group])[id(p)]!r} has shape {tuple(p.shape)}, but its {name} has shape "
                f"{tuple(tensor.shape)}: one of them was replaced. Construct the optimiser after changing the model."
            )


@final
class Plans(dict[int, Plan]):
    """By the group's id; and whom the last block watched, who may well be the same in the next."""

    subjects: WatchedParameters | None = None

    def forget_all_but(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Groups may have been removed, and plans hold their state."""
        present = set(map(id, groups))
        for gone in [key for key in self if key not in present]:
            del self[gone]

    def subjects_for(
        self, parameters: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], module: nn.Module | None
    ) -> WatchedParameters:
        """For a block that watches trainable parameters of the groups. Buffers are asked for anew: they come and go.

        It must not hold the optimiser, which holds it: garbage for the collector would be the end of both.
        """
        constants, known = [] if module is None else buffers_of(module), self.subjects
        if known is None or not identical(list(known.watched.values()), parameters):
            self.subjects = known = WatchedParameters(parameters, constants, partial(parameter_names, groups))
        else:
            known.constants = {id(constant): constant for constant in constants} if constants else {}
        return known


class Ready(NamedTuple):
    """The parameters of one group that have a gradient and squares in this step."""

    group: dict[str, Any]
    plan: Plan | None  # where it is about just these, and all of their state is there
    parameters: Sequence[Tensor]
    states: Sequence[dict[str, Tensor]]
    gradients: Sequence[Tensor]
    squares: Sequence[Tensor]

    def begin(self, unit: float, averages: bool) -> None:
        """State for a parameter at its first gradient: m₀ = 0, s₀ the first squares, unless it is given.

        If the mean is an average, the iterate starts at it, z − μ = 0.
        """
        for p, squares in zip(self.parameters, self.squares, strict=True):
            refuse_other_sizes(self.group, p, {"squares": squares})
        for p, own, squares in zip(self.parameters, self.states, self.squares, strict=True):
            if "momentum" not in own:
                own["momentum"] = torch.zeros_like(widen(p.detach()))
            if "curvature" not in own:
                own["curvature"] = squares * unit
            if averages and "offset" not in own:
                own["offset"] = torch.zeros_like(p.detach())

    def row(self, name: str) -> list[Tensor]:
        """What the states have under that name."""
        return [own[name] for own in self.states]


def ready_rows(group: dict[str, Any], plan: Plan, squares: Mapping[int, Tensor]) -> Ready | None:
    """What a step has for the parameters of a group, whose sums of squares are known by their ids."""
    found, gradients, sums = [], [], []
    for k, p in enumerate(plan.parameters):
        gradient, own = p.grad, squares.get(plan.keys[k])
        if gradient is not None and own is not None:
            found.append(k)
            gradients.append(gradient)
            sums.append(own)
    if not found:
        return None
    if plan.whole and len(found) == len(plan.parameters):
        return Ready(group, plan, plan.parameters, plan.states, gradients, sums)
    parameters, states = [plan.parameters[k] for k in found], [plan.states[k] for k in found]
    return Ready(group, None, parameters, states, gradients, sums)
