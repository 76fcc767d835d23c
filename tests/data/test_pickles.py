"""A data batch that is a pickle with a payload: refused by name, and nothing happens."""

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credo.data.sets.cifar10 import parse_python
from credo.data.sets.pickles import parse_pickle
from credo.errors import IntegrityError


class Payload:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def evil(trap: Path) -> dict[str, bytes]:
    path = str(trap)
    calls = {
        "os.mkdir": Payload(os.mkdir, path),
        "open": Payload(open, path, "w"),
        "eval": Payload(eval, f"__import__('os').mkdir({path!r})"),
        "exec": Payload(exec, f"__import__('os').mkdir({path!r})"),
        "getattr": Payload(getattr, path, "upper"),
        "numpy.save": Payload(np.save, path, 1),
        "an array whose type is a call": {b"data": Payload(os.mkdir, path), b"labels": [1]},
    }
    made = {
        f"{name}, protocol {p}": pickle.dumps(value, p) for name, value in calls.items() for p in range(6)
    }
    made["INST"] = b"(S'" + path.encode() + b"'\nios\nmkdir\n."
    made["OBJ"] = b"(cos\nmkdir\nS'" + path.encode() + b"'\no."
    made["NEWOBJ"] = b"\x80\x02cos\nmkdir\nX\x01\x00\x00\x00a\x85\x81."
    made["persistent id"] = b"Pos.mkdir\n."
    made["extension"] = b"\x80\x02\x82\x01."
    made["encode with another codec"] = b"c_codecs\nencode\n(Va\nVrot13\ntR."
    made["dtype of objects"] = pickle.dumps({b"data": np.array([{"a": 1}], dtype=object)}, 2)
    made["reconstruct of something else"] = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\nK\x00\x85S'b'\ntR."
    )
    return made


@pytest.mark.parametrize("name", evil(Path("x")))
def test_nothing_executes(name: str, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    data = evil(trap)[name]
    for parse in (parse_pickle, parse_python):
        with pytest.raises(IntegrityError, match="data_batch_1"):
            parse(data, "data_batch_1")
    assert list(tmp_path.iterdir()) == []


def test_the_payloads_are_live(tmp_path: Path) -> None:
    """The same bytes in Python's own reader do run: the test above is not about duds."""
    pickle.loads(evil(tmp_path / "executed")["os.mkdir, protocol 2"])
    assert (tmp_path / "executed").is_dir()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        {
            "a": [1, -2, 2**40, 1.5, None, True, False],
            b"b": (1, (2,), ()),
            "c": "naïve",
            "d": b"\x00\xff" * 300,
        },
        [[], {}, [[]], {"k": {}}],
        list(range(3000)),
    ],
)
def test_plain_data_comes_back(value: object, protocol: int) -> None:
    assert parse_pickle(pickle.dumps(value, protocol), "f") == value


@pytest.mark.parametrize("kind", ["u1", "<i2", ">i4", "<f8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back(kind: str, order: str) -> None:
    array = np.array(np.arange(24).reshape(2, 3, 4), dtype=kind, order=order)  # type: ignore[call-overload]
    for protocol in (0, 2, 4):
        back = parse_pickle(pickle.dumps(array, protocol), "f")
        assert np.array_equal(back, array)
        assert back.dtype == array.dtype


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]q\x00h\x00a.",  # a list that holds itself
        b"\x80\x02r\xff\xff\xff\x7f.",  # a memo slot far away, of nothing
        b"\x80\x02]r\xff\xff\xff\x7f.",  # and of something: allowed, it costs one entry of a dict
        b"\x80\x02T\xff\xff\xff\x7fabc.",  # text that claims to be 2 GB
        b"(" * 5000 + b".",
        # lists of a hundred times the list before: 100¹² entries if they were written out
        b"\x80\x02]q\x00"
        + b"".join(b"](" + (b"h" + bytes([k])) * 100 + b"eq" + bytes([k + 1]) for k in range(12))
        + b".",
    ],
)
def test_traps_for_the_reader(data: bytes) -> None:
    with contextlib.suppress(IntegrityError):
        assert parse_pickle(data, "f") == []
