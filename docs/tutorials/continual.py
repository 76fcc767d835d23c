# %% [markdown]
# # continual
