from contextlib import nullcontext

import pytest

import credo


@pytest.fixture(params=["kernels", "twin"])
def both_kernels(request):
    """Once with the best kernels this machine has, once with their pure-torch twin."""
    with nullcontext() if request.param == "kernels" else credo.kernels.forced("off"):
        yield
