"""Keras' loop over batches, whose position checkpoints save and restore."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from tfdist.backend.keras import attributes
from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import GeneratorDataAdapter, PyDatasetAdapter, TFEpochIterator
from tfdist.data.first_batch import FirstBatch
from tfdist.data.position import DataPosition
from tfdist.data.read_ahead import drawn_when_needed
from tfdist.data.sharding import is_none, length_varies
from tfdist.step.context import DistributedStrategy
from tfdist.strategies.keras_patches.agreement import compare_first_batches

PATCHES = Patches()

#: The positions of the running calls of `fit`, the innermost last.
_open: list[DataPosition] = []
#: For each of them the digest of its data, until its dataset is created; first that outside of `fit`.
_awaited: list[FirstBatch | None] = [None]


def recording_position(stack: contextlib.ExitStack) -> DataPosition:
    """A position that records the data of a `fit`, until the stack closes."""
    position = DataPosition()
    _open.append(position)
    stack.callback(_open.remove, position)
    return position


def began_before() -> bool:
    """Whether an earlier run did the first batches of the current epoch of `fit`."""
    return bool(_open) and _open[-1].done_before > 0


def comparing_first_batch(stack: contextlib.ExitStack) -> None:
    """Makes ranks compare digests of the first batch of the next dataset, until the stack closes."""
    _awaited.append(FirstBatch())
    stack.callback(_awaited.pop)


def batch_of(iterator):
    """The specification of a batch: drawing a batch would advance a dataset that shuffles."""
    return tf.nest.map_structure(
        lambda part: None if is_none(part) else part, iterator._distributed_dataset.element_spec
    )


@PATCHES.of(TFEpochIterator, "__init__")
def _init(self, distribute_strategy=None, *args, original, **kwargs):
    is_ours, order = isinstance(distribute_strategy, DistributedStrategy), None
    if not is_ours or distribute_strategy.mesh.size == 1:
        original(self, distribute_strategy, *args, **kwargs)
        if _open and isinstance(self.data_adapter, PyDatasetAdapter):
            order = _draw_when_needed(self, distribute_strategy)
    else:
        first, _awaited[-1] = _awaited[-1], None
        with distribute_strategy.extended.recording(first):
            original(self, distribute_strategy, *args, **kwargs)
            order = _draw_when_needed(self, distribute_strategy)
        if first is not None:
            self._enumerate_iterator = functools.partial(
                _with_comparison, self._enumerate_iterator, distribute_strategy, first
            )
    if length_varies(self._distributed_dataset):
        self._enumerate_iterator = functools.partial(_to_the_end, self, self._enumerate_iterator)
    if _open and (position := _open[-1]).adopt(self):
        position.order = order
        # Only for this iterator, which is that of the training data.
        self._get_iterator = functools.partial(position.dataset, self._get_iterator)
        self._enumerate_iterator = functools.partial(position.steps, self._enumerate_iterator)


def _draw_when_needed(source, strategy: tf.distribute.Strategy) -> Any:
    """Removes the prefetch if batches depend on when they are prepared; returns the order of a `PyDataset`."""
    adapter, steps, order = source.data_adapter, source.steps_per_epoch, None
    if isinstance(adapter, PyDatasetAdapter) and (steps := steps or adapter.num_batches):
        from tfdist.data.py_datasets import BatchOrder

        # An execution of several steps draws the batches of all of them.
        executions = -(-steps // source.steps_per_execution)
        order = BatchOrder(adapter, executions * source.steps_per_execution)
    if order is not None or isinstance(adapter, GeneratorDataAdapter):
        dataset = adapter.get_tf_dataset()
        if order is None or source.steps_per_epoch:
            # The generators of all ranks must be at the same batch when another iterator continues with them.
            dataset = drawn_when_needed(dataset)
        source._distributed_dataset = strategy.experimental_distribute_dataset(dataset)
    return order


def _with_comparison(original, strategy: DistributedStrategy, first: FirstBatch):
    """The steps of an epoch; after the first one, ranks compare its batch."""
    for step in original():
        yield step
        if not first.is_compared:
            first.is_compared = True
            compare_first_batches(strategy, first.value())


def _to_the_end(source, original):
    """The steps of an epoch; otherwise Keras would end each epoch after the number of steps of the first."""
    attributes.num_batches.set(source, None)
    return original()
