"""What cannot be exact is loud: the parameter, the operation and the remedy, and no gradient has moved."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import CallOrderError, CredoError, InvalidType, InvalidValue, UnsupportedOperation


def linear() -> nn.Linear:
    return nn.Linear(4, 3)


X = torch.ones(5, 4)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return 2 * weight

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def through_a_custom_function(net):
    return F.linear(X, Doubled.apply(net.weight)).sum()


def partly_through_a_custom_function(net):
    return net(X).sum() + F.linear(X, Doubled.apply(net.weight)).sum()


def derived_through_a_custom_function(net):
    return (X @ Doubled.apply(net.weight.t())).sum()


def derived_and_used_before_a_custom_function(net):
    """Whichever way is found first, the other is found too."""
    turned = net.weight.t()
    return (X @ turned).sum() + (X @ Doubled.apply(turned)).relu().sum()


def derived_and_used_behind_a_custom_function(net):
    turned = net.weight.t()
    return (X @ Doubled.apply(turned)).sum() + (X @ turned).relu().sum()


def with_a_penalty(net):
    return net(X).sum(1).mean() + 0.1 * net.weight.square().sum()


def with_a_detour_around_the_examples(net):
    return (net(X).mean(0) * net.bias).sum()


def time_major(net):
    return net(torch.ones(7, 5, 4)).sum() + (net(X) ** 2).sum()


REFUSED = {
    "custom autograd function": (through_a_custom_function, "weight.*DoubledBackward"),
    "custom autograd function beside a watched use": (
        partly_through_a_custom_function,
        "weight.*DoubledBackward",
    ),
    "custom autograd function of a transposed weight": (
        derived_through_a_custom_function,
        "weight.*DoubledBackward",
    ),
    "custom autograd function, found late": (
        derived_and_used_before_a_custom_function,
        "weight.*DoubledBackward",
    ),
    "custom autograd function, found early": (
        derived_and_used_behind_a_custom_function,
        "weight.*DoubledBackward",
    ),
    "penalty in the loss": (with_a_penalty, "weight.*prior"),
    "after the mean over examples": (with_a_detour_around_the_examples, "mul.*bias.*leading dimension of 3"),
    "another leading dimension": (time_major, "linear.*weight.*leading dimension of"),
}


@pytest.mark.parametrize(("loss", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_before_any_gradient_is_touched(loss, message):
    net = linear()
    with pytest.raises(CredoError, match=message), credo.capture(net):
        loss(net).backward()
    assert all(p.grad is None for p in net.parameters())


def test_an_image_without_a_batch_is_refused_by_name():
    net = torch.nn.Conv1d(2, 3, 2)
    with (
        pytest.raises(CredoError, match=r"convolution.*weight.*no leading dimension"),
        credo.capture(net),
    ):
        net(torch.ones(2, 4)).sum().backward()
    assert net.weight.grad is None


def test_forward_outside_the_block():
    net = linear()
    loss = net(X).sum()
    with (
        pytest.raises(UnsupportedOperation, match=r"bias.*AddmmBackward.*inside the block"),
        credo.capture(net),
    ):
        loss.backward()
    assert net.weight.grad is None


def test_backward_outside_the_block():
    net = linear()
    with credo.capture(net):
        loss = net(X).sum()
    with pytest.raises(CallOrderError, match="inside the block"):
        loss.backward()


def test_scripted_and_compiled_models_are_refused_by_name():
    for model in (torch.jit.script(linear()), torch.compile(linear())):
        with pytest.raises(UnsupportedOperation, match=r"scripted|compiled"):
            credo.capture(model)
        with pytest.raises(UnsupportedOperation, match=r"part.*(scripted|compiled)"):
            credo.capture(nn.ModuleDict({"part": model}))


def test_a_scripted_model_behind_parameters_is_found_in_the_graph():
    model = torch.jit.script(linear())
    with pytest.raises(UnsupportedOperation, match="compiled or scripted"), credo.capture(model.parameters()):
        model(X).sum().backward()


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embedding_options_without_an_exact_answer(option):
    net = nn.Embedding(5, 3, **{option: True})
    with pytest.raises(UnsupportedOperation, match=option), credo.capture(net):
        net(torch.tensor([[1, 2]]))


def test_packed_sequences_and_hidden_dropout_masks():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    net = nn.LSTM(4, 3)
    with pytest.raises(UnsupportedOperation, match="lstm on a PackedSequence"), credo.capture(net):
        net(packed)
    net = nn.LSTM(4, 3, num_layers=2, dropout=0.5)
    with pytest.raises(UnsupportedOperation, match=r"dropout=0\.5"), credo.capture(net):
        net(torch.ones(5, 2, 4))


@pytest.mark.parametrize(
    "layer", [nn.LSTM(4, 4), nn.TransformerEncoderLayer(4, 2, 8)], ids=["LSTM", "encoder"]
)
def test_a_square_time_major_batch_is_ambiguous(layer):
    with pytest.raises(UnsupportedOperation, match="batch_first=True"), credo.capture(layer):
        layer(torch.ones(5, 5, 4))


def test_a_time_major_encoder_is_refused():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    with pytest.raises(InvalidValue, match="batch_first"), credo.capture(layer):
        layer(torch.ones(7, 5, 4)).sum().backward()


def test_writing_a_parameter_into_a_tensor():
    net, rows = linear(), X.clone()
    with pytest.raises(UnsupportedOperation, match=r"torch\.cat"), credo.capture(net):
        rows[:, 0] = net.bias[0]


def test_gradients_of_gradients():
    net = linear()
    with pytest.raises(UnsupportedOperation, match="create_graph"), credo.capture(net):
        torch.autograd.grad(net(X).sum(), net.weight, create_graph=True)


def test_a_backward_on_another_thread():
    import threading

    net, failures = linear(), []

    def run(loss):
        try:
            loss.backward()
        except CallOrderError as error:
            failures.append(error)

    with credo.capture(net):
        thread = threading.Thread(target=run, args=(net(X).sum(),))
        thread.start()
        thread.join()
    assert "thread that entered" in str(failures[0])


ARGUMENTS = {
    "a tensor": (lambda: credo.capture(torch.ones(3)), InvalidType, "got Tensor"),
    "a string": (lambda: credo.capture("weights"), InvalidType, "got str"),
    "a dict": (lambda: credo.capture({}), InvalidType, "got dict"),
    "a number": (lambda: credo.capture(3), InvalidType, "got int"),
    "an empty list": (lambda: credo.capture([]), InvalidValue, "empty"),
    "a list of numbers": (lambda: credo.capture([3]), InvalidType, r"parameters\[0\]"),
    "reduction": (lambda: credo.capture(linear(), "none"), InvalidValue, "'none'"),
    "scale zero": (lambda: credo.capture(linear(), scale=0.0), InvalidValue, "scale"),
    "scale nan": (lambda: credo.capture(linear(), scale=float("nan")), InvalidValue, "scale"),
    "examples": (lambda: credo.capture(linear(), examples=0), InvalidValue, "examples"),
    "rule": (lambda: credo.register_rule("linear"), InvalidType, "callables"),
}


@pytest.mark.parametrize(("call", "kind", "message"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_bad_arguments(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("value", [lambda net: net(X), lambda net: 3.0, lambda net: None])
def test_squared_gradients_wants_one_number(value):
    net = linear()
    with pytest.raises(InvalidType, match="one number"):
        credo.squared_gradients(net, lambda: value(net))


def test_squares_of_an_unknown_parameter():
    net = linear()
    with credo.capture(net, "sum") as stats:
        net(X).sum().backward()
    with pytest.raises(KeyError, match="did not reach"):
        stats.squares[torch.nn.Parameter(torch.ones(1))]


def test_complex_parameters_have_no_squares():
    net = linear()
    net.gain = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(InvalidType, match=r"'gain' is complex.*view_as_complex"):
        credo.capture(net)
    net.gain.requires_grad_(False)
    with credo.capture(net, "sum") as stats:
        (net(X) * net.gain).abs().sum().backward()
    assert net.weight in stats.squares
