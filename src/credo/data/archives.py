"""Unpacking what came from elsewhere: every member is looked at before the first byte is written."""

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

from credo.errors import IntegrityError

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
