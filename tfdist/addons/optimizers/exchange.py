"""Matrices of which each rank has a part, gathered on one rank each, and sent back in parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives import Group, all_to_all
from tfdist.sharding.layout import VariableLayout
from tfdist.sharding.parts import FlatShard, Slice
from tfdist.utils.places import places_by

Part = FlatShard | Slice


def parts_of(layout: VariableLayout) -> tuple[Part, ...]:
    """The successive parts of a parameter that a rank updates, from its own to the whole array."""
    shard = layout.gradient_shard
    slices = () if layout.slice is None else layout.slice.levels
    found = (*((shard,) if shard is not None else ()), *reversed(slices))
    return tuple(part for part in found if part.group.size > 1)


@dataclasses.dataclass(frozen=True)
class Owned:
    """A matrix and the rank that computes its update.

    Attributes:
        parts: Of `parts_of`.
        owners: The place of the owner in the group of each part.
    """

    parts: tuple[Part, ...]
    owners: tuple[int, ...]

    def is_here(self, level: int) -> bool:
        """Whether this rank takes part once the first parts have been gathered."""
        pairs = zip(self.parts[:level], self.owners, strict=False)
        return all(part.group.rank == owner for part, owner in pairs)


def assigned_owners(parts: Sequence[tuple[Part, ...]], costs: Sequence[float]) -> list[Owned]:
    """Distributes matrices over the ranks with parts of them: the costliest first, to the least loaded rank.

    Args:
        parts: The parts of each matrix.
        costs: The cost of each update.
    """
    found: list[Owned | None] = [None] * len(parts)
    for groups, places in places_by(tuple(part.group for part in each) for each in parts).items():
        sizes = [group.size for group in groups]
        loads = [0.0] * math.prod(sizes)
        for place in sorted(places, key=lambda place: -costs[place]):
            owner = loads.index(min(loads))
            loads[owner] += costs[place]
            coordinates = []
            for size in sizes:
                owner, coordinate = divmod(owner, size)
                coordinates.append(coordinate)
            found[place] = Owned(parts[place], tuple(coordinates))
    return [each for each in found if each is not None]


def on_owners(
    function: Callable[[int, tf.Tensor], tf.Tensor],
    values: Sequence[tf.Tensor],
    matrices: Sequence[Owned],
    name: str,
) -> list[tf.Tensor]:
    """Calls a function with each whole matrix on its owner, and returns this rank's parts of the results.

    Args:
        function: Called with the place and the matrix; returns a tensor of its shape.
        values: This rank's part of each matrix, of one dtype.
        matrices: The matrices.
        name: The name of the collectives, for messages.
    """
    found: list[tf.Tensor | None] = list(values)
    dtype, levels = values[0].dtype, range(max(len(each.parts) for each in matrices))
    for level in levels:
        for group, places in _places(matrices, level).items():
            _gather(found, matrices, level, group, places, f"{name}/gather")
    for place, each in enumerate(matrices):
        if each.is_here(len(each.parts)):
            value = found[place]
            found[place] = None if value is None else function(place, value)
    for level in reversed(levels):
        for group, places in _places(matrices, level).items():
            _scatter(found, matrices, level, group, places, dtype, f"{name}/scatter")
    return [value for value in found if value is not None]


def _places(matrices: Sequence[Owned], level: int) -> dict[Group, list[int]]:
    """The places of the matrices in which this rank takes part, by the group of a level."""
    return places_by(
        each.parts[level].group if level < len(each.parts) and each.is_here(level) else None
        for each in matrices
    )


def _gather(found: list, matrices, level: int, group: Group, places: list[int], name: str) -> None:
    """Replaces parts by the arrays, on their owners."""
    parts = {place: matrices[place].parts[level] for place in places}
    by_owner = _by_owner(matrices, level, group, places)
    sent = [[_flat(parts[p], found[p]) for p in some] for some in by_owner]
    own = by_owner[group.rank]
    sizes = [[_sizes(parts[p])[rank] for p in own] for rank in range(group.size)]
    received = _exchange(sent, sizes, found[places[0]].dtype, group, name)
    for place in places:
        found[place] = None
    for number, place in enumerate(own):
        found[place] = _joined(parts[place], [each[number] for each in received])


def _scatter(
    found: list,
    matrices,
    level: int,
    group: Group,
    places: list[int],
    dtype: tf.DType,
    name: str,
) -> None:
    """Replaces arrays by the parts, on all ranks of their groups."""
    parts = {place: matrices[place].parts[level] for place in places}
    by_owner = _by_owner(matrices, level, group, places)
    cut = [_cut(parts[p], found[p]) for p in by_owner[group.rank]]
    sent = [[pieces[r] for pieces in cut] for r in range(group.size)]
    sizes = [[_sizes(parts[p])[group.rank] for p in some] for some in by_owner]
    for some, pieces in zip(by_owner, _exchange(sent, sizes, dtype, group, name), strict=True):
        for place, piece in zip(some, pieces, strict=True):
            found[place] = _unflattened(parts[place], piece)


def _by_owner(matrices, level: int, group: Group, places: list[int]) -> list[list[int]]:
    """The places of the matrices of each owner in a group."""
    return [[p for p in places if matrices[p].owners[level] == r] for r in range(group.size)]


def _exchange(
    sent: Sequence[Sequence[tf.Tensor]],
    sizes: Sequence[Sequence[int]],
    dtype: tf.DType,
    group: Group,
    name: str,
) -> list[list[tf.Tensor]]:
    """Sends vectors to each rank, and returns those from each, whose sizes are known."""
    vectors = [vector for some in sent for vector in some]
    splits = [sum(int(vector.shape[0]) for vector in some) for some in sent]
    flat = tf.concat([tf.zeros([0], dtype), *vectors], axis=0)
    received, _ = all_to_all(flat, group, tf.constant(splits, tf.int32), name=name)
    every = [size for some in sizes for size in some]
    pieces = iter(tf.split(received, every) if every else [])
    return [[next(pieces) for _ in some] for some in sizes]


# -- flat shards and slices -------------------------------------------------------------------


def _sizes(part: Part) -> list[int]:
    """The number of elements of each rank's part."""
    if isinstance(part, FlatShard):
        return [part.share] * part.group.size
    rest = math.prod(part.shape) // part.shape[part.dim]
    return [part.size_of(rank) * rest for rank in range(part.group.size)]


