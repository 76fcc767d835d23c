"""Models under FSDP2 (`fully_shard`): what P ranks do with rows of the parameters equals what one process does."""

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.distributed import fully_sharded_models as models
from tests.distributed import fully_sharded_refusals as refused
from tests.distributed import fully_sharded_tasks as jobs
from tests.distributed.crews import together
from tests.distributed.processes import RankFailed, on_ranks

SHARED = {"shared_noise": True}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "VOGN": ("VOGN", {}),
    "VOGN, given": ("VOGN", {"lr": 0.1, "damping": 0.1, "initial_precision": 20.0, "mc_samples": 2}),
    "OGN": ("OGN", {}),
    "OGN, given": ("OGN", {"lr": 0.1, "damping": 0.2, "prior_precision": 2.0, "reduction": "sum"}),
    "IVON": ("IVON", {}),
    "IVON, given": ("IVON", {"lr": 0.1, "mc_samples": 2, "clip_radius": 0.5}),
    "BBB": ("BayesByBackprop", {"local": False, **SHARED}),
    "BBB, given": (
        "BayesByBackprop",
        {
            "lr": 1e-2,
            "local": False,
            **SHARED,
            "mc_samples": 2,
            "initial_mean_sd": 0.2,
            "initial_log_variance": -4.0,
        },
    ),
}
FORMS = ("closure", "blocks")
ALL = [*models.PROBLEMS]


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest, relative to the largest number of its tensor."""
    assert a["mean"].keys() == b["mean"].keys()
    return max(
        float(np.abs(a[kind][name] - b[kind][name]).max() / (np.abs(b[kind][name]).max() + 1e-300))
        for kind in ("mean", "variance", "curvature")
        for name in b[kind]
    )


def cases(name: str, size: int) -> list[tuple[Any, ...]]:
    """Every problem but those whose numbers are of each rank's own share; the first in all ways."""
    own, kinds = METHODS[name], models.SHARES if size > 1 else ("equal",)
    many = [(*own, "layers", form, kind) for form in (*FORMS, "micro-batches") for kind in kinds]
    usual = [p for p in ALL if p not in ("layers", "statistics")]
    if "given" in name:
        return [(*own, "layers", "blocks", "unequal"), (*own, "derived", "closure", "unequal")]
    return [*many, *((*own, problem, "closure", "unequal") for problem in usual)]


@cache
def alone(name: str, problem: str, form: str) -> dict[str, Any]:
    method, options = METHODS[name]
    return jobs.train(0, 1, False, method, options, problem, form, "equal")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_equals_one_process(name: str, size: int) -> None:
    todo = cases(name, size)
    ranks = together(size, jobs.train_all, True, todo)
    for case, first, *others in zip(todo, *ranks, strict=True):
        problem, form = case[2:4]
        one = alone(name, problem, form)
        assert difference(first, one) < 1e-10, case
        assert first["counters"] == one["counters"], case
        if form == "closure":
            assert first["losses"] == pytest.approx(one["losses"], rel=1e-10), case
        for other in others:
            assert other["losses"] == first["losses"]
            for what in ("mean", "variance"):
                for key, value in first[what].items():
                    assert np.array_equal(other[what][key], value), (case, key)


@pytest.mark.parametrize("size", [2, 4])
def test_noise_on_outputs_equals_as_many_plain_processes(size: int) -> None:
    """Each rank's rows have noise of their own, which no single process draws; BatchNorm sees each rank's share."""
    todo: list[tuple[Any, ...]] = [("BayesByBackprop", {}, "layers", form, "unequal") for form in FORMS]
    todo += [("BayesByBackprop", {"mc_samples": 2}, "images", "closure", "unequal")]
    for method in ("VOGN", "IVON"):
        todo.append((method, SHARED, "statistics", "closure", "unequal"))
    plain = together(size, jobs.train_all, False, todo)
    sharded = together(size, jobs.train_all, True, todo)
    for case, *results in zip(todo, *plain, *sharded, strict=True):
        for one, other in zip(results[:size], results[size:], strict=True):  # rank by rank
            assert difference(other, one) < 1e-10, case
            if case[3] == "closure":
                assert other["losses"] == pytest.approx(one["losses"], rel=1e-10), case
            assert ("2.running_mean" in one["buffers"]) == (case[2] == "statistics")
            for name, value in one["buffers"].items():
                assert other["buffers"][name] == pytest.approx(value, rel=1e-10), (case, name)


