"""Which samples of a global batch belong to which rank.

Every rank iterates the same global batches and takes its own rows. So the samples of a step are
those of a single process, an uneven batch needs no padding, and all ranks see the same number of
steps. Where reading everything everywhere costs too much, give each rank its own data with
`strategy.distribute_datasets_from_function`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from tfdist.backend.graph.compiling import outside_clusters
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object
from tfdist.data.read_ahead import is_drawn_when_needed, sources

if TYPE_CHECKING:
    from tfdist.step.row_shares import RowShares

_MARK = "_tfdist_per_rank"
_GLOBAL = "_tfdist_global_batches"
_OWN_BATCHES = "_tfdist_own_batches"
_LENGTH_VARIES = "_tfdist_length_varies"


def row_range(rows, num_shards: int, index: int):
    """The rows [start, end) of a batch that belong to a shard; sizes differ by one at most.

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
    """Returns the data set whose batches are this shard's rows of each batch of `dataset`.

    A data set that is already one rank's own comes back as it is.

    Args:
        dataset: Yields nests of tensors whose dim 0 is the global batch.
        num_shards: The number of shards: the size of the data axis.
        index: This rank's place on the data axis.
        shares: How many rows each shard has; None for equally many. Those count that hold when the
            batch is asked for, so that all ranks take a batch apart in the same way.

    Raises:
        ValueError: A component has no batch dim, or the data set shuffles by chance, so that the
            ranks would see different batches.
    """
    if num_shards == 1 or is_per_rank(dataset):
        return dataset
    _check_has_batch_dim(dataset)
    _check_shuffles_alike(dataset)
    is_tuple = _is_passed_as_arguments(dataset)

    @outside_clusters
    def take_rows(*batch):
        rows = _leading_size(batch)
        if isinstance(rows, int) and rows % num_shards:
            # The shares differ, so no rank's graph may take its own size for everybody's.
            rows = tf.raw_ops.PlaceholderWithDefault(input=tf.constant(rows, tf.int64), shape=[])
        if shares is None:
            start, end = row_range(rows, num_shards, index)
        else:
            start, end = shares.row_range(rows, index)
        own = tf.nest.map_structure(lambda part: _rows(part, start, end), batch)
        return own if is_tuple else own[0]

    # One slice costs less than handing it to another thread.
    options = tf.data.Options()
    options.deterministic = True
    ahead = 0 if is_drawn_when_needed(dataset) else 2
    if shares is not None:
        # Rows are taken when a step asks for them: ahead of it, ranks would see other shares.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        whole = dataset.prefetch(ahead) if ahead else dataset
        sharded = whole.map(take_rows).with_options(options)
    else:
        sharded = dataset.map(take_rows).with_options(options)
        sharded = sharded.prefetch(ahead) if ahead else sharded
    setattr(sharded, _GLOBAL, dataset)
    return mark_per_rank(sharded)


def shard_whole_batches(dataset: tf.data.Dataset, num_shards: int, index: int) -> tf.data.Dataset:
    """Returns the data set of every `num_shards`-th batch, from the batch `index` on.

    For workers that make steps of their own. A data set that is already one rank's own comes back
    as it is.

    Raises:
        ValueError: The data set shuffles by chance, so that workers would see different batches.
    """
    if num_shards == 1 or is_per_rank(dataset):
        return dataset
    _check_shuffles_alike(dataset)
    sharded = dataset.shard(num_shards, index)
    setattr(sharded, _OWN_BATCHES, (num_shards, index))
    return mark_per_rank(sharded)


