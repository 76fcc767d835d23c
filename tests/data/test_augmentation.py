"""Augmentations against an oracle that moves one image at a time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from credo.data import Augmentation, PadCropFlip, RandomCropFlip, RandomResizedCrop
from credo.data.examples import Normalise
from credo.errors import CredoError


def slowly(images: Tensor, draws: Tensor, height: int, width: int, pad: int) -> Tensor:
    windows = []
    for image, (top, left, mirrored) in zip(images, draws.tolist(), strict=True):
        source = F.pad(image.flip(-1) if mirrored else image, (pad, pad, pad, pad))
        windows.append(source[:, top : top + height, left : left + width])
    return torch.stack(windows)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 7), channels=st.integers(1, 3), height=st.integers(1, 9), width=st.integers(1, 9),
    pad=st.integers(1, 5), seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.uint8, torch.float32]),
)  # fmt: skip
def test_pad_crop_flip(
    count: int, channels: int, height: int, width: int, pad: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(1, 256, (count, channels, height, width), generator=generator).to(dtype)
    kept, augmentation = images.clone(), PadCropFlip(pad)
    draws = augmentation.draw(count, height, width, generator)
    assert torch.equal(augmentation.apply(images, draws), slowly(images, draws, height, width, pad))
    assert torch.equal(images, kept)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 5), size=st.integers(1, 6), more=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_random_crop_flip(count: int, size: int, more: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(count)
    shape = (count, 3, size + more[0], size + more[1])
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    augmentation = RandomCropFlip(size)
    draws = augmentation.draw(count, *shape[2:], generator)
    assert torch.equal(augmentation.apply(images, draws), slowly(images, draws, size, size, 0))


def test_every_window_and_mirroring_is_equally_likely() -> None:
    draws = PadCropFlip(2).draw(50_000, 8, 8, torch.Generator().manual_seed(0))
    counts = torch.bincount((draws[:, 0] * 5 + draws[:, 1]) * 2 + draws[:, 2], minlength=50).double()
    assert len(counts) == 50
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert float(chi_square) < 49 + 5 * (2 * 49) ** 0.5


def test_resized_crop_of_everything_is_the_image() -> None:
    images = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    draws = whole.draw(6, 8, 8, torch.Generator().manual_seed(1))
    result = whole.apply(images, draws)
    for image, view, mirror in zip(images, result, draws[:, 4].tolist(), strict=True):
        assert torch.equal(view, image.flip(-1) if mirror < 0 else image)
    assert set(draws[:, 4].tolist()) == {-1.0, 1.0}


def test_resized_crops_have_the_area_and_aspect_asked_for() -> None:
    augmentation = RandomResizedCrop(4, scale=(0.2, 0.5), ratio=(0.8, 1.25))
    draws = augmentation.draw(2000, 30, 20, torch.Generator().manual_seed(0))
    x, y, half_width, half_height, _ = draws.unbind(1)
    area, aspect = half_width * half_height, (half_width * 20) / (half_height * 30)
    assert 0.2 - 1e-9 <= float(area.min()) < 0.21
    assert 0.49 < float(area.max()) <= 0.5 + 1e-9
    assert 0.8 - 1e-9 <= float(aspect.min()) < 0.81
    assert 1.24 < float(aspect.max()) <= 1.25 + 1e-9
    assert bool((x.abs() + half_width <= 1 + 1e-9).all() and (y.abs() + half_height <= 1 + 1e-9).all())


def test_resized_crop_of_a_ramp_stays_a_ramp() -> None:
    """Linear interpolation of a linear image is exact away from the borders."""
    ramp = torch.arange(32.0).expand(1, 1, 32, 32)
    augmentation = RandomResizedCrop(16, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    draws = torch.tensor([[0.0, 0.0, 0.5, 0.5, 1.0]])
    row = augmentation.apply(ramp, draws)[0, 0, 0]
    torch.testing.assert_close(row, torch.arange(16.0) + 8)


AUGMENTATIONS: list[Augmentation] = [PadCropFlip(), RandomCropFlip(24), RandomResizedCrop(24)]


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_draws_for_all_are_draws_for_each(augmentation: Augmentation) -> None:
    """A rank that applies its rows gets its part of the whole batch; the global generator is left alone."""
    before = torch.random.get_rng_state()
    images = torch.randint(256, (9, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    draws = augmentation.draw(9, 32, 32, torch.Generator().manual_seed(5))
    whole = augmentation.apply(images, draws)
    assert torch.equal(whole, augmentation(images, torch.Generator().manual_seed(5)))
    for part in (slice(0, 4), slice(4, 5), slice(5, 9), slice(9, 9)):
        assert torch.equal(augmentation.apply(images[part], draws[part]), whole[part])
    assert whole.dtype == torch.uint8
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_papers_rho() -> None:
    assert PadCropFlip(pad=4).rho == 10
    assert RandomCropFlip(224).rho == 5
    assert PadCropFlip(pad=4, rho=3).rho == 3


@pytest.mark.parametrize(
    "build",
    [
        lambda: PadCropFlip(0),
        lambda: PadCropFlip(True),
        lambda: PadCropFlip(4, rho=0.5),
        lambda: PadCropFlip(4, rho=float("nan")),
        lambda: RandomCropFlip(1.5),  # type: ignore[arg-type]
        lambda: RandomResizedCrop(8, scale=(0.5, 1.5)),
        lambda: RandomResizedCrop(8, ratio=(2.0, 1.0)),
        lambda: RandomCropFlip(9)(torch.zeros(2, 3, 8, 8), torch.Generator()),
        lambda: PadCropFlip()(torch.zeros(3, 8, 8), torch.Generator()),
        lambda: Normalise((0.5,), (0.0,)),
        lambda: Normalise((0.5,), ()),
        lambda: Normalise((0.5,), (1.0,))(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)),
    ],
)
def test_nonsense(build: object) -> None:
    with pytest.raises(CredoError):
        build()  # type: ignore[operator]


def test_normalise() -> None:
    images = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    right = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(Normalise(mean, std)(images), right.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(Normalise()(images), images / 255)
    torch.testing.assert_close(
        Normalise(mean, std, crop=2)(images), right.float()[..., 1:3, 1:3], atol=1e-6, rtol=1e-6
    )
    features = torch.randn(4, 5)
    assert Normalise()(features) is features
