"""Each parser gives back what was written, and refuses each kind of damage with the file's name, size and digest."""

import gzip
import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from credo.data.sets.cifar10 import RECORD, parse_binary, parse_classes, parse_python
from credo.data.sets.images import parse_image
from credo.data.sets.mnist import parse_images, parse_labels
from credo.data.sets.svhn import parse_svhn
from credo.data.sets.uci import parse_indices, parse_table
from credo.data.verify import gunzip
from credo.errors import IntegrityError
from tests.data import writers

X, Y = writers.images(7), writers.labels(7)
HTML = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"


def test_cifar_binary() -> None:
    x, y = parse_binary(writers.cifar_binary(X, Y), "f")
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


@pytest.mark.parametrize("protocol", range(5))
def test_cifar_python_in_every_protocol(protocol: int) -> None:
    x, y = parse_python(writers.cifar_python(X, Y, protocol), "f")
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_cifar_python_as_python_2_wrote_it() -> None:
    """Text where Python 3 writes bytes: names of fields and the array's content are SHORT_BINSTRING and BINSTRING."""
    raw = X.numpy().tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\nq\x02K\x00\x85U\x01btRq\x03"
        b"(K\x01K\x07M\x00\x0c\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([int(k)]) for k in Y) + b"e"
    x, y = parse_python(b"\x80\x02}q\x00(U\x04data" + array + b"U\x06labels" + listed + b"u.", "f")
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_classes() -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert parse_classes(("\n".join(names) + "\n\n").encode(), "f") == tuple(names)


@pytest.mark.parametrize("pack", [lambda data: data, lambda data: gunzip(gzip.compress(data), "f.gz")])
def test_idx(pack: Callable[[bytes], bytes]) -> None:
    x = writers.images(5, 1, 28)
    assert torch.equal(parse_images(pack(writers.idx(x[:, 0])), "f"), x)
    assert torch.equal(parse_labels(pack(writers.idx(Y)), "f", 10), Y)


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn(compressed: bool) -> None:
    x, y = parse_svhn(writers.svhn(X, Y, compressed), "f")
    assert np.array_equal(x, X.numpy())
    assert np.array_equal(y, Y.numpy())


def test_table_and_indices() -> None:
    assert parse_table(b"1 2.5\t-3e1 \r\n\n4 5 6\n", "f").tolist() == [[1, 2.5, -30], [4, 5, 6]]
    assert parse_indices(b"3.000e+00\n0\n", "f", 4).tolist() == [3, 0]


def test_image_is_scaled_and_cut_to_its_centre() -> None:
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    image[:, 10:30, 20:40] = 255  # the centre 20×20
    assert bool((parse_image(writers.picture(image), "f", size=20) == 255).all())
    half = parse_image(writers.picture(image), "f", short_side=20, size=20)
    assert half.shape == (3, 20, 20)
    assert bool((half[:, 7:13, 7:13] == 255).all())
    assert bool((half[:, :3] < 60).all())


