"""What every parser refuses, in the same words."""

import hashlib
import zlib

from credo.errors import IntegrityError

HTML_BEGINNINGS = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")
GZIP_MAGIC = b"\x1f\x8b"
LARGEST_UNPACKED = 4 * 2**30  # bytes; the largest official file (SVHN extra) unpacks to 1.6 GB


def damaged(source: str, why: str, data: bytes) -> IntegrityError:
    """The error for a file that is not what it should be, with what it is."""
    digest = hashlib.sha256(data).hexdigest()
    return IntegrityError(f"{source}: {why} (found {len(data)} bytes, SHA-256 {digest}); fetch it again")


def looks_like_html(data: bytes) -> bool:
    return data[:256].lstrip().lower().startswith(HTML_BEGINNINGS)


def refuse_empty_or_html(data: bytes, source: str) -> None:
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
    refuse_empty_or_html(data, source)
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
