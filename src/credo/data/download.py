"""One file from a server: streamed, bounded, verified, and only then given its name."""

import hashlib
import http.client
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from credo.data.verify import QUARANTINE, Entry, looks_like_html
from credo.errors import FetchError, IntegrityError, InvalidValue

TIMEOUT = 60.0  # seconds without a byte
PIECE = 1 << 18
Progress = Callable[[str, int, int], None]  # file name, bytes so far, bytes in all


@dataclass(frozen=True)
class Remote:
    """A file at an official address, and how we know that it is the one.

    `sha256` where it is published. Where only an MD5 is, the first download is held against that, its SHA-256 is
    pinned in the local manifest, and from then on the SHA-256 decides. A file with neither is not offered.
    """

    url: str
    largest: int  # bytes: the exact size where `exact`, else a limit
    sha256: str | None = None
    md5: str | None = None
    exact: bool = True

    @property
    def name(self) -> str:
        return urlsplit(self.url).path.rsplit("/", 1)[-1]

    def below(self, base_url: str | None) -> str:
        """The address, or that of the file of the same name below `base_url`."""
        return self.url if base_url is None else f"{base_url.rstrip('/')}/{self.name}"


def download(
    remote: Remote, folder: Path, *, base_url: str | None = None, pinned: Entry | None = None,
    progress: Progress | None = None,
) -> tuple[Path, Entry]:  # fmt: skip
    """The verified file under a temporary name in `folder`, for the caller to move, and its entry.

    A file that is not the right one is renamed to `<name>.quarantine`, and IntegrityError says both digests.
    """
    url = remote.below(base_url)
    if urlsplit(url).scheme not in {"http", "https"}:
        raise InvalidValue(f"base_url must begin with http:// or https://, got {url!r}")
    temporary = folder / f".{secrets.token_hex(8)}.part"
    try:
        with open(temporary, "xb") as file:
            entry, md5, start = _receive(url, remote, file, progress)
        if why := _objection(remote, entry, md5, start, pinned):
            kept = folder / f"{remote.name}{QUARANTINE}"
            os.replace(temporary, kept)
            raise IntegrityError(f"{url}: {why}; what came is in {kept}")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary, entry


def _receive(url: str, remote: Remote, file: BinaryIO, progress: Progress | None) -> tuple[Entry, str, bytes]:
    """Write the answer to `file`: its entry, its MD5 and its first bytes. At most one byte too many is read."""
    digest, md5, size, start = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0, b""
    try:
        with _answer(url) as answer:
            while size <= remote.largest and (piece := answer.read(min(PIECE, remote.largest + 1 - size))):
                start = start or piece[:256]
                digest.update(piece)
                md5.update(piece)
                size += len(piece)
                file.write(piece)
                if progress is not None:
                    progress(remote.name, size, remote.largest)
    except http.client.HTTPException as error:
        raise FetchError(
            f"{url}: the connection broke after {size} bytes ({type(error).__name__}); try again"
        ) from error
    except TimeoutError as error:
        raise FetchError(f"{url}: nothing came for {TIMEOUT:.0f} s, after {size} bytes; try again") from error
    file.flush()
    os.fsync(file.fileno())
    return Entry(size, digest.hexdigest()), md5.hexdigest(), start


def _answer(url: str) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "credo", "Accept-Encoding": "identity"})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"{url}: no answer ({error}); check the address and the network") from error


def _objection(remote: Remote, entry: Entry, md5: str, start: bytes, pinned: Entry | None) -> str:
    if looks_like_html(start):
        return "the server sent an HTML page instead of the file"
    if entry.size > remote.largest or (remote.exact and entry.size != remote.largest):
        state = "truncated" if entry.size < remote.largest else "too long"
        return f"{state}: expected {remote.largest} bytes, got {entry.size} (SHA-256 {entry.sha256})"
    expected = remote.sha256 or (pinned.sha256 if pinned else None)
    if expected is not None and entry.sha256 != expected:
        return f"expected SHA-256 {expected}, got {entry.sha256}"
    if expected is None and md5 != remote.md5:
        return f"expected MD5 {remote.md5}, got {md5}"
    return ""
