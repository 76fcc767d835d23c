"""Whatever the bytes: data of the right kind, or credo's error; never another exception, never code run."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credo.data.verify import read_manifest
from credo.errors import IntegrityError
from tests.data import writers
from tests.data.test_formats import PARSERS

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # of pickletools
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def survives(parser: str, data: bytes) -> None:
    parse, _ = PARSERS[parser]
    with contextlib.suppress(IntegrityError):
        parse(data, "f")


@pytest.mark.parametrize("parser", PARSERS)
@QUICK
@given(data=st.binary(max_size=300))
def test_random_bytes(parser: str, data: bytes) -> None:
    survives(parser, data)


@pytest.mark.parametrize("parser", PARSERS)
@QUICK
@given(draw=st.data())
def test_one_flipped_bit(parser: str, draw: st.DataObject) -> None:
    good = bytearray(PARSERS[parser][1])
    early = draw.draw(st.booleans())  # headers are where parsers trip
    at = draw.draw(st.integers(0, min(len(good), 400) - 1 if early else len(good) - 1))
    good[at] ^= 1 << draw.draw(st.integers(0, 7))
    survives(parser, bytes(good))


@pytest.mark.parametrize("parser", PARSERS)
@QUICK
@given(draw=st.data())
def test_cut_spliced_and_repeated(parser: str, draw: st.DataObject) -> None:
    good = PARSERS[parser][1]
    one, two = (draw.draw(st.integers(0, len(good))) for _ in range(2))
    survives(parser, good[:one] + draw.draw(st.binary(max_size=8)) + good[two:])


def test_a_flipped_bit_under_a_checksum_never_gets_through() -> None:
    """gzip and PNG carry their own: not one of these flips may give other data."""
    for parser in ("gzip", "image"):
        parse, good = PARSERS[parser]
        right = parse(good, "f")
        for at in range(0, len(good), max(1, len(good) // 150)):
            bad = bytearray(good)
            bad[at] ^= 0x10
            try:
                result = parse(bytes(bad), "f")
            except IntegrityError:
                continue
            assert (result == right) if isinstance(right, bytes) else bool((result == right).all()), (
                parser,
                at,
            )


@QUICK
@given(
    text=st.one_of(
        st.binary(max_size=60), st.sampled_from([b"[]", b"{}", b'{"version":1}', b'{"version":1,"files":3}'])
    )
)
def test_manifests(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    writers.write(folder / "credo-manifest.json", text)
    with pytest.raises(IntegrityError, match="damaged"):
        read_manifest(folder)
