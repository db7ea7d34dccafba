"""Parts of a global array: slices along dims, and flat shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Group, all_gather


def deep_copy(part):
    """Copies a part of an array, a NumPy array or a tensor, so that the whole array can be freed.

    A slice of rows is a view that keeps the whole array in memory, also if it is assigned to a variable.
    """
    return np.array(part) if isinstance(part, np.ndarray) else tf.raw_ops.DeepCopy(x=part)


def flattened(tensors: Sequence) -> tf.Tensor:
    """The elements of several tensors of one dtype, as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unflattened(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits the result of `flattened` into tensors with the shapes of the given ones."""
    parts = tf.split(flat, [tf.size(tensor, tf.int64) for tensor in like])
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a global array along one dim.

    Attributes:
        group: The ranks that hold the slices, in order.
        dim: The dim that is split.
        shape: The shape of the global array. If its size along `dim` is not divisible by the number of
            ranks, the last of equal slices are padded with zeros.
        sizes: The size of each rank's slice along `dim`; they sum to the size of the array. A rank with size
            0 holds one entry of padding, because Keras treats arrays without entries as vectors. None: all
            slices are equal.
    """

    group: Group
    dim: int
    shape: tuple[int, ...]
    sizes: tuple[int, ...] | None = None

    def size_of(self, rank: int) -> int:
        """The size along `dim` of the slice of the rank at a place in the group; 0 for no slice."""
        if self.sizes is not None:
            return self.sizes[rank]
        return math.ceil(self.shape[self.dim] / self.group.size)

    @property
    def size(self) -> int:
        """The size of this rank's slice along `dim`; 0 for no slice."""
        return self.size_of(self.group.rank)

    @property
    def share(self) -> int:
        """The size along `dim` of this rank's array, with padding."""
        return self.size if self.sizes is None else max(self.size, 1)

    @property
    def begin(self) -> int:
        """The offset of this rank's slice along `dim`, which may be beyond the array if there is padding."""
        return sum(self.size_of(rank) for rank in range(self.group.rank))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's array, with padding."""
        return self._with_size(self.share)

    def _with_size(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of this rank's slice, which may be empty."""
        return self._with_size(self.size)

    @property
    def origin(self) -> tuple[int, ...]:
        """The offset of this rank's slice in the global array, by dim."""
        return tuple(self.begin if dim == self.dim else 0 for dim in range(len(self.shape)))

    @property
    def levels(self) -> tuple[Slice, ...]:
        """The successive slices from the global array to this one."""
        return (self,)

    @property
    def padding(self) -> int:
        """The number of entries along `dim` that all slices have beyond the global array."""
        return sum(map(self.size_of, range(self.group.size))) - self.shape[self.dim]

    def slice_of(self, array):
        """This rank's slice of a global array, a NumPy array or a tensor.

        Raises:
            ValueError: The array has another shape.
        """
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"Expected a global array of shape {self.shape}. Received: {tuple(array.shape)}."
            )
        if self.padding:
            ends = [(0, self.padding if dim == self.dim else 0) for dim in range(array.ndim)]
            array = (np.pad if isinstance(array, np.ndarray) else tf.pad)(array, ends)
        return self.read(array)

    def read(self, array):
        """This rank's slice of an array with the padding; only this part of it is read."""
        index = [slice(None)] * len(self.shape)
        index[self.dim] = slice(self.begin, self.begin + self.size)
        part = array[tuple(index)]
        if self.size == self.share:
            return part
        zeros = np.zeros if isinstance(part, np.ndarray) else tf.zeros
        return zeros(self.local_shape, part.dtype)

    def all_gather(self, local, name: str = "shard"):
        """Gathers the global array; all ranks of the group must call this with their slices."""
        start, uneven = [0] * len(self.shape), self.sizes is not None
        if uneven:
            local = tf.slice(local, start, self.extent)
        array = all_gather(local, self.group, self.dim, uneven=uneven, name=name)
        if uneven:
            return tf.ensure_shape(array, self.shape)
        return tf.slice(array, start, self.shape) if self.padding else array


@dataclasses.dataclass(frozen=True)
class NestedSlice:
    """A slice along one dim of a slice along another.

    For the weights of experts whose hidden units are split, too: each rank of one axis holds some experts,
    and each rank of the other axis holds some of their units.

    Attributes:
        outer: The slice of the global array.
        inner: The slice of that slice.
        group: The ranks of both axes.
    """

    outer: Slice
    inner: Slice
    group: Group

    @property
    def dim(self) -> int:
        """The dim of the inner slice."""
        return self.inner.dim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.outer.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.inner.local_shape

    #: The same shape: these parts are never empty.
    extent = local_shape

    @property
    def origin(self) -> tuple[int, ...]:
        """The offset of this rank's part in the global array, by dim."""
        return tuple(map(sum, zip(self.outer.origin, self.inner.origin, strict=True)))

    @property
    def levels(self) -> tuple[Slice, ...]:
        """The successive slices from the global array to this part."""
        return self.outer, self.inner

    @property
    def padding(self) -> int:
        """The padding of both slices; more than 0 if parts have entries beyond the global array."""
        return self.outer.padding + self.inner.padding

    def slice_of(self, array):
        """This rank's part of a global array, a NumPy array or a tensor.

        Raises:
            ValueError: The array has another shape.
        """
        return self.inner.slice_of(self.outer.slice_of(array))

    def read(self, array):
        """This rank's part of an array with the padding; only this part of it is read."""
        edges = zip(self.origin, self.extent, strict=True)
        return array[tuple(slice(begin, begin + size) for begin, size in edges)]

    def all_gather(self, local, name: str = "shard"):
        """Gathers the global array; all ranks of the group must call this with their parts."""
        return self.outer.all_gather(self.inner.all_gather(local, name), name)


@dataclasses.dataclass(frozen=True)
class FlatShard:
    """An equal part of a flattened array, which may itself be a slice of a global one.

    Attributes:
        group: The ranks that hold the shards, in order.
        array_shape: The shape of the array.
    """

    group: Group
    array_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return math.prod(self.array_shape)

    @property
    def share(self) -> int:
        """The number of elements of a shard; the last shards are padded with zeros."""
        return math.ceil(self.size / self.group.size)

    @property
    def padding(self) -> int:
        """The number of elements that all shards have beyond the array."""
        return self.share * self.group.size - self.size

    @property
    def span(self) -> tuple[int, int]:
        """This rank's elements [begin, end) of the flattened array, without padding."""
        begin = min(self.group.rank * self.share, self.size)
        return begin, min(begin + self.share, self.size)

    def local_shard(self, array):
        """This rank's shard of the array, a NumPy array or a tensor, as a vector."""
        kernels = np if isinstance(array, np.ndarray) else tf
        begin, end = self.span
        part = kernels.reshape(array, [-1])[begin:end]
        padding = self.share - (end - begin)
        return kernels.pad(part, [(0, padding)]) if padding else part

    def read(self, array) -> np.ndarray:
        """This rank's shard of an array in a file, of which only the rows with the shard are read."""
        begin, end = self.span
        if begin == end or not self.array_shape:
            return self.local_shard(np.asarray(array))
        width = self.size // self.array_shape[0]
        first = begin // width
        rows = np.asarray(array[first : math.ceil(end / width)]).reshape(-1)
        part = rows[begin - first * width : end - first * width]
        return np.pad(part, [(0, self.share - part.size)])

    def all_shards(self, array: tf.Tensor) -> tf.Tensor:
        """The shards of an array on all ranks: shape [ranks, share]."""
        flat = tf.reshape(array, [-1])
        if self.padding:
            flat = tf.pad(flat, [(0, self.padding)])
        return tf.reshape(flat, [self.group.size, self.share])

    def unflatten(self, shards: tf.Tensor) -> tf.Tensor:
        """The array, from the shards of all ranks."""
        flat = tf.reshape(shards, [-1])
        return tf.reshape(flat[: self.size] if self.padding else flat, self.array_shape)

    def all_gather(self, shard, name: str = "shard"):
        """Gathers the array; all ranks of the group must call this with their shards."""
        return self.unflatten(all_gather(shard, self.group, name=name))


class SlicedInitializer:
    """The initializer of a slice of an array.

    Args:
        whole: The initializer of the array. If it has a method `read_slice(part, dtype)`, only the slice is
            read.
        part: The slice.
    """

    def __init__(self, whole: Any, part: Slice | NestedSlice):
        self.whole = whole
        self._part = part

    def __call__(self, shape, dtype=None):
        """Returns the slice; `shape` is its shape."""
        read = getattr(self.whole, "read_slice", None)
        if read is not None:
            return read(self._part, dtype)
        return deep_copy(self._part.slice_of(self.whole(self._part.shape, dtype=dtype)))
