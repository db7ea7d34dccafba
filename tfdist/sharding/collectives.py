"""Collectives that reduce several arrays of one dtype to flat shards, or gather them from flat shards."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import all_gather, reduce_scatter
from tfdist.collectives.low_precision import is_narrower, narrow_reduce_scatter
from tfdist.sharding.parts import FlatShard, deep_copy
from tfdist.step.gradient_options import GradientOptions


def reduce_scatter_arrays(
    arrays: Sequence[tf.Tensor],
    shards: Sequence[FlatShard],
    reduction: str,
    options: GradientOptions,
    name: str,
) -> list[tf.Tensor]:
    """Reduces arrays over a group to this rank's shards of them.

    Args:
        arrays: Tensors of one dtype.
        shards: The flat shard of each array, over the same group.
        reduction: "sum" or "mean".
        options: How gradients are sent.
        name: The name of the collective, for messages.
    """
    parts = [shard.all_shards(array) for shard, array in zip(shards, arrays, strict=True)]
    packed = parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)
    group, dtype = shards[0].group, options.communication_dtype
    flat = tf.reshape(packed, [-1])
    if is_narrower(dtype, flat.dtype):
        own = narrow_reduce_scatter(flat, group, reduction, dtype, name=name)
    else:
        own = reduce_scatter(flat, group, reduction, name=name)
    if len(parts) == 1:
        return [own]
    # An optimizer may keep the buffer of a shard for its state; a view would keep that of all shards.
    return [deep_copy(share) for share in tf.split(own, [shard.share for shard in shards])]


def all_gather_arrays(own: Sequence[tf.Tensor], shards: Sequence[FlatShard], name: str) -> list:
    """Gathers arrays from the shards of all ranks: the inverse of `reduce_scatter_arrays`.

    Args:
        own: This rank's shards, of one dtype.
        shards: The flat shard of each array, over the same group.
        name: The name of the collective, for messages.
    """
    packed = own[0] if len(own) == 1 else tf.concat(own, axis=0)
    group = shards[0].group
    parts = tf.reshape(all_gather(packed, group, name=name), [group.size, -1])
    shares = tf.split(parts, [s.share for s in shards], axis=1) if len(own) > 1 else [parts]
    return [shard.unflatten(share) for shard, share in zip(shards, shares, strict=True)]
