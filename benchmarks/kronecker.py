"""NoisyKFAC with factors every 10 steps and inverses every 100, beside Adam, over whole cycles of 100 steps.

    python -m benchmarks.kronecker --cases lenet5 resnet18-w16

A cycle has one refresh of the inverses and ten of the factors, so the mean over it is what training costs. Adam and
NoisyKFAC take turns of ten steps each; the ratio is that of their sums.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import credo
from benchmarks.cases import Problem
from benchmarks.contender import DATA_SIZE, LEARNING_RATE
from benchmarks.ours import adam
from benchmarks.registry import find_case

CYCLE, TURN = 100, 10
Step = Callable[[], object]


def noisy_kfac(problem: Problem, form: str) -> tuple[credo.NoisyKFAC, Step]:
    options = {"factor_interval": TURN, "inverse_interval": CYCLE, "damping_form": form}
    optimizer = credo.NoisyKFAC(problem.model, LEARNING_RATE, data_size=DATA_SIZE, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    return optimizer, lambda: optimizer.step(closure)


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    for _ in range(TURN):
        step()
    return time.perf_counter() - start


def cycle_ratio(plain: Step, step: Step) -> float:
    pairs = [(seconds_of(plain), seconds_of(step)) for _ in range(CYCLE // TURN)]
    ours, theirs = (sum(pair[k] for pair in pairs) for k in (1, 0))
    return ours / theirs


def measure(name: str, form: str, cycles: int) -> list[float]:
    case = find_case(name)
    plain = adam(case.problem()).step
    optimizer, step = noisy_kfac(case.problem(), form)
    for _ in range(3):
        plain(), step()
    optimizer.counters["step"] = CYCLE  # past the first cycle, which refreshes more often
    gc.collect()
    gc.disable()
    try:
        return [cycle_ratio(plain, step) for _ in range(cycles)]
    finally:
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kronecker", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--cases", nargs="+", default=["lenet5", "resnet18-w16"], metavar="CASE")
    parser.add_argument("--forms", nargs="+", default=["pi", "eigen"], metavar="FORM")
    parser.add_argument("--cycles", type=int, default=3)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; a cycle of {CYCLE} steps / Adam's")
    for name in options.cases:
        for form in options.forms:
            ratios = measure(name, form, options.cycles)
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"{find_case(name).title}, damping {form}: {statistics.median(ratios):.2f} ({shown})",
                flush=True,
            )


if __name__ == "__main__":
    main()
