"""Keeps the squares: what each use contributes, what must wait for other uses, and for how many examples."""

from collections.abc import Sequence
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
    wanted: frozenset[int]  # ids of the parameters whose gradient was asked for
    single: frozenset[int]  # ids of the parameters with exactly one use
    deferred: dict[int, list[tuple[Source, Contribution]]] = field(default_factory=dict)
    squared: set[int] = field(default_factory=set)

    def wanted_of(self, source: Source | None) -> Sequence[Tensor]:
        """The roots of a source whose gradient was asked for."""
        if source is None or (source.is_parameter and id(source.tensor) in self.wanted):
            return () if source is None else source.roots
        return [root for root in source.roots if id(root) in self.wanted]

    def join(self, outer: "BackwardPass") -> None:
        """Becomes part of the pass in which it runs: nothing is squared before that one ends."""
        self.examples = outer.examples or self.examples
        outer.examples = self.examples
        self.single = frozenset()
        self.deferred, self.squared = outer.deferred, outer.squared


class Ledger:
    """Σᵢ rᵢ² for each watched parameter, as the backward passes of one block deliver it."""

    def __init__(self, parameters: dict[int, Tensor], names: dict[int, str]):
        self.parameters = parameters
        self.names = names
        self.squares: dict[int, Tensor] = {}
        self.examples = 0
        self.closed = False
        self.current: BackwardPass | None = None

    def __del__(self) -> None:
        give_back(self.squares.values())  # for the next block; nobody else has ever held them

    def receive(self, source: Source | None, contribution: Contribution) -> Tensor:
        """Notes one use of a source and returns its ordinary gradient Σᵢ rᵢ."""
        current = self.require_pass()
        wanted = current.wanted_of(source)
        if source is None or not wanted:
            return contribution.total()
        if source.selects and id(wanted[0]) in current.single:
            total, squares = contribution.total_and_squares()
            self._add_once(wanted[0], squares if source.is_parameter else source.pull_one(squares, wanted[0]))
            return total
        for root in wanted:
            self._defer(root, source, contribution)
        return contribution.total()

    def _add_once(self, root: Tensor, squares: Tensor) -> None:
        current = self.require_pass()
        if id(root) in current.squared or id(root) in current.deferred:
            self._refuse_hidden_use(root)
        current.squared.add(id(root))
        self._add(root, squares)

    def _add(self, root: Tensor, squares: Tensor) -> None:
        known = self.squares.get(id(root))
        if known is None:
            self.squares[id(root)] = widen(squares)
        else:
            known += squares

    def _defer(self, root: Tensor, source: Source, contribution: Contribution) -> None:
        current = self.require_pass()
        if id(root) in current.squared:
            self._refuse_hidden_use(root)
        current.deferred.setdefault(id(root), []).append((source, contribution))

    def settle(self, finished: BackwardPass) -> None:
        """Squares what had to wait: for each example the sum over all uses first, the square after."""
        for key, uses in finished.deferred.items():
            root = self.parameters[key]

            def summed(start: int, stop: int, root: Tensor = root, uses: list = uses) -> Tensor:  # type: ignore[type-arg]
                parts = [source.pull(part.per_example(start, stop), root) for source, part in uses]
                return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

            with torch.no_grad():
                like = widen(root.detach())
                self._add(root, chunked_squares(summed, finished.examples, like))
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

    def _refuse_hidden_use(self, root: Tensor) -> None:
        raise UnsupportedOperation(
            f"parameter {self.names[id(root)]!r} is used both inside and outside a re-entrant checkpoint, so "
            "its uses cannot be added before they are squared. Use torch.utils.checkpoint(..., use_reentrant=False)."
        )
