"""A `PyDataset`: no batch is prepared before the epoch that uses it, and a resumed `fit` skips indices.

With a number of steps its iterator continues over several epochs. Keras prepares batches ahead, some of them
before `on_epoch_end` changes the dataset. Their number depends on timing, so that ranks would have rows of
different batches.
"""

from __future__ import annotations

import collections
import itertools
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

#: The number of batches prepared ahead if Keras has no queue.
_AHEAD = 2

#: The dataset in a worker process.
_held: Any = None


class BatchOrder:
    """Makes Keras' adapter of a `PyDataset` prepare batches ahead only within an epoch.

    Args:
        adapter: The adapter, before its iterator is created.
        steps: The number of batches that an epoch draws, except at the end of the data.

    Attributes:
        can_skip: Whether batches can be skipped by their number: the data has an end, and no batch was None.
    """

    def __init__(self, adapter, steps: int):
        self._adapter, self._dataset, self._steps = adapter, adapter.py_dataset, steps
        enqueuer, adapter.enqueuer = adapter.enqueuer, None
        self._has_queue = enqueuer is not None
        self.can_skip = self._dataset.num_batches is not None
        # Workers of infinite data continue when another iterator is created.
        self._shared = enqueuer.indices if self._has_queue and not self.can_skip else None
        self._resumed: list[tuple[Iterator[int], int]] = []
        adapter._get_iterator = self._batches

    def skip(self, count: int) -> None:
        """Makes the next iterator begin after some batches, of an order by the present random state."""
        rest = itertools.islice(self._order(), count, None)
        self._resumed.append((rest, self._steps - count % self._steps))

    def _order(self) -> Iterator[int]:
        if self._dataset.num_batches is None:
            return self._shared or itertools.count()
        indices = list(range(self._dataset.num_batches))
        if self._adapter.shuffle:
            random.shuffle(indices)
        return iter(indices)

    def _batches(self) -> Iterator:
        indices, most = self._resumed.pop() if self._resumed else (self._order(), self._steps)
        # Batches after the last one of an epoch are drawn in the next epoch.
        while epoch := list(itertools.islice(indices, most)):
            most = self._steps
            for batch in _prepared(self._dataset, epoch, has_queue=self._has_queue):
                if batch is None and self._has_queue:
                    self.can_skip = False  # Keras drops it.
                else:
                    yield self._adapter._standardize_batch(batch)


def _prepared(dataset, indices: list[int], *, has_queue: bool) -> Iterator:
    """The batches, in order, prepared by the number of workers of the dataset."""
    workers = max(1, dataset.workers)
    if has_queue and dataset.use_multiprocessing:
        # Processes are started for each epoch, as by Keras, with the current dataset.
        pool: Executor = ProcessPoolExecutor(workers, initializer=_hold, initargs=(dataset,))
        get = _held_batch
    else:
        pool, get = ThreadPoolExecutor(workers), dataset.__getitem__
    most = dataset.max_queue_size if has_queue else _AHEAD
    pending: collections.deque = collections.deque()
    try:
        for index in indices:
            pending.append(pool.submit(get, index))
            if len(pending) > most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _hold(dataset) -> None:
    global _held
    _held = dataset
    # A rank that is told to end saves first, for which it may need more batches.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _held_batch(index: int):
    return _held[index]
