"""Which parts of a global array lie in what a rank holds of it.

A global array is the same on any mesh; what a rank holds is the whole, a slice along one dim (tensor
parallel) or two (experts of split layers), or a flat shard of either (ZeRO). Each is a few boxes of the global array.
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


@dataclasses.dataclass(frozen=True)
class ArrayShard:
    """A box of a global array, and where a rank has it.

    Attributes:
        box: The box in the global array. Where an index stands for an axis, the box lacks it.
        run: Where the flat shard has the local box that it comes from: begin and end. None where
            the rank holds an array of the global array's dims.
        local: The shape of that local box, or of the array.
        inside: What of it is the box; the rest is padding.
    """

    box: tuple[slice | int, ...]
    run: tuple[int, int] | None
    local: tuple[int, ...]
    inside: Box

    def get(self, held: np.ndarray) -> np.ndarray:
        """The box, from what the rank holds."""
        return self._around(held)[self.inside]

    def put(self, held: np.ndarray, value: np.ndarray) -> None:
        """Puts the box into what the rank holds."""
        self._around(held)[self.inside] = value

    def _around(self, held: np.ndarray) -> np.ndarray:
        if self.run is None:
            return held
        return held[self.run[0] : self.run[1]].reshape(self.local)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A global array of which this rank holds something.

    Attributes:
        name: Its name, the same on any mesh.
        shape: Its shape.
        dtype: Its dtype.
        variable: The variable that holds this rank's part.
        shards: The boxes that are there.
        writes: Whether this rank writes them: of ranks that hold the same, one does.
        merge: Where each rank counts for itself, in a row of the array: what this one takes of
            rows that another number of ranks wrote. None for any other array.
        is_optional: Whether a checkpoint may lack it, or have another shape; it then keeps its value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    variable: Any
    shards: tuple[ArrayShard, ...]
    writes: bool
    merge: Callable[[np.ndarray], np.ndarray] | None = None
    is_optional: bool = False


def shards_of(variable: keras.Variable) -> list[ArrayShard]:
    """The boxes of the global array that this rank holds in a variable."""
    layout = layout_of(variable)
    if layout.flat is None:
        if layout.slice is None:
            shape = tuple(variable.shape)
            whole = tuple(slice(0, size) for size in shape)
            return [ArrayShard(whole, None, shape, whole)]
        part = layout.slice
        return _shard_of_slice(part, tuple(slice(0, n) for n in part.local_shape), None)
    begin, end = layout.flat.span
    found: list[ArrayShard] = []
    for run, box in boxes(begin, end, layout.flat.array_shape):
        held = (run[0] - begin, run[1] - begin)
        if layout.slice is None:
            shape = tuple(each.stop - each.start for each in box)
            found.append(ArrayShard(box, held, shape, tuple(slice(0, size) for size in shape)))
        else:
            found += _shard_of_slice(layout.slice, box, held)
    return found


def _shard_of_slice(
    part: Slice | NestedSlice, local: Box, run: tuple[int, int] | None
) -> list[ArrayShard]:
    """The shard that a box of a slice is, without the slice's padding; none if that is all."""
    box, inside = [], []
    for origin, extent, size, edges in zip(
        part.origin, part.extent, part.shape, local, strict=True
    ):
        # Where the slice ends, or the array.
        last = min(origin + extent, size)
        begin, end = (min(origin + edge, last) for edge in (edges.start, edges.stop))
        if end <= begin:
            return []
        box.append(slice(begin, end))
        inside.append(slice(0, end - begin))
    shape = tuple(each.stop - each.start for each in local)
    return [ArrayShard(tuple(box), run, shape, tuple(inside))]


def boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], Box]]:
    """Cuts elements `begin` to `end` of a flattened array into boxes of the array, in order.

    Yields the run of each box, and the box.
    """
    if end <= begin:
        return
    if not shape:
        yield (begin, end), ()
        return
    row = math.prod(shape[1:])
    first, last = begin // row, end // row
    if begin % row:
        stop = min(end, (first + 1) * row)
        yield from _in_row(first, begin, stop, shape)
        first += 1
    if first < last:
        rest = tuple(slice(0, size) for size in shape[1:])
        yield (first * row, last * row), (slice(first, last), *rest)
    if end % row and first <= last:
        yield from _in_row(last, max(begin, last * row), end, shape)


def _in_row(row: int, begin: int, end: int, shape: tuple[int, ...]):
    offset = row * math.prod(shape[1:])
    for (first, last), box in boxes(begin - offset, end - offset, shape[1:]):
        yield (first + offset, last + offset), (slice(row, row + 1), *box)
