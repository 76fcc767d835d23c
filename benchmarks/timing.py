"""Paired, interleaved timing: a slow spell of the machine hits all contenders of a round alike.

Every round times every contender in a new order; each time is divided by the baseline's of the same round;
the median of these ratios is reported with its quartiles.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

BLOCK_SECONDS = 0.06  # short steps are repeated until a measurement lasts about this long
WARM_UP_STEPS, WARM_UP_SECONDS = 5, 0.5
COMMON_ROUNDS = 3  # all take part in these
SLOW = 2.5  # times the baseline: who is slower leaves after the common rounds, or nobody else had time

Step = Callable[[], object]


@dataclass
class Times:
    """Seconds per step of each round; None where a slow contender sat out."""

    rounds: list[float | None] = field(default_factory=list)

    def median_seconds(self) -> float:
        return statistics.median(t for t in self.rounds if t is not None)

    def ratios(self, baseline: "Times") -> list[float]:
        pairs = zip(self.rounds, baseline.rounds, strict=True)
        return [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def warm_up(step: Step) -> float:
    """A few steps, after which caches, memory and code paths are as they will be; seconds of the fastest."""
    fastest, end = float("inf"), time.perf_counter() + WARM_UP_SECONDS
    for _ in range(WARM_UP_STEPS):
        fastest = min(fastest, seconds_of(step, 1))
        if time.perf_counter() > end:
            break
    return fastest


def seconds_of(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def measure(steps: Mapping[str, Step], baseline: str, rounds: int, seconds: float) -> dict[str, Times]:
    """The common rounds, then at most `rounds` more within `seconds` for all that are not slow."""
    estimates = {name: warm_up(step) for name, step in steps.items()}
    quick = {name for name, estimate in estimates.items() if estimate < SLOW * estimates[baseline]}
    times, random_order = {name: Times() for name in steps}, random.Random(0)

    def play(players: Collection[str]) -> None:
        for name in random_order.sample(list(steps), len(steps)):
            repeats = max(1, round(BLOCK_SECONDS / estimates[name]))
            times[name].rounds.append(undisturbed(steps[name], repeats) if name in players else None)

    gc.collect()
    gc.freeze()  # what lives now need not be looked at again before every measurement
    for _ in range(COMMON_ROUNDS):
        play(steps.keys())
    end = time.perf_counter() + seconds
    for _ in range(rounds):
        if time.perf_counter() > end:
            break
        play(quick)
    gc.unfreeze()
    return times


def undisturbed(step: Step, repeats: int) -> float:
    if repeats > 1:
        step()  # after another contender the caches are cold, in training they are not
    gc.collect()
    gc.disable()
    try:
        return seconds_of(step, repeats)
    finally:
        gc.enable()
