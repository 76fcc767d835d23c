"""Fetching from a server on this machine that serves what it should, and everything it should not."""

import hashlib
import http.server
import io
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import credo.data as data
from credo.data import download as downloading
from credo.data.catalogue import CATALOGUE
from credo.data.download import Remote
from credo.data.official import CONTENTS
from credo.data.sets import cifar10
from credo.data.verify import Entry
from credo.errors import FetchError, IntegrityError, InvalidValue, UnsupportedOperation
from tests.data import writers


class Server(http.server.ThreadingHTTPServer):
    files: dict[str, bytes]
    asked: list[str]
    announce: int = 0  # added to the length that is announced
    stall: bool = False  # send everything, then neither more nor an end


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path)
        self.send_response(200 if content is not None else 404)
        self.send_header("Content-Length", str(len(content or b"") + self.server.announce))
        self.end_headers()
        self.wfile.write(content or b"")
        if self.server.stall:
            self.wfile.flush()
            time.sleep(0.6)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.files, running.asked = {}, []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/mirror"


def archive(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def svhn(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A small SVHN, official for the duration of a test."""
    files = {
        f"{half}_32x32.mat": writers.svhn(writers.images(n), writers.labels(n))
        for half, n in (("train", 4), ("test", 3))
    }
    remotes = tuple(Remote(f"https://nowhere/{n}", len(c), sha256(c)) for n, c in files.items())
    monkeypatch.setitem(CATALOGUE, "svhn", replace(CATALOGUE["svhn"], remotes=remotes))
    server.files = {f"/mirror/{name}": content for name, content in files.items()}
    return files


@pytest.fixture
def cifar(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    files = {
        name: writers.cifar_binary(writers.images(2, seed=k), writers.labels(2))
        for k, name in enumerate(names)
    }
    packed = archive({f"cifar-10-batches-bin/{name}": content for name, content in files.items()})
    remote = Remote("https://nowhere/cifar-10-binary.tar.gz", len(packed), sha256(packed))
    monkeypatch.setitem(CATALOGUE, "cifar10", replace(CATALOGUE["cifar10"], remotes=(remote,)))
    monkeypatch.setitem(CONTENTS, "cifar10", {name: Entry.of(content) for name, content in files.items()})
    monkeypatch.setattr(cifar10, "PER_FILE", 2)
    server.files = {"/mirror/cifar-10-binary.tar.gz": packed}
    return files


def left_behind(root: Path) -> list[str]:
    """Temporary files that should be gone."""
    return [p.name for p in root.rglob(".*")]


def test_plain_files(server: Server, svhn: dict[str, bytes], tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = data.fetch(
        "svhn", tmp_path / "new", base_url=address(server), progress=lambda *now: seen.append(now)
    )
    assert report.ok
    assert len(data.load("svhn", tmp_path / "new").train) == 4
    assert (tmp_path / "new/SVHN/credo-manifest.json").exists()
    assert {name: size for name, size, _ in seen} == {name: len(content) for name, content in svhn.items()}
    assert left_behind(tmp_path) == []


def test_what_is_there_is_not_fetched_again(server: Server, svhn: dict[str, bytes], tmp_path: Path) -> None:
    data.fetch("svhn", tmp_path, base_url=address(server))
    server.asked.clear()
    assert data.fetch("svhn", tmp_path, base_url=address(server)).ok
    assert server.asked == []


def test_a_file_that_went_bad_is_put_aside_and_fetched_again(
    server: Server, svhn: dict[str, bytes], tmp_path: Path
) -> None:
    data.fetch("svhn", tmp_path, base_url=address(server))
    victim = tmp_path / "SVHN/test_32x32.mat"
    bad = bytearray(victim.read_bytes())
    bad[300] ^= 1
    victim.write_bytes(bad)
    server.asked.clear()
    assert data.fetch("svhn", tmp_path, base_url=address(server)).ok
    assert server.asked == ["/mirror/test_32x32.mat"]
    assert victim.read_bytes() == svhn["test_32x32.mat"]
    assert (tmp_path / "SVHN/test_32x32.mat.quarantine").read_bytes() == bytes(bad)
    victim.unlink()
    assert data.fetch("svhn", tmp_path, base_url=address(server)).ok


def test_an_archive(server: Server, cifar: dict[str, bytes], tmp_path: Path) -> None:
    assert data.fetch("cifar10", tmp_path, base_url=address(server) + "/").ok
    splits = data.load("cifar10", tmp_path)
    assert torch.equal(splits.train.inputs, torch.cat([writers.images(2, seed=k) for k in range(5)]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cifar-10-batches-bin"]
    victim = tmp_path / "cifar-10-batches-bin/test_batch.bin"
    victim.write_bytes(victim.read_bytes()[:-1])
    assert not data.check("cifar10", tmp_path).ok
    assert data.fetch("cifar10", tmp_path, base_url=address(server)).ok
    assert (tmp_path / "cifar-10-batches-bin.quarantine").is_dir()


WRONG = {
    "flipped bit": (lambda c: bytes([c[0] ^ 1]) + c[1:], "expected SHA-256"),
    "cut": (lambda c: c[:-1], "truncated: expected"),
    "longer": (lambda c: c + b"x", "too long: expected"),
    "empty": (lambda c: b"", "truncated: expected"),
    "HTML page": (lambda c: b"\n<!DOCTYPE HTML><html>moved</html>", "HTML page"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_the_file_goes_into_quarantine(
    name: str, server: Server, cifar: dict[str, bytes], tmp_path: Path
) -> None:
    change, message = WRONG[name]
    (path,) = server.files
    server.files[path] = change(server.files[path])
    with pytest.raises(IntegrityError, match=message):
        data.fetch("cifar10", tmp_path, base_url=address(server))
    assert [p.name for p in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz.quarantine"]


def test_an_endless_file_stops_at_the_limit(server: Server, cifar: dict[str, bytes], tmp_path: Path) -> None:
    (path,) = server.files
    size = len(server.files[path])
    server.files[path] += bytes(3_000_000)
    with pytest.raises(IntegrityError, match="too long"):
        data.fetch("cifar10", tmp_path, base_url=address(server))
    assert (tmp_path / "cifar-10-binary.tar.gz.quarantine").stat().st_size == size + 1


def test_an_evil_archive_with_the_right_digest(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = archive({"cifar-10-batches-bin/data_batch_1.bin": b"x", "../evil": b"x"})
    remote = Remote("https://nowhere/cifar-10-binary.tar.gz", len(packed), sha256(packed))
    monkeypatch.setitem(CATALOGUE, "cifar10", replace(CATALOGUE["cifar10"], remotes=(remote,)))
    server.files = {"/mirror/cifar-10-binary.tar.gz": packed}
    with pytest.raises(IntegrityError, match="leads out of the folder"):
        data.fetch("cifar10", tmp_path / "root", base_url=address(server))
    assert [p.name for p in tmp_path.rglob("*")] == ["root"]


def test_where_only_an_md5_is_known_the_first_sha256_is_pinned(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pictures(seed: int) -> bytes:
        return archive({"LSUN/test/1.png": writers.picture(writers.images(1, 3, 36, seed)[0])})

    packed = pictures(0)
    md5 = hashlib.md5(packed).hexdigest()
    remote = Remote("https://nowhere/LSUN.tar.gz", 1_000_000, md5=md5, exact=False)
    monkeypatch.setitem(CATALOGUE, "lsun_crop", replace(CATALOGUE["lsun_crop"], remotes=(remote,)))
    server.files = {"/mirror/LSUN.tar.gz": pictures(1)}
    with pytest.raises(IntegrityError, match=f"expected MD5 {md5}"):
        data.fetch("lsun_crop", tmp_path, base_url=address(server))
    server.files = {"/mirror/LSUN.tar.gz": packed}
    assert data.fetch("lsun_crop", tmp_path, base_url=address(server)).ok
    assert torch.equal(
        data.load("lsun_crop", tmp_path).test.inputs[0], writers.images(1, 3, 36)[0, :, 2:34, 2:34]
    )

    # From now on the SHA-256 decides: a file that collides in MD5 does not pass.
    (tmp_path / "lsun_crop/LSUN/test/1.png").unlink()
    other = pictures(2)
    collides = replace(remote, md5=hashlib.md5(other).hexdigest())
    monkeypatch.setitem(CATALOGUE, "lsun_crop", replace(CATALOGUE["lsun_crop"], remotes=(collides,)))
    server.files = {"/mirror/LSUN.tar.gz": other}
    with pytest.raises(IntegrityError, match=f"expected SHA-256 {sha256(packed)}"):
        data.fetch("lsun_crop", tmp_path, base_url=address(server))


def test_servers_that_do_not_answer(
    server: Server, cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FetchError, match="404"):
        data.fetch("cifar10", tmp_path, base_url=address(server) + "/other")
    with pytest.raises(FetchError, match="no answer"):
        data.fetch("cifar10", tmp_path, base_url="http://127.0.0.1:1/mirror")
    with pytest.raises(InvalidValue, match="https://"):
        data.fetch("cifar10", tmp_path, base_url="file:///tmp")
    (path,) = server.files
    server.files[path], server.announce = server.files[path][:-10], 10  # the connection breaks
    with pytest.raises(IntegrityError, match="truncated"):
        data.fetch("cifar10", tmp_path, base_url=address(server))
    server.stall = True
    monkeypatch.setattr(downloading, "TIMEOUT", 0.2)
    with pytest.raises(FetchError, match="nothing came for"):
        data.fetch("cifar10", tmp_path, base_url=address(server))
    assert left_behind(tmp_path) == []


def test_a_full_disk_leaves_nothing(
    server: Server, cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloading.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        data.fetch("cifar10", tmp_path, base_url=address(server))
    assert list(tmp_path.iterdir()) == []


def test_sets_without_an_address_say_how_to_lay_them_out(tmp_path: Path) -> None:
    for name in ("imagenet", "notmnist", "uci:yacht", "scenes_crop"):
        with pytest.raises(UnsupportedOperation, match="by hand as"):
            data.fetch(name, tmp_path)
    assert data.fetch("digits", tmp_path).ok


def test_every_official_file_has_a_digest() -> None:
    for data_set in CATALOGUE.values():
        for remote in data_set.remotes:
            assert len(remote.sha256 or "") == 64 or len(remote.md5 or "") == 32
            assert remote.largest > 0
            assert remote.url.endswith(remote.name)
            assert remote.exact or remote.sha256 is None
