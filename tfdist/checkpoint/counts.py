"""Values that differ between ranks: a global array with a row for each rank.

These are the metrics in the middle of an epoch, and what layers compute from the batches that they saw
(the moving averages of a BatchNormalization). On the same number of ranks they are restored bitwise. On
a different number, counts are summed and averages are averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np

from tfdist.backend.keras.attributes import loss_variables
from tfdist.checkpoint.manifest import Manifest
from tfdist.checkpoint.shards import ArrayShard, Entry, shards_of, whole_box
from tfdist.collectives import Group
from tfdist.collectives.local import LocalEngine
from tfdist.sharding.layout import layout_of
from tfdist.sharding.states import layer_states
from tfdist.step.context import DistributedStrategy, role_of, strategy_of

Merge = Callable[[np.ndarray], np.ndarray]


def counts_of(
    model: keras.Model, named: Sequence[tuple[keras.Variable, str]], form: type[Manifest]
) -> list[Entry]:
    """The entries of the values that differ between ranks.

    Args:
        model: The model.
        named: The variables that this rank holds, with their names.
        form: The format, which determines the names of metrics.
    """
    strategy, role = strategy_of(model), role_of(model)
    counting, summing, writes = LocalEngine().group(), LocalEngine().group(), True
    if strategy is not None:
        mesh, place = strategy.mesh, strategy.mesh.coordinates()
        counting = strategy.gradient_group
        # All stages of a pipeline may add to the loss.
        summing = strategy.group(*mesh.gradient_axes, *role.axes)
        writes = not any(place[axis] for axis in mesh.weight_axes)
    states = {id(variable) for variable in layer_states(model)}
    entries = [
        _row(f"local/{name}", variable, counting, writes, _mean)
        for variable, name in named
        if id(variable) in states
    ]
    loss = loss_variables(model)
    variables = [variable for metric in model.metrics for variable in metric.variables]
    for variable, name in zip(variables, form.names.metric_names(variables), strict=True):
        if id(variable) in loss or role.sees_outputs:
            group = summing if id(variable) in loss else counting
            merge = _merge(variable.aggregation, group)
            entries.append(_row(f"metrics/{name}", variable, group, writes, merge))
    return entries


def own_entry(variable, name: str, writes: bool, strategy: DistributedStrategy | None) -> Entry:
    """The entry of a value that each rank trains separately; see `tfdist.addons.slow_links.local_sgd`.

    On a different number of ranks, all of them get the mean of moments and the minimum of counts.

    Args:
        variable: A parameter, or a variable of the inner optimizer.
        name: Its name.
        writes: Whether this rank writes its part, of the ranks that have the same part.
        strategy: The strategy.
    """
    layout = layout_of(variable)
    group = LocalEngine().group() if strategy is None else strategy.group(*layout.local_over)

    def merge(rows: np.ndarray) -> np.ndarray:
        is_count = rows.ndim == 1 or not np.issubdtype(rows.dtype, np.floating)
        whole = rows.min(0) if is_count else _mean(rows)
        return np.asarray(layout.shard_of_global(whole))

    shards = tuple(
        dataclasses.replace(shard, box=(group.rank, *shard.box)) for shard in shards_of(variable)
    )
    shape = (group.size, *layout.global_shape(variable.shape))
    return Entry(f"local/{name}", shape, str(variable.dtype), variable, shards, writes, merge)


def _row(name: str, variable, group: Group, writes: bool, merge: Merge) -> Entry:
    shape = tuple(variable.shape)
    inside = whole_box(shape)
    shard = ArrayShard((group.rank, *inside), None, shape, inside)
    dtype = str(variable.dtype)
    return Entry(name, (group.size, *shape), dtype, variable, (shard,), writes, merge, group)


def _merge(aggregation: str, group: Group) -> Merge:
    """The inverse of how `keras_patches/metrics.py` aggregates the values of ranks."""
    if aggregation == "mean":
        return _mean
    if aggregation == "sum":
        return lambda rows: rows.sum(0, dtype=rows.dtype) * (group.rank == 0)
    return lambda rows: rows[0]


def _mean(rows: np.ndarray) -> np.ndarray:
    # Equal values are kept bitwise; a mean would round them.
    if (rows == rows[:1]).all():
        return rows[0]
    return rows.mean(0, dtype=np.float32).astype(rows.dtype)
