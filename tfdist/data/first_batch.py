"""A digest of the first batch that is drawn from a data set, by which ranks see whether theirs differ."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.compiling import outside_clusters

#: So many elements of a tensor from its beginning count, and as many spread over the whole.
_ELEMENTS = 4096
_BUCKETS = 1 << 62


class FirstBatch:
    """Takes a digest of the first batch on its way; nothing is drawn for it.

    Attributes:
        is_compared: Whether ranks have compared theirs.
    """

    def __init__(self) -> None:
        self.is_compared = False
        with tf.init_scope(), tf.device("/CPU:0"):
            self._digest = tf.Variable(-1, trainable=False, dtype=tf.int64, name="first_batch")

    def noted(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same batches, the first of which is noted."""
        is_tuple = type(dataset.element_spec) is tuple

        @outside_clusters
        def note(*batch):
            tf.cond(
                self._digest < 0,
                outside_clusters(lambda: self._digest.assign(_digest(batch))),
                self._digest.read_value,
            )
            return batch if is_tuple else batch[0]

        return dataset.map(note)

    def value(self) -> int:
        """The digest; -1 where no batch was drawn."""
        return int(self._digest.numpy())


def _digest(batch) -> tf.Tensor:
    """The same for equal batches of any structure and dtype, NaN too, at a bounded cost."""
    found = []
    for part in tf.nest.flatten(batch, expand_composites=True):
        if not isinstance(part, tf.Tensor) or part.dtype in (tf.variant, tf.resource):
            continue
        flat = tf.reshape(part, [-1])
        stride = tf.size(flat) // _ELEMENTS + 1
        for some in (tf.shape(part), flat[:_ELEMENTS], flat[::stride]):
            found.append(tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(some), _BUCKETS))
    return tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(tf.stack(found)), _BUCKETS)
