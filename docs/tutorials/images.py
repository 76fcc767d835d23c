# %% [markdown]
# # images
