"""The inputs of an embedding layer as bags of ids, and the combination of vectors of ids in bags."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.addons.recommenders.sharded_embedding.config import FeatureConfig
from tfdist.backend import devices
from tfdist.utils import checks


@dataclasses.dataclass(frozen=True)
class Bags:
    """The ids of a feature in bags, and how their vectors are combined.

    Attributes:
        ids: The ids, of shape [ids].
        weights: The weight of each id, of the same shape, or None.
        bags: The bag of each id, ascending, of the same shape. None if all bags have the same size.
        shape: The shape of the bags, an int32 vector: the output has a vector for each.
        static: The static shape of the bags.
        combiner: "sum", "mean", or None where a bag is an id.
        is_absent: Whether these are the bags of an absent row, and have no ids: a bool
            scalar. None if all rows are present.
    """

    ids: tf.Tensor
    weights: tf.Tensor | None
    bags: tf.Tensor | None
    shape: tf.Tensor
    static: tf.TensorShape
    combiner: str | None
    is_absent: tf.Tensor | None = None

    def combine(self, vectors: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Combines the vectors of the ids [ids, width] to those of the bags [..., width].

        Bags without ids, or whose weights sum to zero, get zeros. Sums are in float32 at least.

        Args:
            vectors: The vectors, in the order of `ids`.
            dtype: The dtype of the result.
        """
        width = vectors.shape[-1]
        if self.weights is not None or self.combiner is not None:
            wide = tf.float64 if dtype == tf.float64 else tf.float32
            vectors = tf.cast(vectors, wide)
        with devices.on_host():
            count = tf.reduce_prod(self.shape)
        # Without ids there are no vectors, but a row of zeros for each bag.
        sums = self._in_segments if self.bags is not None else self._in_equal_bags
        if self.is_absent is None:
            found = sums(vectors, count)
        else:
            nothing = tf.zeros([count, width], vectors.dtype)
            found = tf.cond(self.is_absent, lambda: nothing, lambda: sums(vectors, count))
        found = tf.reshape(found, tf.concat([self.shape, [width]], axis=0))
        found.set_shape(self.static.concatenate([width]))
        return tf.cast(found, dtype)

    def _in_equal_bags(self, vectors: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """The vectors of `count` bags of one size: [bags, width]."""
        if self.combiner is None and self.weights is None:
            return vectors
        bags = tf.concat([count[None], [-1]], axis=0)
        in_bags = tf.reshape(vectors, tf.concat([bags, vectors.shape[-1:]], axis=0))
        if self.weights is None:
            reduce = tf.reduce_sum if self.combiner == "sum" else tf.reduce_mean
            return reduce(in_bags, axis=1)
        weights = tf.reshape(tf.cast(self.weights, vectors.dtype), bags)
        found = tf.reduce_sum(in_bags * weights[..., None], axis=1)
        if self.combiner == "mean":
            found = tf.math.divide_no_nan(found, tf.reduce_sum(weights, axis=1)[:, None])
        return found

    def _in_segments(self, vectors: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """The vectors of `count` bags of any size: [bags, width]."""
        weights = None if self.weights is None else tf.cast(self.weights, vectors.dtype)
        if weights is not None:
            vectors *= weights[:, None]
        found = tf.math.unsorted_segment_sum(vectors, self.bags, count)
        if self.combiner == "mean":
            each = tf.ones_like(self.bags, vectors.dtype) if weights is None else weights
            total = tf.math.unsorted_segment_sum(each, self.bags, count)
            found = tf.math.divide_no_nan(found, total[:, None])
        return found


def bags_of(feature: FeatureConfig, ids: Any, weights: Any, is_absent: tf.Tensor | None) -> Bags:
    """The bags of a feature's input.

    Args:
        feature: The feature.
        ids: Dense, of shape [rows] or [rows, ..., ids]; ragged or sparse, of shape [rows, (ids)].
        weights: The weights of the ids, in the same form; or None.
        is_absent: Whether the only row is absent; None if it is known to be present.

    Raises:
        ValueError: The input, or its weights, have another shape or form, or require a combiner.
        TypeError: The ids are not integers.
    """
    if not isinstance(ids, tf.RaggedTensor | tf.SparseTensor):
        ids = tf.convert_to_tensor(ids)
    if not ids.dtype.is_integer:
        raise TypeError(
            f"The ids of feature `{feature.name}` must be integers. Received: ids of {ids.dtype.name}."
        )
    _check_weights(feature, ids, weights)
    if isinstance(ids, tf.Tensor):
        return _dense(feature, ids, weights, is_absent)
    if feature.table.combiner is None:
        raise ValueError(
            f"Bags of varying size require a combiner. Received: combiner=None and a {type(ids).__name__}. "
            f"Set one for table `{feature.table.name}`, or use dense ids for feature `{feature.name}`."
        )
    is_ragged = isinstance(ids, tf.RaggedTensor)
    if ids.shape.rank != 2 or (is_ragged and ids.ragged_rank != 1):
        raise ValueError(
            f"Ragged and sparse ids must have the shape [rows, (ids)]. Received: feature `{feature.name}` "
            f"of shape {ids.shape}."
        )
    rows = ids.nrows(tf.int32) if is_ragged else tf.cast(ids.dense_shape[0], tf.int32)
    if is_absent is not None:
        rows = tf.where(is_absent, 1, rows)
    return Bags(
        ids.values,
        None if weights is None else weights.values,
        tf.cast(ids.value_rowids() if is_ragged else ids.indices[:, 0], tf.int32),
        rows[None],
        ids.shape[:1],
        feature.table.combiner,
    )


def _dense(feature: FeatureConfig, ids: tf.Tensor, weights: Any, is_absent) -> Bags:
    if ids.shape.rank is None or ids.shape.rank < 1:
        raise ValueError(
            f"Dense ids must have the shape [rows] or [rows, ..., ids]. Received: feature "
            f"`{feature.name}` of shape {ids.shape}."
        )
    combiner, sizes = feature.table.combiner, tf.shape(ids)
    if combiner is None or ids.shape.rank == 1:
        shape, static = sizes, ids.shape
        in_bag = tf.constant(1)
    else:
        shape, static, in_bag = sizes[:-1], ids.shape[:-1], sizes[-1]
    flat = tf.reshape(ids, [-1])
    weights = None if weights is None else tf.reshape(weights, [-1])
    if feature.padding_id is not None:
        keep = tf.not_equal(flat, tf.cast(feature.padding_id, flat.dtype))
        if is_absent is not None:
            keep = tf.logical_and(keep, tf.logical_not(is_absent))
        bags = tf.boolean_mask(tf.range(tf.size(flat)) // tf.maximum(in_bag, 1), keep)
        weights = None if weights is None else tf.boolean_mask(weights, keep)
        return Bags(tf.boolean_mask(flat, keep), weights, bags, shape, static, combiner)
    if is_absent is not None:
        flat = flat[: tf.where(is_absent, 0, tf.size(flat))]
    return Bags(flat, weights, None, shape, static, combiner, is_absent)


def _check_weights(feature: FeatureConfig, ids, weights) -> None:
    if weights is None:
        return
    is_alike = type(weights) is type(ids) or (
        isinstance(ids, tf.Tensor) and not isinstance(weights, tf.RaggedTensor | tf.SparseTensor)
    )
    shape = getattr(weights, "shape", None)
    if not is_alike or shape is None or not ids.shape.is_compatible_with(shape):
        raise checks.refuse(
            "weights",
            weights,
            f"for feature `{feature.name}` in the form of its ids, a {type(ids).__name__} of shape "
            f"{ids.shape}",
        )
