"""Which numbers of a row belong to each collective of a step."""

from __future__ import annotations

import dataclasses
import functools

from tfdist.backend.clock.rows import Columns
from tfdist.backend.clock.stamps import Column
from tfdist.utils.places import places_by


@dataclasses.dataclass(frozen=True)
class CallPlaces:
    """The indices of the numbers of a collective in a row.

    Attributes:
        column: The description of the collective.
        begin: The index of the stamp of its begin.
        end: The index of the stamp of its end.
        size: The index of its bytes; None if the column has them.
    """

    column: Column
    begin: int
    end: int
    size: int | None


class CallColumns(Columns):
    """The columns of a monitored step."""

    @functools.cached_property
    def calls(self) -> list[CallPlaces]:
        """The collectives, in the order of their begins in the graph."""
        # Eagerly, several collectives of a step may have the same name: they end in the order of their
        # begins.
        waiting = places_by((column.kind, column.name) for column in self)
        found = []
        for place in self.places.get("call", ()):
            column = self[place]
            end = waiting["done", column.name].pop(0)
            size = waiting["size", column.name].pop(0) if column.size is None else None
            found.append(CallPlaces(column, place, end, size))
        return found
