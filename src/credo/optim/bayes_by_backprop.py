"""Bayes by Backprop (Blundell et al. 2015) with local reparameterisation: gradients of μ and σ, by any torch optimiser.

With N the data size times ρ and q = N(μ, diag σ²), it minimises

    E_q[ℓ̄(w)] + τ·KL(q‖p)/N,   KL = Σⱼ ½(σⱼ²/σ₀ⱼ² − 1 − log(σⱼ²/σ₀ⱼ²) + (μⱼ−μ₀ⱼ)²/σ₀ⱼ²)

ℓ̄ the mean loss over examples, the KL summed over all weights. The gradient of the first term is taken at samples,
that of the second is exact. What is moved beside μ is log σ².

By default σ starts at κ of the weights, tensor by tensor (κ as in `relative`), so that it drowns nothing, and τ is 0.1:
with a KL of full weight deep networks do not begin to learn in the time that Adam takes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor

from credo.curvature.rule import widen
from credo.curvature.tracking import WatchedParameters
from credo.distributed.sharding import WIDTHS, ElementReducer, blocks_a_step, gathered
from credo.errors import InvalidType, InvalidValue
from credo.kernels import noise
from credo.optim import arguments
from credo.optim.base import BayesianOptimizer, Block
from credo.optim.closures import finish_closure
from credo.optim.diagnostics import Part
from credo.optim.local_reparameterisation import BlockNoise, Reparameterised, Uncertain
from credo.optim.relative import NOISE, TensorNumbers, check_relative
from credo.optim.scales import start_scale
from credo.optim.statistics import StepStatistics, VarianceStatistics
from credo.optim.wrapped import Build, Moved, WrappedOptimizer, adam
from credo.posterior import DiagonalPosterior, Posterior
from credo.posterior.diagonal import kl_terms, sum_terms

RELATIVE: Literal["relative"] = "relative"
LR, RELATIVE_LR = 3e-3, 1e-3
TEMPERING = 0.1  # τ beside a start that is relative to the weights
LOG_VARIANCES = (-60.0, 60.0)  # between these a variance is a positive float32, whatever the inner one does
INITIALISATION = 2**64 - 1  # the stream of noise that no draw will reach


def bbb_gradients(
    mean: Tensor,  # μ
    variance: Tensor,  # σ²
    grad: Tensor,  # ∂E[ℓ̄]/∂μ
    variance_grad: Tensor,  # ∂E[ℓ̄]/∂σ²
    *,
    prior_precision: float | Tensor,  # 1/σ₀²
    prior_mean: Tensor | None,  # μ₀, zero when None
    weight: float,  # τ/N
) -> tuple[Tensor, Tensor]:
    """The gradient of E[ℓ̄] + weight·KL by μ and by log σ²."""
    away = mean if prior_mean is None else mean - prior_mean
    pull = weight * prior_precision
    return grad + away * pull, (variance_grad + pull * 0.5) * variance - 0.5 * weight


@final
class BayesByBackprop(BayesianOptimizer):
    """Mean-field variational inference on an unmodified model.

        optimizer = credo.BayesByBackprop(model, data_size=len(train_set))
        loss = optimizer.step(closure)
        posterior = optimizer.posterior()

    It minimises E_q[ℓ̄(w)] + τ·KL(q‖p)/N over q = N(μ, diag σ²), moving μ and log σ² along their gradients:

        ∂/∂μ = ∂E[ℓ̄]/∂μ + τδ(μ − μ₀)/N,   ∂/∂log σ² = σ²·(∂E[ℓ̄]/∂σ² + τδ/2N) − τ/2N

    Implementations differ: Blundell et al. move ρ with σ = log(1 + eᵖ), sample the weights themselves (local=False),
    and take the KL from samples too.

    params: as for `VOGN`; a group may have its own lr, prior_precision, tempering, local, deterministic.
    data_size: N, the number of training examples; augmentation: how many times larger the data are for being augmented.
    lr: of the inner optimiser, on its scale; prior_precision: δ = 1/σ₀²; prior: a posterior instead.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
    seed: of the samples; the global generator is not used.
    inner: makes the optimiser that moves μ and log σ², from parameter groups: torch.optim.Adam unless given, or
        say `functools.partial(torch.optim.SGD, momentum=0.9)`. Schedules of lr are set on this optimiser.
    local: noise on the outputs of Linear and Conv layers instead of on their weights (see `reparameterisation`).
        Inside a block the weights then hold the mean, and no single sample exists; `p.detach()` shows one.
    initial_log_variance: where log σ² starts; "relative": σ at κ of the tensor's weights; None: at the prior's.
    initial_mean_sd: draws μ anew from N(0, sd²), the paper's 0.1 say; None keeps the model's own initialisation.
    tempering: τ; None: 0.1 with initial_log_variance="relative" and without `prior`, else 1.
    mc_samples: K samples a step, each on the whole minibatch.
    convolution_samples: how many of these K the convolutions have (the paper: K = 10, and 1 of them); each is shared by
        K/convolution_samples samples of the other layers. None: as many as the others.
    vectorized: computes the samples together, from a closure that returns losses without calling backward; numbers are
        the same. Convolutions that share their noise are then run once, up to the first linear layer.
    shared_noise, sharded: as for `VOGN`, among several processes; `sharded` needs an inner that moves weight by weight.

    >>> import torch, credo
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = credo.BayesByBackprop(model, data_size=100, mc_samples=2)
    >>> loss = optimizer.step(lambda: (model(torch.ones(8, 2)) - 1).square().squeeze(1))
    >>> bool(optimizer.kl() > 0)
    True
    """

    _kept = ("_inner",)
    _draws_weights = False
    _statistics = VarianceStatistics
    _gathered: VarianceStatistics
    _reducer: ElementReducer
    _noise: BlockNoise  # of the block that was opened last
    _first_draw: int | None = None  # of those whose convolutions share their noise

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        *,
        data_size: float,  # N
        inner: Build = adam,
        prior_precision: float = 1.0,  # δ = 1/σ₀²
        prior: Posterior | None = None,
        tempering: float | None = None,  # τ
        mc_samples: int = 1,  # K
        convolution_samples: int | None = None,
        vectorized: bool = False,
        local: bool = True,
        augmentation: float = 1.0,  # ρ
        initial_log_variance: float | Literal["relative"] | None = RELATIVE,  # log σ²
        initial_mean_sd: float | None = None,
        reduction: str = "mean",
        seed: int = 0,
        shared_noise: bool = False,
        sharded: bool = False,
    ):
        relative = isinstance(initial_log_variance, str) and initial_log_variance == RELATIVE
        defaults = {
            "lr": arguments.learning_rate((RELATIVE_LR if relative else LR) if lr is None else lr),
            "prior_precision": prior_precision,  # δ
            "tempering": (TEMPERING if relative and prior is None else 1.0)
            if tempering is None
            else tempering,
            "local": local,
            "noise": NOISE if relative else None,  # κ√L
        }
        settings = {
            "data_size": data_size,
            "augmentation": augmentation,
            "mc_samples": mc_samples,
            "convolution_samples": shared_samples(mc_samples, convolution_samples),
            "vectorized": vectorized,
            "initial_log_variance": initial_log_variance,
            "reduction": reduction,
            "seed": seed,
            "shared_noise": shared_noise,
            "sharded": sharded,
        }
        if isinstance(initial_log_variance, str):
            arguments.option("initial_log_variance", initial_log_variance, (RELATIVE,))
        elif initial_log_variance is not None:
            arguments.number("initial_log_variance", initial_log_variance, *LOG_VARIANCES)
        if initial_mean_sd is not None:
            arguments.number("initial_mean_sd", initial_mean_sd, 0, math.inf)
        super().__init__(params, defaults, settings, prior)
        if initial_mean_sd is not None:
            self._initialise_means(initial_mean_sd)
        self._inner = WrappedOptimizer(inner, [self._inner_group(group) for group in self.param_groups])
        self.settings["inner"] = self._inner.method
        if sharded or self._shards is not None:
            self._inner.require_elementwise("sharded=True" if sharded else "fully_shard")

    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        arguments.number("prior_precision", group["prior_precision"], 0, math.inf, open_low=True)
        check_relative(group)
        if not isinstance(group["local"], bool):
            raise InvalidType(f"local must be True or False, got {group['local']!r}.")

    # Blocks

    def _draw(self, draw: int) -> int:
        """Noise is drawn where it is needed; the parameters keep the mean."""
        self._noise = BlockNoise(self.settings["seed"], draw, self._shared_draw(draw))
        return 1

    @contextmanager
    def _observe(self, watched: WatchedParameters) -> Iterator[Reparameterised]:
        noise = self._noise
        observer = Reparameterised(watched, self.settings["reduction"], self._uncertain(), noise)
        with observer as seen:
            try:
                yield seen
            finally:
                noise.closed = True
        self.counters["draws"] += noise.samples - 1  # one is counted in any case

    def _shared_draw(self, draw: int) -> int | None:
        """The draw whose noise the convolutions of this block have; None: their own."""
        if self.settings["convolution_samples"] is None:
            return None
        sharing = self.settings["mc_samples"] // self.settings["convolution_samples"]
        if self._first_draw is None or self._gathered.samples % sharing == 0:
            self._first_draw = draw
        return self._first_draw

    def _run_at_once(self, closure: Callable[[], Tensor]) -> Tensor:
        """A block for each sample of the convolutions, with all samples that share it; or one block with all."""
        losses, blocks = [], blocks_a_step(self.settings)
        for _ in range(blocks):
            self._first_draw = None
            with Block(self, None) as seen:
                assert isinstance(seen, Reparameterised)
                loss = seen.run_at_once(closure, self.settings["mc_samples"] // blocks) / blocks
                losses.append(finish_closure(loss, seen, "mean"))
        self._gathered.at_once()
        return torch.stack(losses).sum()

    def _catch_up(self) -> None:
        self._uncertain()

    def _uncertain(self) -> list[Uncertain]:
        with self._reducer.drawing(self):
            return self._leaves()

    def _leaves(self) -> list[Uncertain]:
        """Every trainable parameter that has a variance; its number among all parameters is that of its noise."""
        names, places = self.names(), {p: k for k, p in enumerate(self._all())}
        found = [
            (p, group["local"], self._log_variance(group, p))
            for group in self.param_groups
            if not group["deterministic"]
            for p in group["params"]
            if p.requires_grad
        ]
        columns: Any = zip(*found, strict=True) if found else ((), (), ())
        parameters, _, log_variances = columns
        seen = parameters
        if not self._reducer.alone:
            log_variances = self._reducer.put_together(parameters, log_variances)
            seen = self._reducer.seen(parameters)
        variances = torch._foreach_exp(log_variances) if found else ()
        return [
            Uncertain(names[id(p)], whole, variance.requires_grad_(), places[p], local)
            for (p, local, _), whole, variance in zip(found, seen, variances, strict=True)
        ]

    # Steps

    @torch.no_grad()
    def _update(self, gathered: StepStatistics) -> bool:
        assert isinstance(gathered, VarianceStatistics)
        if not self._finite(gathered):
            return False
        mean_loss = self.settings["reduction"] == "mean" or gathered.vectorized
        count = gathered.samples if mean_loss else gathered.examples
        units = 1 / (count * gathered.gradient_scale), 1 / (count * gathered.squares_scale)
        for group in self.param_groups[len(self._inner.optimizer.param_groups) :]:
            self._inner.add_group(self._inner_group(group))
        moves = [(float(group["lr"]), self._moves(group, gathered, *units)) for group in self.param_groups]
        self._inner.step(moves)
        learned = [state["log_variance"] for state in self.state.values() if "log_variance" in state]
        for log_variance in learned:
            log_variance.clamp_(*LOG_VARIANCES)
        return True

    def _moves(
        self, group: dict[str, Any], gathered: VarianceStatistics, unit: float, variance_unit: float
    ) -> list[Moved]:
        """The parameters of a group that the loss has reached, and their log variances."""
        reached = [p for p in group["params"] if p.grad is not None and p.requires_grad]
        certain = [p for p in reached if group["deterministic"] or id(p) not in gathered.table]
        moves = [Moved(p.detach(), p.grad * unit, self.state[p], "mean.") for p in certain]
        uncertain = [p for p in reached if not group["deterministic"] and id(p) in gathered.table]
        if not uncertain:
            return moves
        log_variances = [self._log_variance(group, p) for p in uncertain]
        variances = torch._foreach_exp(log_variances)
        for p, variance, log_variance in zip(uncertain, variances, log_variances, strict=True):
            state = self.state[p]
            assert p.grad is not None
            by_mean, by_log_variance = bbb_gradients(
                p.detach(),
                variance,
                _times(p.grad, unit),
                _times(gathered.table[id(p)], variance_unit),
                prior_precision=state.get("prior_precision", float(group["prior_precision"])),
                prior_mean=state.get("prior_mean"),
                weight=group["tempering"] / self.data_size,
            )
            moves.append(Moved(p.detach(), by_mean.to(p.dtype), state, "mean."))
            moves.append(Moved(log_variance, by_log_variance, state, "log_variance."))
        return moves

    # State

    def _log_variance(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        """log σ² of a parameter, beside it; there from the first time it is asked for."""
        state: dict[str, Any] = self.state[p]
        wide = widen(p.detach())
        if "log_variance" not in state:
            start = self.settings["initial_log_variance"]
            if start == RELATIVE:
                start = math.log(group["noise"] ** 2 * float(start_scale(p, self._reducer.mean_square(p))[0]))
            elif start is None:
                precision = state.get("prior_precision", group["prior_precision"])
                start = -torch.log(torch.as_tensor(precision, device=p.device))
            state["log_variance"] = torch.zeros_like(wide).add_(start)
        for name in ("log_variance", "prior_precision", "prior_mean"):
            if name in state and (state[name].device, state[name].dtype) != (wide.device, wide.dtype):
                state[name] = state[name].to(wide)
        return state["log_variance"]  # type: ignore[no-any-return]

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        uncertain = [] if group["deterministic"] else group["params"]
        tensors = [p.detach() for p in group["params"]] + [self._log_variance(group, p) for p in uncertain]
        return {"params": tensors, "lr": float(group["lr"])}

    @torch.no_grad()
    def _initialise_means(self, sd: float) -> None:
        certain = {p for group in self.param_groups if group["deterministic"] for p in group["params"]}
        for k, p in enumerate(self._all()):
            if p not in certain:
                start = (self._reducer.starts([p]) or [0])[0]
                noise.normal_(p, self.settings["seed"], INITIALISATION, k, start)
                p.mul_(sd)

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _parts(self, group: Mapping[str, Any]) -> list[Part]:
        return (
            []
            if group["deterministic"]
            else [self._part(group, p) for p in group["params"] if p.requires_grad]
        )

    def _part(self, group: Mapping[str, Any], p: Tensor) -> Part:
        variance = self._log_variance(group, p).exp()
        prior = variance * self.state[p].get("prior_precision", group["prior_precision"])
        lr, none = float(group["lr"]), torch.zeros_like(variance)
        precision = math.nan if "prior_precision" in self.state[p] else group["prior_precision"]
        numbers = TensorNumbers(lr, 0.0, group["tempering"], precision)
        return Part(
            p.detach(), variance.sqrt(), torch.full_like(variance, lr), 1 - prior, prior, none, numbers
        )

    # What is believed

    @torch.no_grad()
    @gathered(WIDTHS)
    def posterior(self) -> DiagonalPosterior:
        """N(μ, diag σ²)."""
        self._refuse_inside("take the posterior")
        names = self.names()
        mean = {names[id(p)]: p.detach() for p in self._trainable()}
        variance = {u.name: u.variance for u in self._leaves()}
        return DiagonalPosterior(mean, variance, self._metadata("tempering", "prior_precision"))

    @torch.no_grad()
    @gathered()
    def kl(self) -> Tensor:
        """KL(q‖p), summed over all weights, in nats; the objective has τ/N times it."""
        terms = []
        for group in self.param_groups:
            for p in () if group["deterministic"] else group["params"]:
                variance, state = self._log_variance(group, p).double().exp(), self.state[p]
                precision = torch.as_tensor(state.get("prior_precision", group["prior_precision"])).double()
                prior_mean = state.get("prior_mean", torch.zeros_like(variance))
                terms.append(kl_terms(p.detach(), variance, prior_mean, precision.reciprocal()))
        return sum_terms(terms, self._all()[0].device)


def shared_samples(samples: int, of_convolutions: int | None) -> int | None:
    """How many samples convolutions have; None where that is as many as the rest."""
    if of_convolutions is None or of_convolutions == samples:
        return None
    if samples % arguments.whole("convolution_samples", of_convolutions, 1):
        raise InvalidValue(
            f"convolution_samples must divide mc_samples={samples}, so that each is shared by equally many samples of "
            f"the other layers; got {of_convolutions}."
        )
    return of_convolutions


def _times(tensor: Tensor, unit: float) -> Tensor:
    return tensor if unit == 1 else tensor * unit
