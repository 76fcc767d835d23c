"""What is said about a loss that is no mean, or none that can be read."""

REMEDY = (
    "Take the mean of the losses of single examples (reduction='none', then .mean()), let the closure return them, or "
    "declare reduction='sum' and sum them."
)


def not_linear(name: str) -> str:
    return (
        f"{name} comes after the examples were reduced to one number, so the loss is neither a mean nor a sum over "
        f"examples, and no example has a loss of its own. {REMEDY} IVON and BayesByBackprop need no gradients of "
        "single "
        "examples."
    )


def weighted(name: str, divisor: float, count: int) -> str:
    return (
        f"the loss is a weighted mean: {name} divides by the sum of the weights of {count} examples, "
        f"{divisor:.6g}. Whether "
        "an example's own loss has its weight in it cannot be told. Weigh the losses of single examples and take their "
        "mean: (weight[y] * F.cross_entropy(z, y, reduction='none')).mean(); or declare reduction='sum' and sum them."
    )


def unreadable(name: str, divisor: float, count: int, everything: int) -> str:
    if abs(divisor - 1) < 1e-6:
        return (
            f"reduction='mean' is declared, but {name} sums the losses of {count} examples, so the squares would be "
            f"{count}² times too large. Declare reduction='sum', or take the mean."
        )
    return (
        f"{name} sums the losses of {count} examples in a batch of {everything}, and the sum is divided by "
        f"{divisor:.6g}, "
        f"so over how many examples the loss is a mean cannot be told. Divide by their number. {REMEDY}"
    )
