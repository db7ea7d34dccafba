"""Gradients of flat shards (ZeRO-3), and those that a training step has made itself."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.origins import Origin
from tfdist.gradients.reduce import weigh_gradients
from tfdist.gradients.reduce_scatter import reduce_scatter_gradients
from tfdist.gradients.sparse import shard_of_gradient
from tfdist.sharding.layout import layout_of
from tfdist.step.context import ReplicaContext


def own_parts(
    gradients: Sequence, variables: Sequence, origins: Sequence[Origin], replica: ReplicaContext
) -> list:
    """Gradients of what this rank holds: whole ones of flat shards, which the step has made, as their shards.

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
            found[place] = _of_its_shape(found[place], variable, replica)
        gradient, shard = found[place], layout.flat
        if gradient is None or shard is None or origin is Origin.PART:
            continue
        if origin is not Origin.LOCAL:
            found[place] = shard_of_gradient(gradient, shard)
            continue
        # Of a step that hands on what tapes return it has the shape of the shard.
        is_whole = tuple(gradient.shape) == shard.array_shape
        if replica.gradient_reads is not None and is_whole:
            weighed = weigh_gradients([gradient], step)
            reduction = layout.reduction(strategy.mesh, step)
            (found[place],) = reduce_scatter_gradients(
                weighed, [shard], reduction, strategy.gradient_options
            )
    return found


def _of_its_shape(gradient, variable, replica: ReplicaContext):
    """A dense gradient that a step has made itself, which may be of any shape where there are no rows.

    TensorFlow's `jacobian` of no rows, for one, has none of the dims of the variable.
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
