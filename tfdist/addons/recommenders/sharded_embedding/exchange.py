"""Lookups in sharded tables: one exchange of ids and one of vectors.

The message from a rank to another is one vector of integers: the number of ids of each table, an error
if it has one, and the ids, as places in the receiver's part of the table. The reply is one vector: the
rows, one table after the other. The gradients of the rows are sent like the ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.addons.recommenders.sharded_embedding.placement import Placement
from tfdist.backend import devices
from tfdist.backend.graph.reorder import reorder
from tfdist.collectives import Group, all_to_all
from tfdist.sharding.parts import Slice


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The ids that are looked up in a table.

    Attributes:
        table: The variable: this rank's part of the table.
        placement: The placement of the table on the ranks.
        ids: Ids in the vocabulary, of shape [ids], int32 or int64.
        width: The width of the table.
    """

    table: tf.Variable
    placement: Placement
    ids: tf.Tensor
    width: int

    def parts(self) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """The ids for each rank, and the places of this lookup's ids among all of these.

        The places are None if they are those of the ids.
        """
        size = self._part.group.size
        if self.placement.kind == "columns":
            return [self.ids] * size, None
        if self.placement.kind == "table":
            nothing = self.ids[:0]
            owner = self.placement.owner
            return [self.ids if rank == owner else nothing for rank in range(size)], None
        share = tf.constant(self._part.share, self.ids.dtype)
        owners = tf.cast(self.ids // share, tf.int32)
        places = tf.range(tf.size(self.ids))
        order = tf.concat(tf.dynamic_partition(places, owners, size), axis=0)
        return (
            tf.dynamic_partition(self.ids % share, owners, size),
            tf.math.invert_permutation(order),
        )

    def joined(self, pieces: Sequence[tf.Tensor], places: tf.Tensor | None) -> tf.Tensor:
        """The vectors of the ids, from those received from the ranks: [ids, width]."""
        rows = [tf.reshape(piece, [-1, self.local_width]) for piece in pieces]
        if self.placement.kind == "table":
            return rows[self.placement.owner]
        if self.placement.kind == "columns":
            return tf.concat(rows, axis=1)[:, : self.width]
        return reorder(tf.concat(rows, axis=0), places)

    @property
    def local_width(self) -> int:
        """The number of entries of a row on a rank."""
        return self._part.share if self.placement.kind == "columns" else self.width

    @property
    def _part(self) -> Slice:
        if self.placement.part is None:
            raise ValueError("A table that is not sharded must not be exchanged.")
        return self.placement.part


def look_up(
    lookups: Sequence[Lookup],
    error: tf.Tensor,
    group: Group,
    dtype: tf.DType,
    name: str,
    check: Callable[[tf.Tensor], tf.Operation | None],
) -> list[tf.Tensor]:
    """Looks up ids in all tables; every rank of the group calls this.

    The gradient of a table is a `tf.IndexedSlices` with a row for each id of each rank.

    Args:
        lookups: The tables, and this rank's ids.
        error: The error of this rank's ids: int32 of a fixed shape, zeros for none.
        group: The ranks.
        dtype: The dtype in which vectors are sent.
        name: The name of the lookup, for messages.
        check: Called with the errors of all ranks, of shape [ranks, ...]; raises them, or returns an
            operation that does, so that no rank then waits for the vectors of another.

    Returns:
        The vectors of each lookup, of shape [ids, width].
    """
    with devices.on_host():
        ids_dtype = tf.int64 if any(each.ids.dtype == tf.int64 for each in lookups) else tf.int32
        asked, places = zip(*(each.parts() for each in lookups), strict=True)
        # The number of ids of each table for each rank.
        counts = tf.stack([tf.stack([tf.size(part) for part in parts]) for parts in asked], axis=1)
        error = tf.reshape(error, [-1])
        head = len(lookups) + error.shape[0]
        message = []
        for rank in range(group.size):
            header = tf.concat([counts[rank], error], axis=0)
            message += [tf.cast(part, ids_dtype) for part in (header, *(p[rank] for p in asked))]
        splits = head + tf.reduce_sum(counts, axis=1)
        received, sizes = all_to_all(tf.concat(message, axis=0), group, splits, name=f"{name}/ids")

        starts = tf.cumsum(sizes, exclusive=True)
        headers = tf.cast(tf.gather(received, starts[:, None] + tf.range(head)[None]), tf.int32)
        checked = check(headers[:, len(lookups) :])
        with tf.control_dependencies([] if checked is None else [checked]):
            wanted = tf.identity(headers[:, : len(lookups)])
        pieces = _split(received, tf.concat([tf.fill([group.size, 1], head), wanted], axis=1))
    replies: list[list[tf.Tensor]] = [[] for _ in range(group.size)]
    for number, each in enumerate(lookups):
        with devices.on_host():
            own = tf.concat([some[number + 1] for some in pieces], axis=0)
        rows = tf.gather(each.table, own)
        rows = tf.split(tf.cast(rows, dtype), wanted[:, number], num=group.size)
        for reply, some in zip(replies, rows, strict=True):
            reply.append(tf.reshape(some, [-1]))
    widths = tf.constant([each.local_width for each in lookups], tf.int32)
    vectors, _ = all_to_all(
        tf.concat([part for reply in replies for part in reply], axis=0),
        group,
        tf.reduce_sum(wanted * widths, axis=1),
        name=f"{name}/vectors",
    )
    found = _split(vectors, counts * widths)
    return [
        each.joined([some[number] for some in found], places[number])
        for number, each in enumerate(lookups)
    ]


def _split(vector: tf.Tensor, sizes: tf.Tensor) -> list[list[tf.Tensor]]:
    """Splits a vector into pieces of sizes [rows, columns], row by row."""
    rows, columns = sizes.shape
    pieces = tf.split(vector, tf.reshape(sizes, [-1]), num=rows * columns)
    return [pieces[row * columns : (row + 1) * columns] for row in range(rows)]
