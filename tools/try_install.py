"""Run in a clean environment after an installation: trains, predicts, saves, loads, and looks at the kernels."""

import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import credo

wanted = os.environ["CREDO_WANTED"] == "on"
status = credo.kernels.status()
assert status.enabled == wanted, status
assert "site-packages" in credo.__file__, credo.__file__

torch.manual_seed(0)
x, y = torch.randn(200, 3, 8, 8), torch.randint(0, 3, (200,))
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3),
    torch.nn.BatchNorm2d(4),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(144, 3),
)
optimizer = credo.VOGN(model, data_size=200)
losses = [float(optimizer.step(lambda: F.cross_entropy(model(x), y, reduction="none"))) for _ in range(30)]
assert losses[-1] < losses[0], losses
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "q.safetensors")
    optimizer.posterior().save(path)
    prediction = credo.predict(model, credo.load_posterior(path), x)
assert credo.evaluate(prediction, y)["accuracy"] > 0.4
print(f"credo {credo.__version__} from {Path(credo.__file__).parent}: {status}")
