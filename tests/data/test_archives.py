"""Archives from elsewhere: bad members are refused before anything is written."""

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credo.data import fetching
from credo.data.fetching import unpack
from credo.errors import IntegrityError
from tests.data.writers import write


def tar(path: Path, *members: tarfile.TarInfo, mode: str = "w:gz") -> Path:
    """A good file first, so that a reader that writes as it goes would have written it."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member in (file("set/good.txt"), *members):
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def file(name: str, size: int = 5) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


EVIL = {
    "parent": file("../evil"),
    "parent inside": file("set/../../evil"),
    "absolute": file("/tmp/evil"),
    "windows": file("set\\..\\evil"),
    "drive": file("C:evil"),
    "symlink": special("set/link", tarfile.SYMTYPE, "/etc/passwd"),
    "symlink to a folder": special("set", tarfile.SYMTYPE, "/tmp"),
    "hard link": special("set/link", tarfile.LNKTYPE, "set/good.txt"),
    "character device": special("set/null", tarfile.CHRTYPE),
    "block device": special("set/disk", tarfile.BLKTYPE),
    "pipe": special("set/pipe", tarfile.FIFOTYPE),
    "twice": file("set/good.txt"),
    "twice, spelt otherwise": file("set/./good.txt"),
}


@pytest.mark.parametrize("name", EVIL)
def test_evil_members(name: str, tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar.gz", EVIL[name])
    with pytest.raises(IntegrityError, match="refused, nothing was unpacked"):
        unpack(archive, tmp_path / "in" / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz"]


def test_good_members(tmp_path: Path) -> None:
    members = special("set/empty", tarfile.DIRTYPE), file("set/b/c.bin", 2_000_000)
    archive = tar(tmp_path / "a.tar", *members, mode="w")  # packed, so many zeros would look like a bomb
    assert unpack(archive, tmp_path / "out") == ["set/good.txt", "set/b/c.bin"]
    assert (tmp_path / "out/set/b/c.bin").stat().st_size == 2_000_000
    assert (tmp_path / "out/set/empty").is_dir()


def test_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("set/good.txt", "good")
    assert unpack(tmp_path / "a.zip", tmp_path / "out") == ["set/good.txt"]
    assert (tmp_path / "out/set/good.txt").read_text() == "good"


@pytest.mark.parametrize("name", ["../evil", "/evil", "set/../../evil"])
def test_zip_with_evil_names(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("good.txt", "good")
        archive.writestr(name, "evil")
    with pytest.raises(IntegrityError, match="leads out"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_zip_with_a_link(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(IntegrityError, match="link or a device"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_bombs(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("zeros", bytes(50_000_000))
    else:
        tar(path, file("zeros", 50_000_000))
    with pytest.raises(IntegrityError, match="refused, nothing was unpacked: more than"):
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MOST_MEMBERS", 5)
    with pytest.raises(IntegrityError, match="more than 5 members"):
        unpack(tar(tmp_path / "a.tar", *(file(f"set/{k}") for k in range(9)), mode="w"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_damaged_archives(tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject) -> None:
    """Cut or flipped anywhere: unpacked whole, or IntegrityError and nothing left behind."""
    folder = tmp_path_factory.mktemp("archive")
    kind = draw.draw(st.sampled_from(["w", "w:gz", "zip"]))
    path = folder / "a"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("set/a", os.urandom(500))
    else:
        tar(path, file("set/a", 500), mode=kind)
    data = bytearray(path.read_bytes())
    at = draw.draw(st.integers(0, len(data) - 1))
    if draw.draw(st.booleans()):
        data[at] ^= 1 << draw.draw(st.integers(0, 7))
    else:
        del data[at:]
    write(path, bytes(data))
    try:
        names = unpack(path, folder / "out")
        assert all((folder / "out" / name).is_file() for name in names)
    except IntegrityError:
        assert not (folder / "out").exists()
