"""Datasets of sources with random access: Grain, ArrayRecord, `datasets` of Hugging Face, or any sequence of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.data.indexed import IndexedRows
from tfdist.utils import checks


class RowSource(Protocol):
    """Rows by index, such as a `grain.MapDataset`, an `ArrayRecordDataSource` or a list.

    A source may also have `__getitems__`, which returns the rows of several indices at once.
    """

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __getitem__(self, index: int) -> Any:
        """A row: a nest of arrays and numbers without a batch dim."""
        ...


def row_dataset(
    source: RowSource,
    batch_size: int,
    *,
    columns: Sequence[str | Sequence[str]] | None = None,
    transform: Callable[[Any], Any] | None = None,
    shuffle_seed: int | None = None,
    drop_remainder: bool = False,
    num_parallel_reads: int = 2,
) -> tf.data.Dataset:
    """Batches of the rows of a source, of which each rank reads only its own.

    `fit` with a `Checkpointer` resumes without reading the rows before its place. Both hold for the dataset
    itself, not for one derived from it by `map` or `prefetch`: use `transform`, or the source's own functions.

    ```python
    data = row_dataset(grain.MapDataset.source(rows), 64, shuffle_seed=3)
    data = row_dataset(datasets.load_dataset("mnist")["train"], 64, columns=("image", "label"))
    model.fit(data, epochs=3)
    ```

    Args:
        source: The rows; all ranks have the same.
        batch_size: The rows of a global batch.
        columns: For rows that are dicts: the names of the input, the target and the sample weights; several names
            together give a dict. None for rows as they are.
        transform: A function of Python that is applied to each row.
        shuffle_seed: The seed of another order of the rows in each epoch, the same in all processes with the same
            global seed of TensorFlow, as all ranks under a strategy have; None for the order of the source.
        drop_remainder: Whether an incomplete last batch is dropped.
        num_parallel_reads: The number of batches that are read at once.

    Returns:
        Batches with the structure of a row. The last row is read here, for its dtypes and shapes, which all rows
        have.

    Raises:
        TypeError: `source` has no length, or no rows by index.
        ValueError: An argument is invalid, or there are too few rows.
    """
    is_source = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if not is_source or isinstance(source, str | bytes | dict):
        raise checks.refuse("source", source, "a source with a length and rows by index", TypeError)
    checks.integer("batch_size", batch_size, minimum=1)
    checks.boolean("drop_remainder", drop_remainder)
    checks.function("transform", transform, optional=True)
    checks.integer("shuffle_seed", shuffle_seed, minimum=0, maximum=2**63 - 1, optional=True)
    checks.integer("num_parallel_reads", num_parallel_reads, minimum=1)
    selected = _selection(columns)
    size = len(source)
    if size < (batch_size if drop_remainder else 1):
        least = "one whole batch" if drop_remainder else "one row"
        raise checks.refuse(
            "source", source, f"a source of at least {least}, {batch_size} rows a batch"
        )

    def row_of(found: Any) -> Any:
        found = selected(found)
        return found if transform is None else transform(found)

    reader = _Reader(source, row_of)
    indices = _indices(size, batch_size, shuffle_seed, drop_remainder)
    return IndexedRows(indices, reader.read, batch_size, num_parallel_reads).dataset()


def _selection(columns: Any) -> Callable[[Any], Any]:
    if columns is None:
        return lambda row: row
    is_list = isinstance(columns, list | tuple) and 0 < len(columns) <= 3
    names = [[each] if isinstance(each, str) else each for each in columns] if is_list else []
    if not names or not all(
        isinstance(each, list | tuple) and each and all(isinstance(name, str) for name in each)
        for each in names
    ):
        raise checks.refuse("columns", columns, "one to three names of columns, or lists of names")

    def select(row: Any) -> Any:
        parts = [
            row[each] if isinstance(each, str) else {name: row[name] for name in each}
            for each in columns
        ]
        return parts[0] if len(parts) == 1 else tuple(parts)

    return select


def _indices(size: int, batch_size: int, seed: int | None, drop_remainder: bool) -> tf.data.Dataset:
    """The batches of indices, in another order in each epoch."""
    ordered = tf.data.Dataset.range(size).batch(batch_size, drop_remainder=drop_remainder)
    if seed is None:
        return ordered
    count = int(ordered.cardinality())

    def shuffled(drawn):
        # A permutation without memory for it.
        key = tf.stack([drawn, tf.constant(seed, tf.int64)])
        return ordered.map(
            lambda batch: tf.ensure_shape(
                tf.random.experimental.index_shuffle(batch, key, size - 1), batch.shape
            )
        )

    draws = tf.data.Dataset.random(seed, rerandomize_each_iteration=True).take(1)
    return draws.flat_map(shuffled).apply(tf.data.experimental.assert_cardinality(count))


class _Reader:
    """Reads batches of rows by their indices."""

    def __init__(self, source: Any, row_of: Callable[[Any], Any]):
        self._source, self._row_of = source, row_of
        last = row_of(source[len(source) - 1])
        self._structure = tf.nest.map_structure(lambda part: None, last)
        try:
            self._like = [np.asarray(tf.convert_to_tensor(part)) for part in tf.nest.flatten(last)]
        except (TypeError, ValueError) as error:
            meaning = f"a source of rows of arrays, numbers and texts ({checks.one_line(error)})"
            raise checks.refuse("source", source, meaning, TypeError) from error

    def read(self, indices: tf.Tensor) -> Any:
        """The rows of a batch of indices."""
        dtypes = [tf.as_dtype(part.dtype) for part in self._like]
        parts = tf.numpy_function(self._read, [indices], dtypes)
        for part, like in zip(parts, self._like, strict=True):
            part.set_shape([indices.shape[0], *like.shape])
        return tf.nest.pack_sequence_as(self._structure, parts)

    def _read(self, indices: np.ndarray) -> list[np.ndarray]:
        if hasattr(self._source, "__getitems__"):
            found = self._source.__getitems__([int(index) for index in indices])
        else:
            found = [self._source[int(index)] for index in indices]
        pairs = zip(indices, found, strict=True)
        rows = [self._parts(int(index), self._row_of(row)) for index, row in pairs]
        return [
            np.stack([row[place] for row in rows])
            if rows
            else np.zeros([0, *like.shape], like.dtype)
            for place, like in enumerate(self._like)
        ]

    def _parts(self, index: int, row: Any) -> list[np.ndarray]:
        """The arrays of a row, in the dtypes of the last row.

        Raises:
            ValueError: The row has others, or another structure.
        """
        parts = [_array(part) for part in tf.nest.flatten(row)]
        if len(parts) != len(self._like) or not all(
            part.shape == like.shape
            and np.can_cast(part.dtype, like.dtype, "same_kind")
            and (like.dtype != object or part.dtype.kind in "OSU")
            for part, like in zip(parts, self._like, strict=True)
        ):
            raise ValueError(
                f"All rows must have the structure, shapes and dtypes of the last one. Received: row {index}, "
                f"{checks.shown(row)}. (Grain's filtered rows are None: filter before.)"
            )
        return [
            _cast(index, part, like.dtype) for part, like in zip(parts, self._like, strict=True)
        ]


def _array(part: Any) -> np.ndarray:
    # NumPy's own texts and bytes lose zeros at the end.
    return np.array(part, object) if isinstance(part, (bytes, str)) else np.asarray(part)


def _cast(index: int, part: np.ndarray, dtype: np.dtype) -> np.ndarray:
    found = part.astype(dtype, copy=False)
    if dtype.kind in "iu" and (found != part).any():
        raise ValueError(
            f"Integers must fit the dtype of the last row, {dtype}. Received: {checks.shown(part)} in row "
            f"{index}. Make them int64: `transform` may return `np.asarray(number, np.int64)`."
        )
    return found
