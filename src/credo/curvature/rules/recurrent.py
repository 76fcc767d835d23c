"""RNN, GRU and LSTM, whole sequences and single cells.

torch's own operation gives the forward values. The backward pass unrolls it once more in plain steps
in order to see the pre-activations a = W_ih x + b_ih and b = W_hh h + b_hh of every step, and takes
their gradients α and β. The weights then are linear maps over the sequence:

    W_ih: rᵢ = Σₜ αᵢₜ xᵢₜᵀ     W_hh: rᵢ = Σₜ βᵢₜ hᵢ,ₜ₋₁ᵀ     biases: Σₜ αᵢₜ, Σₜ βᵢₜ
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.rule import Operation, Outputs, Pieces, examples_second
from credo.curvature.rules.linear import OuterProducts, bias_gradient
from credo.curvature.rules.registry import register_rule
from credo.errors import UnsupportedOperation

State = tuple[Tensor, ...]  # (h,), or (h, c) for the LSTM
Step = Callable[[Tensor, Tensor, State], State]


def _lstm(a: Tensor, b: Tensor, state: State) -> State:
    i, f, g, o = (a + b).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(a: Tensor, b: Tensor, state: State) -> State:
    a_r, a_z, a_n = a.chunk(3, -1)
    b_r, b_z, b_n = b.chunk(3, -1)
    new = (a_n + (a_r + b_r).sigmoid() * b_n).tanh()
    keep = (a_z + b_z).sigmoid()
    return ((1 - keep) * new + keep * state[0],)


def _tanh(a: Tensor, b: Tensor, state: State) -> State:
    return ((a + b).tanh(),)


def _relu(a: Tensor, b: Tensor, state: State) -> State:
    return ((a + b).relu(),)


@dataclass
class Unrolled:
    """One layer in one direction, step by step, with what the weights' gradients need."""

    inputs: Tensor  # (T, M, I)
    nudges: list[
        Tensor
    ]  # zeros added to a and b (and to the projection) of each step: their gradients are α and β
    hidden: list[Tensor]  # h before each step
    projected: list[Tensor]  # what the LSTM's projection was applied to
    outputs: list[Tensor]  # in order of time
    state: State
    backwards: bool


def _unroll(
    step: Step, x: Tensor, state: State, weights: Sequence[Tensor], biased: bool, backwards: bool
) -> Unrolled:
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if biased else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    run = Unrolled(x, [], [], [], [], state, backwards)
    for t in reversed(range(len(x))) if backwards else range(len(x)):
        run.hidden.append(run.state[0])
        a = _nudged(F.linear(x[t], w_ih, b_ih), run)
        b = _nudged(F.linear(run.state[0], w_hh, b_hh), run)
        run.state = step(a, b, run.state)
        if projection is not None:
            run.projected.append(run.state[0])
            run.state = (_nudged(F.linear(run.state[0], projection), run), *run.state[1:])
        run.outputs.append(run.state[0])
    if backwards:
        run.outputs.reverse()
    return run


def _nudged(value: Tensor, run: Unrolled) -> Tensor:
    nudge = torch.zeros_like(value, requires_grad=True)
    run.nudges.append(nudge)
    return value + nudge


