"""How queries and keys are cut into blocks, and what a block of queries sees of a block of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.context_parallel.blockwise.blocks import LOWEST

#: The sizes of blocks are multiples of it, where there are several.
_MULTIPLE = 8


def size_of(tensor, axis: int):
    """A dim: an int where it is known, else a scalar tensor."""
    static = tensor.shape[axis]
    return tf.shape(tensor)[axis] if static is None else static


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which keys queries see.

    Attributes:
        causal: Whether query i sees key j only where j <= i + `query_offset`.
        query_offset: The place of the first query among the keys: an int or a scalar tensor.
        mask: None, or bool of shape [batch or 1, heads or 1, queries or 1, keys or 1].
    """

    causal: bool = False
    query_offset: Any = 0
    mask: tf.Tensor | None = None


class Cut:
    """The cut of a length into equal blocks, the last of which may be filled up.

    Attributes:
        length: What is cut: an int, or a scalar tensor; so are `number` and `size`.
        number: The number of blocks.
        size: The length of a block.
    """

    def __init__(self, length, most: int):
        self.length = length
        if isinstance(length, int):
            self.number = max(1, -(-length // most))
            self.size = -(-length // self.number)
            if self.number > 1:
                self.size = min(most, -(-self.size // _MULTIPLE) * _MULTIPLE)
        else:
            self.number = tf.maximum(1, -(-length // most))
            self.size = -(-length // self.number)

    @property
    def is_exact(self) -> bool:
        """Whether it is known that no block is filled up."""
        return isinstance(self.length, int) and self.number * self.size == self.length

    def blocks(self, tensor, groups: int | None = None) -> _Blocks:
        """The blocks of a tensor of shape [batch, heads, length, size], by `read(index)`.

        Args:
            tensor: The tensor.
            groups: None, or G: the heads of one of G groups follow each other as rows.

        Returns:
            What reads tensors of shape [batch, heads, block, size], or
            [batch, G, heads / G * block, size].
        """
        batch, heads, size = size_of(tensor, 0), tensor.shape[1], tensor.shape[3]
        groups = groups or heads
        shape = [batch, groups, heads // groups, self.number * self.size, size]
        return _Blocks(self, tf.reshape(self.filled(tensor, 2), shape))

    def joined(self, blocks: tf.TensorArray, batch, heads: int, groups: int, size: int):
        """The tensor of shape [batch, heads, length, size] that blocks are of."""
        shape = [self.number, batch, groups, heads // groups, self.size, size]
        tensor = tf.transpose(tf.reshape(blocks.stack(), shape), [1, 2, 3, 0, 4, 5])
        tensor = tf.reshape(tensor, [batch, heads, self.number * self.size, size])
        return tensor if self.is_exact else tensor[:, :, : self.length]

    @property
    def is_whole(self) -> bool:
        """Whether it is known that there is one block."""
        return isinstance(self.number, int) and self.number == 1

    def filled(self, tensor, axis: int):
        """The tensor, with zeros behind it up to the end of the last block."""
        if self.is_exact:
            return tensor
        paddings = [[0, 0]] * len(tensor.shape)
        paddings[axis] = [0, self.number * self.size - self.length]
        return tf.pad(tensor, paddings)


class _Blocks:
    """Blocks of a tensor of shape [batch, groups, heads of a group, length, size], cut when they are read."""

    def __init__(self, cut: Cut, tensor):
        self._cut, self._tensor = cut, tensor

    def read(self, index):
        """A block, of shape [batch, groups, heads of a group * block, size]."""
        found, shape = self._tensor, self._tensor.shape
        batch = size_of(found, 0)
        if not self._cut.is_whole:
            # By sizes, as XLA wants to know these.
            size = [batch, *shape[1:3], self._cut.size, shape[4]]
            found = tf.slice(found, [0, 0, 0, index * self._cut.size, 0], size)
        return tf.reshape(found, [batch, shape[1], shape[2] * self._cut.size, shape[4]])


class Grid:
    """Pairs of a block of queries and a block of keys.

    Attributes:
        rows: The cut of the queries.
        columns: The cut of the keys.
    """

    def __init__(self, rows: Cut, columns: Cut, heads: int, groups: int, seen: Visibility, dtype):
        self.rows, self.columns = rows, columns
        self._heads, self._groups, self._seen, self._dtype = heads, groups, seen, dtype
        self._mask = None if seen.mask is None else self._prepared(seen.mask)

    def columns_seen(self, row):
        """How many blocks of keys a block of queries sees, from the first on."""
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
        """Calls `compute` with what is added to the scores of a pair; None where all is seen.

        Where only the graph knows what is seen, it decides there. A pair of which the mask leaves
        nothing gives `nothing()`, and costs nothing: so causal masks and sliding windows do.
        """
        begin, first = row * self.rows.size, column * self.columns.size
        if self._mask is not None:
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
            partly = _either(partly, first + self.columns.size > self.columns.length)
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
        return tf.where(visible, tf.zeros([], self._dtype), tf.cast(LOWEST, self._dtype))

    def _unmasked(self, begin, first):
        """What is seen but for the mask: [rows or 1, columns]."""
        columns = first + tf.range(self.columns.size)
        visible = columns[None, :] < self.columns.length
        if not self._seen.causal:
            return visible
        rows = begin + tf.range(self.rows.size) + self._seen.query_offset
        return tf.logical_and(visible, columns[None, :] <= rows[:, None])

    def _masked(self, begin, first):
        """What is seen: [batch or 1, groups or 1, heads of a group or 1, rows or 1, columns]."""
        mask: Any = self._mask
        start, shape = [0] * 5, [size_of(mask, axis) for axis in range(5)]
        if mask.shape[3] != 1:
            start[3], shape[3] = begin, self.rows.size
        if mask.shape[4] != 1:
            start[4], shape[4] = first, self.columns.size
        return tf.logical_and(tf.slice(mask, start, shape), self._unmasked(begin, first))

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
        # A dim that is not known may be 1. Broadcast, it is what it is said to be.
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


def _clip(value, most):
    if isinstance(value, int) and isinstance(most, int):
        return min(max(value, 0), most)
    return tf.clip_by_value(value, 0, most)


def _either(first, second):
    if isinstance(first, bool) and isinstance(second, bool):
        return first or second
    return tf.logical_or(first, second)
