"""VOGN on a model whose parameters are divided among processes by FSDP2.

    torchrun --nproc-per-node 2 examples/fully_sharded.py

It trains on the processor, with gloo; on GPUs it is "nccl" and `model.cuda(rank)`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import credo

EXAMPLES, FEATURES, CLASSES = 512, 16, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)  # all ranks begin with the same weights
    return nn.Sequential(
        nn.Linear(FEATURES, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, CLASSES)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def main(epochs: int = 20) -> torch.Tensor:
    x, y = data()
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = credo.VOGN(model, data_size=EXAMPLES)
    share, shares = credo.distributed.data_share()
    batches = credo.data.Batches(credo.data.Examples(x, y), 64, shuffle=True, rank=share, world=shares)
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.step(
                lambda inputs=inputs, targets=targets: F.cross_entropy(
                    model(inputs), targets, reduction="none"
                )
            )
    posterior = optimizer.posterior()  # whole, and all ranks must ask
    prediction = credo.predict(network(), posterior, x, distributed=True)
    if dist.get_rank() == 0:
        right = float((prediction.probs.argmax(1) == y).float().mean())
        weights = sum(mean.numel() for mean in posterior.mean.values())
        print(f"{shares} ranks, {weights} weights, {100 * right:.1f} % of the training examples")
    return prediction.probs


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
