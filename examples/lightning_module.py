"""An unmodified LightningModule, trained with VOGN by returning it from `configure_optimizers`.

    pip install lightning; python -m examples.lightning_module

Lightning hands its training step to the optimiser as a closure, which is all that VOGN needs.
"""

import warnings

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo


class Digits(lightning.LightningModule):
    def __init__(self, data_size: int):
        super().__init__()
        self.data_size = data_size
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return credo.VOGN(self, data_size=self.data_size, mc_samples=2)


def main(epochs: int = 10) -> float:
    warnings.filterwarnings("ignore", module="lightning")
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    lightning.seed_everything(0, verbose=False)
    module = Digits(data_size=1500)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=32, shuffle=True))
    posterior = trainer.optimizers[0].posterior()
    prediction = credo.predict(module, posterior, x[1500:], samples=20)
    scores = credo.evaluate(prediction, y[1500:])
    print(f"accuracy {scores['accuracy']:.3f}, NLL {scores['nll']:.3f}, ECE {scores['ece']:.3f}")
    return scores["accuracy"]


if __name__ == "__main__":
    main()
