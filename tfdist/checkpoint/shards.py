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
    is_optional: bool = False

    @property
    def array(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype."""
        return self.shape, self.dtype


def shards_of(variable: keras.Variable) -> tuple[ArrayShard, ...]:
    """The boxes of the global array that are in this rank's variable."""
    layout = layout_of(variable)
    runs: list[tuple[tuple[int, int] | None, Box]]
    if layout.flat is None:
        part = layout.slice
        shape = tuple(variable.shape) if part is None else part.local_shape
        runs = [(None, whole_box(shape))]
    else:
        begin, end = layout.flat.span
        runs = [
            ((first - begin, last - begin), box)
            for (first, last), box in boxes(begin, end, layout.flat.array_shape)
        ]
    shards = (_shard(layout.slice, box, run) for run, box in runs)
    return tuple(shard for shard in shards if shard is not None)


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
    return (
        ArrayShard(box, run, shape, whole_box(sizes)) if all(size > 0 for size in sizes) else None
    )


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
