"""Every convolution of the usual networks: Σᵢgᵢ and Σᵢgᵢ² together, against torch's own Σᵢgᵢ alone.

    python -m benchmarks.kernels [--threads 2] [--rounds 15] [--only alexnet]

A ratio is the median over rounds of (ours / torch's), the two timed one after the other; under 1 is faster than torch.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from credo.kernels import forced, status
from credo.kernels.convolution import weight_sums


class Layer(NamedTuple):
    """A convolution of square images with a square kernel."""

    name: str
    examples: int
    channels: int
    size: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1


LAYERS = [
    Layer("lenet conv1", 128, 3, 32, 6, 5),
    Layer("lenet conv2", 128, 6, 14, 16, 5),
    Layer("alexnet conv1", 128, 3, 32, 64, 11, 4, 5),
    Layer("alexnet conv2", 128, 64, 4, 192, 5, 1, 2),
    Layer("alexnet conv3", 128, 192, 2, 384, 3, 1, 1),
    Layer("alexnet conv4", 128, 384, 2, 256, 3, 1, 1),
    Layer("alexnet conv5", 128, 256, 2, 256, 3, 1, 1),
    *(
        layer
        for width, examples in ((16, 128), (64, 32))
        for layer in (
            Layer(f"resnet{width} stem", examples, 3, 32, width, 3, 1, 1),
            Layer(f"resnet{width} 32x32", examples, width, 32, width, 3, 1, 1),
            Layer(f"resnet{width} 32x32 /2", examples, width, 32, 2 * width, 3, 2, 1),
            Layer(f"resnet{width} 32x32 1x1 /2", examples, width, 32, 2 * width, 1, 2),
            Layer(f"resnet{width} 16x16", examples, 2 * width, 16, 2 * width, 3, 1, 1),
            Layer(f"resnet{width} 16x16 /2", examples, 2 * width, 16, 4 * width, 3, 2, 1),
            Layer(f"resnet{width} 16x16 1x1 /2", examples, 2 * width, 16, 4 * width, 1, 2),
            Layer(f"resnet{width} 8x8", examples, 4 * width, 8, 4 * width, 3, 1, 1),
            Layer(f"resnet{width} 8x8 /2", examples, 4 * width, 8, 8 * width, 3, 2, 1),
            Layer(f"resnet{width} 8x8 1x1 /2", examples, 4 * width, 8, 8 * width, 1, 2),
            Layer(f"resnet{width} 4x4", examples, 8 * width, 4, 8 * width, 3, 1, 1),
        )
    ),
    Layer("depthwise 3x3", 32, 128, 16, 128, 3, 1, 1, 128),
    Layer("resnext 3x3, 32 groups", 32, 128, 16, 128, 3, 1, 1, 32),
]


def tensors(layer: Layer, memory_format: torch.memory_format) -> tuple[Tensor, Tensor, Tensor]:
    """x, g and a weight of the layer."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(layer.examples, layer.channels, layer.size, layer.size, generator=generator)
    weight = torch.randn(
        layer.outputs, layer.channels // layer.groups, layer.kernel, layer.kernel, generator=generator
    )
    x, weight = (t.contiguous(memory_format=memory_format) for t in (x, weight))
    out = torch.conv2d(x, weight, None, layer.stride, layer.padding, 1, layer.groups)
    g = torch.randn(out.shape, generator=generator).contiguous(memory_format=memory_format)
    return x, g, weight


def contenders(layer: Layer, x: Tensor, g: Tensor, weight: Tensor) -> list[Callable[[], object]]:
    """torch's weight gradient, the C++ kernel, the reference."""
    kernel, stride, padding, one = ([v] * 2 for v in (layer.kernel, layer.stride, layer.padding, 1))

    def aten() -> object:
        return torch.ops.aten.convolution_backward(
            g, x, weight, None, stride, padding, one, False, [0, 0], layer.groups, [False, True, False]
        )

    def ours() -> object:
        return weight_sums(x, g, kernel, stride, padding, one, layer.groups)

    def reference() -> object:
        with forced("off"):
            return ours()

    return [aten, ours, reference]


def measure(functions: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Milliseconds of each, round by round, interleaved; the first rounds warm up and do not count."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 3):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append((time.perf_counter() - start) * 1e3)
    return [own[3:] for own in times]


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of paired ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of the layers' names")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(status())
    print(f"{'':28}{'contiguous':^33}{'channels_last':^33}")
    print(f"{'layer':28}" + f"{'torch/ms':>9}{'min/ms':>8}{'kernel':>8}{'plain':>8}" * 2)
    for layer in (layer for layer in LAYERS if arguments.only in layer.name):
        line = f"{layer.name:28}"
        for memory_format in (torch.contiguous_format, torch.channels_last):
            aten, ours, reference = measure(
                contenders(layer, *tensors(layer, memory_format)), arguments.rounds
            )
            line += f"{min(aten):9.3f}{min(ours):8.3f}{ratio(ours, aten):8.2f}{ratio(reference, aten):8.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
