"""Writing a file so that at every moment either the old content or the new one is there, whole."""

import contextlib
import os
import secrets
from pathlib import Path


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
