# %% [markdown]
# # Regression with its band
#
# A network learns a curve from noisy values. Its prediction is a mean and a variance. The variance has two
# parts: the noise of the data, and what the network does not know.

# %%
import torch
from matplotlib import pyplot as plt

import credo

STEPS = 2000  # small: 20

generator = torch.Generator().manual_seed(0)
x = torch.cat([torch.rand(60, 1, generator=generator) - 1.2, torch.rand(60, 1, generator=generator) + 0.2])
y = torch.sin(4 * x) + 0.2 * torch.randn(x.shape, generator=generator)
order = torch.randperm(120, generator=generator)
train, validation = order[:90], order[90:]

# %% [markdown]
# ## Train
#
# The loss is the negative log-likelihood of a Gaussian: half the squared error, divided by the variance of
# the noise. We do not know that variance, so we begin with a guess.

# %%
GUESS = 0.1
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
optimizer = credo.VOGN(model, lr=5e-2, data_size=len(train), mc_samples=4, vectorized=True)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
for _ in range(STEPS):
    # With vectorized=True the closure returns the loss of each example, and leaves backward to the optimiser.
    optimizer.step(lambda: 0.5 * (model(x[train]) - y[train]).square().squeeze(1) / GUESS)
    rate.step()

# %% [markdown]
# ## Fit the noise
#
# Validation data tell the variance of the noise. The true one is 0.04.

# %%
posterior = optimizer.posterior()
held_out = (x[validation], y[validation])
found = credo.calibrate(model, posterior, held_out, task="regression", noise=GUESS, fit="noise", samples=100)
print(
    f"noise variance {float(found.noise):.3f}; NLL {found.nll_before:.3f} before, {found.nll_after:.3f} after"
)

# %% [markdown]
# ## The band
#
# The dark band is `epistemic`: what the network does not know. The light band is the whole variance.

# %%
CAPTION = "The data, the mean of the predictions and their bands"
grid = torch.linspace(-2.2, 2.2, 300)[:, None]
prediction = credo.predict(model, found.posterior, grid, samples=200, **found.options)
mean, line = prediction.mean.squeeze(1), grid.squeeze(1)
figure, panel = plt.subplots()
for sd, alpha, label in (
    (prediction.variance.sqrt().squeeze(1), 0.18, "mean ± 2 sd"),
    (prediction.epistemic.sqrt().squeeze(1), 0.4, "the part that is not noise"),
):
    panel.fill_between(
        line, mean - 2 * sd, mean + 2 * sd, color="#4c6ef5", alpha=alpha, label=label, linewidth=0
    )
panel.plot(line, mean, label="mean")
panel.plot(line, torch.sin(4 * line), "--", linewidth=1, label="truth")
panel.plot(x, y, ".", color="#808892", markersize=3)
panel.set(ylim=(-3.5, 3.5), xlabel="x", ylabel="y")
panel.legend(ncols=2, loc="lower center")

# %% [markdown]
# Outside the data the dark band widens, but by less than the network is wrong: all networks of the
# posterior go on in straight lines. In the gap between the two groups of points it hardly widens. Both are
# known of Gaussians with a diagonal covariance around one network, whose weights cannot vary together. Do
# not take a narrow band away from data for knowledge.
#
# ## Scores
#
# `credo.evaluate` knows that this is a regression.

# %%
print(
    credo.evaluate(
        credo.predict(model, found.posterior, x[validation], samples=100, **found.options),
        y[validation],
    )
)
