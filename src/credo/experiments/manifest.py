"""Signed JSON, whose own digest makes every byte of it count; a manifest, which is one, lists files with theirs."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from credo.errors import IntegrityError, VersionError
from credo.experiments.names import PLAIN_NAME
from credo.posterior.files import write_atomically

MANIFEST: Final = "manifest.json"
FORMAT_VERSION: Final = 1
Entries = dict[str, dict[str, Any]]  # name → size, sha256


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entries(files: Mapping[str, bytes]) -> Entries:
    return {name: {"size": len(data), "sha256": digest(data)} for name, data in files.items()}


def write_manifest(folder: Path, files: Mapping[str, bytes]) -> None:
    write_signed(folder / MANIFEST, {"format": FORMAT_VERSION, "files": entries(files)})


def read_manifest(folder: Path) -> Entries:
    files: Entries = read_signed(folder / MANIFEST)["files"]
    return files


def write_signed(path: Path, fields: Mapping[str, Any]) -> None:
    """Atomically; `fields` has a "format", the version of what it is."""
    write_atomically(path, _text(fields))


def read_signed(path: Path) -> dict[str, Any]:
    """The fields; IntegrityError unless the file is, byte for byte, one that was written."""
    data = path.read_bytes()
    fields = _fields(data)
    stored = None if fields is None else fields.pop("sha256", None)
    if fields is None or stored is None:
        raise IntegrityError(
            f"{path} is damaged or was not written by credo: its {len(data)} bytes have SHA-256 "
            f"{digest(data)} and no stored digest to compare with."
        )
    actual = digest(_body(fields))
    if data != _text(fields):
        raise IntegrityError(f"{path} is damaged: its SHA-256 should be {stored} and is {actual}.")
    if fields["format"] > FORMAT_VERSION:
        raise VersionError(
            f"{path} has format {fields['format']}, and this credo reads up to {FORMAT_VERSION}. Upgrade credo."
        )
    return fields


def verified_bytes(folder: Path, wanted: Entries) -> dict[str, bytes]:
    """The content of every listed file; IntegrityError names the first that differs, and both digests."""
    return {name: _verified(folder, name, entry) for name, entry in wanted.items()}


def _verified(folder: Path, name: str, entry: Mapping[str, Any]) -> bytes:
    path = folder / name
    if PLAIN_NAME.fullmatch(name) is None:
        raise IntegrityError(f"{folder / MANIFEST} lists {name!r}, which is no plain file name.")
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise IntegrityError(
            f"{path} is missing; its SHA-256 should be {entry['sha256']}, and there is none."
        ) from error
    if (actual := digest(data)) != entry["sha256"] or len(data) != entry["size"]:
        raise IntegrityError(
            f"{path} is damaged: its SHA-256 should be {entry['sha256']} ({entry['size']} bytes) and is {actual} "
            f"({len(data)} bytes)."
        )
    return data


def _body(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, sort_keys=True).encode()


def _text(fields: Mapping[str, Any]) -> bytes:
    """The canonical text: the digest is that of the same text without it."""
    return _body({**fields, "sha256": digest(_body(fields))})


def _fields(data: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(data)
    except ValueError:  # also what UnicodeDecodeError is
        return None
    return fields if isinstance(fields, dict) else None
