"""Datasets whose batches must not be prepared before they are needed.

The number of batches that a prefetch prepares ahead depends on timing, and differs between ranks. That
matters if a batch depends on when it is prepared.
"""

from __future__ import annotations

import tensorflow as tf

_MARK = "_tfdist_drawn_when_needed"
#: States of random generators, by dtype and sizes: their numbers depend only on the order of batches.
_RANDOM_STATES = ((tf.uint32, [2]), (tf.int64, [2]), (tf.int64, [3]))


def sources(dataset) -> list:
    """The inputs of a dataset; TensorFlow only has the private `_inputs` for them."""
    return list(dataset._inputs()) if isinstance(dataset, tf.data.Dataset) else []


def drawn_when_needed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same batches, without a prefetch at the end, by the user or by TensorFlow."""
    while type(dataset).__name__ == "_PrefetchDataset":
        (dataset,) = sources(dataset)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    # A map in several threads draws ahead, too.
    options.experimental_optimization.map_parallelization = False
    # So does a map that is fused with batching.
    options.experimental_optimization.map_and_batch_fusion = False
    options.experimental_optimization.parallel_batch = False
    drawn = dataset.with_options(options)
    setattr(drawn, _MARK, True)
    return drawn


def is_drawn_when_needed(dataset) -> bool:
    """Whether a dataset, or one of its inputs, is a result of `drawn_when_needed`."""
    return has_mark(dataset, _MARK)


def has_mark(dataset, mark: str) -> bool:
    """Whether a dataset, or one of its inputs, has a true attribute of a name."""
    return bool(getattr(dataset, mark, False)) or any(has_mark(x, mark) for x in sources(dataset))


def without_early_reads(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset; if its functions read variables, one that reads them in the same step on all ranks."""
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
    """Whether a resource is a variable, and not a table or random state."""
    data = getattr(handle, "_handle_data", None)
    kinds = [] if data is None or not data.is_set else data.shape_and_type
    return any(
        (tf.as_dtype(kind.dtype), tf.TensorShape(kind.shape).as_list()) not in _RANDOM_STATES
        for kind in kinds
        if not kind.shape.unknown_rank
    )
