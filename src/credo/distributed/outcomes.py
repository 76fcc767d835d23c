"""An error on one rank is an error on all, at once and in its own words, where else they would wait for it."""

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from credo import errors
from credo.distributed.world import World
from credo.errors import CredoError

T = TypeVar("T")

# What can be made again from its message alone; of any other error the nearest of its ancestors, or CredoError.
REVIVED: Final[dict[str, type[Exception]]] = {
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type)},
    **{
        kind.__name__: kind
        for kind in (
            FileNotFoundError,
            NotADirectoryError,
            IsADirectoryError,
            PermissionError,
            OSError,
            MemoryError,
        )
    },
}


def outcome_of_all(world: World, action: Callable[[], T]) -> T:
    """What the action returns on this rank; if it fails on any, all raise what the first of those has raised.

    On the other ranks the error has an attribute `rank`: who has had it.
    """
    if world.alone:
        return action()
    value, failure = _tried(action)
    _raise_first(
        [json.loads(text) for text in world.gather_texts(json.dumps(_told(failure)))], world, failure
    )
    return value  # type: ignore[return-value]  # without a failure it is one


def outcome_of_first(world: World, action: Callable[[], T]) -> T:
    """Only rank 0 acts; what it returns, which JSON must be able to hold, or raises, goes for all."""
    if world.alone:
        return action()
    value, failure = _tried(action) if world.rank == 0 else (None, None)
    told = [json.loads(text) for text in world.gather_texts(json.dumps({**_told(failure), "value": value}))]
    _raise_first(told, world, failure)
    found: T = told[0]["value"]
    return found


def _tried(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _told(failure: Exception | None) -> dict[str, Any]:
    if failure is None:
        return {}
    return {"kinds": [kind.__name__ for kind in type(failure).__mro__], "message": str(failure)}


def _raise_first(told: list[dict[str, Any]], world: World, failure: Exception | None) -> None:
    for rank, theirs in enumerate(told):
        if "kinds" in theirs:
            if rank == world.rank and failure is not None:
                raise failure
            raise _revived(rank, theirs["kinds"], theirs["message"]) from failure


def _revived(rank: int, kinds: list[str], message: str) -> Exception:
    kind = next((REVIVED[name] for name in kinds if name in REVIVED), CredoError)
    error = kind(f"rank {rank}: {message or kinds[0]}")
    error.rank = rank  # type: ignore[attr-defined]
    return error
