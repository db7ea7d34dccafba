"""A `PyDataset`: no batch is prepared before the epoch that uses it, and a resumed `fit` skips indices.

With a number of steps its iterator continues over several epochs. Keras prepares batches ahead, some of them
before `on_epoch_end` changes the dataset. Their number depends on timing, so that ranks would have rows of
different batches.
"""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import multiprocessing.dummy
import random
from collections.abc import Callable, Iterator
from typing import Any

#: The number of batches prepared ahead if Keras has no queue.
_AHEAD = 2

#: The dataset in a worker process.
_held: Any = None


def prepare_by_epoch(adapter, steps: int) -> Callable[[int], None]:
    """Makes Keras' adapter of a `PyDataset` prepare batches ahead only within an epoch.

    Args:
        adapter: The adapter, before its iterator is created.
        steps: The number of batches that an epoch draws, except at the end of the data.

    Returns:
        A function that makes the next iterator begin after a number of batches.
    """
    dataset, enqueuer = adapter.py_dataset, adapter.enqueuer
    adapter.enqueuer = None
    # Workers of infinite data continue when another iterator is created.
    shared = enqueuer.indices if enqueuer is not None and dataset.num_batches is None else None
    resumed: list[tuple[Iterator[int], int]] = []

    def order() -> Iterator[int]:
        if dataset.num_batches is None:
            return shared or itertools.count()
        indices = list(range(dataset.num_batches))
        if adapter.shuffle:
            random.shuffle(indices)
        return iter(indices)

    def skip(count: int) -> None:
        # The order is drawn now, from the random state that the caller has set.
        resumed.append((itertools.islice(order(), count, None), steps - count % steps))

    def batches() -> Iterator:
        indices, most = resumed.pop() if resumed else (order(), steps)
        # Batches after the last one of an epoch are drawn in the next epoch.
        while epoch := list(itertools.islice(indices, most)):
            most = steps
            for batch in _prepared(dataset, epoch, has_queue=enqueuer is not None):
                if batch is not None or enqueuer is None:
                    yield adapter._standardize_batch(batch)

    adapter._get_iterator = batches
    return skip


def _prepared(dataset, indices: list[int], *, has_queue: bool) -> Iterator:
    """The batches, in order, prepared by the number of workers of the dataset."""
    workers = max(1, dataset.workers)
    if has_queue and dataset.use_multiprocessing:
        # Processes are started for each epoch, as by Keras, with the current dataset.
        pool, get = multiprocessing.Pool(workers, _hold, (dataset,)), _held_batch
    else:
        pool, get = multiprocessing.dummy.Pool(workers), dataset.__getitem__
    most = dataset.max_queue_size if has_queue else _AHEAD
    pending: collections.deque = collections.deque()
    with pool:
        for index in indices:
            pending.append(pool.apply_async(get, (index,)))
            if len(pending) > most:
                yield pending.popleft().get()
        pool.close()
        while pending:
            yield pending.popleft().get()


def _hold(dataset) -> None:
    global _held
    _held = dataset


def _held_batch(index: int):
    return _held[index]
