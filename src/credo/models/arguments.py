"""What every constructor here checks, at the call that is wrong and not inside the first forward."""

from torch import nn

from credo.errors import InvalidType, InvalidValue


def positive_int(name: str, value: object, at_least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name}={value!r} is a {type(value).__name__}; give an int of at least {at_least}")
    if value < at_least:
        raise InvalidValue(f"{name}={value} is too small; give an int of at least {at_least}")
    return value


def dropout_rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"dropout={value!r} is a {type(value).__name__}; give a number, 0 <= p < 1")
    if not 0 <= value < 1:
        raise InvalidValue(f"dropout={value} is outside 0 <= p < 1; 0 is none, the paper uses 0.1")
    return float(value)


def dropout_layer(rate: object) -> nn.Module:
    """Of rate 0 it is none: a layer that does nothing still costs a call, and more where calls are watched."""
    checked = dropout_rate(rate)
    return nn.Dropout(checked) if checked else nn.Identity()
