"""The samples of each rank: its rows of global batches, or batches of its own dataset.

Every rank iterates over the same global batches and takes its own rows. So the samples of a step are those of
a single process, an uneven batch needs no padding, and all ranks run the same number of steps. If reading all
data on every rank is too expensive, give each rank its own data with
`strategy.distribute_datasets_from_function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist.backend.graph.compiling import outside_clusters
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object
from tfdist.data.indexed import IndexedRows, indexed_rows
from tfdist.data.read_ahead import has_mark, is_drawn_when_needed, sources

if TYPE_CHECKING:
    from tfdist.step.row_shares import RowShares

_MARK = "_tfdist_per_rank"
_GLOBAL = "_tfdist_global_batches"
_LENGTH_VARIES = "_tfdist_length_varies"


def row_range(rows, num_shards: int, index: int):
    """The rows [start, end) of a batch that belong to a shard; sizes differ by at most one.

    Args:
        rows: The size of the batch, an integer or an integer tensor.
        num_shards: The number of shards.
        index: The shard.
    """
    share, more = rows // num_shards, rows % num_shards
    if isinstance(rows, int):
        start = index * share + min(index, more)
        return start, start + share + (index < more)
    start = index * share + tf.minimum(tf.cast(index, more.dtype), more)
    return start, start + share + tf.cast(index < more, share.dtype)


def shard_batches(
    dataset: tf.data.Dataset, num_shards: int, index: int, shares: RowShares | None = None
) -> tf.data.Dataset:
    """Returns a dataset with this shard's rows of each batch.

    A dataset that is already one rank's own is returned unchanged.

    Args:
        dataset: Yields nests of tensors with the global batch along dim 0.
        num_shards: The number of shards: the size of the data axis.
        index: This rank's place on the data axis.
        shares: The shares of the shards, read when the batch is requested so that all ranks split it in
            the same way; None for equal shares.

    Raises:
        ValueError: A component has no batch dim, or the dataset shuffles without a seed, so that ranks would
            see different batches.
    """
    if num_shards == 1 or is_per_rank(dataset):
        return dataset
    rows = indexed_rows(dataset)
    if rows is not None:
        own = rows.over(shard_batches(rows.indices, num_shards, index, shares)).dataset()
        return _marked(_marked(own, _GLOBAL, dataset), _MARK)
    _check_has_batch_dim(dataset)
    check_same_shuffle(dataset)

    def take_rows(batch):
        rows = _leading_size(batch)
        if isinstance(rows, int) and rows % num_shards:
            # Shares differ, so no rank's graph may assume its own size for all ranks.
            rows = tf.raw_ops.PlaceholderWithDefault(input=tf.constant(rows, tf.int64), shape=[])
        if shares is None:
            start, end = row_range(rows, num_shards, index)
        else:
            start, end = shares.row_range(rows, index)
        return tf.nest.map_structure(lambda part: _rows(part, start, end), batch)

    options = tf.data.Options()
    # A slice costs less than a transfer to another thread.
    options.deterministic = True
    ahead = 0 if is_drawn_when_needed(dataset) else 2
    if shares is not None:
        # Rows must be taken when a step requests them: earlier, ranks could read different shares.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        whole = dataset.prefetch(ahead) if ahead else dataset
        sharded = map_elements(whole, take_rows).with_options(options)
    else:
        sharded = map_elements(dataset, take_rows).with_options(options)
        sharded = sharded.prefetch(ahead) if ahead else sharded
    return _marked(_marked(sharded, _GLOBAL, dataset), _MARK)


def remaining_batches(dataset: tf.data.Dataset, samples: int, batch_size: int) -> tf.data.Dataset:
    """The global batches of a dataset after some samples, in another size.

    Args:
        dataset: The result of `shard_batches`.
        samples: The number of samples to skip.
        batch_size: The size of the batches.

    Raises:
        ValueError: The dataset was one rank's own before `shard_batches`.
    """
    batches = getattr(dataset, _GLOBAL, dataset)
    if is_per_rank(batches):
        raise ValueError(
            "Ranks with separate datasets cannot continue with another batch size in the middle of an epoch. "
            "Received: a dataset from `distribute_datasets_from_function`."
        )
    rows = indexed_rows(batches)
    if rows is not None:
        whole = _rows_of(rows.indices.element_spec) is not None
        rest = rows.indices.unbatch().skip(samples).batch(batch_size, drop_remainder=whole)
        return rows.over(rest).dataset()
    present = [spec for spec in _flat_spec(batches) if not is_none(spec)]
    whole = all(_rows_of(spec) is not None for spec in present)
    return batches.unbatch().skip(samples).batch(batch_size, drop_remainder=whole)


def global_rows(dataset) -> IndexedRows | None:
    """The indexed rows of the global batches of a dataset or of a result of `shard_batches`; None without indices."""
    return indexed_rows(getattr(dataset, _GLOBAL, dataset))


def equal_steps(dataset: tf.data.Dataset, group: Group) -> tf.data.Dataset:
    """Returns a rank's own dataset, extended to the length of the longest in the group.

    Ranks that run out of batches continue with empty ones, so that all run the same number of steps and no
    sample is dropped. Unknown lengths are assumed to be equal.

    Args:
        dataset: Yields this rank's own batches.
        group: The ranks that must run the same number of steps.

    Raises:
        ValueError: The ranks' batches differ in structure, dtype or inner sizes, or some lengths are infinite
            and others are not.
    """
    specs = _flat_spec(dataset)
    mine = (int(dataset.cardinality()), [_without_rows(spec) for spec in specs])
    all_ranks = all_gather_object(mine, group, name="data-set")
    for rank, (_, spec) in enumerate(all_ranks):
        if spec != mine[1]:
            raise ValueError(
                "The datasets of all ranks must yield batches of the same structure; only the number of rows "
                f"may differ. Received: {mine[1]} on rank {group.rank}, {spec} on rank {rank}."
            )
    lengths = [length for length, _ in all_ranks]
    lengths_differ = len(set(lengths)) > 1
    rows = all_gather_object([_rows_of(spec) for spec in specs], group, name="rows")
    if lengths_differ or any(other != rows[0] for other in rows):
        dataset = with_unknown_rows(dataset)
    if lengths_differ and min(lengths) >= 0:
        empty = tf.data.Dataset.from_tensors(empty_batch(dataset.element_spec))
        dataset = dataset.concatenate(empty.repeat(max(lengths) - mine[0]))
    elif lengths_differ and tf.data.INFINITE_CARDINALITY in lengths:
        raise ValueError(
            "Either all ranks' datasets must be infinite, or none. Received: the lengths "
            f"{lengths}, by rank (-1: infinite, -2: unknown). Call `.repeat()` on all or on none."
        )
    return mark_per_rank(dataset)


def _marked(dataset: tf.data.Dataset, mark: str, value=True) -> tf.data.Dataset:
    setattr(dataset, mark, value)
    return dataset


def mark_per_rank(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Marks a dataset as one rank's own samples, and returns it."""
    return _marked(dataset, _MARK)


