"""A folder of data files whose every read is verified: bounds on what is unpacked, a manifest of digests, a folder.

credo-manifest.json has size and SHA-256 of every data file in a folder, and is kept beside the files. It is written
once the files are known to be good: by `fetch` after their digests were verified, or by the first `load` or `check`
after their structure was. From then on any changed bit is found.
"""

import hashlib
import json
import warnings
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

from credo.errors import IntegrityError
from credo.posterior.files import write_atomically

HTML_BEGINNINGS = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")
GZIP_MAGIC = b"\x1f\x8b"
LARGEST_UNPACKED = 4 * 2**30  # bytes; the largest official file (SVHN extra) unpacks to 1.6 GB


def damaged(source: str, why: str, data: bytes) -> IntegrityError:
    """The error for a file that is not what it should be, with what it is."""
    digest = hashlib.sha256(data).hexdigest()
    return IntegrityError(f"{source}: {why} (found {len(data)} bytes, SHA-256 {digest}); fetch it again")


def looks_like_html(data: bytes) -> bool:
    return data[:256].lstrip().lower().startswith(HTML_BEGINNINGS)


def check_content(data: bytes, source: str) -> None:
    if not data:
        raise damaged(source, "the file is empty", data)
    if looks_like_html(data):
        raise damaged(
            source, "this is an HTML page, probably a server's error message, and not the data", data
        )


def unpacked(data: bytes, source: str) -> bytes:
    """The content of a file whose name says whether it is gzipped."""
    return gunzip(data, source) if source.endswith(".gz") else data


def gunzip(data: bytes, source: str, limit: int = LARGEST_UNPACKED) -> bytes:
    """The content of a gzip file of one member; its own checksum is verified."""
    check_content(data, source)
    if not data.startswith(GZIP_MAGIC):
        raise damaged(
            source, f"a gzip file begins with {GZIP_MAGIC.hex()}, this one with {data[:2].hex()}", data
        )
    return inflate(data, source, limit, window=31)


def inflate(data: bytes, source: str, limit: int, window: int = 15) -> bytes:
    """A whole zlib stream (window 15) or gzip member (31), of at most `limit` bytes, and nothing after it."""
    stream = zlib.decompressobj(window)
    try:
        content = stream.decompress(data, limit + 1)
    except (zlib.error, MemoryError) as error:
        raise damaged(source, f"the compressed data is damaged: {error}", data) from error
    if len(content) > limit:
        raise damaged(source, f"it unpacks to more than the {limit} bytes allowed", data)
    if not stream.eof:
        raise damaged(source, "the compressed data is truncated", data)
    if stream.unused_data:
        raise damaged(source, f"{len(stream.unused_data)} extra bytes follow the compressed data", data)
    return content


NAME = "credo-manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Entry:
    size: int
    sha256: str

    @staticmethod
    def of(data: bytes) -> "Entry":
        return Entry(len(data), sha256(data).hexdigest())

    def difference(self, actual: "Entry") -> str:
        """What went wrong, in words; empty if nothing did."""
        if self == actual:
            return ""
        if self.size != actual.size:
            state = "truncated" if actual.size < self.size else "too long"
            return f"{state}: expected {self.size} bytes, found {actual.size} (SHA-256 {actual.sha256})"
        return f"changed: expected SHA-256 {self.sha256}, found {actual.sha256}, both of {self.size} bytes"


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Names (posix, relative) to entries; empty where there is no manifest."""
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']!r}")
        entries = {str(name): Entry(**entry) for name, entry in content["files"].items()}
        for name, entry in entries.items():
            _check(name, entry)
        return entries
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"damaged ({error}); delete it to accept the files as they are, or fetch them again"
        raise IntegrityError(f"{path}: {why}") from error


def write_manifest(folder: Path, entries: dict[str, Entry]) -> None:
    files = {name: asdict(entries[name]) for name in sorted(entries)}
    text = json.dumps({"version": VERSION, "files": files}, indent=1) + "\n"
    write_atomically(folder / NAME, text.encode())


def entry_of_file(path: Path) -> Entry:
    """Of a file of any size, read in pieces."""
    digest, size = sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return Entry(size, digest.hexdigest())


def _check(name: str, entry: Entry) -> None:
    path = PurePosixPath(name)
    if not path.parts or ".." in path.parts or path.is_absolute() or "\\" in name or "\0" in name:
        raise ValueError(f"file name {name!r}")
    if type(entry.size) is not int or not isinstance(entry.sha256, str) or len(entry.sha256) != 64:
        raise ValueError(f"entry of {name!r}")


THREADS = 4  # hashing and decoding let other threads run
QUARANTINE = ".quarantine"


class Folder:
    """Reads files and compares them with the manifest; what it has not seen before it remembers until `confirm`."""

    def __init__(self, path: Path, remedy: str = "") -> None:
        self.path = path
        self.remedy = remedy
        self.manifest = read_manifest(path)
        self.seen: dict[str, Entry] = {}  # what was read
        self.new: dict[str, Entry] = {}  # and is not in the manifest

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def where(self, name: str) -> str:
        return str(self.path / name)

    def read(self, name: str) -> bytes:
        """The file's bytes; IntegrityError if it is missing or not what the manifest says."""
        try:
            data = (self.path / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise IntegrityError(f"{self.where(name)}: missing. {self.remedy}".strip()) from error
        self.seen[name] = Entry.of(data)
        self.verify(name, self.seen[name])
        return data

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.read, names))

    def verify(self, name: str, actual: Entry) -> None:
        expected = self.manifest.get(name)
        if expected is None:
            self.new[name] = actual
        elif difference := expected.difference(actual):
            raise IntegrityError(f"{self.where(name)}: {difference}. {self.remedy}".strip())

    def expect(self, name: str, actual: Entry, official: Entry) -> None:
        """IntegrityError unless the content is the official one."""
        if difference := official.difference(actual):
            raise IntegrityError(f"{self.where(name)}: {difference}. {self.remedy}".strip())

    def images(self, suffixes: tuple[str, ...], below: str = "") -> list[str]:
        """Names of the files with these suffixes anywhere below, sorted; those the manifest knows must be there."""
        start = self.path / below
        found = sorted(
            p.relative_to(self.path).as_posix() for p in start.rglob("*") if p.suffix.lower() in suffixes
        )
        known = {
            n
            for n in self.manifest
            if n.startswith(f"{below}/" if below else "") and n.lower().endswith(suffixes)
        }
        if lost := sorted(known - set(found)):
            raise IntegrityError(
                f"{self.where(lost[0])}: missing, with {len(lost) - 1} others. {self.remedy}".strip()
            )
        if not found:
            raise IntegrityError(f"{start}: no images ({', '.join(suffixes)}) found. {self.remedy}".strip())
        return found

    def confirm(self) -> None:
        """What was read is good: remember it. A folder that cannot be written to goes without, and says so once."""
        if not self.new:
            return
        entries = self.manifest | self.new
        try:
            write_manifest(self.path, entries)
        except OSError as error:
            warnings.warn(
                f"{self.path / NAME} cannot be written ({error.strerror}): later changes of these files go unnoticed",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self.manifest, self.new = entries, {}


def quarantine(path: Path) -> Path:
    """Move a bad file out of the way, where it can be looked at; an older one of that name is replaced."""
    target = path.with_name(path.name + QUARANTINE)
    path.replace(target)
    return target


def first_existing(root: Path, candidates: Iterable[str]) -> Path | None:
    return next((root / name for name in candidates if (root / name).is_dir()), None)
