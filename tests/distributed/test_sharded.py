"""Sharded state: the same numbers as unsharded, a P-th of the memory, whole where it is read or saved."""

from itertools import chain
from typing import Any

import numpy as np
import pytest

from tests.distributed import sharded_tasks, tasks
from tests.distributed.crews import together
from tests.distributed.test_equivalence import METHODS, difference

SHARDED = {"sharded": True}


def same(ranks: list[Any]) -> None:
    """Ranks are bitwise equal to each other, in their means, variances and losses."""
    for result in ranks:
        assert isinstance(result, dict), result
        assert result["losses"] == ranks[0]["losses"]
        for kind in ("mean", "variance"):
            for name, value in ranks[0][kind].items():
                assert np.array_equal(result[kind][name], value)


@pytest.mark.parametrize("method", ["VOGN", "IVON", "BayesByBackprop", "NoisyKFAC"])
def test_groups_with_their_own_numbers_that_come_late(method: str) -> None:
    whole = together(3, sharded_tasks.train_groups, method, {})
    parts = together(3, sharded_tasks.train_groups, method, SHARDED)
    same(parts)
    assert difference(parts[0], whole[0]) < 1e-10


@pytest.mark.parametrize("options", [{"mc_slices": 2}, {"vectorized": True, "mc_samples": 2}], ids=str)
def test_samples_side_by_side(options: dict[str, Any]) -> None:
    whole = together(2, sharded_tasks.train_at_once, options)
    parts = together(2, sharded_tasks.train_at_once, {**options, **SHARDED})
    same(parts)
    assert difference(parts[0], whole[0]) < 1e-10


@pytest.mark.parametrize("method", ["VOGN", "NoisyKFAC"])
def test_every_rank_draws_what_it_would_have_drawn(method: str) -> None:
    """Also from its own noise, for which it needs the widths of all weights, or others to draw for it."""
    whole = together(2, sharded_tasks.samples, method, {})
    parts = together(2, sharded_tasks.samples, method, SHARDED)
    for mine, theirs in zip(parts, whole, strict=True):
        assert np.allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    assert not np.allclose(parts[0], parts[1], atol=1e-4)


