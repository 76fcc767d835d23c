"""Posterior files: safetensors whose header holds JSON metadata and a SHA-256 of the whole file.

The digest covers every byte, header and data, with its own 64 digits read as zeros; so one file alone can be
verified, and no flipped bit passes. Nothing in a file is ever executed.

A compact file (format 3) holds one row of numbers for each part and dtype, and names and shapes once:

    mean/float32       the means one after the other
    variance/bfloat16  the variances in the same order
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from credo.errors import (
    CredoError,
    IntegrityError,
    InvalidType,
    InvalidValue,
    UnsupportedOperation,
    VersionError,
)

if TYPE_CHECKING:
    from credo.posterior.base import Posterior

if TYPE_CHECKING:
    from credo.posterior.base import Posterior

FORMAT_VERSION = 2  # 1 had no buffers
COMPACT_VERSION = 3  # the newest that is read
PARTS = ("mean", "variance")  # of a compact file
DTYPES = {"float32": torch.float32, "float64": torch.float64}  # of its means
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
    *,
    compact: bool = False,
) -> None:
    target = _path(path)
    if compact:
        write_atomically(target, _compact(kind, tensors, metadata, buffers or {}))
        return
    tensors = {**tensors, **{BUFFER + name: tensor for name, tensor in (buffers or {}).items()}}
    header = {
        "credo.format": str(FORMAT_VERSION),
        "credo.kind": kind,
        "credo.order": json.dumps(list(tensors)),  # safetensors sorts by name; draws depend on the order
        "credo.metadata": json.dumps(dict(metadata)),
        "credo.sha256": UNSIGNED,
    }
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(target, _signed(safetensors.torch.save(content, header)))


def _compact(
    kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, object], buffers: Mapping[str, Tensor]
) -> bytes:
    """Names without their common beginning, shapes and dtypes once; rows of numbers."""
    if any(not name.startswith(("mean/", "variance/")) for name in tensors):
        raise UnsupportedOperation(
            f"compact=True is for diagonal posteriors, and this one is {kind!r}. Leave it out"
        )
    means = {name[5:]: tensor for name, tensor in tensors.items() if name.startswith("mean/")}
    variances = {name[9:]: tensor for name, tensor in tensors.items() if name.startswith("variance/")}
    common = _common_beginning(means)
    layout = [[n[len(common) :], list(t.shape), _dtype(t), int(n in variances)] for n, t in means.items()]
    rows: dict[str, list[Tensor]] = {}
    for name, mean in means.items():
        rows.setdefault(f"mean/{_dtype(mean)}", []).append(mean)
        if name in variances:
            rows.setdefault(f"variance/{_dtype(mean)}", []).append(_halved(name, variances[name]))
    content = {key: torch.cat([t.detach().cpu().flatten() for t in row]) for key, row in rows.items()}
    content |= {BUFFER + name: tensor.detach().cpu().contiguous() for name, tensor in buffers.items()}
    header = {
        "credo.format": str(COMPACT_VERSION),
        "credo.kind": kind,
        "credo.compact": json.dumps([common, layout, [BUFFER + n for n in buffers]], separators=(",", ":")),
        "credo.metadata": json.dumps(dict(metadata), separators=(",", ":")),
        "credo.sha256": UNSIGNED,
    }
    return _signed(safetensors.torch.save(content, header))


def _common_beginning(names: Iterable[str]) -> str:
    first, last = min(names), max(names)  # what these two share, all share
    length = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _halved(name: str, variance: Tensor) -> Tensor:
    half = variance.detach().to(torch.bfloat16)
    if not bool((half.isfinite() & (half > 0)).all()):
        raise InvalidValue(
            f"variances of {name!r} are out of the range of bfloat16. Save without compact=True"
        )
    return half


def _expanded(tensors: Mapping[str, Tensor], described: str) -> dict[str, Tensor]:
    """The named tensors of a compact file, in their order."""
    try:
        return _taken_apart(tensors, *json.loads(described))
    except (TypeError, RuntimeError) as error:  # what a forged description leads to
        raise ValueError(str(error)) from error


def _taken_apart(
    tensors: Mapping[str, Tensor], common: str, layout: list[Any], buffers: list[str]
) -> dict[str, Tensor]:
    begin = dict.fromkeys(tensors, 0)
    found: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for rest, shape, dtype, uncertain in layout:
        for part in PARTS if uncertain else PARTS[:1]:
            key = f"{part}/{dtype}"
            end = begin[key] + math.prod(shape)
            piece = tensors[key][begin[key] : end].reshape(shape)
            found[part][f"{part}/{common}{rest}"] = piece.to(DTYPES[dtype])
            begin[key] = end
    if any(end != tensors[key].numel() for key, end in begin.items() if key not in buffers):
        raise ValueError("rows that are longer than what they are said to hold")
    return {**found["mean"], **found["variance"], **{name: tensors[name] for name in buffers}}


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
    if int(header["credo.format"]) > COMPACT_VERSION:
        raise VersionError(
            f"{path} has posterior format {header['credo.format']}, and this credo reads up to"
            f" {COMPACT_VERSION}; upgrade"
        )
    tensors = safetensors.torch.load(data)
    if "credo.compact" in header:
        ordered = _expanded(tensors, header["credo.compact"])
    else:
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
