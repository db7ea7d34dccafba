"""The batches of each worker, for workers that run separate steps."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.keras import attributes
from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import TFEpochIterator
from tfdist.data.sharding import check_same_shuffle, is_per_rank, mark_per_rank

PATCHES = Patches()

_OWN_BATCHES = "_tfdist_own_batches"


def shard_whole_batches(dataset: tf.data.Dataset, num_shards: int, index: int) -> tf.data.Dataset:
    """Returns a dataset with every `num_shards`-th batch, starting at batch `index`.

    For workers that run separate steps. A dataset that is already one rank's own is returned unchanged.

    Raises:
        ValueError: The dataset shuffles without a seed, so that workers would see different batches.
    """
    if num_shards == 1 or is_per_rank(dataset):
        return dataset
    check_same_shuffle(dataset)
    sharded = dataset.shard(num_shards, index)
    return _mark_own_batches(sharded, num_shards, index)


def shard_whole_steps(
    dataset: tf.data.Dataset, num_shards: int, index: int | None
) -> tf.data.Dataset:
    """As `shard_whole_batches`, but all shards have the same number of batches.

    A step uses one batch of each shard; remaining batches at the end are dropped.

    Args:
        dataset: Yields batches.
        num_shards: The number of shards.
        index: The shard; None for the batches of all shards, step by step.

    Raises:
        NotImplementedError: The dataset is one rank's own.
        ValueError: The dataset shuffles without a seed.
    """
    if is_per_rank(dataset):
        raise NotImplementedError(
            "`speculative=True` requires the same dataset on all workers, because a backup recomputes batches "
            "of others. Received: the dataset of one worker, from `distribute_datasets_from_function`. Give "
            "all workers the same dataset, or remove `speculative`."
        )
    check_same_shuffle(dataset)
    is_tuple = type(dataset.element_spec) is tuple

    def in_turn(*parts):
        return tf.data.Dataset.zip(parts if is_tuple else parts[0])

    # The length of the dataset is often unknown.
    whole = dataset.window(num_shards, drop_remainder=True).flat_map(in_turn)
    sharded = whole if index is None else whole.shard(num_shards, index)
    # The last shard has the fewest batches.
    return _mark_own_batches(sharded, num_shards, num_shards - 1)


def _mark_own_batches(dataset: tf.data.Dataset, num_shards: int, index: int) -> tf.data.Dataset:
    """Marks a dataset as every `num_shards`-th batch of another one, and returns it."""
    setattr(dataset, _OWN_BATCHES, (num_shards, index))
    return mark_per_rank(dataset)


@PATCHES.of(TFEpochIterator, "__init__")
def _init(self, *args, original, **kwargs):
    """Makes Keras' loop count only the batches of this worker, if it has only some of them."""
    original(self, *args, **kwargs)
    share = getattr(attributes.distributed_dataset(self), _OWN_BATCHES, None)
    if share is not None:
        self.data_adapter = _OwnBatches(self.data_adapter, *share)
        attributes.num_batches.set(self, self.data_adapter.num_batches)


class _OwnBatches:
    """A data adapter of Keras that counts only this worker's batches."""

    def __init__(self, adapter, num_workers: int, worker: int):
        self._adapter = adapter
        self._num_workers, self._worker = num_workers, worker

    def __getattr__(self, name: str):
        return getattr(self._adapter, name)

    @property
    def num_batches(self) -> int | None:
        """The number of this worker's batches in an epoch; None if it is unknown."""
        total = self._adapter.num_batches
        if total is None:
            return None
        if total < self._num_workers:
            raise ValueError(
                "An epoch must have at least one batch for each worker. Received: "
                f"{total} batch(es) for {self._num_workers} workers. Use smaller batches, or fewer "
                "workers."
            )
        return len(range(self._worker, total, self._num_workers))
