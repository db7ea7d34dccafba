"""Gradients as one process has them: reduced over the ranks, and whole on each."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.clipping import squared_norms, sum_over_stages, times
from tfdist.gradients.items import items_of
from tfdist.gradients.origins import Marks, Origin, origins_of
from tfdist.gradients.reduce import reduce_items, sum_partial_gradients, weigh_gradients
from tfdist.sharding.layout import layout_of
from tfdist.step.context import ReplicaContext
from tfdist.zero.sharded_gradients import gather_gradients


def is_part(variable) -> bool:
    """Whether a rank has no more of a variable's gradient than a slice, a stage's or a part's."""
    layout = layout_of(variable)
    return any(part is not None for part in (layout.slice, layout.stage, layout.partial_over))


def whole_gradients(
    gradients: Sequence, variables: Sequence, replica: ReplicaContext, rows
) -> list:
    """Reduces this rank's gradients; those of shards are gathered too.

    Args:
        gradients: Tensors or IndexedSlices, as a tape returns them.
        variables: Their variables, none of which is a part.
        replica: The replica context.
        rows: What `rows_of_gradients` has found while they were computed.
    """
    return gather_flat_gradients(_global_parts(gradients, variables, replica), variables, rows)


def gather_flat_gradients(gradients: Sequence, variables: Sequence, rows) -> list:
    """Gradients of which those of shards are made whole.

    Args:
        gradients: Tensors or IndexedSlices, as a tape returns them.
        variables: Their variables.
        rows: What `rows_of_gradients` has found while they were computed.
    """
    found = list(gradients)
    places = [place for place, each in enumerate(variables) if layout_of(each).flat is not None]
    whole = gather_gradients([found[p] for p in places], [variables[p] for p in places], rows)
    for place, gradient in zip(places, whole, strict=True):
        found[place] = gradient
    return found


def _global_parts(gradients: Sequence, variables: Sequence, replica: ReplicaContext) -> list:
    """Reduces this rank's gradients; sparse ones stay so, with the rows of all ranks.

    Args:
        gradients: Tensors, IndexedSlices or None, as a tape returns them.
        variables: Their variables.
        replica: The replica context.

    Returns:
        Gradients of what this rank holds: of slices slices, under ZeRO-3 shards, of others the whole.
    """
    strategy, options = replica.strategy, replica.strategy.gradient_options
    origins = [Origin.LOCAL] * len(gradients)
    weighed = weigh_gradients(gradients, replica.step)
    # Those of flat shards were weighted and reduced as they came.
    items = [
        item
        if item.is_reduced or item.layout.has_global_gradient(strategy.mesh)
        else item.with_gradient(new)
        for item, new in zip(
            items_of(gradients, variables, origins, replica, keeps_rows=True), weighed, strict=True
        )
    ]
    found = sum_partial_gradients(items, options)
    left = {p: item.with_gradient(found[p]) for p, item in enumerate(items) if not item.is_reduced}
    reduced = reduce_items(list(left.values()), options, whole=True)
    for place, gradient in zip(left, reduced, strict=True):
        found[place] = gradient
    return found


def clip_by_global_norm(
    gradients: Sequence, variables: Sequence, clip_norm, replica: ReplicaContext
) -> tuple[list, tf.Tensor]:
    """Reduces the gradients of a step, once, and clips them by the norm that one process has.

    Args:
        gradients: Tensors, IndexedSlices or None: as a tape returned them, or global already.
        variables: Their variables.
        clip_norm: The largest norm, a scalar; None for any.
        replica: The replica context.

    Returns:
        Gradients of what this rank holds, which optimizers take for global; and the norm before.
    """
    found, origins = origins_of(gradients, variables, replica)
    local = [place for place, origin in enumerate(origins) if origin is Origin.LOCAL]
    reduced = _global_parts([found[p] for p in local], [variables[p] for p in local], replica)
    for place, gradient in zip(local, reduced, strict=True):
        found[place] = gradient
        lies_flat = layout_of(variables[place]).flat is not None
        origins[place] = Origin.PART if lies_flat else Origin.GLOBAL
    shards = [
        layout_of(variable).flat if origin is Origin.PART else None
        for variable, origin in zip(variables, origins, strict=True)
    ]
    squares = squared_norms(found, variables, shards)
    norm = tf.sqrt(sum_over_stages(squares, variables))
    # Not a number where the norm is none, as in TensorFlow.
    scale = 1.0
    if clip_norm is not None:
        limit = tf.cast(clip_norm, norm.dtype)
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    if replica.gradient_marks is None:
        replica.gradient_marks = Marks()
    clipped = [None if gradient is None else times(gradient, scale) for gradient in found]
    for gradient, origin in zip(clipped, origins, strict=True):
        replica.gradient_marks.put([gradient], origin)
    return clipped, norm
