"""Gradients of flat shards (ZeRO-3), and gradients that a training step has computed itself."""

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
