"""Keeps the squares: what each use contributes, what must wait for other uses, and for how many examples."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from credo.curvature.contribution import Contribution, chunked_squares, widen
from credo.curvature.operation import Operation
from credo.curvature.provenance import Source
from credo.errors import CallOrderError, UnsupportedOperation
from credo.kernels.scratch import give_back


@dataclass(eq=False, slots=True)
class Use:
    """One watched call in the user's graph, and the source in each of its slots that holds one."""

    operation: Operation
    sources: tuple[Source | None, ...]
    ledger: "Ledger"
    order: int  # of the call in the forward pass


@dataclass(eq=False, slots=True)
class BackwardPass:
    """One run of the autograd engine: which parameters may be squared at once, and which wait for its end."""

    examples: int
    wanted: Container[int]  # ids of the parameters whose gradient was asked for
    single: Container[int]  # ids of those of them with exactly one use
    deferred: dict[int, list[tuple[Source, Contribution]]] = field(default_factory=dict)
    squared: set[int] = field(default_factory=set)

    def join(self, outer: "BackwardPass") -> None:
        """Becomes part of the pass in which it runs: nothing is squared before that one ends."""
        self.examples = outer.examples or self.examples
        outer.examples = self.examples
        self.single = frozenset()
        self.deferred, self.squared = outer.deferred, outer.squared


class Ledger:
    """Σᵢ rᵢ² for each watched parameter, as the backward passes of one block deliver it."""

    def __init__(self, parameters: Mapping[int, Tensor], names: Callable[[], Mapping[int, str]]):
        self.parameters = parameters
        self.names = names
        self.squares: dict[int, Tensor] = {}
        self.examples = 0
        self.closed = False
        self.current: BackwardPass | None = None

    def __del__(self) -> None:
        give_back(self.squares.values())  # for the next block; nobody else has ever held them

    def receive(self, current: BackwardPass, source: Source | None, contribution: Contribution) -> Tensor:
        """Notes one use of a source and returns its ordinary gradient Σᵢ rᵢ."""
        if source is None:
            return contribution.total()
        if source.selects and (key := id(source.roots[0])) in current.single:
            if key in current.squared or key in current.deferred:
                self._refuse_hidden_use(key)
            current.squared.add(key)
            total, squares = contribution.total_and_squares()
            self._add(key, squares if source.is_parameter else source.pull_one(squares, source.roots[0]))
            return total
        for key in map(id, source.roots):
            if key in current.squared:
                self._refuse_hidden_use(key)
            if key in current.wanted:
                current.deferred.setdefault(key, []).append((source, contribution))
        return contribution.total()

    def _add(self, key: int, squares: Tensor) -> None:
        known = self.squares.get(key)
        if known is None:
            self.squares[key] = widen(squares)
        else:
            known += squares

    def settle(self, finished: BackwardPass) -> None:
        """Squares what had to wait: for each example the sum over all uses first, the square after."""
        for key, uses in finished.deferred.items():
            root = self.parameters[key]

            def summed(start: int, stop: int, root: Tensor = root, uses: list = uses) -> Tensor:  # type: ignore[type-arg]
                parts = [source.pull(part.per_example(start, stop), root) for source, part in uses]
                return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

            with torch.no_grad():
                like = widen(root.detach())
                self._add(key, chunked_squares(summed, finished.examples, like))
        if finished.squared or finished.deferred:  # else only gradients of inputs were asked for
            self.examples += finished.examples

    def require_pass(self) -> BackwardPass:
        if self.closed:
            raise CallOrderError(
                "backward was called after the block in which the forward ran had ended, so the gradient does "
                "not belong to the weights any more. Call loss.backward() inside the block."
            )
        if self.current is None:
            raise CallOrderError(
                "a backward pass began where it could not be seen (on another thread, or inside the engine). "
                "Call loss.backward() on the thread that entered the block."
            )
        return self.current

    def _refuse_hidden_use(self, key: int) -> None:
        raise UnsupportedOperation(
            f"parameter {self.names()[key]!r} is used both inside and outside a re-entrant checkpoint, so "
            "its uses cannot be added before they are squared. Use torch.utils.checkpoint(..., use_reentrant=False)."
        )
