"""Bayes by Backprop (Blundell et al. 2015) with local reparameterisation: gradients of μ and σ, by any torch optimiser.

With N the data size times ρ and q = N(μ, diag σ²), it minimises

    E_q[ℓ̄(w)] + τ·KL(q‖p)/N,   KL = Σⱼ ½(σⱼ²/σ₀ⱼ² − 1 − log(σⱼ²/σ₀ⱼ²) + (μⱼ−μ₀ⱼ)²/σ₀ⱼ²)

ℓ̄ the mean loss over examples, the KL summed over all weights. The gradient of the first term is taken at samples,
that of the second is exact. What is moved beside μ is log σ².

With initial_log_variance="relative" σ starts at κ of the weights, tensor by tensor (κ as in `relative`), so that it
drowns nothing, and τ is 0.1: with a KL of full weight deep networks do not begin to learn in the time that Adam takes.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor

from credo.curvature.rule import widen
from credo.errors import InvalidType
from credo.kernels import noise
from credo.optim import arguments
from credo.optim.diagnostics import Part
from credo.optim.gathered_tables import GatheredVariances
from credo.optim.gathering import Gathered
from credo.optim.inner import Build, Inner, Moved, adam
from credo.optim.priors import take_prior
from credo.optim.relative import NOISE, TensorNumbers, check_relative, share_noise, start_scale
from credo.optim.reparameterisation import Uncertain
from credo.optim.reparameterised_blocks import ReparameterisedOptimizer, shared_samples
from credo.optim.shards import WIDTHS, ElementShards, whole
from credo.posterior import DiagonalPosterior, Posterior
from credo.posterior.diagonal import kl_terms, sum_terms

Row = list[Tensor] | tuple[Tensor, ...]  # one tensor for each parameter
RELATIVE = "relative"
LR, RELATIVE_LR = 3e-3, 1e-3
TEMPERING = 0.1  # τ beside a start that is relative to the weights
LOG_VARIANCES = (-60.0, 60.0)  # between these a variance is a positive float32, whatever the inner one does
INITIALISATION = 2**64 - 1  # the stream of noise that no draw will reach


def objective_gradients(
    means: Row,  # μ
    variances: Row,  # σ²
    gradients: Row,  # ∂E[ℓ̄]/∂μ
    variance_gradients: Row,  # ∂E[ℓ̄]/∂σ²
    prior_precision: float | Row,  # 1/σ₀², one number or a tensor for each
    prior_means: Row | None,  # μ₀, zero when None
    weight: float,  # τ/N
) -> tuple[Row, Row]:
    """The gradient of E[ℓ̄] + weight·KL by μ and by log σ²."""
    away = means if prior_means is None else torch._foreach_sub(means, prior_means)
    pull: Any = _times(prior_precision, weight)
    by_log_variance = torch._foreach_add(variance_gradients, _times(pull, 0.5))
    torch._foreach_mul_(by_log_variance, variances)
    torch._foreach_add_(by_log_variance, -0.5 * weight)
    return torch._foreach_add(gradients, torch._foreach_mul(away, pull)), by_log_variance


def _times(value: Any, number: float) -> Any:
    """A number, or a row of tensors, times a number."""
    if isinstance(value, float):
        return value * number
    return value if number == 1 else torch._foreach_mul(value, number)


@final
class BayesByBackprop(ReparameterisedOptimizer):
    """Mean-field variational inference on an unmodified model.

        optimizer = credo.BayesByBackprop(model, data_size=len(train_set))
        loss = optimizer.step(closure)
        posterior = optimizer.posterior()

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
    tempering: τ; None: 1, or 0.1 with initial_log_variance="relative".
    mc_samples: K samples a step, each on the whole minibatch.
    convolution_samples: how many of these K the convolutions have (the paper: K = 10, and 1 of them); each is shared by
        K/convolution_samples samples of the other layers. None: as many as the others.
    vectorized: computes the samples together, from a closure that returns losses without calling backward; numbers are
        the same. Convolutions that share their noise are then run once, up to the first linear layer.
    shared_noise, sharded: as for `VOGN`, among several processes; `sharded` needs an inner that moves weight by weight.
    """

    _kept = ("_inner",)

    _shards: ElementShards

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
        initial_log_variance: float | Literal["relative"] | None = -6.0,  # log σ²
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
            "tempering": (TEMPERING if relative else 1.0) if tempering is None else tempering,  # τ
            "local": local,
            "noise": NOISE if relative else None,  # κ√L
        }
        settings = {
            "data_size": arguments.whole("data_size", data_size, 1),  # N
            "augmentation": arguments.number("augmentation", augmentation, 1, math.inf),  # ρ
            "mc_samples": arguments.whole("mc_samples", mc_samples, 1),  # K
            "convolution_samples": shared_samples(mc_samples, convolution_samples),
            "vectorized": bool(vectorized),
            "initial_log_variance": initial_log_variance,
            "reduction": arguments.option("reduction", reduction, ("mean", "sum")),
            "seed": arguments.seed(seed),
            "shared_noise": bool(shared_noise),
            "sharded": bool(sharded),
        }
        if isinstance(initial_log_variance, str):
            arguments.option("initial_log_variance", initial_log_variance, (RELATIVE,))
        elif initial_log_variance is not None:
            arguments.number("initial_log_variance", initial_log_variance, *LOG_VARIANCES)
        if initial_mean_sd is not None:
            arguments.number("initial_mean_sd", initial_mean_sd, 0, math.inf)
        super().__init__(params, defaults, settings)
        share_noise(self.param_groups, self.defaults)
        if prior is not None:
            take_prior(self, prior)
        self._inner = Inner(inner, [self._inner_group(group) for group in self.param_groups])
        settings["inner"] = self._inner.method
        if sharded:
            self._inner.require_elementwise("sharded=True")
        if initial_mean_sd is not None:
            self._initialise_means(initial_mean_sd)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        arguments.learning_rate(group["lr"])
        arguments.number("prior_precision", group["prior_precision"], 0, math.inf, open_low=True)
        check_relative(group)
        if not isinstance(group["local"], bool):
            raise InvalidType(f"local must be True or False, got {group['local']!r}.")

    # Blocks

    def _nothing_gathered(self) -> GatheredVariances:
        return GatheredVariances()

    def _uncertain(self) -> list[Uncertain]:
        with self._shards.drawing(self):
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
        variances = torch._foreach_exp([log_variance for _, _, log_variance in found]) if found else ()
        return [
            Uncertain(names[id(p)], p, variance.requires_grad_(), places[p], local)
            for (p, local, _), variance in zip(found, variances, strict=True)
        ]

    # Steps

    @torch.no_grad()
    def _update(
        self, gathered: Gathered, gradient_scale: float, squares_scale: float, loss: Tensor | None
    ) -> bool:
        assert isinstance(gathered, GatheredVariances)
        if not self._finite(gathered, loss):
            return False
        mean_loss = self.settings["reduction"] == "mean" or gathered.vectorized
        count = gathered.samples if mean_loss else gathered.examples
        units = 1 / (count * gradient_scale), 1 / (count * squares_scale)
        for group in self.param_groups[len(self._inner.optimizer.param_groups) :]:
            self._inner.add_group(self._inner_group(group))
        moves = [(float(group["lr"]), self._moves(group, gathered, *units)) for group in self.param_groups]
        self._inner.step(moves)
        learned = [state["log_variance"] for state in self.state.values() if "log_variance" in state]
        for log_variance in learned:
            log_variance.clamp_(*LOG_VARIANCES)
        return True

    def _moves(
        self, group: dict[str, Any], gathered: GatheredVariances, unit: float, variance_unit: float
    ) -> list[Moved]:
        """The parameters of a group that the loss has reached, and their log variances."""
        reached = [p for p in group["params"] if p.grad is not None and p.requires_grad]
        certain = [p for p in reached if group["deterministic"] or id(p) not in gathered.table]
        moves = [Moved(p.detach(), p.grad * unit, self.state[p], "mean.") for p in certain]
        uncertain = [p for p in reached if not group["deterministic"] and id(p) in gathered.table]
        if not uncertain:
            return moves
        states = [self.state[p] for p in uncertain]
        log_variances = [self._log_variance(group, p) for p in uncertain]
        precisions = [state["prior_precision"] for state in states if "prior_precision" in state]
        by_mean, by_log_variance = objective_gradients(
            [p.detach() for p in uncertain],
            torch._foreach_exp(log_variances),
            _times([p.grad for p in uncertain], unit),
            _times([gathered.table[id(p)] for p in uncertain], variance_unit),
            precisions or float(group["prior_precision"]),
            [state["prior_mean"] for state in states] if precisions else None,
            group["tempering"] / self.data_size,
        )
        for p, state, mean, log_variance in zip(uncertain, states, by_mean, by_log_variance, strict=True):
            moves.append(Moved(p.detach(), mean.to(p.dtype), state, "mean."))
            moves.append(Moved(state["log_variance"], log_variance, state, "log_variance."))
        return moves

    # State

    def _log_variance(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        """log σ² of a parameter, beside it; there from the first time it is asked for."""
        state: dict[str, Any] = self.state[p]
        wide = widen(p.detach())
        if "log_variance" not in state:
            start = self.settings["initial_log_variance"]
            if start == RELATIVE:
                start = math.log(group["noise"] ** 2 * float(start_scale(p)[0]))
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
        for k, p in enumerate(self._all()):
            if "log_variance" in self.state[p]:
                noise.normal_(p, self.settings["seed"], INITIALISATION, k)
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
    @whole(WIDTHS)
    def posterior(self) -> DiagonalPosterior:
        """N(μ, diag σ²)."""
        self._refuse_inside("take the posterior")
        names, first = self.names(), self.param_groups[0]
        mean = {names[id(p)]: p.detach() for p in self._trainable()}
        variance = {u.name: u.variance for u in self._leaves()}
        metadata = {
            "method": type(self).__name__,
            "data_size": self.settings["data_size"],
            "augmentation": self.settings["augmentation"],
            "tempering": first["tempering"],
            "prior_precision": first["prior_precision"],
            "step": self.counters["step"],
        }
        return DiagonalPosterior(mean, variance, metadata)

    @torch.no_grad()
    @whole()
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
