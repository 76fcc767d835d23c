"""Which part of the data a rank reads, and what its normalisation layers have seen."""

import torch
from torch import nn

from credo.distributed.world import World, world
from credo.errors import InvalidValue


def data_share(mc_groups: int | None = None, *, among: World | None = None) -> tuple[int, int]:
    """(which share, of how many) this rank reads: `Batches(..., rank=share, world=shares)`.

    Without groups every rank has a share of its own: data-parallel. With `mc_groups` = G the ranks form G groups; those
    of one group read the same share, and differ in the weights they sample: parallel over Monte-Carlo samples.
    The optimiser weighs by example counts either way, and needs not be told.
    """
    ranks = among or world()
    groups = ranks.size if mc_groups is None else mc_groups
    if not isinstance(groups, int) or groups < 1 or ranks.size % groups:
        raise InvalidValue(
            f"mc_groups must be a whole number that divides the {ranks.size} ranks, got {mc_groups!r}."
        )
    return ranks.rank // (ranks.size // groups), groups


@torch.no_grad()
def average_buffers(module: nn.Module) -> None:
    """Running means and variances of normalisation layers, averaged over the ranks; whole numbers are rank 0's.

    Each rank's layers see its own share of every batch (the paper's way), so their statistics drift apart a little.
    Before a checkpoint or an evaluation they should be one. All ranks must call this.
    """
    ranks = world()
    if ranks.alone:
        return
    floating = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    ranks.broadcast_([buffer for buffer in module.buffers() if not buffer.is_floating_point()])
    if floating:
        flat = torch.cat([buffer.reshape(-1).double() for buffer in floating])
        ranks.add_(flat)
        parts = torch.split(flat / ranks.size, [buffer.numel() for buffer in floating])
        for buffer, part in zip(floating, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
