"""The range of a vocabulary that is on a rank, if the vocabulary is split over a group."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend import devices
from tfdist.collectives import Group


def own_ids(ids, rows: int, group: Group, vocabulary_size: int) -> tuple:
    """Ids [...] relative to this rank's range of `rows`, and whether they are in it; 0 if not.

    Ids outside of the vocabulary stay as they are: what they index raises an error on CPUs, as in one process.
    """
    ids = tf.cast(ids, devices.index_dtype())
    known = tf.logical_and(ids >= 0, ids < vocabulary_size)
    here = ids - group.rank * rows
    own = known & (here >= 0) & (here < rows)
    return tf.where(own, here, tf.where(known, tf.zeros_like(ids), ids)), own


def counted_from_start(ids, vocabulary_size: int):
    """Ids of the rows of a table, of which Keras counts negative ones from the end."""
    ids = tf.cast(ids, devices.index_dtype())
    return tf.where(ids < 0, ids + vocabulary_size, ids)


def own_rows(table, ids, group: Group, vocabulary_size: int):
    """The rows of ids [...] in this rank's range of a table, and zeros for those of others'."""
    ids = counted_from_start(ids, vocabulary_size)
    ids, own = own_ids(ids, table.shape[0], group, vocabulary_size)
    found = tf.gather(table, ids)
    return found * tf.cast(own[..., None], found.dtype)


def mask_padding(logits, group: Group, vocabulary_size: int):
    """Logits [..., range of this rank], with the lowest number in the padding of the vocabulary."""
    share = logits.shape[-1]
    real = min(max(vocabulary_size - group.rank * share, 0), share)
    if real == share:
        return logits
    return tf.where(tf.range(share) >= real, logits.dtype.min, logits)
