"""ZeRO-3: gradients of arrays, reduced to those of flat shards and gathered again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.tapes import any_records
from tfdist.gradients.reduce import weigh_gradients
from tfdist.gradients.sparse import reduce_rows, shard_of_rows
from tfdist.sharding.collectives import all_gather_arrays, reduce_scatter_arrays
from tfdist.sharding.layout import layout_of
from tfdist.sharding.parts import FlatShard
from tfdist.step.context import current_step, current_strategy
from tfdist.step.gradient_options import GradientOptions


class _Rows:
    """The rows of sparse gradients, of all ranks, as they were before they were cut into shards."""

    def __init__(self):
        self._found: dict[int, list[tf.IndexedSlices]] = {}

    def add(self, variable: keras.Variable, rows: tf.IndexedSlices) -> None:
        """Notes the rows of one use of a variable."""
        self._found.setdefault(id(variable), []).append(rows)

    def of(self, variable: keras.Variable) -> tf.IndexedSlices:
        """The rows of all uses of a variable."""
        found = self._found[id(variable)]
        if len(found) == 1:
            return found[0]
        values = tf.concat([rows.values for rows in found], axis=0)
        indices = tf.concat([rows.indices for rows in found], axis=0)
        return tf.IndexedSlices(values, indices, found[0].dense_shape)


class _Local(threading.local):
    rows: _Rows | None = None


_local = _Local()


def flat_shard(variable: keras.Variable) -> FlatShard:
    """How the array of a sharded variable is cut.

    Raises:
        RuntimeError: It is not yet.
    """
    shard = layout_of(variable).flat
    if shard is None:
        raise RuntimeError(f"The variable {variable.path} has no value yet.")
    return shard


def shard_gradients(variables: Sequence[keras.Variable], gradients: Sequence, name: str) -> list:
    """Reduces gradients of arrays over the ranks, as gradients of this rank's shards.

    Sparse ones, as those of embeddings, stay sparse.

    Args:
        variables: The variables.
        gradients: For each a tensor or an IndexedSlices, of its array.
        name: What the variables serve, for messages.
    """
    step, strategy = current_step(), current_strategy()
    found: list = list(gradients)
    places: dict[bool, list[int]] = {}
    for place, variable in enumerate(variables):
        is_own = strategy is None or not layout_of(variable).has_global_gradient(strategy.mesh)
        if not isinstance(found[place], tf.IndexedSlices):
            places.setdefault(is_own, []).append(place)
            continue
        reduction = "sum"
        if is_own:
            (found[place],) = weigh_gradients([found[place]], step)
            reduction = "sum" if step is None else "mean"
        cut = flat_shard(variable)
        rows = reduce_rows(found[place], cut.group, reduction, f"{name}/gradients/{place}")
        if _local.rows is not None:
            _local.rows.add(variable, rows)
        found[place] = shard_of_rows(rows, cut)
    for is_own, some in places.items():
        arrays = [tf.convert_to_tensor(found[place]) for place in some]
        shards = _reduced([variables[place] for place in some], arrays, is_own, name)
        for place, shard in zip(some, shards, strict=True):
            found[place] = shard
    return found


def _reduced(
    variables: Sequence[keras.Variable], arrays: Sequence[tf.Tensor], is_own: bool, name: str
) -> list[tf.Tensor]:
    """The shards of dense gradients, which are this rank's own or parts of a sum already.

    What a loss is made of is the mean of the ranks' gradients, weighed by their shares. Of the ranks' losses
    that is what counts, so a gradient of a gradient is weighed and reduced on its way in, and then only
    gathered: it is weighed again with what it is the gradient of.
    """
    step, strategy = current_step(), current_strategy()
    options = GradientOptions() if strategy is None else strategy.gradient_options
    cuts = [flat_shard(variable) for variable in variables]
    reduction = "mean" if is_own and step is not None else "sum"

    def run(*arrays):
        weighed = weigh_gradients(arrays, step) if is_own else arrays
        shards = packed(
            lambda some, cuts, name: reduce_scatter_arrays(some, cuts, reduction, options, name),
            weighed,
            cuts,
            f"{name}/gradients",
        )
        return shards, lambda *upstream: _whole(variables, upstream, f"{name}/second")

    return list(custom_gradient(run)(*arrays) if any_records() else run(*arrays)[0])


def _whole(
    variables: Sequence[keras.Variable], shards: Sequence[tf.Tensor], name: str
) -> list[tf.Tensor]:
    """The gradients of arrays, of their shards."""
    cuts = [flat_shard(variable) for variable in variables]

    def run(*shards):
        return (
            packed(all_gather_arrays, shards, cuts, name),
            lambda *upstream: shard_gradients(variables, upstream, name),
        )

    return list(custom_gradient(run)(*shards) if shards and any_records() else run(*shards)[0])


@contextlib.contextmanager
def rows_of_gradients() -> Iterator[_Rows]:
    """Inside, notes the rows of sparse gradients whose shards a tape returns."""
    before, _local.rows = _local.rows, _Rows()
    try:
        yield _local.rows
    finally:
        _local.rows = before


def gather_gradients(shards: Sequence, variables: Sequence[keras.Variable], rows: _Rows) -> list:
    """The gradients of arrays, of which a tape has returned those of this rank's shards.

    Args:
        shards: Tensors, or IndexedSlices.
        variables: Their variables.
        rows: What was noted while they were computed.
    """
    found: list = list(shards)
    dense = []
    for place, (shard, variable) in enumerate(zip(shards, variables, strict=True)):
        if isinstance(shard, tf.IndexedSlices):
            found[place] = rows.of(variable)
        else:
            dense.append(place)
    arrays = _whole([variables[p] for p in dense], [shards[p] for p in dense], "gradients/whole")
    for place, array in zip(dense, arrays, strict=True):
        found[place] = array
    return found


def packed(run, tensors: Sequence, shards: Sequence[FlatShard], name: str) -> list:
    """Calls `run` for the tensors of each dtype and group; what it returns, in the order given."""
    found: list = [None] * len(tensors)
    kinds = [(tensor.dtype, cut.group) for tensor, cut in zip(tensors, shards, strict=True)]
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        results = run([tensors[p] for p in places], [shards[p] for p in places], name)
        for place, result in zip(places, results, strict=True):
            found[place] = result
    return found
