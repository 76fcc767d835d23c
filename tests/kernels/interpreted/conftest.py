"""What these tests need of the interpreter."""

import os

import numpy as np
import pytest


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.exit("run with TRITON_INTERPRET=1, as tests/kernels/test_triton.py does", returncode=2)
    _mend_products()


def _mend_products() -> None:
    """Triton 3.9's interpreter holds bfloat16 as its bits, and multiplies matrices of these bits."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def wide(own: TensorHandle) -> TensorHandle:
        if own.dtype.scalar is not tl.bfloat16 or own.data.dtype != np.uint16:
            return own
        return TensorHandle((own.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *more: multiply(self, wide(a), wide(b), *more)
