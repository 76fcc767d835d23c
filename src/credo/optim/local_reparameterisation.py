"""Weights w = μ + σ·ε that can be differentiated by μ and σ², on an unmodified model.

Locally where that is possible: the outputs of a Linear or Conv layer are Gaussian given its inputs, so noise is
added to them instead of to the weights, fresh for each example, which lowers the variance of the gradient
(Kingma et al. 2015):

    z = f(x, μ) + √f(x², σ²)·ε

For Linear layers on rows that are examples this is exact. A convolution's outputs at different places share their
weights, and independent noise neglects that, as in the paper; each output alone has the right distribution.
Everything else takes one sample of the weights for the block.

Several samples can be computed `at_once`, under `torch.vmap`. What has no noise of its own yet is computed once for
all of them: with noise that convolutions share, all that comes before the first linear layer. Sample k of a block has
draw number d + k of the run. Convolutions may share the noise of one draw with the convolutions of other samples; what
only they have touched is then the same for all of these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.rule import widen
from credo.curvature.tracking import WatchedParameters, tensors_in
from credo.curvature.vmap import by_one_run, outside, split
from credo.errors import CallOrderError, CredoError, InvalidType, InvalidValue, UnsupportedOperation
from credo.kernels import noise, outputs
from credo.optim.observe import CONVOLUTIONS, ForwardObserver, merged_from


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


_LOCAL = frozenset((F.linear, *CONVOLUTIONS))
_CONVOLVE = frozenset((*CONVOLUTIONS, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d))


@dataclass
class Uncertain:
    """One parameter in one block: the mean is in the parameter itself."""

    name: str
    mean: Tensor
    variance: Tensor  # σ², a leaf of its own whose `.grad` is what the block says about it
    index: int
    local: bool
    sample: Tensor | None = field(default=None)


@final
class Reparameterised(ForwardObserver):
    """The block of one sample, or of several at once."""

    def __init__(
        self, subjects: WatchedParameters, reduction: str, uncertain: Iterable[Uncertain], noise: BlockNoise
    ):
        super().__init__(subjects, reduction)
        self.uncertain: Mapping[int, Uncertain] = {id(u.mean): u for u in uncertain}
        self.noise = noise
        self._parameters = 1 + max((u.index for u in self.uncertain.values()), default=0)
        self._uses: dict[
            int, str
        ] = {}  # since the last backward pass: "local" or "global" by the parameter's id

    def run_at_once(self, closure: Callable[[], Tensor], samples: int) -> Tensor:
        """Each example's loss, (M,), the mean over the samples; by one run of the closure."""
        self.at_once, self.noise.at_once, self.noise.samples = True, True, samples
        try:
            losses = by_one_run(closure, samples)
        except CredoError:
            raise
        except RuntimeError as error:
            raise UnsupportedOperation(
                f"the samples cannot be computed at once: {error} Use vectorized=False."
            ) from error
        finally:
            self.at_once = self.noise.at_once = False
        if isinstance(losses, Tensor) and losses.dim() == 2:
            return losses.mean(0)
        wanted = (
            "with vectorized=True the closure must return one loss an example, a tensor of shape (M,); got"
        )
        if isinstance(losses, Tensor):
            raise InvalidValue(f"{wanted} {tuple(losses.shape[1:])}.")
        raise InvalidType(f"{wanted} {type(losses).__name__}.")

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _LOCAL:
            rows, weight, bias, rest = _read(args, kwargs)
            layer = self.uncertain.get(id(weight))
            if layer is not None and layer.local and self._are_examples(func, rows):
                return self._noisy(func, rows, layer, bias, rest)
        if func is not Tensor.detach:
            self._refuse_reuse("global", tensors_in((*args, *kwargs.values())))
        sampled = partial(self._sampled, convolution=func in _CONVOLVE)
        result = func(*sampled(args), **dict(zip(kwargs, sampled(kwargs.values()), strict=True)))
        if all(self._known.knows(tensor) for tensor in tensors_in((*args, *kwargs.values()))):
            for tensor in tensors_in((result,)):
                self._known.add_constant(tensor)
        return result

    def _are_examples(self, func: Any, rows: Tensor) -> bool:
        """Whether rows can have noise of their own: positions of one example share their weights."""
        if self._known.knows(rows):
            return False
        return func is not F.linear or (rows.dim() == 2 and merged_from(rows) is None)

    def _noisy(
        self, func: Any, rows: Tensor, layer: Uncertain, bias: Tensor | None, rest: Mapping[str, Any]
    ) -> Tensor:
        belief = None if bias is None else self.uncertain.get(id(bias))
        if belief is not None and not belief.local:
            self._refuse_reuse("global", (belief.mean,))
            bias, belief = self._sample_of(belief.mean, func in _CONVOLVE), None
        self._refuse_reuse("local", (layer.mean,) if belief is None else (layer.mean, belief.mean))
        mean = func(rows, layer.mean, bias, **rest)
        with _no_autocast(rows.device.type):
            spread = func(widen(rows).square(), layer.variance, belief and belief.variance, **rest)
        index = self._noise_index(2 * layer.index + 1)
        return self.noise.on_outputs(mean, spread, index, func in _CONVOLVE)

    def _refuse_reuse(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Two uses share their weights; noise of its own would make a local one independent of all others."""
        if not self.counting:
            return
        for belief in filter(None, (self.uncertain.get(id(tensor)) for tensor in tensors)):
            before = self._uses.get(id(belief.mean))
            self._uses[id(belief.mean)] = kind
            if before is not None and "local" in (before, kind):
                raise UnsupportedOperation(
                    f"parameter {belief.name!r} is used more than once before a backward pass, and noise on outputs "
                    "would make its uses independent. Give it local=False in a parameter group of its own, or to all."
                )

    def _sampled(self, values: Iterable[Any], convolution: bool) -> Sequence[Any]:
        """The arguments with samples in the place of parameters."""
        found: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                found.append(self._sample_of(value, convolution))
            elif isinstance(value, (list, tuple)) and self._known.touches(value):
                found.append(type(value)(self._sampled(value, convolution)))
            else:
                found.append(value)
        return found

    def _sample_of(self, value: Tensor, convolution: bool) -> Tensor:
        """Of a parameter, drawn at its first use, which says whether it is a convolution's."""
        belief = self.uncertain.get(id(value))
        if belief is None:
            return value
        if belief.sample is None:
            mean, variance, index = belief.mean, belief.variance, 2 * belief.index
            belief.sample = self.noise.on_weights(mean, variance, index, convolution)
        return belief.sample

    def _noise_index(self, index: int) -> int:
        """Fresh noise for each forward pass, and the same when a checkpoint runs one again."""
        return index + 2 * self._parameters * self.forward_number

    def _check_gradients(self) -> None:
        for u in self.uncertain.values():
            if u.mean.grad is not None and id(u.mean) not in self.used:
                raise UnsupportedOperation(
                    f"parameter {u.name!r} was used where it cannot be seen (outside the block, or in an "
                    "autograd.Function of its own), so it had no noise. Use it through torch operations inside the "
                    "block, or declare its group deterministic=True."
                )

    def _forget_pass(self) -> None:
        self._uses.clear()


def _read(args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Input, weight and bias of a linear or convolution call, and the rest by name."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.pop("input"), given.pop("weight"), given.pop("bias", None), given


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    """Variances are squares: half precision would lose the small ones."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
