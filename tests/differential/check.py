"""Runs a program by credo and by plain autograd: right, or refused by one of credo's own errors."""

import copy
from random import Random

import torch
from torch import Tensor, nn

import credo
from credo.errors import CredoError
from tests.differential.program import Program

METHODS = ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop")
LOOPS = (
    "closure",
    "losses",
    "blocks",
    "scaled",
    "micro-batches",
    "accumulated",
    "two samples",
    "at once",
    "slices",
    *(MISTAKES := ("divided", "cleared", "unscaled")),  # loops that must be refused
)
# Of updates in float64. Rounding is 4e-15 of them, in Bayes by Backprop 2e-13: its noise, of sd 1e-13, is not the same.
# K-FAC inverts factors as large as squared gradients beside a damping of 0.1: what rounding does there grows with them.
TOLERANCE, OF_INVERSES = 1e-10, 1e-13


class Failure(AssertionError):
    """A number that is wrong, or an error that is not credo's."""


def check_capture(program: Program) -> bool:
    """Whether credo took it; raises `Failure` if it should not have, or has other numbers."""
    model = program.model
    model.zero_grad()
    try:
        with credo.capture(model, program.reduction) as stats:
            program.loss().backward()
    except CredoError:
        return False
    except Exception as error:
        raise Failure(f"{program.describe()}: {type(error).__name__}: {error}") from error
    if not program.right:
        raise Failure(f"{program.describe()}: was taken")
    counted = program.reduced.counted
    assert counted is not None
    if stats.examples != len(counted):
        raise Failure(f"{program.describe()}: {stats.examples} examples instead of {len(counted)}")
    scale = len(counted) if program.reduction == "mean" else 1
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    truth = {name: torch.zeros_like(p) for name, p in named.items()}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for i in counted:
        grads = torch.autograd.grad(program.own_loss(i), list(named.values()), allow_unused=True)
        for name, grad in zip(named, grads, strict=True):
            if grad is not None:
                truth[name] += (scale * grad).square()
                total[name] += grad
    largest = max(float(t.abs().max()) for t in truth.values())
    if not largest < 1e12:
        return True  # nothing but rounding and overflow
    if not _adds_up(program, total):
        return True
    for name, p in named.items():
        got = stats.squares[p] if p in stats.squares else torch.zeros_like(p)
        _compare(program, f"squares of {name}", got, truth[name], largest)
        _compare(
            program,
            f"gradient of {name}",
            torch.zeros_like(p) if p.grad is None else p.grad,
            total[name],
            largest**0.5 / scale,
        )
    return True


def _adds_up(program: Program, total: dict[str, Tensor]) -> bool:
    """Whether plain autograd's gradient is the sum over examples: not where rounding decides the side of a kink."""
    model = copy.deepcopy(program.model)
    program.loss(model).backward()
    plain = dict(model.named_parameters())
    size = max(float(t.abs().max()) for t in total.values())
    return all(
        torch.allclose(torch.zeros_like(t) if plain[n].grad is None else plain[n].grad, t, 1e-6, 1e-6 * size)
        for n, t in total.items()
    )


def _compare(program: Program, what: str, got: Tensor, truth: Tensor, largest: float) -> None:
    """Both are sums of float64; what cancels in them is as large as the largest share of an example."""
    if not torch.allclose(got, truth, rtol=1e-7, atol=1e-10 * max(largest, 1e-3), equal_nan=True):
        worst = float((got - truth).abs().max())
        raise Failure(
            f"{program.describe()}: {what} differs by {worst:.3g} of {float(truth.abs().max()):.3g}"
        )


