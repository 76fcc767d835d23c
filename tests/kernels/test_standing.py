"""Calls that stand between steps do what a call that looks at everything does, whatever has changed meanwhile."""

import pytest
import torch

from credo.kernels import forced, noise, update
from credo.kernels.lists import Kept, Steady

SHAPES = [(5,), (64,), (1, 1), (130, 3), (70, 50)]
SETTINGS = update.Settings(0.05, 0.9, 0.2, 0.01, 0.5, 0.125)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def row(seed: int, dtype: torch.dtype, positive: bool = False) -> Steady:
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return Steady([t.abs() if positive else t for t in numbers])


def copied(tensors: list[torch.Tensor]) -> Steady:
    return Steady([t.clone(memory_format=torch.preserve_format) for t in tensors])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def learned(dtype: torch.dtype) -> list[Steady]:
    """Means, momenta, curvatures."""
    return [row(0, dtype), row(1, dtype), row(2, dtype, positive=True)]


@pytest.mark.parametrize("away", [False, True], ids=["at home", "away"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_updater_is_the_update_with_gradients_that_change(both_kernels, dtype, away):
    kept, plain = learned(dtype), learned(dtype)
    rooms = copied(kept[0]) if away else None
    updater = update.Updater(*kept, rooms)
    for step in range(3):
        if rooms is not None:
            for mean, room in zip(kept[0], rooms, strict=True):
                room.copy_(mean)
                mean.fill_(torch.nan)  # what stands where the mean will be does not matter
        gradients, squares = row(10 + step, dtype), row(20 + step, dtype, positive=True)
        versions = [t._version for own in kept for t in own]
        origins = None if rooms is None else Kept(rooms)
        if origins is not None:
            origins.done.value = 1
        assert updater(gradients, squares, 0.3, SETTINGS, origins)
        assert origins is None or origins.done.value == 0
        assert update.vogn_all_(*plain, gradients, squares, 0.3, None, SETTINGS)
        assert all(same(one, other) for one, other in zip(kept, plain, strict=True))
        changed = [t._version for own in kept for t in own]
        assert all(now > before for now, before in zip(changed, versions, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["gradients", "squares"])
def test_an_updater_that_checks_changes_nothing(both_kernels, where, bad):
    kept, before = learned(torch.float32), learned(torch.float32)
    given = {"gradients": row(3, torch.float32), "squares": row(4, torch.float32, positive=True)}
    given[where][-1].view(-1)[-1] = bad
    assert not update.Updater(*kept, None)(*given.values(), 0.3, SETTINGS, check=True)
    assert all(same(one, other) for one, other in zip(kept, before, strict=True))


@pytest.mark.parametrize("what", ["transposed", "another type"])
def test_gradients_that_the_kernel_cannot_take_as_they_are(both_kernels, what):
    kept, plain = learned(torch.float32), learned(torch.float32)
    gradients, squares = row(3, torch.float32), row(4, torch.float32, positive=True)
    odd = [g.t().contiguous().t() if what == "transposed" and g.dim() == 2 else g for g in gradients]
    odd = [g.double() for g in odd] if what == "another type" else odd
    assert update.Updater(*kept, None)(odd, squares, 0.3, SETTINGS)
    assert update.vogn_all_(*plain, gradients, squares, 0.3, None, SETTINGS)
    for one, other in zip(kept, plain, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", ["gradients", "squares"])
def test_rows_of_other_sizes_are_not_read_beyond_their_end(both_kernels, which):
    kept, before = learned(torch.float32), learned(torch.float32)
    given = {"gradients": list(row(3, torch.float32)), "squares": list(row(4, torch.float32, positive=True))}
    given[which][-1] = given[which][-1][:-1].clone()
    with pytest.raises(RuntimeError, match="size of tensor"):
        update.Updater(*kept, None)(*given.values(), 0.3, SETTINGS)
    assert same(kept[0], before[0])


def test_a_failed_check_leaves_the_means_away(both_kernels):
    kept = learned(torch.float32)
    rooms, gradients = copied(kept[0]), row(3, torch.float32)
    gradients[0][0] = torch.nan
    origins = Kept(rooms)
    origins.done.value = 1
    updater = update.Updater(*kept, rooms)
    assert not updater(gradients, row(4, torch.float32, positive=True), 0.3, SETTINGS, origins, check=True)
    assert origins.done.value == 1


def drawn(weights: list[torch.Tensor], curvatures: list[torch.Tensor], stream: int) -> list[torch.Tensor]:
    own = copied(weights)
    noise.sample_all_(own, curvatures, 0.1, 0.5, 7, stream, range(3, 3 + len(own)))
    return own


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sampler_is_the_draw_of_every_stream(both_kernels, dtype, strided):
    weights, curvatures = row(0, dtype), row(1, torch.float32, positive=True)
    if dtype is torch.float64:
        curvatures = row(1, dtype, positive=True)
    if strided:
        weights, curvatures = (Steady([t.t().contiguous().t() for t in own]) for own in (weights, curvatures))
    means, rooms = copied(weights), copied(weights)
    sampler = noise.Sampler(weights, curvatures, range(3, 3 + len(weights)), rooms)
    for stream in (0, 1, 1 << 48):
        for room in rooms:
            room.fill_(torch.nan)
        kept = Kept(rooms)
        sampler(0.1, 0.5, 7, stream, kept)
        assert kept.done.value == 1
        assert same(rooms, means)
        assert same(weights, drawn(means, curvatures, stream))
        assert not same(weights, means)
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean)


@pytest.mark.parametrize("odd", ["curvatures", "rooms", "types"])
def test_rows_of_a_sampler_that_do_not_lie_alike(both_kernels, odd):
    weights, curvatures = row(0, torch.float32), row(1, torch.float32, positive=True)
    means, rooms = copied(weights), copied(weights)
    if odd == "curvatures":
        curvatures = Steady([t.t().contiguous().t() for t in curvatures])
    elif odd == "rooms":
        rooms = Steady([t.t().contiguous().t() for t in rooms])
    else:
        curvatures = Steady([t.double() for t in curvatures])
    noise.Sampler(weights, curvatures, range(3, 3 + len(weights)), rooms)(0.1, 0.5, 7, 5, Kept(rooms))
    assert same(rooms, means)
    assert same(weights, drawn(means, curvatures, 5))


def test_other_kernels_may_be_asked_for_between_two_calls():
    """A twin draws other numbers of the same distribution, so that it shows who has drawn."""
    weights, curvatures = row(0, torch.float32), row(1, torch.float32, positive=True)
    means, rooms = copied(weights), copied(weights)
    sampler = noise.Sampler(weights, curvatures, range(3, 3 + len(weights)), rooms)
    found, expected = [], []
    for choice in ("auto", "off", "auto", "off"):
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean)
        if choice == "off":
            with forced("off"):
                sampler(0.1, 0.5, 7, 5, Kept(rooms))
                expected.append(drawn(means, curvatures, 5))
        else:
            sampler(0.1, 0.5, 7, 5, Kept(rooms))
            expected.append(drawn(means, curvatures, 5))
        found.append(copied(weights))
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))
