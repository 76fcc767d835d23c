"""What users of Adam, SGD or ivon-opt write by habit is answered with credo's name for it."""

import warnings

import pytest
import torch
from torch import nn

import credo
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation

HABITS = {
    ("VOGN", "betas", (0.9, 0.999)): r"momentum=β₁ and ema_rate=1 − β₂",
    ("OGN", "betas", (0.9, 0.999)): r"ema_rate=1 − β₂",
    ("BayesByBackprop", "betas", (0.9, 0.999)): "inner",
    ("VOGN", "weight_decay", 1e-4): r"prior_precision = weight_decay · data_size",
    ("IVON", "weight_decay", 1e-4): "prior_precision",
    ("KFAC", "weight_decay", 1e-4): "prior_precision",
    ("NoisyKFAC", "weight_decay", 1e-4): "prior_precision",
    ("BayesByBackprop", "weight_decay", 1e-4): "prior_precision",
    ("VOGN", "eps", 1e-8): "damping",
    ("IVON", "eps", 1e-8): "Leave it out",
    ("VOGN", "amsgrad", True): "Leave it out",
    ("VOGN", "nesterov", True): "momentum",
    ("VOGN", "maximize", True): "sign of the loss",
    ("IVON", "ess", 5000): "data_size",
    ("VOGN", "ess", 5000): "data_size",
    ("IVON", "hess_init", 0.1): "initial_curvature",
    ("IVON", "beta1", 0.9): "first of betas",
    ("VOGN", "beta2", 0.9): "1 − β₂",
    ("IVON", "momentum", 0.9): "first of betas",
    ("IVON", "rescale_lr", True): "Leave it out",
    ("VOGN", "N", 10): "data_size",
    ("VOGN", "num_samples", 3): "mc_samples",
    ("VOGN", "prior_precison", 3): "prior_precision",
    ("VOGN", "learning_rate", 0.1): "it is lr",
    ("IVON", "learning_rate", 0.1): "it is lr",
    ("VOGN", "clip_radius", 1.0): "clip_grad_norm_",
    ("VOGN", "alpha", 0.99): "ema_rate is 1 − alpha",
    ("VOGN", "prior_std", 0.1): "prior_precision = 1/σ²",
    ("IVON", "nesterov", True): "Leave it out",
    ("IVON", "dampening", 0.1): "nothing like it here",
    ("BayesByBackprop", "beta1", 0.9): "inner optimiser",
}


@pytest.mark.parametrize(("habit", "message"), HABITS.items(), ids=[f"{m} {a}" for m, a, _ in HABITS])
def test_arguments_of_others_are_answered(habit, message):
    method, name, value = habit
    with pytest.raises(InvalidType, match=f"{method} has no argument '{name}'.*{message}"):
        getattr(credo, method)(nn.Linear(2, 2), data_size=10, **{name: value})


def test_every_answer_names_arguments_that_the_method_has():
    """A table that promises what is not there would be worse than none."""
    from credo.optim import habits

    for method in ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop"):
        with pytest.raises(InvalidType) as caught:
            getattr(credo, method)(nn.Linear(2, 2), data_size=10, nonsense_that_nobody_has=1)
        known = str(caught.value).partition("It has: ")[2].rstrip(".").split(", ")
        assert "data_size" in known
        for name in ("betas", "weight_decay", "eps", "ess", "amsgrad"):
            if name not in known:
                assert habits.answer(name, known), (method, name)


def test_arguments_without_names_and_a_missing_data_size():
    with pytest.raises(InvalidType, match="only params and lr"):
        credo.VOGN(nn.Linear(2, 2), 1e-2, (0.9, 0.999), data_size=10)
    with pytest.raises(InvalidType, match=r"data_size=len\(train_set\)"):
        credo.VOGN(nn.Linear(2, 2))


def test_options_of_groups_are_answered_too():
    net = nn.Linear(2, 2)
    with pytest.raises(InvalidValue, match=r"unknown option 'weight_decay'.*prior_precision"):
        credo.VOGN([{"params": net.parameters(), "weight_decay": 0.1}], data_size=10)


@pytest.mark.parametrize("method", ["VOGN", "OGN", "KFAC", "NoisyKFAC"])
def test_an_lr_of_adam_is_warned_of(method):
    with pytest.warns(UserWarning, match=r"lr=0\.001.*Adam"):
        getattr(credo, method)(nn.Linear(2, 2), lr=1e-3, data_size=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(credo, method)(nn.Linear(2, 2), data_size=10)
        getattr(credo, method)(nn.Linear(2, 2), lr=1e-3, damping=0.1, data_size=10)
        getattr(credo, method)(nn.Linear(2, 2), lr=0.02, data_size=10)


def test_an_lr_of_adam_is_warned_of_where_ivon_would_hardly_move():
    """A tenth of a step of IVON's is a slow one; a hundredth learns next to nothing, in silence."""
    with pytest.warns(UserWarning, match=r"IVON\(lr=0\.001\).*usual lr is 0\.1"):
        credo.IVON(nn.Linear(2, 2), lr=1e-3, data_size=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.IVON(nn.Linear(2, 2), data_size=10)
        credo.IVON(nn.Linear(2, 2), lr=0.1, data_size=10)
        credo.IVON(nn.Linear(2, 2), lr=1e-3, initial_curvature=0.01, data_size=10)
        credo.BayesByBackprop(nn.Linear(2, 2), lr=1e-3, data_size=10)  # it is Adam's there


def test_signatures_stay_readable():
    import inspect

    assert "data_size" in inspect.signature(credo.VOGN).parameters


@pytest.mark.parametrize("method", ["VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop"])
def test_distributed_tensors_are_refused_by_name(method):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Linear(4, 2)
        net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), init_device_mesh("cpu", (1,))))
        for given in (net, list(net.parameters()), list(net.named_parameters())):
            with pytest.raises(UnsupportedOperation, match=r"DTensor.*sharded=True"):
                getattr(credo, method)(given, data_size=10)
        with pytest.raises(UnsupportedOperation, match="'weight' is a DTensor"):
            credo.capture(net)
    finally:
        dist.destroy_process_group()
    assert isinstance(torch.ones(1), torch.Tensor)


@pytest.mark.parametrize("layer", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON, credo.BayesByBackprop, credo.KFAC])
def test_rows_that_a_forward_pass_shortens_are_refused(method, layer):
    """The sample would be shortened, and the mean stay as it is."""
    model = torch.nn.Sequential(layer(10, 4, max_norm=0.5))
    with pytest.raises(credo.errors.UnsupportedOperation, match=r"max_norm of 0 .*torch\.renorm"):
        method(model, data_size=50)
