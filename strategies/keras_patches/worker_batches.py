"""The number of batches in Keras' loop, if a worker has only some of them."""

from __future__ import annotations

from tfdist.data.sharding import own_batches


def count_own_batches(iterator) -> None:
    """Makes Keras' loop count only the batches of this worker, if it has only some of them."""
    share = own_batches(iterator._distributed_dataset)
    if share is not None:
        iterator.data_adapter = _OwnBatches(iterator.data_adapter, *share)
        iterator._num_batches = iterator.data_adapter.num_batches


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
