"""The code blocks of docs/integrations.md, each with what its section takes for granted."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from tests.docs import pages

PAGE = pages.DOCS / "integrations.md"
Names = dict[str, Any]
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trainers seed the global generator."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield
    if "accelerate.state" in sys.modules:
        forget_accelerate()


def forget_accelerate() -> None:
    """A number of micro-batches is remembered by the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def for_scikit_learn() -> Names:
    pytest.importorskip("sklearn", reason="extra: sklearn")
    x = X.double().numpy()
    return {"x": x, "y": x[:, 0] + 0.1 * x[:, 1], "x_new": x[:5]}


def for_transformers() -> Names:
    pytest.importorskip("accelerate", reason="extra: hf")
    transformers = pytest.importorskip("transformers", reason="extra: hf")
    from tests.integrations.tiny import gpt2, sequences

    model = gpt2()
    data = sequences(16, model)
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "num_train_epochs": 1}
    arguments = transformers.TrainingArguments("out", **options)
    return {"model": model, "data": data, "arguments": arguments, "batches": DataLoader(data, batch_size=8)}


def for_accelerate() -> Names:
    pytest.importorskip("accelerate", reason="extra: hf")
    forget_accelerate()
    return {"model": network(), "n": 48, "loader": DataLoader(TensorDataset(X, Y), batch_size=8)}


def for_lightning() -> Names:
    lightning = pytest.importorskip("lightning", reason="extra: lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return credo.VOGN(self, data_size=48)

    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    return {"lightning": lightning, "module": Module(), "loader": loader, "x": X, "y": Y}


def for_skorch() -> Names:
    pytest.importorskip("skorch", reason="extra: skorch")

    class MyModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

    return {"MyModule": MyModule, "x": X.numpy(), "y": Y.numpy(), "x_new": X[:5].numpy()}


def for_export() -> Names:
    pytest.importorskip("onnxscript", reason="extra: onnx")
    model = network()
    optimizer = credo.VOGN(model, data_size=48)
    optimizer.step(lambda: F.cross_entropy(model(X), Y))
    return {"model": model, "posterior": optimizer.posterior(), "x": X}


def after_scikit_learn(names: Names) -> None:
    assert np.all(names["std"] > 0)
    assert Path("model.safetensors").exists()


def after_transformers(names: Names) -> None:
    assert names["prediction"].probs.shape == (16, 8, 30)


def after_accelerate(names: Names) -> None:
    assert names["optimizer"].counters["step"] == 2  # 6 micro-batches: 4 and 2


def after_lightning(names: Names) -> None:
    assert "posterior/nll" in names["trainer"].callback_metrics


def after_skorch(names: Names) -> None:
    assert names["net"].predict_proba(X.numpy()).shape == (48, 2)


def after_export(names: Names) -> None:
    expected = credo.predict(names["model"], names["posterior"], X, samples=10).probs
    torch.testing.assert_close(names["program"].module()(X)[0], expected)
    assert Path("model.onnx").exists()


SECTIONS: list[tuple[Callable[[], Names], Callable[[Names], None]]] = [
    (for_scikit_learn, after_scikit_learn),
    (for_transformers, after_transformers),
    (for_accelerate, after_accelerate),
    (for_lightning, after_lightning),
    (for_skorch, after_skorch),
    (for_export, after_export),
]
BLOCKS = [block for block in pages.blocks(PAGE.read_text()) if block.language == "python"]


@pytest.mark.parametrize("number", range(len(SECTIONS)), ids=[make.__name__ for make, _ in SECTIONS])
@pytest.mark.filterwarnings("ignore")
def test_block(number: int) -> None:
    make, after = SECTIONS[number]
    names = {"torch": torch, "F": F, "nn": nn, "credo": credo} | make()
    block = BLOCKS[number]
    exec(compile("\n" * block.line + block.code, str(PAGE), "exec"), names)
    after(names)


def test_every_block_has_its_section() -> None:
    assert len(BLOCKS) == len(SECTIONS)
