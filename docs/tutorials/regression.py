# %% [markdown]
# # regression