AROUND: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "clipped between": (jobs.clipped, ("between",)),
    "clipped in the closure": (jobs.clipped, ("closure",)),
    "VOGN": (jobs.around_steps, ("VOGN",)),
    "IVON": (jobs.around_steps, ("IVON",)),
    "waiting": (jobs.waiting, ()),
    "checkpointed": (jobs.checkpointed, ()),
    "after an error": (jobs.after_an_error, ()),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_done_around_steps(name: str) -> None:
    task, more = AROUND[name]
    one = task(0, 1, False, *more)
    for result in together(2, task, True, *more):
        assert difference(result, one) < 1e-10
        if name.startswith("clipped") or name in ("VOGN", "IVON"):
            assert result["losses"] == pytest.approx(one["losses"], rel=1e-10)


RESUMED = {"VOGN": {}, "OGN": {}, "IVON": {}, "BayesByBackprop": {"local": False, **SHARED}}


@pytest.mark.parametrize("method", RESUMED)
def test_a_run_resumes_bit_for_bit_in_any_world(method: str) -> None:
    """Checkpoints are whole: of two ranks they go on in two, in one, and without fully_shard."""
    options = RESUMED[method]
    through = together(2, jobs.run, True, method, options, 0, 4)[0]
    half = together(2, jobs.run, True, method, options, 0, 2)[0]
    saved = {key: half[key] for key in ("model", "optimizer")}
    for result in together(2, jobs.run, True, method, options, 2, 4, saved):
        for what in ("mean", "variance"):
            for name, value in through[what].items():
                assert np.array_equal(result[what][name], value), name
        assert result["losses"] == through["losses"][2:]
    plain = jobs.run(0, 1, False, method, options, 2, 4, saved)
    assert difference(plain, through) < 1e-10
    back = jobs.run(0, 1, False, method, options, 0, 2)
    saved = {key: back[key] for key in ("model", "optimizer")}
    assert difference(together(2, jobs.run, True, method, options, 2, 4, saved)[0], through) < 1e-10


@pytest.mark.parametrize("method", ["VOGN", "IVON"])
def test_a_number_that_is_not_finite_on_one_rank_is_refused_by_all(method: str) -> None:
    first, second = together(2, jobs.not_finite, method)
    assert first["counters"]["refused"] == second["counters"]["refused"] == 1
    assert first["counters"]["step"] == models.STEPS - 1
    for name, mean in first["mean"].items():
        assert np.array_equal(second["mean"][name], mean)
        assert np.isfinite(mean).all()


@pytest.mark.parametrize("method", ["VOGN", "IVON"])
def test_the_state_of_a_rank_is_that_of_its_rows(method: str) -> None:
    alone, whole = jobs.own_memory_alone(method)
    kinds = alone // whole
    for own, _ in together(2, jobs.own_memory, method):
        assert own <= kinds * (whole * 0.5 + 2 * 40)
    assert sum(own for own, _ in together(2, jobs.own_memory, method)) == alone


REFUSED = {
    "KFAC": "UnsupportedOperation: KFAC .*sharded=True",
    "NoisyKFAC": "UnsupportedOperation: NoisyKFAC .*sharded=True",
    "vectorized": "UnsupportedOperation: vectorized=True",
    "mc_slices": "UnsupportedOperation: mc_slices=2",
    "mc_groups": "UnsupportedOperation: mc_groups=1",
    "parameters": "UnsupportedOperation: .*DTensor.*Give the optimiser the module",
    "partly": "UnsupportedOperation: parameter '1.weight' is not sharded",
    "mixed precision": "UnsupportedOperation: mp_policy with a param_dtype.*autocast",
    "offload": "UnsupportedOperation: offload_policy",
    "columns": r"UnsupportedOperation: parameter '0.weight' is cut as S",
    "copy": "UnsupportedOperation: .*state_dict",
    "supply": "UnsupportedOperation: supply",
    "capture": "UnsupportedOperation: .*DTensor",
    "predict": "UnsupportedOperation: .*DTensor",
    "waiting": r"CallOrderError: the state dict is taken while 1 micro-batches wait.*pending\(\) is 0",
    "loaded": r"CallOrderError: the state dict was saved while 1 micro-batches wait.*pending\(\) is 0",
    "penalty": "(InvalidValue|UnsupportedOperation): .*0.weight.*penalt",
}


