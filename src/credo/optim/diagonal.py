"""What methods with a curvature for every weight have in common: numbers, state, summaries and a diagonal posterior."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from credo.distributed.sharding import WIDTHS, ElementShards, gathered
from credo.kernels.tensors import TensorList
from credo.optim.base import BayesianOptimizer
from credo.optim.checkpoints import SCALE
from credo.optim.diagnostics import ParameterSummary, Part, part_of
from credo.optim.groups import refuse_other_sizes
from credo.optim.means import place_iterates
from credo.optim.relative import TensorNumbers, is_relative, measure, numbers, scale_of


class Noisy(NamedTuple):
    """The parameters of one group that have a variance, what it is made of, and which among all of them they are."""

    weights: TensorList
    curvatures: TensorList
    offsets: TensorList | None
    scale: list[float]  # τ/N
    shift: list[float] | list[Tensor]  # δ̃ + γ
    places: range


class Resting(NamedTuple):
    """Those of one group that a block moves to their iterates and gives no noise."""

    parameters: TensorList
    offsets: TensorList


class DiagonalOptimizer(BayesianOptimizer):
    """`state[p]` has a "curvature" as large as the parameter: σ² = τ / (N(curvature + δ̃ + γ))."""

    _shards: ElementShards

    @abstractmethod
    def _moved_state(self, group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, on the parameter's device."""

    # What blocks change

    def _noisy(self) -> list[Noisy]:
        """Group by group, what samples are drawn of."""
        found, first = [], 0
        for group in self.param_groups if self._trains_with_noise else ():
            states = self._states(group, "curvature")
            if not states or group["deterministic"]:
                continue
            weights, curvatures, offsets = self._lists_of(group, states, "curvature", "offset")
            assert curvatures is not None
            own = self._numbers(group, states.values())
            priors = self._shrinkages(group, states.values(), own)
            scale = [n.tempering / self.data_size for n in own]
            damping = [n.damping for n in own]
            if isinstance(priors[0], Tensor):
                shift: Any = list(torch._foreach_add(priors, damping))
            else:
                shift = [prior + gamma for prior, gamma in zip(priors, damping, strict=True)]
            places = range(first, first + len(weights))
            found.append(Noisy(weights, curvatures, offsets, scale, shift, places))
            first += len(weights)
        return found

    def _resting(self) -> list[Resting]:
        """Group by group, what is moved to its iterates only."""
        found = []
        for group in self.param_groups if self.settings["averaging"] else ():
            states = self._states(group, "offset")
            if states and (group["deterministic"] or not self._trains_with_noise):
                parameters, offsets = self._lists_of(group, states, "offset")
                assert offsets is not None
                found.append(Resting(parameters, offsets))
        return found

    def _place_iterates(self, resting: Sequence[Resting]) -> None:
        for own in resting:
            place_iterates(self._backup, own.parameters, own.offsets)

    # The state and the numbers of parameters

    @final
    def _states(self, group: Mapping[str, Any], needed: str | None = None) -> dict[Tensor, dict[str, Tensor]]:
        """The trainable parameters of a group in order, with their state; only those that have what is `needed`."""
        found = {}
        for p in group["params"]:
            if p.requires_grad:
                own = self.state[p]
                known = own.get("curvature")
                if known is None or known.device != p.device:
                    own = self._moved_state(group, p)
                if needed is None or needed in own:
                    found[p] = own
        return found

    def _lists_of(
        self, group: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]], *names: str
    ) -> Any:
        """The parameters, and what their states have under these names, or None if not all have it; for kernels."""
        found: list[TensorList | None] = [self._list(group, "mean", list(states))]
        for name in names:
            row = [own[name] for own in states.values() if name in own]
            found.append(self._list(group, name, row) if row and len(row) == len(states) else None)
        for own_row in found[1:]:
            first = cast("TensorList", found[0])
            if own_row is not None and own_row.look().numels != first.look().numels:
                for p, own in states.items():
                    refuse_other_sizes(group, p, own)
        return found

    @final
    def _numbers(self, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> list[TensorNumbers]:
        """α, γ, τ and δ of each tensor with these states."""
        size = self.data_size
        if not is_relative(group):
            return [numbers(group, None, size, 1.0)] * len(list(states))
        grown = self._growth()
        return [numbers(group, own[SCALE], size, grown) for own in states]

    @final
    def _shrinkages(
        self, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]], own: Sequence[TensorNumbers]
    ) -> list[float] | list[Tensor]:
        """δ̃ = τδ/N of each tensor with these states: a number, or under a posterior as prior one a weight."""
        size = self.data_size
        if group["deterministic"]:
            return [0.0] * len(own)
        precisions = [state["prior_precision"] for state in states if "prior_precision" in state]
        if precisions:
            return list(torch._foreach_mul(precisions, [n.tempering / size for n in own]))
        return [n.tempering * n.prior_precision / size for n in own]

    @final
    def beliefs(self) -> Iterator[ParameterSummary]:
        """Every trainable parameter with what is known of it, in order."""
        names = self.names()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.requires_grad):
                state, own = self._moved_state(group, p), self._numbers_of(group, p)
                if "prior_precision" in state:
                    own = own._replace(prior_precision=math.nan)
                rest = own, self.data_size, group["deterministic"]
                yield ParameterSummary(
                    names[id(p)], p, state.get("curvature"), self._shrinkage(group, p), *rest
                )

    @final
    def _parts(self, group: Mapping[str, Any]) -> list[Part]:
        members = set(map(id, group["params"]))
        return [part_of(b) for b in self.beliefs() if id(b.parameter) in members]

    def _set_scales(
        self,
        states: Sequence[dict[str, Any]],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor] | None,
    ) -> None:
        """Measures tensors anew, or for the first time, with gradients; with parts of them, over all ranks."""
        rows = []
        for k, (own, p) in enumerate(zip(states, parameters, strict=True)):
            rows.append(measure(p, own["curvature"], None if gradients is None else gradients[k]))
        sums = torch.stack([row.cpu() for row in rows])
        sizes = torch.tensor([[float(p.numel())] for p in parameters], dtype=torch.float64)
        if self._shards.sharded:
            both = torch.cat([sums, sizes], 1)
            self._world.add_(both)
            sums, sizes = both[:, :3], both[:, 3:]
        counts = sizes.flatten().tolist()
        for own, p, row, size in zip(states, parameters, sums, counts, strict=True):
            new = scale_of(row, round(size), p.dim() > 1)
            if (known := own.get(SCALE)) is not None:
                new[0], new[2] = known[0], new[2] or known[2]
            own[SCALE] = new

    @final
    @gathered(WIDTHS)
    def curvature(self) -> dict[str, Tensor]:
        """The curvature by name, such as the running mean of squared per-example gradients; a copy."""
        return {b.name: b.curvature.clone() for b in self.beliefs() if b.curvature is not None}
