"""Several arrays of one dtype, reduced to flat shards or gathered from them in one collective."""

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
    """Reduces arrays over their group, of which each rank gets its shards.

    Args:
        arrays: Tensors of one dtype, of one group.
        shards: How each is cut.
        reduction: "sum" or "mean".
        options: How gradients travel.
        name: What the operation serves, for messages.
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
    # An optimizer may keep a shard's memory as that of its state, and with it that of all.
    return [deep_copy(share) for share in tf.split(own, [shard.share for shard in shards])]


def all_gather_arrays(own: Sequence[tf.Tensor], shards: Sequence[FlatShard], name: str) -> list:
    """The arrays of which each rank gives its shards: undoes `reduce_scatter_arrays`.

    Args:
        own: This rank's shards, of one dtype.
        shards: How each array is cut, over one group.
        name: What the operation serves, for messages.
    """
    packed = own[0] if len(own) == 1 else tf.concat(own, axis=0)
    group = shards[0].group
    parts = tf.reshape(all_gather(packed, group, name=name), [group.size, -1])
    shares = tf.split(parts, [s.share for s in shards], axis=1) if len(own) > 1 else [parts]
    return [shard.unflatten(share) for shard, share in zip(shards, shares, strict=True)]
