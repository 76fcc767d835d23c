"""Runs the body of a torch function written in Python, so that the operations inside it can be seen.

Such a function (F.multi_head_attention_forward, say) first asks whether somebody overrides it, and
hands itself over as a whole. What is watched are the operations in its body. `without_override` gives
the same code with that question answered by no.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def can_run_inside(function: Any) -> bool:
    return isinstance(function, FunctionType) and (function.__module__ or "").startswith("torch")


@cache
def without_override(function: FunctionType) -> Callable[..., Any]:
    """The same function, which does not offer itself for overriding."""
    return with_globals(function, dict.fromkeys(_QUESTIONS, _no))


def with_globals(function: FunctionType, others: dict[str, Any]) -> Callable[..., Any]:
    """The same function, which finds `others` where its module has such names."""
    known = function.__globals__
    scope = {**known, **{name: value for name, value in others.items() if name in known}}
    twin = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _no(*_: Any) -> bool:
    return False
