"""A posterior's predictions as one module of plain operations, for torch.export, ONNX and whatever has no credo.

fixed = FixedSamples(model, posterior, samples=10)      # "mean" in place of the posterior: one function
probs, mutual_information = fixed(x)                    # as credo.predict(model, posterior, x, samples=10)
torch.export.export(fixed, (x,))
torch.onnx.export(fixed, (x,), "model.onnx", dynamo=True)   # extra `onnx`
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from credo.errors import InvalidValue, UnsupportedOperation
from credo.integrations.updates import draws
from credo.posterior import Posterior
from credo.posterior.model_copy import ModelCopy
from credo.predict.outputs import Noise, Task, likelihood_of
from credo.predict.prediction import tempered, wide
from credo.validate import positive


@final
class FixedSamples(nn.Module):
    """K networks with the weights of K draws side by side; their weights are independent of the model's from here on.

    The draws are those of `credo.predict` with the same samples and seed. Weights that the posterior does not have
    are shared among the networks. The module is in eval mode, and answers

        classification, binary   probabilities, classes last, and mutual information (nats)
        regression               mean, aleatoric and epistemic variance

    model, posterior, samples, seed, task, temperature, class_dim, noise: as for `credo.predict`.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior | str,
        *,
        samples: int = 10,
        seed: int = 0,
        task: Task = "classification",
        temperature: float = 1.0,
        class_dim: int | None = None,
        noise: Noise = None,
    ):
        super().__init__()
        if task == "multilabel":
            raise InvalidValue(
                "task='multilabel' is not exported; 'classification', 'binary' and 'regression' are"
            )
        likelihood = likelihood_of(task, noise, temperature, class_dim)
        self._read, self._task, self._temperature = (
            likelihood.read,
            task,
            positive("temperature", temperature),
        )
        variance = getattr(likelihood, "noise", None)
        self._noise = 0.0 if variance is None else float(variance) if variance.numel() == 1 else variance
        if isinstance(posterior, str):
            if posterior != "mean":
                raise InvalidValue(f"posterior must be a posterior or 'mean', got {posterior!r}")
            self.networks = nn.ModuleList([_network(model, None, {}, {})])
        else:
            drawn = draws(model, posterior, samples, seed)
            shared: dict[str, Tensor] = {}
            self.networks = nn.ModuleList([_network(model, posterior, own, shared) for own in drawn])
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """What the model takes."""
        answers = [self._read(network(*args, **kwargs)) for network in self.networks]
        stacked = [wide(torch.stack(column)) for column in zip(*answers, strict=True)]
        if self._task == "regression":
            mean = stacked[0].mean(0)
            aleatoric = (
                stacked[1].exp().mean(0) if len(stacked) == 2 else torch.zeros_like(mean) + self._noise
            )
            return mean, aleatoric, (stacked[0] - mean).square().mean(0)
        log_each = tempered(stacked[0], self._temperature).log_softmax(-1)  # (K, M, …, C)
        each = log_each.exp()
        probs = each.mean(0)
        smallest = torch.finfo(probs.dtype).tiny
        entropy = -(probs * probs.clamp_min(smallest).log()).sum(-1)
        expected = -(each * log_each.clamp_min(torch.finfo(probs.dtype).min)).sum(-1).mean(0)
        return probs, (entropy - expected).clamp_min(0.0)


def _network(
    model: nn.Module, posterior: Posterior | None, weights: dict[str, Tensor], shared: dict[str, Tensor]
) -> nn.Module:
    """A copy with these weights; `shared` are copies of all others, made by the first call."""
    copy = ModelCopy(model)
    if copy.borrows:
        raise UnsupportedOperation(
            f"{type(model).__name__} holds a function that refers to the model itself, and cannot be copied for "
            "export. Make that function a method."
        )
    if posterior is not None:
        copy.check(posterior.mean)
        copy.take_buffers(posterior.buffers)
    if not shared:
        own = copy.module.state_dict(keep_vars=True)
        shared |= {name: t.detach().clone() for name, t in own.items() if name not in weights}
    parameters = dict(copy.module.named_parameters(remove_duplicate=False))
    copy.load(
        {n: t for n, t in shared.items() if n in parameters} | {n: t.clone() for n, t in weights.items()}
    )
    return copy.module
