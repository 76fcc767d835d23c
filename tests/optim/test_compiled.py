"""Compiled models and functions inside blocks: the plain model's numbers, and no graph is made of parts of it."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.curvature.torch_private import COMPILER

METHODS = {
    "VOGN": {},
    "OGN": {},
    "IVON": {},
    "KFAC": {},
    "NoisyKFAC": {},
    "BayesByBackprop": {},
    "VOGN, two samples": {"mc_samples": 2},
    "VOGN, vectorized": {"mc_samples": 2, "vectorized": True},
    "VOGN, slices": {"mc_slices": 2},
    "IVON, two samples": {"mc_samples": 2},
    "BayesByBackprop, vectorized": {"mc_samples": 2, "vectorized": True},
}
X, Y = torch.linspace(-1, 1, 6 * 4, dtype=torch.float64).reshape(6, 4).sin(), torch.arange(6) % 3


class Counting:
    """A compiler that runs what it is given as it is, and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    ).double()


class WithParts(nn.Module):
    """A module whose functions are compiled, but not itself."""

    def __init__(self, inner, compiled):
        super().__init__()
        self.inner = inner
        self.body = compiled(self._body)
        self.activation = compiled(lambda z: z.tanh() * 2)

    def _body(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.activation(self.body(x))


def whole(model, compiled):
    return model, compiled(model)


def parts(model, compiled):
    outer = WithParts(model, compiled)
    return outer, outer


def in_place(model, compiled):
    """`module.compile()`, which leaves the module what it is."""
    outer = WithParts(model, lambda function: function)
    if compiled(None) is not None:
        outer.compile(backend=compiled(None))
    return outer, outer


FORMS = {"model": whole, "functions": parts, "module.compile()": in_place}


def trained(method, form, backend, block):
    def compiled(function):
        if function is None:
            return backend
        return function if backend is None else torch.compile(function, backend=backend)

    model, called = FORMS[form](network(), compiled)
    if backend is not None:
        assert COMPILER in sys.modules
    options = METHODS[method]
    optimizer = getattr(credo, method.partition(",")[0])(model, data_size=20, seed=1, **options)

    def losses():
        return F.cross_entropy(called(X), Y, reduction="none")

    for _ in range(3):
        if block:
            for _ in range(options.get("mc_samples", 1)):
                with optimizer.sampled():
                    losses().mean().backward()
            optimizer.step()
        else:
            optimizer.step(losses)
        optimizer.zero_grad()
    return model, called


def numbers(model):
    return [value for name, value in sorted(model.state_dict().items())]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_the_plain_model_without_a_graph(method, form):
    counting = Counting()
    for block in (False, True) if "vectorized" not in method else (False,):
        found, called = trained(method, form, counting, block)
        assert counting.graphs == 0
        plain, _ = trained(method, form, None, block)
        for p, q in zip(numbers(found), numbers(plain), strict=True):
            assert torch.equal(p, q)
    called(X)
    assert counting.graphs > 0  # what was compiled is still compiled, outside of blocks


@pytest.mark.parametrize("method", list(METHODS)[:6])
def test_torchs_own_backend_without_a_compiler(method):
    found, _ = trained(method, "model", "eager", True)
    plain, _ = trained(method, "model", None, True)
    for p, q in zip(numbers(found), numbers(plain), strict=True):
        assert torch.equal(p, q)


def test_what_was_compiled_before_a_reset_of_the_compiler():
    counting, model = Counting(), network()
    called = torch.compile(model, backend=counting)
    torch.compiler.reset()  # which forgets the backends
    optimizer = credo.VOGN(model, data_size=20)
    optimizer.step(lambda: F.cross_entropy(called(X), Y))
    assert counting.graphs == 0


def test_what_was_compiled_as_one_graph():
    """`fullgraph=True` makes an error of each break."""
    model = network()
    called = torch.compile(model, backend=Counting(), fullgraph=True)
    called(X)
    credo.IVON(model, data_size=20).step(lambda: F.cross_entropy(called(X), Y))


def test_blocks_of_captures():
    counting, model = Counting(), network()
    called = torch.compile(model, backend=counting)

    def loss(net):
        return F.cross_entropy(net(X), Y)

    with credo.capture(model) as stats:
        loss(called).backward()
    plain = credo.squared_gradients(model, lambda: loss(model))
    for name, p in model.named_parameters():
        assert torch.equal(stats.squares[p], plain[name])
    found = credo.kronecker_factors(model, lambda: loss(called))
    for name, factors in credo.kronecker_factors(model, lambda: loss(model)).items():
        assert all(map(torch.equal, factors, found[name]))
    assert counting.graphs == 0


def test_a_failed_block_leaves_the_compiler_as_it_was():
    counting, model = Counting(), network()
    called = torch.compile(model, backend=counting)
    optimizer = credo.VOGN(model, data_size=20)
    with pytest.raises(ZeroDivisionError), optimizer.sampled():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), credo.capture(model):
        raise ZeroDivisionError
    called(X)
    assert counting.graphs == 1


def test_the_stance_of_the_user_comes_back():
    model = network()
    called = torch.compile(model, backend=Counting())
    optimizer = credo.VOGN(model, data_size=20)
    with torch.compiler.set_stance("fail_on_recompile"):
        optimizer.step(lambda: F.cross_entropy(called(X), Y))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            called(X)


def test_blocks_of_two_threads_that_end_in_another_order():
    counting, model, other = Counting(), network(), network()
    called = torch.compile(model, backend=counting)
    first, second = (credo.VOGN(net, data_size=20) for net in (model, other))
    inside, leave = threading.Event(), threading.Event()

    def second_block():
        with second.sampled():
            inside.set()
            leave.wait(30)
            F.cross_entropy(other(X), Y).backward()

    thread = threading.Thread(target=second_block)
    with first.sampled():
        thread.start()
        assert inside.wait(30)
    leave.set()
    thread.join(30)
    called(X)
    assert counting.graphs == 1
