"""Pickles as plain data: dicts, lists, tuples, numbers, text, bytes and numeric arrays; nothing is ever called.

`pickletools` splits the file into instructions without running them. This reader follows the few instructions that
build plain data. Where a pickle would import and call something, only the three names by which numpy writes an array
and the one by which Python 3 writes bytes are known, and each stands for code below, not for what it names.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from credo.data.verify import damaged

MARK = object()
NUMBERS = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "b1"}


@dataclass(frozen=True)
class Symbol:
    name: str


@dataclass
class PendingType:
    """numpy.dtype(code), then its state, of which only the byte order matters."""

    code: str
    order: str = "|"


@dataclass
class PendingArray:
    """numpy's _reconstruct(...), which is an array only after its state has come."""

    value: np.ndarray[Any, Any] | None = None


SYMBOLS = {
    "numpy.core.multiarray _reconstruct": "reconstruct",
    "numpy._core.multiarray _reconstruct": "reconstruct",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
}


# what decoding instructions from arbitrary bytes raises; Warning: where the user turned warnings into errors
MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    Warning,
)


class NotPlainData(Exception):
    """Inside this file: an instruction or a combination that plain data does not need."""


def parse_pickle(data: bytes, source: str) -> Any:
    """The plain data in a pickle, or IntegrityError; nothing in the file is executed."""
    try:
        return _Finisher(len(data)).finish(_Reader().read(data))
    except NotPlainData as error:
        why = f"refused, and nothing in it was executed: {error}; only arrays, bytes, text, lists and dicts are read"
        raise damaged(source, why, data) from error
    except MALFORMED as e:
        raise damaged(
            source, f"not a well-formed pickle of plain data ({type(e).__name__}: {e})", data
        ) from e


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        for instruction, argument, position in pickletools.genops(data):
            name, at = instruction.name, position or 0
            if name == "STOP":
                if len(self.stack) != 1 or at != len(data) - 1:
                    raise NotPlainData(
                        f"{len(data) - 1 - at} bytes after the end, {len(self.stack)} values left"
                    )
                return self.stack[0]
            if name in CONSTANTS:
                self.stack.append(CONSTANTS[name]())
            elif name in LITERALS:
                self.stack.append(argument)
            elif name in ACTIONS:
                ACTIONS[name](self, argument)
            elif name not in {"PROTO", "FRAME"}:
                raise NotPlainData(f"instruction {name} at byte {at}")
        raise NotPlainData("no end")

    def pop_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while at >= 0 and self.stack[at] is not MARK:
            at -= 1
        if at < 0:
            raise NotPlainData("a collection without a beginning")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def pop_tuple(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def extend(self, items: list[Any]) -> None:
        _of(list, self.stack[-1]).extend(items)

    def update(self, items: list[Any]) -> None:
        _of(dict, self.stack[-1]).update(zip(items[::2], items[1::2], strict=True))

    def call(self) -> None:
        arguments, symbol = _of(tuple, self.stack.pop()), _of(Symbol, self.stack.pop())
        self.stack.append(_stand_in(symbol.name, arguments))

    def build(self) -> None:
        state, target = _of(tuple, self.stack.pop()), self.stack[-1]
        if isinstance(target, PendingType):
            target.order = _of(str, _text(state[1]))
        else:
            _of(PendingArray, target).value = _array(state)


def _global(reader: _Reader, name: str) -> None:
    if name not in SYMBOLS:
        raise NotPlainData(f"it names {name!r}")
    reader.stack.append(Symbol(SYMBOLS[name]))


def _stack_global(reader: _Reader, _: object) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    _global(reader, f"{_of(str, module)} {_of(str, name)}")


def _stand_in(symbol: str, arguments: tuple[Any, ...]) -> Any:
    if symbol == "reconstruct" and arguments[:1] == (Symbol("ndarray"),):
        return PendingArray()
    if symbol == "dtype":
        return PendingType(_of(str, _text(arguments[0])))
    if symbol == "encode" and arguments[1:] == ("latin1",):
        return _of(str, arguments[0]).encode("latin-1")
    raise NotPlainData(f"a call of {symbol} that makes no array")


def _array(state: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    _, shape, dtype, by_columns, content = state
    kind = _of(PendingType, dtype)
    if kind.code not in NUMBERS or kind.order not in {"|", "<", ">", "="}:
        raise NotPlainData(f"an array of {kind.code!r}, which is not of numbers")
    raw = content.encode("latin-1") if isinstance(content, str) else _of(bytes, content)
    element = np.dtype(kind.code).newbyteorder(kind.order)
    sizes = tuple(_of(int, size) for size in _of(tuple, shape))
    if min(sizes, default=0) < 0 or math.prod(sizes) * element.itemsize != len(raw):
        raise NotPlainData(f"an array of shape {sizes} with {len(raw)} bytes")
    return np.frombuffer(raw, element).reshape(sizes, order="F" if by_columns else "C")


class _Finisher:
    """Puts arrays in place. Every value costs the file a byte, so more visits than bytes are a trap of shared lists."""

    def __init__(self, visits: int) -> None:
        self.visits = visits

    def finish(self, value: Any, depth: int = 0) -> Any:
        self.visits -= 1
        if self.visits < 0 or depth > 16:
            raise NotPlainData("containers that repeat or hold themselves, or more than 16 deep")
        if isinstance(value, PendingArray) and value.value is not None:
            return value.value
        if isinstance(value, Symbol | PendingType | PendingArray) or value is MARK:
            raise NotPlainData("an unfinished array")
        if isinstance(value, list | tuple):
            return type(value)(self.finish(item, depth + 1) for item in value)
        if isinstance(value, dict):
            return {self.finish(k, depth + 1): self.finish(v, depth + 1) for k, v in value.items()}
        return value


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise NotPlainData(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: MARK,
}
LITERALS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "FLOAT"} | {
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
ACTIONS: dict[str, Callable[[_Reader, Any], Any]] = {
    "TUPLE": lambda r, _: r.stack.append(tuple(r.pop_mark())),
    "LIST": lambda r, _: r.stack.append(r.pop_mark()),
    "DICT": lambda r, _: (lambda items: (r.stack.append({}), r.update(items)))(r.pop_mark()),
    "TUPLE1": lambda r, _: r.pop_tuple(1),
    "TUPLE2": lambda r, _: r.pop_tuple(2),
    "TUPLE3": lambda r, _: r.pop_tuple(3),
    "APPEND": lambda r, _: r.extend([r.stack.pop()]),
    "APPENDS": lambda r, _: r.extend(r.pop_mark()),
    "SETITEM": lambda r, _: (lambda value, key: r.update([key, value]))(r.stack.pop(), r.stack.pop()),
    "SETITEMS": lambda r, _: r.update(r.pop_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": lambda r, _: r.call(),
    "BUILD": lambda r, _: r.build(),
    "MEMOIZE": lambda r, _: r.memo.__setitem__(len(r.memo), r.stack[-1]),
} | {
    put: lambda r, key: r.memo.__setitem__(int(key), r.stack[-1]) for put in ("PUT", "BINPUT", "LONG_BINPUT")
} | {
    get: lambda r, key: r.stack.append(r.memo[int(key)]) for get in ("GET", "BINGET", "LONG_BINGET")
}  # fmt: skip
