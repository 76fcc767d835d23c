# %% [markdown]
# # small_data
