"""Checkpoints: a folder each, whose manifest (names, sizes, SHA-256) is written last and makes it count.

    checkpoint/epoch-000003-step-000000001200/state.safetensors   tensors
                                              state.json          numbers, and where each tensor belongs
                                              manifest.json       with a digest of its own

Every file is written atomically (temporary, flush, fsync, replace, fsync the folder). A folder without a manifest was
cut off while being written: it is passed over, and removed by the next save. A manifest that does not fit its files is
damage, and an error. Nothing in a checkpoint is ever executed.
"""

import contextlib
import json
import re
import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch

from credo.errors import CredoError, IntegrityError
from credo.experiments.manifest import MANIFEST, read_manifest, verified_bytes, write_manifest
from credo.experiments.packing import pack, unpack
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
                with contextlib.suppress(
                    OSError
                ):  # its manifest goes first: half removed is as good as removed
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
