"""Checkpoints: a folder each, whose manifest (names, sizes, SHA-256) is written last and makes it count.

    checkpoint/epoch-000003-step-000000001200/state.safetensors   tensors
                                              state.json          numbers, and where each tensor belongs
                                              manifest.json       with a digest of its own

Every file is written atomically (temporary, flush, fsync, replace, fsync the folder). A folder without a manifest was
cut off while being written: it is passed over, and removed by the next save. A manifest that does not fit its files is
damage, and an error. Nothing in a checkpoint is ever executed.
"""

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from credo.errors import CredoError, IntegrityError, InvalidType, InvalidValue, VersionError
from credo.experiments.names import PLAIN_NAME
from credo.experiments.recipe import Training
from credo.experiments.run_folder import RunFolder, RunName, check_same_stream, described_stream
from credo.experiments.state import Work
from credo.posterior.files import write_atomically

CHECKPOINT: Final = re.compile(r"epoch-\d{6}-step-\d{12}")  # sorts by age
TENSORS, NUMBERS = "state.safetensors", "state.json"


class Checkpoints:
    """The checkpoints of one run; the newest `keep` are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self._keep = folder, keep

    def save(self, epoch: int, step: int, state: object) -> Path:
        """The state after `epoch` whole epochs and `step` steps, which may lie inside the next one.

        On any error the earlier checkpoints are intact and nothing of the new one is left.
        """
        target = self.folder / f"epoch-{epoch:06d}-step-{step:012d}"
        if (target / MANIFEST).exists():  # the same moment of the same run: the same state
            return target
        tensors, text = pack(state)
        files = {TENSORS: safetensors.torch.save(tensors), NUMBERS: text.encode()}
        try:
            shutil.rmtree(target, ignore_errors=True)  # what a crash has left
            target.mkdir(parents=True)
            for name, data in files.items():
                write_atomically(target / name, data)
            write_manifest(target, files)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        self._remove_all_but(self.complete()[-self._keep :])
        return target

    def complete(self) -> list[Path]:
        """Those with a manifest, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if CHECKPOINT.fullmatch(path.name)]
        return sorted(path for path in found if (path / MANIFEST).exists())

    def load_last(self, *, fall_back: bool = False) -> Any:
        """The newest state, verified; None if there is no checkpoint. Damage as in `last_whole`."""
        path = self.last_whole(fall_back=fall_back)
        return None if path is None else load_checkpoint(path)

    def last_whole(self, *, fall_back: bool = False) -> Path | None:
        """The newest checkpoint; None if there is none.

        A damaged one is an IntegrityError; with `fall_back` a warning, and the one before it is taken.
        """
        damaged: IntegrityError | None = None
        for path in reversed(self.complete()):
            try:
                load_checkpoint(path)
                return path
            except IntegrityError as error:
                if not fall_back:
                    raise
                aside = path.rename(path.with_name(f"damaged-{path.name}-{secrets.token_hex(2)}"))
                warnings.warn(
                    f"{error} It is kept as {aside}; falling back to the one before it.", stacklevel=2
                )
                damaged = error
        if damaged is not None:
            raise IntegrityError(f"no checkpoint in {self.folder} is whole: {damaged}") from damaged
        return None

    def clear(self) -> None:
        self._remove_all_but([])

    def _remove_all_but(self, kept: list[Path]) -> None:
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path not in kept and CHECKPOINT.fullmatch(path.name):
                # Its manifest goes first: half removed is as good as removed
                with contextlib.suppress(OSError):
                    (path / MANIFEST).unlink()
                shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> Any:
    """The state in one checkpoint folder; every byte is verified before any of it is read."""
    files = verified_bytes(path, read_manifest(path))
    try:
        return unpack(safetensors.torch.load(files[TENSORS]), files[NUMBERS].decode())
    except (KeyError, ValueError, TypeError, json.JSONDecodeError, safetensors.SafetensorError) as error:
        if isinstance(error, CredoError):
            raise
        raise IntegrityError(
            f"{path} is whole, with digests that fit, and yet no checkpoint: {error}"
        ) from error


# When to save: after so many steps or seconds, whichever comes first, also inside an epoch


