"""Tests of the Triton programs, which run in Triton's interpreter; `tests/kernels/test_triton.py` starts them."""
