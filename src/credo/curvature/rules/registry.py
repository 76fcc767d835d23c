"""The one place where an operation is known: function → rule.

A rule takes the arguments of the function it is registered for, by the same names and in the same
order, and returns an `Operation`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from credo.curvature.rule import Operation
from credo.errors import InvalidType

Rule = Callable[..., Operation]
R = TypeVar("R", bound=Rule)

_RULES: dict[Any, Rule] = {}


def register_rule(*functions: Callable[..., Any]) -> Callable[[R], R]:
    """Registers a rule for functions that torch lets others override; the last registration holds.

        @credo.register_rule(torch.ops.mylib.scale)
        class Scale(credo.Operation):
            ...

    Torch functions and methods, operators of `torch.library`, and Python functions that call
    `torch.overrides.handle_torch_function` can be overridden.
    """
    for function in functions:
        if not callable(function):
            raise InvalidType(
                f"register_rule: functions must be callables such as torch.nn.functional.linear, got {function!r}."
            )

    def register(rule: R) -> R:
        for function in functions:
            _RULES[function] = rule
        return rule

    return register


rule_for: Callable[[Any], Rule | None] = _RULES.get  # asked at every operation
