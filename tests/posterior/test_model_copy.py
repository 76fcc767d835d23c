"""The copy answers as the model would with other weights, and the model never notices.

The oracle is a deep copy of the model, in eval mode, whose parameters are overwritten.
"""

import copy
import functools
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from credo.errors import CallOrderError, InvalidType, InvalidValue, UnsupportedOperation
from credo.posterior.model_copy import ModelCopy

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.third = self.first  # a shared module

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


class References(nn.Module):
    """Reaches its layers by every road but `self.layer`."""

    def __init__(self, road: str, closes: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.road = road
        self.listed = [self.layer, {"also": (self.layer,)}]
        self.bound = self.layer.forward
        self.closure = (lambda x: self.layer(x)) if closes else None  # with it, the model cannot be copied
        self.partial = functools.partial(self._through, self.layer)
        self.weights = [self.layer.weight, self.layer.bias]

    def _through(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) + self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        roads: dict[str, Callable[[Tensor], Tensor]] = {
            "list": self.listed[0],
            "nested": lambda x: self.listed[1]["also"][0](x),
            "bound": self.bound,
            "closure": self.closure,
            "partial": self.partial,
            "weights": lambda x: F.linear(x, *self.weights),
        }
        return roads[self.road](x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None].expand(5, 2, 4))[0]


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda module, args, output: output + module.bias + model[1].weight.sum())
    return model


def patched() -> nn.Module:
    model = nn.Linear(4, 4)
    model.forward = lambda x: F.linear(x, model.weight)  # type: ignore[method-assign]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm and dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
    "tied": Tied,
    **{f"by {road}": functools.partial(References, road) for road in
       ("list", "nested", "bound", "closure", "partial", "weights")},
    **{f"by {road}, copied": functools.partial(References, road, closes=False) for road in
       ("list", "nested", "bound", "partial", "weights")},
    "recurrent": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "hooked": hooked,
    "patched forward": patched,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
    "bare parameter": nn.PReLU,
    "data parallel": lambda: nn.DataParallel(nn.Linear(4, 4)),
}  # fmt: skip


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=g) for name, p in model.named_parameters()}


def oracle(model: nn.Module, weights: dict[str, Tensor]) -> Tensor:
    oracle_model = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, parameter in oracle_model.named_parameters():
            parameter.copy_(weights[name])
        return oracle_model(X)


def snapshot(model: nn.Module) -> list[object]:
    tensors = [
        (name, t, t.data_ptr(), t.detach().clone()) for name, t in model.state_dict(keep_vars=True).items()
    ]
    return [tensors, [(name, m, m.training, list(m.__dict__)) for name, m in model.named_modules()]]


def unchanged(before: list[object], after: list[object]) -> bool:
    for (n1, t1, p1, v1), (n2, t2, p2, v2) in zip(before[0], after[0], strict=True):  # type: ignore[call-overload]
        if not (n1 == n2 and t1 is t2 and p1 == p2 and torch.equal(v1, v2)):
            return False
    return before[1] == after[1]


@pytest.mark.parametrize("kind", [k for k in MODELS if k not in ("hooked", "patched forward", "by closure")])
def test_it_answers_as_the_model_would(kind: str) -> None:
    model = MODELS[kind]().train()
    weights, before = other_weights(model), snapshot(model)
    private = ModelCopy(model)
    private.check(weights)
    private.load(private.placed(weights))
    with torch.no_grad():
        answer = private.module(X)
    assert torch.equal(answer, oracle(model, weights))
    assert unchanged(before, snapshot(model))


def test_closures_and_hooks_reach_the_private() -> None:
    """Deep copies keep closures over the original, so these have oracles of their own."""
    for kind in ("hooked", "patched forward", "by closure"):
        model = MODELS[kind]()
        weights = other_weights(model)
        private = ModelCopy(model)
        private.load(weights)
        assert torch.equal(private.module(X), torch.func.functional_call(model, weights, (X,)))


