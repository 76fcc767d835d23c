"""Lists of tensors that are looked at once do what lists that are looked at every time do, until they change."""

import pytest
import torch

from credo.kernels import forced, noise, update
from credo.kernels.native import available
from credo.kernels.tensors import Backup, TensorList
from credo.optim.vogn import averaged_update

SHAPES = [(5,), (64,), (1, 1), (130, 3), (70, 50)]
NUMBERS = update.VOGNNumbers(0.05, 0.9, 0.2, 0.01, 0.5, 0.125)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def row(seed: int, dtype: torch.dtype, positive: bool = False) -> TensorList:
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return TensorList([t.abs() if positive else t for t in numbers])


def copied(tensors: list[torch.Tensor]) -> TensorList:
    return TensorList([t.clone(memory_format=torch.preserve_format) for t in tensors])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def learned(dtype: torch.dtype) -> list[TensorList]:
    """Means, momenta, curvatures."""
    return [row(0, dtype), row(1, dtype), row(2, dtype, positive=True)]


def updated(rows, gradients, squares, backup=None, check=False) -> bool:
    return update.vogn_(
        averaged_update, *rows, gradients, squares, 0.3, None, NUMBERS, backup=backup, check=check
    )


def taken(places: TensorList) -> Backup:
    backup = Backup(places)
    backup.done.value = 1
    return backup


@pytest.mark.parametrize("away", [False, True], ids=["at home", "away"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_update_with_gradients_that_change(both_kernels, dtype, away):
    cached, plain = learned(dtype), [list(own) for own in learned(dtype)]
    places = cached[0].buffers
    for step in range(3):
        if away:
            for mean, place in zip(cached[0], places, strict=True):
                place.copy_(mean)
                mean.fill_(torch.nan)  # what stands where the mean will be does not matter
        gradients, squares = row(10 + step, dtype), row(20 + step, dtype, positive=True)
        versions = [t._version for own in cached for t in own]
        backup = taken(places) if away else None
        assert updated(cached, list(gradients), list(squares), backup)
        assert backup is None or not backup.taken
        assert updated(plain, list(gradients), list(squares))
        assert all(same(one, other) for one, other in zip(cached, plain, strict=True))
        changed = [t._version for own in cached for t in own]
        assert all(now > before for now, before in zip(changed, versions, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["gradients", "squares"])
def test_an_update_that_checks_changes_nothing(both_kernels, where, bad):
    cached, before = learned(torch.float32), learned(torch.float32)
    given = {"gradients": row(3, torch.float32), "squares": row(4, torch.float32, positive=True)}
    given[where][-1].view(-1)[-1] = bad
    assert not updated(cached, *given.values(), check=True)
    assert all(same(one, other) for one, other in zip(cached, before, strict=True))


@pytest.mark.parametrize("what", ["transposed", "another type"])
def test_gradients_that_the_kernel_cannot_take_as_they_are(both_kernels, what):
    cached, plain = learned(torch.float32), learned(torch.float32)
    gradients, squares = row(3, torch.float32), row(4, torch.float32, positive=True)
    odd = [g.t().contiguous().t() if what == "transposed" and g.dim() == 2 else g for g in gradients]
    odd = [g.double() for g in odd] if what == "another type" else odd
    assert updated(cached, odd, squares)
    assert updated(plain, gradients, squares)
    for one, other in zip(cached, plain, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", ["gradients", "squares"])
def test_rows_of_other_sizes_are_not_read_beyond_their_end(both_kernels, which):
    cached, before = learned(torch.float32), learned(torch.float32)
    given = {"gradients": list(row(3, torch.float32)), "squares": list(row(4, torch.float32, positive=True))}
    given[which][-1] = given[which][-1][:-1].clone()
    with pytest.raises(RuntimeError, match="size of tensor"):
        updated(cached, *given.values())
    assert same(cached[0], before[0])


def test_a_failed_check_leaves_the_means_away(both_kernels):
    cached = learned(torch.float32)
    gradients = row(3, torch.float32)
    gradients[0][0] = torch.nan
    backup = taken(copied(cached[0]))
    assert not updated(cached, gradients, row(4, torch.float32, positive=True), backup, check=True)
    assert backup.taken


def sample_(weights, curvatures, stream: int, backup: Backup | None = None) -> None:
    noise.sample_all_(weights, curvatures, 0.1, 0.5, 7, stream, range(3, 3 + len(weights)), backup=backup)


def drawn(weights: list[torch.Tensor], curvatures: list[torch.Tensor], stream: int) -> list[torch.Tensor]:
    own = list(copied(weights))
    sample_(own, list(curvatures), stream)
    return own


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_draw_of_every_stream(both_kernels, dtype, strided):
    weights, curvatures = row(0, dtype), row(1, torch.float32, positive=True)
    if dtype is torch.float64:
        curvatures = row(1, dtype, positive=True)
    if strided:
        turned = [[t.t().contiguous().t() for t in own] for own in (weights, curvatures)]
        weights, curvatures = map(TensorList, turned)
    means, places = copied(weights), weights.buffers
    for stream in (0, 1, 1 << 48):
        for place in places:
            place.fill_(torch.nan)
        backup = Backup(places)
        sample_(weights, curvatures, stream, backup)
        assert backup.taken
        assert same(places, means)
        assert same(weights, drawn(means, curvatures, stream))
        assert not same(weights, means)
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean)


@pytest.mark.parametrize("odd", ["curvatures", "places", "types"])
def test_a_draw_from_rows_that_do_not_lie_alike(both_kernels, odd):
    weights, curvatures = row(0, torch.float32), row(1, torch.float32, positive=True)
    means, places = copied(weights), copied(weights)
    if odd == "curvatures":
        curvatures = TensorList([t.t().contiguous().t() for t in curvatures])
    elif odd == "places":
        places = TensorList([t.t().contiguous().t() for t in places])
    else:
        curvatures = TensorList([t.double() for t in curvatures])
    sample_(weights, curvatures, 5, Backup(places))
    assert same(places, means)
    assert same(weights, drawn(means, curvatures, 5))


def test_other_kernels_may_be_asked_for_between_two_calls():
    """Without kernels other numbers of the same distribution are drawn, so that it shows who has drawn."""
    weights, curvatures = row(0, torch.float32), row(1, torch.float32, positive=True)
    means, found, expected = copied(weights), [], []
    for choice in (*available()[-1:], "off") * 2:
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean)
        with forced(choice):
            sample_(weights, curvatures, 5, Backup(weights.buffers))
            expected.append(drawn(means, curvatures, 5))
        found.append(copied(weights))
    assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def replaced_memory(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def another_type(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.double()


def another_shape(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(-1)


def another_order(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


@pytest.mark.parametrize("change", [replaced_memory, another_type, another_shape, another_order])
def test_a_change_is_noticed(change):
    tensors = row(0, torch.float32)
    assert tensors.current()
    tensors[3].add_(1)
    assert tensors.current()
    held = tensors[3].data
    change(tensors[3])
    assert not tensors.current()
    assert held.numel() == 390


def test_a_list_stands_for_its_very_tensors():
    tensors = row(0, torch.float32)
    assert tensors.holds(list(tensors))
    assert not tensors.holds(list(tensors)[:-1])
    assert not tensors.holds(copied(tensors))


def test_an_empty_list_is_current():
    assert TensorList([]).current()
