"""What more ranks buy: the variance of ĝ and ĥ over 1 to 128 simulated ranks: `python -m benchmarks.mc_parallel`.

Each simulated rank draws its weights from its own stream of VOGN's noise, as a process of that number would, at one
mean and one precision. MC-parallel: all ranks see the same minibatch. Data-parallel: each its own, new in every step.
The average over R ranks should have 1/R of the variance of one; printed is R·Var(R ranks)/Var(1 rank), summed over the
parameters. All in one process; nothing is timed.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo

RANKS, STEPS, EXAMPLES = 128, 200, 16
Estimate = tuple[Tensor, Tensor]  # ĝ and ĥ, all parameters in a row
Data = Callable[[int, int], tuple[Tensor, Tensor]]  # of (step, rank)


def one_minibatch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return minibatch(0)


def own_minibatch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return minibatch(1 + step * RANKS + rank)


def minibatch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * torch.randn(EXAMPLES, generator=generator, dtype=torch.float64) > 0).long()


def simulate(data: Data, ranks: int = RANKS, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """ĝ and ĥ of every (step, rank): two tensors of shape (steps, ranks, parameters)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = credo.VOGN(model, data_size=100, initial_curvature=1.0)
    found = [list(estimates(model, optimizer, data, step, ranks)) for step in range(steps)]
    gradients = torch.stack([torch.stack([g for g, _ in row]) for row in found])
    return gradients, torch.stack([torch.stack([h for _, h in row]) for row in found])


def estimates(
    model: nn.Module, optimizer: credo.VOGN, data: Data, step: int, ranks: int
) -> Iterator[Estimate]:
    for rank in range(ranks):
        optimizer._reducer.stream = rank << 48  # what a process of this number finds by itself
        optimizer.counters["draws"] = step
        x, y = data(step, rank)
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        squares = [optimizer._gathered.squares[id(p)] for p in model.parameters()]
        yield flat([p.grad for p in model.parameters()]), flat(squares)
        optimizer.zero_grad()
        optimizer._start_afresh()  # the estimate is looked at, and no step taken


def flat(tensors: list[Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def relative_variance(estimate: Tensor, ranks: int) -> float:
    """R·Var(mean over R ranks)/Var(one rank); all groups of R ranks are used, so that both see the same numbers."""
    steps, workers, size = estimate.shape
    groups = estimate.view(steps, workers // ranks, ranks, size).mean(2).flatten(0, 1)
    return ranks * float(groups.var(0).sum() / estimate.flatten(0, 1).var(0).sum())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for title, data in (("MC-parallel", one_minibatch), ("data-parallel", own_minibatch)):
        gradients, squares = simulate(data)
        print(f"{title}, {STEPS} steps: ranks, R·Var(ĝ)/Var₁, R·Var(ĥ)/Var₁")
        for ranks in (1, 2, 4, 8, 16, 32, 64, 128):
            g, h = (relative_variance(estimate, ranks) for estimate in (gradients, squares))
            print(f"  {ranks:4d}  {g:.3f}  {h:.3f}", flush=True)


if __name__ == "__main__":
    main()
