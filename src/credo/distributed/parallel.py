"""Models inside `DistributedDataParallel`: the optimiser works on the inner module, and adds up the ranks itself.

The wrapper would average gradients of ranks as if all had the same number of examples, and an optimiser that adds them
up by counts would do it once more. So the wrapper's own messages are turned off, gradients and buffers alike; what is
left of it is a module that calls the inner one.
"""

from typing import Any

from torch import nn
from torch.distributed import get_world_size

from credo.distributed.world import world
from credo.errors import UnsupportedOperation


def inner_module(given: Any) -> Any:
    """What was given, without the wrapper; its messages are off from here on."""
    if not isinstance(given, nn.parallel.DistributedDataParallel):
        return given
    size, ranks = get_world_size(given.process_group), world().size
    reasons = {
        "static_graph=True": given.static_graph,
        "mixed_precision": given.mixed_precision is not None,
        f"a process_group of {size} of {ranks} ranks": size != ranks,
    }
    for what, present in reasons.items():
        if present:
            raise UnsupportedOperation(
                f"the model is wrapped in DistributedDataParallel with {what}. Leave it out; or train the inner "
                "module, model.module: the optimiser adds up the ranks by itself."
            )
    given.require_backward_grad_sync = given.require_forward_param_sync = False
    given.find_unused_parameters = False
    return given.module
