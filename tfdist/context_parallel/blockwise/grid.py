"""The split of queries and keys into blocks, and the mask of a pair of blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.backend import devices
from tfdist.context_parallel.blockwise.blocks import LOWEST

#: If there are several blocks, their size is a multiple of this.
_MULTIPLE = 8


def size_of(tensor, axis: int):
    """The size of a dim: an int if it is known, else a scalar tensor."""
    static = tensor.shape[axis]
    return tf.shape(tensor)[axis] if static is None else static


def padded(tensor: tf.Tensor, size, axis: int) -> tf.Tensor:
    """The tensor, padded with zeros (or False) at the end up to `size` along `axis`."""
    if isinstance(size, int) and tensor.shape[axis] == size:
        return tensor
    paddings = [[0, 0]] * len(tensor.shape)
    paddings[axis] = [0, size - size_of(tensor, axis)]
    return tf.pad(tensor, paddings)


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The keys that queries see.

    Attributes:
        causal: Whether query i sees key j only if j <= i + `query_offset`.
        query_offset: The position of the first query among the keys: an int or a scalar tensor.
        mask: None, or bool of shape [batch or 1, heads or 1, queries or 1, keys or 1].
        starts: None, or float32 of shape [batch, queries]: the least place of a key that a query sees.
        places: The places of the keys, float32 of shape [keys]; None for 0, 1, ...
    """

    causal: bool = False
    query_offset: Any = 0
    mask: tf.Tensor | None = None
    starts: tf.Tensor | None = None
    places: tf.Tensor | None = None

    @property
    def by_query(self) -> bool:
        """Whether different queries see different keys."""
        by_mask = self.mask is not None and self.mask.shape[2] != 1
        return self.causal or self.starts is not None or by_mask


class Settings(NamedTuple):
    """The settings of attention other than visibility.

    Attributes:
        scale: The factor of scores.
        soft_cap: None, or c: scores s become c tanh(s / c).
        rows: The maximum number of queries in a block.
        columns: The maximum number of keys in a block.
    """

    scale: float
    soft_cap: float | None
    rows: int
    columns: int