def shard_whole_steps(
    dataset: tf.data.Dataset, num_shards: int, index: int | None
) -> tf.data.Dataset:
    """As `shard_whole_batches`, but all shards have equally many batches.

    A step takes one batch of each shard; batches that are left at the end are left out.

    Args:
        dataset: Yields batches.
        num_shards: The number of shards.
        index: The shard; None for the batches of all shards, step by step.

    Raises:
        NotImplementedError: The data set is one rank's own.
        ValueError: The data set shuffles by chance.
    """
    if is_per_rank(dataset):
        raise NotImplementedError(
            "A backup redoes batches of the others, so it reads their data. Received: one worker's "
            "own data set, of `distribute_datasets_from_function`, with `speculative=True`. Give all "
            "workers one data set, or leave out `speculative`."
        )
    _check_shuffles_alike(dataset)
    is_tuple = _is_passed_as_arguments(dataset)

    def in_turn(*parts):
        return tf.data.Dataset.zip(parts if is_tuple else parts[0])

    # Not by its length, which is often not known.
    whole = dataset.window(num_shards, drop_remainder=True).flat_map(in_turn)
    sharded = whole if index is None else whole.shard(num_shards, index)
    # Of the last shard, which has the fewest batches of all.
    setattr(sharded, _OWN_BATCHES, (num_shards, num_shards - 1))
    return mark_per_rank(sharded)


def own_batches(dataset) -> tuple[int, int] | None:
    """Of what `shard_whole_batches` returned: the number of shards, and which it is."""
    return getattr(dataset, _OWN_BATCHES, None)


def remaining_batches(dataset: tf.data.Dataset, samples: int, batch_size: int) -> tf.data.Dataset:
    """The global batches of a data set after some samples, in another size.

    Args:
        dataset: What `shard_batches` returned.
        samples: How many samples are left out.
        batch_size: The size of the batches.

    Raises:
        ValueError: The data set was one rank's own from the beginning.
    """
    batches = getattr(dataset, _GLOBAL, dataset)
    if is_per_rank(batches):
        raise ValueError(
            "Ranks that read data of their own cannot go on with another batch size in the middle "
            "of an epoch. Received: a data set of `distribute_datasets_from_function`."
        )
    present = [spec for spec in _flat_spec(batches) if not is_none(spec)]
    whole = all(_rows_of(spec) is not None for spec in present)
    return batches.unbatch().skip(samples).batch(batch_size, drop_remainder=whole)


def equal_steps(dataset: tf.data.Dataset, group: Group) -> tf.data.Dataset:
    """Returns a rank's own data set, made as long as the longest of the group.

    Ranks that run out of batches go on with empty ones, so that all run as many steps and no
    sample is left out. Where the lengths are not known they are taken to be equal.

    Args:
        dataset: Yields this rank's own batches.
        group: The ranks whose steps are to be equal.

    Raises:
        ValueError: The ranks' batches differ in structure, dtype or inner sizes, or some lengths
            are infinite and others not.
    """
    mine = (int(dataset.cardinality()), [_without_rows(s) for s in _flat_spec(dataset)])
    all_ranks = all_gather_object(mine, group, name="data-set")
    for rank, (_, spec) in enumerate(all_ranks):
        if spec != mine[1]:
            raise ValueError(
                "All ranks' data sets yield batches of one structure; only the number of rows "
                f"may differ. Received: {mine[1]} on rank {group.rank}, {spec} on rank {rank}."
            )
    lengths = [length for length, _ in all_ranks]
    rows = all_gather_object([_rows_of(s) for s in _flat_spec(dataset)], group, name="rows")
    if any(other != rows[0] for other in rows) or len(set(lengths)) > 1:
        dataset = with_unknown_rows(dataset)
    if len(set(lengths)) > 1 and min(lengths) >= 0:
        empty = tf.data.Dataset.from_tensors(empty_batch(dataset.element_spec))
        dataset = dataset.concatenate(empty.repeat(max(lengths) - mine[0]))
    elif tf.data.INFINITE_CARDINALITY in lengths and len(set(lengths)) > 1:
        raise ValueError(
            "Some ranks' data sets are endless and others are not. Received the lengths "
            f"{lengths}, by rank (-1: endless, -2: unknown). Call `.repeat()` on all or on none."
        )
    return mark_per_rank(dataset)


