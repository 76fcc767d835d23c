"""What K-FAC knows at any time: the layers with their factors, the other parameters with their squares."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor

from credo.optim.beliefs import Belief
from credo.optim.checkpoints import SCALE
from credo.optim.diagnostics import Part, part_of
from credo.optim.factor_blocks import FactorOptimizer
from credo.optim.kronecker_layers import KroneckerLayer, forget, forget_bias
from credo.optim.relative import TensorNumbers, is_relative, numbers, start_scale


class KroneckerState(FactorOptimizer):
    """`settings["layers"]` says by name which weight has factors and which bias is its; the backward passes tell."""

    @final
    def layers(self) -> list[KroneckerLayer]:
        """The layers with Kronecker factors, in the order of their weights."""
        entries, found = self._entries(), []
        for name, bias_name in self.settings["layers"].items():
            place, weight, group = entries[name]
            bias = None if bias_name is None else entries[bias_name][1]
            state = self._moved_state(weight)
            shrinkage = self._mean_shrinkage([entries[n][1:] for n in (name, bias_name) if n is not None])
            own = self._numbers_of(group, weight)
            numbers = shrinkage, own.damping, own.tempering
            found.append(KroneckerLayer(weight, bias, (name, bias_name), group, state, place, *numbers))
        return sorted(found, key=lambda layer: layer.place)

    @final
    def own_layers(self) -> list[KroneckerLayer]:
        """Those whose factors this rank keeps: all of them, unless they are spread over the ranks."""
        return [layer for layer in self.layers() if self._shards.mine(self, layer.names[0])]

    @final
    def beliefs(self) -> Iterator[Belief]:
        """Every trainable parameter outside the layers with what is known of it, in order."""
        inside = self._in_layers()
        for name, (_, p, group) in self._entries().items():
            if p.requires_grad and name not in inside:
                curvature, shrinkage = self._moved_state(p).get("curvature"), self._shrinkage(group, p)
                own = self._numbers_of(group, p)
                if "prior_precision" in self.state[p]:
                    own = own._replace(prior_precision=math.nan)
                yield Belief(name, p, curvature, shrinkage, own, self.data_size, group["deterministic"])

    def _entries(self) -> dict[str, tuple[int, Tensor, dict[str, Any]]]:
        """Name → place among all parameters, parameter, group."""
        names, every = self.names(), [(p, g) for g in self.param_groups for p in g["params"]]
        return {names[id(p)]: (k, p, g) for k, (p, g) in enumerate(every)}

    def _groups(self) -> dict[int, dict[str, Any]]:
        return {id(p): group for group in self.param_groups for p in group["params"]}

    def _in_layers(self) -> set[str]:
        pairs = self.settings["layers"].items()
        return {name for pair in pairs for name in pair if name is not None}

    @final
    def _parts(self, group: Mapping[str, Any]) -> list[Part]:
        members, form = set(map(id, group["params"])), self.settings["damping_form"]
        layers = [layer for layer in self.layers() if id(layer.weight) in members]
        rest = [part_of(b) for b in self.beliefs() if id(b.parameter) in members]
        numbers = [self._numbers_of(layer.group, layer.weight) for layer in layers]
        return [
            _part_of_layer(layer, own, form, self.data_size)
            for layer, own in zip(layers, numbers, strict=True)
        ] + rest

    @final
    def _unknown(self) -> list[str]:
        return [b.name for b in self.beliefs() if b.curvature is None]

    def _moved_state(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, on the parameter's device."""
        state: dict[str, Tensor] = self.state[p]
        for key, value in state.items():
            if value.device != p.device and key != SCALE:
                state[key] = value.to(p.device)
        return state

    def _shrinkage(self, group: dict[str, Any], p: Tensor) -> float | Tensor:
        """δ̃ = τδ/N, a number or, under a posterior as prior, one a weight; none for normalisation layers."""
        if group["deterministic"]:
            return 0.0
        own = self._numbers_of(group, p)
        precision: float | Tensor = self.state[p].get("prior_precision", own.prior_precision)
        unit: float = own.tempering / self.data_size
        return precision * unit

    @final
    def _numbers_of(self, group: Mapping[str, Any], p: Tensor) -> TensorNumbers:
        """α, γ, τ and δ of one parameter, which may not have seen data yet."""
        scale = None
        if is_relative(group):
            scale = self.state[p].get(SCALE)
            scale = start_scale(p) if scale is None else scale
        return numbers(group, scale, self.data_size, self._growth())

    def _mean_shrinkage(self, members: list[tuple[Tensor, dict[str, Any]]]) -> float | Tensor:
        """δ̃ as the damping of a layer, which is one number: the mean over its weights."""
        total: float | Tensor = 0.0
        for p, group in members:
            own = self._shrinkage(group, p)
            total = total + (own.sum() if isinstance(own, Tensor) else own * p.numel())
        return total / sum(p.numel() for p, _ in members)

    @final
    def _follow_freezing(self) -> None:
        """A layer whose weight is frozen is none; one whose bias is frozen is the layer given that bias."""
        if all(p.requires_grad for layer in self.layers() for p in layer.members):
            return
        with self._shards.whole(self):  # what leaves its layer belongs to all ranks from here on
            self.settings["layers"] = dict(self._unfrozen())

    def _unfrozen(self) -> Iterator[tuple[str, str | None]]:
        for layer in self.layers():
            name, bias_name = layer.names
            if not layer.weight.requires_grad:
                forget(layer.state)
                continue
            if layer.bias is not None and not layer.bias.requires_grad:
                forget_bias(layer.state)
                layer.invert(self.settings["damping_form"])
                bias_name = None
            yield name, bias_name


def _part_of_layer(layer: KroneckerLayer, own: TensorNumbers, form: str, data_size: float) -> Part:
    """Shares by the eigenvalues of A ⊗ G; what "pi" adds beside δ̃ + γ is shared out as these are."""
    inverse = layer.root(form).variance()  # the diagonal of H⁻¹
    mean = layer.packed(*(p.detach() for p in layer.members))
    sigma = (layer.tempering / data_size * inverse).sqrt()
    curvature, total = layer.eigenvalues(form)
    rest = (total - curvature) / total
    of_prior = layer.shrinkage / (layer.shrinkage + layer.damping)
    shares = curvature / total, rest * of_prior, rest * (1 - of_prior)
    return Part(mean, sigma, own.lr * inverse, *shares, own)
