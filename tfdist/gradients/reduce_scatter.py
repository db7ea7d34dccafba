"""Gradients that are reduced to flat shards, as under ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.gradients.buckets import buckets
from tfdist.gradients.sparse import reduce_rows, shard_of_rows
from tfdist.gradients.throttle import MAX_IN_FLIGHT_SHARDED, InFlightLimit
from tfdist.sharding.collectives import reduce_scatter_arrays
from tfdist.sharding.parts import FlatShard
from tfdist.step.gradient_options import GradientOptions
from tfdist.utils.places import places_by, replace_at


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
        limit = InFlightLimit(MAX_IN_FLIGHT_SHARDED)
        for number, bucket in enumerate(buckets(ready, options.bucket_bytes)):
            tensors, cuts = [found[p] for p in bucket], [shards[p] for p in bucket]
            limit.begin(tensors)
            name = f"gradients/bucket{number}"
            reduced = reduce_scatter_arrays(tensors, cuts, reduction, options, name)
            limit.end(reduced)
            replace_at(found, bucket, reduced)
    return found
