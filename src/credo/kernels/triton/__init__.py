"""Triton programs for CUDA devices: samples, updates, sums of squares, BatchNorm, in few launches.

Nothing here imports Triton until the first of them runs. Where it cannot, `runs_for` says no, the reason is one
warning, and the same is done in plain torch.
"""

from credo.kernels.triton.availability import accelerator, runs_for

__all__ = ["accelerator", "runs_for"]
