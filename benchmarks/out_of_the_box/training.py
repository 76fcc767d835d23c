"""One run: a problem, a method and a seed to scores on held-out examples, and what its variances look like."""

import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import credo
from benchmarks.out_of_the_box.further import FURTHER
from benchmarks.out_of_the_box.methods import METHODS
from benchmarks.out_of_the_box.problems import PROBLEMS, Data, Problem, loss_of
from credo.optim import BayesianOptimizer

SAMPLES = 20
AT_ONCE = 500  # examples predicted together
Weights = dict[str, Tensor]
Run = tuple[str, str, int]  # problem, method, seed
EVERY = (*PROBLEMS, *FURTHER)


def named(name: str) -> Problem:
    return next(problem for problem in EVERY if problem.name == name)


def one(what: tuple[Run, Path | None, bool]) -> dict[str, Any]:
    (problem, method, seed), root, curve = what
    torch.set_num_threads(1)
    key = {"problem": problem, "method": method, "seed": seed}
    try:
        return {**key, **run(named(problem), method, seed, root, curve=curve)}
    except (RuntimeError, ValueError, TypeError) as error:  # a method that refuses or breaks is a row, too
        return {**key, "error": f"{type(error).__name__}: {error}"}


def run(
    problem: Problem, method: str, seed: int, root: Path | None, *, curve: bool = False
) -> dict[str, Any]:
    """Train and score. With `curve`, also the held-out NLL after every epoch."""
    data = problem.data(root)
    x, y, _, _ = data
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = problem.build()
        if problem.prepare is not None:
            problem.prepare(model, root)
        optimizer = METHODS[method](model, len(x), seed, problem)
        order, started, epochs = torch.Generator().manual_seed(seed), time.perf_counter(), []
        losses: list[float] = []
        for _ in range(problem.epochs):
            model.train()
            losses = [
                step(problem, model, optimizer, x[batch], y[batch])
                for batch in torch.randperm(len(x), generator=order).split(problem.batch)
            ]
            if curve:
                epochs.append(scores(problem, model, optimizer, data, seed)["nll"])
    seconds = time.perf_counter() - started
    found = {"train_loss": fmean(losses), **scores(problem, model, optimizer, data, seed)}
    found |= {"seconds": seconds, **variances(optimizer)}
    return found | ({"curve": epochs} if curve else {})


def step(problem: Problem, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(problem.task, model(x), y)
        loss.backward()
        return loss

    if hasattr(optimizer, "sampled_params"):  # ivon-opt
        with optimizer.sampled_params(train=True):
            loss = closure()
        optimizer.step()
        return float(loss)
    return float(optimizer.step(closure).detach())


# Scores


def draws(model: nn.Module, optimizer: Any, seed: int) -> list[Weights]:
    """Weights to predict with: samples of the posterior, or the weights themselves."""
    own = {name: p.detach() for name, p in model.named_parameters()}
    if isinstance(optimizer, BayesianOptimizer):
        posterior, generator = optimizer.posterior(), torch.Generator().manual_seed(seed)
        return [{**own, **posterior.sample(generator)} for _ in range(SAMPLES)]
    if hasattr(optimizer, "sampled_params"):
        found = []
        for _ in range(SAMPLES):
            with optimizer.sampled_params():
                found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return found
    return [own]


@torch.no_grad()
def outputs(model: nn.Module, weights: list[Weights], x: Tensor) -> list[Tensor]:
    model.eval()
    return [torch.cat([functional_call(model, own, (part,)) for part in x.split(AT_ONCE)]) for own in weights]


def scores(problem: Problem, model: nn.Module, optimizer: Any, data: Data, seed: int) -> dict[str, float]:
    x, y, x_held, y_held = data
    weights = draws(model, optimizer, seed)
    if problem.task == "regression":
        return regression(outputs(model, weights, x), y, outputs(model, weights, x_held), y_held)
    logits = torch.stack(outputs(model, weights, x_held)).flatten(1, -2).double()
    log_probs = logits.log_softmax(-1).logsumexp(0) - math.log(len(weights))
    targets = y_held.flatten()
    probs = log_probs.exp()
    return {
        "nll": float(F.nll_loss(log_probs, targets)),
        "accuracy": 100 * credo.metrics.accuracy(probs, targets),
        "ece": credo.metrics.ece(probs, targets),
        "nll_tempered": tempered(logits, targets),
    }


def tempered(logits: Tensor, targets: Tensor) -> float:
    """NLL with the best softmax temperature, chosen on the first half of the held-out examples, of the second half."""
    half = len(targets) // 2
    temperatures = torch.logspace(-0.7, 0.9, 65).tolist()

    def nll(part: slice, temperature: float) -> float:
        log_probs = (logits[:, part] / temperature).log_softmax(-1).logsumexp(0) - math.log(len(logits))
        return float(F.nll_loss(log_probs, targets[part]))

    best = min(temperatures, key=lambda temperature: nll(slice(0, half), temperature))
    return nll(slice(half, None), best)


def regression(train: list[Tensor], y: Tensor, held: list[Tensor], y_held: Tensor) -> dict[str, float]:
    """The noise of the observations is the mean square of the residuals on the training examples."""
    mean, held_mean = torch.stack(train).mean(0), torch.stack(held).mean(0)
    noise = float((mean - y).square().mean())
    variance = (
        noise + torch.stack(held).var(0, unbiased=False)
        if len(held) > 1
        else torch.full_like(held_mean, noise)
    )
    nll = 0.5 * ((held_mean - y_held).square() / variance + variance.log() + math.log(2 * math.pi))
    return {"nll": float(nll.mean()), "rmse": float((held_mean - y_held).square().mean().sqrt())}


# What was learnt beside the mean


def variances(optimizer: Any) -> dict[str, float]:
    """Means over weights with noise: share of the data in the precision, spread of log σ in a tensor, |μ|/σ."""
    if not isinstance(optimizer, BayesianOptimizer):
        return {}
    shares, weights, ratios = [], [], []
    for group, found in zip(optimizer.param_groups, optimizer.diagnostics(), strict=True):
        if not group["deterministic"] and found.weights:
            shares.append(found.curvature_share)
            weights.append(found.weights)
            ratios.append(found.signal_to_noise)
    variance = [v.double() for v in optimizer.posterior().variance.values() if v.numel() > 1]
    spread = sum(float(v.log().div(2).std()) * v.numel() for v in variance) / sum(v.numel() for v in variance)
    total = sum(weights)
    return {
        "curvature_share": sum(s * w for s, w in zip(shares, weights, strict=True)) / total,
        "spread": spread,
        "signal_to_noise": sum(s * w for s, w in zip(ratios, weights, strict=True)) / total,
    }
