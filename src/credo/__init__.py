"""credo: deep networks that know how sure they are, by changing the optimiser and nothing else."""

from credo import kernels
from credo.curvature.capture import capture, squared_gradients
from credo.curvature.operation import Operation
from credo.curvature.rules import register_rule

__version__ = "0.1.0"

__all__ = ["Operation", "capture", "kernels", "register_rule", "squared_gradients"]
