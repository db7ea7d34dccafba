"""A `PyDataset` with a number of steps: no batch is prepared before the epoch that takes it.

Its iterator lives on across epochs. Keras prepares the next batches meanwhile, so some are prepared
before `on_epoch_end` changes the data set, and how many is a matter of time: another number on each
rank, whose rows would be of different batches. Its workers begin anew with each epoch besides.
"""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import multiprocessing.dummy
import random
from collections.abc import Iterator
from typing import Any

#: So many batches are prepared ahead where Keras has no queue of its own.
_AHEAD = 2

#: In a worker process, the data set.
_held: Any = None


def prepare_by_epoch(adapter, steps: int) -> None:
    """Has Keras' adapter of a `PyDataset` prepare batches ahead within an epoch only.

    Args:
        adapter: The adapter, before its iterator is made.
        steps: The number of batches that an epoch draws, but for the last of the data.
    """
    dataset, enqueuer = adapter.py_dataset, adapter.enqueuer
    adapter.enqueuer = None
    # Where there is no end, workers go on when another iterator is made.
    shared = enqueuer.indices if enqueuer is not None and dataset.num_batches is None else None

    def order() -> Iterator[int]:
        if dataset.num_batches is None:
            return shared or itertools.count()
        indices = list(range(dataset.num_batches))
        if adapter.shuffle:
            random.shuffle(indices)
        return iter(indices)

    def batches() -> Iterator:
        indices = order()
        # What is drawn after an epoch's last batch is drawn by the next epoch.
        while epoch := list(itertools.islice(indices, steps)):
            for batch in _prepared(dataset, epoch, has_queue=enqueuer is not None):
                if batch is not None or enqueuer is None:
                    yield adapter._standardize_batch(batch)

    adapter._get_iterator = batches


def _prepared(dataset, indices: list[int], *, has_queue: bool) -> Iterator:
    """The batches, in order, prepared by as many workers as the data set asks for."""
    workers = max(1, dataset.workers)
    if has_queue and dataset.use_multiprocessing:
        # Processes are started for each epoch, as by Keras: they have the data set as it is then.
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
