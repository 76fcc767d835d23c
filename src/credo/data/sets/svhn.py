"""Street View House Numbers, cropped digits: train_32x32.mat and test_32x32.mat; either alone will do."""

import torch

from credo.data.examples import Examples, Splits
from credo.data.folder import Folder
from credo.data.formats.mat import parse_svhn
from credo.data.normalise import Normalise

NORMALISE = Normalise((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))


def read_svhn(folder: Folder) -> Splits:
    halves = {half: f"{half}_32x32.mat" for half in ("train", "test")}
    there = [half for half, name in halves.items() if folder.has(name)] or ["test"]
    read = {}
    for half in there:
        images, labels = parse_svhn(folder.read(halves[half]), folder.where(halves[half]))
        read[half] = Examples(torch.from_numpy(images), torch.from_numpy(labels))
    none = next(iter(read.values())).subset([])
    return Splits("svhn", read.get("train", none), read.get("test", none), tuple("0123456789"), NORMALISE)
