"""BatchNorm statistics of weights that were never trained with: an average's, or a sample's."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from credo.errors import InvalidValue
from credo.posterior.model_copy import device_of, undisturbed
from credo.predict.inputs import Reader


def refresh_batch_norm(model: nn.Module, loader: Iterable[Any]) -> int:
    """Running means and variances of the model's own weights, averaged over the batches of the loader.

    One pass without gradients, BatchNorm in training mode and all else in eval mode; afterwards modes, momenta and the
    global random streams are as before. Batches are as `credo.predict` takes them. Returns how many layers there were;
    without any, the loader is not read.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return 0
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    device, seen = device_of(model), 0
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain average over batches
            layer.training = True
        with undisturbed(0, device):
            for batch in Reader(model).batches(loader):
                batch.call(model)
                seen += 1
    except BaseException:
        model.load_state_dict(kept)
        raise
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, mode in modes:
            module.training = mode
    if not seen:
        model.load_state_dict(kept)
        raise InvalidValue("loader yielded no batch; an exhausted iterator must be made again")
    with torch.no_grad():
        for layer in layers:
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.fill_(seen)
    return len(layers)
