"""One random program: a model, a batch, a loss, and what is right for it."""

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor, nn

from tests.differential import direct, layers, losses
from tests.differential.losses import Reduced


@dataclass
class Program:
    seed: int
    model: nn.Module
    x: Tensor
    elements: losses.Elements
    reduced: Reduced
    reduction: str
    right: bool  # else it must be refused
    names: list[str] = field(default_factory=list)
    passes: str = "one"
    whole: direct.Whole | None = None  # a loss of all outputs, in place of `elements` and `reduced`

    def loss(self, model: nn.Module | None = None) -> Tensor:
        model = self.model if model is None else model
        reduce, elements, x, half = self.reduced.loss, self.elements, self.x, len(self.x) // 2
        everyone, first, last = slice(None), slice(half), slice(half, None)
        if self.whole is not None:
            loss = self.whole(model, model(x))
            return loss + self.whole(model, model(0.5 * x)) if self.passes == "two losses" else loss
        if self.passes == "two looks":
            return reduce(elements(model(x), everyone) + elements(model(0.5 * x), everyone))
        if self.passes == "two losses":
            return reduce(elements(model(x), everyone)) + reduce(elements(model(0.5 * x), everyone))
        if self.passes == "two losses, a mean":
            return (reduce(elements(model(x), everyone)) + reduce(elements(model(0.5 * x), everyone))) / 2
        if self.passes == "halves":
            return (elements(model(x[first]), first).mean() + elements(model(x[last]), last).mean()) / 2
        if self.passes == "halves of the losses":
            return reduce(torch.cat([elements(model(x[first]), first), elements(model(x[last]), last)]))
        if self.passes == "halves of the outputs":
            return reduce(elements(torch.cat([model(x[first]), model(x[last])]), everyone))
        if self.passes == "one by one":
            parts = [slice(i, i + 1) for i in range(len(x))]
            return torch.stack([elements(model(x[part]), part).mean() for part in parts]).mean()
        return reduce(elements(model(x), everyone))

    def own_loss(self, i: int, model: nn.Module | None = None) -> Tensor:
        """Example i's part of the loss, from a batch of one."""
        model = self.model if model is None else model
        part = slice(i, i + 1)
        assert self.reduced.weights is not None
        own = self.elements(model(self.x[part]), part)
        if self.passes in ("two looks", "two losses"):
            own = own + self.elements(model(0.5 * self.x[part]), part)
        return (own * self.reduced.weights[part]).sum()

    def describe(self) -> str:
        return f"seed {self.seed}: x {tuple(self.x.shape)}, {self.reduction}: " + " → ".join(self.names)


def draw(seed: int) -> Program:
    """The program of a seed; the same on every machine."""
    random = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return _draw(random, seed)
        finally:
            torch.set_default_dtype(default)


def _draw(random: Random, seed: int) -> Program:
    m, t, d = (random.choice((2, 3, 4)) for _ in range(3))
    if random.random() < 0.3:
        t = d = m  # shapes that tell nothing
    parts, names, mixes = [], [], False
    with_parameters = layers.sequence_layers(t, d)
    for k in range(random.randint(1, 3)):
        name, build = layers.random_choice(random, with_parameters)
        parts.append(build())
        names.append(name)
        for _ in range(random.randint(0, 2)):
            name, function = layers.random_choice(random, layers.ROWWISE)
            parts.append(layers.Map(lambda _, x, f=function: f(x)))
            names.append(name)
        if k == 0 and random.random() < 0.15:
            name, function = layers.random_choice(random, layers.MIXING)
            parts.append(layers.Map(lambda _, x, f=function: f(x)))
            names.append(f"MIX {name}")
            mixes = True
    model, x = nn.Sequential(*parts), torch.randn(m, t, d)
    if random.random() < 0.3:
        return _with_direct_loss(random, seed, model, x, names, mixes)
    name, elements = losses.element_losses(random, m, t, d)
    names.append(name)
    with torch.no_grad():
        shape = tuple(elements(model(x), slice(None)).shape)
    reduction = "sum" if random.random() < 0.2 else "mean"
    right = not mixes
    if reduction == "mean" and random.random() < 0.2:
        name, loss = layers.random_choice(random, losses.refused_means(shape))
        reduced, right = Reduced(loss, None, None), False
    else:
        table = losses.sums(random, shape) if reduction == "sum" else losses.means(random, shape)
        name, reduced = layers.random_choice(random, table)
        if (
            reduction == "mean"
            and random.random() < 0.1
            and name in ("mean", "mean of rows", "sum by M", "over columns")
        ):
            reduction, right = "sum", False
        right = right and reduced.weights is not None
    names.append(name)
    passes = "one"
    if name in (*WHOLE, "sum", "sum of rows") and random.random() < 0.25:
        passes = random.choice(PASSES)
        if passes == "two losses, a mean" and m == 2:
            passes = (
                "two looks"  # half of two sums is also their mean over two examples: both readings are right
            )
        right = right and (passes == "two looks" or (passes == "two losses" and reduction == "mean"))
        names.append(f"PASSES {passes}")
    return Program(seed, model, x, elements, reduced, reduction, right, names, passes)


def _with_direct_loss(
    random: Random, seed: int, model: nn.Sequential, x: Tensor, names: list[str], mixes: bool
) -> Program:
    """Of torch's own means, and of some in which a parameter meets what all examples have made."""
    shape = len(x), x.shape[1], x.shape[2]
    if random.random() < 0.2:
        name, whole = layers.random_choice(random, direct.refused_directly(random, *shape))
        model.register_parameter("weigh", layers.parameter(shape[2]))
        nothing = Reduced(lambda e: e, None, None)
        return Program(
            seed, model, x, lambda z, s: z, nothing, "mean", False, [*names, f"DIRECT {name}"], whole=whole
        )
    name, found = layers.random_choice(random, direct.direct_losses(random, *shape))
    passes = "two losses" if random.random() < 0.1 else "one"
    reduction = "sum" if name in PLAIN and random.random() < 0.1 else "mean"
    names = [*names, f"DIRECT {name}", *([] if passes == "one" else [f"PASSES {passes}"])]
    right = reduction == "mean" and not mixes
    return Program(
        seed,
        model,
        x,
        found.elements,
        found.reduced,
        reduction,
        right,
        names,
        passes,
        found.whole,
    )


PLAIN = ("entropy", "mean squares", "smooth l1", "blend")  # which are no sums

# Several passes of the model under one backward pass. The first has the same examples twice; so has the second, if each
# loss is a mean. Of the others that cannot be told.
PASSES = (
    "two looks",
    "two losses",
    "two losses, a mean",
    "halves",
    "halves of the losses",
    "halves of the outputs",
    "one by one",
)
WHOLE = ("mean", "mean of rows", "sum by M", "sum by its size", "over columns", "negative")
