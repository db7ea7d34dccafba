"""The numbers that the graph of a step has recorded, and the buffer that stores them until they are read."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from tfdist.backend.clock.stamps import Cell, Column
from tfdist.utils.places import places_by

#: The number of rows that a graph stores until they are read.
_CAPACITY = 64


class Columns(tuple[Column, ...]):
    """The meaning of the numbers of a row. Their indices are computed once for the rows of all steps."""

    @functools.cached_property
    def places(self) -> dict[str, list[int]]:
        """The indices of the numbers of each kind, in the order of the graph."""
        return places_by(column.kind for column in self)

    @functools.cached_property
    def calls(self) -> list[tuple[int, int, int | None]]:
        """The indices of each collective's begin, end and bytes, in the order of the begins in the graph.

        The index of the begin is that of the column. None for bytes that the column has.
        """
        # Eagerly, several collectives of a step may have the same name: they end in the order of their
        # begins.
        waiting = places_by((column.kind, column.name) for column in self)
        found = []
        for place in self.places.get("call", ()):
            name, size = self[place].name, self[place].size
            end = waiting["done", name].pop(0)
            found.append((place, end, waiting["size", name].pop(0) if size is None else None))
        return found


@dataclasses.dataclass(frozen=True)
class Row:
    """The record of one step on this rank."""

    columns: Columns
    values: np.ndarray

    @functools.cached_property
    def numbers(self) -> list[float]:
        """The values."""
        return self.values.tolist()

    def all_of(self, kind: str) -> list[float]:
        """The numbers of a kind, in the order of the graph."""
        return [self.numbers[place] for place in self.columns.places.get(kind, ())]

    def first(self, kind: str, default: float = float("nan")) -> float:
        """The first number of a kind."""
        return next(iter(self.all_of(kind)), default)


class RowBuffer:
    """Stores the newest 64 rows of a graph of the training step."""

    def __init__(self, columns: Columns):
        self.columns = columns
        self._rows = Cell(shape=(_CAPACITY, len(columns)))
        self._count = Cell(0, dtype=tf.int64)
        self._read = 0

    def write(self, row: tf.Tensor) -> None:
        """Adds a row, in the graph."""
        with tf.device("/CPU:0"):
            count = self._count.read()
            tf.raw_ops.ResourceScatterNdUpdate(
                ref=self._rows.handle, indices=[[count % _CAPACITY]], updates=row[None]
            )
            self._count.write(count + 1)

    def take(self) -> list[Row]:
        """The rows since the last call, the oldest first."""
        count = int(self._count.read())
        if count == self._read:
            return []
        rows = self._rows.read().numpy()
        first = max(self._read, count - _CAPACITY)
        self._read = count
        return [Row(self.columns, rows[place % _CAPACITY]) for place in range(first, count)]
