"""The sums Σᵢgᵢ and Σᵢgᵢ² of per-example gradients, in C++ with a reference in plain torch behind each function."""

from credo.kernels.accelerator import scratch_bytes
from credo.kernels.native import Status, forced, status

__all__ = ["Status", "forced", "scratch_bytes", "status"]
