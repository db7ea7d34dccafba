"""ZeRO-3: gradients of arrays, reduced to gradients of flat shards and gathered again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.tapes import any_records
from tfdist.gradients.reduce import weigh_gradients
from tfdist.gradients.sparse import joined_rows, reduce_rows, shard_of_rows
from tfdist.sharding.collectives import all_gather_arrays, reduce_scatter_arrays
from tfdist.sharding.layout import layout_of
from tfdist.sharding.parts import FlatShard
from tfdist.step.context import current_step, current_strategy
from tfdist.step.gradient_options import GradientOptions
from tfdist.utils.places import replace_at, replaced_by_key
from tfdist.utils.temporary import attributes_set


class _Rows(dict[int, list[tf.IndexedSlices]]):
    """The rows of sparse gradients, of all ranks, before they are split into shards."""

    def of(self, variable: keras.Variable) -> tf.IndexedSlices:
        """The rows of all uses of a variable."""
        found = self[id(variable)]
        return found[0] if len(found) == 1 else joined_rows(found)


class _Local(threading.local):
    rows: _Rows | None = None


_local = _Local()


def flat_shard(variable: keras.Variable) -> FlatShard:
    """The flat shard of a sharded variable.

    Raises:
        RuntimeError: It has no value yet.
    """
    shard = layout_of(variable).flat
    if shard is None:
        raise RuntimeError(f"The variable {variable.path} is not initialized yet.")
    return shard


def shard_gradients(variables: Sequence[keras.Variable], gradients: Sequence, name: str) -> list:
    """Reduces gradients of arrays over the ranks, to gradients of this rank's shards.

    Sparse gradients, such as those of embeddings, stay sparse.

    Args:
        variables: The variables.
        gradients: The gradient of each array: a tensor or IndexedSlices.
        name: The name of the collectives, for messages.
    """
    step, strategy = current_step(), current_strategy()
    found = list(gradients)
    #: Of each dense gradient: whether it is this rank's own.
    kinds: list[bool | None] = [None] * len(found)
    for place, variable in enumerate(variables):
        is_own = strategy is None or not layout_of(variable).has_global_gradient(strategy.mesh)
        if not isinstance(found[place], tf.IndexedSlices):
            kinds[place] = is_own
            continue
        if is_own:
            (found[place],) = weigh_gradients([found[place]], step)
        reduction = "mean" if is_own and step is not None else "sum"
        cut = flat_shard(variable)
        rows = reduce_rows(found[place], cut.group, reduction, f"{name}/gradients/{place}")
        if _local.rows is not None:
            _local.rows.setdefault(id(variable), []).append(rows)
        found[place] = shard_of_rows(rows, cut)

    def reduced(is_own: bool, places: list[int]) -> list[tf.Tensor]:
        arrays = [tf.convert_to_tensor(found[place]) for place in places]
        return _reduced([variables[place] for place in places], arrays, is_own, name)

    return replaced_by_key(found, kinds, reduced)


def _reduced(
    variables: Sequence[keras.Variable], arrays: Sequence[tf.Tensor], is_own: bool, name: str
) -> list[tf.Tensor]:
    """The shards of dense gradients, which are this rank's own or already parts of a sum.

    The gradient of the global loss is the mean of the gradients of the ranks' losses, weighted by shares. So
    a gradient of a gradient is weighted and reduced in the first backward pass, and only gathered in the
    second: there it is weighted again, with the gradient that it belongs to.
    """
    step, strategy = current_step(), current_strategy()
    options = GradientOptions() if strategy is None else strategy.gradient_options
    cuts = [flat_shard(variable) for variable in variables]
    reduction = "mean" if is_own and step is not None else "sum"

    def reduce(some, cuts, name):
        return reduce_scatter_arrays(some, cuts, reduction, options, name)

    def run(*arrays):
        weighed = weigh_gradients(arrays, step) if is_own else arrays
        shards = packed(reduce, weighed, cuts, f"{name}/gradients")
        return shards, lambda *upstream: _whole(variables, upstream, f"{name}/second")

    return list(custom_gradient(run)(*arrays) if any_records() else run(*arrays)[0])


def _whole(
    variables: Sequence[keras.Variable], shards: Sequence[tf.Tensor], name: str
) -> list[tf.Tensor]:
    """The gradients of arrays, from the gradients of their shards."""
    cuts = [flat_shard(variable) for variable in variables]

    def run(*shards):
        arrays = packed(all_gather_arrays, shards, cuts, name)
        return arrays, lambda *upstream: shard_gradients(variables, upstream, name)

    return list(custom_gradient(run)(*shards) if shards and any_records() else run(*shards)[0])


@contextlib.contextmanager
def rows_of_gradients() -> Iterator[_Rows]:
    """Inside, records the rows of sparse gradients whose shards a tape returns; yields the record."""
    rows = _Rows()
    with attributes_set(_local, rows=rows):
        yield rows


def gather_gradients(shards: Sequence, variables: Sequence[keras.Variable], rows: _Rows) -> list:
    """The gradients of arrays, from the gradients of this rank's shards that a tape has returned.

    Args:
        shards: Tensors or IndexedSlices.
        variables: Their variables.
        rows: The record of `rows_of_gradients` while they were computed.
    """
    found = [
        rows.of(variable) if isinstance(shard, tf.IndexedSlices) else shard
        for shard, variable in zip(shards, variables, strict=True)
    ]
    dense = [p for p, shard in enumerate(shards) if not isinstance(shard, tf.IndexedSlices)]
    arrays = _whole([variables[p] for p in dense], [shards[p] for p in dense], "gradients/whole")
    replace_at(found, dense, arrays)
    return found


def packed(run, tensors: Sequence, shards: Sequence[FlatShard], name: str) -> list:
    """Calls `run` for the tensors of each dtype and group; the results are in the given order."""
    kinds = [(tensor.dtype, cut.group) for tensor, cut in zip(tensors, shards, strict=True)]
    return replaced_by_key(
        tensors,
        kinds,
        lambda _, places: run([tensors[p] for p in places], [shards[p] for p in places], name),
    )
