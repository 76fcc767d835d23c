"""Programs as users write them that once were refused or wrong, against a loop over single examples."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import CredoError, UnsupportedOperation

SQUARES = ("VOGN", "OGN", "KFAC", "NoisyKFAC")
M = 6


@pytest.fixture(autouse=True)
def _in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameter(*shape: int, seed: int, frozen: bool = False) -> nn.Parameter:
    return nn.Parameter(0.5 * drawn(*shape, seed=seed), requires_grad=not frozen)


X, Y = drawn(M, 6), torch.arange(M) % 3


# Weights that are made of frozen ones


class Adapted(nn.Module):
    """LoRA by hand, with a weight that is frozen; d inputs are as many as the examples."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.weight, self.bias = parameter(6, 6, seed=1, frozen=True), parameter(6, seed=2, frozen=True)
        self.a, self.b = parameter(2, 6, seed=3), parameter(6, 2, seed=4)
        self.size = parameter(6, 1, seed=5)
        self.head = nn.Linear(6, 3)
        nn.init.constant_(self.head.bias, 0.1)
        self.head.weight.data.copy_(0.3 * drawn(3, 6, seed=6))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 2.0 * self.b @ self.a
        if self.form == "magnitude":
            weight = self.size * weight / weight.norm(dim=1, keepdim=True)
        elif self.form == "scaled":
            weight = self.size * self.weight
        return self.head(F.linear(x, weight, self.bias).tanh())


@pytest.mark.parametrize("form", ["added", "magnitude", "scaled"])
@pytest.mark.parametrize("given", ["module", "parameters"])
@pytest.mark.parametrize("method", ["VOGN", "OGN"])
def test_weights_made_of_frozen_ones_have_no_examples(method, given, form):
    models = [Adapted(form) for _ in range(2)]
    optimizers = [
        getattr(credo, method)(
            model if given == "module" else model.parameters(), data_size=M, lr=0.05, damping=0.1
        )
        for model in models
    ]
    optimizers[0].step(lambda: F.cross_entropy(models[0](X), Y))
    with optimizers[1].sampled():
        for i in range(M):
            (F.cross_entropy(models[1](X[i : i + 1]), Y[i : i + 1]) / M).backward()
    optimizers[1].step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_a_parameter_that_is_frozen_later_is_a_constant_too():
    model = Adapted("added")
    model.weight.requires_grad_(True)
    optimizer = credo.VOGN(model, data_size=M, lr=0.05)
    optimizer.step(lambda: F.cross_entropy(model(X), Y))
    model.weight.requires_grad_(False)
    optimizer.step(lambda: F.cross_entropy(model(X), Y))
    assert optimizer.counters["step"] == 2


# Parameters that meet what all examples have made


