"""Numbers to look at when training fails: what is noise, what is signal, and what sets the step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from credo.optim.gauss_newton import GaussNewton


@dataclass(frozen=True)
class GroupDiagnostics:
    """One parameter group. Shares are means over the weights and sum to one."""

    signal_to_noise: float  # median of |μ|/σ; far below 1: the noise drowns the weights
    curvature_share: float  # of s in s + δ̃ + γ: what the data say
    prior_share: float  # of δ̃
    damping_share: float  # of γ; near 1: the step is α/γ·m, and σ² does not depend on the data
    step_size: float  # median of α/(s + δ̃ + γ), what a unit of m moves the mean by
    noise: float  # median of σ
    weights: int
    refused_steps: int


def diagnose(optimizer: "GaussNewton", group: dict[str, Any]) -> GroupDiagnostics:
    beliefs = [b for b in optimizer.beliefs() if any(b.parameter is p for p in group["params"])]
    s = torch.cat([(b.variance() * 0 if b.curvature is None else b.curvature).flatten() for b in beliefs])
    precision = torch.cat([(b.scale / b.variance()).flatten() for b in beliefs])  # s + δ̃ + γ
    sigma = torch.cat([b.variance().sqrt().flatten() for b in beliefs])
    mean = torch.cat([b.parameter.detach().flatten() for b in beliefs]).abs()
    damping = group["damping"] / precision
    return GroupDiagnostics(
        signal_to_noise=float("inf") if group["deterministic"] else float((mean / sigma).median()),
        curvature_share=float((s / precision).mean()),
        prior_share=float(((precision - s - group["damping"]) / precision).mean()),
        damping_share=float(damping.mean()),
        step_size=float((float(group["lr"]) / precision).median()),
        noise=0.0 if group["deterministic"] else float(sigma.median()),
        weights=precision.numel(),
        refused_steps=optimizer.counters["refused"],
    )