def check_optimiser(program: Program, method: str, loop: str) -> bool:
    """Two steps of an optimiser, against the same optimiser with a backward pass for each example by itself."""
    if not _is_finite(program):
        return False
    settings = _settings(method, loop, program.reduction)
    model, twin = copy.deepcopy(program.model), copy.deepcopy(program.model)
    optimizer = _build(method, model, settings)
    steps = (
        2 if method in ("IVON", "KFAC", "BayesByBackprop") else 1
    )  # other samples come of what rounding decides
    try:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(steps):
            _step(program, model, optimizer, loop)
            schedule.step()
    except CredoError:
        return False
    except Exception as error:
        raise Failure(f"{program.describe()}: {method} by {loop}: {type(error).__name__}: {error}") from error
    if loop in MISTAKES:
        if program.right and _is_seen(program, method, loop):
            raise Failure(f"{program.describe()}: was taken by {method}, {loop}")
        return False
    if not program.right:
        if method in ("IVON", "BayesByBackprop") or loop in ("micro-batches", "scaled"):
            return False  # no gradients of single examples are needed, or factors hide what the loss is
        raise Failure(f"{program.describe()}: was taken by {method}, {loop}")
    reference = _build(
        method, twin, {**settings, "vectorized": False} if "vectorized" in settings else settings
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    times = 2 if loop in ("micro-batches", "accumulated") else 1  # the batch twice
    share = 1 / times if program.reduction == "mean" or loop == "micro-batches" else 1.0
    real: dict[str, Tensor] = {}  # where no step's gradient is rounding, which updates divide by its own size
    try:
        for _ in range(steps):
            for _ in range(settings.get("mc_samples", 1)):
                with reference.sampled():
                    for i in list(program.reduced.counted or ()) * times:
                        (program.own_loss(i, twin) * share).backward()
            reference.step()
            schedule.step()
            grads = {name: q.grad.abs() for name, q in twin.named_parameters() if q.grad is not None}
            largest = max((float(g.max()) for g in grads.values()), default=0.0)
            for name, g in grads.items():
                real[name] = real.get(name, True) & (g > 1e-9 * max(1.0, largest))
    except CredoError as error:
        if method == "BayesByBackprop" and "more than once" in str(error):
            return (
                False  # a batch of one hides that positions were merged, which have one sample of the weights
            )
        raise Failure(f"{program.describe()}: {method}: refused for single examples: {error}") from error
    tolerance = TOLERANCE
    sizes = [float(q.grad.abs().max()) for q in twin.parameters() if q.grad is not None]
    if "KFAC" in method:
        tolerance = max(TOLERANCE, OF_INVERSES * max(sizes, default=0.0) ** 2)
    if (
        method == "IVON"
    ):  # its second step is at other weights by the rounding of the first, times the slope there
        tolerance = TOLERANCE * max(1.0, *sizes)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name not in real:
            continue
        if not torch.allclose(p[real[name]], q[real[name]], rtol=tolerance, atol=tolerance):
            raise Failure(
                f"{program.describe()}: {method} by {loop}: {name} differs by {float((p - q).detach().abs().max()):.3g}"
            )
    return True


def _is_finite(program: Program) -> bool:
    """Whether plain autograd has a finite gradient: an infinite loss in a row that a mask leaves out is 0·∞ there."""
    model = copy.deepcopy(program.model)
    loss = program.loss(model)
    if loss.requires_grad:
        loss.sum().backward()
    return all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def _is_seen(program: Program, method: str, loop: str) -> bool:
    """Whether a mistake must be refused. Methods without squares read of a loss only what is certain."""
    if loop == "cleared":
        return method != "IVON"  # it gathers nothing beside gradients, and takes the last ones
    if loop == "unscaled":
        return any(p.grad is not None and p.grad.any() for p in program.model.parameters())
    if not any(p.grad is not None and p.grad.any() for p in program.model.parameters()):
        return False
    return program.reduction == "mean" and method not in ("IVON", "BayesByBackprop")


def _settings(method: str, loop: str, reduction: str) -> dict:
    settings = {"lr": 0.05, "data_size": 50, "seed": 2, "reduction": reduction}
    if method == "BayesByBackprop":
        settings["initial_log_variance"] = -60.0
    elif method != "IVON":
        settings["damping"] = 0.1  # so that rounding is not made large
    if loop in ("two samples", "at once") and method != "OGN" and method != "KFAC":
        settings["mc_samples"] = 2
        if loop == "at once" and method == "VOGN":
            settings["vectorized"] = True
    return settings


def _build(method: str, model: nn.Module, settings: dict):
    return getattr(credo, method)(model, **settings)


def _step(program: Program, model: nn.Module, optimizer, loop: str) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = program.loss(model)
        if optimizer.settings.get("vectorized"):
            return loss
        loss.backward()
        return loss

    if loop == "losses":
        optimizer.step(lambda: program.loss(model))
    elif loop in ("blocks", "scaled"):
        factor = 8.0 if loop == "scaled" else 1.0
        with optimizer.sampled(scale=factor):
            (program.loss(model) * factor).backward()
        optimizer.step()
    elif loop == "micro-batches":
        with optimizer.sampled():
            (program.loss(model) / 2).backward()
            (program.loss(model) / 2).backward()
        optimizer.step()
    elif loop == "cleared":

        def cleared() -> Tensor:
            for _ in range(2):
                optimizer.zero_grad()
                loss = program.loss(model) / 2
                loss.backward()
            return loss

        optimizer.step(cleared)
    elif loop == "divided":
        if optimizer.settings.get("accumulate", 1) == 1:
            optimizer.accumulate(2)
        optimizer.step(lambda: program.loss(model) / 2)
    elif loop == "unscaled":
        with optimizer.sampled():
            (program.loss(model) * 512).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= 512
        optimizer.step()
    elif loop == "accumulated":
        if optimizer.settings.get("accumulate", 1) == 1:
            optimizer.accumulate(2)
        optimizer.step(closure)
        optimizer.step(closure)
    else:
        optimizer.step(closure)


def run(program: Program, with_optimiser: bool) -> str:
    """What became of it: "right" or "refused"."""
    taken = check_capture(program)
    if with_optimiser:
        random = Random(program.seed)
        method, loop = random.choice(METHODS), random.choice(LOOPS)
        if loop == "divided" and len(program.x) == 2:
            loop = "closure"  # weights that add up to one, by two, are also a mean over two examples
        if loop in ("micro-batches", "divided") and len(program.x) == 2 * len(program.reduced.counted or ()):
            loop = "closure"  # half of a mean over k of 2k rows is also a mean over all of them: see docs/refusals.md
        weights = program.reduced.weights
        if (
            loop == "divided"
            and weights is not None
            and weights.numel() == 2 * len(program.reduced.counted or ())
        ):
            loop = "closure"  # half of a mean of sums over two elements is also a mean over all elements
        if loop == "divided" and weights is not None and 2 * int((weights != 0).sum()) == weights.numel():
            loop = "closure"  # and so is half of a mean over half of the elements
        check_optimiser(program, method, loop)
    return "right" if taken else "refused"


__all__ = ["Failure", "check_capture", "check_optimiser", "run"]
