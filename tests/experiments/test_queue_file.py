"""The list of a queue: what it means, and what is wrong with it, by file and line."""

from pathlib import Path

import pytest

from credo.errors import CredoError
from credo.experiments.queue_file import Job, job_of, label_of, load_queue


def loaded(tmp_path: Path, text: str) -> list[Job]:
    path = tmp_path / "queue.toml"
    path.write_text(text)
    return load_queue(path)


def test_rows_seeds_and_sweeps_are_multiplied_and_sorted_by_priority(tmp_path: Path) -> None:
    jobs = loaded(
        tmp_path,
        """
        [[runs]]
        recipe = "digits"
        rows = ["adam", "vogn"]
        seeds = [0, 3]
        [[runs]]
        recipe = "table1-lenet5"
        row = "vogn"
        seed = 1
        size = "paper"
        settings = { epochs = 2, ood = ["svhn"] }
        sweep = { lr = [1e-3, 1e-2], damping = [0.1, 0.2] }
        priority = 1
        """,
    )
    assert [(job.label, job.seed) for job in jobs] == [
        ("vogn+epochs=2+lr=0.001+damping=0.1", 1),
        ("vogn+epochs=2+lr=0.001+damping=0.2", 1),
        ("vogn+epochs=2+lr=0.01+damping=0.1", 1),
        ("vogn+epochs=2+lr=0.01+damping=0.2", 1),
        ("adam", 0),
        ("adam", 3),
        ("vogn", 0),
        ("vogn", 3),
    ]
    first = jobs[0]
    assert (first.training.epochs, first.training.ood, first.training.settings["lr"]) == (2, ("svhn",), 1e-3)
    assert first.training.settings["momentum"] == 0.9  # the row's own
    assert first.folder("runs") == Path("runs/table1-lenet5/paper", first.label, "seed-1")
    assert first.record("results").name == f"{first.label}-seed-1.jsonl"
    assert [job_of(job.facts()) for job in jobs] == jobs


def test_an_ensemble_brings_its_members_and_shares_those_that_are_there(tmp_path: Path) -> None:
    jobs = loaded(
        tmp_path,
        """
        [[runs]]
        recipe = "digits"
        row = "adam"
        seeds = [0, 7]
        priority = 2
        [[runs]]
        recipe = "digits"
        row = "adam"
        ensemble = 3
        priority = 1
        """,
    )
    assert [(job.label, job.seed) for job in jobs] == [
        ("adam", 0),
        ("adam", 7),
        ("adam", 1),
        ("adam", 2),
        ("adam-ensemble-3", 0),
    ]
    members = jobs[-1].members("runs")
    assert members == [Path(f"runs/digits/cpu/adam/seed-{seed}") for seed in range(3)]
    assert members[0] == jobs[0].folder("runs")
    assert [job_of(job.facts()) for job in jobs] == jobs
    assert jobs[0].members("runs") == []


WRONG = {
    "seed = 0\nensemble = 3": (3, "leave seeds out"),
    "ensemble = 1": (2, "ensemble must be at least 2, got 1"),
    "seed = true": (2, "seed must be a whole number"),
    "seed = -1": (2, "seed"),
    "seeds = []": (2, "seeds is empty"),
    "seed = 0\nseeds = [1]": (1, "'seed' or 'seeds', and one of them only"),
    "seed = 0\nrow = 'vgn'": (1, "Did you mean 'vogn'"),
    "seed = 0\nsize = 'large'": (3, "unknown size 'large'"),
    "seed = 0\nsetings = {}": (3, "Did you mean 'settings'"),
    "seed = 0\npriority = 'high'": (3, "priority must be a whole number"),
    "seed = 0\nsettings = { lr = 'fast' }": (3, "lr must be"),
    "seed = 0\nsettings = { epochs = 2, rate = 1 }": (3, "unknown key 'rate'"),
    "seed = 0\nsweep = { lr = 0.1 }": (3, "lr must be a list"),
    "seed = 0\nsettings = { lr = 0.1 }\nsweep = { lr = [0.1] }": (4, "lr is in settings and in sweep"),
    "seed = 0\nname = '../x'": (3, "no path parts"),
    "seed = 0\nname = 'x'\nsweep = { lr = [0.1, 0.2] }": (3, "name is for one row"),
    "seed = 0\n[[runs]]\nrecipe = 'digits'\nrow = 'vogn'\nseeds = [1, 0]": (4, "in the queue twice"),
}


@pytest.mark.parametrize("rest", WRONG)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, rest: str) -> None:
    line, message = WRONG[rest]
    row = "" if "row = 'vgn'" in rest else "row = 'vogn'; "
    text = f"[[runs]]\n{rest}\nrecipe = 'digits'\n" + (row.replace("; ", "\n"))
    if "[[runs]]" in rest:  # the second entry is written out
        text = f"[[runs]]\nrecipe = 'digits'\nrow = 'vogn'\n{rest}\n"
        line = 5
    with pytest.raises(CredoError) as error:
        loaded(tmp_path, text)
    assert message in str(error.value)
    assert f"queue.toml:{line}: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; a queue has at least one [[runs]]"),
        ("runs = []", "at least one [[runs]]"),
        ("[[runs]]\nrecipe = 'digits", ":2: "),
        ("[[runs]]\nrow = 'adam'\nseed = 0", "'recipe' is missing"),
        (
            "[[runs]]\nrecipe = 'digts'\nrow = 'adam'\nseed = 0",
            ":2: unknown recipe 'digts'. Did you mean 'digits'",
        ),
    ],
)
def test_a_file_that_is_no_queue(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CredoError) as error:
        loaded(tmp_path, text)
    assert message in str(error.value)


def test_a_recipe_file_lies_beside_the_list(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "name = 'mine'\n[training]\nmodel = 'mlp'\ndata = 'digits'\n[[rows]]\nname = 'a'\nmethod = 'adam'\n"
    )
    (job,) = loaded(tmp_path, "[[runs]]\nrecipe = 'mine.toml'\nrow = 'a'\nseed = 0\n")
    assert job.recipe == "mine"
    assert job_of(job.facts()) == job


def test_labels_are_folders_and_differ_where_settings_do() -> None:
    assert label_of("vogn", {"lr": 1e-3, "model_options.width": 8}) == "vogn+lr=0.001+width=8"
    long = [label_of("vogn", {f"a{k}": k for k in range(n)}) for n in (40, 41)]
    assert all(len(label) <= 85 for label in long)
    assert long[0] != long[1]
    assert label_of("a", {"data": "uci:wine"}) != label_of("a", {"data": "uci_wine"})


@pytest.mark.parametrize("name", ["queue.toml", "uci.toml"])
def test_the_projects_own_lists_can_be_run(name: str) -> None:
    jobs = load_queue(Path(__file__).resolve().parents[2] / "results" / name)
    assert [job.priority for job in jobs] == sorted((job.priority for job in jobs), reverse=True)
