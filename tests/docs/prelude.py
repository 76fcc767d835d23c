"""What the pages take for granted: a trained classifier, its data, and the usual imports."""

import os
import socket
from typing import Any

import torch
import torch.nn.functional as F

import credo


def prelude(page: str) -> dict[str, Any]:
    """Names a page may use without defining them; the same everywhere, and small."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 20, generator=generator), torch.randint(0, 3, (120,), generator=generator)

    def build_model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    model = build_model()
    optimizer = credo.VOGN(model, data_size=100)
    train_set = torch.utils.data.TensorDataset(x[:100], y[:100])
    train_loader = torch.utils.data.DataLoader(train_set, batch_size=25)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    posterior = optimizer.posterior()
    names = {
        "torch": torch,
        "F": F,
        "credo": credo,
        "build_model": build_model,
        "model": model,
        "optimizer": optimizer,
        "posterior": posterior,
        "closure": closure,
        "loader": train_loader,
        "prediction": credo.predict(model, posterior, x[:100]),
        "x": x[:100],
        "y": y[:100],
        "x_validation": x[100:],
        "y_validation": y[100:],
        "x_test": x[100:],
        "y_test": y[100:],
        "train_set": train_set,
        "train_loader": train_loader,
        "validation_loader": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x[100:], y[100:]), batch_size=20
        ),
        "N": 100,
        "examples": credo.data.Examples(x[:100], y[:100]),
        "own_part": credo.predict(model, posterior, x[:100]),
        "own_targets": y[:100],
        "yesterday": posterior,
        "today": train_set,
    }
    return names | EXTRA.get(page, dict)()


def _swag() -> dict[str, Any]:
    return {"epochs": 6, "start": 1, "train_one_epoch": lambda model, optimizer: None}


def _library() -> dict[str, Any]:
    """`torch.ops.mylib.scale(x, w) = x * w`, an operation that credo does not know."""
    if not hasattr(torch.ops.mylib, "scale"):
        LIBRARY.define("scale(Tensor x, Tensor w) -> Tensor")
        LIBRARY.impl("scale", lambda x, w: x * w, "CompositeExplicitAutograd")
    return {}


def _one_rank() -> dict[str, Any]:
    """What torchrun sets, for one process; the test leaves the group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return {}


LIBRARY = torch.library.Library("mylib", "DEF")
EXTRA = {
    "docs/baselines.md": _swag,
    "docs/engine.md": _library,
    "docs/how-to/layer_rule.md": _library,
    "docs/distributed.md": _one_rank,
}
