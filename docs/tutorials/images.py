# %% [markdown]
# # Images and unfamiliar inputs
#
# A small convolutional network learns the digits 0 to 7. The digits 8 and 9 are kept away from it. Does it
# know that it does not know them?

# %%
import torch, torch.nn.functional as F
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

import credo

EPOCHS = 30  # small: 1

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)
known = (y < 8).nonzero().flatten()
known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]
train, test, unfamiliar = known[:600], known[600:], (y >= 8).nonzero().flatten()


# %% [markdown]
# ## Two trainings
#
# The loop is the same for both. With VOGN the forward and backward pass stand in a `sampled()` block.


# %%
def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(torch.nn.Flatten(), torch.nn.Linear(128, 8)),
    )


adam_model = build_model()
adam = torch.optim.Adam(adam_model.parameters())
for _ in range(EPOCHS):
    for batch in train[torch.randperm(600)].split(50):
        adam.zero_grad()
        F.cross_entropy(adam_model(x[batch]), y[batch]).backward()
        adam.step()

model = build_model()
optimizer = credo.VOGN(model, data_size=len(train))
for _ in range(EPOCHS):
    for batch in train[torch.randperm(600)].split(50):
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

# %% [markdown]
# ## Predictions
#
# `"mean"` stands for the weights as they are: Adam has nothing else. VOGN's predictions average 30 networks
# of its posterior.

# %%
answers = {
    "Adam": [credo.predict(adam_model, "mean", x[rows]) for rows in (test, unfamiliar)],
    "VOGN": [credo.predict(model, optimizer.posterior(), x[rows], samples=30) for rows in (test, unfamiliar)],
}
for name, (familiar, other) in answers.items():
    scores = credo.evaluate(familiar, y[test], ood=other)
    print(name, *(f"{score} {value:.3f}" for score, value in scores.items()), sep="\n    ")

# %% [markdown]
# ## Familiar and unfamiliar
#
# Entropy is the doubt in a prediction. A good detector has familiar digits on the left and unfamiliar ones
# on the right.

# %%
CAPTION = "Histograms of the entropy of predictions, for familiar and unfamiliar digits"
figure, panels = plt.subplots(1, 2, sharey=True)
for panel, (name, (familiar, other)) in zip(panels, answers.items(), strict=True):
    panel.hist(familiar.entropy, 25, range=(0, 2.08), alpha=0.65, density=True, label="0 to 7")
    panel.hist(other.entropy, 25, range=(0, 2.08), alpha=0.65, density=True, label="8 and 9")
    panel.set(title=name, xlabel="entropy, nats", yscale="log", yticks=[])
    panel.minorticks_off()
panels[0].legend()

# %% [markdown]
# ## The most doubtful test images
#
# Under each image stand the true class and the two most probable ones. Often the doubt is justified.

# %%
CAPTION = "Eight test images with the largest entropy"
familiar = answers["VOGN"][0]
figure, panels = plt.subplots(1, 8, figsize=(7.2, 1.5))
for panel, i in zip(panels, familiar.entropy.argsort(descending=True), strict=False):
    panel.imshow(x[test[i], 0], cmap="Greys")
    first, second = familiar.probs[i].topk(2).indices.tolist()
    panel.set_title(f"{y[test[i]]}: {first} or {second}")
    panel.set_axis_off()

# %% [markdown]
# ## What next
#
# - [Calibrate](../calibration.md) the width of the posterior on validation images.
# - [Results](../results.md) has larger data sets, more seeds and all baselines. One seed of one small set,
#   as here, proves nothing.
