"""One operation family a file; importing a file registers its rules."""

from credo.curvature.rules import convolution, elementwise, embedding, linear, normalisation, recurrent
from credo.curvature.rules.fallback import Generic
from credo.curvature.rules.registry import Rule, register_rule, rule_for

__all__ = [
    "Generic",
    "Rule",
    "convolution",
    "elementwise",
    "embedding",
    "linear",
    "normalisation",
    "recurrent",
    "register_rule",
    "rule_for",
]
