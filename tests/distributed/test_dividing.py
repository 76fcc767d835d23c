"""How a row is cut and jobs are assigned: nothing is lost, nothing is done twice, and shares are alike."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from credo.distributed.dividing import assign, cut

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=8)
parts = st.integers(1, 9)


@given(sizes, parts)
def test_the_parts_of_a_tensor_are_all_of_it_in_order(row: list[int], count: int) -> None:
    divided = cut(tuple(row), count)
    for k, size in enumerate(row):
        elements = [list(range(size))[part[k]] for part in divided]
        assert list(chain.from_iterable(elements)) == list(range(size))


@given(sizes, parts)
def test_no_part_is_longer_than_its_share(row: list[int], count: int) -> None:
    lengths = [sum(piece.stop - piece.start for piece in part) for part in cut(tuple(row), count)]
    assert max(lengths) <= -(-sum(row) // count)


@given(st.lists(st.floats(0, 1e6), max_size=20), parts)
def test_no_rank_has_more_than_a_fair_share_and_one_job(costs: list[float], count: int) -> None:
    owners = assign(costs, count)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == part) for part in range(count)]
    assert max(loads) <= (sum(costs) / count + max(costs, default=0)) * (1 + 1e-9)
    assert owners == assign(costs, count)
