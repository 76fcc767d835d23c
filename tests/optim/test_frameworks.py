"""What other libraries do around an optimiser without a word."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import CallOrderError, UnsupportedOperation


def test_closures_that_accelerate_leaves_out_are_refused(monkeypatch):
    """Its optimisers do not call the closure of any micro-batch but the last."""
    model = nn.Linear(2, 2)
    optimizer = credo.VOGN(model, data_size=10)
    state = SimpleNamespace(_shared_state={"plugin_kwargs": {"num_steps": 4}})
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(GradientState=state))
    with pytest.raises(CallOrderError, match=r"gradient_accumulation_steps=4 .* optimizer.accumulate\(4\)"):
        optimizer.step(lambda: model(torch.ones(3, 2)).square().mean())
    state._shared_state["plugin_kwargs"] = {}
    optimizer.step(lambda: model(torch.ones(3, 2)).square().mean())


def test_a_number_of_samples_that_does_not_fit_may_be_micro_batches():
    model = nn.Linear(2, 2)
    optimizer = credo.VOGN(model, data_size=10)
    for _ in range(2):
        with optimizer.sampled():
            model(torch.ones(3, 2)).square().mean().backward()
    with pytest.raises(CallOrderError, match=r"2 sample.*mc_samples=1.*accumulate\(n\)"):
        optimizer.step()


def test_fully_sharded_modules_are_refused():
    class FullyShardedDataParallel(nn.Sequential):
        """As torch's, whose import takes long."""

    for model in (
        FullyShardedDataParallel(nn.Linear(2, 2)),
        nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))),
    ):
        with pytest.raises(UnsupportedOperation, match=r"FullyShardedDataParallel.*sharded=True"):
            credo.IVON(model, data_size=10)


def test_compiled_functions_inside_a_block_of_bayes_by_backprop_run_as_written():
    def taught(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        called = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = credo.BayesByBackprop(model, data_size=20, seed=1)
        for _ in range(2):
            optimizer.step(lambda: F.cross_entropy(called(torch.ones(6, 4)), torch.arange(6) % 3))
        return model

    for p, q in zip(taught(True).parameters(), taught(False).parameters(), strict=True):
        assert torch.equal(p, q)
