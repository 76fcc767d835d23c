"""Many processes that one cannot be told from: who takes part, what they must agree on, what they add up.

An optimiser that is built after `torch.distributed.init_process_group` finds its world by itself.
"""

from credo.distributed.sharing_data import average_buffers, data_share
from credo.distributed.world import ALONE, World, agree, world

__all__ = ["ALONE", "World", "agree", "average_buffers", "data_share", "world"]
