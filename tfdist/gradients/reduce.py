"""Gradients among the ranks that hold other samples: weights, buckets and one reduction each."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.low_precision import is_narrower, narrow_all_reduce
from tfdist.collectives.run import Call, run
from tfdist.gradients.buckets import buckets
from tfdist.gradients.items import GradientItem, by_reduction
from tfdist.gradients.reduce_scatter import reduce_scatter_gradients
from tfdist.gradients.sparse import reduce_rows
from tfdist.gradients.throttle import InFlightLimit
from tfdist.step.gradient_options import GradientOptions
from tfdist.step.keras_step import KerasStep


def weigh_gradients(gradients: Sequence, step: KerasStep | None) -> list:
    """Multiplies by this rank's share of the samples, where shares may differ.

    A rank without samples contributes exact zeros, also where its own gradient is not a number.
    """
    if step is None or step.is_even or step.gradient_group.size == 1:
        return list(gradients)

    def weigh(gradient):
        if gradient is None:
            return None
        factor = tf.cast(step.gradient_share * step.gradient_group.size, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            values = tf.math.multiply_no_nan(gradient.values, factor)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.math.multiply_no_nan(gradient, factor)

    return [weigh(gradient) for gradient in gradients]


def sum_partial_gradients(items: Sequence[GradientItem], options: GradientOptions) -> list:
    """Sums the gradients of whole variables of which each rank of a group saw a part of the work.

    Args:
        items: The gradients of a step.
        options: How gradients are sent.

    Returns:
        The gradients of all items.
    """
    summed = [item.gradient for item in items]
    places: dict[Group, list[int]] = {}
    for place, item in enumerate(items):
        if item.layout.partial_over is not None and not item.is_global:
            places.setdefault(item.layout.partial_over, []).append(place)
    for group, some in places.items():
        parts = [None if summed[p] is None else tf.convert_to_tensor(summed[p]) for p in some]
        parts = reduce_gradients(parts, group, "sum", options, name="partial-gradients")
        for place, part in zip(some, parts, strict=True):
            summed[place] = part
    return summed


def reduce_items(
    items: Sequence[GradientItem],
    options: GradientOptions,
    *,
    whole: bool = False,
    name: str = "gradients",
) -> list:
    """Reduces gradients, each over its group; those whose state is sharded to this rank's shards.

    Args:
        items: What is left to reduce of a step.
        options: How gradients are sent.
        whole: Whether all ranks of the groups get all of them whole.
        name: What is sent, for messages.

    Returns:
        The reduced gradients, in the order of the items.
    """
    found: list = [item.gradient for item in items]
    for (group, reduction), places in by_reduction(items).items():
        some = [found[place] for place in places]
        shards = [None if whole else items[place].layout.state for place in places]
        keep_rows = any(items[place].keeps_rows for place in places)
        if any(shard is not None for shard in shards):
            reduced = reduce_scatter_gradients(
                some, shards, reduction, options, keep_rows=keep_rows
            )
        else:
            reduced = reduce_gradients(
                some, group, reduction, options, keep_rows=keep_rows, name=name
            )
        for place, gradient in zip(places, reduced, strict=True):
            found[place] = gradient
    return found


def reduce_gradients(
    gradients: Sequence,
    group: Group,
    reduction: str,
    options: GradientOptions,
    *,
    keep_rows: bool = False,
    name: str = "gradients",
) -> list:
    """Reduces gradients over a group.

    Gradients of one dtype that together fill a bucket travel as one flat tensor, those that the
    backward pass yields first (the last layers') in the first bucket. Sparse gradients of
    embeddings travel as rows where the optimizer needs them, or where that is less than the table.

    Args:
        gradients: Tensors, IndexedSlices or None, in the order of the variables.
        group: The ranks.
        reduction: "sum" or "mean".
        options: How gradients travel.
        keep_rows: Whether sparse gradients stay sparse, with the rows of all ranks.
        name: What travels, for messages.

    Returns:
        The reduced gradients, in the order given.
    """
    if group.size == 1:
        return list(gradients)
    reduced: list = list(gradients)
    dense: list[int] = []
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            if keep_rows or rows_are_fewer(gradient, group):
                reduced[index] = reduce_rows(gradient, group, reduction, f"{name}/{index}")
            else:
                reduced[index] = tf.convert_to_tensor(gradient)
                dense.append(index)
        elif gradient is not None:
            dense.append(index)
    found = buckets([(index, reduced[index]) for index in reversed(dense)], options.bucket_bytes)
    limit = InFlightLimit()
    for number, bucket in enumerate(found):
        tensors = [reduced[index] for index in bucket]
        limit.begin(tensors)
        bucket_name = f"{name}/bucket{number}"
        call = Call("all_reduce", group, bucket_name, reduction)
        dtype = options.communication_dtype
        if is_narrower(dtype, tensors[0].dtype):
            flat = narrow_all_reduce(_flat(tensors), group, reduction, dtype, name=bucket_name)
            results = _unflattened(flat, tensors)
        elif len(tensors) == 1:
            results = [run(call, tensors[0])]
        else:
            results = _unflattened(run(call, _flat(tensors)), tensors)
        limit.end(results)
        for index, tensor in zip(bucket, results, strict=True):
            reduced[index] = tensor
    return reduced


def _flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _unflattened(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    parts = tf.split(flat, [tf.size(tensor) for tensor in like])
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def rows_are_fewer(gradient: tf.IndexedSlices, group: Group) -> bool:
    """Whether gathering all ranks' rows moves fewer bytes than reducing the dense gradient."""
    rows = gradient.indices.shape[0]
    table = None if gradient.dense_shape is None else tf.get_static_value(gradient.dense_shape)
    if rows is None or table is None:
        return False
    # Each rank receives (n - 1) * rows by a gather, and about 2 * (n - 1) / n * table by a ring.
    return rows * group.size < 2 * int(table[0])
