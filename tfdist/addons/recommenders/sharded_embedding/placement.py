"""The placement of tables on ranks, chosen by size, and a report of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tabulate

from tfdist.addons.recommenders.sharded_embedding.config import TableConfig
from tfdist.collectives import Group
from tfdist.sharding.parts import Slice


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of a table on the ranks of a group.

    Attributes:
        kind: "rows", "columns" or "table".
        part: This rank's part. None where one rank has everything.
        owner: The place in the group of the rank that has the whole table, for "table".
    """

    kind: str
    part: Slice | None
    owner: int = 0

    def entries_of(self, rank: int, table: TableConfig) -> int:
        """The number of entries of the table on the rank at a place of the group."""
        rows, width = table.shape
        if self.part is None:
            return rows * width
        size = self.part.size_of(rank)
        return rows * size if self.part.dim else size * width


def place_tables(tables: Sequence[TableConfig], group: Group | None) -> list[Placement]:
    """Chooses the placement of tables.

    A table with the placement "auto" is placed whole on one rank if it is at most half of a rank's share
    of all tables; the largest come first, each on the rank with the fewest entries. Larger ones are split
    by rows, or by columns if they have fewer rows than there are ranks.

    Args:
        tables: The tables.
        group: The ranks of the tables; None for one.
    """
    if group is None:
        return [Placement("table", None) for _ in tables]
    sizes = [table.vocabulary_size * table.embedding_dim for table in tables]
    fair = sum(sizes) / group.size
    kinds = [_kind(table, size, fair, group) for table, size in zip(tables, sizes, strict=True)]
    held = [0] * group.size
    found: dict[int, Placement] = {}
    for place in sorted(range(len(tables)), key=lambda place: -sizes[place]):
        table, kind = tables[place], kinds[place]
        if kind == "table":
            owner = held.index(min(held))
            whole = tuple(
                table.vocabulary_size if rank == owner else 0 for rank in range(group.size)
            )
            found[place] = Placement(kind, Slice(group, 0, table.shape, whole), owner)
        else:
            found[place] = Placement(kind, Slice(group, int(kind == "columns"), table.shape))
        for rank in range(group.size):
            held[rank] += found[place].entries_of(rank, table)
    return [found[place] for place in range(len(tables))]


def _kind(table: TableConfig, size: int, fair: float, group: Group) -> str:
    if table.placement != "auto":
        return table.placement
    if size <= fair / 2:
        return "table"
    return "rows" if table.vocabulary_size >= group.size else "columns"


def placement_report(
    tables: Sequence[TableConfig],
    placements: Sequence[Placement],
    group: Group | None,
    itemsize: int,
) -> str:
    """A report: the placement of each embedding table, its MiB, and the MiB on each rank.

    Args:
        tables: The tables.
        placements: Their placements.
        group: The ranks of the tables; None for one.
        itemsize: The bytes of an entry.
    """
    ranks = range(1 if group is None else group.size)
    rows: list[tuple] = []
    totals = [0] * len(ranks)
    for table, placement in zip(tables, placements, strict=True):
        held = [placement.entries_of(rank, table) * itemsize for rank in ranks]
        totals = [total + own for total, own in zip(totals, held, strict=True)]
        lies = {
            "rows": "rows, all ranks",
            "columns": "columns, all ranks",
            "table": f"whole, rank {placement.owner if group is None else group.ranks[placement.owner]}",
        }[placement.kind]
        rows.append((table.name, *table.shape, lies, sum(held), max(held)))
    rows.append(("all", "", "", "", sum(totals), max(totals)))
    mib = [(*row[:4], *(f"{size / 2**20:.3f}" for size in row[4:])) for row in rows]
    titles = ("table", "rows", "width", "placement", "MiB", "MiB on the fullest rank")
    sides = ("left", "right", "right", "left", "right", "right")
    shown = tabulate.tabulate(
        mib, titles, disable_numparse=True, colalign=sides, headersalign=sides
    )
    each = ", ".join(f"{total / 2**20:.3f}" for total in totals)
    return f"{shown}\nMiB by rank: {each}"
