"""Which class a file's `kind` stands for. A new posterior joins by the decorator `register_kind`."""

from typing import TYPE_CHECKING, TypeVar

from credo.errors import InvalidValue, VersionError

if TYPE_CHECKING:
    from credo.posterior.base import Posterior

PosteriorClass = TypeVar("PosteriorClass", bound="type[Posterior]")

_KINDS: "dict[str, type[Posterior]]" = {}


def register_kind(cls: PosteriorClass) -> PosteriorClass:
    """Let `load_posterior` make this class from files that name its `kind`."""
    if cls.kind in _KINDS:
        raise InvalidValue(
            f"kind {cls.kind!r} already stands for {_KINDS[cls.kind].__name__}; choose another"
        )
    _KINDS[cls.kind] = cls
    return cls


def class_of(kind: str) -> "type[Posterior]":
    if kind not in _KINDS:
        raise VersionError(
            f"no posterior of kind {kind!r} here, only {', '.join(sorted(_KINDS))}; the file comes from a"
            " newer credo (upgrade) or a class of your own (import it, with @register_kind, before loading)"
        )
    return _KINDS[kind]