def is_per_rank(dataset) -> bool:
    """Whether a dataset, or one of its inputs, was marked as one rank's own."""
    return has_mark(dataset, _MARK)


def mark_length_varies(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Marks a dataset whose number of batches changes between epochs, and returns it."""
    return _marked(dataset, _LENGTH_VARIES)


def length_varies(dataset) -> bool:
    """Whether the number of batches of a dataset, or of one of its inputs, changes between epochs."""
    return has_mark(dataset, _LENGTH_VARIES)


def map_elements(dataset: tf.data.Dataset, function: Callable) -> tf.data.Dataset:
    """As `Dataset.map`, but the function receives each element as one argument, also if it is a tuple."""
    # `Dataset.map` passes the parts of such an element as separate arguments.
    is_tuple = type(dataset.element_spec) is tuple

    @outside_clusters
    def call(*parts):
        return function(parts if is_tuple else parts[0])

    return dataset.map(call)


def _flat_spec(dataset) -> list:
    return tf.nest.flatten(dataset.element_spec)


def is_none(spec) -> bool:
    """Whether this is the spec of None, as for an optional input; TensorFlow has no public name for it."""
    return type(spec).__name__ == "NoneTensorSpec"


def _rows_of(spec) -> int | None:
    shape = getattr(spec, "shape", None)
    return shape[0] if shape is not None and shape.rank else None


def _without_rows(spec) -> str:
    shape = getattr(spec, "shape", None)
    inner = shape[1:] if shape is not None and shape.rank else shape
    return f"{type(spec).__name__}({getattr(spec, 'dtype', None)}, [rows, ...{inner}])"


def with_unknown_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, with an unknown number of rows in graphs."""

    def forget(part):
        if not isinstance(part, tf.Tensor):
            return part
        return tf.raw_ops.PlaceholderWithDefault(input=part, shape=[None, *part.shape[1:]])

    return map_elements(dataset, lambda batch: tf.nest.map_structure(forget, batch))


def empty_batch(spec):
    """A batch without rows, with the structure of a dataset's elements.

    Raises:
        ValueError: An element contains something other than dense tensors.
    """

    def empty(part):
        if is_none(part):
            return None
        if not isinstance(part, tf.TensorSpec):
            raise ValueError(
                "A dataset that is shorter than those of other ranks must have dense tensors only, to be "
                f"extended with empty batches. Received: {part}. Give all ranks the same number of batches."
            )
        inner = [size or 1 for size in part.shape[1:]]
        return tf.zeros([0, *inner], part.dtype)

    return tf.nest.map_structure(empty, spec)


def _check_has_batch_dim(dataset) -> None:
    for spec in _flat_spec(dataset):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank == 0:
            raise ValueError(
                "A dataset is sharded along the batch dimension, so every component must have one. "
                f"Received: element_spec={dataset.element_spec}. Call `.batch()` with the global batch "
                "size first."
            )


def check_same_shuffle(dataset) -> None:
    """Checks that a dataset is in the same order on all ranks.

    Raises:
        ValueError: It shuffles without a seed.
    """
    # Two zeros mean a shuffle without any seed. Nothing is checked if TensorFlow's wrapper no longer has these
    # private attributes.
    if type(dataset).__name__ == "_ShuffleDataset":
        seeds = (getattr(dataset, "_seed", None), getattr(dataset, "_seed2", None))
        if all(seed is not None and int(seed) == 0 for seed in seeds):
            raise ValueError(
                "A dataset that shuffles must use the same seed on all ranks, which would take rows of "
                "different batches otherwise. Received: a dataset that shuffles with a seed drawn by each "
                "rank. Create the strategy before the dataset (it gives all ranks one seed), or pass "
                "`shuffle(..., seed=)`."
            )
    for source in sources(dataset):
        check_same_shuffle(source)


def _leading_size(batch):
    part = next(part for part in tf.nest.flatten(batch) if part is not None)
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    return part.shape[0] if part.shape[0] is not None else tf.shape(part, tf.int64)[0]


def _rows(part, start, end):
    if part is None:  # An optional input.
        return None
    if isinstance(part, tf.SparseTensor):
        size = tf.concat([[end - start], part.dense_shape[1:]], axis=0)
        begin = tf.concat([[start], tf.zeros_like(part.dense_shape[1:])], axis=0)
        return tf.sparse.slice(part, begin, size)
    rows = part[start:end]
    if isinstance(start, int) and isinstance(rows, tf.Tensor):
        rows.set_shape([end - start, *part.shape[1:]])
    return rows
