"""Who is right: Σᵢgᵢ² from a network in which every example has its own copy of every parameter.

Autograd then gives each gᵢ by itself, also where examples meet (BatchNorm in training mode).
Slow, and M times the parameters in memory: only the bench and its checks can afford it.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Problem

Copies = dict[int, Tensor]  # id of a parameter → (M, *shape)


def true_squares(problem: Problem) -> dict[str, Tensor]:
    model, x = problem.model, problem.x
    copies = {id(p): p.detach().expand(len(x), *p.shape).clone().requires_grad_() for p in model.parameters()}
    for module in model.modules():
        if type(module) in RULES:
            module.forward = with_copies(module, copies)
    F.cross_entropy(model(x), problem.y, reduction="sum").backward()
    return {name: copies[id(p)].grad.square_().sum(0) for name, p in model.named_parameters()}


def with_copies(module: nn.Module, copies: Copies) -> Callable[[Tensor], Tensor]:
    rule = RULES[type(module)]
    weight = copies[id(module.weight)]
    bias = None if module.bias is None else copies[id(module.bias)]  # (M, C_out)
    return lambda x: rule(module, x, weight, bias)


def linear(module: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.einsum("mi,moi->mo", x, weight)
    return out if bias is None else out + bias


def conv(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    def one(example: Tensor, own: Tensor) -> Tensor:
        return F.conv2d(
            example[None], own, None, module.stride, module.padding, module.dilation, module.groups
        )

    out = torch.cat([one(example, own) for example, own in zip(x, weight, strict=True)])
    return out if bias is None else out + bias[:, :, None, None]


def norm(module: nn.BatchNorm2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = F.batch_norm(x, module.running_mean, module.running_var, training=module.training, eps=module.eps)
    x = x * weight[:, :, None, None]
    return x if bias is None else x + bias[:, :, None, None]


RULES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: linear,
    nn.Conv2d: conv,
    nn.BatchNorm2d: norm,
}


def relative_error(squares: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The largest ‖Σg² − truth‖ / ‖truth‖ of any parameter; a missing one counts as wholly wrong."""
    errors = [
        ((squares[name].double() - true).norm() / true.norm()).item() if name in squares else float("inf")
        for name, true in truth.items()
    ]
    return max(errors)
