"""Keras' loop over batches, where checkpoints ask how far it is, and let it begin further on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import tensorflow as tf

from tfdist.backend.keras import attributes
from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import GeneratorDataAdapter, PyDatasetAdapter, TFEpochIterator
from tfdist.data.first_batch import FirstBatch
from tfdist.data.position import DataPosition
from tfdist.data.read_ahead import drawn_when_needed
from tfdist.data.sharding import is_none, length_varies
from tfdist.step.context import DistributedStrategy
from tfdist.strategies.keras_patches.agreement import compare_first_batches
from tfdist.strategies.keras_patches.py_datasets import prepare_by_epoch
from tfdist.strategies.keras_patches.worker_batches import count_own_batches

#: Of the calls of `fit` under way, the innermost last.
_open: list[DataPosition] = []
#: For each of them the digest of its data, until these are made.
_awaited: list[FirstBatch | None] = []


def recorded(stack: contextlib.ExitStack) -> DataPosition:
    """A position that the data of a `fit` report to, until the stack closes."""
    position = DataPosition()
    _open.append(position)
    stack.callback(_open.remove, position)
    return position


def began_before() -> bool:
    """Whether an earlier run did the first batches of the epoch of `fit` that goes on."""
    return bool(_open) and _open[-1].done_before > 0


@contextlib.contextmanager
def first_batch_compared() -> Iterator[None]:
    """Inside, a digest of the first batch of the first data, those of a `fit`, is compared among ranks."""
    _awaited.append(FirstBatch())
    try:
        yield
    finally:
        _awaited.pop()


def batch_of(iterator):
    """A batch as its specification: to draw one would move a data set that shuffles."""
    return tf.nest.map_structure(
        lambda part: None if is_none(part) else part,
        iterator._distributed_dataset.element_spec,
    )


def _init(self, distribute_strategy=None, *args, original, **kwargs):
    is_ours = isinstance(distribute_strategy, DistributedStrategy)
    if not is_ours or distribute_strategy.mesh.size == 1:
        original(self, distribute_strategy, *args, **kwargs)
    else:
        first = _awaited[-1] if _awaited else None
        if first is not None:
            _awaited[-1] = None
        with distribute_strategy.extended.noting(first):
            original(self, distribute_strategy, *args, **kwargs)
            _draw_when_needed(self, distribute_strategy)
        if first is not None:
            self._enumerate_iterator = functools.partial(
                _with_comparison, self._enumerate_iterator, distribute_strategy, first
            )
    count_own_batches(self)
    if length_varies(self._distributed_dataset):
        self._enumerate_iterator = functools.partial(_to_the_end, self, self._enumerate_iterator)
    if _open and _open[-1].adopt(self):
        position = _open[-1]
        # Of this iterator alone: the training data's.
        self._get_iterator = functools.partial(position.dataset, self._get_iterator)
        self._enumerate_iterator = functools.partial(position.steps, self._enumerate_iterator)


def _draw_when_needed(source, strategy: DistributedStrategy) -> None:
    """Takes the prefetch away where a batch depends on when it is prepared."""
    adapter, steps = source.data_adapter, source.steps_per_epoch
    if isinstance(adapter, PyDatasetAdapter) and steps:
        # Several steps in one execution draw all of its batches.
        prepare_by_epoch(
            adapter, -(-steps // source.steps_per_execution) * source.steps_per_execution
        )
    elif not isinstance(adapter, GeneratorDataAdapter):
        return
    # All ranks' generators have to be at the same batch when another iterator goes on with them.
    source._distributed_dataset = strategy.experimental_distribute_dataset(
        drawn_when_needed(adapter.get_tf_dataset())
    )


def _with_comparison(original, strategy: DistributedStrategy, first: FirstBatch):
    """The steps of an epoch; after the first of all, whether it had the same batch on all ranks."""
    for step in original():
        yield step
        if not first.is_compared:
            first.is_compared = True
            compare_first_batches(strategy, first.value())


def _to_the_end(source, original):
    """The steps of an epoch; Keras would end a later one after as many as the first had."""
    attributes.num_batches.set(source, None)
    return original()


PATCHES = (Patch(TFEpochIterator, "__init__", ("self", "distribute_strategy"), _init),)
