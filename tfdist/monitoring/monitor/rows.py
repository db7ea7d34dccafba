"""The numbers that the graph of a step has noted, and where it leaves them until they are read."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdist.step_clock import Cell, Column

__all__ = ["Row", "RowBuffer"]

#: How many rows a graph keeps until they are read.
_CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class Row:
    """What was noted of one step on this rank."""

    columns: tuple[Column, ...]
    values: np.ndarray

    def all_of(self, kind: str) -> list[float]:
        """The numbers of a kind, in the order in which the graph was made."""
        pairs = zip(self.columns, self.values, strict=True)
        return [float(value) for column, value in pairs if column.kind == kind]

    def first(self, kind: str, default: float = float("nan")) -> float:
        """The first number of a kind."""
        found = self.all_of(kind)
        return found[0] if found else default


class RowBuffer:
    """Where a graph of the training step leaves its rows; the newest 64 are kept."""

    def __init__(self, columns: tuple[Column, ...]):
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
