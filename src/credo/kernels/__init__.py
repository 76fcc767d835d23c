"""The sums Σᵢgᵢ and Σᵢgᵢ² of per-example gradients, in C++ with a reference in plain torch behind each function."""

from credo.kernels.native import Status, forced, status

__all__ = ["Status", "forced", "status"]
