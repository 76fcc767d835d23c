"""Under torchrun with two processes: Lightning's loop beside a plain one over each rank's own part of the data."""

import os
import warnings
from collections.abc import Iterator

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from credo.integrations.lightning import PosteriorCallback
from tests.integrations.test_loops import X, Y, lightning_module, network, optimizer_of

EPOCHS, OWN = 2, 4  # examples of a rank in an update


class InTurn(Sampler[int]):
    """Every second example, by rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(torch.distributed.get_rank(), len(X), 2))

    def __len__(self) -> int:
        return len(X) // 2


def with_lightning(manual: bool, parts: int) -> torch.Tensor:
    module = lightning_module(lightning, manual)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,  # which would shuffle
        accumulate_grad_batches=parts,
        callbacks=[PosteriorCallback()],
        enable_model_summary=False,
        **options,
    )
    data = TensorDataset(X, Y)
    trainer.fit(module, DataLoader(data, batch_size=OWN // parts, sampler=InTurn()))
    return torch.cat([p.detach().flatten() for p in module.net.parameters()])


def plain() -> torch.Tensor:
    model = network()
    optimizer = optimizer_of(model)
    data = TensorDataset(X, Y)
    loader = DataLoader(data, batch_size=OWN, sampler=InTurn())
    for _ in range(EPOCHS):
        for x, y in loader:
            with optimizer.sampled():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    """Prints the largest difference of each loop, by rank."""
    warnings.simplefilter("ignore")
    for manual, parts in ((False, 1), (False, 2), (True, 1)):
        found = with_lightning(manual, parts)  # which joins the processes
        line = f"difference {torch.distributed.get_rank()} {float((found - plain()).abs().max())}\n"
        os.write(1, line.encode())  # in one piece: the ranks share the pipe
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
