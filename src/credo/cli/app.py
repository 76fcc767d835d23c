"""The commands as tyro reads them: signatures and help; the work is done in the files beside this one."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tyro
from tyro.conf import Positional, UseAppendAction, arg
from tyro.extras import SubcommandApp

from credo.cli.exits import OK
from credo.experiments.names import known

VERSION: Final[str] = import_module("credo").__version__  # no layer imports the package that gathers them all

Name = Annotated[Positional[str], arg(metavar="NAME")]
Recipe = Annotated[Positional[str], arg(metavar="RECIPE")]
Folder = Annotated[Path, arg(metavar="DIR")]
MaybeFolder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(optional)")]
MaybeInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint="(optional)")]
Rows = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ROW")]
Settings = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")]

ABOUT = f"""credo {VERSION}: deep networks that know how sure they are.

Start with:
    credo demo                                    a minute on two cores, no download
    credo list                                    what there is to run
    credo run table1-lenet5 --only vogn --out runs
    credo report runs
    credo tune digits --row vogn                  search its numbers on validation data

Exit codes: 0 done, 1 failed, 2 wrong command line, 3 missing or damaged data, 4 the folder is in use, 130 and 143
interrupted (the same command resumes). --debug shows the traceback of an error, --version the version."""


def demo(
    *,
    out: Folder = Path("demo"),
    methods: tuple[str, ...] = (),
    seeds: int = 5,
    epochs: MaybeInt = None,
) -> int:
    """Adam, MC-dropout and VOGN on handwritten digits, some of them unfamiliar.

    Trains side by side, prints the table, and leaves runs, picture and HTML report in a folder, in place of those of
    an earlier demo. The same numbers every time.

        credo demo
        credo demo --methods adam vogn --seeds 2 --out /tmp/demo

    Args:
        out: where runs, picture and report go.
        methods: adam, mc-dropout and vogn unless given; also sgd, ogn, kfac, noisy-kfac, ivon, bbb.
        seeds: how many seeds the numbers are averaged over.
        epochs: other than the recipe's.
    """
    from credo.cli.demo import demo as work

    return work(out, methods, seeds, epochs)


def list_(
    recipe: Annotated[
        Positional[str | None], arg(metavar="[RECIPE]", help_behavior_hint="(optional)")
    ] = None,
) -> int:
    """What there is to run: recipes, methods, models and data sets.

    With the name of a recipe: its rows, their settings, and what the paper published.

        credo list
        credo list table1-lenet5

    Args:
        recipe: show this one in full.
    """
    from credo.cli.show import show_recipes

    return show_recipes(recipe)


def run(
    recipe: Recipe,
    *,
    only: Rows = (),
    size: Literal["cpu", "paper"] = "cpu",
    set: Settings = (),
    seeds: int = 1,
    ensemble: MaybeInt = None,
    out: Folder = Path("runs"),
    data: MaybeFolder = None,
    resume: bool = False,
    device: Annotated[str, arg(metavar="DEVICE")] = "cpu",
    timeout: Annotated[float, arg(metavar="SECONDS")] = 300.0,
) -> int:
    """Train the rows of a recipe.

    Each row and seed has a folder of its own. A finished run is not done again, an interrupted one goes on from its
    last checkpoint, bit for bit as if nothing had happened. Under torchrun the processes share every batch, and one of
    them writes.

        credo run table1-lenet5 --only adam --only vogn --seeds 3
        credo run table1-lenet5 --only vogn --set lr=1e-3 --set prior_precision=10 --set epochs=5
        credo run table1-lenet5 --size paper --data /data --out runs
        torchrun --nproc-per-node 2 --max-restarts 3 -m credo run table1-lenet5 --only vogn

    Args:
        recipe: its name, credo list shows them; or a recipe of your own, a file whose name ends in .toml.
        only: a row of the recipe; all rows unless given.
        size: the paper's own size, or one that two CPU cores finish in minutes.
        set: a setting of the optimiser, the model or the training; goes for every row that is run.
        seeds: how many seeds: 0, 1, …
        ensemble: also a deep ensemble of the first so many seeds of each row, which are trained if they are not there.
        out: where the runs go.
        data: where the data sets lie; otherwise $CREDO_DATA, then ~/.cache/credo.
        resume: insist that there is something to go on from.
        device: cpu, or cuda; under torchrun each process takes a GPU of its own.
        timeout: how long a process under torchrun waits for the others before it gives up.
    """
    from credo.cli.run import run as work

    return work(recipe, only, size, set, seeds, out, data, resume, device, timeout, ensemble)


def queue(
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    *,
    jobs: int = 1,
    status: bool = False,
    out: Folder = Path("runs"),
    results: MaybeFolder = None,
    data: MaybeFolder = None,
    threads: int = 1,
    nice: int = 19,
    device: Annotated[str, arg(metavar="DEVICE")] = "cpu",
) -> int:
    """Run a list of runs: what is not finished, some at a time, in the order of their priority.

    The list is a TOML file of [[runs]], each with recipe, row or rows, seed or seeds, and, where wanted, size,
    settings, sweep, name and priority; docs/queue.md has all of it. Each run is a process of its own. One that fails
    is noted, and the queue goes on with the next. Killed at any moment, the same command goes on where it was. Ctrl-Z
    (SIGTSTP) pauses the runs, fg (SIGCONT) lets them go on; Ctrl-C and SIGTERM finish the steps under way and save.

        credo queue sweep.toml --jobs 2
        credo queue sweep.toml --status
        credo queue results/queue.toml --jobs 2 --out runs --results results --data /data

    Args:
        file: the list.
        jobs: how many runs at a time.
        status: only show how far every run is.
        out: where the runs go, as with credo run.
        results: where one small file for each finished run goes: settings, scores, every epoch, no weights.
        data: where the data sets lie; otherwise $CREDO_DATA, then ~/.cache/credo.
        threads: of each run.
        nice: 19 leaves the machine to other processes, 0 competes.
        device: cpu, or cuda; all runs share it.
    """
    from credo.cli.queue import Options
    from credo.cli.queue import queue as work

    return work(file, Options(out, results, data, threads, nice, device), jobs, status)


def tune(
    recipe: Recipe,
    *,
    row: Annotated[str, arg(metavar="ROW")],
    trials: MaybeInt = None,
    minutes: Annotated[float | None, arg(metavar="MINUTES", help_behavior_hint="(optional)")] = None,
    validation: Annotated[float, arg(metavar="FRACTION")] = 0.2,
    search: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME[=LOW,HIGH]")] = (),
    set: Settings = (),
    defaults: bool = False,
    size: Literal["cpu", "paper"] = "cpu",
    seed: int = 0,
    seeds: int = 1,
    out: Folder = Path("tuned"),
    data: MaybeFolder = None,
    device: Annotated[str, arg(metavar="DEVICE")] = "cpu",
) -> int:
    """Search the numbers of a method for a row of a recipe, by NLL on validation data.

    The first trial has the row's own settings; trials that fall behind are dropped early. Killed or stopped, the same
    command goes on. It ends with a table, the constructor line, an HTML page with plots, and a recipe for credo run.

        credo tune digits --row vogn --trials 20
        credo tune table1-lenet5 --row vogn --minutes 60 --defaults --search lr --search noise=0.5,2

    Args:
        recipe: its name, credo list shows them; or a file whose name ends in .toml.
        row: the row of the recipe.
        trials: how many trials in all; 20 unless trials or minutes are given.
        minutes: how long in all, over all starts; the trial under way is finished.
        validation: this share of the training data decides; the test data are not looked at.
        search: a number to search, and the range of the factor on it; all of the method's unless given.
        set: a setting of the optimiser, the model or the training, as in credo run.
        defaults: start from the method's defaults instead of the row's settings.
        size: the paper's own size, or one that two CPU cores finish in minutes.
        seed: of the trials (all have the same) and of what is proposed.
        seeds: train each trial with so many seeds, and score it by the mean.
        out: where the study goes.
        data: where the data sets lie; otherwise $CREDO_DATA, then ~/.cache/credo.
        device: cpu, or cuda.
    """
    from credo.cli.run import tune as work

    return work(
        recipe, row, trials, minutes, validation, search, set, defaults, size, seed, seeds, out, data, device
    )


def report(
    out: Annotated[Positional[Path], arg(metavar="DIR")], *, data: MaybeFolder = None, docs: bool = False
) -> int:
    """Our numbers beside the published ones.

    A table here; report.md, report.html (one self-contained page with the figures) and the figures in the folder. Of a
    folder of records, as credo queue --results writes them, the table alone, or with --docs a page of documentation.

        credo report runs
        credo report results --docs

    Args:
        out: the folder that was given to credo run as --out, or to credo queue as --results.
        data: where the data sets lie, for the figures that show inputs; else as in credo run.
        docs: write docs/results.md and its figures, beside the folder of records.
    """
    from credo.cli.run import report as work

    return work(out, data, docs)


def predict(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    inputs: Annotated[Positional[Path], arg(metavar="INPUTS")],
    *,
    out: Annotated[Path, arg(metavar="CSV")],
    samples: MaybeInt = None,
    seed: int = 0,
    batch_size: int = 256,
) -> int:
    """What a saved run says of new inputs, as a CSV.

    One line an input: class, its probability, the entropy (all doubt) and the mutual information (the doubt that
    comes from too little data), both in nats.

        credo predict runs/table1-lenet5/cpu/vogn/seed-0 photos --out photos.csv
        credo predict runs/digits/cpu/vogn/seed-0 digits.npy --out -

    Args:
        run: the folder of one finished run (…/seed-0).
        inputs: a folder of images, scaled to the size of the training data; or a .npy or .safetensors file with an
            array, examples first: images (n, C, H, W) as uint8 or as floats from 0 to 1, or floats as the network reads
            them. Images count to 255; where the training data count to less (digits to 16) they are scaled.
        out: the file to write; - is the terminal.
        samples: functions drawn from the posterior; as in the run unless given.
        seed: of these draws.
        batch_size: inputs at a time.
    """
    from credo.cli.predict import predict as work

    return work(run, inputs, out, samples, seed, batch_size)


def info() -> int:
    """Versions, kernels and devices: what to send with a bug report."""
    from credo.cli.show import show_info

    return show_info()


def doctor(*, device: Annotated[str | None, arg(metavar="DEVICE")] = None, quick: bool = False) -> int:
    """Is credo right on this machine, and how fast: one table, to paste into an issue.

    Says which kernels run and why, compares a step of every method with the CPU in float64, and times Adam and VOGN on
    four networks. About a minute. The exit code is 1 where a number is wrong.

        credo doctor
        credo doctor --device cuda:1 --quick

    Args:
        device: cpu, cuda or another device of torch's; the GPU unless given, where there is one.
        quick: leave out the times.
    """
    from credo.cli.doctor import doctor as work

    return work(device, quick)


def fetch(name: Name, *, data: MaybeFolder = None) -> int:
    """Download a data set from its official address and verify it.

        credo data fetch cifar10 --data /data

    Args:
        name: credo list shows them.
        data: where it goes; otherwise $CREDO_DATA, then ~/.cache/credo.
    """
    from credo.cli.show import fetch as work

    return work(name, data)


def check(name: Name, *, data: MaybeFolder = None) -> int:
    """Verify the files of a data set, and say what is in it.

        credo data check cifar10

    Args:
        name: credo list shows them.
        data: where it lies; otherwise $CREDO_DATA, then ~/.cache/credo.
    """
    from credo.cli.show import check as work

    return work(name, data)


COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "list": list_,
    "run": run,
    "queue": queue,
    "tune": tune,
    "report": report,
    "predict": predict,
    "info": info,
    "doctor": doctor,
}
DATA_COMMANDS: dict[str, Callable[..., int]] = {"fetch": fetch, "check": check}


def execute(words: list[str]) -> int:
    if words in ([], ["help"]):
        words = ["--help"]
    if words == ["--version"]:
        print(f"credo {VERSION}")
        return OK
    if not words[0].startswith("-"):
        known("command", words[0], [*COMMANDS, "data"])
    result: Any = _app(words).cli(
        prog="credo", description=ABOUT, args=words, config=(tyro.conf.FlagCreatePairsOff,)
    )
    return int(result)


def _app(words: list[str]) -> SubcommandApp:
    """Commands with their full help where it is asked for, and one line in lists."""
    app, data = SubcommandApp(), SubcommandApp()
    for name, command in COMMANDS.items():
        app.command(name=name, help=_help(command, whole=words[:1] == [name]))(command)
    for name, command in DATA_COMMANDS.items():
        data.command(name=name, help=_help(command, whole=words[:2] == ["data", name]))(command)
    app.command(data, name="data", help="Fetch or check a data set.")
    return app


def _help(command: Callable[..., int], whole: bool) -> str:
    text = inspect.getdoc(command) or ""
    return text.partition("\n\nArgs:")[0] if whole else text.partition("\n")[0]
