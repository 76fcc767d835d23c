# %% [markdown]
# # tuning
