"""Split MNIST: five pairs of digits, a head for each; not in the paper."""

from dataclasses import replace
from typing import Final

from credo.experiments.continual_recipe import ContinualRecipe, ContinualRow
from credo.experiments.recipes import permuted_mnist as permuted

# 1880 steps a task, so that the initial precision must fade faster: e⁻¹⁹ of it is left.
VOGN_ON_CPU: Final = replace(
    permuted.VOGN_ON_CPU, epochs=20, settings={**permuted.VOGN_ON_CPU.settings, "ema_rate": 1e-2}
)

RECIPES: Final = (
    ContinualRecipe(
        "split-mnist",
        title="Continual learning: Split MNIST, a head for each task",
        source="not in the paper",
        data="mnist",
        stream="split",
        tasks={"paper": 5, "cpu": 5},
        seeds={"paper": 20, "cpu": 3},
        rows=(
            ContinualRow("vogn", permuted.VOGN, VOGN_ON_CPU),
            ContinualRow("vcl", replace(permuted.VCL, epochs=120), replace(permuted.VCL_ON_CPU, epochs=160)),
            ContinualRow("ewc", permuted.EWC, replace(permuted.EWC, epochs=10)),
            ContinualRow("adam", permuted.ADAM, replace(permuted.ADAM, epochs=10)),
            ContinualRow("joint", permuted.JOINT, replace(permuted.JOINT, epochs=5)),
        ),
        note="A task has 12,000 examples, a fifth of MNIST, so that an epoch has a fifth of the steps.",
    ),
)
