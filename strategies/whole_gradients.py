"""Gradients as in one process: reduced over the ranks, and whole on each."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.items import items_of
from tfdist.gradients.norms import global_scale, squared_norms, sum_over_stages
from tfdist.gradients.origins import Marks, Origin, origins_of
from tfdist.gradients.reduce import reduce_items, sum_partial_gradients, weigh_items
from tfdist.gradients.sparse import times
from tfdist.sharding.layout import layout_of
from tfdist.step.context import ReplicaContext
from tfdist.utils.places import replace_at
from tfdist.zero.sharded_gradients import gather_gradients


def is_part(variable) -> bool:
    """Whether this rank holds only a part of a variable's gradient: a slice, or that of a stage."""
    layout = layout_of(variable)
    return any(part is not None for part in (layout.slice, layout.stage, layout.partial_over))


def whole_gradients(
    gradients: Sequence, variables: Sequence, replica: ReplicaContext, rows
) -> list:
    """Reduces this rank's gradients, and gathers those of flat shards.

    Args:
        gradients: Tensors or IndexedSlices, as a tape returns them.
        variables: Their variables, none of which is a part.
        replica: The replica context.
        rows: The record of `rows_of_gradients` while they were computed.
    """
    return gather_flat_gradients(_global_parts(gradients, variables, replica), variables, rows)


def gather_flat_gradients(gradients: Sequence, variables: Sequence, rows) -> list:
    """Gathers the gradients of flat shards; other gradients do not change.

    Args:
        gradients: Tensors or IndexedSlices, as a tape returns them.
        variables: Their variables.
        rows: The record of `rows_of_gradients` while they were computed.
    """
    found = list(gradients)
    places = [place for place, each in enumerate(variables) if layout_of(each).flat is not None]
    flat, sharded = [found[p] for p in places], [variables[p] for p in places]
    replace_at(found, places, gather_gradients(flat, sharded, rows))
    return found


def _global_parts(gradients: Sequence, variables: Sequence, replica: ReplicaContext) -> list:
    """Reduces this rank's gradients; sparse ones stay sparse, with the rows of all ranks.

    Args:
        gradients: Tensors, IndexedSlices or None, as a tape returns them.
        variables: Their variables.
        replica: The replica context.

    Returns:
        Gradients of this rank's parts: slices, shards under ZeRO-3, and otherwise whole variables.
    """
    options, origins = replica.strategy.gradient_options, [Origin.LOCAL] * len(gradients)
    items = items_of(gradients, variables, origins, replica, keeps_rows=True)
    weighed = weigh_items(items, replica)
    items = [item.with_gradient(new) for item, new in zip(items, weighed, strict=True)]
    found = sum_partial_gradients(items, options)
    left = [place for place, item in enumerate(items) if not item.is_reduced]
    rest = [items[place].with_gradient(found[place]) for place in left]
    replace_at(found, left, reduce_items(rest, options, whole=True))
    return found


def clip_by_global_norm(
    gradients: Sequence, variables: Sequence, clip_norm, replica: ReplicaContext
) -> tuple[list, tf.Tensor]:
    """Reduces the gradients of a step once, and clips them by the norm of one process.

    Args:
        gradients: Tensors, IndexedSlices or None: as a tape returned them, or global already.
        variables: Their variables.
        clip_norm: The largest norm, a scalar; None for no limit.
        replica: The replica context.

    Returns:
        Gradients of this rank's parts, which optimizers treat as global, and the norm before clipping.
    """
    found, origins = origins_of(gradients, variables, replica)
    flat = [layout_of(variable).flat for variable in variables]
    local = [place for place, origin in enumerate(origins) if origin is Origin.LOCAL]
    reduced = _global_parts([found[p] for p in local], [variables[p] for p in local], replica)
    replace_at(found, local, reduced)
    for place in local:
        origins[place] = Origin.GLOBAL if flat[place] is None else Origin.PART
    pairs = zip(flat, origins, strict=True)
    shards = [shard if origin is Origin.PART else None for shard, origin in pairs]
    norm = tf.sqrt(sum_over_stages(squared_norms(found, variables, shards), variables))
    scale = 1.0 if clip_norm is None else global_scale(norm, tf.cast(clip_norm, norm.dtype))
    if replica.gradient_marks is None:
        replica.gradient_marks = Marks()
    clipped = [times(gradient, scale) for gradient in found]
    for gradient, origin in zip(clipped, origins, strict=True):
        replica.gradient_marks.put([gradient], origin)
    return clipped, norm
