"""The range of a vocabulary that is on a rank, if the vocabulary is split over a group."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend import devices
from tfdist.collectives import Group


def own_ids(ids, rows: int, group: Group) -> tuple:
    """Ids [...] relative to this rank's range of `rows`, and whether they are in it; 0 if not."""
    ids = tf.cast(ids, devices.index_dtype()) - group.rank * rows
    own = tf.logical_and(ids >= 0, ids < rows)
    return tf.where(own, ids, tf.zeros([], ids.dtype)), own


def own_rows(table, ids, group: Group):
    """The rows of ids [...] in this rank's range of a table, and zeros for those of others'."""
    ids, own = own_ids(ids, table.shape[0], group)
    found = tf.gather(table, ids)
    return found * tf.cast(own[..., None], found.dtype)


def mask_padding(logits, group: Group, vocabulary_size: int):
    """Logits [..., range of this rank], with the lowest number in the padding of the vocabulary."""
    share = logits.shape[-1]
    real = min(max(vocabulary_size - group.rank * share, 0), share)
    if real == share:
        return logits
    return tf.where(tf.range(share) >= real, logits.dtype.min, logits)
