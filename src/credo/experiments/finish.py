"""The files of a finished run. result.json comes last and carries the digests of the others."""

from dataclasses import asdict
from statistics import median
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from credo.experiments.evaluation import Evaluator
from credo.experiments.examples import RunData
from credo.experiments.log import finite
from credo.experiments.manifest import digest, write_signed
from credo.experiments.recipe import Training
from credo.experiments.run_folder import RunFolder
from credo.experiments.state import RunState
from credo.posterior import DiagonalPosterior, Posterior
from credo.posterior.base import persistent_buffers
from credo.posterior.files import write_atomically

FORMAT_VERSION = 1
Prediction = dict[str, Tensor]


def write_result(
    folder: RunFolder,
    data: RunData,
    state: RunState,
    posterior: Posterior,
    evaluator: Evaluator,
    test: Prediction,
    validation: Prediction | None,
    unfamiliar: dict[str, Prediction],
) -> None:
    posterior.save(folder.posterior)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in state.model.state_dict().items()}
    write_atomically(folder.model, safetensors.torch.save(weights))
    write_atomically(
        folder.predictions, safetensors.torch.save(named_predictions(test, validation, unfamiliar))
    )
    result = {
        "format": FORMAT_VERSION,
        "metrics": final_metrics(state, evaluator, test, unfamiliar),
        "curve": evaluator.curve(test),
        "inputs": inputs_of(data),
        "files": {
            path.name: entry(path)
            for path in (folder.posterior, folder.model, folder.predictions, folder.log)
        },
    }
    write_signed(folder.result, finite(result))


def final_metrics(
    state: RunState, evaluator: Evaluator, test: Prediction, unfamiliar: dict[str, Prediction]
) -> dict[str, float]:
    """The last line of the log, how unfamiliar data were told apart, and the median time of an epoch."""
    last = {
        name: value
        for name, value in state.log[-1].items()
        if name not in ("epoch", "seconds", "tempering", "lr")
    }
    return {
        **last,
        **evaluator.ood_scores(test, unfamiliar),
        "epochs": state.epoch,
        "steps": state.step,
        "seconds_per_epoch": median(row["seconds"] for row in state.log),
    }


def named_predictions(
    test: Prediction, validation: Prediction | None, unfamiliar: dict[str, Prediction]
) -> dict[str, Tensor]:
    named = {f"test.{key}": tensor for key, tensor in test.items()}
    named |= {f"validation.{key}": tensor for key, tensor in (validation or {}).items()}
    for name, prediction in unfamiliar.items():
        named |= {f"ood.{name}.{key}": tensor for key, tensor in prediction.items()}
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def belief(training: Training, state: RunState) -> Posterior:
    """A point (also that of MC-dropout, whose masks are in the model) is a posterior without variance."""
    found = state.learner.posterior()
    if isinstance(found, Posterior):
        return found
    certain = DiagonalPosterior(parameters_of(state.model), {}, {"method": training.method})
    return certain.with_buffers({name: b.cpu() for name, b in persistent_buffers(state.model).items()})


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def inputs_of(data: RunData) -> dict[str, Any]:
    """What it takes to use the model on further inputs."""
    return {
        "shape": data.shape,
        "outputs": data.outputs,
        "classes": data.classes,
        "normalise": asdict(data.normalise),
        "target_mean": data.target_mean,
        "target_std": data.target_std,
    }


def entry(path: Any) -> dict[str, Any]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": digest(content)}