def test_buffers_written_in_eval_mode_stay_private() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x
            return x + self.calls

    model = Counts()
    assert torch.equal(ModelCopy(model).module(X), X + 1)
    assert float(model.calls) == 0
    assert not hasattr(model, "last")


def test_names_of_wrapped_models_fit_both_ways() -> None:
    inner = nn.Linear(4, 4)
    weights = other_weights(inner)
    for model in (inner, nn.DataParallel(inner)):
        for prefix in ("", "module.", "module._orig_mod."):
            private = ModelCopy(model)
            named = {prefix + name: tensor for name, tensor in weights.items()}
            private.check(named)
            private.load(private.placed(named))
            assert torch.equal(private.module(X), F.linear(X, weights["weight"], weights["bias"]))


def test_a_compiled_model_is_taken_as_it_was_before() -> None:
    inner = nn.Linear(4, 4)
    weights = other_weights(inner)
    private = ModelCopy(torch.compile(inner))  # type: ignore[arg-type]
    private.load(weights)
    assert torch.equal(private.module(X), F.linear(X, weights["weight"], weights["bias"]))


def test_weights_take_the_dtype_of_the_model() -> None:
    private = ModelCopy(nn.Linear(4, 4, dtype=torch.bfloat16))
    placed = private.placed({"weight": torch.ones(4, 4)})
    assert placed["weight"].dtype == torch.bfloat16


def test_the_first_mismatches_are_listed() -> None:
    with pytest.raises(InvalidValue, match=r"no 'a', the model has no 'b', 'weight' is \(2,\).*and 1 more"):
        ModelCopy(nn.Linear(4, 4)).check({n: torch.ones(2) for n in ("a", "b", "weight", "bias")})


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(InvalidType, match="Module"):
        ModelCopy(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(CallOrderError, match="weight"):
        ModelCopy(nn.LazyLinear(3))
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(UnsupportedOperation, match="script"):
        ModelCopy(nn.Sequential(scripted))


class Foreign(nn.Module):
    """Holds what cannot be copied, or must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock, self.seen = nn.Linear(4, 4), threading.Lock(), list[Tensor]()
        self.scale = torch.ones(4, requires_grad=True) * 2  # has a graph: torch refuses to copy it
        self.layer.register_forward_hook(self.seen_by)
        recorder = self.seen
        self.layer.register_forward_hook(lambda module, args, output: recorder.append(output))

    @staticmethod
    def seen_by(module: nn.Module, args: object, output: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.layer(x) * self.scale


def test_what_is_no_part_of_the_model_is_shared() -> None:
    model = Foreign()
    weights = other_weights(model)
    private = ModelCopy(model)
    private.load(weights)
    with torch.no_grad():
        answer = private.module(X)
    assert not private.borrows
    assert torch.equal(answer, F.linear(X, weights["layer.weight"], weights["layer.bias"]) * 2)
    assert len(model.seen) == 1  # a hook's record, written as ever
    assert private.module.lock is model.lock


@pytest.mark.parametrize("kind", ["hooked", "patched forward", "by closure"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_must_be_borrowed_is_given_back_as_it_was(kind: str, fails: bool) -> None:
    model = MODELS[kind]().train()
    before, private = snapshot(model), ModelCopy(model)
    assert private.borrows
    private.load(other_weights(model))
    if fails:
        with pytest.raises(RuntimeError):
            private.module(X[:, :3])
    else:
        private.module(X)
    assert unchanged(before, snapshot(model))


def test_the_model_says_when_it_writes_to_its_weights() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.5)
            return super().forward(x)

    for model, writes in ((Clamps(4, 3), True), (nn.Linear(4, 3), False), (nn.BatchNorm1d(4), False)):
        private = ModelCopy(model)
        private.load(other_weights(model))
        assert not private.wrote()
        private.module(X)
        assert private.wrote() == writes
