"""A digest of the first batch of a dataset, which ranks compare with each other."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.compiling import outside_clusters
from tfdist.data.sharding import map_elements

#: The digest covers this number of elements at the beginning of a tensor, and as many spread over all of it.
_ELEMENTS = 4096
_BUCKETS = 1 << 62


class FirstBatch:
    """The digest of the first batch, computed when it is drawn; nothing is drawn only for it.

    Attributes:
        is_compared: Whether ranks have compared their digests.
    """

    def __init__(self) -> None:
        self.is_compared = False
        with tf.init_scope(), tf.device("/CPU:0"):
            self._digest = tf.Variable(-1, trainable=False, dtype=tf.int64, name="first_batch")

    def recorded(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset with the same batches, the first of which is recorded."""

        def record(batch):
            tf.cond(
                self._digest < 0,
                outside_clusters(lambda: self._digest.assign(_digest(batch))),
                self._digest.read_value,
            )
            return batch

        return map_elements(dataset, record)

    def value(self) -> int:
        """The digest; -1 if no batch was drawn."""
        return int(self._digest.numpy())


def _digest(batch) -> tf.Tensor:
    """A hash that is equal for equal batches of any structure and dtype, including NaN; of bounded cost."""
    found = []
    for part in tf.nest.flatten(batch, expand_composites=True):
        if not isinstance(part, tf.Tensor) or part.dtype in (tf.variant, tf.resource):
            continue
        flat = tf.reshape(part, [-1])
        stride = tf.size(flat) // _ELEMENTS + 1
        for some in (tf.shape(part), flat[:_ELEMENTS], flat[::stride]):
            found.append(tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(some), _BUCKETS))
    return tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(tf.stack(found)), _BUCKETS)
