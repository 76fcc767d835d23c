"""Finished runs: metrics and log at hand, arrays and models read when asked for, every byte verified."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from credo.data.examples import Normalise
from credo.data.sets.digits import NORMALISE as DIGITS
from credo.errors import InvalidValue
from credo.experiments.build import RunData, build_model
from credo.experiments.checkpoint import digest, read_signed, verified_bytes, write_signed
from credo.experiments.recipe import Training
from credo.experiments.run_folder import LogRow, RunFolder, finite, read_log
from credo.experiments.state import RunState
from credo.experiments.tasks import Evaluator, Predicted
from credo.posterior.base import Posterior, persistent_buffers
from credo.posterior.diagonal import DiagonalPosterior
from credo.posterior.files import load_posterior, write_atomically
from credo.predict import DropoutPosterior, Ensemble
from credo.predict.functions import AnyPosterior


@dataclass(frozen=True)
class Result:
    """One finished run. `metrics` holds numbers only; what is undefined is NaN."""

    recipe: str
    row: str
    size: str
    seed: int
    training: Mapping[str, Any]  # as config.json has it
    metrics: Mapping[str, float]
    log: tuple[LogRow, ...]
    folder: Path
    members: tuple[Path, ...] = ()  # of an ensemble: the folders of its runs

    @property
    def facts(self) -> dict[str, Any]:
        """All of result.json: also `curve` (calibration), `inputs` (shape, classes, normalisation), `files`.

        Of course.json for a stream of tasks: `matrix`, the score on each task after each, and `average_accuracies`.
        """
        place = RunFolder(self.folder)
        return read_signed(place.stream_result if self.is_stream else place.result)

    @property
    def is_stream(self) -> bool:
        """Whether it learned a stream of tasks; of such a run there are scores alone."""
        return "tasks" in self.training

    def predictions(self) -> dict[str, Tensor]:
        """test.probs, test.targets, test.entropy, …; ood.<name>.probs, … for each unfamiliar set."""
        return self._tensors("predictions.safetensors")

    def weights(self) -> dict[str, Tensor]:
        """The model's parameters and buffers by name, as `state_dict` has them."""
        return self._tensors("model.safetensors")

    def normalise(self) -> Normalise:
        stored = self.facts["inputs"]["normalise"]
        if "white" not in stored and self.training["data"] == "digits":  # runs of old took them for 0..255
            return DIGITS
        mean, std = tuple(stored["mean"]), tuple(stored["std"])
        return Normalise(mean, std, stored["crop"], stored.get("white", 255))

    def model(self, factory: Any = None) -> nn.Module:
        """The trained network, its weights the mean; `factory` where the recipe's model was a function of yours."""
        if self.members:
            return load_result(self.members[0]).model(factory)  # the others are in `belief`
        inputs = self.facts["inputs"]
        fields = {**self.training, "model": factory or self.training["model"]}
        if factory is None and "." in fields["model"]:
            raise InvalidValue(
                f"the model of {self.folder} was made by {fields['model']}: pass that function as factory."
            )
        model = build_model(Training(**fields), tuple(inputs["shape"]), inputs["outputs"])
        model.load_state_dict(self.weights())
        return model.eval()

    def belief(self, model: nn.Module, factory: Any = None) -> AnyPosterior:
        """What `credo.predict` averages over; `factory` as for `model`, of which an ensemble needs more."""
        if self.members:
            found = [load_result(member) for member in self.members]
            models = [member.model(factory) for member in found]
            return Ensemble([(m, one.belief(m)) for m, one in zip(models, found, strict=True)])
        if self.training["method"] == "mc_dropout":
            return DropoutPosterior(model)
        posterior: Posterior = load_posterior(RunFolder(self.folder).posterior)
        return "mean" if len(posterior.deterministic) == len(posterior.mean) else posterior

    def _tensors(self, name: str) -> dict[str, Tensor]:
        entry = {name: self.facts["files"][name]}
        return safetensors.torch.load(verified_bytes(self.folder, entry)[name])


def load_result(folder: str | PathLike[str]) -> Result:
    """The result in a run folder; an error unless the run has finished."""
    place = RunFolder(folder)
    if not place.finished:
        raise InvalidValue(f"{place.path} holds no finished run: there is no {place.result.name}.")
    if place.stream_result.exists():
        return _load_stream(place)
    stored, config = read_signed(place.result), place.read_config()
    name, files = config["name"], stored["files"]
    verified_bytes(place.path, {place.log.name: files[place.log.name]} if place.log.name in files else {})
    return Result(
        recipe=name["recipe"],
        row=name["row"] or place.path.name,
        size=name["size"],
        seed=config["seed"],
        training=config["training"],
        metrics={key: math.nan if value is None else value for key, value in stored["metrics"].items()},
        log=tuple(read_log(place.log)),
        folder=place.path,
        members=tuple(place.path / member for member in config.get("members", [])),
    )


def _load_stream(place: RunFolder) -> Result:
    stored = read_signed(place.stream_result)
    scores = {
        name: stored[name] for name in ("average_accuracy", "forgetting", "backward_transfer", "seconds")
    }
    return Result(
        **{name: stored[name] for name in ("recipe", "row", "size", "seed")},
        training={**stored["training"], "tasks": stored["tasks"]},
        metrics={**scores, "epochs_per_task": stored["training"]["epochs"]},
        log=(),
        folder=place.path,
    )


def load_results(out: str | PathLike[str]) -> list[Result]:
    """Every finished run below a folder, in the order of its path; runs under way are left out."""
    found = [path.parent for name in ("result.json", "course.json") for path in Path(out).rglob(name)]
    return [load_result(folder) for folder in sorted(found)]


# The files of a finished run. result.json comes last and carries the digests of the others.

FORMAT_VERSION = 1


def write_result(
    folder: RunFolder,
    data: RunData,
    state: RunState,
    posterior: Posterior,
    evaluator: Evaluator,
    test: Predicted,
    validation: Predicted | None,
    unfamiliar: dict[str, Predicted],
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
    state: RunState, evaluator: Evaluator, test: Predicted, unfamiliar: dict[str, Predicted]
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
    test: Predicted, validation: Predicted | None, unfamiliar: dict[str, Predicted]
) -> dict[str, Tensor]:
    named = {f"test.{key}": tensor for key, tensor in test.items()}
    named |= {f"validation.{key}": tensor for key, tensor in (validation or {}).items()}
    for name, prediction in unfamiliar.items():
        named |= {f"ood.{name}.{key}": tensor for key, tensor in prediction.items()}
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


def final_posterior(training: Training, state: RunState) -> Posterior:
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
