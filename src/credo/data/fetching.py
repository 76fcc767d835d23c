"""`fetch`: official files from their addresses, verified before they get their names."""

import os
import secrets
import shutil
from pathlib import Path

from credo.data.archives import unpack
from credo.data.catalogue import DIGITS, DataSet, find
from credo.data.download import Progress, Remote, download
from credo.data.folder import first_existing, quarantine
from credo.data.loading import CheckReport, check, default_root
from credo.data.manifest import Entry, read_manifest, write_manifest
from credo.errors import IntegrityError, UnsupportedOperation


def fetch(
    name: str,
    root: Path | str | None = None,
    *,
    base_url: str | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Make sure that a data set lies below `root`, whole and verified; what `check` says of it.

    What is there and good stays. A file that is there and bad is renamed to `<file>.quarantine` and fetched again.
    `base_url`: take the files of the official names from a mirror; the official digests decide all the same.
    """
    if name == DIGITS:
        return check(name)
    data_set = find(name)
    base = default_root() if root is None else Path(root)
    before = check(name, base)
    if before.ok:
        return before
    if not data_set.remotes:
        raise UnsupportedOperation(f"{name} cannot be fetched. {data_set.remedy()}")
    base.mkdir(parents=True, exist_ok=True)
    _put_aside(data_set, base, before)
    for remote in data_set.remotes:
        if data_set.unpack_into is None:
            _fetch_file(data_set, remote, base, base_url, progress)
        else:
            _fetch_archive(data_set, remote, base, base_url, progress)
    after = check(name, base)
    if not after.ok:
        raise IntegrityError(f"{name} was fetched and is still not right: {after}")
    return after


def _put_aside(data_set: DataSet, base: Path, report: CheckReport) -> None:
    """Bad files into quarantine. An archive comes whole, so its old folder goes aside whole."""
    if report.folder is None:
        return
    if data_set.unpack_into is not None:
        shutil.rmtree(f"{report.folder}.quarantine", ignore_errors=True)
        quarantine(report.folder)
        return
    entries = read_manifest(report.folder)
    for remote in data_set.remotes:
        path, expected = report.folder / remote.name, entries.get(remote.name)
        bad = report.problem or any(file.name == remote.name and file.problem for file in report.files)
        if bad and path.is_file():
            quarantine(path)
            entries.pop(remote.name, None)
        elif expected is not None and not path.is_file():
            entries.pop(remote.name)
    write_manifest(report.folder, entries)


def _fetch_file(
    data_set: DataSet, remote: Remote, base: Path, base_url: str | None, progress: Progress | None
) -> None:  # fmt: skip
    folder = first_existing(base, data_set.folders) or base / data_set.folders[0]
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / remote.name).is_file():
        return
    temporary, entry = download(remote, folder, base_url=base_url, progress=progress)
    os.replace(temporary, folder / remote.name)
    write_manifest(folder, read_manifest(folder) | {remote.name: entry})


def _fetch_archive(
    data_set: DataSet, remote: Remote, base: Path, base_url: str | None, progress: Progress | None
) -> None:  # fmt: skip
    pins = read_manifest(base)
    temporary, entry = download(
        remote, base, base_url=base_url, pinned=pins.get(remote.name), progress=progress
    )
    workshop = base / f".{secrets.token_hex(8)}.unpacking"
    try:
        unpack(temporary, workshop)
        _move_into_place(workshop, base, str(data_set.unpack_into))
        _pin(base, remote, entry)
    finally:
        temporary.unlink(missing_ok=True)
        shutil.rmtree(workshop, ignore_errors=True)


def _move_into_place(workshop: Path, base: Path, into: str) -> None:
    """The whole of the workshop as folder `into`; or, for "", each of its folders by its own name."""
    if into:
        os.replace(workshop, base / into)
        return
    for path in sorted(workshop.iterdir()):
        if path.is_dir():
            os.replace(path, base / path.name)


def _pin(base: Path, remote: Remote, entry: Entry) -> None:
    """Only where no SHA-256 is published: the first that passed its MD5 is the one from now on."""
    if remote.sha256 is None:
        write_manifest(base, read_manifest(base) | {remote.name: entry})