@pytest.mark.parametrize(("method", "kinds"), [("VOGN", 2), ("OGN", 2), ("IVON", 2), ("BayesByBackprop", 5)])
@pytest.mark.parametrize("size", [2, 4])
def test_memory_falls_with_the_number_of_ranks(method: str, kinds: int, size: int) -> None:
    """`kinds` numbers a weight, of 4 bytes; counters, and the rounding of one element a kind, are the little more."""
    (whole,) = together(1, sharded_tasks.state_bytes, method, {})
    weights = 8 * 37 + 37 + 37 * 3 + 3
    assert whole >= kinds * weights * 4
    counters = whole - kinds * weights * 4
    for own in together(size, sharded_tasks.state_bytes, method, SHARDED):
        assert own <= kinds * 4 * -(-weights // size) + counters


@pytest.mark.parametrize("method", ["VOGN", "IVON", "NoisyKFAC"])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_rank_may_step_without_a_block(method: str, samples: int) -> None:
    options = {**METHODS[method], "mc_samples": samples}
    (alone,) = together(1, tasks.train, method, "equal", options)
    ranks = together(2, sharded_tasks.with_empty_step, method, {**options, **SHARDED})
    same(ranks)
    assert difference(ranks[0], alone) < 1e-10


@pytest.mark.parametrize("method", ["VOGN", "IVON", "BayesByBackprop", "NoisyKFAC"])
@pytest.mark.parametrize(
    ("before", "after", "options"), [(2, 3, SHARDED), (4, 1, {}), (1, 2, SHARDED), (2, 2, {})]
)
def test_a_saved_state_is_whole_and_goes_on_in_any_world(
    method: str, before: int, after: int, options: dict[str, Any]
) -> None:
    saved = together(before, sharded_tasks.first_half, method, {**METHODS[method], **SHARDED})
    (alone,) = together(1, tasks.train, method, "equal", METHODS[method])
    ranks = together(after, sharded_tasks.resume, method, {**METHODS[method], **options}, saved[-1])
    same(ranks)
    assert difference(ranks[0], alone) < 1e-10


@pytest.mark.parametrize("method", ["VOGN", "IVON", "NoisyKFAC"])
def test_a_nan_in_one_part_on_one_rank_is_refused_by_all(method: str) -> None:
    ranks = together(2, sharded_tasks.nan_on_one, method, SHARDED)
    for result in ranks:
        assert isinstance(result, dict), result
        assert result["counters"]["refused"] == 1
        assert result["counters"]["step"] == tasks.STEPS - 1
        for values, others in zip(result["before"].values(), result["after"].values(), strict=True):
            assert [n for n in values if not np.array_equal(values[n], others[n])] == []
        for name, mean in ranks[0]["mean"].items():
            assert np.array_equal(result["mean"][name], mean)
            assert np.isfinite(mean).all()


def test_parameters_are_cut_as_they_lie_in_memory() -> None:
    (alone,) = together(1, sharded_tasks.channels_last, {})
    ranks = together(3, sharded_tasks.channels_last, SHARDED)
    same(ranks)
    assert difference(ranks[0], alone) < 1e-10


@pytest.mark.parametrize(
    ("what", "named"), [("gaps", "gaps"), ("order", "order in memory"), ("inner", "Adafactor")]
)
def test_what_cannot_be_sharded_is_refused_by_all(what: str, named: str) -> None:
    for message in together(2, sharded_tasks.build, what):
        assert named in message


@pytest.mark.parametrize("method", ["VOGN", "NoisyKFAC"])
def test_copies_keep_their_part(method: str) -> None:
    assert together(2, sharded_tasks.copied, method) == [True, True]


# K-FAC: layers are not cut, each has an owner


@pytest.mark.parametrize("form", ["pi", "eigen"])
def test_every_layer_has_one_owner_who_alone_has_its_factors(form: str) -> None:
    ranks = together(2, sharded_tasks.kept_by_layer, {"damping_form": form, **SHARDED})
    layers = [set(kept["layers"]) for kept in ranks]
    assert layers[0] | layers[1] == {"0.weight", "2.weight", "5.weight"}
    assert not layers[0] & layers[1]
    assert layers[0] == {"2.weight"}, "its factor of 10³ is more work than the others together"
    for kept in ranks:
        assert kept["momenta"] == [name for name in kept["parameters"] if _layer(name) in kept["layers"]] + [
            "4.weight",
            "4.bias",
        ]
        assert kept["inverted"] == kept["layers"]


def _layer(name: str) -> str:
    return name.replace("bias", "weight")


@pytest.mark.parametrize("method", ["KFAC", "NoisyKFAC"])
def test_layers_that_freeze_and_thaw(method: str) -> None:
    """A bias, then a weight, whose bias then is a parameter without factors; and back again."""
    options = {**METHODS[method], "factor_interval": 1}
    (alone,) = together(1, sharded_tasks.freezing, method, options)
    ranks = together(2, sharded_tasks.freezing, method, {**options, **SHARDED})
    same(ranks)
    assert difference(ranks[0], alone) < 1e-10


def test_looks_are_not_the_samples_that_a_rank_owes_the_others() -> None:
    """A look at a sample, which all ranks take, is none of the samples that an empty rank owes the others."""
    (alone,) = together(1, sharded_tasks.looking, METHODS["NoisyKFAC"])
    ranks = together(2, sharded_tasks.looking, {**METHODS["NoisyKFAC"], **SHARDED})
    same(ranks)
    assert difference(ranks[0], alone) < 1e-10


# Without sharding every rank has all of the state, but inverts only some of the factors


@pytest.mark.parametrize("form", ["pi", "eigen"])
def test_every_factor_is_inverted_once(form: str) -> None:
    options = {"damping_form": form}
    (everything,) = together(1, sharded_tasks.inverted, options)
    ranks = together(2, sharded_tasks.inverted, options)
    assert sorted(chain.from_iterable(ranks)) == sorted(everything)
    assert ranks[0] == [("2.weight", "input")], (
        "the largest factor, 10³, is more work than the others together"
    )


def test_a_factor_that_one_rank_cannot_invert_is_an_error_on_all() -> None:
    first, second = together(2, sharded_tasks.singular)
    assert "rank 1" in first
    assert "singular" in second
