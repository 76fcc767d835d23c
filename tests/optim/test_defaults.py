"""The numbers that methods take by themselves: step, damping, noise and prior relative to each tensor."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.curvature.backward_calls import is_discrete_likelihood
from credo.optim.statistics import Progress

SQUARES = [credo.VOGN, credo.OGN, credo.KFAC, credo.NoisyKFAC]
METHODS = [*SQUARES, credo.IVON, credo.BayesByBackprop]
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(16) % 3


def network(scale=1.0, norm=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(6) if norm else nn.Identity()
        model = nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for p in (model[0].weight, model[3].weight):
            p.mul_(scale)
    return model


def closure(model, x=X, y=Y):
    return lambda: F.cross_entropy(model(x), y, reduction="none")


def first_numbers(name, model, optimizer, before, gradient, squares, c=0.2, r=0.006):
    """The rule written out, for one tensor: α, γ, τ and δ after the first minibatch."""
    v = float(before.square().mean()) if before.dim() > 1 else max(float(before.square().mean()), 1e-4)
    h = float(squares.mean())
    a = max(float(gradient.square().mean().sqrt()) / math.sqrt(h), 1e-3)  # a bias before BatchNorm has none
    u = max(v, 0.8 / (3 * before.shape[1])) if before.dim() > 1 else v
    kappa = 0.3 / math.sqrt(2)
    gamma = c * h
    return (
        r * math.sqrt(u) * (h + gamma) / (a * math.sqrt(h)),
        gamma,
        min(1.0, kappa**2 * v * optimizer.data_size * (h + gamma)),
        1 / v,
    )


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-3])
def test_the_rule_of_vogn_at_its_first_step(scale):
    """μ after one step of OGN, momentum 0 and no average, from plain autograd and the formulas."""
    model = network(scale)
    before = copy.deepcopy(model)
    optimizer = credo.OGN(model, data_size=1000, momentum=0.0, averaging=0)
    optimizer.step(closure(model))
    squares = credo.squared_gradients(before, lambda: F.cross_entropy(before(X), Y))
    gradients = torch.autograd.grad(F.cross_entropy(before(X), Y), list(before.parameters()))
    for (name, p), gradient in zip(before.named_parameters(), gradients, strict=True):
        s = squares[name] / len(X)
        numbers = first_numbers(name, model, optimizer, p.detach(), gradient, s)
        alpha, gamma, tau, delta = numbers
        shrinkage = 0.0 if name.startswith("1.") else tau * delta / 1000  # BatchNorm has no prior
        step = alpha * (gradient + shrinkage * p) / (s + shrinkage + gamma)
        moved = dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(moved, p.detach() - step, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON])
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1.0])
def test_the_noise_is_relative_to_the_weights(method, factor):
    """Whatever the scale of the weights and of the loss, σ is κ of the weights in the mean, and N does not matter."""
    for data_size, loss in ((100, 1.0), (10**6, 1e-4)):
        model = network(factor)
        rms = model[0].weight.detach().square().mean().sqrt()
        optimizer = method(model, data_size=data_size)
        optimizer.step(lambda model=model, loss=loss: loss * F.cross_entropy(model(X), Y, reduction="none"))
        sigma = optimizer.posterior().variance["0.weight"].mean().sqrt()
        assert 0.5 < sigma / (0.3 / math.sqrt(2) * rms) < 2


def followed(progress, loss, steps, passes=0.05):
    for _ in range(steps):
        progress.follow(loss, passes)
    return progress


def test_the_growth_of_the_noise_follows_the_loss():
    progress = followed(Progress(), 2.0, 20)
    assert (progress.first, progress.growth) == (2.0, 1.0)
    followed(progress, 1.0, 280)
    assert progress.seen == pytest.approx(1.0, rel=0.01)  # 300 steps and 15 passes
    followed(progress, 0.8, 200)
    assert progress.growth == 1.0  # above 0.7 of it
    low = 0
    while progress.growth == 1.0:
        progress.follow(0.1, 0.05)
        low += 1
    assert low < 60  # until the mean has followed
    before = progress.growth
    followed(progress, 0.1, 120)
    assert progress.growth == pytest.approx(before + 120 * 0.05 / 3)
    followed(progress, 100.0, 3)
    assert progress.growth < before + 120 * 0.05 / 3
    followed(progress, 0.1, 10_000, passes=1.0)
    assert progress.growth == 20.0
    kept = Progress.of({"progress": progress.state()})
    assert kept == progress
    kept.follow(None, 1.0)
    assert kept == progress
    assert Progress.of({}) == Progress()


def test_the_level_waits_for_passes_and_for_steps():
    assert followed(Progress(), 1.0, 2_000, passes=0.001).seen is None  # two passes
    assert followed(Progress(), 1.0, 299, passes=1.0).seen is None
    assert followed(Progress(), 1.0, 300, passes=0.011).seen == pytest.approx(1.0)


def test_few_examples_are_learnt_by_heart_before_the_level_is_known():
    assert (
        followed(followed(Progress(), 2.0, 20), 0.3, 200, passes=0.1).growth == 1.0
    )  # above a tenth of the start
    assert followed(followed(Progress(), 2.0, 20), 0.1, 200, passes=0.1).growth > 3.0


def test_hard_examples_have_noise_below_the_start_of_the_loss_alone():
    """A level near the start would let the noise grow before anything is learnt."""
    progress = followed(Progress(), 2.0, 400)
    assert progress.seen == pytest.approx(2.0)
    assert followed(progress, 1.0, 400).growth == 1.0  # 0.5 of the level, but above 0.45 of the start
    assert followed(progress, 0.8, 400).growth > 1.0


@pytest.mark.parametrize("form", ["closure", "block"])
@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON, credo.NoisyKFAC])
def test_the_noise_grows_where_a_likelihood_is_learnt_by_heart(method, form):
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(12) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    optimizer = method(model, data_size=12)
    for _ in range(300):
        if form == "closure":
            optimizer.step(closure(model, x, y))
        else:
            with optimizer.sampled():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer._growth() > 1.5


@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON])
def test_the_noise_stays_under_an_error(method):
    model = network()
    optimizer = method(model, data_size=len(X))
    for _ in range(60):
        optimizer.step(lambda: (model(X)[:, 0]).square())
    assert optimizer._growth() == 1.0


@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON])
def test_the_constant_of_a_density_changes_nothing(method):
    """The density of an observation has units, and with them its logarithm a constant; the loss may be negative."""

    def trained(constant):
        model = network()
        optimizer = method(model, data_size=len(X))
        for _ in range(400):

            def loss():
                optimizer.zero_grad()
                z = model(X)
                found = F.gaussian_nll_loss(z[:, 0], Y.double(), (z[:, 1] - 3).exp()) + constant
                found.backward()
                return found

            optimizer.step(loss)
        assert optimizer._growth() == 1.0
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(trained(0.0), trained(5.0), rtol=1e-9, atol=1e-12)


def test_a_negative_loss_is_a_density():
    progress = followed(Progress(), 2.0, 400)
    assert followed(progress, 0.5, 400).growth > 1.0
    assert followed(progress, -0.5, 400).growth == 1.0


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda z: F.cross_entropy(z, Y), True),
        (lambda z: F.cross_entropy(z, Y, label_smoothing=0.1) + 1e-3 * z.square().sum(), True),
        (lambda z: 1e-3 * z.square().sum() + F.nll_loss(z.log_softmax(1), Y), True),
        (lambda z: F.binary_cross_entropy_with_logits(z[:, 0], (Y > 0).double()), True),
        (lambda z: F.binary_cross_entropy(z[:, 0].sigmoid(), (Y > 0).double()), True),
        (lambda z: -z.softmax(1)[range(len(Y)), Y].log().mean(), True),
        (lambda z: (F.softplus(z[:, 0]) - z[:, 0]).mean(), True),
        (lambda z: -torch.distributions.Categorical(logits=z).log_prob(Y).mean(), True),
        (lambda z: F.gaussian_nll_loss(z[:, 0], Y.double(), z[:, 1].exp()), False),
        (lambda z: (z[:, 1] + (z[:, 0] - Y) ** 2 * (-z[:, 1]).exp()).mean() / 2, False),
        (lambda z: -torch.distributions.Normal(z[:, 0], z[:, 1].exp()).log_prob(Y).mean(), False),
        (lambda z: (z[:, 1] + (z[:, 0] - Y).abs() * (-z[:, 1]).exp()).mean(), False),
        (lambda z: F.poisson_nll_loss(z[:, 0], Y.double()), False),
        (lambda z: F.mse_loss(z[:, 0], Y.double()), False),
        (lambda z: F.mse_loss(F.softplus(z[:, 0]), Y.double()), False),
        (lambda z: F.l1_loss(z[:, 0], Y.double()), False),
        (lambda z: F.huber_loss(z[:, 0], Y.double()), False),
        (lambda z: ((z[:, 0] - Y) ** 2).mean(), False),
    ],
)
def test_what_is_a_likelihood(loss, expected):
    assert is_discrete_likelihood([loss(network()(X))]) == expected


@pytest.mark.parametrize("method", METHODS)
def test_given_numbers_win(method):
    model = network()
    given = {"lr": 0.02, "tempering": 0.5, "prior_precision": 3.0}
    if method in SQUARES:
        given["damping"] = 0.7
    optimizer = method(model, data_size=100, **given)
    for _ in range(2):
        optimizer.step(closure(model))
    for group, found in zip(optimizer.param_groups, optimizer.diagnostics(), strict=True):
        assert {name: group[name] for name in given} == given
        if found.weights and not group["deterministic"]:
            assert {name: getattr(found, name) for name in given} == pytest.approx(given)


@pytest.mark.parametrize("method", METHODS)
def test_lists_and_groups_are_as_good_as_a_module(method):
    """The rule looks at tensors only. Without a module nobody knows of normalisation layers, so there are none."""
    results = []
    for kind in ("module", "list", "groups"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        named = list(model.named_parameters())
        params = {
            "module": model,
            "list": [p for _, p in named],
            "groups": [{"params": [p for _, p in named[:2]]}, {"params": [p for _, p in named[2:]]}],
        }[kind]
        optimizer = method(params, data_size=100)
        for _ in range(3):
            optimizer.step(closure(model))
        results.append([p.detach().clone() for p in model.parameters()])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_with_numbers_of_its_own(method):
    model = network()
    groups = [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[3].weight]}]
    optimizer = method(groups, data_size=100)
    before = copy.deepcopy(model)
    for _ in range(2):
        optimizer.step(closure(model))
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[3].weight, before[3].weight)


@pytest.mark.parametrize("method", [*SQUARES, credo.IVON])
def test_a_group_that_joins_late_has_the_same_noise(method):
    model = network()
    optimizer = method([model[0].weight, model[3].weight], data_size=100)
    optimizer.add_param_group({"params": [model[0].bias]})
    assert optimizer.param_groups[1]["noise"] == optimizer.param_groups[0]["noise"] == 0.3 / math.sqrt(2)


@pytest.mark.parametrize("method", METHODS)
def test_few_data_are_learnt_with_the_defaults(method):
    """30 examples of two classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))
    optimizer = method(model, data_size=30)
    for _ in range(300):
        optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
    prediction = credo.predict(model, optimizer.posterior(), x, samples=20)
    assert credo.evaluate(prediction, y)["accuracy"] > 0.95


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN, credo.KFAC, credo.IVON])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0])
def test_small_and_large_weights_and_losses_are_learnt(method, scale):
    """What a fixed noise drowns, or a fixed step does not move: layers of other sizes, losses in other units."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2)).double()
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
    optimizer = method(model, data_size=64)
    for _ in range(400):
        optimizer.step(lambda: scale * F.cross_entropy(model(x), y, reduction="none"))
    accuracy = (model(x).argmax(1) == y).double().mean()
    assert accuracy > 0.75, accuracy  # chance is 0.5


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN, credo.IVON])
def test_the_mean_is_an_average_of_iterates(method):
    """μ ← μ + w(z − μ), w = 9/(t + 8), beside the same run whose mean is the last iterate."""
    runs = []
    for eta in (8.0, 0.0):
        model = network(norm=False)
        optimizer = method(model, data_size=100, averaging=eta)
        path = []
        for _ in range(6):
            optimizer.step(closure(model))
            path.append([p.detach().clone() for p in model.parameters()])
        runs.append(path)
    averaged, iterates = runs
    means = [p.detach().clone() for p in network(norm=False).parameters()]
    for t, (found, zs) in enumerate(zip(averaged, iterates, strict=True), 1):
        means = [mean + 9 / (t + 8) * (z - mean) for mean, z in zip(means, zs, strict=True)]
        torch.testing.assert_close(found, means, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN, credo.IVON])
def test_a_learning_rate_of_ones_own_has_no_average(method):
    assert method(network(), 0.1, data_size=100).settings["averaging"] == 0.0
    assert method(network(), data_size=100).settings["averaging"] == 8.0
    assert method(network(), 0.1, data_size=100, averaging=3).settings["averaging"] == 3.0
    with pytest.raises(credo.errors.InvalidValue, match="averaging"):
        method(network(), data_size=100, averaging=-1)


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN, credo.IVON, credo.KFAC, credo.NoisyKFAC])
def test_matrices_that_start_at_zero_grow_as_others_do(method):
    """An adapter beside a fixed layer: in twenty steps it is as large as a layer's weights usually are."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(8, 3, generator=generator, dtype=torch.float64)).argmax(1)
    model = nn.Linear(8, 3, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = method(model, data_size=64)
    for _ in range(20):
        optimizer.step(closure(model, x, y))
    assert float(model.weight.square().mean()) > 0.1 * 0.8 / (3 * 8)


@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON, credo.KFAC])
def test_states_from_before_go_on(method):
    """Three numbers a tensor were saved before steps had a size of their own: they go on as they would have."""
    model = network()
    optimizer = method(model, data_size=1000)
    optimizer.step(closure(model))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for own in saved["state"].values():
        if "scale" in own:
            own["scale"] = own["scale"][:3]
    results = []
    for state in (
        saved,
        optimizer.state_dict(),
    ):  # the weights are of a usual size, so that both are the same
        model.load_state_dict(weights)
        other = method(model, data_size=1000)
        other.load_state_dict(state)
        for _ in range(4):
            other.step(closure(model))
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
