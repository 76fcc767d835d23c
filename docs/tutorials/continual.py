# %% [markdown]
# # Continual learning
#
# Four tasks come one after the other, and data of earlier tasks are gone. A plain network forgets. With
# credo the posterior of one task is the prior of the next: weights that mattered are held.

# %%
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import credo
from credo.continual import Point, Task, Variational, annealed, learn

EPOCHS = 20  # small: 1
TASKS = 4  # small: 2

# %% [markdown]
# ## The tasks
#
# Each task shows the same digits through its own permutation of the pixels.

# %%
digits = load_digits()
generator = torch.Generator().manual_seed(0)
shuffled = torch.randperm(len(digits.target), generator=generator)
x = torch.tensor(digits.data, dtype=torch.float32)[shuffled] / 16
y = torch.tensor(digits.target)[shuffled]
orders = [torch.arange(64)] + [torch.randperm(64, generator=generator) for _ in range(TASKS - 1)]
tasks = [Task("digits", x[:1400, order], y[:1400], x[1400:, order], y[1400:]) for order in orders]


# %% [markdown]
# ## The learners
#
# `Point` is any torch optimiser, which goes on from task to task; with `ewc=100.0` it is EWC. `Variational`
# makes a new optimiser for each task, with the old posterior as its prior.


# %%
def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))


def vogn(model, data_size, prior, seed):
    return credo.VOGN(
        model,
        lr=1e-2,
        data_size=data_size,
        prior=prior,
        seed=seed,
        initial_precision=1e3,  # little noise at first; fades as (1 − ema_rate)ᵗ
        momentum=0.0,
        ema_rate=2e-2,
        damping=0.0,
        mc_samples=5,
        vectorized=True,
    )


learners = {
    "Adam": Point(network(), lambda parameters: torch.optim.Adam(parameters)),
    "VOGN": Variational(network(), vogn, annealing=annealed(0.1, hold=0.7), samples=30),
}
matrices = {name: learn(learner, tasks, epochs=EPOCHS, batch_size=32) for name, learner in learners.items()}
for name, matrix in matrices.items():
    average, forgotten = credo.metrics.average_accuracy(matrix), credo.metrics.forgetting(matrix)
    print(f"{name:5} average accuracy {average:.3f}, forgetting {forgotten:.3f}")

# %% [markdown]
# ## What is left of each task
#
# Rows are tasks as they arrive, columns are the tasks that are tested. The first column is what is left of
# the first task.

# %%
CAPTION = "Accuracy on each task after each task, for Adam and VOGN"
figure, panels = plt.subplots(1, 2, figsize=(6.4, 3.1))
for panel, (name, matrix) in zip(panels, matrices.items(), strict=True):
    whole = torch.full((TASKS, TASKS), float("nan"))
    for i, row in enumerate(matrix):
        whole[i, : i + 1] = torch.tensor(row)
        for j, accuracy in enumerate(row):
            panel.text(j, i, f"{accuracy:.2f}", ha="center", va="center", color="white", fontsize=8)
    panel.imshow(whole, vmin=0, vmax=1, cmap="viridis")
    names = [f"{k + 1}" for k in range(TASKS)]
    panel.set(title=name, xlabel="tested on task", xticks=range(TASKS), yticks=range(TASKS))
    panel.set_xticklabels(names)
    panel.set_yticklabels(names)
panels[0].set_ylabel("after task")

# %% [markdown]
# [Continual learning](../continual.md) explains the numbers of `vogn`, and how to choose them. The paper's
# experiment is the recipe `permuted-mnist`; its numbers are in [results](../results.md).