@dataclass(frozen=True)
class Checkpointing:
    """A crash costs at most this much work."""

    steps: int | None = None
    seconds: float | None = 30.0
    keep: int = 2  # of the newest checkpoints

    def __post_init__(self) -> None:
        if self.keep < 2 or (self.steps is not None and self.steps < 1):
            raise InvalidValue(
                f"keep={self.keep} must be at least 2, steps={self.steps} at least 1 or None: the last good checkpoint "
                "must be there while the next is written."
            )


class Saver:
    def __init__(self, checkpoints: Checkpoints, work: Work, policy: Checkpointing) -> None:
        self.checkpoints, self._work, self._policy = checkpoints, work, policy
        self._saved_at_step, self._saved_at = 0, time.monotonic()

    def is_due(self) -> bool:
        """By this rank's clock: ranks must agree before they save."""
        steps, seconds = self._policy.steps, self._policy.seconds
        return (steps is not None and self._work.step - self._saved_at_step >= steps) or (
            seconds is not None and time.monotonic() - self._saved_at >= seconds
        )

    def save(self) -> None:
        """All ranks tell what is theirs; rank 0 writes, and its errors are those of all."""
        epoch, step, state = self._work.epoch, self._work.step, self._work.state_dict()
        self._work.ranks.once(lambda: self.checkpoints.save(epoch, step, state).name)
        self._saved_at_step, self._saved_at = self._work.step, time.monotonic()


# What a run folder holds already: a finished run, a checkpoint to go on from, or another run, which is an error


def is_finished(folder: RunFolder, training: Training, seed: int, name: RunName | None = None) -> bool:
    """Whether there is nothing left to do; an error if it is another run that has finished."""
    if folder.finished and training.tasks is None:
        folder.compare(training, seed, strictly=True)
    elif folder.finished:
        asked = described_stream(training, seed, name or RunName())
        named = asked if name is not None else {key: asked[key] for key in ("seed", "tasks", "training")}
        check_same_stream(folder.path, read_signed(folder.stream_result), named)
    return folder.finished


def last_checkpoint(
    folder: RunFolder, checkpoints: Checkpoints, training: Training, seed: int, resume: str | bool
) -> tuple[str | None, list[str]]:
    """The name of the checkpoint to go on from, if any, and in which settings it differs; `resume` as in `train`."""
    if resume is False:
        folder.clear()
        checkpoints.clear()
    if resume is True and not checkpoints.complete():
        raise InvalidValue(
            f"resume=True, and {checkpoints.folder} has no checkpoint. Leave resume out to start a new run."
        )
    if not checkpoints.complete():
        return None, []
    drift = folder.compare(training, seed, strictly=False) if training.tasks is None else []
    newest = checkpoints.last_whole(fall_back=resume == "fallback")
    return (None if newest is None else newest.name), drift


# Nested state (dicts, lists, tuples, numbers, strings, tensors) as named tensors and JSON, and back, exactly.
# Only these types are known, in both directions: nothing in a file can name a class or be executed.

# Marked containers; a plain dict never looks like one, since dicts are always packed as items.
TENSOR, ITEMS, TUPLE = "$tensor", "$items", "$tuple"


def pack(state: object) -> tuple[dict[str, Tensor], str]:
    """Tensors by number, and the JSON that says where each belongs."""
    tensors: dict[str, Tensor] = {}
    return tensors, json.dumps(_packed(state, tensors, "state"), separators=(",", ":"))


def _packed(value: object, tensors: dict[str, Tensor], where: str) -> object:
    if isinstance(value, Tensor):
        name = f"{len(tensors):06d}"
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
        return {TENSOR: name}
    if isinstance(value, Mapping):
        return {ITEMS: [[key, _packed(v, tensors, f"{where}[{key!r}]")] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_packed(v, tensors, f"{where}[{k}]") for k, v in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise InvalidType(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold.")


def unpack(tensors: Mapping[str, Tensor], text: str) -> Any:
    return _unpacked(json.loads(text), tensors)


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((mark, content),) = value.items()
    if mark == TENSOR:
        return tensors[content]
    if mark == TUPLE:
        return tuple(_unpacked(item, tensors) for item in content)
    return {key: _unpacked(item, tensors) for key, item in content}


def equal(one: object, other: object) -> bool:
    """Bitwise equality of two states; NaN equals itself."""
    mine, my_text = pack(one)
    others, text = pack(other)
    return my_text == text and all(_same_bits(tensor, others[name]) for name, tensor in mine.items())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


# Signed JSON, whose own digest makes every byte of it count; a manifest, which is one, lists files with theirs

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
