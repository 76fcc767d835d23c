"""Many processes that one cannot be told from: who takes part, what they must agree on, what they add up.

An optimiser that is built after `torch.distributed.init_process_group` finds its world by itself.
"""

from credo.distributed.averaging import SharedGradients
from credo.distributed.collect import gather
from credo.distributed.outcomes import outcome_of_all, outcome_of_first
from credo.distributed.sharing_data import average_buffers, data_share
from credo.distributed.world import ALONE, World, agree, world, world_asked_for

__all__ = [
    "ALONE",
    "SharedGradients",
    "World",
    "agree",
    "average_buffers",
    "data_share",
    "gather",
    "outcome_of_all",
    "outcome_of_first",
    "world",
    "world_asked_for",
]
