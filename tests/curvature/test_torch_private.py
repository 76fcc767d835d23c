"""One test for each thing taken from torch beyond its documented interface: a new version fails here by name."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import credo
from credo.curvature import torch_private as private


class Seen(TorchFunctionMode):
    """Notes the names of the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def test_what_runs_without_torch_functions_is_seen_by_no_mode():
    with Seen() as seen, private.DisableTorchFunction():
        torch.ones(2).sum()
    assert seen.names == []


def test_autocast_of_any_device_is_known():
    assert not private.is_any_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert private.is_any_autocast_enabled()


def test_the_innermost_mode_is_last():
    assert private.active_modes() == []
    with Seen() as outer, Seen() as inner:
        assert private.active_modes() == [outer, inner]
    assert private.active_modes() == []


def test_operations_inside_a_python_function_are_seen():
    x, seen = torch.ones(2, 3), Seen()
    assert private.can_run_inside(F.normalize)
    assert not private.can_run_inside(torch.relu)
    with seen:
        F.normalize(x)
    assert seen.names == ["normalize"]
    with Seen() as inside:
        result = private.without_override(F.normalize)(x)
    assert "normalize" not in inside.names
    assert len(inside.names) > 1
    torch.testing.assert_close(result, F.normalize(x), rtol=0, atol=0)


@pytest.mark.parametrize("function", [torch.autograd.backward, torch.autograd.grad])
def test_the_engine_of_a_backward_call_can_be_run_by_another(function):
    x, runs = leaf(3), []

    def run(*args, **kwargs):
        runs.append(len(args))
        return private.run_engine(*args, **kwargs)

    twice = private.around_engine(function, run)
    arguments = ([(x * x).sum()],) if function is torch.autograd.backward else ([(x * x).sum()], [x])
    with Seen():
        found = twice(*arguments)
    assert len(runs) == 1
    grad = x.grad if found is None else found[0]
    torch.testing.assert_close(grad, torch.full((3,), 2.0))


def test_the_nodes_of_a_function_are_known_by_their_type():
    node = Double.apply(leaf(2)).grad_fn
    assert type(node) is private.node_type(Double)


def test_nodes_tell_what_they_saved_their_results_and_their_order():
    first = leaf(2, 3).sum(1)
    second = first.unsqueeze(0)
    node = first.grad_fn
    assert private.saved(node, "keepdim") is False
    assert private.saved_getter("keepdim")(node) is False
    assert private.has_saved(type(node), "dim")
    assert not private.has_saved(type(node), "nothing")
    assert private.saved(node, "nothing", 7) == 7
    with pytest.raises(LookupError, match="nothing"):
        private.saved(node, "nothing")
    assert [tuple(result.shape) for result in private.results_of(node)] == [(2,)]
    assert private.creation_order(second.grad_fn) > private.creation_order(node)


def test_a_level_of_vmap_can_be_opened_by_hand():
    private.load_decompositions()
    x = torch.arange(6.0).view(3, 2)
    assert not private.are_transforms_active()
    level = private.begin_vmap(3, "error")
    try:
        assert private.are_transforms_active()
        assert private.current_level() == level
        row = private.add_batch(x, 0, level)
        assert private.is_batched(row)
        assert row.shape == (2,)
        with private.below_transform():
            assert not private.are_transforms_active()
        whole, place = private.remove_batch(row * 2, level)
    finally:
        private.end_vmap()
    assert place == 0
    torch.testing.assert_close(whole, 2 * x)


def test_nested_arguments_can_be_taken_apart_and_put_together():
    given = ([torch.ones(2)], {"a": torch.zeros(1), "b": 3})
    leaves, form = private.tree_flatten(given)
    assert len(leaves) == 3
    assert private.tree_unflatten(leaves, form)[1]["b"] == 3
    assert private.tree_map_only(int, lambda value: value + 1, given)[1]["b"] == 4


def test_compiled_modules_are_known_once_something_was_compiled():
    kind = private.compiled_module_type()
    assert kind is None or issubclass(kind, torch.nn.Module)


def test_whether_anything_was_compiled_is_known():
    """By a module that neither torch, its optimisers nor credo load."""
    code = """
import sys, torch, credo
from credo.curvature.torch_private import COMPILER
model = torch.nn.Linear(2, 2)
optimizer = credo.VOGN(model, data_size=9)
optimizer.step(lambda: model(torch.ones(3, 2)).square().sum(1))
assert COMPILER not in sys.modules
torch.compile(model, backend="eager")
assert COMPILER in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


MOVES = {
    "unsqueeze": lambda z: z.unsqueeze(0).squeeze(0),
    "transpose": lambda z: z.transpose(0, 1).transpose(0, 1),
    "slice": lambda z: z[:, 1:],
    "stack": lambda z: torch.stack((z, z), 1).flatten(1),
    "softmax": lambda z: z.softmax(1),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_node_without_the_attribute_of_this_torch_is_examined_by_numbers(move, monkeypatch):
    """As in a version of torch that calls it otherwise: right all the same, and no error from inside."""
    layer, x = torch.nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.float64)

    def squares():
        return credo.squared_gradients(layer, lambda: move(layer(x)).square().sum(1).mean())

    def absent(node, name, *default):
        if node.name().startswith(("Sum", "Mean")):  # of the loss
            return private.saved(node, name, *default)
        raise LookupError(name)

    expected = squares()
    monkeypatch.setattr("credo.curvature.audit._known", {})
    monkeypatch.setattr("credo.curvature.flows.saved", absent)
    for name, found in squares().items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=0)
