"""credo-manifest.json: size and SHA-256 of every data file in a folder, kept beside the files.

It is written once the files are known to be good: by `fetch` after their digests were verified, or by the first
`load` or `check` after their structure was. From then on any changed bit is found.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath

from credo.errors import IntegrityError
from credo.posterior.files import write_atomically

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
