"""Many processes that one cannot be told from: who takes part, what they must agree on, what they add up."""

from credo.distributed.world import ALONE, World, agree, world

__all__ = ["ALONE", "World", "agree", "world"]
