"""One module of K fixed samples says what predict says: by itself, after torch.export, and in onnxruntime."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import InvalidValue
from credo.integrations.export import FixedSamples


def image_network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def trained(task):
    """A network with a posterior and BatchNorm statistics, and inputs that were not trained on."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        model = (
            image_network()
            if task == "classification"
            else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        )
    shape = (16, 1, 6, 6) if task == "classification" else (16, 4)
    x = torch.randn(shape, generator=generator)
    optimizer = credo.VOGN(model, data_size=16)
    targets = torch.arange(16) % 3
    for _ in range(5):
        loss = (
            (lambda: F.cross_entropy(model(x), targets))
            if task == "classification"
            else (lambda: model(x).square().mean())
        )
        optimizer.step(loss)
    return model, optimizer.posterior(), torch.randn((5, *shape[1:]), generator=generator)


def expected(model, posterior, x, task):
    if task == "classification":
        found = credo.predict(model, posterior, x, samples=4, seed=3, temperature=1.5)
        return found.probs, found.mutual_information
    found = credo.predict(model, posterior, x, samples=4, seed=3, task="regression", noise=0.2)
    return found.mean, found.aleatoric, found.epistemic


def fixed(model, posterior, task):
    options = {"temperature": 1.5} if task == "classification" else {"noise": 0.2}
    return FixedSamples(model, posterior, samples=4, seed=3, task=task, **options)


@pytest.mark.parametrize("kind", ["samples", "mean"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_module_and_its_export_say_what_predict_says(task, kind):
    model, posterior, x = trained(task)
    posterior = "mean" if kind == "mean" else posterior
    answers = expected(model, posterior, x, task)
    module = fixed(model, posterior, task)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=(({0: batch},),)).module()
    for p in model.parameters():
        p.data.zero_()  # the module is its own
    for found in (module(x), program(x)):
        for own, wanted in zip(found, answers, strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)
    assert program(torch.cat([x, x]))[0].shape[0] == 10


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_onnxruntime_says_what_predict_says(task, tmp_path):
    pytest.importorskip("onnxscript", reason="extra: onnx")
    onnxruntime = pytest.importorskip("onnxruntime", reason="extra: onnx")
    model, posterior, x = trained(task)
    answers = expected(model, posterior, x, task)
    path = tmp_path / "model.onnx"
    module = fixed(model, posterior, task)
    torch.onnx.export(module, (x,), path, dynamo=True, dynamic_shapes=(({0: "batch"},),), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for own, wanted in zip(found, answers, strict=True):
        torch.testing.assert_close(torch.from_numpy(own), wanted, rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """Words and a mask: an embedding, a position, a norm, masked attention."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Parameter(torch.zeros(1, 7, 16))
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, ids, mask):
        h = self.words(ids) + self.places
        q, k, v = self.qkv(self.norm(h)).view(len(ids), 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())
        return self.out((h + seen.transpose(1, 2).reshape(len(ids), 7, 16)).mean(1))


def test_two_inputs_and_attention(tmp_path):
    pytest.importorskip("onnxscript", reason="extra: onnx")
    onnxruntime = pytest.importorskip("onnxruntime", reason="extra: onnx")
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        model = Attention()
    ids = torch.randint(20, (16, 7), generator=generator)
    mask = (torch.arange(7)[None] < torch.randint(2, 8, (16, 1), generator=generator)).long()
    optimizer = credo.VOGN(model, data_size=16)
    for _ in range(3):
        optimizer.step(lambda: F.cross_entropy(model(ids, mask), torch.arange(16) % 3))
    posterior = optimizer.posterior()
    expected = credo.predict(model, posterior, (ids, mask), samples=3)
    module, path = FixedSamples(model, posterior, samples=3), tmp_path / "model.onnx"
    batch = ({0: "batch"}, {0: "batch"})
    torch.onnx.export(module, (ids, mask), path, dynamo=True, dynamic_shapes=(batch,), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [own.name for own in session.get_inputs()]
    found = session.run(None, dict(zip(names, (ids[:5].numpy(), mask[:5].numpy()), strict=True)))
    torch.testing.assert_close(torch.from_numpy(found[0]), expected.probs[:5], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.from_numpy(found[1]), expected.mutual_information[:5], rtol=1e-3, atol=1e-5
    )


def test_what_a_posterior_does_not_have_is_shared():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = credo.VOGN(model, data_size=10)
    optimizer.step(lambda: model(torch.ones(2, 3)).square().sum(1))
    module = FixedSamples(model, optimizer.posterior(), samples=3)
    memory = {network[0].weight.data_ptr() for network in module.networks}
    assert len(memory) == 1
    assert memory != {model[0].weight.data_ptr()}
    assert len({float(network[1].weight.detach().sum()) for network in module.networks}) == 3


def test_what_cannot_be_meant_is_named():
    with pytest.raises(InvalidValue, match="'multilabel' is not exported"):
        FixedSamples(nn.Linear(2, 2), "mean", task="multilabel")
    with pytest.raises(InvalidValue, match="'mean', got 'map'"):
        FixedSamples(nn.Linear(2, 2), "map")


def test_an_estimator_is_exported_with_its_scaling():
    pytest.importorskip("sklearn", reason="extra: sklearn")
    from credo.sklearn import VariationalRegressor

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = VariationalRegressor(max_iter=2, random_state=0, samples=3).fit(
        x.numpy(), 50 + 9 * x[:, 0].numpy()
    )
    options = {"samples": 3, "seed": model.seed_, "task": "regression", "noise": "model"}
    program = torch.export.export(FixedSamples(model.module_, model.posterior_, **options), (x,)).module()
    mean, aleatoric, epistemic = program(x)
    expected_mean, expected_std = model.predict(x.numpy(), return_std=True)
    torch.testing.assert_close(mean, torch.from_numpy(expected_mean))
    torch.testing.assert_close((aleatoric + epistemic).sqrt(), torch.from_numpy(expected_std))
