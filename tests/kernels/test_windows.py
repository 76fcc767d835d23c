"""Windows out of images: the kernel against the torch path, and both against slices of a padded image."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import credo.kernels
from credo.data.augmentation import cut


def by_slices(images: torch.Tensor, draws: torch.Tensor, height: int, width: int, pad: int) -> torch.Tensor:
    """Slow and obvious: mirror, pad, slice, one image at a time."""
    rows = []
    for image, (top, left, mirrored) in zip(images, draws.tolist(), strict=True):
        image = image.flip(-1) if mirrored else image
        padded = torch.nn.functional.pad(image, (pad, pad, pad, pad))
        rows.append(padded[:, top : top + height, left : left + width])
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 5),
    channels=st.integers(1, 3),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    pad=st.integers(0, 6),
    shrink=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_windows_are_slices_of_the_padded_image(
    mode: str,
    count: int,
    channels: int,
    rows: int,
    columns: int,
    pad: int,
    shrink: tuple[float, float],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, channels, rows, columns), generator=generator, dtype=torch.uint8)
    height, width = (
        (rows, columns) if pad else (max(1, round(rows * shrink[0])), max(1, round(columns * shrink[1])))
    )
    limits = rows + 2 * pad - height, columns + 2 * pad - width, 1
    draws = torch.stack([torch.randint(n + 1, (count,), generator=generator) for n in limits], dim=1)
    expected = by_slices(images, draws, height, width, pad)
    if mode == "off":
        with credo.kernels.forced("off"):
            found = cut(images, draws, height, width, pad)
    else:
        found = cut(images, draws, height, width, pad)
    assert torch.equal(found, expected)
