"""A Training changed by `key=value`, and checked before a run begins, so that nothing fails for a slip after an hour.

A key is a field (`epochs=3`, `milestones=20,40`, `augment=true`), an option of the method (`lr=0.01`, or in full
`settings.lr=0.01`) or of the model (`model_options.width=16`). Names and types are as strict as in a recipe.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from credo.errors import InvalidType, InvalidValue
from credo.experiments.build import NETWORKS, options_of
from credo.experiments.methods import check_type, checked_options, method_of
from credo.experiments.names import known, unknown
from credo.experiments.recipe import TaskStream, Training
from credo.experiments.streams import stream_method
from credo.experiments.tasks import TASKS
from credo.optim.arguments import number, seed, whole
from credo.optim.bayes_by_backprop import RELATIVE

TABLES: Final = ("settings", "model_options")
OF_STREAMS: Final = (*TABLES, "method", "model", "data", "epochs", "batch_size", "samples", "tasks")


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
    if overrides and training.tasks is not None:
        raise InvalidValue(
            "this is a stream of tasks, whose settings cannot be changed by key=value (--set)."
        )
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
    if isinstance(value, str) and default == RELATIVE != value:  # a number in place of the word
        value = _number(key, value)
    elif isinstance(value, str) and not isinstance(default, str):
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
assert FIELD_READERS.keys() | {*TABLES, "tasks"} == {field.name for field in fields(Training)}


# The check of a whole Training

RESUME = ("auto", "fallback", True, False)


def check_training(training: Training) -> None:
    """Names, types and ranges; the error names the field."""
    if not isinstance(training, Training):
        raise InvalidType(f"training must be a Training, got {type(training).__name__}.")
    stream = training.tasks is not None
    settings = stream_method(training.method).settings if stream else method_of(training.method).settings
    checked_options("settings", training.settings, settings)
    known("task", training.task, TASKS)
    if isinstance(training.model, str):
        known("model", training.model, NETWORKS)
        checked_options("model_options", training.model_options, options_of(training.model))
    elif not callable(training.model):
        raise InvalidType(f"model must be a name or a function, got {type(training.model).__name__}.")
    if not isinstance(training.data, str) and not callable(training.data):
        raise InvalidType(f"data must be a name or a function, got {type(training.data).__name__}.")
    _check_numbers(training)
    if training.tasks is not None:
        _check_stream(training, training.tasks)


def _check_stream(training: Training, stream: TaskStream) -> None:
    """A field that streams do not have would be passed over in silence: it must be as it is by default."""
    known("tasks.kind", stream.kind, ("permuted", "split"))
    known("tasks.start", stream.start, ("fresh", "mean"))
    whole_number("tasks.count", stream.count, 1)
    number("tasks.hold", stream.hold, 0, 1, open_high=True)
    number("tasks.last_lr", stream.last_lr, 0, 1, open_low=True)
    number("tasks.strength", stream.strength, 0, math.inf)
    if stream.online is not None:
        number("tasks.online", stream.online, 0, 1, open_low=True)
    for field in fields(training):
        if field.name not in OF_STREAMS and getattr(training, field.name) != field.default:
            raise InvalidValue(
                f"{field.name}={getattr(training, field.name)!r} is not for a stream of tasks. Leave it out."
            )
    if stream.kind == "split" and (
        training.model != "mlp" or not {*training.model_options} <= {"width", "layers"}
    ):
        raise InvalidValue(
            f"tasks.kind='split' makes a head for each task, and needs model='mlp' with no options but width and "
            f"layers; got model={training.model!r} with {dict(training.model_options)}."
        )


def _check_numbers(training: Training) -> None:
    for name in ("epochs", "batch_size", "samples"):
        whole_number(name, getattr(training, name), 1)
    for name in (
        "train_size",
        "test_size",
        "validation_size",
        "epoch_samples",
        "epoch_test_size",
        "mc_groups",
    ):
        if getattr(training, name) is not None:
            whole_number(name, getattr(training, name), 1)
    for epoch in training.milestones:
        whole_number("milestones", epoch, 1)
    number("decay", training.decay, 0, math.inf, open_low=True)
    for name in ("warmup_epochs", "warmup_from", "tempering_epochs"):
        number(name, getattr(training, name), 0, math.inf)
    if training.tempering_from is not None:
        number("tempering_from", training.tempering_from, 0, 1, open_low=True)
    for name in ("augment", "cosine"):
        if not isinstance(getattr(training, name), bool):
            raise InvalidType(f"{name} must be True or False, got {getattr(training, name)!r}.")
    if training.cosine and training.warmup_epochs >= training.epochs:
        raise InvalidValue(
            f"cosine=True needs epochs after the warm-up: warmup_epochs={training.warmup_epochs} must be below "
            f"epochs={training.epochs}."
        )


def check_seed(value: Any) -> int:
    """0 … 2⁶³ − 1; there is no seed that means "any", so that every run can be repeated."""
    if not isinstance(value, int):
        raise InvalidType(f"seed must be a whole number of at least 0, got {value!r}.")
    return seed(value)


def check_resume(value: Any) -> None:
    if not any(value is option or value == option for option in RESUME):
        raise InvalidValue(f"resume must be 'auto', 'fallback', True or False, got {value!r}.")


def whole_number(name: str, value: Any, low: int) -> int:
    """As in a recipe: 10.0 is no 10 here."""
    if not isinstance(value, int):
        raise InvalidType(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}.")
    return whole(name, value, low)