def _flat(part: Part, value: tf.Tensor) -> tf.Tensor:
    """This rank's part as a vector, without the entry of an empty slice."""
    if isinstance(part, Slice):
        value = tf.slice(value, [0] * len(part.shape), part.extent)
    return tf.reshape(value, [-1])


def _joined(part: Part, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """The array from the vectors of all ranks."""
    if isinstance(part, FlatShard):
        return part.unflatten(tf.concat(pieces, axis=0))
    head, tail = part.shape[: part.dim], part.shape[part.dim + 1 :]
    arrays = [
        tf.reshape(piece, (*head, part.size_of(rank), *tail)) for rank, piece in enumerate(pieces)
    ]
    return tf.slice(tf.concat(arrays, axis=part.dim), [0] * len(part.shape), part.shape)


def _cut(part: Part, array: tf.Tensor) -> list[tf.Tensor]:
    """The vectors of all ranks from the array."""
    if isinstance(part, FlatShard):
        return tf.unstack(part.all_shards(array))
    if part.padding:
        ends = [(0, part.padding if dim == part.dim else 0) for dim in range(len(part.shape))]
        array = tf.pad(array, ends)
    sizes = [part.size_of(rank) for rank in range(part.group.size)]
    return [tf.reshape(each, [-1]) for each in tf.split(array, sizes, axis=part.dim)]


def _unflattened(part: Part, piece: tf.Tensor) -> tf.Tensor:
    """This rank's part in its shape, from a vector."""
    if isinstance(part, FlatShard):
        return piece
    if part.size != part.share:
        return tf.zeros(part.local_shape, piece.dtype)
    return tf.reshape(piece, part.local_shape)
