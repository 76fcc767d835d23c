"""The noise of one block, on weights and on outputs: of one sample, or of several that are computed at once.

Sample k of a block has draw number d + k of the run. Convolutions may share the noise of one draw with the
convolutions of other samples; what only they have touched is then the same for all of these.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.vmap import outside, split
from credo.errors import CallOrderError
from credo.kernels import noise, outputs


class Perturbed(torch.autograd.Function):
    """μ + σ·ε; nothing is freed by a backward pass, because several may go through one sample."""

    @staticmethod
    def forward(ctx: Any, block: "BlockNoise", mean: Tensor, variance: Tensor, epsilon: Tensor) -> Tensor:
        sd = variance.sqrt()
        ctx.block = block
        ctx.slope = epsilon / (2 * sd)
        return torch.addcmul(mean, sd, epsilon).to(mean.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        ctx.block.refuse_closed()
        return None, grad, grad * ctx.slope, None


class NoisyOutput(torch.autograd.Function):
    """z = mean + √variance·ε, in the memory of mean and variance, which are operations' results nobody else sees.

    With several draws, one for each row.
    """

    @staticmethod
    def forward(
        ctx: Any, block: "BlockNoise", mean: Tensor, variance: Tensor, index: int, draws: Sequence[int]
    ) -> Tensor:
        ctx.mark_dirty(mean)
        slope = variance.detach()
        rows = zip(mean, slope, strict=True) if len(draws) > 1 else [(mean, slope)]
        for draw, (one, its_slope) in zip(draws, rows, strict=True):
            outputs.perturb_(one, its_slope, block.seed, draw, index)
        ctx.block = block
        ctx.save_for_backward(slope)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None, None]:
        ctx.block.refuse_closed()
        (slope,) = ctx.saved_tensors
        return None, grad, grad * slope, None, None


@final
class BlockNoise:
    """Of the run `seed`, from draw number `draw` on; `shared` is the draw of all convolutions, None: their own."""

    def __init__(self, seed: int, draw: int, shared: int | None):
        self.seed, self.samples, self.closed = seed, 1, False
        self.at_once = False  # whether the samples are computed together, under vmap
        self._draw, self._shared = draw, shared

    def on_weights(self, mean: Tensor, variance: Tensor, index: int, convolution: bool) -> Tensor:
        """A sample of the weights; at once, one for each sample of the block."""
        draws = self._draws(convolution)
        if not self.at_once:
            return self._weights(mean, variance, index, draws)
        return outside(lambda: self._weights(mean, variance, index, draws), samples_first=len(draws) > 1)

    def on_outputs(self, mean: Tensor, variance: Tensor, index: int, convolution: bool) -> Tensor:
        """Outputs with their noise. At once, they are one for each sample unless inputs and noise are the same."""
        draws = self._draws(convolution)
        if not self.at_once:
            return self._outputs(mean, variance, index, draws)
        (means, dim), (variances, other) = split(mean), split(variance)
        if len(draws) == 1 and dim is None and other is None:
            return outside(lambda: self._outputs(mean, variance, index, draws), samples_first=False)

        def rows() -> Tensor:
            each = draws if len(draws) == self.samples else draws * self.samples
            return self._outputs(self._rows(means, dim), self._rows(variances, other), index, each)

        return outside(rows, samples_first=True)

    def refuse_closed(self) -> None:
        if self.closed:
            raise CallOrderError(
                "a backward pass through a sampling block that is closed. Call backward inside the block."
            )

    def _draws(self, convolution: bool) -> list[int]:
        if convolution and self._shared is not None:
            return [self._shared]
        return [self._draw + k for k in range(self.samples)]

    def _rows(self, tensor: Tensor, dim: int | None) -> Tensor:
        """(K, …), one row for each sample; in memory of its own where all samples had the same."""
        if dim is None:
            return tensor.expand(self.samples, *tensor.shape).contiguous()
        return tensor.movedim(dim, 0).contiguous()

    def _outputs(self, mean: Tensor, variance: Tensor, index: int, draws: Sequence[int]) -> Tensor:
        found: Tensor = NoisyOutput.apply(self, mean, variance, index, draws)  # type: ignore[no-untyped-call]
        return found

    def _weights(self, mean: Tensor, variance: Tensor, index: int, draws: Sequence[int]) -> Tensor:
        rows = []
        for draw in draws:
            rows.append(torch.empty_like(variance))
            noise.normal_(rows[-1], self.seed, draw, index)
        several = len(draws) > 1
        shape = (len(draws), *mean.shape) if several else mean.shape
        epsilon = torch.stack(rows) if several else rows[0]
        with torch.enable_grad():
            found: Tensor = Perturbed.apply(self, mean.expand(shape), variance.expand(shape), epsilon)  # type: ignore[no-untyped-call]
        return found
