from contextlib import nullcontext

import hypothesis
import pytest
import torch

import credo

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def same_numbers():
    """The global generator starts alike in every test: models without a seed do not depend on what ran before."""
    torch.manual_seed(1)


@pytest.fixture(params=["kernels", "reference"])
def both_kernels(request):
    """Once with the best kernels this machine has, once with the pure-torch reference."""
    with nullcontext() if request.param == "kernels" else credo.kernels.forced("off"):
        yield


@pytest.fixture
def threads():
    """Sets how many threads torch has, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
