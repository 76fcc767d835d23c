"""The sums Σᵢgᵢ and Σᵢgᵢ² of per-example gradients, in C++ with a pure-torch twin behind each function."""

from credo.kernels.native import Status, forced, status

__all__ = ["Status", "forced", "status"]
