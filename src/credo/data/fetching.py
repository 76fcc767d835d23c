"""`fetch`: official files from their addresses, verified before they get their names.

Of an archive every member is looked at before the first byte is written.
"""

import os
import secrets
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from credo.data.catalogue import DIGITS, DataSet, find
from credo.data.download import Progress, Remote, download
from credo.data.loading import CheckReport, check, default_root
from credo.data.verify import Entry, first_existing, quarantine, read_manifest, write_manifest
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


MOST_MEMBERS = 2_000_000
LARGEST_TOTAL = 200 * 2**30  # bytes; ImageNet's training images are 138 GiB
LARGEST_RATIO = 200  # unpacked : packed; pictures and pixels stay far below


@dataclass(frozen=True)
class Member:
    name: str
    size: int
    is_folder: bool
    is_file: bool
    handle: tarfile.TarInfo | zipfile.ZipInfo


def unpack(archive: Path, into: Path) -> list[str]:
    """Unpack a .tar, .tar.gz, .tgz or .zip file into a new folder; names of the files written.

    Links, devices, absolute names, `..`, duplicate names, too many or too large members: IntegrityError, and nothing
    is written. A failure half-way removes what was written.
    """
    with _opened(archive) as source:
        members = _checked(archive, _members(source))
        into.mkdir(parents=True)
        try:
            for member in members:
                _write(source, member, into)
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
    return [member.name for member in members if member.is_file]


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile | zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) if zipfile.is_zipfile(path) else tarfile.open(path) as source:
            yield source
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise IntegrityError(f"{path}: not a readable archive ({type(error).__name__}: {error})") from error
    except OSError as error:
        if isinstance(error, IntegrityError) or error.errno is not None:
            raise
        raise IntegrityError(f"{path}: not a readable archive ({error})") from error  # gzip's own complaints


def _members(source: tarfile.TarFile | zipfile.ZipFile) -> Iterator[Member]:
    if isinstance(source, zipfile.ZipFile):
        for info in source.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            plain = kind in {0, stat.S_IFREG} and not info.is_dir()
            yield Member(
                info.filename, info.file_size, info.is_dir() and kind in {0, stat.S_IFDIR}, plain, info
            )
    else:
        for entry in source:
            yield Member(entry.name, entry.size, entry.isdir(), entry.isfile(), entry)


def _checked(archive: Path, members: Iterator[Member]) -> list[Member]:
    """All members, or IntegrityError at the first that may not be; reads headers only."""
    allowed = min(LARGEST_TOTAL, LARGEST_RATIO * archive.stat().st_size)
    kept: list[Member] = []
    names: set[str] = set()
    total = 0
    for member in members:
        total += member.size
        if why := _objection(member, names):
            raise IntegrityError(f"{archive}: member {member.name!r} refused, nothing was unpacked: {why}")
        if len(kept) >= MOST_MEMBERS or total > allowed:
            why = f"more than {MOST_MEMBERS} members or {allowed} bytes"
            raise IntegrityError(f"{archive}: refused, nothing was unpacked: {why}")
        names.add(str(PurePosixPath(member.name)))
        kept.append(member)
    return kept


def _objection(member: Member, names: set[str]) -> str:
    path = PurePosixPath(member.name)
    if not (member.is_file or member.is_folder):
        return "it is a link or a device"
    if (
        path.is_absolute()
        or ".." in path.parts
        or "\\" in member.name
        or ":" in member.name
        or "\0" in member.name
    ):
        return "its name leads out of the folder"
    if member.is_file and (not path.parts or str(path) in names):
        return "its name is empty or occurs twice"
    return ""


def _write(source: tarfile.TarFile | zipfile.ZipFile, member: Member, into: Path) -> None:
    target = into / member.name
    if member.is_folder:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, zipfile.ZipFile):
        content = source.open(cast("zipfile.ZipInfo", member.handle))
    else:
        content = cast("IO[bytes]", source.extractfile(cast("tarfile.TarInfo", member.handle)))
    with content, open(target, "xb") as file:
        _copy(content, file, member)


def _copy(content: IO[bytes], file: IO[bytes], member: Member) -> None:
    """Exactly the size that was announced and checked, however much there is."""
    left = member.size
    while piece := content.read(min(1 << 20, left + 1)):
        left -= len(piece)
        if left < 0:
            raise tarfile.ReadError(f"{member.name!r} is larger than announced")
        file.write(piece)
    if left:
        raise tarfile.ReadError(f"{member.name!r} is truncated")
