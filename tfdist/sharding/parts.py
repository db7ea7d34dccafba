"""Parts of a global array: a slice along a dim, and a flat shard."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from tfdist.collectives import Group, all_gather


def deep_copy(part):
    """A copy of a part of an array, NumPy's or a tensor, for what is kept.

    A slice of rows is a view: for as long as it lives the whole array takes memory. The same holds
    for the value of a variable that it is assigned to.
    """
    return np.array(part) if isinstance(part, np.ndarray) else tf.raw_ops.DeepCopy(x=part)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a global array along one dim.

    Attributes:
        group: The ranks that hold the slices, in order.
        dim: The dim that is split.
        shape: The shape of the global array. Where its size along `dim` does not divide, the last
            of equal slices are padded with zeros.
        sizes: The size of each rank's slice along `dim`; they sum to the array's. Where it is 0, the
            rank holds one entry of padding: Keras takes arrays without entries for vectors. None:
            all slices are equal.
    """

    group: Group
    dim: int
    shape: tuple[int, ...]
    sizes: tuple[int, ...] | None = None

    def size_of(self, rank: int) -> int:
        """The size along `dim` of the slice of the rank at a place of the group, 0 for none."""
        if self.sizes is not None:
            return self.sizes[rank]
        return math.ceil(self.shape[self.dim] / self.group.size)

    @property
    def size(self) -> int:
        """The size of this rank's slice along `dim`, 0 for none."""
        return self.size_of(self.group.rank)

    @property
    def share(self) -> int:
        """The size along `dim` of what this rank holds."""
        return self.size if self.sizes is None else max(self.size, 1)

    @property
    def begin(self) -> int:
        """Where this rank's slice begins along `dim`; with padding that may be beyond the array."""
        return sum(self.size_of(rank) for rank in range(self.group.rank))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what this rank holds."""
        return self._with_size(self.share)

    def _with_size(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of this rank's slice, which may have no entries."""
        return self._with_size(self.size)

    @property
    def origin(self) -> tuple[int, ...]:
        """Where this rank's slice begins in the global array, by dim."""
        return tuple(self.begin if dim == self.dim else 0 for dim in range(len(self.shape)))

    @property
    def levels(self) -> tuple[Slice, ...]:
        """The slices that lead from the global array to this one."""
        return (self,)

    @property
    def padding(self) -> int:
        """How many entries along `dim` all slices have beyond the global array."""
        return sum(map(self.size_of, range(self.group.size))) - self.shape[self.dim]

    def slice_of(self, array):
        """This rank's slice of a global array, a NumPy array or a tensor.

        Raises:
            ValueError: The array has another shape.
        """
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"A global array of shape {self.shape} was expected. Received: {tuple(array.shape)}."
            )
        if self.padding:
            ends = [(0, self.padding if dim == self.dim else 0) for dim in range(array.ndim)]
            pad = np.pad if isinstance(array, np.ndarray) else tf.pad
            array = pad(array, ends)
        return self.read(array)

    def read(self, array):
        """This rank's slice of an array that has the padding; only that part of it is read."""
        index = [slice(None)] * len(self.shape)
        index[self.dim] = slice(self.begin, self.begin + self.size)
        part = array[tuple(index)]
        if self.size == self.share:
            return part
        one = np.zeros(self.local_shape, part.dtype if isinstance(part, np.ndarray) else None)
        return one if isinstance(part, np.ndarray) else tf.cast(one, part.dtype)

    def all_gather(self, local, name: str = "shard"):
        """The global array; every member of the group calls this with its own slice."""
        uneven = self.sizes is not None
        if uneven:
            local = tf.slice(local, [0] * len(self.shape), self.extent)
        array = all_gather(local, self.group, self.dim, uneven=uneven, name=name)
        if uneven:
            return tf.ensure_shape(array, self.shape)
        if not self.padding:
            return array
        return tf.slice(array, [0] * len(self.shape), self.shape)


@dataclasses.dataclass(frozen=True)
class NestedSlice:
    """A slice along one dim of a slice along another.

    So lie the weights of experts whose hidden units are split as well: each rank of the one axis has
    some of the experts, and each rank of the other some of the units of these.

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
        """The dim that the inner slice is along."""
        return self.inner.dim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.outer.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return self.inner.local_shape

    @property
    def extent(self) -> tuple[int, ...]:
        """That shape: parts of parts have entries."""
        return self.local_shape

    @property
    def origin(self) -> tuple[int, ...]:
        """Where this rank's part begins in the global array, by dim."""
        return tuple(map(sum, zip(self.outer.origin, self.inner.origin, strict=True)))

    @property
    def levels(self) -> tuple[Slice, ...]:
        """The slices that lead from the global array to this part."""
        return self.outer, self.inner

    @property
    def padding(self) -> int:
        """Whether parts have entries beyond the global array: more than 0 where they do."""
        return self.outer.padding + self.inner.padding

    def slice_of(self, array):
        """This rank's part of a global array, a NumPy array or a tensor.

        Raises:
            ValueError: The array has another shape.
        """
        return self.inner.slice_of(self.outer.slice_of(array))

    def read(self, array):
        """This rank's part of an array that has the padding; only that part of it is read."""
        edges = zip(self.origin, self.extent, strict=True)
        return array[tuple(slice(begin, begin + size) for begin, size in edges)]

    def all_gather(self, local, name: str = "shard"):
        """The global array; every member of the group calls this with its own part."""
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
        """How many elements all shards have beyond the array."""
        return self.share * self.group.size - self.size

    @property
    def span(self) -> tuple[int, int]:
        """The elements [begin, end) of the flattened array that are this rank's, padding left out."""
        begin = min(self.group.rank * self.share, self.size)
        return begin, min(begin + self.share, self.size)

    def local_shard(self, array):
        """This rank's shard of the array, a NumPy array or a tensor, as a vector."""
        is_numpy = isinstance(array, np.ndarray)
        begin, end = self.span
        flat = array.reshape(-1) if is_numpy else tf.reshape(array, [-1])
        part = flat[begin:end]
        if end - begin == self.share:
            return part
        return (np.pad if is_numpy else tf.pad)(part, [(0, self.share - (end - begin))])

    def read(self, array) -> np.ndarray:
        """This rank's shard of an array in a file, of which only the rows that hold it are read."""
        begin, end = self.span
        if begin == end or not self.array_shape:
            return self.local_shard(np.asarray(array))
        width = self.size // self.array_shape[0]
        first = begin // width
        rows = np.asarray(array[first : math.ceil(end / width)]).reshape(-1)
        part = rows[begin - first * width : end - first * width]
        return np.pad(part, [(0, self.share - part.size)])

    def all_shards(self, array: tf.Tensor) -> tf.Tensor:
        """The shards of all ranks, of an array: shape [ranks, share]."""
        flat = tf.reshape(array, [-1])
        if self.padding:
            flat = tf.pad(flat, [(0, self.padding)])
        return tf.reshape(flat, [self.group.size, self.share])

    def unflatten(self, shards: tf.Tensor) -> tf.Tensor:
        """The array, of the shards of all ranks."""
        flat = tf.reshape(shards, [-1])
        return tf.reshape(flat[: self.size] if self.padding else flat, self.array_shape)

    def all_gather(self, shard, name: str = "shard"):
        """The array; every member of the group calls this with its own shard."""
        return self.unflatten(all_gather(shard, self.group, name=name))
