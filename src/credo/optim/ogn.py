"""OGN: online Gauss–Newton, the deterministic version of VOGN (Osawa et al. 2019, appendix D).

The update is the one in `gauss_newton`; ĝ and ĥ are taken at the mean. Its posterior N(μ, σ²) is a
Laplace approximation. Tune it like Adam first, then move to VOGN with the same numbers.
"""

from typing import Any, final

from torch import Tensor

from credo.curvature.many_samples import StackedWeights
from credo.optim.gauss_newton import GaussNewton, Uncertain
from credo.optim.iterates import place_iterates
from credo.posterior import Posterior


@final
class OGN(GaussNewton):
    """As `VOGN`, without noise in the weights; the arguments mean the same.

    params: a module, named_parameters(), parameters(), or parameter groups.
    data_size: N, the number of training examples; augmentation: how many times larger the data are for being augmented.
    lr, damping, tempering, prior_precision: None, chosen for each tensor (docs/defaults.md).
    momentum, ema_rate: β₁, as in SGD, and the weight of the *new* squares.
    averaging: η, the mean is over about the last 1/(η + 1) of all steps; 0: the last iterate.
    prior: a posterior to start from; `prior_precision` is then unused.
    initial_curvature, initial_precision: s₀, or where 1/σ² starts.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
    seed: of draws from the posterior; steps have no noise.
    sharded, mc_groups: among several processes, as for `VOGN`.
    """

    _trains_with_noise = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,  # α
        *,
        data_size: float,  # N
        momentum: float = 0.9,  # β₁
        ema_rate: float = 0.1,  # β₂
        prior_precision: float | None = None,  # δ
        prior: Posterior | None = None,
        damping: float | None = None,  # γ
        tempering: float | None = None,  # τ
        averaging: float | None = None,  # η
        augmentation: float = 1.0,  # ρ
        initial_curvature: float | None = None,  # s₀
        initial_precision: float | None = None,
        reduction: str = "mean",
        seed: int = 0,
        sharded: bool = False,
        mc_groups: int | None = None,
    ):
        super().__init__(
            params,
            lr,
            data_size=data_size,
            momentum=momentum,
            ema_rate=ema_rate,
            prior_precision=prior_precision,
            prior=prior,
            damping=damping,
            tempering=tempering,
            averaging=averaging,
            mc_samples=1,
            mc_slices=1,
            vectorized=False,
            augmentation=augmentation,
            initial_curvature=initial_curvature,
            initial_precision=initial_precision,
            reduction=reduction,
            seed=seed,
            shared_noise=False,
            sharded=sharded,
            mc_groups=mc_groups,
        )

    def _draw(self, draw: int) -> None:
        """The iterate is the sample."""
        place_iterates(self._keeper, self._uncertain().moved)

    def _stacks(self, draw: int, samples: int) -> StackedWeights:
        place_iterates(self._keeper, self._uncertain().moved)
        return StackedWeights({}, samples)

    def _noisy(self) -> list[Uncertain]:
        return []
