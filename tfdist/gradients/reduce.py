"""Gradients of ranks that hold different samples: weights, buckets and one reduction each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Group, all_reduce
from tfdist.collectives.low_precision import is_narrower, narrow_all_reduce
from tfdist.collectives.run import Call, run
from tfdist.gradients.buckets import buckets
from tfdist.gradients.items import GradientItem
from tfdist.gradients.origins import Origin
from tfdist.gradients.sparse import reduce_rows, shard_of_gradient, shard_of_rows, times
from tfdist.gradients.throttle import InFlightLimit, max_in_flight
from tfdist.sharding.collectives import reduce_scatter_arrays
from tfdist.sharding.layout import layout_of
from tfdist.sharding.parts import FlatShard, flattened, unflattened
from tfdist.step.context import ReplicaContext
from tfdist.step.gradient_options import GradientOptions
from tfdist.step.keras_step import KerasStep
from tfdist.utils.places import places_by, replace_at, replaced_by_key


def own_parts(
    gradients: Sequence, variables: Sequence, origins: Sequence[Origin], replica: ReplicaContext
) -> list:
    """The parts of gradients for this rank; whole gradients of flat shards become gradients of the shards.

    Args:
        gradients: Tensors, IndexedSlices or None.
        variables: Their variables.
        origins: Where they come from.
        replica: The replica context.
    """
    strategy, step = replica.strategy, replica.step
    found = list(gradients)
    for place, (variable, origin) in enumerate(zip(variables, origins, strict=True)):
        layout = layout_of(variable)
        if origin is Origin.LOCAL:
            found[place] = _with_variables_shape(found[place], variable, replica)
        gradient, shard = found[place], layout.flat
        if gradient is None or shard is None or origin is Origin.PART:
            continue
        if origin is not Origin.LOCAL:
            found[place] = shard_of_gradient(gradient, shard)
        elif replica.gradient_reads is not None and tuple(gradient.shape) == shard.array_shape:
            # A gradient that the step passes on as the tape returned it has the shape of the shard.
            (found[place],) = reduce_scatter_gradients(
                weigh_gradients([gradient], step),
                [shard],
                layout.reduction(strategy.mesh, step),
                strategy.gradient_options,
            )
    return found


def _with_variables_shape(gradient, variable, replica: ReplicaContext):
    """A dense gradient that a step has computed itself, which may have any shape if there are no rows.

    For example, TensorFlow's `jacobian` of no rows has none of the dims of the variable.
    """
    step, reads = replica.step, replica.gradient_reads
    if step is None or step.is_even or reads is None or reads.is_as_taken(gradient):
        return gradient
    shard = layout_of(variable).flat
    shapes = [tuple(variable.shape), () if shard is None else (shard.share,)]
    shape = next((each for each in shapes if gradient.shape.is_compatible_with(each)), None)
    if shape is None:
        return gradient
    zeros = tf.zeros(shape, gradient.dtype)
    found = tf.cond(tf.equal(step.rows, 0), lambda: zeros, lambda: gradient)
    return tf.ensure_shape(found, shape)


def weigh_items(items: Sequence[GradientItem], replica: ReplicaContext) -> list:
    """The gradients of items, weighted by this rank's share of the samples, unless they are global.

    Gradients of flat shards were weighted when they were reduced. New values in place of gradients become the
    largest ones of the ranks: those of float8 layers are the largest entries of tensors.

    Raises:
        ValueError: ZeRO-3 shards a variable that gets such a value.
    """
    found, mesh = [item.gradient for item in items], replica.strategy.mesh
    places = [
        place
        for place, item in enumerate(items)
        if not (item.is_reduced or item.overwrites or item.layout.has_global_gradient(mesh))
    ]
    replace_at(found, places, weigh_gradients([found[place] for place in places], replica.step))
    places = [p for p, item in enumerate(items) if item.overwrites and found[p] is not None]
    if places and replica.gradient_group.size > 1:
        if items[places[0]].layout.flat is not None:
            raise ValueError(
                "ZeRO-3 requires variables with gradients, unlike the scales of float8 layers. Received: "
                f"`{items[places[0]].variable.path}`. Use `zero_stage=2`."
            )
        own = [found[place] for place in places]
        largest = all_reduce(flattened(own), replica.gradient_group, "max", name="new-values")
        replace_at(found, places, unflattened(largest, own))
    return found


def weigh_gradients(gradients: Sequence, step: KerasStep | None) -> list:
    """Multiplies gradients by this rank's share of the samples, where shares may differ.

    A rank without samples contributes exact zeros, even if its own gradient is NaN.
    """
    if step is None or step.is_even or step.gradient_group.size == 1:
        return list(gradients)

    def weigh(gradient):
        share = step.gradient_share * step.gradient_group.size
        return times(gradient, share, tf.math.multiply_no_nan)

    return [None if gradient is None else weigh(gradient) for gradient in gradients]


def sum_partial_gradients(items: Sequence[GradientItem], options: GradientOptions) -> list:
    """Sums gradients of replicated variables to which each rank of a group contributes a part.

    Args:
        items: The gradients of a step.
        options: How gradients are sent.

    Returns:
        The gradients of all items.
    """

    def summed(group: Group, places: list[int]) -> list:
        parts = [items[place].gradient for place in places]
        parts = [None if part is None else tf.convert_to_tensor(part) for part in parts]
        return reduce_gradients(parts, group, "sum", options, name="partial-gradients")

    groups = [None if item.is_global else item.layout.partial_over for item in items]
    return replaced_by_key([item.gradient for item in items], groups, summed)


def reduce_items(
    items: Sequence[GradientItem],
    options: GradientOptions,
    *,
    whole: bool = False,
    name: str = "gradients",
) -> list:
    """Reduces each gradient over its group; if its state is sharded, to this rank's shard.

    Args:
        items: The gradients of a step that are not reduced yet.
        options: How gradients are sent.
        whole: Whether all ranks of the groups receive whole gradients.
        name: The name of the collectives, for messages.

    Returns:
        The reduced gradients, in the order of the items.
    """
    found: list = [item.gradient for item in items]
    keys = [(i.group, i.reduction, not whole and i.layout.state is not None) for i in items]
    for (group, reduction, is_sharded), places in places_by(keys).items():
        some = [found[place] for place in places]
        rows = any(items[place].keeps_rows for place in places)
        if is_sharded:
            shards = [items[place].layout.state for place in places]
            some = reduce_scatter_gradients(some, shards, reduction, options, keep_rows=rows)
        else:
            some = reduce_gradients(some, group, reduction, options, keep_rows=rows, name=name)
        replace_at(found, places, some)
    return found


def reduce_scatter_gradients(
    gradients: Sequence,
    shards: Sequence[FlatShard | Any],
    reduction: str,
    options: GradientOptions,
    *,
    keep_rows: bool = False,
) -> list:
    """Reduces gradients to this rank's flat shards of them.

    Args:
        gradients: Tensors, IndexedSlices or None, in the order of the variables.
        shards: The flat shard of each; None for gradients that are not changed.
        reduction: "sum" or "mean".
        options: How gradients are sent.
        keep_rows: Whether sparse gradients stay sparse, with the rows of all ranks.
    """
    found = list(gradients)
    groups: list = [None] * len(found)
    for place, (gradient, shard) in enumerate(zip(gradients, shards, strict=True)):
        if gradient is None or shard is None:
            continue
        if keep_rows and isinstance(gradient, tf.IndexedSlices):
            rows = reduce_rows(gradient, shard.group, reduction, f"gradients/{place}")
            found[place] = shard_of_rows(rows, shard)
        else:
            found[place], groups[place] = tf.convert_to_tensor(gradient), shard.group
    for places in places_by(groups).values():
        # The backward pass yields the gradients of the last layers first.
        ready = [(place, found[place]) for place in reversed(places)]
        limit = InFlightLimit(max_in_flight(sharded=True))
        for number, bucket in enumerate(buckets(ready, options.bucket_bytes)):
            tensors, cuts = [found[p] for p in bucket], [shards[p] for p in bucket]
            limit.begin(tensors)
            name = f"gradients/bucket{number}"
            reduced = reduce_scatter_arrays(tensors, cuts, reduction, options, name)
            limit.end(reduced)
            replace_at(found, bucket, reduced)
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

    Gradients of one dtype that together fill a bucket are sent as one flat tensor. The gradients that
    the backward pass yields first (those of the last layers) are in the first bucket. Sparse gradients of
    embeddings are sent as rows if the optimizer needs them, or if they have fewer bytes than the table.

    Args:
        gradients: Tensors, IndexedSlices or None, in the order of the variables.
        group: The ranks.
        reduction: "sum" or "mean".
        options: How gradients are sent.
        keep_rows: Whether sparse gradients stay sparse, with the rows of all ranks.
        name: The name of the collectives, for messages.

    Returns:
        The reduced gradients, in the given order.
    """
    reduced: list = list(gradients)
    if group.size == 1:
        return reduced
    dense: list[tuple[int, tf.Tensor]] = []
    for place, gradient in enumerate(gradients):
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if is_sparse and (keep_rows or rows_are_fewer(gradient, group)):
            reduced[place] = reduce_rows(gradient, group, reduction, f"{name}/{place}")
        elif gradient is not None:
            reduced[place] = tf.convert_to_tensor(gradient)
            dense.append((place, reduced[place]))
    limit, dtype = InFlightLimit(max_in_flight()), options.communication_dtype
    for number, bucket in enumerate(buckets(reversed(dense), options.bucket_bytes)):
        tensors = [reduced[place] for place in bucket]
        limit.begin(tensors)
        bucket_name = f"{name}/bucket{number}"
        call = Call("all_reduce", group, bucket_name, reduction)
        if is_narrower(dtype, tensors[0].dtype):
            flat = flattened(tensors)
            flat = narrow_all_reduce(flat, group, reduction, dtype, name=bucket_name)
            results = unflattened(flat, tensors)
        elif len(tensors) == 1:
            results = [run(call, tensors[0])]
        else:
            results = unflattened(run(call, flattened(tensors)), tensors)
        limit.end(results)
        replace_at(reduced, bucket, results)
    return reduced


def rows_are_fewer(gradient: tf.IndexedSlices, group: Group) -> bool:
    """Whether gathering the rows of all ranks sends fewer bytes than reducing the dense gradient."""
    rows = gradient.indices.shape[0]
    table = None if gradient.dense_shape is None else tf.get_static_value(gradient.dense_shape)
    if rows is None or table is None:
        return False
    # Each rank receives (n - 1) * rows by a gather, and about 2 * (n - 1) / n * table by a ring.
    return rows * group.size < 2 * int(table[0])
