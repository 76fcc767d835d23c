"""Windows out of padded images of bytes: what augmentation does to every image of every epoch."""

from ctypes import c_int64

import torch
from torch import Tensor

from credo.kernels.native import integers, kernel, pointer


def windows(images: Tensor, draws: Tensor, height: int, width: int, pad: int) -> Tensor | None:
    """Windows (n, C, height, width) of uint8 images padded with zeros; None where there is no kernel for them.

    draws: (n, 3) whole numbers: top and left in the padded image, and whether it is mirrored (before it is cut).
    """
    function = kernel("windows") if images.is_cpu and images.dtype == torch.uint8 and images.numel() else None
    if function is None:
        return None
    images, draws = images.contiguous(), draws.to("cpu", torch.int64).contiguous()
    out = images.new_empty((*images.shape[:2], height, width))
    sizes, threads = integers(*images.shape, height, width, pad), c_int64(torch.get_num_threads())
    function(pointer(images), pointer(draws), sizes, pointer(out), threads)
    return out
