"""Normalisation layers with an affine part: y = w·x̂ + b.

    weight   rᵢ = Σₚ x̂ᵢₚ gᵢₚ        bias   rᵢ = Σₚ gᵢₚ        p over what the example broadcasts

x̂ is computed again from the input, never by dividing the output by w, which may be zero. With
BatchNorm in training mode examples interact; example i's gradient is what comes back through its
own activations. These sum to the gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.rule import Operation, Outputs, PerExampleGradient, Pieces, Stacked
from credo.curvature.rules.elementwise import Broadcast
from credo.curvature.rules.registry import register_rule
from credo.kernels import normalisation as kernel


class BatchNormGradient(PerExampleGradient):
    """Both sums, already computed, and the gradients (M, C) on request from x and g (M, C, …), mean and invstd."""

    def __init__(self, sums: tuple[Tensor, Tensor], of_weight: bool, examples: int, *made_of: Tensor):
        self._sums, self._of_weight, self.examples, self._made_of = sums, of_weight, examples, made_of

    def total(self) -> Tensor:
        return self._sums[0]

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return self._sums

    def per_example(self, start: int, stop: int) -> Tensor:
        x, g, mean, invstd = self._made_of
        x, g = x[start:stop], g[start:stop]
        if self._of_weight:
            per_channel = (1, -1, *[1] * (x.dim() - 2))
            g = g * (x - mean.view(per_channel)) * invstd.view(per_channel)
        return g.flatten(2).sum(2) if g.dim() > 2 else g


@register_rule(F.batch_norm, torch.batch_norm)
class BatchNorm(Operation):
    parameter_slots = frozenset({1, 2})
    name = "batch_norm"

    def __init__(
        self,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
    ):
        if isinstance(running_mean, torch.nn.Parameter):  # torch.batch_norm has the affine part first
            running_mean, running_var, weight, bias = weight, bias, running_mean, running_var
        self.tensors = (input, weight, bias)
        self._running: tuple[Any, Any] = (running_mean, running_var)  # None only where training
        self._training, self._momentum, self._eps = training, momentum, eps
        self.count_examples(input)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        x, weight, bias = tensors
        assert x is not None
        if self._training:
            _require_several_values(x)
        out, mean, invstd = kernel.batch_norm(
            x, (weight, bias), self._running, self._training, self._momentum, self._eps
        )
        if not self._training:
            mean, var = self._running
            mean, invstd = mean.detach().clone(), (var + self._eps).rsqrt()
        return out, (mean, invstd)

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        x, weight, _, mean, invstd = saved
        g = grads[0]
        assert g is not None
        merged = x if x.shape[0] != examples else None
        if merged is not None:
            x, g = _split_merged(x, examples), _split_merged(g, examples)
        gx, a, squared_a, b, squared_b = kernel.batch_norm_backward(
            x, g, weight, mean, invstd, self._training, needed[0]
        )
        if merged is not None and gx is not None:
            gx = gx.transpose(1, 2).reshape(merged.shape)
        made_of = (x, g, mean, invstd)
        return (
            gx,
            BatchNormGradient((a, squared_a), True, examples, *made_of) if needed[1] else None,
            BatchNormGradient((b, squared_b), False, examples, *made_of) if needed[2] else None,
        )


def _require_several_values(x: Tensor) -> None:
    """As torch does."""
    if x.shape[0] * x.shape[2:].numel() == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


def _split_merged(rows: Tensor, examples: int) -> Tensor:
    """(M·T, C) as (M, C, T), where a view had merged examples and positions."""
    return rows.reshape(examples, -1, rows.shape[1]).transpose(1, 2)


class AffineNorm(Operation):
    """A norm without batch statistics, given as a function of (x, w, b); w and b may be None."""

    parameter_slots = frozenset({1, 2})

    def __init__(
        self, name: str, tensors: tuple[Tensor | None, ...], norm: Callable[..., Tensor], per_channel: bool
    ):
        self.name, self.tensors = name, tensors
        self._norm, self._per_channel = norm, per_channel
        assert tensors[0] is not None
        self.count_examples(tensors[0])

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return self._norm(*tensors), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        x, weight, bias = saved
        g = grads[0]
        assert g is not None
        normed = self._norm(x, None, None) if needed[1] else g
        return (
            self._input_gradient(x, weight, bias, g) if needed[0] else None,
            self._gradients(g * normed, weight, examples) if needed[1] else None,
            self._gradients(g, bias, examples) if needed[2] else None,
        )

    def _input_gradient(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = self._norm(leaf, weight.detach() if weight is not None else None, None)
            (gx,) = torch.autograd.grad(out, leaf, g.to(out.dtype))
        return gx

    def _gradients(self, local: Tensor, parameter: Tensor, examples: int) -> PerExampleGradient:
        if self._per_channel:
            return Stacked(local.flatten(2).sum(2) if local.dim() > 2 else local)
        local = local.reshape(examples, -1, *parameter.shape)
        return Broadcast(local, parameter.shape)


@register_rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Operation:
    def norm(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.layer_norm(x, list(normalized_shape), w, b, eps)

    return AffineNorm("layer_norm", (input, weight, bias), norm, per_channel=False)


@register_rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Operation:
    def norm(x: Tensor, w: Tensor | None, b: None) -> Tensor:
        return F.rms_norm(x, list(normalized_shape), w, eps)

    return AffineNorm("rms_norm", (input, weight, None), norm, per_channel=False)


@register_rule(F.group_norm, torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Operation:
    def norm(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.group_norm(x, num_groups, w, b, eps)

    return AffineNorm("group_norm", (input, weight, bias), norm, per_channel=True)


@register_rule(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Operation:
    first = True

    def norm(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        nonlocal first
        running = (running_mean, running_var) if first or not use_input_stats else (None, None)
        first = False  # the running statistics are updated by the forward pass, once
        return F.instance_norm(x, *running, w, b, use_input_stats, momentum, eps)

    return AffineNorm("instance_norm", (input, weight, bias), norm, per_channel=True)