def test_what_is_refused_is_named_with_the_remedy() -> None:
    for found in together(2, refused.refusals):
        for name, pattern in REFUSED.items():
            assert re.match(pattern, found[name]), (name, found[name])


@pytest.mark.parametrize("method", ["VOGN", "IVON"])
def test_a_state_dict_while_micro_batches_wait(method: str) -> None:
    for found in together(2, refused.saving_while_waiting, method):
        for waiting, message in zip((1, 2), found["messages"], strict=False):
            assert f"while {waiting} micro-batches wait" in message
        assert found["messages"][2] == "done"
        asked, other = found["means"]
        for name, mean in other.items():
            assert np.array_equal(asked[name], mean)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("form", ["closure", "losses", "blocks"])
@pytest.mark.parametrize("method", ["VOGN", "IVON"])
def test_a_model_that_is_sharded_after_the_optimiser_was_built(method: str, form: str, trained: bool) -> None:
    ((late, new),) = together(1, refused.sharded_later, method, form, trained)
    assert re.match(
        r"CallOrderError: parameter '0\.weight' .*fully_shard .*Build the optimiser after fully_shard\(", late
    ), late
    assert new == "done"


def test_a_rank_without_examples_is_an_error_of_all() -> None:
    for message in together(2, refused.without_examples):
        assert message.startswith("UnsupportedOperation: 1 of 2 ranks had no example")


@pytest.mark.parametrize("when", ["before", "amid"])
@pytest.mark.parametrize("method", ["VOGN", "IVON", "BayesByBackprop"])
def test_a_rank_that_is_killed(method: str, when: str) -> None:
    survivor, other = on_ranks(2, refused.fault, method, when, timeout=10.0)
    assert isinstance(other, RankFailed)
    assert survivor["ended"].startswith("RankLost: rank 0 has waited for the other ranks in vain")
    assert survivor["mean in place"]
    assert survivor["seconds"] < 15.0


WRAPPED: dict[str, dict[str, Any]] = {
    "VOGN": {"mc_samples": 2},
    "OGN": {"sharded": True},
    "IVON": {},
    "NoisyKFAC": {"factor_interval": 2, "inverse_interval": 2},
    "BayesByBackprop": {},
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("method", WRAPPED)
def test_a_model_in_the_parallel_wrapper_is_trained_as_the_inner_one(method: str, size: int) -> None:
    """Bit for bit: the wrapper sends nothing any more."""
    forms = ("closure", "blocks", "micro-batches")
    if method == "NoisyKFAC":
        forms = ("closure", "blocks")
    plain = together(size, jobs.wrapped, False, method, WRAPPED[method], forms)
    for own, other in zip(
        plain, together(size, jobs.wrapped, True, method, WRAPPED[method], forms), strict=True
    ):
        for one, two in zip(own, other, strict=True):
            assert two["losses"] == one["losses"]
            for what in ("mean", "variance"):
                for name, value in one[what].items():
                    assert np.array_equal(two[what][name], value), name


def test_wrappers_that_are_refused() -> None:
    for static, parallel in together(2, refused.unwrapped):
        assert re.match("UnsupportedOperation: .*static_graph=True.*model.module", static)
        assert re.match("UnsupportedOperation: .*DataParallel.*model.module", parallel)


def test_the_example_gives_the_same_on_any_number_of_ranks() -> None:
    two, four = together(2, jobs.example), together(4, jobs.example)
    assert two[0] == two[1] == pytest.approx(four[0], rel=1e-3)
