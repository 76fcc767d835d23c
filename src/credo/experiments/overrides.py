"""`key=value`: a change to a Training, with names and types as strict as in a recipe.

A key is a field (`epochs=3`, `milestones=20,40`, `augment=true`), an option of the method (`lr=0.01`, or in full
`settings.lr=0.01`) or of the model (`model_options.width=16`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from credo.errors import InvalidType, InvalidValue
from credo.experiments.methods import check_type, method_of
from credo.experiments.names import unknown
from credo.experiments.networks import options_of
from credo.experiments.recipe import Training

TABLES: Final = ("settings", "model_options")


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """["lr=0.1", "epochs=3"] → {"lr": "0.1", "epochs": "3"}; a key given twice is an error."""
    found: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        key = key.strip()
        if not sign or not key:
            raise InvalidValue(f"{text!r} is no key=value.")
        if key in found:
            raise InvalidValue(f"{key} is set twice: {found[key]!r} and {value.strip()!r}.")
        found[key] = value.strip()
    return found


def with_overrides(training: Training, overrides: Mapping[str, object]) -> Training:
    """The training with these changes. Text is read as what the key needs; other values must have its type."""
    first = ("method", "model", "task")  # what options there are depends on them
    for key in sorted(overrides, key=lambda key: (key not in first, key)):
        training = _with_one(training, key, overrides[key])
    return training


def _with_one(training: Training, key: str, value: object) -> Training:
    options = _options(training)
    if key in FIELD_READERS:
        return replace(training, **{key: read_field(key, value)})
    if key not in options:
        raise unknown("key", key, [*FIELD_READERS, *options])
    default, (table, name) = options[key]
    changed: dict[str, Any] = {table: {**getattr(training, table), name: read_option(key, value, default)}}
    return replace(training, **changed)


def _options(training: Training) -> dict[str, tuple[object, tuple[str, str]]]:
    """Every key that names an option: its default, and where it belongs."""
    method = method_of(training.method).settings
    model = options_of(training.model) if isinstance(training.model, str) else {}
    found = {name: (default, ("settings", name)) for name, default in method.items()}
    found |= {f"settings.{name}": (default, ("settings", name)) for name, default in method.items()}
    return found | {
        f"model_options.{name}": (default, ("model_options", name)) for name, default in model.items()
    }


def read_option(key: str, value: object, default: object) -> Any:
    if isinstance(value, str) and not isinstance(default, str):
        reader = _boolean if isinstance(default, bool) else _whole if isinstance(default, int) else _number
        value = reader(key, value)
    check_type(key, value, default)
    return value


def read_field(key: str, value: object) -> Any:
    """A field from text, or from a value that must already be right."""
    return FIELD_READERS[key](key, value)


def _text(key: str, value: object) -> str:
    return str(_of_type(key, value, str, "text"))


def _whole(key: str, value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise InvalidType(f"{key} must be a whole number, got {value!r}.") from None
    return int(_of_type(key, value, int, "a whole number"))


def _number(key: str, value: object) -> float:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise InvalidType(f"{key} must be a number, got {value!r}.") from None
    return float(_of_type(key, value, (int, float), "a number"))


def _boolean(key: str, value: object) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    return bool(_of_type(key, value, bool, "true or false"))


def _many(one: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    def read(key: str, value: object) -> Any:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
            return tuple(one(key, part) for part in value)
        parts = _of_type(key, value, (list, tuple), "a list")
        if one is not _text and any(isinstance(part, str) for part in parts):
            raise InvalidType(f"{key} must be a list of numbers, got {value!r}.")
        return tuple(one(key, part) for part in parts)

    return read


def _or_none(one: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    def read(key: str, value: object) -> Any:
        return None if value is None or value == "none" else one(key, value)

    return read


def _of_type(key: str, value: Any, kinds: type | tuple[type, ...], words: str) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise InvalidType(f"{key} must be {words}, got {value!r} of type {type(value).__name__}.")
    return value


FIELD_READERS: Final[dict[str, Callable[[str, object], Any]]] = {
    "method": _text,
    "model": _text,
    "data": _text,
    "task": _text,
    "epochs": _whole,
    "batch_size": _whole,
    "samples": _whole,
    "augment": _boolean,
    "train_size": _or_none(_whole),
    "test_size": _or_none(_whole),
    "validation_size": _or_none(_whole),
    "epoch_samples": _or_none(_whole),
    "epoch_test_size": _or_none(_whole),
    "cosine": _boolean,
    "mc_groups": _or_none(_whole),
    "milestones": _many(_whole),
    "held_out_classes": _many(_whole),
    "ood": _many(_text),
    "decay": _number,
    "warmup_epochs": _number,
    "warmup_from": _number,
    "tempering_epochs": _number,
    "tempering_from": _or_none(_number),
}
assert FIELD_READERS.keys() | set(TABLES) == {field.name for field in fields(Training)}
