"""Files: what is saved comes back bit for bit, and nothing else ever comes back."""

import errno
import os
import pickle
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from credo.errors import IntegrityError, InvalidType, InvalidValue, UnsupportedOperation, VersionError
from credo.posterior import DiagonalPosterior, load_posterior, register_kind
from credo.posterior import files as posterior_files

METADATA = {
    "method": "VOGN", "data_size": 50_000, "tempering": 0.5, "prior_precision": 1.0, "damping": 1e-3, "step": 7,
    "version": "0.1.0", "note": 'a "quoted" \\ ünicode 名',
}  # fmt: skip
NAMES = ["z.weight", 'a b/é"\\名', "sha256", "__metadata__", ""]


def posterior() -> DiagonalPosterior:
    g = torch.Generator().manual_seed(0)
    mean = {name: torch.randn(3, 2, generator=g) for name in NAMES}
    variance = {name: torch.rand(3, 2, generator=g) + 0.1 for name in NAMES[1:]}
    return DiagonalPosterior(mean, variance, METADATA)


def same(p: DiagonalPosterior, q: DiagonalPosterior) -> bool:
    pairs = [(p.mean, q.mean), (p.variance, q.variance)]
    equal = all(list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)
    return equal and p.metadata == q.metadata and p.deterministic == q.deterministic


@pytest.mark.parametrize("name", ["q.safetensors", "with space ünï 名.safetensors", "n" * 250])
def test_a_posterior_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    q = posterior()
    q.save(tmp_path / name)
    loaded = load_posterior(str(tmp_path / name))
    assert isinstance(loaded, DiagonalPosterior)
    assert same(q, loaded)
    draws = [p.sample(torch.Generator().manual_seed(1)) for p in (q, loaded)]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in NAMES)
    assert os.listdir(tmp_path) == [name]


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    posterior().save(tmp_path / "q")
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "q")["mean/z.weight"], posterior().mean["z.weight"]
    )


def test_no_flipped_bit_passes(tmp_path: Path) -> None:
    """One random bit of every byte."""
    path, rng = tmp_path / "q", random.Random(0)
    posterior().save(path)
    good = path.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(IntegrityError, match="SHA-256"):
            load_posterior(path)
    path.write_bytes(good)
    assert same(load_posterior(path), posterior())  # type: ignore[arg-type]


def test_truncated_extended_and_empty_files_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "q"
    posterior().save(path)
    good = path.read_bytes()
    for bad in [b"", *(good[:n] for n in range(0, len(good), 37)), good + b"\0", b"\0" * 100, good[::-1]]:
        path.write_bytes(bad)
        with pytest.raises(IntegrityError, match=str(path)):
            load_posterior(path)


def test_the_error_names_file_and_both_digests(tmp_path: Path) -> None:
    path = tmp_path / "q"
    posterior().save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"{path}.* should be [0-9a-f]{{64}} and is [0-9a-f]{{64}}"):
        load_posterior(path)


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("the payload was executed",))


def test_a_pickle_is_refused_and_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "q"
    for data in (pickle.dumps(Payload()), pickle.dumps({"credo.sha256": "0" * 64})):
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="no stored digest"):
            load_posterior(path)
    torch.save({"w": torch.ones(2)}, path)
    with pytest.raises(IntegrityError):
        load_posterior(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "w")
    with pytest.raises(IntegrityError, match="no credo posterior"):
        load_posterior(tmp_path / "w")


def test_a_newer_format_or_an_unknown_kind_says_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posterior_files, "FORMAT_VERSION", 99)
    posterior().save(tmp_path / "new")
    monkeypatch.undo()
    with pytest.raises(VersionError, match=r"format 99.*upgrade"):
        load_posterior(tmp_path / "new")
    posterior_files.save_posterior(tmp_path / "odd", "unheard-of", posterior().tensors(), {})
    with pytest.raises(VersionError, match="unheard-of"):
        load_posterior(tmp_path / "odd")


def test_a_forged_file_with_a_fitting_digest_is_still_no_posterior(tmp_path: Path) -> None:
    posterior_files.save_posterior(tmp_path / "q", "diagonal", {"variance/w": torch.ones(2)}, {})
    with pytest.raises(IntegrityError, match="no posterior"):
        load_posterior(tmp_path / "q")


