# %% [markdown]
# # Small data
#
# With few examples a network can be right and far too sure, or wrong and sure. Here each method learns
# handwritten digits from 50 to 400 examples, without any settings.

# %%
import torch, torch.nn.functional as F
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import credo

SIZES = (50, 100, 200, 400)  # small: (50,)
SEEDS = 3  # small: 1
STEPS = 400  # small: 5

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
test = torch.randperm(len(x), generator=torch.Generator().manual_seed(99))[:600]
rest = torch.ones(len(x), dtype=torch.bool)
rest[test] = False
pool = rest.nonzero().flatten()


# %% [markdown]
# ## One function for all methods
#
# A closure works with every torch optimiser, credo's included.


# %%
def nll(method, size, seed):
    torch.manual_seed(seed)
    train = pool[torch.randperm(len(pool))[:size]]
    model = credo.models.MLP((64, 100, 10))
    optimizer = METHODS[method](model, size)
    for _ in range(STEPS):
        batch = train[torch.randint(size, (32,))]

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            return loss

        optimizer.step(closure)
    posterior = "mean" if method == "Adam" else optimizer.posterior()
    prediction = credo.predict(model, posterior, x[test], samples=20)
    return credo.evaluate(prediction, y[test])["nll"]


METHODS = {
    "Adam": lambda model, n: torch.optim.Adam(model.parameters()),
    "VOGN": lambda model, n: credo.VOGN(model, data_size=n),
    "IVON": lambda model, n: credo.IVON(model, data_size=n),
    "Noisy K-FAC": lambda model, n: credo.NoisyKFAC(model, data_size=n),
}
scores = {
    method: torch.tensor([[nll(method, size, seed) for seed in range(SEEDS)] for size in SIZES])
    for method in METHODS
}

# %% [markdown]
# ## The picture
#
# Lower is better. Bars are one standard deviation over the seeds, which also choose the examples.

# %%
CAPTION = "Test NLL against the number of training examples, four methods"
figure, panel = plt.subplots()
for shift, (method, values) in enumerate(scores.items()):
    places = [size * 1.03**shift for size in SIZES]
    panel.errorbar(
        places,
        values.mean(1),
        values.std(1, correction=0),
        marker="o",
        markersize=4,
        capsize=2,
        label=method,
    )
panel.set(
    xscale="log",
    xlabel="training examples",
    ylabel="test NLL, nats",
    xticks=SIZES,
    xticklabels=SIZES,
)
panel.minorticks_off()
panel.legend()

# %%
for method, values in scores.items():
    print(f"{method:12}", "  ".join(f"{v:.3f}" for v in values.mean(1)))

# %% [markdown]
# All methods stop after the same number of steps, so this also compares how fast they learn. [Out of the
# box](../out_of_the_box.md) has more problems, and [tuning](../tuning.md) finds better settings for each.
