"""The training loop on several processes: one process cannot be told from it, and every error ends all of them."""

from pathlib import Path

import pytest

from credo.experiments.checkpoint import Checkpoints, equal
from credo.experiments.results import load_result
from credo.experiments.run_folder import read_log
from credo.experiments.train import train
from tests.distributed.processes import on_ranks
from tests.experiments import ranked
from tests.experiments.small import last_state
from tests.experiments.test_resume import assert_same


def well(results: list) -> list:
    assert all(not isinstance(result, Exception) for result in results), "\n".join(map(str, results))
    return results


def test_every_method_equals_one_process(tmp_path: Path) -> None:
    """Means, scores and the log, with an empty share at the end of each epoch and with an example that is NaN."""
    well(on_ranks(2, ranked.every_method, tmp_path / "two"))
    for name, training in ranked.METHODS.items():
        alone = train(training, 3, tmp_path / "one" / name)
        ranks = load_result(tmp_path / "two" / name)
        for key, weights in alone.weights().items():
            assert ranks.weights()[key].numpy() == pytest.approx(weights.numpy(), rel=1e-9, abs=1e-11), (
                name,
                key,
            )
        for key, tensor in alone.predictions().items():
            assert ranks.predictions()[key].numpy() == pytest.approx(tensor.numpy(), rel=1e-9, abs=1e-11)
        for row, other in zip(ranks.log, alone.log, strict=True):
            shared = [key for key in other if key not in ("seconds", "tempering")]
            assert [row[k] for k in shared] == pytest.approx(
                [other[k] for k in shared], rel=1e-9, nan_ok=True
            )
        assert (ranks.metrics["refused"] > 0) == name.startswith("nan")


@pytest.mark.parametrize("method", ["vogn", "mc_dropout"])
def test_a_run_that_was_cut_ends_as_one_that_was_not(tmp_path: Path, method: str) -> None:
    """BatchNorm's buffers and dropout's streams are each rank's own, and come back to it."""
    well(on_ranks(2, ranked.cut_and_resumed, tmp_path, method))
    assert_same(tmp_path / "whole", tmp_path / "cut")
    parts = last_state(tmp_path / "cut")["ranks"]
    assert len(parts) == 2
    assert not equal(parts[0]["random.cpu"], parts[1]["random.cpu"])


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    for ended in well(on_ranks(2, ranked.told_to_stop, tmp_path)):
        assert ended == ["Terminated: 143", "1", "Terminated: 143"]
    assert_same(tmp_path / "whole", tmp_path / "cut")
    assert not (tmp_path / "cut" / "lock").exists()


def test_what_is_wrong_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    from credo.experiments.lock import locked

    (tmp_path / "in use").mkdir()
    train(ranked.METHODS["sgd"], 3, tmp_path / "damaged")
    (tmp_path / "damaged" / "result.json").unlink()
    newest = Checkpoints(tmp_path / "damaged" / "checkpoint").complete()[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with locked(tmp_path / "in use" / "lock"):
        first, second = well(on_ranks(2, ranked.mistakes, tmp_path))
    expected = {
        "finished otherwise": ("InvalidValue", "batch_size was 16, now 8"),
        "in use": ("LockedError", "is being written by process"),
        "data": ("FileNotFoundError", "no data on this machine"),
        "model": ("InvalidValue", "parameter 'weight' is ((3, 2)"),
        "credo's model": ("InvalidValue", "parameter 'weight' is ((3, 2)"),
        "seed": ("InvalidValue", "seed is 0 on rank 0 and 1 on rank 1"),
        "damaged": ("IntegrityError", "SHA-256"),
        "unseen": ("FileNotFoundError", "elsewhere"),
        "groups": ("InvalidValue", "mc_groups"),
    }
    for name, (kind, words) in expected.items():
        for text in (first[name], second[name]):
            assert text.startswith(kind), (name, text)
            assert words in text, (name, text)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_row_69_another_number_of_processes_goes_on_with_a_warning(
    tmp_path: Path, before: int, after: int
) -> None:
    well(on_ranks(before, ranked.cut_short, tmp_path))
    first, *others = well(on_ranks(after, ranked.resumed, tmp_path))
    assert any(f"written by {before} process(es), and here are {after}" in text for text in first)
    assert not any("process(es)" in text for texts in others for text in texts)
    unequal = [text for text in first if "batch_size=16 is not divisible by 3 shares" in text]
    assert len(unequal) == (after == 3)  # row 72
    assert load_result(tmp_path).metrics["epochs"] == 3
    examples = [row["train_accuracy"] * 60 for row in read_log(tmp_path / "log.jsonl")]
    assert [round(count, 9) % 1 for count in examples] == [0, 0, 0], "every example is counted once"
