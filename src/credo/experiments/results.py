"""Finished runs: metrics and log at hand, arrays and models read when asked for, every byte verified."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from credo.data.examples import Normalise
from credo.data.sets.digits import NORMALISE as DIGITS
from credo.errors import InvalidValue
from credo.experiments.log import LogRow, read_log
from credo.experiments.manifest import read_signed, verified_bytes
from credo.experiments.methods import method_of
from credo.experiments.networks import build_model
from credo.experiments.recipe import Training
from credo.experiments.run_folder import RunFolder
from credo.posterior.base import Posterior
from credo.posterior.files import load_posterior
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
        """All of result.json: also `curve` (calibration), `inputs` (shape, classes, normalisation), `files`."""
        return read_signed(RunFolder(self.folder).result)

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


def load_results(out: str | PathLike[str]) -> list[Result]:
    """Every finished run below a folder, in the order of its path; runs under way are left out."""
    return [load_result(path.parent) for path in sorted(Path(out).rglob("result.json"))]


def title_of(result: Result) -> str:
    return method_of(result.training["method"]).title
