"""What a block may do to a watched operation before it runs: give it many weights, or have it leave its factors."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from credo.curvature.operation import Operation
from credo.curvature.provenance import Source

Watch = Callable[[Operation, tuple[Source | None, ...]], Any]


class Arrangement(Protocol):
    def apply(self, operation: Operation, sources: tuple[Source | None, ...], watch: Watch) -> Any:
        """Runs the operation, or what takes its place, by `watch`."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a call without parameters, or what takes its place."""

    def refuse_backward(self) -> None:
        """Raises where no backward pass may begin."""

    @property
    def needs_rules(self) -> bool:
        """Whether an operation on parameters without a rule goes to `run_without_rule`, not row by row."""

    def run_without_rule(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a look at parameters, a comparison; raises where the result has a gradient."""

    def derive(self, function: Any, make: Callable[[Callable[[Tensor], Tensor]], Any], made: Any) -> None:
        """Hears what a function of parameters alone has made; `make` makes it of other values for its tensors."""

    def refuse_left_out(self, counted: int, examples: int) -> None:
        """Raises where a loss that leaves examples out cannot be served."""
