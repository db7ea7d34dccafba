"""Keras' loop over batches, where checkpoints ask how far it is, and let it begin further on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from tfdist.context import DistributedStrategy
from tfdist.data.position import DataPosition
from tfdist.data.sharding import length_varies, without_prefetch
from tfdist.keras_internals import attributes
from tfdist.keras_internals.patching import Patch
from tfdist.keras_internals.private import GeneratorDataAdapter, TFEpochIterator
from tfdist.strategies.asynchronous import AsynchronousStrategy
from tfdist.strategies.keras_patches.asynchronous import count_own_batches

__all__ = ["PATCHES", "began_before", "recorded"]

#: Of the calls of `fit` under way, the innermost last.
_open: list[DataPosition] = []


@contextlib.contextmanager
def recorded(position: DataPosition) -> Iterator[None]:
    """Inside, the data of a `fit` reports to a position."""
    _open.append(position)
    try:
        yield
    finally:
        _open.remove(position)


def began_before() -> bool:
    """Whether an earlier run did the first batches of the epoch of `fit` that goes on."""
    return bool(_open) and _open[-1].done_before > 0


def _init(original, self, distribute_strategy=None, *args, **kwargs):
    original(self, distribute_strategy, *args, **kwargs)
    is_ours = isinstance(distribute_strategy, DistributedStrategy)
    ours = is_ours and distribute_strategy.mesh.size > 1
    if ours and isinstance(self.data_adapter, GeneratorDataAdapter):
        # All ranks' generators have to be at the same batch when another iterator goes on with them.
        self._distributed_dataset = distribute_strategy.experimental_distribute_dataset(
            without_prefetch(self.data_adapter.get_tf_dataset())
        )
    if isinstance(distribute_strategy, AsynchronousStrategy):
        count_own_batches(self)
    if length_varies(self._distributed_dataset):
        self._enumerate_iterator = functools.partial(_to_the_end, self, self._enumerate_iterator)
    if _open and _open[-1].adopt(self):
        position = _open[-1]
        # Of this iterator alone: the training data's.
        self._get_iterator = functools.partial(position.dataset, self._get_iterator)
        self._enumerate_iterator = functools.partial(position.steps, self._enumerate_iterator)


def _to_the_end(source, original):
    """The steps of an epoch; Keras would end a later one after as many as the first had."""
    attributes.num_batches.set(source, None)
    return original()


PATCHES = (Patch(TFEpochIterator, "__init__", ("self", "distribute_strategy"), _init),)
