"""Keras' loop over batches, where a worker has some of all."""

from __future__ import annotations

from tfdist.data.sharding import own_batches


def count_own_batches(iterator) -> None:
    """Has Keras' loop over batches count those of this worker alone, where it has some of all."""
    share = own_batches(iterator._distributed_dataset)
    if share is not None:
        iterator.data_adapter = _OwnBatches(iterator.data_adapter, *share)
        iterator._num_batches = iterator.data_adapter.num_batches


class _OwnBatches:
    """A data adapter of Keras' that counts this worker's batches only."""

    def __init__(self, adapter, num_workers: int, worker: int):
        self._adapter = adapter
        self._num_workers, self._worker = num_workers, worker

    def __getattr__(self, name: str):
        return getattr(self._adapter, name)

    @property
    def num_batches(self) -> int | None:
        """This worker's batches of an epoch; None where it is not known."""
        total = self._adapter.num_batches
        if total is None:
            return None
        if total < self._num_workers:
            raise ValueError(
                f"Each worker takes every {self._num_workers}th batch of an epoch. Received: "
                f"{total} batch(es) for {self._num_workers} workers. Take smaller batches, or fewer "
                "workers."
            )
        return len(range(self._worker, total, self._num_workers))
