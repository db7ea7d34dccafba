"""The numbers that the graph of a step has noted, and where it leaves them until they are read."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.backend.clock.stamps import Cell, Column

#: How many rows a graph keeps until they are read.
_CAPACITY = 64


@dataclasses.dataclass(frozen=True)
class CallPlaces:
    """Where the numbers of a collective are in a row.

    Attributes:
        column: What the collective is.
        begin: Of the stamp of its begin.
        end: Of that of its end.
        size: Of its bytes; None where the column knows them.
    """

    column: Column
    begin: int
    end: int
    size: int | None

    def bytes_in(self, numbers: Sequence[float]) -> float:
        """The bytes of the collective, in a row."""
        return float(self.column.size or 0) if self.size is None else numbers[self.size]


class Columns(tuple[Column, ...]):
    """What the numbers of a row are. Where each is gets found once, for rows of all steps."""

    @functools.cached_property
    def places(self) -> dict[str, list[int]]:
        """By kind where its numbers are, in the order in which the graph was made."""
        found: dict[str, list[int]] = {}
        for place, column in enumerate(self):
            found.setdefault(column.kind, []).append(place)
        return found

    @functools.cached_property
    def calls(self) -> list[CallPlaces]:
        """The collectives, in the order in which they begin in the graph."""
        # Eagerly, several collectives of a step may have one name: they end in the order of their begins.
        waiting: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
        for place, column in enumerate(self):
            waiting[column.kind, column.name].append(place)
        found = []
        for place in self.places.get("call", ()):
            column = self[place]
            end = waiting["done", column.name].pop(0)
            size = waiting["size", column.name].pop(0) if column.size is None else None
            found.append(CallPlaces(column, place, end, size))
        return found


@dataclasses.dataclass(frozen=True)
class Row:
    """What was noted of one step on this rank."""

    columns: Columns
    values: np.ndarray

    @functools.cached_property
    def numbers(self) -> list[float]:
        """The values."""
        return self.values.tolist()

    def all_of(self, kind: str) -> list[float]:
        """The numbers of a kind, in the order in which the graph was made."""
        return [self.numbers[place] for place in self.columns.places.get(kind, ())]

    def first(self, kind: str, default: float = float("nan")) -> float:
        """The first number of a kind."""
        found = self.columns.places.get(kind)
        return self.numbers[found[0]] if found else default


class RowBuffer:
    """Where a graph of the training step leaves its rows; the newest 64 are kept."""

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
