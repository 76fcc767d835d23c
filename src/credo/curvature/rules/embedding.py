"""Embedding: rᵢ[token] = Σ of g over the places where example i has the token.

Places are added by (example, token) first, then squared, then added by token. Squaring place by
place would be wrong wherever a token repeats.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.curvature.rule import Operation, Outputs, PerExampleGradient, Pieces, lead_before_merge, widen
from credo.curvature.rules.registry import register_rule
from credo.errors import UnsupportedOperation


class EmbeddingGradient(PerExampleGradient):
    """From tokens (M, T) and g (M, T, d); `padding` is the token without a gradient, −1 for none."""

    def __init__(self, tokens: Tensor, g: Tensor, rows: int, padding: int):
        self.examples = len(tokens)
        kept = (tokens != padding).unsqueeze(-1)
        self._tokens, self._g, self._rows = tokens, widen(g) * kept, rows

    def total(self) -> Tensor:
        zeros = self._g.new_zeros(self._rows, self._g.shape[-1])
        return zeros.index_add_(0, self._tokens.flatten(), self._g.flatten(0, 1))

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        example = torch.arange(self.examples, device=self._tokens.device).unsqueeze(1)
        pairs, order = (example * self._rows + self._tokens).flatten().sort()
        # Equal (example, token) pairs now stand together; number the groups without asking the host how many.
        group = (pairs.diff(prepend=pairs[:1]) != 0).cumsum(0)
        sums = torch.zeros_like(self._g.flatten(0, 1)).index_add_(0, group, self._g.flatten(0, 1)[order])
        token = torch.zeros_like(group).index_copy_(0, group, pairs % self._rows)
        squares = self._g.new_zeros(self._rows, self._g.shape[-1]).index_add_(0, token, sums.square())
        return self.total(), squares

    def per_example(self, start: int, stop: int) -> Tensor:
        tokens, g = self._tokens[start:stop], self._g[start:stop]
        gradients = g.new_zeros(len(tokens), self._rows, g.shape[-1])
        return gradients.scatter_add_(1, tokens.unsqueeze(-1).expand_as(g), g)


@register_rule(torch.embedding)
class Embedding(Operation):
    parameter_slots = frozenset({0})
    name = "embedding"

    def __init__(
        self,
        weight: Tensor,
        indices: Tensor,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ):
        for option, given in (("sparse=True", sparse), ("scale_grad_by_freq=True", scale_grad_by_freq)):
            if given:
                raise UnsupportedOperation(
                    f"embedding with {option} and a weight of shape {tuple(weight.shape)} has no exact squared "
                    f"gradient here. Build the layer with {option.replace('True', 'False')}."
                )
        self.tensors = (weight, indices)
        self._padding = padding_idx
        self.lead = len(indices) if indices.dim() else -1
        self.merged_from = lead_before_merge(indices)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return torch.embedding(*tensors, self._padding), ()  # type: ignore[call-arg, arg-type]

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        weight, indices = saved
        g = grads[0]
        assert g is not None
        tokens = indices.reshape(examples, -1).long()
        return EmbeddingGradient(tokens, g.reshape(*tokens.shape, -1), len(weight), self._padding), None
