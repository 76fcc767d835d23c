"""Steps that are refused, budgets, and parameters on several devices."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.experiments.state import private_randomness
from credo.kernels import accelerator_sums, noise, update
from credo.kernels.convolution import Geometry, weight_sums_reference
from credo.kernels.flags import Flags
from credo.kernels.tensors import TensorList
from credo.optim.vogn import averaged_update
from tests.device.emulated import Device, states

METHODS = ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop")


class Halves(nn.Module):
    """The first half on one device, the second on another."""

    def __init__(self, first: str, second: str):
        super().__init__()
        self.devices = first, second
        self.a, self.b = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x):
        return self.b(self.a(x.to(self.devices[0])).tanh().to(self.devices[1]))


def learned(model, optimizer):
    state = {f"{k}{name}": v for k, own in enumerate(optimizer.state.values()) for name, v in own.items()}
    tensors = {**dict(model.named_parameters()), **{k: v for k, v in state.items() if torch.is_tensor(v)}}
    return {key: value.detach().cpu().clone() for key, value in tensors.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_refused_step_changes_no_bit(method, poison):
    with Device(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to("npu:0")
        optimizer = getattr(credo, method)(model, data_size=60)
        x, y = torch.randn(6, 4).double().to("npu:0"), torch.tensor([0, 1, 2, 0, 1, 2]).to("npu:0")

        def step(factor):
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x * factor), y)
                loss.backward()
                return loss

            optimizer.step(closure)

        for _ in range(3):
            step(1.0)
        before = learned(model, optimizer)
        step(poison)
        after = learned(model, optimizer)
        assert optimizer.counters["refused"] == 1
        assert optimizer.counters["step"] == 3
        for key, value in before.items():
            assert torch.equal(value, after[key]), key
        step(1.0)
        assert optimizer.counters["step"] == 4


def test_ignored_targets_are_counted_as_on_the_cpu():
    """That no target is ignored is taken for granted until the step is read, and set right then."""

    def run(device):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double().to(device)
        optimizer = credo.OGN(model, data_size=60)
        x, y = torch.randn(6, 4).double().to(device), torch.tensor([0, 1, -100, 0, -100, 2])
        for targets in (y.clamp(min=0), y, y.clamp(min=0), y):
            targets = targets.to(device)

            def closure(targets=targets):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
        assert optimizer.counters["refused"] == 0
        return {**learned(model, optimizer), "examples": torch.tensor(optimizer.counters["examples"])}

    with Device():
        found = run("npu:0")
    for key, value in run("cpu").items():
        assert torch.allclose(found[key].double(), value.double(), rtol=1e-10, atol=1e-12), key


@pytest.mark.parametrize("method", METHODS)
def test_parameters_on_two_devices(method):
    """Half of the model on the CPU: the numbers of OGN and K-FAC are those of one device."""

    def run(first, second):
        torch.manual_seed(0)
        model = Halves(first, second)
        model.a.to(first)
        model.b.to(second)
        optimizer = getattr(credo, method)(model, data_size=60)
        x, y = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2]).to(second)
        for _ in range(4):

            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        assert optimizer.counters["step"] == 4
        return {key: p.detach().cpu() for key, p in model.named_parameters()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Device():
            found = run("cpu", "npu:0")
        truth = run("cpu", "cpu")
    for key, value in truth.items():
        close = 1e-10 if method in ("OGN", "KFAC") else 1.0
        assert float((found[key] - value).abs().max()) <= close, key


def test_one_flag_for_two_accelerators():
    with Device():
        for bad in (0, 1, None):
            rows = [torch.ones(3).to(f"npu:{k}") for k in (0, 1)]
            if bad is not None:
                rows[bad].mul_(float("nan"))
            flags = Flags(rows)
            assert all(bool(flags.on(row.device)) == (bad is None) for row in rows)


def test_samples_and_updates_of_tensors_on_two_accelerators():
    with Device():
        means = TensorList([torch.randn(5).double().to(f"npu:{k % 2}") for k in range(4)])
        rows = [[torch.rand(5).double().to(mean.device) for mean in means] for _ in range(4)]
        before = [mean.cpu().clone() for mean in means]
        noise.sample_all_(means, rows[1], 0.1, 0.5, 3, 1, range(4))
        assert all(not torch.equal(mean.cpu(), old) for mean, old in zip(means, before, strict=True))
        numbers = update.VOGNNumbers(0.1, 0.9, 0.1, 0.2, 1.0, 1.0)
        assert update.vogn_(averaged_update, means, *rows, 0.3, None, numbers)


@pytest.mark.parametrize("budget", [1, 1 << 12, 1 << 30])
@pytest.mark.parametrize("groups", [1, 2])
def test_sums_do_not_depend_on_the_budget(budget, groups):
    x, g = torch.randn(5, 4, 9, 8).double(), torch.randn(5, 6, 5, 3).double()
    at = Geometry((3, 2), (2, 3), (1, 0), (1, 2), groups)
    g = torch.randn(5, 6, *[(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(
        x.shape[2:], at.kernel_size, at.stride, at.padding, at.dilation, strict=True)]).double()  # fmt: skip
    with Device():
        found = accelerator_sums.convolution_sums(x.to("npu:0"), g.to("npu:0"), at, budget)
        found = [own.cpu() for own in found]
    for own, truth in zip(found, weight_sums_reference(x, g, at), strict=True):
        assert torch.allclose(own, truth, rtol=1e-12, atol=1e-12)


def test_mixing_devices_is_an_error_here():
    with Device(), pytest.raises(RuntimeError, match="on the CPU"):
        torch.ones(3).to("npu:0") + torch.ones(3)


def test_a_run_seeds_its_own_device_and_puts_its_generator_back():
    """The current device is another one."""
    states.update({0: 5, 1: 6})
    with private_randomness(17, torch.device("npu", 1)):
        assert states == {0: 5, 1: 17}
    assert states == {0: 5, 1: 6}
