# %% [markdown]
# # processes
