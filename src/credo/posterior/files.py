"""Posterior files: safetensors whose header holds JSON metadata and a SHA-256 of the whole file.

The digest covers every byte, header and data, with its own 64 digits read as zeros; so one file alone can be
verified, and no flipped bit passes. Nothing in a file is ever executed.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import safetensors
import safetensors.torch
from torch import Tensor

from credo.errors import CredoError, IntegrityError, InvalidType, InvalidValue, VersionError

if TYPE_CHECKING:
    from credo.posterior.base import Posterior

if TYPE_CHECKING:
    from credo.posterior.base import Posterior

FORMAT_VERSION = 2  # 1 had no buffers
BUFFER = "buffer/"  # what their names begin with
UNSIGNED = "0" * 64
# Inside JSON strings quotes are escaped, so only the field itself can look like this.
DIGEST_FIELD = re.compile(rb'"credo\.sha256":"([0-9a-f]{64})"')


def save_posterior(
    path: str | PathLike[str],
    kind: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, object],
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    tensors = {**tensors, **{BUFFER + name: tensor for name, tensor in (buffers or {}).items()}}
    header = {
        "credo.format": str(FORMAT_VERSION),
        "credo.kind": kind,
        "credo.order": json.dumps(list(tensors)),  # safetensors sorts by name; draws depend on the order
        "credo.metadata": json.dumps(dict(metadata)),
        "credo.sha256": UNSIGNED,
    }
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    target = _path(path)
    write_atomically(target, _signed(safetensors.torch.save(content, header)))


def load_posterior(path: str | PathLike[str]) -> "Posterior":
    """The posterior in a file, on the CPU, in the class it was saved from.

    A file that is not byte for byte what `save` wrote raises IntegrityError, one of a newer format
    VersionError. A missing or unreadable file is the OSError it always is.
    """
    target = _path(path)
    data = target.read_bytes()
    _verify(target, data)
    try:
        return _read(target, data)
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise IntegrityError(
            f"{target} is whole, with a digest that fits, and yet no posterior: {error}"
        ) from error


def _read(path: Path, data: bytes) -> "Posterior":
    header = _header(data)
    if int(header["credo.format"]) > FORMAT_VERSION:
        raise VersionError(
            f"{path} has posterior format {header['credo.format']}, and this credo reads up to"
            f" {FORMAT_VERSION}; upgrade"
        )
    tensors = safetensors.torch.load(data)
    ordered = {name: tensors[name] for name in json.loads(header["credo.order"])}
    weights = {name: tensor for name, tensor in ordered.items() if not name.startswith(BUFFER)}
    buffers = {name.removeprefix(BUFFER): ordered[name] for name in ordered if name not in weights}
    posterior = class_of(header["credo.kind"]).from_tensors(weights, json.loads(header["credo.metadata"]))
    return posterior.with_buffers(buffers) if buffers else posterior


def _path(path: object) -> Path:
    if not isinstance(path, str | PathLike):
        raise InvalidType(f"path must be a str or a path, got {type(path).__name__}")
    return Path(fspath(path))


def _signed(data: bytes) -> bytes:
    place = DIGEST_FIELD.search(data)
    if place is None:
        raise CredoError(
            "the file header lost its digest field; safetensors writes it differently: please report"
        )
    return data[: place.start(1)] + hashlib.sha256(data).hexdigest().encode() + data[place.end(1) :]


def _verify(path: Path, data: bytes) -> None:
    place = DIGEST_FIELD.search(data)
    if place is None:
        actual = hashlib.sha256(data).hexdigest()
        raise IntegrityError(
            f"{path} is damaged or no credo posterior: its {len(data)} bytes have SHA-256 {actual}"
            " and no stored digest to compare with; restore it from a copy or save again"
        )
    stored = place.group(1).decode()
    actual = hashlib.sha256(data[: place.start(1)] + UNSIGNED.encode() + data[place.end(1) :]).hexdigest()
    if stored != actual:
        raise IntegrityError(
            f"{path} is damaged: its SHA-256 should be {stored} and is {actual};"
            " restore it from a copy or save again"
        )


def _header(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    fields: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return fields


def write_atomically(path: Path, data: bytes) -> None:
    """Temporary file in the same folder, flush, fsync, replace, fsync the folder.

    On any error the old file is intact, the temporary one is gone, and an OSError names `path`.
    """
    temporary = (
        path.parent / f".{secrets.token_hex(8)}.tmp"
    )  # short: a long name plus a suffix may be too long
    try:
        try:
            _write_durably(temporary, data)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # the subclass follows from errno


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut; Windows cannot open folders and needs no such thing."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PosteriorClass = TypeVar("PosteriorClass", bound="type[Posterior]")

_KINDS: "dict[str, type[Posterior]]" = {}


def register_kind(cls: PosteriorClass) -> PosteriorClass:
    """Let `load_posterior` make this class from files that name its `kind`."""
    if cls.kind in _KINDS:
        raise InvalidValue(
            f"kind {cls.kind!r} already stands for {_KINDS[cls.kind].__name__}; choose another"
        )
    _KINDS[cls.kind] = cls
    return cls


def class_of(kind: str) -> "type[Posterior]":
    if kind not in _KINDS:
        raise VersionError(
            f"no posterior of kind {kind!r} here, only {', '.join(sorted(_KINDS))}; the file comes from a"
            " newer credo (upgrade) or a class of your own (import it, with @register_kind, before loading)"
        )
    return _KINDS[kind]