def mark_per_rank(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Notes that a data set yields one rank's own samples, and returns it."""
    setattr(dataset, _MARK, True)
    return dataset


def is_per_rank(dataset) -> bool:
    """Whether a data set, or one it is made from, was marked as one rank's own."""
    return _is_marked(dataset, _MARK)


def mark_length_varies(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Notes that a data set has another number of batches in each epoch, and returns it."""
    setattr(dataset, _LENGTH_VARIES, True)
    return dataset


def length_varies(dataset) -> bool:
    """Whether a data set, or one it is made from, has another number of batches in each epoch."""
    return _is_marked(dataset, _LENGTH_VARIES)


def _is_marked(dataset, mark: str) -> bool:
    if getattr(dataset, mark, False):
        return True
    return any(_is_marked(source, mark) for source in sources(dataset))


def _is_passed_as_arguments(dataset) -> bool:
    """Whether `Dataset.map` calls a function with the parts of an element, be it one, or with it."""
    return type(dataset.element_spec) is tuple


def _flat_spec(dataset) -> list:
    return tf.nest.flatten(dataset.element_spec)


def is_none(spec) -> bool:
    """Whether this stands for a None, as for an optional input; TensorFlow has no public name for it."""
    return type(spec).__name__ == "NoneTensorSpec"


def _rows_of(spec) -> int | None:
    shape = getattr(spec, "shape", None)
    return shape[0] if shape is not None and shape.rank else None


def _without_rows(spec) -> str:
    shape = getattr(spec, "shape", None)
    inner = shape[1:] if shape is not None and shape.rank else shape
    return f"{type(spec).__name__}({getattr(spec, 'dtype', None)}, [rows, ...{inner}])"


def with_unknown_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, whose number of rows a graph no longer takes for known."""
    is_tuple = _is_passed_as_arguments(dataset)

    def forget(*batch):
        relaxed = tf.nest.map_structure(
            lambda part: (
                tf.raw_ops.PlaceholderWithDefault(input=part, shape=[None, *part.shape[1:]])
                if isinstance(part, tf.Tensor)
                else part
            ),
            batch,
        )
        return relaxed if is_tuple else relaxed[0]

    return dataset.map(forget)


def empty_batch(spec):
    """A batch without rows of a data set's elements.

    Raises:
        ValueError: An element holds more than dense tensors.
    """

    def empty(part):
        if is_none(part):
            return None
        if not isinstance(part, tf.TensorSpec):
            raise ValueError(
                "A shorter rank's data set is filled up with empty batches of dense tensors. "
                f"Received: {part}. Give all ranks equally many batches."
            )
        inner = [size or 1 for size in part.shape[1:]]
        return tf.zeros([0, *inner], part.dtype)

    return tf.nest.map_structure(empty, spec)


def _check_has_batch_dim(dataset) -> None:
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank == 0:
            raise ValueError(
                "A data set is split among ranks along dim 0 of its batches, so every component "
                f"needs one. Received: element_spec={dataset.element_spec}. Call `.batch()` with "
                "the global batch size first."
            )


def _check_shuffles_alike(dataset) -> None:
    # A shuffle without any seed is marked by two zeros. Attributes are those of TensorFlow's
    # Python wrapper; where they are missing there is nothing to check.
    if type(dataset).__name__ == "_ShuffleDataset":
        seeds = (getattr(dataset, "_seed", None), getattr(dataset, "_seed2", None))
        if all(seed is not None and int(seed) == 0 for seed in seeds):
            raise ValueError(
                "This data set shuffles with a seed that was drawn by each rank for itself, so "
                "the ranks would take their rows from different batches. Make the strategy before "
                "the data set (it gives all ranks one seed), or pass `shuffle(..., seed=)`."
            )
    for source in sources(dataset):
        _check_shuffles_alike(source)


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