MNIST = writers.idx(writers.images(3, 1, 28)[:, 0])
BINARY = writers.cifar_binary(X, Y)
MAT, PACKED_MAT = writers.svhn(X, Y), writers.svhn(X, Y, compressed=True)
PNG = writers.picture(X[0])
PARSERS: dict[str, tuple[Callable[[bytes, str], Any], bytes]] = {
    "cifar binary": (parse_binary, BINARY),
    "cifar python": (parse_python, writers.cifar_python(X, Y)),
    "classes": (parse_classes, b"a b c d e f g h i j"),
    "idx images": (parse_images, MNIST),
    "idx labels": (lambda data, source: parse_labels(data, source, 10), writers.idx(Y)),
    "gzip": (gunzip, gzip.compress(MNIST)),
    "mat": (parse_svhn, MAT),
    "mat, compressed": (parse_svhn, PACKED_MAT),
    "table": (parse_table, b"1 2\n3 4\n"),
    "indices": (lambda data, source: parse_indices(data, source, 10), b"1\n2\n"),
    "image": (lambda data, source: parse_image(data, source, size=32), PNG),
}
DAMAGES: list[tuple[str, str, bytes, str]] = [
    *[(name, "empty", b"", "empty") for name in PARSERS],
    *[(name, "HTML page", HTML, "HTML") for name in PARSERS],
    ("cifar binary", "cut", BINARY[:-1], "truncated or too long"),
    ("cifar binary", "one byte more", BINARY + b"\0", "truncated or too long"),
    ("cifar binary", "label 10", b"\x0a" + BINARY[1:], "label 10 is outside 0..9"),
    ("cifar python", "cut", writers.cifar_python(X, Y)[:-5], "pickle"),
    ("cifar python", "extra bytes", writers.cifar_python(X, Y) + b"x", "bytes after the end"),
    ("cifar python", "labels short", writers.cifar_python(X, Y[:6]), "list of 7 integers"),
    ("cifar python", "label 11", writers.cifar_python(X, Y + 5), "0..9"),
    ("classes", "nine", b"a b c d e f g h i", "9 found"),
    ("idx images", "cut", MNIST[:-1], "truncated"),
    ("idx images", "cut in the header", MNIST[:9], "truncated inside its header"),
    ("idx images", "extra bytes", MNIST + b"\0", "too long"),
    (
        "idx images",
        "wrong magic",
        b"\0\0\x0d\x03" + MNIST[4:],
        "wrong magic number 00000d03, expected 00000803",
    ),
    ("idx images", "labels instead", writers.idx(Y), "wrong magic"),
    ("idx images", "no images", b"\0\0\x08\x03" + bytes(12), "no values"),
    ("idx labels", "label 12", writers.idx(Y + 6), "outside 0..9"),
    ("gzip", "cut", gzip.compress(MNIST)[:-9], "truncated"),
    ("gzip", "checksum cut", gzip.compress(MNIST)[:-1], "truncated"),
    ("gzip", "extra bytes", gzip.compress(MNIST) + b"\0", "1 extra bytes"),
    ("gzip", "not packed", MNIST, "begins with 1f8b"),
    ("mat", "cut", MAT[:-8], "truncated"),
    ("mat", "wrong magic", b"\0" * 128 + MAT[128:], "wrong magic"),
    ("mat", "values of no type", MAT[:184] + b"\x10" + MAT[185:], "values of type 16"),
    ("mat", "complex numbers", MAT[:145] + b"\x08" + MAT[146:], "only real numbers"),
    ("mat", "header only", MAT[:128], "'X' must hold"),
    ("mat, compressed", "cut", PACKED_MAT[:-8], "truncated"),
    ("table", "words", b"1 two\n", "not a table"),
    ("table", "ragged", b"1 2\n3\n", r"\[1, 2\]"),
    ("table", "not finite", b"1 nan\n", "finite"),
    ("indices", "fraction", b"1.5\n", "whole numbers in 0..9"),
    ("indices", "too large", b"10\n", "whole numbers in 0..9"),
    ("indices", "twice", b"1 1\n", "twice"),
    ("image", "cut", PNG[:-60], "not a readable image"),
    ("image", "too small", writers.picture(writers.images(1, 3, 16)[0]), "16×16 pixels, at least 32×32"),
]


@pytest.mark.parametrize(
    ("parser", "data", "message"),
    [(p, d, m) for p, _, d, m in DAMAGES],
    ids=[f"{p}: {w}" for p, w, _, _ in DAMAGES],
)
def test_damage_is_named(parser: str, data: bytes, message: str) -> None:
    parse, _ = PARSERS[parser]
    with pytest.raises(IntegrityError, match=message) as caught:
        parse(data, "folder/the-file")
    assert "folder/the-file" in str(caught.value)
    assert f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}" in str(caught.value)


def test_cifar_size_is_told() -> None:
    with pytest.raises(IntegrityError, match=f"{RECORD} bytes a record"):
        parse_binary(bytes(RECORD + 1), "f")


def test_a_gzip_bomb_stays_small() -> None:
    with pytest.raises(IntegrityError, match="more than the 1000 bytes allowed"):
        gunzip(gzip.compress(bytes(10_000_000)), "f", limit=1000)
