"""Numbers to look at when training fails: what is noise, what is signal, and what sets the step."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Literal, NamedTuple, final, overload

import torch
from torch import Tensor

from credo.curvature.rule import widen
from credo.distributed.sharding import WIDTHS, gathered
from credo.errors import InvalidValue
from credo.optim.relative import TensorNumbers


@dataclass(frozen=True)
class GroupDiagnostics:
    """A parameter group or a layer. Shares are means over its weights and sum to one; NaN where nothing is known.

    A layer with Kronecker factors has the directions of its eigenvectors in the place of weights, for the shares; it
    counts where its weight is. Bayes by Backprop has no s: what is not the prior's in 1/σ² is what the data have said,
    and less than nothing while σ is wider than the prior.
    """

    signal_to_noise: float  # median of |μ|/σ; far below 1: the noise drowns the weights
    curvature_share: float  # of s in s + δ̃ + γ: what the data say
    prior_share: float  # of δ̃
    damping_share: float  # of γ; near 1: the step is α/γ·m, and σ² does not depend on the data
    step_size: (
        float  # median of α/(s + δ̃ + γ), what a unit of m moves the mean by; Bayes by Backprop: the inner's α
    )
    noise: float  # median of σ
    lr: float  # α; this and the next three as chosen for the tensors, means over the weights
    damping: float  # γ
    tempering: float  # τ
    prior_precision: float  # δ; NaN under a posterior as prior
    weights: int
    refused_steps: int


@dataclass(slots=True)
class ParameterSummary:
    """One parameter with what is known of it, and the numbers of its group."""

    name: str
    parameter: Tensor
    curvature: Tensor | None  # s; None before its first gradient
    shrinkage: float | Tensor  # δ̃ = τδ/N
    numbers: TensorNumbers  # α, γ, τ, δ
    data_size: float  # N
    deterministic: bool

    @property
    def damping(self) -> float:
        """γ."""
        return float(self.numbers.damping)

    @property
    def tempering(self) -> float:
        """τ."""
        return float(self.numbers.tempering)

    @property
    def scale(self) -> float:
        """τ/N, so that σ² = scale / (s + δ̃ + γ)."""
        return self.tempering / self.data_size

    def variance(self, damped: bool = True) -> Tensor:
        s = torch.zeros_like(widen(self.parameter.detach())) if self.curvature is None else self.curvature
        return self.scale / (s + self.shrinkage + (self.damping if damped else 0.0))


class Part(NamedTuple):
    """Some weights of a group; the shares may be of as many directions instead."""

    mean: Tensor
    sigma: Tensor
    step: Tensor  # α times the diagonal of the inverse that the gradient is multiplied by
    curvature: Tensor
    prior: Tensor
    damping: Tensor
    numbers: TensorNumbers


def part_of(belief: ParameterSummary) -> Part:
    """A parameter whose precision is s + δ̃ + γ, weight by weight."""
    variance = belief.variance()
    precision = belief.scale / variance
    s = torch.zeros_like(precision) if belief.curvature is None else belief.curvature
    rest = precision - s
    damping = belief.damping / precision
    mean, numbers = belief.parameter.detach(), belief.numbers
    shares = s / precision, rest / precision - damping, damping
    return Part(mean, variance.sqrt(), numbers.lr / precision, *shares, numbers)


def summarise(group: Mapping[str, Any], parts: Sequence[Part], refused: int) -> GroupDiagnostics:
    rows = zip(*[part[:-1] for part in parts], strict=True)
    columns = [torch.cat([column.flatten() for column in row]) for row in rows] or [torch.empty(0)] * 6
    mean, sigma, step, curvature, prior, damping = columns
    means = _mean_numbers(parts)
    certain = group["deterministic"]
    return GroupDiagnostics(
        signal_to_noise=float("inf") if certain else float((mean.abs() / sigma).median()),
        curvature_share=float(curvature.mean()),
        prior_share=float(prior.mean()),
        damping_share=float(damping.mean()),
        step_size=float(step.median()),
        noise=0.0 if certain else float(sigma.median()),
        lr=means.lr,
        damping=means.damping,
        tempering=means.tempering,
        prior_precision=0.0 if certain else means.prior_precision,
        weights=mean.numel(),
        refused_steps=refused,
    )


def _mean_numbers(parts: Sequence[Part]) -> TensorNumbers:
    """Means over the weights."""
    total = sum(part.mean.numel() for part in parts)
    if not total:
        return TensorNumbers(*[float("nan")] * 4)
    columns = zip(*[part.numbers for part in parts], strict=True)
    weights = [part.mean.numel() / total for part in parts]
    return TensorNumbers(*(sum(w * float(x) for w, x in zip(weights, own, strict=True)) for own in columns))


class LayerDiagnostics(dict[str, GroupDiagnostics]):
    """LayerParameters → what is known of it; `print` shows a table."""

    def __str__(self) -> str:
        titles = [field.name.replace("_", " ") for field in fields(GroupDiagnostics)]
        rows = [[name, *(f"{value:.3g}" for value in astuple(own))] for name, own in self.items()]
        table = [["layer", *titles], *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in table
        )


class LayerParameters(NamedTuple):
    """Trainable parameters of one module in one group."""

    name: str
    group: dict[str, Any]
    members: list[Tensor]


def layers_of(groups: Iterable[dict[str, Any]], names: Mapping[int, str]) -> list[LayerParameters]:
    """A layer is what a module holds by itself, named like it: `features.0` has `features.0.weight` and `.bias`.

    Parameters of one module that lie in different groups, and those without a module, are layers of their own.
    """
    homes: dict[str, set[int]] = {}
    own = [(names[id(p)], g, p) for g in groups for p in g["params"] if p.requires_grad]
    for name, group, _ in own:
        homes.setdefault(name.rpartition(".")[0], set()).add(id(group))
    found: dict[str, LayerParameters] = {}
    for name, group, p in own:
        module = name.rpartition(".")[0]
        key = module if module and len(homes[module]) == 1 else name
        found.setdefault(key, LayerParameters(key, group, [])).members.append(p)
    return list(found.values())


class Diagnosed(torch.optim.Optimizer, ABC):
    """An optimiser that can tell what is noise and what is signal."""

    counters: dict[str, int]

    @abstractmethod
    def _parts(self, group: Mapping[str, Any]) -> Sequence[Part]:
        """What there is to know of the trainable parameters of a group."""

    @abstractmethod
    def _refuse_inside(self, what: str) -> None: ...

    @abstractmethod
    def names(self) -> dict[int, str]:
        """id → name; parameters that came without names are numbered."""

    @overload
    def diagnostics(self, by: Literal["group"] = "group") -> list[GroupDiagnostics]: ...

    @overload
    def diagnostics(self, by: Literal["layer"]) -> LayerDiagnostics: ...

    @final
    @torch.no_grad()
    @gathered(WIDTHS)
    def diagnostics(self, by: str = "group") -> list[GroupDiagnostics] | LayerDiagnostics:
        """Signal to noise, the shares of s, δ̃ and γ in the precision, the step size, refused steps.

        A list with a record for each group; with by="layer" a mapping from the names of layers to records.
        """
        self._refuse_inside("take diagnostics")
        refused = self.counters["refused"]
        if by == "group":
            return [summarise(group, self._parts(group), refused) for group in self.param_groups]
        if by != "layer":
            raise InvalidValue(f"by must be 'group' or 'layer', got {by!r}.")
        layers = layers_of(self.param_groups, self.names())
        return LayerDiagnostics(
            {own.name: summarise(own.group, parts_of(self, own), refused) for own in layers}
        )


def parts_of(optimizer: Diagnosed, layer: LayerParameters) -> Sequence[Part]:
    """What there is to know of a layer; nothing where the method knows nothing of it, such as deterministic weights."""
    return optimizer._parts({**layer.group, "params": layer.members})
