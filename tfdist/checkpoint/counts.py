"""What each rank counts for itself: an array with a row for each of them.

Metrics in the middle of an epoch, and what layers keep of the batches that they saw (the moving
averages of a BatchNormalization). On as many ranks as before they go on bit for bit; on others
counts are added up, and averages averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np

from tfdist.backend.keras.attributes import loss_variables
from tfdist.checkpoint.manifest import format1
from tfdist.checkpoint.names import metric_names
from tfdist.checkpoint.shards import ArrayShard, Entry, shards_of
from tfdist.collectives import Group
from tfdist.collectives.local import LocalEngine
from tfdist.sharding.layout import layout_of
from tfdist.sharding.states import layer_states
from tfdist.step.context import DistributedStrategy, role_of, strategy_of

Merge = Callable[[np.ndarray], np.ndarray]


def counts_of(
    model: keras.Model, named: Sequence[tuple[keras.Variable, str]], version: int
) -> list[Entry]:
    """The entries of what this rank counts.

    `named` are the variables that this rank holds, with their names; metrics get names of that
    `version` of the format.
    """
    strategy, role = strategy_of(model), role_of(model)
    counting = LocalEngine().group() if strategy is None else strategy.gradient_group
    writes = True
    if strategy is not None:
        place = strategy.mesh.coordinates()
        writes = not any(place[axis] for axis in strategy.mesh.weight_axes)
    entries = []
    states = {id(variable) for variable in layer_states(model)}
    for variable, name in named:
        if id(variable) in states:
            entries.append(_row(f"local/{name}", variable, counting, writes, _mean))
    loss = loss_variables(model)
    variables = [variable for metric in model.metrics for variable in metric.variables]
    names = format1().model_names(variables) if version == 1 else metric_names(variables)
    for variable, name in zip(variables, names, strict=True):
        if id(variable) in loss:
            # All stages of a pipeline may add to it.
            group = counting
            if strategy is not None:
                group = strategy.group(*strategy.mesh.gradient_axes, *role.axes)
        elif role.sees_outputs:
            group = counting
        else:
            continue
        merge = _merge(variable.aggregation, group)
        entries.append(_row(f"metrics/{name}", variable, group, writes, merge))
    return entries


def own_entry(variable, name: str, writes: bool, strategy: DistributedStrategy | None) -> Entry:
    """The entry of what each rank trains for itself: see `tfdist.addons.slow_links.local_sgd`.

    On another number of ranks all take the mean of moments, and the least of counts.

    Args:
        variable: A parameter, or a variable of the inner optimizer.
        name: Its name.
        writes: Whether this rank writes its part, of those with the same one.
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
    inside = tuple(slice(0, size) for size in shape)
    shard = ArrayShard((group.rank, *inside), None, shape, inside)
    dtype = str(variable.dtype)
    return Entry(name, (group.size, *shape), dtype, variable, (shard,), writes, merge)


def _merge(aggregation: str, group: Group) -> Merge:
    """As `keras_patches/metrics.py` reads what the ranks have counted."""
    if aggregation == "mean":
        return _mean
    if aggregation == "sum":
        return lambda rows: rows.sum(0, dtype=rows.dtype) * (group.rank == 0)
    return lambda rows: rows[0]


def _mean(rows: np.ndarray) -> np.ndarray:
    # What is equal everywhere stays so bit for bit; a mean would round it.
    if (rows == rows[:1]).all():
        return rows[0]
    return rows.mean(0, dtype=np.float32).astype(rows.dtype)
