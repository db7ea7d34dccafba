"""Flat shards: an array, flattened and cut into equal parts for the ranks of a group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import Group, all_gather, reduce_scatter
from tfdist.collectives.narrow import is_narrower, narrow_reduce_scatter
from tfdist.layers.sharding import Sharding, detached

__all__ = [
    "FlatSharding",
    "gather",
    "mark_state_split",
    "scatter",
    "state_sharding_of",
]

_STATE = "_tfdist_state_sharding"


@dataclasses.dataclass(frozen=True)
class FlatSharding:
    """Which part of an array a rank's flat shard is.

    Attributes:
        group: The ranks that hold the shards, in order.
        local_shape: The shape of the array.
        inner: Where the array is itself a slice of a global one: which.
        wire_dtype: What its gradient travels in, if that is wider; None for the gradient's own.
    """

    group: Group
    local_shape: tuple[int, ...]
    inner: Sharding | None = None
    wire_dtype: tf.DType | None = None

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.local_shape)

    @property
    def share(self) -> int:
        """The number of elements of a shard; the last shards are padded with zeros."""
        return math.ceil(self.size / self.group.size)

    @property
    def padding(self) -> int:
        """How many elements all shards have beyond the array."""
        return self.share * self.group.size - self.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.local_shape if self.inner is None else self.inner.shape

    def own_of(self, array):
        """This rank's shard of the array, a NumPy array or a tensor, as a vector."""
        is_numpy = isinstance(array, np.ndarray)
        begin = min(self.group.rank * self.share, self.size)
        end = min(begin + self.share, self.size)
        flat = array.reshape(-1) if is_numpy else tf.reshape(array, [-1])
        part = flat[begin:end]
        if end - begin == self.share:
            return part
        return (np.pad if is_numpy else tf.pad)(part, [(0, self.share - (end - begin))])

    def parts_of(self, array: tf.Tensor) -> tf.Tensor:
        """The shards of all ranks: shape [ranks, share]."""
        flat = tf.reshape(array, [-1])
        if self.padding:
            flat = tf.pad(flat, [(0, self.padding)])
        return tf.reshape(flat, [self.group.size, self.share])

    def array_of(self, parts: tf.Tensor) -> tf.Tensor:
        """The array, of the shards of all ranks."""
        flat = tf.reshape(parts, [-1])
        return tf.reshape(flat[: self.size] if self.padding else flat, self.local_shape)

    def slice_of(self, whole):
        """This rank's shard of the global array."""
        return self.own_of(whole if self.inner is None else self.inner.slice_of(whole))

    def whole_of(self, own, name: str = "shard"):
        """The global array; every member of the group calls this with its own shard."""
        array = self.array_of(all_gather(own, self.group, name=name))
        return array if self.inner is None else self.inner.whole_of(array, name)


def scatter(
    arrays: Sequence[tf.Tensor], shardings: Sequence[FlatSharding], reduction: str, name: str
) -> list[tf.Tensor]:
    """Reduces arrays over their group, of which each rank gets its shards, in one collective.

    Args:
        arrays: Tensors of one dtype, of one group.
        shardings: How each is cut.
        reduction: "sum" or "mean".
        name: What the operation serves, for messages.
    """
    parts = [s.parts_of(array) for s, array in zip(shardings, arrays, strict=True)]
    packed = parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)
    group, wire_dtype = shardings[0].group, shardings[0].wire_dtype
    flat = tf.reshape(packed, [-1])
    if is_narrower(wire_dtype, flat.dtype):
        own = narrow_reduce_scatter(flat, group, reduction, wire_dtype, name=name)
    else:
        own = reduce_scatter(flat, group, reduction, name=name)
    if len(parts) == 1:
        return [own]
    # An optimizer may keep a shard's memory as that of its state, and with it that of all.
    return [detached(share) for share in tf.split(own, [s.share for s in shardings])]


def gather(own: Sequence[tf.Tensor], shardings: Sequence[FlatSharding], name: str) -> list:
    """The arrays of which each rank gives its shards, in one collective: undoes `scatter`."""
    packed = own[0] if len(own) == 1 else tf.concat(own, axis=0)
    group = shardings[0].group
    parts = tf.reshape(all_gather(packed, group, name=name), [group.size, -1])
    shares = tf.split(parts, [s.share for s in shardings], axis=1) if len(own) > 1 else [parts]
    return [s.array_of(share) for s, share in zip(shardings, shares, strict=True)]


def state_sharding_of(variable) -> FlatSharding | None:
    """How the optimizer's state for a parameter is split; None where it is whole."""
    return getattr(variable, _STATE, None)


def mark_state_split(variable, sharding: FlatSharding) -> None:
    """Says that the optimizer's state for a parameter is split."""
    setattr(variable, _STATE, sharding)
