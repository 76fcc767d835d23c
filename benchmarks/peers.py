"""The other libraries, each used the way its documentation says, on the same loss.

All but IVON deliver Σg and Σg², gᵢ the gradient of example i's own loss; IVON takes a full step.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.cases import Problem
from benchmarks.contender import DATA_SIZE, LEARNING_RATE, Contender, Running

VMAP_BYTES = 1 << 30  # per-example gradients that torch.func may hold at once


def backpack(problem: Problem) -> Running:
    from backpack import backpack as extension
    from backpack import extend
    from backpack.extensions import SumGradSquared

    model = extend(problem.model)
    loss_function = extend(nn.CrossEntropyLoss())

    def step() -> None:
        model.zero_grad()
        with extension(SumGradSquared()):
            loss_function(model(problem.x), problem.y).backward()

    def squares() -> dict[str, Tensor]:
        undo_mean = len(problem.x) ** 2  # BackPACK squares the gradients of ℓᵢ/M
        return {name: undo_mean * p.sum_grad_squared for name, p in problem.model.named_parameters()}

    return Running(step, squares)


def opacus(problem: Problem) -> Running:
    from opacus.grad_sample import GradSampleModule

    model = GradSampleModule(problem.model, loss_reduction="mean")
    kept: dict[str, Tensor] = {}

    def step() -> None:
        kept.clear()
        model.zero_grad()
        F.cross_entropy(model(problem.x), problem.y).backward()
        for name, p in problem.model.named_parameters():
            kept[name] = sum_of_squares(p.grad_sample)
            p.grad_sample = None

    return Running(step, lambda: kept)


def torch_func(problem: Problem) -> Running:
    model = problem.model
    chunk = max(1, VMAP_BYTES // sum(4 * p.numel() for p in model.parameters()))
    kept: dict[str, Tensor] = {}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        kept.clear()
        sums: dict[str, Tensor] = {}
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        for x, y in zip(problem.x.split(chunk), problem.y.split(chunk), strict=True):
            for name, g in gradients(parameters, x, y).items():
                sums[name] = sums.get(name, 0) + g.sum(0)
                kept[name] = kept.get(name, 0) + sum_of_squares(g)

    return Running(step, lambda: kept)


def ivon(problem: Problem) -> Running:
    from ivon import IVON

    optimizer = IVON(problem.model.parameters(), lr=LEARNING_RATE, ess=DATA_SIZE)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            problem.loss().backward()
        optimizer.step()

    return Running(step)


def unfold(problem: Problem) -> Running:
    """The paper's way: autograd gives Σg, hooks build every gᵢ again (unfold, bmm), then square and sum."""
    names = {id(p): name for name, p in problem.model.named_parameters()}
    kept: dict[str, Tensor] = {}

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        a, rule = inputs[0].detach(), UNFOLD_RULES[type(module)]

        def keep(g: Tensor) -> None:
            weight, bias = rule(module, a, g * len(problem.x))  # the mean of the loss undone
            kept[names[id(module.weight)]] = sum_of_squares(weight).view_as(module.weight)
            if module.bias is not None:
                kept[names[id(module.bias)]] = sum_of_squares(bias)

        output.register_hook(keep)

    for module in problem.model.modules():
        if type(module) in UNFOLD_RULES:
            module.register_forward_hook(watch)

    def step() -> None:
        problem.model.zero_grad()
        problem.loss().backward()

    return Running(step, lambda: kept)


def unfold_linear(module: nn.Linear, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(g.unsqueeze(2), a.unsqueeze(1)), g


def unfold_conv(module: nn.Conv2d, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    columns = F.unfold(
        a, module.kernel_size, module.dilation, module.padding, module.stride
    )  # (M, C·k², H·W)
    g = g.flatten(2)  # (M, C_out, H·W)
    return torch.bmm(g, columns.transpose(1, 2)), g.sum(2)


def unfold_norm(module: nn.BatchNorm2d, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = module.running_mean, module.running_var
    if module.training:
        mean, variance = a.mean((0, 2, 3)), a.var((0, 2, 3), correction=0)
    normalised = (a - mean[:, None, None]) * (variance + module.eps).rsqrt()[:, None, None]
    return (g * normalised).sum((2, 3)), g.sum((2, 3))


UNFOLD_RULES: dict[type[nn.Module], Callable[..., tuple[Tensor, Tensor]]] = {
    nn.Linear: unfold_linear,
    nn.Conv2d: unfold_conv,
    nn.BatchNorm2d: unfold_norm,
}


def sum_of_squares(gradients: Tensor) -> Tensor:
    """(M, *shape) → (*shape): Σᵢgᵢ²; in place, which spares the peers a second tensor of M × P."""
    return gradients.square_().sum(0)


def ignore_warnings_of_peers() -> None:
    """They warn about hooks on inputs without gradients and modules they pass over; the check judges them."""
    warnings.filterwarnings("ignore", module=r"(backpack|opacus|benchmarks\.peers)")


PEERS = [
    Contender("ivon", "IVON (ivon-opt)", ivon, peer=True),
    Contender("backpack", "BackPACK SumGradSquared", backpack, peer=True),
    Contender("opacus", "Opacus, squared and summed", opacus, peer=True),
    Contender("torch-func", "torch.func vmap(grad)", torch_func, peer=True),
    Contender("unfold", "the paper's way: unfold + bmm", unfold, peer=True),
]