class Recurrent(Operation):
    """tensors: input, initial state, flat weights."""

    def __init__(
        self, kind: str, function: Callable[..., Any], x: Tensor, state: State, weights: Sequence[Tensor]
    ):
        self.name, self._function = kind, function
        self.tensors = (x, *state, *weights)
        self._first = 1 + len(state)
        self.parameter_slots = frozenset(range(self._first, len(self.tensors)))
        self._step = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}[kind]
        self._biased, self._layers, self._directions, self._batch_first = True, 1, 1, False
        self._dropout = 0.0
        self.is_cell = True
        self.lead = len(x) if x.dim() > 1 else -1

    def sequence(
        self, biased: bool, layers: int, dropout: float, bidirectional: bool, batch_first: bool
    ) -> "Recurrent":
        """Says that this is a whole sequence, and of which kind."""
        self._biased, self._layers, self._dropout = biased, layers, dropout
        self._directions, self._batch_first = 1 + bidirectional, batch_first
        self.is_cell = False
        x = self.tensors[0]
        assert x is not None
        self.lead = len(x) if batch_first else examples_second(x, self.name)
        return self

    def example_axis(self, slot: int) -> int:
        """The states of a sequence have the layers in front, whatever the sequence itself has."""
        return 0 if self.is_cell or (slot == 0 and self._batch_first) else 1

    def result_axis(self, number: int) -> int:
        return self.example_axis(number)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        outputs = self._function(tensors[0], tensors[1 : self._first], tensors[self._first :])
        return outputs, ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in saved[: self._first]]
            runs, outputs = self._rerun(leaves, [w.detach() for w in saved[self._first :]])
            nudges = [nudge for run in runs for nudge in run.nudges]
            pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
            asked = torch.autograd.grad(
                [out for out, _ in pairs], [*leaves, *nudges], [grad for _, grad in pairs], allow_unused=True
            )
        filled = [
            torch.zeros_like(n) if g is None else g for n, g in zip(nudges, asked[self._first :], strict=True)
        ]
        pieces: list[Any] = [*asked[: self._first]]
        for run in runs:
            taken, filled = filled[: len(run.nudges)], filled[len(run.nudges) :]
            pieces += self._weight_gradients(run, taken)
        return pieces

    def _rerun(
        self, leaves: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[list[Unrolled], list[Tensor]]:
        x, *states = leaves
        if self.is_cell:
            run = _unroll(self._step, x.unsqueeze(0), tuple(states), weights, self._biased, False)
            return [run], list(run.state)
        x = x.transpose(0, 1) if self._batch_first else x
        runs: list[Unrolled] = []
        each = len(weights) // (self._layers * self._directions)
        for layer in range(self._layers):
            for direction in range(self._directions):
                k = layer * self._directions + direction
                state = tuple(s[k] for s in states)
                own = weights[k * each : (k + 1) * each]
                runs.append(_unroll(self._step, x, state, own, self._biased, backwards=direction == 1))
            x = torch.cat([torch.stack(run.outputs) for run in runs[-self._directions :]], -1)
        last = [torch.stack(parts) for parts in zip(*(run.state for run in runs), strict=True)]
        return runs, [x.transpose(0, 1) if self._batch_first else x, *last]

    def _weight_gradients(self, run: Unrolled, grads: list[Tensor]) -> list[Any]:
        """In the order of torch's flat weights: W_ih, W_hh, b_ih, b_hh, and the projection."""
        per_step = 3 if run.projected else 2
        alpha, beta, *rest = (_by_example(grads[k::per_step]) for k in range(per_step))
        inputs = run.inputs.flip(0) if run.backwards else run.inputs
        pieces: list[Any] = [
            OuterProducts(_by_example(inputs), alpha),
            OuterProducts(_by_example(run.hidden), beta),
        ]
        if self._biased:
            pieces += [bias_gradient(alpha), bias_gradient(beta)]
        return pieces + [OuterProducts(_by_example(run.projected), part) for part in rest]


def _by_example(steps: Iterable[Tensor]) -> Tensor:
    return torch.stack([step.detach() for step in steps], 1)  # (M, T, d)


def _sequence_rule(kind: str, function: Callable[..., Any], has_cell: bool) -> None:
    def rule(
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
        batch_first: Any = False,
    ) -> Operation:
        if not isinstance(
            has_biases, bool
        ):  # torch has the batch sizes of a packed sequence before the state
            raise UnsupportedOperation(
                f"{kind} on a PackedSequence has no exact squared gradient here. Pass padded sequences, and mask "
                "the padding in the loss."
            )
        if dropout and train and num_layers > 1:
            raise UnsupportedOperation(
                f"{kind} with dropout={dropout} between its {num_layers} layers hides the masks it drew, so the "
                "gradient cannot be taken apart. Stack single-layer modules with nn.Dropout between them."
            )
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)

        def run(x: Tensor, state: State, weights: Sequence[Tensor]) -> Any:
            return function(x, list(state) if has_cell else state[0], list(weights), *options)

        state = tuple(hx) if has_cell else (hx,)
        operation = Recurrent(kind, run, input, state, params)
        return operation.sequence(has_biases, num_layers, dropout, bidirectional, batch_first)

    register_rule(function)(rule)


def _cell_rule(kind: str, function: Callable[..., Any], has_cell: bool) -> None:
    def rule(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Operation:
        weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]

        def run(x: Tensor, state: State, given: Sequence[Tensor]) -> Any:
            return function(x, state if has_cell else state[0], *given)

        operation = Recurrent(kind, run, input, tuple(hx) if has_cell else (hx,), weights)
        operation._biased = b_ih is not None
        return operation

    register_rule(function)(rule)


for _kind, _has_cell in (("lstm", True), ("gru", False), ("rnn_tanh", False), ("rnn_relu", False)):
    _sequence_rule(_kind, getattr(torch, _kind), _has_cell)
    _cell_rule(_kind, getattr(torch, f"{_kind}_cell"), _has_cell)
