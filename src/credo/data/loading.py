"""`load` and `check`: from a name and a root to verified data."""

import os
from dataclasses import dataclass
from pathlib import Path

from credo.data.catalogue import DIGITS, DataSet, find
from credo.data.examples import Splits
from credo.data.sets.digits import read_digits
from credo.data.sets.images import SUFFIXES
from credo.data.verify import Entry, Folder, entry_of_file, first_existing
from credo.errors import IntegrityError


def default_root() -> Path:
    """$CREDO_DATA, else ~/.cache/credo."""
    return Path(os.environ.get("CREDO_DATA") or Path.home() / ".cache" / "credo")


def load(name: str, root: Path | str | None = None) -> Splits:
    """A data set by its name, from the official files below `root` ($CREDO_DATA, else ~/.cache/credo).

    Every byte read is verified: against the official digests where these are known, against the folder's manifest
    (see `credo.data.verify`) once there is one. Anything else than the right data is an IntegrityError.
    """
    if name == DIGITS:
        return read_digits()
    data_set = find(name)
    folder = open_folder(data_set, root)
    splits = data_set.read(folder)
    if not data_set.lazy:
        folder.confirm()
    return splits


def open_folder(data_set: DataSet, root: Path | str | None) -> Folder:
    base = default_root() if root is None else Path(root)
    path = first_existing(base, data_set.folders)
    if path is None:
        where = " or ".join(str(base / name) for name in data_set.folders)
        raise IntegrityError(f"{data_set.name} is missing: no folder {where}. {data_set.remedy()}")
    return Folder(path, data_set.remedy())


@dataclass(frozen=True)
class FileReport:
    """What `check` found about one file; `problem` is empty where there is none."""

    name: str
    problem: str
    expected: Entry | None = None
    actual: Entry | None = None


@dataclass(frozen=True)
class CheckReport:
    """`files` in the order of names; `first_time`: without a manifest, structure and official digests decided."""

    name: str
    folder: Path | None
    files: tuple[FileReport, ...] = ()
    problem: str = ""  # what is wrong with the set as a whole
    first_time: bool = False

    @property
    def ok(self) -> bool:
        return not self.problem and not any(file.problem for file in self.files)

    def __str__(self) -> str:
        bad = [f"{file.name}: {file.problem}" for file in self.files if file.problem]
        bad += [self.problem] if self.problem else []
        if bad:
            return "\n".join(f"{self.name}: {line}" for line in bad)
        how = "first check, manifest written" if self.first_time else "as in the manifest"
        return (
            f"{self.name}: {len(self.files)} files good ({how})"
            if self.folder
            else f"{self.name}: nothing to check"
        )


def check(name: str, root: Path | str | None = None) -> CheckReport:
    """Hash every file against the manifest, then read the set; the first time, read it and write the manifest."""
    if name == DIGITS:
        return CheckReport(name, None)
    data_set = find(name)
    try:
        folder = open_folder(data_set, root)
    except IntegrityError as error:
        return CheckReport(name, None, problem=str(error))
    first_time = not folder.manifest
    files = tuple(_file_report(folder, file) for file in sorted(folder.manifest))
    problem = ""
    if not any(file.problem for file in files):
        problem = _read_whole(data_set, folder)
        files = tuple(
            _file_report(folder, n, e) for n, e in sorted({**folder.manifest, **folder.new}.items())
        )
    return CheckReport(name, folder.path, files, problem, first_time)


def _read_whole(data_set: DataSet, folder: Folder) -> str:
    """Read the set, remember new files; what is wrong, or nothing."""
    try:
        data_set.read(folder)
        if data_set.lazy:
            for name in folder.images(SUFFIXES):
                if name not in folder.manifest:
                    folder.verify(name, entry_of_file(folder.path / name))
    except IntegrityError as error:
        return str(error)
    folder.confirm()
    return ""


def _file_report(folder: Folder, name: str, known: Entry | None = None) -> FileReport:
    """Of a file in the manifest; `known`: it has just been hashed."""
    expected = folder.manifest.get(name)
    if known is not None:
        return FileReport(name, "", expected, known)
    if not folder.has(name):
        return FileReport(name, "missing", expected)
    actual = entry_of_file(folder.path / name)
    return FileReport(name, expected.difference(actual) if expected else "", expected, actual)
