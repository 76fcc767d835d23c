"""K-FAC: Kronecker-factored natural gradient (Martens & Grosse 2015; Grosse & Martens 2016 for convolutions).

The update is the one in `kronecker_base`; gradients and factors are taken at the mean. Its posterior is a Laplace
approximation with the same factors.
"""

from typing import Any, final

from torch import Tensor

from credo.optim.kronecker_base import KroneckerOptimizer
from credo.optim.kronecker_layers import KroneckerLayer
from credo.posterior import Posterior


@final
class KFAC(KroneckerOptimizer):
    """As `NoisyKFAC`, without noise in the weights; the arguments mean the same.

    params: as for `VOGN`: a module, named_parameters(), parameters(), or parameter groups.
    data_size: N, the number of training examples; augmentation: how many times larger the data are for being augmented.
    lr, damping, tempering, prior_precision: None, chosen for each tensor (docs/defaults.md).
    momentum, ema_rate: β₁, as in SGD, and the weight of the *new* factors.
    prior: a posterior to start from; `prior_precision` is then unused.
    damping_form: "eigen" or "pi"; fisher: "empirical" or "true"; sharing: "expand" or "reduce" (see `NoisyKFAC`).
    factor_interval, inverse_interval: how many steps factors and inverses are kept for.
    reduction: whether the loss is the "mean" or the "sum" over the examples of the batch.
    seed: of draws from the posterior and of labels; steps have no other noise.
    sharded, mc_groups: among several processes, as for `NoisyKFAC`.
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
        damping_form: str = "eigen",
        tempering: float | None = None,  # τ
        augmentation: float = 1.0,  # ρ
        factor_interval: int = 10,  # T_f
        inverse_interval: int = 100,  # T_i
        fisher: str = "empirical",
        sharing: str = "expand",
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
            damping_form=damping_form,
            tempering=tempering,
            mc_samples=1,
            augmentation=augmentation,
            factor_interval=factor_interval,
            inverse_interval=inverse_interval,
            fisher=fisher,
            sharing=sharing,
            reduction=reduction,
            seed=seed,
            shared_noise=False,
            sharded=sharded,
            mc_groups=mc_groups,
        )

    def _draw(self, draw: int) -> None:
        """The mean is the sample."""

    def _uncertain(self) -> list[KroneckerLayer]:
        """Nothing is drawn; but what has been frozen is noticed by a rank without examples too."""
        self._follow_freezing()
        return []
