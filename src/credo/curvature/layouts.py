"""Where the examples are in a tensor: which dimension counts them, and which example each row belongs to."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Label = tuple[int, ...] | None  # the example of each row; None: row i is example i


class Rows(NamedTuple):
    """Dimension `axis` has outer · rows · inner elements: examples, with other dimensions merged around them.

    (B·T, d) from (B, T, d) has inner = T; (T·B, d) from (T, B, d) has outer = T. A `label` says for each of the rows
    which example it is, as after an index; inner and outer are 1 then.
    """

    axis: int
    outer: int
    rows: int
    inner: int
    label: Label = None

    def examples(self) -> Iterable[int]:
        """The examples that have a row."""
        return range(self.rows) if self.label is None else set(self.label)

    def at(self, axis: int) -> "Rows":
        return self if axis == self.axis else self._replace(axis=axis)

    def positions(self) -> tuple[int, ...]:
        """The example of each position of the dimension."""
        own = range(self.rows) if self.label is None else self.label
        return tuple(i for i in own for _ in range(self.inner)) * self.outer


class Single(NamedTuple):
    """A tensor without a dimension of examples, which belongs to one of them."""

    example: int


class WholeBatch:
    """The kind of a tensor that all examples have gone into: a statistic of the batch, or the loss."""


WHOLE_BATCH = WholeBatch()
Layout = Rows | Single | WholeBatch | None  # None: no example is in it


def labelled(axis: int, label: Sequence[int], examples: int) -> Rows:
    """A dimension whose positions belong to these examples, of so many in the batch."""
    known, size = tuple(label), len(label)
    if size and size % examples == 0:  # as it was before it was taken apart
        inner = size // examples
        if known == tuple(i for i in range(examples) for _ in range(inner)):
            return Rows(axis, 1, examples, inner)
        if known == tuple(range(examples)) * inner:
            return Rows(axis, inner, examples, 1)
    return Rows(axis, 1, size, 1, known)


def viewed(rows: Rows, before: Sequence[int], after: Sequence[int]) -> Rows | None:
    """The layout after a view; None where the examples would be spread over several dimensions."""
    chunk = rows.inner * math.prod(before[rows.axis + 1 :])  # elements from one example to the next
    suffix = math.prod(after)
    if suffix == 0:
        return None
    for axis, size in enumerate(after):
        suffix //= size
        inner, rest = divmod(chunk, suffix)
        if rest == 0 and size % (inner * rows.rows) == 0:
            outer = size // (inner * rows.rows)
            if rows.label is None or inner == outer == 1:
                return Rows(axis, outer, rows.rows, inner, rows.label)
            spread = tuple(i for i in rows.label for _ in range(inner)) * outer
            return Rows(axis, 1, size, 1, spread)
    return None


def aligned(rows: Rows, shape: Sequence[int], result: Sequence[int]) -> Rows | None:
    """The layout of an operand in the shape that it is broadcast to; None if its rows are repeated."""
    axis = rows.axis + len(result) - len(shape)
    return rows.at(axis) if result[axis] == shape[rows.axis] else None


def signed(value: int) -> int:
    """Autograd keeps negative numbers as if they had no sign."""
    return value - 2**64 if value >= 2**63 else value


def dims_of(value: Any, dims: int) -> tuple[int, ...]:
    """Dimensions as autograd keeps them, from 0 on; none stands for all."""
    given = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    return tuple(signed(d) % max(dims, 1) for d in given) or tuple(range(dims))
