"""Classification against an obvious loop: draw, forward, softmax, average."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from credo.posterior import DiagonalPosterior
from credo.predict import Prediction, predict
from tests.predict.models import CASES, around, generator, mlp, rows


def loop_oracle(model: nn.Module, posterior: DiagonalPosterior, x: Tensor, samples: int, seed: int) -> Tensor:
    """(C, M, K) probabilities."""
    g, twin = generator(seed), copy.deepcopy(model).eval()
    found = []
    with torch.no_grad():
        for _ in range(samples):
            for name, value in posterior.sample(g).items():
                twin.get_parameter(name).copy_(value)
            found.append(twin(x.clone()).softmax(-1))
    return torch.stack(found)


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "random in eval"])
@pytest.mark.parametrize("vectorise", [None, False, True])
def test_probabilities_are_the_mean_of_softmax(kind: str, vectorise: bool | None) -> None:
    make, inputs = CASES[kind]
    model, x = make(), inputs(6)
    q = around(model)
    truth = loop_oracle(model, q, x, 9, seed=4)
    found = predict(model, q, x, samples=9, seed=4, keep_samples=True, vectorise=vectorise)
    assert found.samples is not None
    torch.testing.assert_close(found.samples, truth, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.probs, truth.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.log_probs, truth.mean(0).log(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(6))
    assert isinstance(found, Prediction)


def test_the_entropies_are_those_of_their_definitions() -> None:
    model = mlp().double()
    found = predict(model, around(model, 0.5), rows().double(), samples=13, keep_samples=True)
    assert found.samples is not None
    entropy = torch.distributions.Categorical(found.samples.mean(0)).entropy()
    expected = torch.distributions.Categorical(found.samples).entropy().mean(0)
    divergence = (found.samples * (found.samples.log() - found.probs.log())).sum(-1).mean(0)  # E KL(p‖p̂)
    torch.testing.assert_close(found.entropy, entropy)
    torch.testing.assert_close(found.expected_entropy, expected)
    torch.testing.assert_close(found.mutual_information, divergence)
    assert bool((found.mutual_information > 0).all())


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-12, 1e4), st.integers(1, 5), st.integers(0, 99))
def test_mutual_information_is_never_negative_nor_more_than_it_can_be(
    scale: float, samples: int, seed: int
) -> None:
    model = mlp()
    found = predict(model, around(model, scale), rows(), samples=samples, seed=seed)
    assert bool((found.mutual_information >= 0).all())
    assert bool((found.mutual_information <= math.log(max(samples, 1)) + 1e-5).all())
    assert bool((found.entropy <= math.log(3) + 1e-5).all())


def test_log_probabilities_are_finite_where_probabilities_underflow() -> None:
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[300.0], [0.0]]))
    found = predict(model, around(model, 1e-8), torch.ones(1, 1), samples=4)
    assert float(found.probs[0, 1]) == 0
    assert found.log_probs[0, 1].item() == pytest.approx(-300, rel=1e-4)
    assert float(found.entropy) == 0


def test_half_precision_models_get_single_precision_probabilities() -> None:
    model = mlp().to(torch.bfloat16)
    q = DiagonalPosterior(
        dict(model.named_parameters()), {n: torch.full(p.shape, 0.01) for n, p in model.named_parameters()}
    )
    found = predict(model, q, rows().to(torch.bfloat16), samples=8)
    assert found.probs.dtype == torch.float32
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(6))


def test_the_mean_is_the_point_prediction() -> None:
    model = mlp()
    found = predict(model, "mean", rows(), samples=7, keep_samples=True)
    with torch.no_grad():
        truth = model(rows()).softmax(-1)
    torch.testing.assert_close(found.probs, truth)
    assert found.samples is not None
    assert len(found.samples) == 1
    assert torch.equal(found.mutual_information, torch.zeros(6))


def test_a_vanishing_posterior_predicts_as_the_mean() -> None:
    model = mlp()
    point, sampled = (predict(model, q, rows(), samples=3) for q in ("mean", around(model, 1e-16)))
    torch.testing.assert_close(point.probs, sampled.probs)


def test_the_seed_decides_and_nothing_else() -> None:
    model = mlp()
    q = around(model)
    first = predict(model, q, rows(), seed=1).probs
    torch.rand(3)
    assert torch.equal(predict(model, q, rows(), seed=1).probs, first)
    assert not torch.equal(predict(model, q, rows(), seed=2).probs, first)


def test_weights_beyond_the_posterior_are_the_models() -> None:
    model = mlp()
    part = DiagonalPosterior(
        {"3.weight": model[3].weight}, {"3.weight": torch.full_like(model[3].weight, 0.1)}
    )
    frozen = around(model, 0.1, deterministic=("1.weight", "1.bias", "3.bias"))
    torch.testing.assert_close(predict(model, part, rows()).probs, predict(model, frozen, rows()).probs)


def test_outputs_with_logits_are_understood() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(x), "hidden": x}

    model = Wrapped()
    direct = around(model.inner)
    nested = DiagonalPosterior(
        {f"inner.{n}": t for n, t in direct.mean.items()},
        {f"inner.{n}": t for n, t in direct.variance.items()},
    )
    torch.testing.assert_close(
        predict(model, nested, rows()).probs, predict(model.inner, direct, rows()).probs
    )


@pytest.mark.parametrize("classes", [2, 15, 16, 40])
@pytest.mark.parametrize("samples", [1, 5])
def test_few_and_many_classes(classes: int, samples: int) -> None:
    """Below and above where the classes change places in memory."""
    model, x = nn.Linear(4, classes).double(), rows(6).double()
    q = around(model, 0.5)
    truth = loop_oracle(model, q, x, samples, seed=2)
    found = predict(model, q, x, samples=samples, seed=2, keep_samples=True)
    expected = torch.distributions.Categorical(truth).entropy().mean(0)
    torch.testing.assert_close(found.samples, truth)
    torch.testing.assert_close(found.probs, truth.mean(0))
    torch.testing.assert_close(found.expected_entropy, expected)
    assert found.probs.is_contiguous()
    assert found.log_probs.is_contiguous()


def test_an_impossible_class_has_no_entropy() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), torch.full((len(x), 1), -math.inf)], 1)

    model = Masked(4, 2)
    found = predict(model, around(model), rows(), samples=4)
    assert bool((found.probs[:, 2] == 0).all())
    assert bool(found.expected_entropy.isfinite().all())
    assert bool((found.expected_entropy <= math.log(2)).all())
