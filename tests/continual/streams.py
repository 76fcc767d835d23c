"""Small tasks that the tests share."""

import torch
from torch import Tensor, nn

import credo
from credo.continual import MultiHead, Task

FEATURES, CLASSES = 6, 3


def classification(number: int, *, head: str | None = None, n: int = 120) -> Task:
    """Gaussian blobs; each task has its own centres, so that a single head can learn them all."""
    generator = torch.Generator().manual_seed(number)
    centres = 3 * torch.randn(CLASSES, FEATURES, generator=generator)
    targets = torch.arange(n) % CLASSES
    inputs = centres[targets] + torch.randn(n, FEATURES, generator=generator)
    cut = n * 3 // 4
    return Task(f"task_{number}", inputs[:cut], targets[:cut], inputs[cut:], targets[cut:], head=head)


def network(seed: int = 0) -> nn.Module:
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, CLASSES))


def with_heads() -> MultiHead:
    return MultiHead(nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU()), lambda: nn.Linear(12, CLASSES))


def vogn(model: nn.Module, data_size: int, prior: credo.Posterior | None, seed: int) -> credo.VOGN:
    return credo.VOGN(model, 5e-3, data_size=data_size, prior=prior, seed=seed, damping=1e-2)


def noisy_kfac(model: nn.Module, data_size: int, prior: credo.Posterior | None, seed: int) -> credo.NoisyKFAC:
    return credo.NoisyKFAC(model, 1e-2, data_size=data_size, prior=prior, seed=seed, damping=0.1)


def bbb(model: nn.Module, data_size: int, prior: credo.Posterior | None, seed: int) -> credo.BayesByBackprop:
    return credo.BayesByBackprop(
        model, 1e-2, data_size=data_size, prior=prior, seed=seed, initial_log_variance=-6.0
    )


def ivon(model: nn.Module, data_size: int, prior: credo.Posterior | None, seed: int) -> credo.IVON:
    rates = {"lr": 0.02, "betas": (0.9, 0.99), "initial_curvature": 0.1}
    return credo.IVON(model, data_size=data_size, prior=prior, seed=seed, **rates)


METHODS = {"VOGN": vogn, "Noisy K-FAC": noisy_kfac, "BBB": bbb, "IVON": ivon}


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
