"""Batches: order, position and augmentation are functions of (seed, epoch, index) and of nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from credo.data import Batches, Examples, LazyInputs, Normalise, PadCropFlip
from credo.errors import CredoError, InvalidType, InvalidValue


class Lazy(LazyInputs):
    """Remembers what it was asked for."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.asked = images, list[list[int]]()

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, indices: Tensor) -> Tensor:
        self.asked.append(indices.tolist())
        return self.images[indices]

    def subset(self, indices: Tensor) -> "Lazy":
        return Lazy(self.images[indices])


def numbered(count: int = 23, lazy: bool = False) -> Examples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Examples(Lazy(images) if lazy else images, torch.arange(count))


def batches(lazy: bool = False, **options: Any) -> Batches:
    settings: dict[str, Any] = {
        "shuffle": True,
        "seed": 3,
        "augmentation": PadCropFlip(2),
        "normalise": Normalise(),
    }
    return Batches(numbered(lazy=lazy), 5, **(settings | options))


def same(one: list[tuple[Tensor, Tensor]], two: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_holds_every_example_once(drop_last: bool) -> None:
    loader = batches(drop_last=drop_last)
    epoch = list(loader)
    assert len(epoch) == len(loader) == (4 if drop_last else 5)
    assert [len(y) for _, y in epoch] == [5, 5, 5, 5] + [3] * (not drop_last)
    seen = torch.cat([y for _, y in epoch]).tolist()
    assert len(set(seen)) == len(seen) == (20 if drop_last else 23)
    assert epoch[0][0].dtype == torch.float32


def test_without_shuffle_the_order_is_that_of_the_examples() -> None:
    loader = Batches(numbered(), 5, shuffle=False)
    for _ in range(2):
        epoch = list(loader)
        assert torch.cat([y for _, y in epoch]).tolist() == list(range(23))
        assert torch.equal(torch.cat([x for x, _ in epoch]), numbered().inputs)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    loader = batches()
    first, second = list(loader), list(loader)
    assert loader.epoch == 2
    assert not same(first, second)
    loader.set_epoch(0)
    assert same(list(loader), first)
    assert not same(list(batches(seed=4)), first)
    assert same(list(batches()), first)


def test_an_image_is_augmented_anew_each_epoch() -> None:
    loader = Batches(numbered(), 23, shuffle=False, augmentation=PadCropFlip(2))
    (one, _), (two, _) = next(iter(loader)), loader.batch(1, 0)
    assert sum(not torch.equal(a, b) for a, b in zip(one, two, strict=True)) > 15


@pytest.mark.parametrize("lazy", [False, True])
@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 12))
def test_resuming_in_the_middle_equals_never_having_stopped(lazy: bool, stop: int) -> None:
    straight = batches(lazy)
    everything = [batch for _ in range(3) for batch in straight]
    loader, taken = batches(lazy), []
    while len(taken) < stop:
        for batch in loader:
            taken.append(batch)
            if len(taken) == stop:
                break
    resumed = batches(lazy)
    resumed.load_state_dict(loader.state_dict())
    rest = []
    while resumed.epoch < 3:
        rest += list(resumed)
    assert same(taken + rest, everything)


def test_a_state_taken_after_the_last_batch_ends_the_epoch() -> None:
    loader = batches()
    for _ in loader:
        state = loader.state_dict()
    resumed = batches()
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert (resumed.epoch, resumed.position) == (1, 0)


def test_breaking_off_and_going_on() -> None:
    loader, whole = batches(), list(batches())
    taken = [next(iter(loader)), next(iter(loader))]
    assert loader.position == 2
    assert same(taken + list(loader), whole)


@settings(max_examples=25, deadline=None)
@given(world=st.integers(1, 7), count=st.integers(1, 17))
def test_ranks_together_see_the_batch_of_one_process(world: int, count: int) -> None:
    def loader(rank: int, world: int) -> Batches:
        return Batches(numbered(count), 5, shuffle=True, augmentation=PadCropFlip(2), rank=rank, world=world)

    ranks = [list(loader(rank, world)) for rank in range(world)]
    for parts, (x, y) in zip(zip(*ranks, strict=True), loader(0, 1), strict=True):
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)
        sizes = [len(part[1]) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_lazy_inputs_are_decoded_once_each_and_one_batch_ahead() -> None:
    loader = batches(lazy=True)
    inputs = loader.examples.inputs
    assert isinstance(inputs, Lazy)
    assert same(list(loader), list(batches()))
    assert sorted(k for asked in inputs.asked for k in asked) == list(range(23))


def test_an_error_while_decoding_ahead_reaches_the_caller_in_its_place() -> None:
    class Broken(Lazy):
        def gather(self, indices: Tensor) -> Tensor:
            if 12 in indices.tolist():
                raise InvalidValue("broken")
            return super().gather(indices)

    loader = Batches(Examples(Broken(torch.zeros(23, 3, 8, 8)), torch.arange(23)), 5, shuffle=False)
    taken = []
    with pytest.raises(InvalidValue, match="broken"):
        taken.extend(loader)
    assert len(taken) == 2
    assert loader.position == 2


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    list(batches())
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_model_can_read_them() -> None:
    import credo

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 23))
    loader = Batches(numbered(), 5, shuffle=False, normalise=Normalise())
    optimizer = credo.VOGN(model, lr=0.1, data_size=23)
    for x, y in loader:
        optimizer.step(lambda x=x, y=y: torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
    prediction = credo.predict(model, optimizer.posterior(), (x for x, _ in loader), samples=2)
    assert prediction.probs.shape == (23, 23)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"batch_size": True},
        {"seed": -1},
        {"seed": None},
        {"world": 0},
        {"rank": 2, "world": 2},
        {"rank": -1},
        {"examples": numbered(3), "drop_last": True},
        {"examples": [1, 2]},
        {"examples": numbered().subset([])},
    ],
)
def test_nonsense(change: dict[str, Any]) -> None:
    arguments = {"examples": numbered(), "batch_size": 5, "shuffle": True} | change
    with pytest.raises(CredoError, match=r"|".join(change) + "|examples"):
        Batches(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"batch_size": 6},
        {"examples": 22},
        {"position": 6},
        {"position": -1},
        {"epoch": "1"},
        {"epoch": None},
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: dict[str, Any]) -> None:
    loader = batches()
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(CredoError, match=next(iter(change))):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before


def test_examples() -> None:
    examples = numbered()
    few = examples.subset([4, 1])
    assert few.targets.tolist() == [4, 1]
    assert len(examples.take(5)) == 5
    assert torch.equal(examples.take(5).targets, examples.take(9).targets[:5])
    assert examples.take(99) is examples
    with pytest.raises(InvalidValue, match=r"0\.\.22"):
        examples.subset([23])
    with pytest.raises(InvalidValue, match="n must be"):
        examples.take(0)
    with pytest.raises(InvalidValue, match="do not fit"):
        Examples(torch.zeros(3), torch.zeros(4))
    with pytest.raises(InvalidType, match="list"):
        Examples([1], torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="scalar"):
        Examples(torch.tensor(1.0), torch.zeros(1))
