"""Datasets of rows with indices, which each rank reads after it has taken its indices of a batch.

So a rank reads only its own rows, and a resumed `fit` skips indices and not rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

_MARK = "_tfdist_indexed"


@dataclasses.dataclass(frozen=True)
class IndexedRows:
    """Rows that are read by their indices.

    Attributes:
        indices: The global batches of indices: int64, [rows].
        read: Returns the rows of a batch of indices, a nest of tensors with the rows along dim 0.
        batch_size: The rows of a global batch.
        num_parallel_reads: The number of batches that are read at once.
    """

    indices: tf.data.Dataset
    read: Callable[[tf.Tensor], object]
    batch_size: int
    num_parallel_reads: int = 1

    def dataset(self) -> tf.data.Dataset:
        """The batches of rows; `indexed_rows` returns these rows for the dataset itself, not for one derived from it."""
        found = self.indices.map(
            self.read, num_parallel_calls=self.num_parallel_reads, deterministic=True
        )
        setattr(found, _MARK, self)
        return found

    def over(self, indices: tf.data.Dataset) -> IndexedRows:
        """The same rows in other batches."""
        return dataclasses.replace(self, indices=indices)


def indexed_rows(dataset) -> IndexedRows | None:
    """The rows of a dataset of `IndexedRows`; None for other datasets."""
    return getattr(dataset, _MARK, None)
