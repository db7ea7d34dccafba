"""Gradients that are reduced to flat shards, as under ZeRO."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.buckets import buckets
from tfdist.gradients.sparse import reduce_rows, shard_of_rows
from tfdist.gradients.throttle import MAX_IN_FLIGHT_SHARDED, InFlightLimit
from tfdist.sharding.collectives import reduce_scatter_arrays
from tfdist.sharding.parts import FlatShard
from tfdist.step.gradient_options import GradientOptions


def reduce_scatter_gradients(
    gradients: Sequence,
    shards: Sequence[FlatShard | None],
    reduction: str,
    options: GradientOptions,
    *,
    keep_rows: bool = False,
) -> list:
    """Reduces gradients, of which each rank gets its flat shards.

    Args:
        gradients: Tensors, IndexedSlices or None, in the order of the variables.
        shards: How each is cut; None for those that are left as they are.
        reduction: "sum" or "mean".
        options: How gradients travel.
        keep_rows: Whether sparse gradients stay sparse, with the rows of all ranks.
    """
    found = list(gradients)
    cuts = {
        place: shard
        for place, (gradient, shard) in enumerate(zip(gradients, shards, strict=True))
        if gradient is not None and shard is not None
    }
    for place, shard in list(cuts.items()):
        if keep_rows and isinstance(found[place], tf.IndexedSlices):
            rows = reduce_rows(found[place], shard.group, reduction, f"gradients/{place}")
            found[place] = shard_of_rows(rows, cuts.pop(place))
        else:
            found[place] = tf.convert_to_tensor(found[place])
    for group in dict.fromkeys(shard.group for shard in cuts.values()):
        # Last layers first: the backward pass yields theirs first.
        ready = [(p, found[p]) for p in reversed(cuts) if cuts[p].group == group]
        _in_buckets(found, cuts, ready, reduction, options)
    return found


def _in_buckets(found: list, cuts: dict[int, FlatShard], ready, reduction: str, options) -> None:
    """Replaces gradients by their shards, a bucket after the other."""
    limit = InFlightLimit(MAX_IN_FLIGHT_SHARDED)
    for number, bucket in enumerate(buckets(ready, options.bucket_bytes)):
        limit.begin([found[place] for place in bucket])
        reduced = reduce_scatter_arrays(
            [found[place] for place in bucket],
            [cuts[place] for place in bucket],
            reduction,
            options,
            f"gradients/bucket{number}",
        )
        limit.end(reduced)
        for place, part in zip(bucket, reduced, strict=True):
            found[place] = part
