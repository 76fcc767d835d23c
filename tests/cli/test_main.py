"""Whatever is typed: a clear line and a documented exit code, never a traceback."""

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import credo
from credo import cli, errors
from credo.cli import exits
from credo.errors import LockedError
from credo.experiments.stopping import Terminated

pytest.importorskip("tyro")

COMMANDS = ("demo", "list", "run", "report", "predict", "data", "info", "doctor")


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command_and_teaches(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, _ = outcome(capsys, *words)
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert "credo run table1-lenet5" in out
    assert "Exit codes" in out


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["list"],
        ["run"],
        ["report"],
        ["predict"],
        ["info"],
        ["doctor"],
        ["data", "fetch"],
        ["data", "check"],
    ],
)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, _ = outcome(capsys, *words, "--help")
    assert code == 0
    assert words == ["info"] or f"    credo {' '.join(words)}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "--version") == (0, f"credo {credo.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu", "digits"], "Did you mean 'run'?"),
        (["list", "digit"], "Did you mean 'digits'?"),
        (["run", "table1-lenet"], "Did you mean 'table1-lenet5'?"),
        (["run", "digits", "--only", "vogm"], "Did you mean 'vogn'?"),
        (["run", "digits", "--set", "epohcs=3"], "Did you mean 'epochs'?"),
        (["run", "digits", "--set", "lr"], "'lr'"),
        (["run", "digits", "--set", "epochs=1.5"], "whole number"),
        (["run", "digits", "--set", "lr=1", "--set", "lr=2"], "twice"),
        (["run", "../../etc"], "../../etc"),
        (["run", "digits", "--seeds", "0"], "seeds"),
        (["run", "absent.toml"], "absent.toml"),
        (["demo", "--methods", "admm"], "Did you mean 'adam'?"),
        (["demo", "--seeds", "0"], "seeds"),
        (["data", "check", "cifra10"], "did you mean 'cifar10'?"),
        (["data", "check", "../cifar10"], "../cifar10"),
        (["report", "absent"], "absent"),
        (["predict", "absent", "x.npy", "--out", "-"], "absent"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = outcome(capsys, *words)
    assert code in (exits.USAGE, exits.BAD_DATA)
    assert out == ""
    assert err.startswith("credo: ")
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "digits", "--sizes", "cpu"],
        ["run", "digits", "--size", "huge"],
        ["run", "digits", "--seeds", "three"],
        ["run", "digits", "extra"],
        ["data"],
        ["data", "remove", "cifar10"],
        ["predict", "somewhere"],
        ["--unknown"],
    ],
    ids=" ".join,
)
def test_what_the_parser_refuses_is_said_on_stderr(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code, out, err = outcome(capsys, *words)
    assert code == exits.USAGE
    assert out == ""
    assert "--help" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidValue("x"), 2),
        (errors.InvalidType("x"), 2),
        (ModuleNotFoundError("x", name="matplotlib"), 2),
        (errors.IntegrityError("x"), 3),
        (errors.VersionError("x"), 3),
        (FileNotFoundError("x"), 3),
        (LockedError("x"), 4),
        (errors.NonFiniteError("x"), 1),
        (errors.CredoError("x"), 1),
        (PermissionError("x"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_errors_have_their_exit_codes(
    capsys: pytest.CaptureFixture[str], failing: list[BaseException], error: BaseException, code: int
) -> None:
    failing.append(error)
    found, _, err = outcome(capsys, "info")
    assert found == code
    assert err.startswith("credo: ")
    assert err.count("\n") == 1
    if not isinstance(error, Terminated):  # ends the process by itself
        with pytest.raises(type(error)):
            cli.main(["info", "--debug"])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """`credo info` raises what is put here."""
    raised: list[BaseException] = []

    def show() -> int:
        raise raised[0]

    monkeypatch.setattr("credo.cli.show.show_info", show)
    return raised


def test_a_mistake_of_ours_keeps_its_traceback(failing: list[BaseException]) -> None:
    failing.append(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["info"])


def test_a_closed_pipe_is_no_error(capsys: pytest.CaptureFixture[str], failing: list[BaseException]) -> None:
    failing.append(BrokenPipeError())
    assert outcome(capsys, "info") == (0, "", "")


def test_warnings_are_lines_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("credo.cli.show.show_info", lambda: warnings.warn("over\nthere", stacklevel=1) or 0)
    assert outcome(capsys, "info") == (0, "", "credo: warning: over there\n")


def test_sigterm_ends_with_143_and_leaves_the_handler_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("credo.cli.show.show_info", lambda: signal.raise_signal(signal.SIGTERM))
    assert outcome(capsys, "info")[0] == exits.TERMINATED
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    code, _, err = outcome(capsys, "list")
    assert code == exits.USAGE
    assert err == "credo: tyro and rich missing; install with: pip install 'credo[experiments]'\n"


def test_info_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "info")
    assert code == 0
    assert all(word in out for word in ("credo", "torch", "kernels", "devices", "cpu"))


def test_list_shows_recipes_and_one_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "list")
    assert all(word in out for word in ("table1-lenet5", "digits", "vogn", "lenet5", "cifar10"))
    _, out, _ = outcome(capsys, "list", "table1-lenet5")
    assert "paper's result" in out


def test_python_m_credo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "credo", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"credo {credo.__version__}\n"
