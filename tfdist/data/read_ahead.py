"""Data sets of which no batch may be prepared before it is needed.

A prefetch prepares as many batches ahead as time allows, which is another number on each rank. That
is no matter, but where a batch depends on when it is prepared.
"""

from __future__ import annotations

import tensorflow as tf

_MARK = "_tfdist_drawn_when_needed"
#: States of random generators, by dtype and sizes: what is drawn depends on the order alone.
_RANDOM_STATES = ((tf.uint32, [2]), (tf.int64, [2]), (tf.int64, [3]))


def sources(dataset) -> list:
    """The data sets that a data set was made from; `_inputs` is all that TensorFlow offers."""
    return list(dataset._inputs()) if isinstance(dataset, tf.data.Dataset) else []


def drawn_when_needed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, without what is prefetched in the end, here or by TensorFlow."""
    while type(dataset).__name__ == "_PrefetchDataset":
        (dataset,) = sources(dataset)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    # A map that runs in several threads draws ahead too.
    options.experimental_optimization.map_parallelization = False
    # So does one that is joined with what makes batches of its rows.
    options.experimental_optimization.map_and_batch_fusion = False
    options.experimental_optimization.parallel_batch = False
    drawn = dataset.with_options(options)
    setattr(drawn, _MARK, True)
    return drawn


def is_drawn_when_needed(dataset) -> bool:
    """Whether a data set, or one it is made from, came from `drawn_when_needed`."""
    return getattr(dataset, _MARK, False) or any(
        is_drawn_when_needed(source) for source in sources(dataset)
    )


def without_early_reads(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set; where its functions read variables, one whose ranks read them in the same step."""
    return drawn_when_needed(dataset) if _reads_variables(dataset) else dataset


def _reads_variables(dataset) -> bool:
    if not isinstance(dataset, tf.data.Dataset):
        return False
    captured = [
        tensor
        for function in dataset._functions()
        for tensor in function.function.captured_inputs
        if tensor.dtype == tf.resource
    ]
    return any(map(_is_variable, captured)) or any(map(_reads_variables, sources(dataset)))


def _is_variable(handle: tf.Tensor) -> bool:
    """Whether a resource is a variable, and no table or random state."""
    data = getattr(handle, "_handle_data", None)
    kinds = [] if data is None or not data.is_set else data.shape_and_type
    return any(
        (tf.as_dtype(kind.dtype), tf.TensorShape(kind.shape).as_list()) not in _RANDOM_STATES
        for kind in kinds
        if not kind.shape.unknown_rank
    )
