"""Which parts of a global array are in the variable of a rank.

A global array is the same on any mesh. A rank has all of it, a slice along one dim (tensor parallel) or
two dims (experts of split layers), or a flat shard of either (ZeRO): each is a few boxes of the array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdist.collectives import Group
from tfdist.sharding.layout import layout_of
from tfdist.sharding.parts import NestedSlice, Slice

Box = tuple[slice, ...]


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box that is all of an array."""
    return tuple(slice(0, size) for size in shape)


@dataclasses.dataclass(frozen=True)
class ArrayShard:
    """A box of a global array, and its place in the variable of a rank.

    Attributes:
        box: The box in the global array. An axis with an index in place of a slice is dropped.
        run: Begin and end of the local box in a flat shard. None if the variable has the dims of the
            global array.
        local: The shape of that local box, or of the variable.
        inside: The part of it that is the box; the rest is padding.
    """

    box: tuple[slice | int, ...]
    run: tuple[int, int] | None
    local: tuple[int, ...]
    inside: Box

    def get(self, held: np.ndarray) -> np.ndarray:
        """The box, from the rank's value."""
        return self._around(held)[self.inside]

    def put(self, held: np.ndarray, value: np.ndarray) -> None:
        """Writes the box into the rank's value."""
        self._around(held)[self.inside] = value

    def _around(self, held: np.ndarray) -> np.ndarray:
        return held if self.run is None else held[slice(*self.run)].reshape(self.local)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A global array of which this rank has a part.

    Attributes:
        name: Its name, the same on any mesh.
        shape: Its shape.
        dtype: Its dtype.
        variable: The variable with this rank's part.
        shards: The boxes in that part.
        writes: Whether this rank writes them: one of the ranks with the same part does.
        merge: For an array with a row for each rank: computes this rank's value from the rows that a
            different number of ranks wrote. None for any other array.
        rows: For an array with a row for each rank, each of one variable: the ranks. None for any other.
        is_optional: Whether the array may be missing in a checkpoint, or have another shape there; the
            variable then keeps its value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    variable: Any
    shards: tuple[ArrayShard, ...]
    writes: bool
    merge: Callable[[np.ndarray], np.ndarray] | None = None
    rows: Group | None = None
    is_optional: bool = False

    @property
    def array(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""
        return self.shape, self.dtype


def shards_of(variable: keras.Variable) -> tuple[ArrayShard, ...]:
    """The boxes of the global array that are in this rank's variable."""
    layout = layout_of(variable)
    if layout.flat is not None:
        return shards_of_run(*layout.flat.span, layout.flat.array_shape, layout.slice)
    part = layout.slice
    shape = tuple(variable.shape) if part is None else part.local_shape
    found = _shard(part, whole_box(shape), None)
    return () if found is None else (found,)


def shards_of_run(
    begin: int, end: int, shape: tuple[int, ...], part: Slice | NestedSlice | None
) -> tuple[ArrayShard, ...]:
    """The boxes of a global array in a vector of some elements of it, or of a slice of it.

    Args:
        begin: The first element.
        end: The first element after them.
        shape: The shape of the array, or of the slice.
        part: The slice.
    """
    found = (
        _shard(part, box, (first - begin, last - begin))
        for (first, last), box in boxes(begin, end, shape)
    )
    return tuple(shard for shard in found if shard is not None)


def _shard(
    part: Slice | NestedSlice | None, local: Box, run: tuple[int, int] | None
) -> ArrayShard | None:
    """The shard of a box of a slice, without the slice's padding; None if all of it is padding."""
    shape = tuple(each.stop - each.start for each in local)
    if part is None:
        return ArrayShard(local, run, shape, whole_box(shape))
    # The slice ends at its extent, or at the end of the array.
    lasts = [
        min(o + e, size) for o, e, size in zip(part.origin, part.extent, part.shape, strict=True)
    ]
    box = tuple(
        slice(min(origin + each.start, last), min(origin + each.stop, last))
        for origin, each, last in zip(part.origin, local, lasts, strict=True)
    )
    sizes = tuple(each.stop - each.start for each in box)
    return ArrayShard(box, run, shape, whole_box(sizes)) if all(sizes) else None


def boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], Box]]:
    """Splits elements `begin` to `end` of a flattened array into boxes of the array, in order.

    Yields:
        The run of elements of each box, and the box.
    """
    if end <= begin:
        return
    if not shape:
        yield (begin, end), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # Inside of one row.
        yield from _in_row(last, begin, end, shape)
        return
    yield from _in_row(first - 1, begin, first * row, shape)
    if first < last:
        yield (first * row, last * row), (slice(first, last), *whole_box(shape[1:]))
    yield from _in_row(last, last * row, end, shape)


def _in_row(row: int, begin: int, end: int, shape: tuple[int, ...]):
    offset = row * math.prod(shape[1:])
    for (first, last), box in boxes(begin - offset, end - offset, shape[1:]):
        yield (first + offset, last + offset), (slice(row, row + 1), *box)