class Tasks(nn.Module):
    """As many tasks as examples, or fewer, and a learned log variance of each."""

    def __init__(self, tasks: int):
        super().__init__()
        self.weight, self.log_variance = parameter(tasks, 6, seed=1), parameter(tasks, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@pytest.mark.parametrize("tasks", [M, 3, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "of_tasks",
    [
        lambda e: torch.stack([e[:, k].mean() for k in range(e.shape[1])]),
        lambda e: torch.stack([e[:, k].sum() for k in range(e.shape[1])]),
        lambda e: e.mean(0),
        lambda e: e.sum(0),
    ],
    ids=["means", "sums", "mean(0)", "sum(0)"],
)
@pytest.mark.parametrize("together", [Tensor.mean, Tensor.sum])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_learned_weights_of_whole_losses_are_refused(tasks, reduction, of_tasks, together, offset):
    model = Tasks(tasks)
    with credo.capture(model, reduction):
        losses = of_tasks((model(X) - 1).square())
        loss = together(torch.exp(-model.log_variance) * losses + offset * model.log_variance)
        with pytest.raises(CredoError):
            loss.backward()


def test_the_refusal_says_where_they_belong_and_that_is_right():
    model = Tasks(M)
    with credo.capture(model):
        losses = (model(X) - 1).square().mean(0)
        loss = (torch.exp(-model.log_variance) * losses + model.log_variance).mean()
        with pytest.raises(
            UnsupportedOperation, match=r"'log_variance'.*\(torch.exp\(-s\) \* losses \+ s\)\.mean"
        ):
            loss.backward()
    with credo.capture(model) as stats:
        own = (torch.exp(-model.log_variance) * (model(X) - 1).square() + model.log_variance).mean(1)
        own.mean().backward()
    truth = torch.zeros_like(model.log_variance)
    for i in range(M):
        loss = torch.exp(-model.log_variance) * (model(X[i : i + 1]) - 1).square() + model.log_variance
        truth += torch.autograd.grad(loss.mean(), model.log_variance)[0].square()
    torch.testing.assert_close(stats.squares[model.log_variance], truth)


# Two losses of one forward pass


@pytest.mark.parametrize("method", SQUARES)
@pytest.mark.parametrize("factor", [1.0, 0.1, 0.5])
def test_a_second_loss_of_a_forward_pass_is_refused(method, factor):
    model = nn.Linear(6, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = getattr(credo, method)(model, data_size=M, lr=0.05)

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = model(X)
        loss = factor * F.cross_entropy(outputs, Y)
        loss.backward(retain_graph=True)
        (0.1 * outputs.square().mean()).backward()
        return loss

    with pytest.raises(UnsupportedOperation, match=r"second loss.*\(loss1 \+ loss2\)\.backward\(\)"):
        optimizer.step(closure)
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)


def test_gradients_of_inputs_and_of_activations_are_no_second_loss():
    model, x = nn.Linear(6, 3), X.clone().requires_grad_()
    with credo.capture(model) as stats:
        outputs = model(x)
        loss = F.cross_entropy(outputs, Y)
        torch.autograd.grad(outputs.sum(), x, retain_graph=True)
        loss.backward()
    assert stats.examples == M


# A last batch of one


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(torch.bmm(edges, self.inside(x)).relu().mean(1))


@pytest.mark.parametrize("method", ["VOGN", "OGN", "KFAC"])
def test_a_last_batch_of_one_is_what_the_batches_before_it_were(method):
    x, edges = drawn(M + 1, 4, 5), drawn(M + 1, 4, 4, seed=1).abs()
    labels = torch.arange(M + 1) % 3
    models = [Graphs() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (getattr(credo, method)(model, data_size=M + 1, lr=0.05, damping=0.1) for model in models)

    def loss(model: nn.Module, rows: slice, factor: float = 1.0) -> Tensor:
        return F.cross_entropy(model(factor * x[rows], edges[rows]), labels[rows])

    for rows in (slice(0, M), slice(M, M + 1)):
        first.step(lambda rows=rows: loss(models[0], rows) + loss(models[0], rows, 0.5))
        many = rows if rows.stop - rows.start > 1 else [M, M]  # the same example twice has its mean gradient
        many = range(M) if isinstance(many, slice) else many
        chosen = torch.tensor(list(many))
        second.step(
            lambda chosen=chosen: (
                F.cross_entropy(models[1](x[chosen], edges[chosen]), labels[chosen], reduction="none")
                + F.cross_entropy(models[1](0.5 * x[chosen], edges[chosen]), labels[chosen], reduction="none")
            ).mean()
        )
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_a_first_batch_of_one_is_not_guessed():
    model = nn.Linear(6, 3)
    optimizer = credo.VOGN(model, data_size=M, lr=0.05)
    for _ in range(2):
        with pytest.raises(UnsupportedOperation, match="2 passes"):
            optimizer.step(
                lambda: F.cross_entropy(model(X[:1]), Y[:1]) + F.cross_entropy(model(X[1:2]), Y[1:2])
            )


def test_what_was_refused_for_a_batch_is_refused_for_one_example():
    model = nn.Linear(6, 3)
    optimizer = credo.VOGN(model, data_size=M, lr=0.05)
    for rows in (slice(0, 3), slice(0, 1)):
        with pytest.raises(UnsupportedOperation, match="2 passes"):
            optimizer.step(
                lambda rows=rows: (
                    (F.cross_entropy(model(X[rows]), Y[rows]) + F.cross_entropy(model(2 * X[rows]), Y[rows]))
                    / 2
                )
            )
