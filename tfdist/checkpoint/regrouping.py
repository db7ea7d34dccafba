"""Parts of arrays, regrouped before they are written, so that a chunk's file is written by one rank.

(By two at the edges of rows that are wider than a chunk, and by one for each slice of a chunk.)
Under ZeRO hundreds of ranks can hold parts of a chunk. Each would have to read the file, change its part and
write it again, while the others wait.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_value
from tfdist.checkpoint.chunks import chunk_shape_of
from tfdist.checkpoint.shards import Entry, shards_of_run
from tfdist.collectives import Group, all_to_all
from tfdist.gradients.buckets import buckets
from tfdist.sharding.layout import layout_of
from tfdist.utils.places import places_by

#: The bytes of a rank that are sent at once. A larger part has whole chunks, and only those at its edges are shared.
_SENT_BYTES = 32 << 20
_Span = tuple[int, int]


class Regrouping:
    """The entries of a rank after it has exchanged parts with others.

    Args:
        entries: The entries for the variables of this rank.

    Attributes:
        entries: The same arrays, with the parts that this rank writes.
    """

    def __init__(self, entries: Sequence[Entry]):
        self._spread = [spread for spread in map(_spread, entries) if spread is not None]
        exchanged = {spread.entry.name for spread in self._spread}
        self._kept = [entry for entry in entries if entry.name not in exchanged]
        self.entries = [*self._kept, *(spread.regrouped for spread in self._spread)]

    def values(self) -> Iterator[tuple[Entry, np.ndarray]]:
        """Yields what this rank writes: entries and copies of their values. All ranks must call this."""
        for entry in self._kept:
            if entry.writes:
                yield entry, stored_value(entry.variable).numpy()
        for group, places in places_by(spread.group for spread in self._spread).items():
            held = [(place, stored_value(self._spread[place].entry.variable)) for place in places]
            for bucket in buckets(held, _SENT_BYTES):
                yield from _exchange([self._spread[place] for place in bucket], group)


@dataclasses.dataclass(frozen=True)
class _Spread:
    """An array of which each rank of a group has `share` elements, in order; the last ones may have fewer.

    Attributes:
        entry: Its entry.
        group: The ranks.
        shape: Its shape; the entry's is that of the global array, of which this may be a slice.
        share: The elements of a rank.
        unit: The elements in a chunk.
        first: The rank that writes the first chunk; by the name of the array, as stages of a pipeline have
            other arrays, and small ones are distributed.
    """

    entry: Entry
    group: Group
    shape: tuple[int, ...]
    share: int
    unit: int
    first: int

    def held(self, rank: int) -> _Span:
        """The elements that a rank holds."""
        return self._span(rank * self.share, (rank + 1) * self.share)

    def written(self, rank: int) -> _Span:
        """The elements that a rank writes: some consecutive chunks."""
        ranks, units = self.group.size, math.ceil(math.prod(self.shape) / self.unit)
        place = (rank - self.first) % ranks
        begin, end = (-(-each * units // ranks) for each in (place, place + 1))
        return self._span(begin * self.unit, end * self.unit)

    def _span(self, begin: int, end: int) -> _Span:
        size = math.prod(self.shape)
        return min(begin, size), min(end, size)

    @functools.cached_property
    def exchanged(self) -> list[list[tuple[int, int, int]]]:
        """The ranks to which this rank sends elements, and which; and those from which it receives some."""
        found = []
        for of, to in ((self.held, self.written), (self.written, self.held)):
            (begin, end), others = of(self.group.rank), map(to, range(self.group.size))
            spans = [(rank, max(begin, b), min(end, e)) for rank, (b, e) in enumerate(others)]
            found.append([each for each in spans if each[1] < each[2]])
        return found

    @functools.cached_property
    def regrouped(self) -> Entry:
        """The entry with the part that this rank writes."""
        part = None if self.entry.rows is not None else layout_of(self.entry.variable).slice
        shards = shards_of_run(*self.written(self.group.rank), self.shape, part)
        return dataclasses.replace(self.entry, shards=shards, writes=bool(shards))


def _spread(entry: Entry) -> _Spread | None:
    """An array of which several ranks write parts; None for others."""
    flat, group = layout_of(entry.variable).flat, entry.rows
    shape, share = entry.shape, math.prod(entry.shape[1:])
    if group is None and flat is not None and entry.merge is None:
        group, shape, share = flat.group, flat.array_shape, flat.share
    if group is None or group.size == 1 or not (entry.writes and shape and 0 not in shape):
        return None
    if share * tf.as_dtype(entry.dtype).size > _SENT_BYTES:
        return None
    chunk = chunk_shape_of(*entry.array)
    axis = next((axis for axis, size in enumerate(chunk) if size > 1), len(chunk) - 1)
    unit = min(chunk[axis], shape[axis]) * math.prod(shape[axis + 1 :])
    first = zlib.crc32(entry.name.encode()) % group.size
    return _Spread(entry, group, shape, share, unit, first)


def _exchange(some: Sequence[_Spread], group: Group) -> Iterator[tuple[Entry, np.ndarray]]:
    """Sends and receives the parts of some arrays."""
    parts: list[tuple[int, np.ndarray]] = []
    # TensorFlow's engine sends bytes as int32.
    is_wide = all(tf.as_dtype(spread.entry.dtype).size % 4 == 0 for spread in some)
    unit = np.int32 if is_wide else np.uint8
    for spread in some:
        value = stored_value(spread.entry.variable).numpy().reshape(-1)
        first, _ = spread.held(group.rank)
        parts += [
            (rank, value[b - first : e - first].view(unit)) for rank, b, e in spread.exchanged[0]
        ]
    parts.sort(key=lambda part: part[0])
    splits = [sum(part.size for to, part in parts if to == rank) for rank in range(group.size)]
    buffer = np.concatenate([np.zeros(0, unit), *(part for _, part in parts)])
    answer, _ = all_to_all(buffer, group, tf.constant(splits, tf.int32), name="checkpoint/parts")
    received, place = answer.numpy(), 0
    values = [
        np.empty(end - begin, tf.as_dtype(spread.entry.dtype).as_numpy_dtype)
        for spread in some
        for begin, end in [spread.written(group.rank)]
    ]
    every = [(rank, n, b, e) for n, spread in enumerate(some) for rank, b, e in spread.exchanged[1]]
    for _, number, begin, end in sorted(every):
        first, _ = some[number].written(group.rank)
        part = values[number][begin - first : end - first].view(unit)
        part[:] = received[place : place + part.size]
        place += part.size
    for spread, value in zip(some, values, strict=True):
        if spread.regrouped.writes:
            yield spread.regrouped, value