class Cut:
    """The split of a dim into equal blocks, the last of which may be padded, by groups of heads.

    Attributes:
        length: The size of the dim, an int or a scalar tensor, as are `number` and `size`.
        number: The number of blocks.
        size: The size of a block.
    """

    def __init__(self, tensor, groups: int, most: int):
        self._batch, self._groups = size_of(tensor, 0), groups
        self._repeats = tensor.shape[1] // groups
        self.length = length = size_of(tensor, 2)
        at_least_one = max if isinstance(length, int) else tf.maximum
        self.number = at_least_one(1, -(-length // most))
        self.size = -(-length // self.number)
        if isinstance(length, int) and self.number > 1:
            self.size = min(most, -(-self.size // _MULTIPLE) * _MULTIPLE)

    @property
    def is_exact(self) -> bool:
        """Whether it is known that no block is padded."""
        return isinstance(self.length, int) and self.number * self.size == self.length

    @property
    def is_whole(self) -> bool:
        """Whether it is known that there is one block."""
        return isinstance(self.number, int) and self.number == 1

    def filled(self, tensor, axis: int):
        """The tensor, padded with zeros up to the end of the last block."""
        return tensor if self.is_exact else padded(tensor, self.number * self.size, axis)

    def shape(self, size: int) -> list:
        """The shape of all blocks of a tensor whose last dim is `size`, along a new dim 0."""
        return [self.number, self._batch, self._groups, self._repeats * self.size, size]

    def blocks(self, tensor) -> Callable:
        """A function from an index to a block of a tensor of shape [batch, heads, length, size].

        Blocks have shape [batch, groups, heads / groups * block, size].
        """
        size = tensor.shape[3]
        outer = [self._batch, self._groups, self._repeats]
        tensor = tf.reshape(self.filled(tensor, 2), [*outer, self.number * self.size, size])

        def read(index):
            found = tensor
            if not self.is_whole:
                # By sizes, which XLA requires.
                begin = [0, 0, 0, index * self.size, 0]
                found = tf.slice(tensor, begin, [*outer, self.size, size])
            return tf.reshape(found, self.shape(size)[1:])

        return read

    def joined(self, blocks: tf.TensorArray, size: int):
        """The tensor of shape [batch, heads, length, size] of given blocks."""
        outer = [self._batch, self._groups, self._repeats]
        tensor = tf.reshape(blocks.stack(), [self.number, *outer, self.size, size])
        tensor = tf.transpose(tensor, [1, 2, 3, 0, 4, 5])
        heads = self._groups * self._repeats
        tensor = tf.reshape(tensor, [self._batch, heads, self.number * self.size, size])
        return tensor if self.is_exact else tensor[:, :, : self.length]


class Grid:
    """Pairs of a block of queries and a block of keys.

    Attributes:
        rows: The split of the queries.
        columns: The split of the keys.
        dtype: The dtype of scores and sums.
        narrow: The dtype of the factors of products: on a GPU, that of the inputs.
    """

    def __init__(self, query, key, seen: Visibility, settings: Settings):
        self.dtype = tf.float64 if query.dtype == tf.float64 else tf.float32
        self.narrow = query.dtype if devices.has_gpu() else self.dtype
        self._heads, self._groups, self._seen = query.shape[1], key.shape[1], seen
        self.rows = Cut(query, self._groups, settings.rows)
        self.columns = Cut(key, self._groups, settings.columns)
        self._mask = None if seen.mask is None else self._prepared(seen.mask)
        self._places = [_places(cut.size) for cut in (self.rows, self.columns)]
        if seen.starts is not None:
            self._starts = self.rows.filled(seen.starts, 1)
            keys = _places(self.columns.length) if seen.places is None else seen.places
            self._keys = self.columns.filled(keys, 0)

    def columns_seen(self, row):
        """The number of blocks of keys, starting with the first, that a block of queries sees."""
        if not self._seen.causal:
            return self.columns.number
        last = (row + 1) * self.rows.size - 1 + self._seen.query_offset
        return _clip(last // self.columns.size + 1, self.columns.number)

    def first_row(self, column):
        """The first block of queries that sees a block of keys."""
        if not self._seen.causal:
            return 0
        first = column * self.columns.size - self._seen.query_offset
        return _clip(first // self.rows.size, self.rows.number)

    def with_bias(self, row, column, compute: Callable, nothing: Callable):
        """Calls `compute` with the bias of the scores of a pair of blocks; None if all keys are seen.

        If that depends on tensors, the graph decides it. For a pair of which the mask hides everything,
        `nothing()` is returned without any computation, as for causal masks and sliding windows.
        """
        begin, first = row * self.rows.size, column * self.columns.size
        if self._mask is not None or self._seen.starts is not None:
            visible = self._masked(begin, first)
            return tf.cond(
                tf.reduce_any(visible),
                lambda: compute(self._bias(self._by_group(visible))),
                nothing,
            )
        partly: Any = False
        if self._seen.causal:
            partly = first + self.columns.size - 1 > begin + self._seen.query_offset
        if not self.columns.is_exact and partly is not True:
            partly = partly | (first + self.columns.size > self.columns.length)
        if isinstance(partly, bool):
            return compute(self._unmasked_bias(begin, first) if partly else None)
        return tf.cond(
            partly, lambda: compute(self._unmasked_bias(begin, first)), lambda: compute(None)
        )

    def _unmasked_bias(self, begin, first):
        visible = self._unmasked(begin, first)
        repeats = self._heads // self._groups
        return self._bias(tf.tile(visible, [repeats, 1]) if self._seen.causal else visible)

    def _bias(self, visible):
        return tf.where(visible, tf.zeros([], self.dtype), tf.cast(LOWEST, self.dtype))

    def _unmasked(self, begin, first):
        """Which keys are seen without the mask: [rows or 1, columns]."""
        rows, columns = self._places
        visible = columns[None, :] < _float(self.columns.length - first)
        if not self._seen.causal:
            return visible
        shift = _float(begin + self._seen.query_offset - first)
        return tf.logical_and(visible, columns[None, :] <= rows[:, None] + shift)

    def _masked(self, begin, first):
        """Which keys are seen: [batch or 1, groups or 1, heads of a group or 1, rows or 1, columns]."""
        visible = self._unmasked(begin, first)
        if self._seen.starts is not None:
            size = [size_of(self._starts, 0), self.rows.size]
            starts = tf.slice(self._starts, [0, begin], size)[:, None, None, :, None]
            keys = tf.slice(self._keys, [first], [self.columns.size])
            visible = tf.logical_and(visible, keys >= starts)
        mask: Any = self._mask
        if mask is None:
            return visible
        start, shape = [0] * 5, [size_of(mask, axis) for axis in range(5)]
        if mask.shape[3] != 1:
            start[3], shape[3] = begin, self.rows.size
        if mask.shape[4] != 1:
            start[4], shape[4] = first, self.columns.size
        return tf.logical_and(tf.slice(mask, start, shape), visible)

    def _by_group(self, visible):
        """The same as [batch or 1, groups or 1, heads of a group * rows or 1, columns]."""
        repeats = self._heads // self._groups
        if repeats == 1 or (visible.shape[2] == 1 and visible.shape[3] == 1):
            return visible[:, :, 0]
        batch, groups = size_of(visible, 0), visible.shape[1]
        shape = [batch, groups, repeats * self.rows.size, self.columns.size]
        whole = tf.broadcast_to(visible, [*shape[:2], repeats, self.rows.size, shape[3]])
        return tf.reshape(whole, shape)

    def _prepared(self, mask):
        """The mask as [batch or 1, groups or 1, heads of a group or 1, queries or 1, keys or 1]."""
        heads = mask.shape[1]
        # A dim of unknown size may be 1; broadcasting gives it the full size.
        shape = [
            size_of(mask, 0),
            self._heads if heads is None else heads,
            self.rows.length if mask.shape[2] is None else mask.shape[2],
            self.columns.length if mask.shape[3] is None else mask.shape[3],
        ]
        if None in mask.shape[1:]:
            mask = tf.broadcast_to(mask, shape)
        groups = 1 if heads == 1 else self._groups
        mask = tf.reshape(mask, [shape[0], groups, shape[1] // groups, *shape[2:]])
        for axis, cut, static in ((3, self.rows, shape[2]), (4, self.columns, shape[3])):
            if not (isinstance(static, int) and static == 1):
                mask = cut.filled(mask, axis)
        return mask


def _places(size) -> tf.Tensor:
    """0, 1, ... as float32, which a GPU counts and compares; it leaves ints to the host."""
    return tf.cumsum(tf.ones([size], tf.float32), exclusive=True)


def _float(value):
    return float(value) if isinstance(value, int) else tf.cast(value, tf.float32)


def _clip(value, most):
    if isinstance(value, int) and isinstance(most, int):
        return min(max(value, 0), most)
    return tf.clip_by_value(value, 0, most)
