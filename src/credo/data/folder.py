"""A folder of data files whose every read is verified."""

import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from credo.data.manifest import NAME, Entry, read_manifest, write_manifest
from credo.errors import IntegrityError

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
