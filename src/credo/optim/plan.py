"""What does not change from step to step: which parameters of a group are trained, and where their state is."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credo.curvature.contribution import widen
from credo.curvature.subjects import Subjects, buffers_of
from credo.kernels.lists import Steady
from credo.optim.groups import parameter_names

State = Mapping[Tensor, dict[str, Tensor]]


def identical(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two rows hold the same objects. Equal tensors are not enough, and comparing them would take long."""
    return len(one) == len(other) and all(map(is_, one, other))


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
        self.parameters = Steady([p for p in self._all if p.requires_grad])
        self.states = [state[p] for p in self.parameters]
        with_curvature = [k for k, own in enumerate(self.states) if "curvature" in own]
        self.uncertain = Steady([self.parameters[k] for k in with_curvature])
        self.curvatures = Steady([self.states[k]["curvature"] for k in with_curvature])
        whole = all("curvature" in own and "momentum" in own for own in self.states)
        self.momenta = Steady([own["momentum"] for own in self.states]) if whole else None
        self.rooms: Steady | None = None  # for the means of the uncertain ones, once they were away
        self.keeps = all(t.is_cpu for t in chain(self._all, *[own.values() for own in self.states]))
        self._rows = self._state_rows()
        self._seen = self._look() if self.keeps else []

    def fits(self, group: Mapping[str, Any], state: State) -> bool:
        return (
            identical(group["params"], self._all)
            and all(map(is_, map(state.get, self.parameters), self.states))
            and identical(self._state_rows(), self._rows)
            and self._look() == self._seen
        )

    def _state_rows(self) -> list[Tensor | None]:
        return [own.get(name) for own in self.states for name in ("curvature", "momentum")]

    def _look(self) -> list[object]:
        """All that could have changed, but for what the objects are."""
        return [
            *[(p.requires_grad, p.dtype, p.data_ptr(), p.shape, p.stride()) for p in self._all],
            *[None if t is None else (t.data_ptr(), t.stride()) for t in self._rows],
        ]


@final
class Plans(dict[int, Plan]):
    """By the group's id; and whom the last block watched, who may well be the same in the next."""

    subjects: Subjects | None = None

    def forget_all_but(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Groups may have been removed, and plans hold their state."""
        present = set(map(id, groups))
        for gone in [key for key in self if key not in present]:
            del self[gone]

    def subjects_for(
        self, parameters: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], module: nn.Module | None
    ) -> Subjects:
        """For a block that watches trainable parameters of the groups. Buffers are asked for anew: they come and go.

        It must not hold the optimiser, which may hold its sums.
        """
        constants, known = [] if module is None else buffers_of(module), self.subjects
        if known is None or not identical(list(known.watched.values()), parameters):
            self.subjects = known = Subjects(parameters, constants, partial(parameter_names, groups))
        else:
            known.constants = {id(constant): constant for constant in constants}
        return known


class Ready(NamedTuple):
    """The parameters of one group that have a gradient and squares in this step."""

    group: dict[str, Any]
    plan: Plan | None  # where it is about just these, and all of their state is there
    parameters: Sequence[Tensor]
    states: Sequence[dict[str, Tensor]]
    gradients: Sequence[Tensor]
    squares: Sequence[Tensor]

    def begin(self, unit: float) -> None:
        """State for a parameter at its first gradient: m₀ = 0, s₀ the first squares, unless it is given."""
        for p, own, squares in zip(self.parameters, self.states, self.squares, strict=True):
            if "momentum" not in own:
                own["momentum"] = torch.zeros_like(widen(p.detach()))
            if "curvature" not in own:
                own["curvature"] = squares * unit

    def momenta(self) -> Sequence[Tensor]:
        known = None if self.plan is None else self.plan.momenta
        return [own["momentum"] for own in self.states] if known is None else known

    def curvatures(self) -> Sequence[Tensor]:
        return [own["curvature"] for own in self.states] if self.plan is None else self.plan.curvatures


def ready_rows(group: dict[str, Any], plan: Plan, squares: Mapping[int, Tensor]) -> Ready | None:
    """What a step has for the parameters of a group, whose sums of squares are known by their ids."""
    found = [
        (p, own, gradient, squares[id(p)])
        for p, own in zip(plan.parameters, plan.states, strict=True)
        if (gradient := p.grad) is not None and id(p) in squares
    ]
    if not found:
        return None
    parameters, *rows = zip(*found, strict=True)
    if plan.momenta is None or len(found) < len(plan.parameters):
        return Ready(group, None, parameters, *rows)
    return Ready(group, plan, plan.parameters, *rows)
