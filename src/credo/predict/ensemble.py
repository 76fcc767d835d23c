"""Ensembles as posteriors: networks trained from different seeds, or a mixture of posteriors."""

from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeAlias, final

from torch import nn

from credo.errors import InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior.base import Posterior
from credo.predict.dropout import DropoutPosterior, derived_key
from credo.predict.functions import AnyPosterior, DrawsFunctions, Functions, functions_of
from credo.predict.inputs import Batch
from credo.predict.prediction import Outputs, Read

Member: TypeAlias = nn.Module | Posterior | DrawsFunctions | tuple[nn.Module, AnyPosterior]


@final
class Ensemble:
    """An equal mixture of its members: p̂ = (1/E) Σₑ p̂ₑ, where p̂ₑ is what `predict` says of member e.

    A member is a module, of any architecture: one function, its own weights; a posterior, over the weights of
    the model given to `predict`: `samples` functions; or a pair (module, posterior), for another architecture.
    Posteriors of an optimiser that was built with the module carry its buffers (BatchNorm's running statistics); others
    that differ in buffers need the pair too.

        credo.predict(models[0], credo.Ensemble(models), x)                         # a deep ensemble
        credo.predict(model, credo.Ensemble([o.posterior() for o in optimizers]), x)  # a mixture of Gaussians
    """

    def __init__(self, members: Sequence[Member]) -> None:
        if isinstance(members, nn.Module | str) or not isinstance(members, Sequence):
            raise InvalidType(f"members must be a list of models or posteriors, got {type(members).__name__}")
        if not members:
            raise InvalidValue("members is empty; an ensemble needs at least one model or posterior")
        self._members = [_member(i, member) for i, member in enumerate(members)]

    def __len__(self) -> int:
        return len(self._members)

    def functions(
        self, model: nn.Module, samples: int, seed: int, read: Read, vectorise: bool | None
    ) -> Functions:
        """Member 0 draws with the seed itself: an ensemble of one is its member."""
        drawn = []
        for i, (own, posterior) in enumerate(self._members):
            key = derived_key(seed, i) if i else seed
            drawn.append(functions_of(own or model, posterior, samples, key, read, vectorise))
        points = [_is_point(posterior) for _, posterior in self._members]
        rows = [1] * len(points) if all(points) else [samples] * len(points)
        return EnsembleFunctions(drawn, rows)

    def scaled(self, factor: float) -> NoReturn:
        raise UnsupportedOperation(
            f"scaled({factor!r:.40}): an Ensemble has no variances of its own; scale the posteriors among its members,"
            " credo.Ensemble([q.scaled(factor) for q in posteriors]), or use predict(..., temperature=...)"
        )

    def __repr__(self) -> str:
        return f"Ensemble of {len(self._members)}"


class EnsembleFunctions:
    """The functions of one member after the other, each member with its number of rows."""

    def __init__(self, members: Sequence[Functions], rows: Sequence[int]) -> None:
        self._members, self._rows = members, rows

    def __call__(self, batch: Batch) -> Iterator[Outputs]:
        classes = None
        for member, rows in zip(self._members, self._rows, strict=True):
            given = 0
            for outputs in member(batch):
                classes = _same_shape(classes, outputs)
                given += len(outputs[0])
                yield outputs
            if given != rows:  # a point among sampled members answers as often as they do
                if given != 1:
                    raise InvalidValue(f"a member of the ensemble drew {given} functions instead of {rows}")
                yield tuple(tensor.expand(rows - 1, *tensor.shape[1:]) for tensor in outputs)


def _same_shape(known: object, outputs: Outputs) -> object:
    shape = tuple(tensor.shape[1:] for tensor in outputs)
    if known is not None and known != shape:
        raise InvalidValue(f"members of the ensemble disagree on the output's shape: {known} and {shape}")
    return shape


def _member(i: int, member: object) -> tuple[nn.Module | None, AnyPosterior]:
    if isinstance(member, nn.Module):
        return member, "mean"
    if isinstance(member, DropoutPosterior):
        return member.model, member
    if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], nn.Module):
        own, posterior = member
    else:
        own, posterior = None, member
    if isinstance(posterior, Ensemble):
        raise InvalidValue(
            f"members[{i}] is itself an Ensemble; list its members, as often as they should count"
        )
    if isinstance(posterior, Posterior | DrawsFunctions) or (own is not None and _is_point(posterior)):
        return own, posterior
    raise InvalidType(
        f"members[{i}] must be a torch.nn.Module, a posterior or a pair (module, posterior),"
        f" got {type(posterior).__name__}"
    )


def _is_point(posterior: object) -> bool:
    return isinstance(posterior, str) and posterior == "mean"