def test_a_compact_file_has_exact_means_and_variances_of_eight_bits(tmp_path: Path) -> None:
    q = DiagonalPosterior(posterior().mean | {"wide": torch.ones(4).double(), "one": torch.tensor(3.0)},
                          posterior().variance | {"wide": torch.rand(4).double() * 1e-12}, METADATA)  # fmt: skip
    q = q.with_buffers({"count": torch.tensor(3), "running": torch.randn(2)})
    q.save(tmp_path / "q", compact=True)
    loaded = load_posterior(tmp_path / "q")
    assert isinstance(loaded, DiagonalPosterior)
    rounded = {n: v.to(torch.bfloat16).to(v.dtype) for n, v in q.variance.items()}
    assert same(loaded, DiagonalPosterior(q.mean, rounded, METADATA))
    for name, variance in q.variance.items():
        torch.testing.assert_close(loaded.variance[name], variance, rtol=2**-8, atol=0)
    assert {n: t.dtype for n, t in loaded.mean.items()} == {n: t.dtype for n, t in q.mean.items()}
    assert list(loaded.buffers) == list(q.buffers)
    assert all(
        torch.equal(t, q.buffers[n]) and t.dtype == q.buffers[n].dtype for n, t in loaded.buffers.items()
    )
    data = bytearray((tmp_path / "q").read_bytes())
    data[-3] ^= 1
    (tmp_path / "q").write_bytes(data)
    with pytest.raises(IntegrityError, match="is damaged"):
        load_posterior(tmp_path / "q")


def test_a_large_compact_file_is_three_quarters_of_a_full_one(tmp_path: Path) -> None:
    q = DiagonalPosterior({"w": torch.randn(100, 100)}, {"w": torch.rand(100, 100) + 0.1})
    q.save(tmp_path / "full")
    q.save(tmp_path / "compact", compact=True)
    full, compact = ((tmp_path / n).stat().st_size for n in ("full", "compact"))
    assert full > 80_000
    assert compact < 60_000 + 700


def test_what_a_compact_file_cannot_hold_is_named(tmp_path: Path) -> None:
    q = DiagonalPosterior({"w": torch.ones(2).double()}, {"w": torch.full((2,), 1e-60, dtype=torch.float64)})
    with pytest.raises(InvalidValue, match=r"'w'.*range of bfloat16.*without compact=True"):
        q.save(tmp_path / "q", compact=True)
    with pytest.raises(UnsupportedOperation, match=r"compact=True is for diagonal posteriors.*'kronecker'"):
        posterior_files.save_posterior(tmp_path / "q", "kronecker", {"A/fc": torch.eye(2)}, {}, compact=True)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    "layout",
    [
        '["",[["w",[9],"float32",1]],[]]',
        '["",[["w",[2],"save",1]],[]]',
        "[1]",
        '["",[["w",[1],"float32",1]],[]]',
    ],
)
def test_a_forged_description_is_no_posterior(tmp_path: Path, layout: str) -> None:
    header = {"credo.format": "3", "credo.kind": "diagonal", "credo.metadata": "{}", "credo.compact": layout}
    rows = {"mean/float32": torch.ones(2), "variance/float32": torch.ones(2).bfloat16()}
    data = safetensors.torch.save(rows, {**header, "credo.sha256": "0" * 64})
    (tmp_path / "q").write_bytes(posterior_files._signed(data))
    with pytest.raises(IntegrityError, match="no posterior"):
        load_posterior(tmp_path / "q")


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(InvalidValue, match="diagonal"):
        register_kind(DiagonalPosterior)


def test_a_missing_file_is_the_usual_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_posterior(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        load_posterior(tmp_path)
    with pytest.raises(InvalidType, match="path"):
        load_posterior(3)  # type: ignore[arg-type]


def test_saving_where_one_cannot_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    cases = [
        (tmp_path / "missing" / "q", FileNotFoundError),
        (tmp_path / "file" / "q", NotADirectoryError),
        (tmp_path / "folder", IsADirectoryError),
        (tmp_path / ("n" * 300), OSError),
    ]
    for path, error in cases:
        with pytest.raises(error) as caught:
            posterior().save(path)
        assert caught.value.filename == str(path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    path = tmp_path / "q"
    posterior().save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(failure)) as caught:
        DiagonalPosterior({"w": torch.ones(1)}, {}).save(path)
    assert getattr(caught.value, "filename", str(path)) == str(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["q"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_os_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="q"):
        posterior().save(tmp_path / "q")


def test_files_have_the_permissions_files_have(tmp_path: Path) -> None:
    posterior().save(tmp_path / "q")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "q").stat().st_mode == (tmp_path / "plain").stat().st_mode
