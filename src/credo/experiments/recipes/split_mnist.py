"""Split MNIST: five pairs of digits, a head for each; not in the paper."""

from dataclasses import replace
from typing import Final

from credo.experiments.continual_recipe import ContinualRecipe, ContinualRow
from credo.experiments.recipes import permuted_mnist as permuted

# An epoch has a fifth of the steps of Permuted MNIST, so that it takes five times the epochs to have as many.
VOGN: Final = replace(permuted.VOGN, epochs=500)
# Batches of 32, so that a task has 7,040 steps: the rates of Permuted MNIST need them, for the initial precision to
# fade and the mean to return (`credo.continual.remaining_distance`). With batches of 128 the last task broke the others
# (docs/log.md).
VOGN_ON_CPU: Final = replace(permuted.VOGN_ON_CPU, epochs=20, batch_size=32, hold=0.7)

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
            ContinualRow("vogn", VOGN, VOGN_ON_CPU),
            ContinualRow("vcl", replace(permuted.VCL, epochs=4000), replace(permuted.VCL_ON_CPU, epochs=160)),
            ContinualRow("ewc", permuted.EWC, replace(permuted.EWC, epochs=10)),
            ContinualRow("adam", permuted.ADAM, replace(permuted.ADAM, epochs=10)),
            ContinualRow("joint", permuted.JOINT, replace(permuted.JOINT, epochs=5)),
        ),
        note="A task has 12,000 examples, a fifth of MNIST, so that an epoch has a fifth of the steps.",
    ),
)
