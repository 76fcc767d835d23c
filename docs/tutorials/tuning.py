# %% [markdown]
# # Tuning
#
# `credo.tune` searches the settings of a method by the NLL on validation data. Every method has the same
# budget for the same kind of numbers.

# %%
import tempfile

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import credo

TRIALS = 12  # small: 2
EPOCHS = 10  # small: 1

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32)[:500] / 16, torch.tensor(digits.target)[:500]


def build_model():
    return credo.models.MLP((64, 50, 10))


# %% [markdown]
# ## Search
#
# A fifth of the data is kept for validation. The first trial has the defaults; factors on them are
# searched.

# %%
folder = tempfile.mkdtemp()  # the same call in the same folder goes on where it was
search = {
    "validation_fraction": 0.2,
    "trials": TRIALS,
    "epochs": EPOCHS,
    "out": folder,
    "progress": False,
}
found = {method: credo.tune(build_model, (x, y), method=method, **search) for method in ("adam", "vogn")}
print(found["vogn"].table())

# %% [markdown]
# ## What was tried
#
# Each point is a trial. The line is the best so far.

# %%
CAPTION = "Validation NLL of each trial, for Adam and VOGN"
figure, panels = plt.subplots(1, 2, sharey=True)
for panel, (method, result) in zip(panels, found.items(), strict=True):
    trials = result.complete
    values = torch.tensor([trial.nll for trial in trials])
    panel.plot([trial.number for trial in trials], values, "o", markersize=4)
    panel.step([trial.number for trial in trials], values.cummin(0).values, where="post", linewidth=1)
    panel.set(title=method, xlabel="trial", yscale="log")
panels[0].set_ylabel("validation NLL, nats")

# %% [markdown]
# ## Use it
#
# `found.constructor` is the line to paste. `found.optimizer` builds it.

# %%
print(found["vogn"].constructor)
model = build_model()
optimizer = found["vogn"].optimizer(model, data_size=400)

# %% [markdown]
# The least of many trials is a little too good. Judge the found numbers on test data, with other seeds.
# [Tuning](../tuning.md) has the command line, budgets in minutes, and what to look at by hand.
