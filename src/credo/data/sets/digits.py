"""scikit-learn's 1,797 handwritten digits of 8×8: no download, in memory in a moment."""

import torch

from credo.data.examples import Examples, Normalise, Splits
from credo.errors import UnsupportedOperation

TEST_SIZE = 360
SHUFFLE_SEED = 0
NORMALISE = Normalise((4.884 / 16,), (6.017 / 16,), white=16)  # pixels are whole numbers from 0 to 16


def read_digits() -> Splits:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedOperation("the digits come with scikit-learn: pip install scikit-learn") from error
    raw = load_digits()
    images = torch.from_numpy(raw.images).to(torch.uint8).unsqueeze(1)
    every = Examples(images, torch.from_numpy(raw.target).long())
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    train, test = every.subset(order[TEST_SIZE:]), every.subset(order[:TEST_SIZE])
    return Splits("digits", train, test, tuple("0123456789"), NORMALISE)
