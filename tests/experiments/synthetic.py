"""Run folders as training leaves them, with numbers that are made up and look like the paper's."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from credo.experiments.checkpoint import write_signed
from credo.experiments.results import Result, entry, load_result
from credo.experiments.run_folder import finite, to_json
from credo.experiments.tasks import Classification

# Logits are `sharpness` times those of a calibrated model: above 1 is over-confident, below 1 under-confident.
SHARPNESS = {"adam": 2.2, "mc-dropout": 0.6, "vogn": 1.05, "sgd": 1.9, "ogn": 2.4, "bbb": 0.8}
METHOD = {"mc-dropout": "mc_dropout", "noisy-kfac": "noisy_kfac"}


def write_run(
    folder: Path,
    row: str = "vogn",
    *,
    recipe: str = "table1-lenet5",
    size: str = "cpu",
    seed: int = 0,
    metrics: Mapping[str, float] | None = None,
    training: Mapping[str, Any] | None = None,
    ood: tuple[str, ...] = (),
    examples: int = 400,
    epochs: int = 10,
    classes: int = 10,
) -> Result:
    """A finished run; its scores follow from its made-up predictions, unless `metrics` says otherwise."""
    place = folder / recipe / size / row / f"seed-{seed}"
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed + 17 * len(row))
    sharpness = SHARPNESS.get(row, 1.2)
    test = prediction(examples, classes, sharpness, 2.5, generator)
    unfamiliar = {name: prediction(examples, classes, sharpness, 1.2, generator) for name in ood}
    named = {f"test.{key}": value for key, value in test.items()}
    for name, found in unfamiliar.items():
        named |= {f"ood.{name}.{key}": value for key, value in found.items()}
    path = place / "predictions.safetensors"
    path.write_bytes(safetensors.torch.save(named))
    log = log_rows(row, epochs, seed)
    result = {
        "format": 1,
        "metrics": {**scores(test, unfamiliar, log), **(metrics or {})},
        "curve": Classification().curve(test, test["targets"]),
        "inputs": {},
        "files": {path.name: entry(path)},
    }
    config = {
        "name": {"recipe": recipe, "row": row, "size": size},
        "training": {**usual(row, epochs), **(training or {})},
        "seed": seed,
    }
    (place / "config.json").write_text(to_json(config))
    (place / "log.jsonl").write_text("".join(f"{to_json(line)}\n" for line in log))
    write_signed(place / "result.json", finite(result))
    return load_result(place)


def usual(row: str, epochs: int) -> dict[str, Any]:
    return {
        "method": METHOD.get(row, row),
        "model": "lenet5",
        "data": "cifar10",
        "settings": {"lr": 1e-3},
        "model_options": {},
        "epochs": epochs,
        "batch_size": 128,
    }


def prediction(
    n: int, classes: int, sharpness: float, signal: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Targets drawn from the calibrated probabilities, and the probabilities of a model that is off by `sharpness`."""
    logits = signal * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    probs = (sharpness * logits).softmax(1)
    entropy = -(probs * probs.clamp_min(1e-300).log()).sum(1)
    return {"probs": probs, "entropy": entropy, "mutual_information": entropy / 10, "targets": targets}


def scores(
    test: Mapping[str, Tensor], unfamiliar: Mapping[str, dict[str, Tensor]], log: list[dict[str, Any]]
) -> dict[str, float]:
    task = Classification()
    found = {"train_accuracy": log[-1]["train_accuracy"], "train_nll": log[-1]["train_nll"]}
    found |= task.scores(dict(test), test["targets"])
    for name, other in unfamiliar.items():
        found |= {f"{key}.{name}": value for key, value in task.ood_scores(dict(test), other).items()}
    return {**found, "epochs": len(log), "seconds_per_epoch": log[-1]["seconds"], "refused": 0}


def log_rows(row: str, epochs: int, seed: int) -> list[dict[str, Any]]:
    """Accuracy that rises and levels off; Adam's NLL turns up again, as it does when it overfits."""
    overfit = 0.02 if row in ("adam", "sgd") else 0.003
    pace = {"adam": 5.6, "mc-dropout": 5.9, "vogn": 6.1}.get(row, 6.0)
    rows = []
    for epoch in range(1, epochs + 1):
        reached = 1 - math.exp(-epoch / 4)
        wiggle = 0.008 * math.sin(5 * epoch + 3 * seed + len(row))
        rows.append(
            {
                "epoch": epoch,
                "lr": 1e-3,
                "tempering": 1.0 if row == "vogn" else None,
                "train_accuracy": 0.35 + (0.33 + 4 * overfit) * reached,
                "train_nll": 1.7 - (0.75 + 5 * overfit) * reached,
                "accuracy": 0.37 + 0.26 * reached + wiggle,
                "nll": 1.7 - 0.65 * reached + overfit * epoch**1.3 / 4 + wiggle,
                "ece": 0.03 + overfit * epoch / 5,
                "auroc": 0.75 + 0.04 * reached,
                "refused": 0,
                "seconds": pace + 0.1 * seed,
            }
        )
    return rows
