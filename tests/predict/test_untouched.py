"""Nothing that the caller owns changes: weights, buffers, modes, inputs, random streams, gradient modes."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from credo.predict import predict
from tests.predict.models import CASES, Net, Random, around, images, mlp, rows


def everything(model: nn.Module) -> tuple[object, ...]:
    tensors = [
        (n, id(t), t.data_ptr(), t._version, t.requires_grad)
        for n, t in model.state_dict(keep_vars=True).items()
    ]
    values = [t.detach().numpy().tobytes() for t in model.state_dict().values()]
    modules = [
        (n, id(m), m.training, sorted(m.__dict__), id(m.__dict__.get("forward")))
        for n, m in model.named_modules()
    ]
    grads = [p.grad is None for p in model.parameters()]
    return tensors, values, modules, grads, torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("posterior", ["mean", "sampled"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_random_stream_are_bitwise_untouched(
    kind: str, posterior: str, training: bool
) -> None:
    make, inputs = CASES[kind]
    model, x = make().train(training), inputs(6)
    next(model.children()).train(not training)  # modes may be mixed
    before, x_before = everything(model), x.clone()
    for vectorise in (None, False, True):
        predict(model, around(model) if posterior == "sampled" else "mean", x, samples=5, vectorise=vectorise)
    assert everything(model) == before
    assert torch.equal(x, x_before)


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise KeyboardInterrupt


def test_also_after_an_interrupt() -> None:
    model = Breaks().train()
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        predict(model, around(model), images())
    assert everything(model) == before


def test_also_when_a_loader_breaks_in_the_middle() -> None:
    def loader() -> object:
        torch.rand(5)
        yield rows()
        raise OSError("disk")

    model = mlp().train()
    before = everything(model)
    with pytest.raises(OSError, match="disk"):
        predict(model, around(model), loader())
    assert everything(model) == before


def test_a_shuffling_loader_draws_nothing_from_the_global_stream() -> None:
    model = mlp()
    q, before = around(model), torch.get_rng_state()
    loader = DataLoader(TensorDataset(rows(10)), batch_size=3, shuffle=True)
    first = predict(model, q, loader).probs
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(predict(model, q, loader).probs, first)


def test_a_model_that_draws_in_eval_mode_is_deterministic_in_the_seed() -> None:
    model = Random()
    q = around(model)
    first = predict(model, q, rows()).probs
    torch.rand(3)
    assert torch.equal(predict(model, q, rows()).probs, first)
    assert torch.equal(predict(model, q, rows(), vectorise=True).probs, first)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_results_are_ordinary_tensors_without_a_graph(mode: type[torch.no_grad]) -> None:
    model = mlp()
    q = around(model)
    with mode():
        found = predict(model, q, rows())
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    for tensor in (found.probs, found.entropy, found.log_probs):
        assert not tensor.requires_grad
        assert not tensor.is_inference()


def test_inputs_may_be_inference_tensors_or_require_gradients() -> None:
    model = mlp()
    q, truth = around(model), predict(model, around(model), rows()).probs
    with torch.inference_mode():
        x = rows()
    torch.testing.assert_close(predict(model, q, x).probs, truth)
    torch.testing.assert_close(predict(model, q, rows().requires_grad_()).probs, truth)


def test_training_in_another_thread_never_sees_the_prediction() -> None:
    """While one thread predicts, the model stays in training mode with its own weights."""
    model = Net().train()
    q, stop, wrong = around(model), threading.Event(), list[str]()
    weight = model.fc.weight

    def watch() -> None:
        while not stop.is_set():
            if model.fc.weight is not weight or not all(m.training for m in model.modules()):
                wrong.append("seen")

    thread = threading.Thread(target=watch)
    thread.start()
    for vectorise in (False, True):
        predict(model, q, images(), samples=20, vectorise=vectorise)
    stop.set()
    thread.join()
    assert wrong == []
