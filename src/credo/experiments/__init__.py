"""Experiments: recipes as data, one training loop, runs that survive crashes, and reports."""
