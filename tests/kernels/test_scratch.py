"""Memory that is lent again must never be somebody's still."""

import torch

import credo
from credo.kernels import scratch as memory
from credo.kernels.scratch import give_back, lend, scratch


def squares_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with credo.capture(model) as stats:
        model(x).square().mean().backward()
    return stats.squares[model.weight]


def test_what_was_given_back_is_lent_once() -> None:
    like = torch.empty(0)
    first = lend((7, 11 << 12), like)
    give_back([first])
    assert lend((7, 11 << 12), like).data_ptr() == first.data_ptr()
    assert lend((7, 11 << 12), like).data_ptr() != first.data_ptr()


def test_the_memory_of_a_block_is_free_with_its_statistics() -> None:
    """At once, not when the garbage collector comes."""
    model, x = torch.nn.Linear(9 << 12, 5), torch.ones(8, 9 << 12)
    places = set()
    for _ in range(4):
        with credo.capture(model) as stats:
            model(x).square().mean().backward()
        places.add(stats.sums[id(model.weight)].data_ptr())
        del stats
    assert len(places) == 1


def test_parts_of_tensors_are_not_taken() -> None:
    whole = torch.zeros(5, 13 << 12)
    lend((2, 13 << 12), whole)  # so that one would be welcome
    give_back([whole[:2]])
    assert lend((2, 13 << 12), whole).data_ptr() != whole.data_ptr()


def test_statistics_that_are_kept_do_not_change_with_later_blocks() -> None:
    model, kept = torch.nn.Linear(6 << 12, 4), []
    inputs = [torch.randn(8, 6 << 12, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    expected = [squares_of(model, x).clone() for x in inputs]
    for x in inputs:  # the blocks stay alive, so their memory must stay theirs
        with credo.capture(model) as stats:
            model(x).square().mean().backward()
        kept.append(stats)
    for stats, square in zip(kept, expected, strict=True):
        assert torch.equal(stats.squares[model.weight], square)


def test_no_more_is_kept_than_was_lent() -> None:
    like = torch.empty(0)
    first = lend((3, 17 << 12), like)
    given = [first, *(torch.empty(3, 17 << 12) for _ in range(5)), torch.empty(5, 19 << 12)]
    give_back(given)
    kept = {tensor.data_ptr() for tensor in given}
    assert lend((3, 17 << 12), like).data_ptr() == first.data_ptr()
    assert lend((3, 17 << 12), like).data_ptr() not in kept
    assert lend((5, 19 << 12), like).data_ptr() not in kept


def test_small_tensors_are_not_kept_account_of() -> None:
    like = torch.empty(0)
    first = lend((3, 5), like)
    give_back([first])
    assert lend((3, 5), like).data_ptr() != first.data_ptr()


def test_scratch_of_one_name_is_the_same_memory_in_every_shape() -> None:
    like = torch.empty(0)
    large = scratch("test", (6, 7), like)
    assert scratch("test", (6, 7), like) is large
    assert scratch("test", (5,), like).data_ptr() == large.data_ptr()
    assert scratch("test", (6, 7), like.double()).data_ptr() != large.data_ptr()


def test_scratch_that_has_grown_keeps_nothing_of_the_old() -> None:
    """Neither memory nor views of it: two shapes of one name never lie in different places."""
    like = torch.empty(0)
    scratch("growing", (3,), like), scratch("growing", (5, 5), like)
    grown = scratch("growing", (100, 100), like)
    for shape in ((3,), (5, 5)):
        assert scratch("growing", shape, like).data_ptr() == grown.data_ptr()


def test_views_of_scratch_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(memory, "VIEWS", 20)
    whole = scratch("shapes", (100,), torch.empty(0))
    for n in range(1, 100):
        assert scratch("shapes", (n,), torch.empty(0)).data_ptr() == whole.data_ptr()
    assert len(memory._kept.views) <= 20
